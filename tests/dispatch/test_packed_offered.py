"""Packed calls by the library that a record prefers: fakes with their signatures on a pretended GPU, forward, training and frozen."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import db_samples as samples
import pytest
import torch
from test_packed_providers import libraries, packed, varlen

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch import devices
from flashtune.core.records import plans
from flashtune.core.records.plans import Entry, Served
from flashtune.core.records.results import Baseline, Outcome, SearchResult
from flashtune.core.system.errors import InputError
from flashtune.dispatch.call.inspection import GRADIENT
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of
from flashtune.dispatch.rows import packed as kernels
from flashtune.dispatch.rows import run
from flashtune.dispatch.rows.kernel import place_of
from flashtune.dispatch.rows.libraries import PACKED
from flashtune.dispatch.state.context import Memo
from flashtune.dispatch.state.frozen import versions
from flashtune.templates import families

__all__ = ["libraries", "varlen"]
H200 = find_target("h200")


@pytest.fixture
def on_h200(varlen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """CPU tensors are served as on an H200 without kernels."""
    monkeypatch.setattr(Memo, "surroundings", lambda memo, device, of: (H200, families(), memo.pool(of.key("h200"), H200)))
    monkeypatch.setattr(run, "torch_only", lambda given: GRADIENT if torch.is_grad_enabled() and given.query.requires_grad else None)
    monkeypatch.setattr(kernels, "_loaded", lambda *_: iter(()))
    dispatch.reload()
    yield varlen
    monkeypatch.undo()
    dispatch.reload()


def problem(leaves: list[torch.Tensor], others: list[Any], direction: Any, *, causal: bool = False, exact: bool = True) -> Problem:
    """The problem of a call."""
    numbers = Numbers(*others[2:], 0.25, -1, 0 if causal else -1, True, 0.0, 0.0, tf32=False, deterministic=False)
    found = problem_of(Packed(*(x.detach() for x in leaves), *others[:2]), numbers, direction, exact=exact)
    assert found is not None
    return found


def measured(folder: Path, of: Problem, us: float) -> Path:
    """A database in which fa4 took so long, a kernel 100 us, and PyTorch 200."""
    variant = Variant(template="fa4", spec=of.spec(), config=Config.of()).id
    timed = Outcome.of_provider("fa4", variant, samples.times(us))
    kernel = replace(samples.outcome("ab" * 8, 100.0), call_us=100.0, finalist=True, rank=1)
    baseline = Baseline(backend="flash", measurement=samples.times(200.0), call_us=200.0)
    result = SearchResult(gpu="h200", problem=of, outcomes=(kernel, timed), provenance=samples.PROVENANCE, baseline=baseline)
    return samples.write(folder / "own.sqlite", (result,))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_fastest_library_serves_calls_without_an_lse(direction: str, tmp_path: Path, on_h200: list[dict[str, Any]]) -> None:
    leaves, others = packed()
    words = {"enable_gqa": True, "scale": 0.25, "is_causal": True}
    with dispatch.use(measured(tmp_path, problem(leaves, others, direction, causal=True), 50.0), alone=True):
        with torch.set_grad_enabled(direction == "bwd"):
            said = dispatch.explain_varlen(*leaves, *others, **words)
            assert (said.kind, said.provider) == ("provider", "fa4") and "took the least time" in said.reason
            assert not on_h200
            out = dispatch.attention_varlen(*leaves, *others, **words)
            assert on_h200
            on_h200.clear()
            # With an LSE, with dropout, or for what it lacks it doesn't.
            whole, _ = dispatch.attention_varlen(*leaves, *others, return_lse=True, **words)
            dispatch.attention_varlen(*leaves, *others, dropout_p=0.5, seed=1, **words)
            dispatch.attention_varlen(*leaves, *others, alibi_slopes=torch.ones(4), **words)
            assert not on_h200 and dispatch.explain_varlen(*leaves, *others, return_lse=True, **words).kind == "framework"
        torch.testing.assert_close(out, whole)
        if direction == "bwd":
            given = torch.autograd.grad(out.sum(), leaves)
            torch.testing.assert_close(given, torch.autograd.grad(whole.sum(), leaves))
        with torch.set_grad_enabled(direction != "bwd"):
            on_h200.clear()
            dispatch.attention_varlen(*leaves, *others, **words)
            assert not on_h200, "the record is of the other direction"


def test_a_slower_library_or_one_that_fails_leaves_the_call_to_others(
    tmp_path: Path, on_h200: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves, others = packed()
    of = problem(leaves, others, "fwd")
    with torch.no_grad(), dispatch.use(measured(tmp_path, of, 99.9), alone=True):
        dispatch.attention_varlen(*leaves, *others, enable_gqa=True, scale=0.25)
        assert not on_h200

    def fails(*_: Any, **__: Any) -> Any:
        tries.append(1)
        raise RuntimeError("no kernel image")

    tries: list[int] = []
    monkeypatch.setattr(PACKED["fa4"], "run", fails)
    (tmp_path / "own.sqlite").unlink()
    with torch.no_grad(), dispatch.use(measured(tmp_path, of, 50.0), alone=True):
        call = lambda: dispatch.attention_varlen(*leaves, *others, enable_gqa=True, scale=0.25)  # noqa: E731
        with pytest.warns(RuntimeWarning, match="fa4 .* failed on cpu and is skipped from now on: RuntimeError: no kernel image"):
            out = call()
        torch.testing.assert_close(call(), out)
        assert len(tries) == 1


def test_a_plan_keeps_the_library(tmp_path: Path, on_h200: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, others = packed()
    call = lambda: dispatch.attention_varlen(*leaves, *others, enable_gqa=True, scale=0.25)  # noqa: E731
    with torch.no_grad():
        with dispatch.use(measured(tmp_path, problem(leaves, others, "fwd"), 50.0), alone=True):
            out = call()
            digest = dispatch.freeze(tmp_path / "plan.json")
        on_h200.clear()
        monkeypatch.setattr(devices, "INTERPRETING", True)
        with dispatch.use(plan=tmp_path / "plan.json") as plan:
            assert plan.digest == digest
            torch.testing.assert_close(call(), out, rtol=0, atol=0)
            assert on_h200
            with pytest.raises(InputError, match=r"can't run here \(no kernel of it takes these tensors\)"):
                dispatch.attention_varlen(*leaves, *others, enable_gqa=True, scale=0.25, return_lse=True)
            with pytest.raises(InputError, match=r"has no call like packed fwd .* used keys\) on"):
                dispatch.attention_varlen(*leaves, *others, enable_gqa=True, scale=0.25, seqused_k=torch.tensor([3, 0, 9]))
            monkeypatch.setattr(PACKED["fa4"], "missing", lambda packed: "it isn't installed: pip install flash-attn-4")
            with pytest.raises(InputError, match=r"^what the plan .* can't run here .*: freeze it anew, or run without it$"):
                call()


@pytest.mark.parametrize("name", ["cudnn", "flex"])
def test_a_plan_may_name_no_library_that_takes_no_packed_sequences(name: str, tmp_path: Path, on_h200: list[dict[str, Any]]) -> None:
    leaves, others = packed()
    entry = Entry(place_of(Packed(*leaves, *others[:2]), problem(leaves, others, "fwd", exact=False)), (Served(provider=name),))
    plans.write(tmp_path / "plan.json", versions([entry]), [entry])
    with dispatch.use(plan=tmp_path / "plan.json"), torch.no_grad(), pytest.raises(InputError, match=r"can't run here \(it doesn't"):
        dispatch.attention_varlen(*leaves, *others, enable_gqa=True, scale=0.25)
