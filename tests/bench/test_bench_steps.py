"""The measured half, run on the CPU with a clock of the wall's: what is timed, fitted, shared out and compared."""

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.bench.accounting import at_length
from flashtune.bench.profiling import Profile
from flashtune.bench.report import KINDS, parts
from flashtune.bench.steps import FITTED_POINTS, Bench, averaging, eager, exponent, measure, scaling_grid
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.lengths import Lengths
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Measurement
from flashtune.core.system.errors import EnvironmentProblem


class OnTheCpu(Bench):
    """Times each callable once; what counts here is that everything runs."""

    def __init__(self, free_bytes: int) -> None:
        self.device, self.name, self._free = torch.device("cpu"), "a CPU", free_bytes

    def free_bytes(self) -> int:
        return self._free

    def race(self, runs: Mapping[str, Callable[[], object]], *, budget_s: float = 0.0) -> dict[str, Measurement]:
        found = {}
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            found[name] = Measurement.of([(time.perf_counter() - start) * 1e6])
        return found


def small(n: int = 96, window: int = 16, rank: int = 12, problem: Problem | None = None, target: str = "l4") -> Profile:
    problem = problem or Problem(batch=1, heads=2, kv_heads=2, n_q=n, n_kv=n, d=32, d_v=32, dtype="fp32")
    return Profile(problem=problem, target=find_target(target), chosen_by="name", elementwise="fused", window=window, rank=rank)


def measured_with(free_bytes: int, monkeypatch: pytest.MonkeyPatch, found: Profile | None = None) -> dict[str, Any]:
    monkeypatch.setattr("flashtune.bench.steps.REACH_N", 384)
    return measure(found or small(), OnTheCpu(free_bytes))


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows if row.get("time_us", 1) is not None]


def errors_of(found: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["relative_error"] for row in found["strategies"]}


def text_of(found: dict[str, Any]) -> str:
    """All words of a report."""
    return "\n".join(part if isinstance(part, str) else f"{part.title} {part.columns} {part.rows} {part.note}" for part in parts(found))


def test_everything_that_was_promised_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(json.dumps(measured_with(1 << 30, monkeypatch), allow_nan=False))
    measured = found["measured"]
    assert names(measured["steps"]) == ["qk", "scale_mask", "softmax", "dropout", "pv"]
    assert math.fsum(step["share"] for step in measured["steps"]) == pytest.approx(1)
    assert names(measured["attention"]) == ["eager", "framework", "tuned"]
    assert names(measured["scaling"]) == ["eager", "framework", "tuned", "projections"]
    assert names(found["strategies"]) == ["standard", "fused", "window", "low_rank"]
    assert set(measured["layer"]["attention"]) == {"eager", "framework", "tuned"}
    assert measured["skipped"] == [] and measured["served_by"] and found["not_measured"] is None
    text = text_of(found)
    for words in ("Measured on a CPU", *KINDS.values(), "exponent", "One transformer layer of width 64", "measured us"):
        assert words in text
    assert "Nothing was measured" not in text


def test_attentions_share_of_a_layer_counts_projections_and_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = measured_with(1 << 30, monkeypatch)["measured"]["layer"]
    for one in layer["attention"].values():
        assert one["share"] == pytest.approx(one["time_us"] / (one["time_us"] + layer["projections_us"] + layer["mlp_us"]))


def test_exact_strategies_agree_with_the_oracle_and_approximations_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = errors_of(measured_with(1 << 30, monkeypatch))
    assert errors["standard"] < 1e-5 and errors["fused"] < 1e-5
    assert errors["window"] > 1e-2 and errors["low_rank"] > 1e-2


def test_a_window_and_a_rank_that_leave_nothing_out_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = errors_of(measured_with(1 << 30, monkeypatch, small(n=48, window=47, rank=48)))
    assert errors["window"] < 1e-5 and errors["low_rank"] < 1e-5


def test_what_does_not_fit_into_memory_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_with(400_000, monkeypatch)
    assert found["measured"]["steps"] == []
    assert names(found["measured"]["attention"]) == ["eager", "framework", "tuned"]
    assert names(found["strategies"]) == ["standard", "fused", "window", "low_rank"]
    assert any("steps of the standard pipeline" in sentence for sentence in found["measured"]["skipped"])
    tiny = measured_with(1000, monkeypatch)
    measured = tiny["measured"]
    assert names(measured["attention"]) == ["framework", "tuned"]
    assert names(tiny["strategies"]) == ["fused", "window", "low_rank"]
    assert measured["layer"] is None and measured["scaling"] == []
    assert len(measured["skipped"]) >= 5 and all("memory" in sentence for sentence in measured["skipped"])
    assert "Left out: eager attention: S doesn't fit into the GPU's memory." in text_of(tiny)


