"""Between near-equal choices the one whose machine code is at hand serves, so that no call waits for a compiler without need."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flashtune import dispatch
from flashtune.core import shipped_kernels
from flashtune.core.problem import Features, Problem
from flashtune.core.target import find_target
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch.policy import Choice, Kind, Refusal, rank
from flashtune.dispatch.policy.compiled_first import LITTLE_BEHIND, NEAR_EQUAL, compiled_first
from flashtune.dispatch.policy.losses import Estimate, unaligned
from flashtune.dispatch.resolve import choosing
from flashtune.dispatch.resolve.memo import Memo
from flashtune.templates import families, family, rendering

H200 = find_target("h200")
PLAIN = Problem(batch=4, heads=16, kv_heads=4, n_q=512, n_kv=512, d=128, d_v=128, dtype="bf16")
WITH_ROWS = {
    "mask": Features(mask="bool"),
    "bias": Features(mask="bias"),
    "dropout": Features(causal=True, dropout=True),
    "softcap": Features(causal=True, softcap=True),
    "alibi": Features(causal=True, alibi=True),
}
"""Features that the shipped rows have at 4096 keys alone, with machine code."""


@pytest.fixture(autouse=True)
def shipped_rows_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dispatch.reload(alone=True)
    yield
    dispatch.reload()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("feature", WITH_ROWS)
def test_a_feature_that_ships_compiled_is_served_compiled_at_a_few_hundred_keys(feature: str, d: int) -> None:
    problem = replace(PLAIN, d=d, d_v=d, features=WITH_ROWS[feature])
    found = dispatch.explain_problem(problem, "h200")
    assert shipped_kernels.shipped_index(shipped_kernels.PACKAGE).find(str(found.variant_id)) is not None
    assert "Triton compiles it" not in found.reason


@pytest.mark.parametrize("d", [40, 96, 160, 192])
@pytest.mark.parametrize("feature", ["plain", "causal"])
def test_rows_of_bf16_serve_fp16_by_machine_code_of_its_own(feature: str, d: int) -> None:
    features = {"plain": Features(), "causal": Features(causal=True), **WITH_ROWS}[feature]
    problem = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=d, d_v=d, dtype="fp16", features=features)
    found = dispatch.explain_problem(problem, "h200")
    assert found.record_key is not None and found.record_key.dtype == "bf16"
    manifest = shipped_kernels.shipped_manifest(shipped_kernels.PACKAGE, str(found.variant_id), "90")
    assert manifest is not None and "Triton compiles it" not in found.reason
    assert {one.element for binary in manifest.binaries for one in binary.parameters if one.kind == "tensor_map"} == {"fp16"}


def test_what_has_no_machine_code_says_so() -> None:
    problem = replace(PLAIN, d=104, d_v=104)
    found = dispatch.explain_problem(problem, "h200")
    assert found.kind == "stand_in" and "there is no machine code of it, so Triton compiles it at the first call" in found.reason


def choice(name: str, loss: float | None, kind: Kind = "stand_in") -> Choice:
    estimate = None if loss is None else Estimate(median=loss, worst=2 * loss)
    made = None if kind == "framework" else family("flash_fwd_hopper")
    config = None if made is None else made.default(PLAIN.spec(), H200)
    return Choice(kind=kind, spec=PLAIN.spec(), note=name, family=made, config=config, estimate=estimate)


def order(*choices: Choice | Refusal, ready: str) -> list[str]:
    found = compiled_first(choices, lambda one: one.note in ready.split())
    return [one.reason if isinstance(one, Refusal) else one.note.split(";")[0] for one in found]


A, B, C, FRAMEWORK = choice("a", 0.05), choice("b", 0.06), choice("c", 0.1), choice("torch", None, "framework")
FAR = choice("far", 0.06 + NEAR_EQUAL)


def test_the_first_with_machine_code_goes_before_those_without_and_all_others_stay_in_order() -> None:
    assert order(A, B, C, FRAMEWORK, ready="") == ["a", "b", "c", "torch"]
    assert order(A, B, C, FRAMEWORK, ready="a c") == ["a", "c", "b", "torch"]
    assert order(A, B, C, FRAMEWORK, ready="a b") == ["a", "b", "c", "torch"]
    assert order(A, B, C, FRAMEWORK, ready="b c") == ["b", "a", "c", "torch"]
    assert order(A, Refusal(reason="no"), B, C, FRAMEWORK, ready="c") == ["c", "a", "no", "b", "torch"]


def test_what_the_cost_model_expects_to_be_slower_stays_behind_what_has_to_be_compiled() -> None:
    first, slow, near = (one._replace(behind=behind) for one, behind in ((A, 0.01), (B, 0.02 + LITTLE_BEHIND), (C, 0.02)))
    assert order(first, slow, near, FRAMEWORK, ready="b c") == ["c", "a", "b", "torch"]
    assert order(first, slow, FRAMEWORK, ready="b") == ["a", "b", "torch"]
    # Nothing is said of what wasn't compared, which may be as bad; or of any.
    assert order(first, C, FRAMEWORK, ready="c") == ["a", "c", "torch"]
    assert order(A, slow, FRAMEWORK, ready="b") == ["b", "a", "torch"]


def test_a_short_call_is_not_served_by_the_tiles_of_a_long_one_for_their_machine_code() -> None:
    features = Features(causal=True, window=(300, 0))
    short = Problem(batch=56, heads=40, kv_heads=40, n_q=623, n_kv=623, d=40, d_v=40, dtype="bf16", features=features)
    found = dispatch.explain_problem(short, "h200")
    assert found.config is not None and found.config["BLOCK_M"] <= 128, found.reason


def test_what_is_estimated_to_lose_far_more_what_is_of_this_key_and_torch_keep_their_places() -> None:
    assert order(A, FAR, FRAMEWORK, ready="far") == ["a", "far", "torch"]
    assert order(choice("exact", None, "exact"), B, FRAMEWORK, ready="b") == ["exact", "b", "torch"]
    assert order(A, FRAMEWORK, B, ready="b") == ["a", "torch", "b"]
    assert order(choice("default", None, "default"), B, ready="b") == ["default", "b"]


def test_nothing_is_rendered_to_be_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja takes longer than all else of a first call."""
    monkeypatch.setenv("FLASHTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(rendering, "render", lambda *_: pytest.fail("rendered"))
    spec = replace(PLAIN, d=104, d_v=104).spec()
    unshipped = A._replace(spec=spec, config=family("flash_fwd_hopper").default(spec, H200))
    assert not choosing._compiled(Memo(), H200, unshipped)
    (tmp_path / "kernels" / "sm_90a-triton-3.6.0").mkdir(parents=True)
    assert not choosing._compiled(Memo(), H200, unshipped)
    shipped = dispatch.explain_problem(replace(PLAIN, n_q=4096, n_kv=4096), "h200")
    assert shipped_kernels.shipped_index(shipped_kernels.PACKAGE).find(str(shipped.variant_id)) is not None


@pytest.mark.parametrize(("n", "d"), [(5001, 128), (2226, 80)])
def test_machine_code_of_a_bias_that_is_read_otherwise_goes_before_nothing(n: int, d: int) -> None:
    problem = Problem(batch=2, heads=8, kv_heads=8, n_q=n, n_kv=n, d=d, d_v=d, dtype="bf16", features=Features(mask="bias"))
    rows = [row for row in Library.of(shipped_path()).records() if row.key.direction == "fwd"]
    ranking = compiled_first(
        rank(problem, H200, rows, families(), framework_serves=False), lambda one: one.record is not None and not unaligned(one.record.key)
    )
    first = next(one.record for one in ranking if isinstance(one, Choice))
    assert first is not None and unaligned(first.key)


STEPS = {"gpt2": (12, 12, 64), "llama": (16, 4, 128), "qwen3": (16, 8, 128), "gemma2": (8, 4, 256)}
"""Query heads, key heads and head size of models in whose decoding steps of four sequences calls.py times tokens."""


@pytest.mark.parametrize("model", STEPS)
def test_a_models_decoding_steps_are_served_compiled_at_every_length_of_a_short_text(model: str) -> None:
    """Torch builds a plan at each, for 31 to 39 ms (benchmarks/results/2026-11-22-h200-steps/steps.json)."""
    heads, kv_heads, d = STEPS[model]
    for n in (1, 2, 31, 100, 200, 300, 511, 700, 1024):
        problem = Problem(batch=4, heads=heads, kv_heads=kv_heads, n_q=1, n_kv=n, d=d, d_v=d, dtype="bf16")
        found = dispatch.explain_problem(problem, "h200")
        assert found.template == "flash_decode" and "Triton compiles it" not in found.reason, (n, found.reason)
