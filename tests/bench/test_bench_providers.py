"""Other providers are checked as kernels are before they are timed: planted faults of each kind are found."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import wrong_providers
from wrong_providers import WRONG, Raising, plant

from flashtune import dispatch
from flashtune.bench.providers import judged_providers
from flashtune.core.problems.lengths import Lengths
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Fate
from flashtune.dispatch.call.sequences import Numbers, Packed
from flashtune.dispatch.rows.libraries import PACKED
from flashtune.tuner.replies import Judged, Spent
from flashtune.tuner.verify.correctness import Verifier
from flashtune.tuner.verify.inputs import make_inputs

PROBLEM = Problem(batch=1, heads=4, kv_heads=2, n_q=96, n_kv=96, d=16, d_v=16, dtype="fp32", features=Features(causal=True))


def verdicts(problem: Problem = PROBLEM) -> dict[str, Judged]:
    """Verdicts on the providers of this machine."""
    inputs = make_inputs(problem, device="cpu", seed=3)
    verifier = Verifier(problem, device="cpu", seed=3, full_size=inputs, thorough=False)
    found, calls = judged_providers(inputs, verifier, Spent())
    assert all(found[name].fate is Fate.CORRECT for name in calls), "what is wrong is never timed"
    return found


@pytest.mark.parametrize(("fault", "direction"), [*((fault, "fwd") for fault in WRONG), ("head", "bwd"), ("into inputs", "bwd")])
def test_a_fault_of_a_library_is_found_with_its_smallest_case(fault: str, direction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, WRONG[fault])
    found = verdicts(replace(PROBLEM, direction=direction))["fa4"]
    assert found.fate is Fate.CORRECTNESS, found
    said = {"into inputs": "writes into the key", "beyond inputs": "writes into the value"}.get(fault, "off by" if fault == "head" else "")
    assert said in found.reason and found.reason.startswith("n1x77-"), "the smallest case comes first"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_library_that_is_right_is_timed(direction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, wrong_providers.right)
    found = verdicts(replace(PROBLEM, direction=direction))["fa4"]
    assert found.fate is Fate.CORRECT and found.error is not None and found.error <= 1.0 and found.reason == ""
    assert found.versions["torch"] == torch.__version__.partition("+")[0]


def test_wrong_gradients_are_found_though_the_output_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, wrong_providers.gradient)
    assert verdicts()["fa4"].fate is Fate.CORRECT
    found = verdicts(replace(PROBLEM, direction="bwd"))["fa4"]
    assert found.fate is Fate.CORRECTNESS and "gradient" in found.reason


def test_one_percent_of_a_head_is_found_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, wrong_providers.head)
    for dtype in ("bf16", "fp16"):
        assert verdicts(replace(PROBLEM, dtype=dtype))["fa4"].fate is Fate.CORRECTNESS, dtype


def test_a_library_that_raises_in_the_middle_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Raising())
    found = verdicts()["fa4"]
    assert found.fate is Fate.RUNTIME and "internal error 8" in found.reason


def test_cases_that_a_library_refuses_are_left_out_and_a_problem_that_it_refuses_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    library = plant(monkeypatch, wrong_providers.right)
    monkeypatch.setattr(library, "takes", frozenset({"float32 or float64"}))
    found = verdicts()["fa4"]
    assert found.fate is Fate.CORRECT
    monkeypatch.setattr(library, "takes", frozenset())
    found = verdicts()["fa4"]
    assert found.fate is Fate.CONSTRAINT and "float32" in found.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bf16"},
        {"dtype": "fp16", "direction": "bwd"},
        {"features": Features(mask="bias")},
        {"features": Features(mask="bool"), "direction": "bwd"},
        {"features": Features(causal=True, alignment="bottom_right"), "n_q": 5},
    ],
)
def test_pytorchs_own_backends_pass(changes: dict[str, Any]) -> None:
    found = verdicts(replace(PROBLEM, **{"features": Features(causal=True), **changes}))
    assert found and all(one.fate in (Fate.CORRECT, Fate.CONSTRAINT) for one in found.values()), found


@pytest.mark.parametrize(
    ("fault", "alignment", "direction"),
    [("", "bottom_right", "bwd"), ("", "top_left", "fwd"), ("nan", "bottom_right", "fwd"), ("head", "top_left", "bwd")],
)
def test_libraries_of_packed_sequences_are_checked_for_a_search_of_them(
    fault: str, alignment: Any, direction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where lengths are equal, both alignments are one, which every library has."""

    def run(packed: Packed, numbers: Numbers) -> torch.Tensor:
        outs = []
        for (start, stop), (first, end) in zip(pairwise(packed.cu_q.tolist()), pairwise(packed.cu_k.tolist()), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in (packed.query[start:stop], packed.key[first:end], packed.value[first:end]))
            words = {"window": (numbers.left, numbers.right), "causal_alignment": numbers.alignment, "enable_gqa": True}
            outs.append(dispatch.attention(q, k, v, scale=numbers.scale, **words)[0].transpose(0, 1))
        out = torch.cat([*outs, packed.query.new_zeros(len(packed.query) - stop, *packed.query.shape[1:])])
        if fault == "nan":
            out = torch.where(torch.arange(len(out))[:, None, None] == 1, torch.nan, out)
        return out * torch.tensor([1.0, 1.01 if fault == "head" else 1.0, 1.0, 1.0])[:, None]

    plant(monkeypatch, wrong_providers.right)
    library = PACKED["fa4"]
    monkeypatch.setattr(library, "run", run)
    monkeypatch.setattr(library, "missing", lambda packed: None)
    monkeypatch.setattr(library, "takes", library.takes | {"float32 or float64"})
    features, lengths = Features(causal=True, alignment=alignment, packed=True), Lengths.of("uniform", 3, 120)
    packed = Problem(batch=3, heads=4, kv_heads=2, n_q=40, n_kv=40, d=16, d_v=16, dtype="fp32", features=features, lengths=lengths)
    found = verdicts(replace(packed, direction=direction))
    assert set(found) <= {"flash", "fa4", "fa2"}, "others take no packed sequences"
    assert found["fa4"].fate is (Fate.CORRECTNESS if fault else Fate.CORRECT), found["fa4"]
