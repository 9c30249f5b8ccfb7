"""The measured half, run on the CPU with a clock of the wall's: what is timed, fitted, shared out and compared."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.cli.profile_text import render
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.problem import Features, Problem
from flashtune.core.results import Measurement
from flashtune.core.target import find_target
from flashtune.profiler import tables
from flashtune.profiler.measured import Measured
from flashtune.profiler.summary import Profile
from flashtune.profiler.timing import Bench, averaging, eager, measure, scaling_grid


class WallClock:
    """Times each callable once; what counts here is that everything runs."""

    def race(self, runs: Sequence[Callable[[], object]], *, budget_s: float) -> list[Measurement]:
        found = []
        for run in runs:
            start = time.perf_counter()
            run()
            found.append(Measurement.of([(time.perf_counter() - start) * 1e6]))
        return found


def small(n: int = 96, window: int = 16, rank: int = 12) -> Profile:
    problem = Problem(batch=1, heads=2, kv_heads=2, n_q=n, n_kv=n, d=32, d_v=32, dtype="fp32")
    return Profile(
        problem=problem, target=find_target("l4"), chosen_by="name", elementwise="fused", window=window, rank=rank, not_measured=""
    )


def measured_with(free_bytes: int, monkeypatch: pytest.MonkeyPatch, found: Profile | None = None) -> Measured:
    monkeypatch.setattr("flashtune.profiler.timing.REACH_N", 384)
    bench = Bench(device=torch.device("cpu"), clock=WallClock(), free_bytes=lambda: free_bytes, name="a CPU")
    return measure(found or small(), bench)


def test_everything_that_was_promised_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_with(1 << 30, monkeypatch)
    assert [step.name for step in found.steps] == ["qk", "scale_mask", "softmax", "dropout", "pv"]
    assert [kind.name for kind in found.kinds] == ["eager", "framework", "tuned"]
    assert [series.name for series in found.scaling] == ["eager", "framework", "tuned", "projections"]
    assert [run.name for run in found.strategies] == ["standard", "fused", "window", "low_rank"]
    assert found.layer is not None and set(found.layer.attention_us) == {"eager", "framework", "tuned"}
    assert found.skipped == ()
    assert found.served_by


def test_exact_strategies_agree_with_the_oracle_and_approximations_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {run.name: run.relative_error for run in measured_with(1 << 30, monkeypatch).strategies}
    assert errors["standard"] < 1e-5 and errors["fused"] < 1e-5
    assert errors["window"] > 1e-2 and errors["low_rank"] > 1e-2


def test_a_window_and_a_rank_that_leave_nothing_out_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {run.name: run.relative_error for run in measured_with(1 << 30, monkeypatch, small(n=48, window=47, rank=48)).strategies}
    assert errors["window"] < 1e-5 and errors["low_rank"] < 1e-5


def test_what_does_not_fit_into_memory_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_with(400_000, monkeypatch)
    assert found.steps == ()
    assert [kind.name for kind in found.kinds] == ["eager", "framework", "tuned"]
    assert [run.name for run in found.strategies] == ["standard", "fused", "window", "low_rank"]
    assert any("steps of the standard pipeline" in sentence for sentence in found.skipped)
    tiny = measured_with(1000, monkeypatch)
    assert [kind.name for kind in tiny.kinds] == ["framework", "tuned"]
    assert [run.name for run in tiny.strategies] == ["fused", "window", "low_rank"]
    assert tiny.layer is None and tiny.scaling == ()
    assert len(tiny.skipped) >= 5 and all("memory" in sentence for sentence in tiny.skipped)


def test_a_gpu_that_runs_out_of_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("pages of text")

    monkeypatch.setattr("flashtune.dispatch.attention", full)
    with pytest.raises(EnvironmentProblem, match="a CPU ran out of memory while measuring: give a smaller --n, --b or --h"):
        measured_with(1 << 30, monkeypatch)


def test_shares_of_the_steps_add_up_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = measured_with(1 << 30, monkeypatch).as_json()["steps"]
    assert math.fsum(step["share"] for step in steps) == pytest.approx(1)


def test_a_measured_profile_is_shown_in_json_and_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(small(), measured=measured_with(1 << 30, monkeypatch))
    data = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert data["not_measured"] is None
    assert [kind["name"] for kind in data["measured"]["attention"]] == ["eager", "framework", "tuned"]
    assert all(strategy["time_us"] > 0 and strategy["relative_error"] >= 0 for strategy in data["strategies"])
    text = render(found)
    for words in ("Measured on a CPU", *tables.KINDS.values(), "exponent", "One transformer layer of width 64", "measured us"):
        assert words in text
    assert "Nothing was measured" not in text


def test_what_was_left_out_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = render(replace(small(), measured=measured_with(1000, monkeypatch)))
    assert "Left out: eager attention: S doesn't fit into the GPU's memory." in text


def test_the_eager_pipeline_is_torchs_own_attention() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, 40, 24, generator=generator) for _ in range(3))
    torch.testing.assert_close(eager(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.data())
def test_averaging_gives_every_key_a_place_and_every_row_a_mean(n: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, n))
    matrix = averaging(rank, n, torch.empty(0))
    pooled = torch.nn.functional.adaptive_avg_pool1d(torch.eye(n)[None], rank)[0].T
    torch.testing.assert_close(matrix, pooled)
    torch.testing.assert_close(matrix.sum(1), torch.ones(rank))
    assert bool((matrix.sum(0) > 0).all())


@pytest.mark.parametrize("n", [1, 7, 64, 1000, 4096, 65536])
def test_latency_is_measured_around_the_profiled_n(n: int) -> None:
    grid = scaling_grid(small(n=n, rank=1))
    assert n in grid and grid == sorted(set(grid))
    assert all(size >= 64 for size in grid if size != n)
    assert len(grid) >= 3


def test_sizes_that_would_take_too_long_are_not_reached() -> None:
    problem = Problem(batch=8, heads=64, kv_heads=64, n_q=16384, n_kv=16384, d=128, d_v=128, dtype="fp16")
    slow = Profile(problem=problem, target=find_target("l4"), chosen_by="name", elementwise="fused", window=1, rank=1, not_measured="")
    assert max(scaling_grid(slow)) == 16384


@pytest.mark.parametrize(("n_q", "kv_heads", "causal"), [(96, 2, True), (96, 1, False), (1, 1, True), (4, 1, True), (1, 2, False)])
def test_causal_shared_heads_and_decoding_are_measured_and_exact(
    n_q: int, kv_heads: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = Features(causal=causal, alignment="top_left" if n_q == 96 else "bottom_right")
    problem = Problem(batch=1, heads=2, kv_heads=kv_heads, n_q=n_q, n_kv=96, d=32, d_v=32, dtype="fp32", features=features)
    words = {"chosen_by": "name", "elementwise": "fused", "window": 16, "rank": 12, "not_measured": ""}
    found = measured_with(1 << 30, monkeypatch, Profile(problem=problem, target=find_target("l4"), **words))  # type: ignore[arg-type]
    errors = {run.name: run.relative_error for run in found.strategies}
    assert errors["standard"] < 1e-5 and errors["fused"] < 1e-5 and errors["window"] > 0.01
    assert ("low_rank" in errors) is not causal
    assert [kind.name for kind in found.kinds] == ["eager", "framework", "tuned"] and found.layer is not None
    assert all(n >= n_q for series in found.scaling for n, _ in series.points)