def test_a_gpu_that_runs_out_of_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("pages of text")

    monkeypatch.setattr("flashtune.dispatch.api.attention", full)
    with pytest.raises(EnvironmentProblem, match="a CPU ran out of memory while measuring: give a smaller --n, --b or --h"):
        measured_with(1 << 30, monkeypatch)


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
    assert max(scaling_grid(small(problem=problem))) == 16384


@given(st.floats(0.2, 3), st.floats(1e-6, 1e3), st.lists(st.integers(5, 16), min_size=FITTED_POINTS, max_size=6, unique=True))
def test_the_fit_finds_the_exponent_of_a_power_law(power: float, factor: float, sizes: list[int]) -> None:
    assert exponent([(2**size, factor * (2**size) ** power) for size in sizes]) == pytest.approx(power, abs=1e-6)


def test_the_exponent_is_fitted_to_the_largest_n_alone() -> None:
    flat_then_quadratic = [(n, max(100.0, n * n / 1e4)) for n in (64, 128, 256, 2048, 4096, 8192)]
    assert exponent(flat_then_quadratic) == pytest.approx(2)
    assert exponent(flat_then_quadratic[-FITTED_POINTS + 1 :]) is None


@pytest.mark.parametrize(("n_q", "kv_heads", "causal"), [(96, 2, True), (96, 1, False), (1, 1, True), (4, 1, True), (1, 2, False)])
def test_causal_shared_heads_and_decoding_are_measured_and_exact(
    n_q: int, kv_heads: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = Features(causal=causal, alignment="top_left" if n_q == 96 else "bottom_right")
    problem = Problem(batch=1, heads=2, kv_heads=kv_heads, n_q=n_q, n_kv=96, d=32, d_v=32, dtype="fp32", features=features)
    found = measured_with(1 << 30, monkeypatch, small(problem=problem))
    errors, measured = errors_of(found), found["measured"]
    assert errors["standard"] < 1e-5 and errors["fused"] < 1e-5 and errors["window"] > 0.01
    assert ("low_rank" in errors) is not causal
    assert names(measured["attention"]) == ["eager", "framework", "tuned"] and measured["layer"] is not None
    assert all(point["n"] >= n_q for series in measured["scaling"] for point in series["points"])


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_are_measured_whole_and_exact(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(
        batch=3, heads=2, kv_heads=1, n_q=96, n_kv=96, d=32, d_v=32, dtype="fp32", features=Features(causal=causal, packed=True),
        lengths=Lengths.of("one_long", 3, 3 * 96),
    )  # fmt: skip
    found = measured_with(1 << 30, monkeypatch, small(problem=problem))
    errors, measured = errors_of(found), found["measured"]
    assert errors["fused"] < 1e-5 and errors["window"] > 0.01 and errors["standard"] is None and "low_rank" not in errors
    assert measured["steps"] == [] and names(measured["attention"]) == ["framework", "tuned"]
    assert names(measured["scaling"]) == ["framework", "tuned", "projections"] and len(measured["scaling"][0]["points"]) == 3
    assert set(measured["layer"]["attention"]) == {"framework", "tuned"}
    assert measured["skipped"] == ["the standard pipeline and its steps: packed sequences would have one each"]
    text = text_of(found)
    assert "packed one_long with N at most 144" in text and "a call of its own" in measured["served_by"]


def test_longer_packed_sequences_keep_their_law() -> None:
    problem = Problem(
        batch=4, heads=2, kv_heads=2, n_q=64, n_kv=64, d=32, d_v=32, dtype="fp32", features=Features(packed=True),
        lengths=Lengths.of("lognormal", 4, 4 * 64),
    )  # fmt: skip
    longer = at_length(problem, 256)
    assert longer.lengths is not None and problem.lengths is not None
    assert (longer.lengths.law, longer.lengths.longest) == ("lognormal", 4 * problem.lengths.longest)
    assert sum(n for n, _ in longer.sequences()) == 4 * 256
