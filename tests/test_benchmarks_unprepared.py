"""benchmarks/unprepared.py, repeats.py and the models' cells without a GPU: what is drawn, searched and raced, and what a cut run tells."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import simulated
from planted import HereAndNow

from flashtune import dispatch
from flashtune.core.problem import Features
from flashtune.core.results import Conditions, Measurement, Provenance
from flashtune.core.target import find_target
from flashtune.dispatch import stand_in
from flashtune.dispatch.policy import torch_has
from flashtune.tuner import evaluation, searching, tasks
from flashtune.tuner.replies import Compiled, Failed, Ready
from flashtune.tuner.study import Study

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import flash_attention_4
import forward
import repeats
import searches
import tune
import unprepared
from forward_cells import AT_ONCE, Cell, cells
from forward_peers import OURS, OWN, Checked, data_of
from forward_report import Row, summary

H200 = find_target("h200")
MADE_BY = Provenance(flashtune="0", torch="0", triton="0")


def drawn(count: int, seed: int = 0) -> list[Cell]:
    return unprepared.drawn(count, seed=seed, gpu="h200", known={row.key for row in searches.shipped()})


def test_what_is_drawn_has_no_row_is_of_every_kind_and_repeats_with_its_seed() -> None:
    cells = drawn(200)
    keys = {cell.problem.key("h200") for cell in cells}
    assert len(keys) == 200 and not keys & {row.key for row in searches.shipped()}
    assert [cell.problem for cell in drawn(40)] == [cell.problem for cell in cells[:40]]
    assert {cell.problem for cell in drawn(40, seed=1)}.isdisjoint(cell.problem for cell in cells)
    problems = [cell.problem for cell in cells]
    assert {(p.d, p.d_v) for p in problems} == set(unprepared.HEAD_SIZES)
    assert {Features(**features) for features in unprepared.FEATURES} <= {
        replace(p.features, alignment="top_left", window=p.features.window) for p in problems
    }
    assert {1, 2, 4, 5, 8} == {p.gqa_ratio for p in problems} and {p.dtype for p in problems} == {"bf16", "fp16"}
    assert {p.n_q == 1 for p in problems} == {False, True} and any(1 < p.n_q < p.n_kv for p in problems)
    assert all(20 <= unprepared.guess_us(p) <= 2000 for p in problems)
    # A row that comes to be takes its shape out of the draw, and no other.
    without = unprepared.drawn(40, seed=0, gpu="h200", known={row.key for row in searches.shipped()} | {cells[0].problem.key("h200")})
    assert [cell.problem for cell in without[:39]] == problems[1:40]


def test_what_is_drawn_is_served_by_what_was_measured_or_by_torch() -> None:
    kinds = set()
    for cell in drawn(40, seed=3):
        found = dispatch.explain_problem(cell.problem, "h200")
        kinds.add(found.kind)
        assert found.source == "measured" or found.kind == "framework", f"{cell.name}: {found.reason}"
        if found.kind == "framework":
            assert torch_has(cell.problem), f"torch has no call for {cell.name}"
        else:
            assert found.estimated_loss is not None and found.estimated_loss < 0.3, f"{cell.name}: {found.reason}"
    assert {"near_n", "stand_in"} <= kinds


def timed(cell: Cell, **us: float) -> Row:
    return Row(cell=cell, checked=Checked(kind="stand_in"), times={name: Measurement.of([time]) for name, time in us.items()})


def test_the_verdict_counts_how_near_ours_comes_to_the_search_and_the_best_peer() -> None:
    one, two, three = drawn(3)
    rows = [
        timed(one, **{OURS: 100.0, OWN: 98.0, "default": 130.0, "fa4": 101.0}),
        timed(two, **{OURS: 100.0, OWN: 80.0, "default": 99.0}),
        timed(three, **{OURS: 100.0, OWN: 101.0}),
    ]
    found = unprepared.verdict(rows)
    assert found["own search"] == {"median": 0.98, "least": 0.8, "from 0.90": 2, "from 0.97": 2, "from 1.00": 1, "cells": 3}
    assert found["best peer"]["cells"] == 2 and found["best peer"]["from 1.00"] == 1
    assert rows[0].best_peer == "fa4", "the search is no peer"
    assert rows[2].best_ratio is None


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs of benchmarks run in this process; what was asked for, in order."""
    asked: list[str] = []

    def in_children(jobs: Sequence[Any], **_: object) -> Iterator[tuple[Any, str]]:
        for task, words in jobs:
            asked.append(task.__name__)
            yield task(*words), ""

    for module in (forward, unprepared, repeats):
        monkeypatch.setattr(module, "in_children", in_children)
    return asked


def check_cell(cell: Cell, device: str, seed: int) -> Checked:
    return Checked(kind="stand_in", template="flash_fwd_hopper")


def time_cell(cell: Cell, device: str, seed: int, seconds: float, own: object = None) -> dict[str, Measurement]:
    names = [OURS, "default"] if own is None else [OURS, OWN, "default"]
    return {name: Measurement.of([100.0 + len(name)]) for name in names}


def compile_first(problem: object, target: object, count: int, seed: int) -> int:
    return count


class Workers(HereAndNow):
    """A GPU and compilers that answer at once."""

    def submit(self, crew: str, task: Callable[..., Any], *arguments: Any, limit_s: float, device: int = 0) -> Any:
        pending = super().submit(crew, task, *arguments, limit_s=limit_s, device=device)
        pending.forget = lambda: None
        return pending

    def preparing(self, problem: Any, target: Any, seed: int, *, device: int) -> Any:
        return None

    def prepared(self, problem: Any, pending: Any) -> Ready:
        return Ready()


class NoWatch:
    """A GPU that nobody watches."""

    def __init__(self, gpu: str) -> None:
        pass

    def __enter__(self) -> "NoWatch":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def between(self, start: float, end: float, own: int) -> Conditions | None:
        return None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Searches measure on a simulated GPU, whose times the text decides."""
    monkeypatch.setattr(searching, "Workers", Workers)
    for name, stand_in_for in (
        ("prepare_device", simulated.ready),
        ("evaluate_candidate", simulated.timed),
        ("race_finalists", simulated.raced),
        ("compile_candidate", simulated.compiled),
    ):
        monkeypatch.setattr(tasks, name, stand_in_for)
    # It draws from a Gaussian process, which takes seconds.
    monkeypatch.setattr(Study, "expected_regret", lambda self: 0.0)
    monkeypatch.setattr(evaluation, "GpuWatch", NoWatch)
    monkeypatch.setattr(evaluation, "gpu_id", str)
    monkeypatch.setenv("FLASHTUNE_TEST_CLOCKS", str(tmp_path))
    monkeypatch.setenv("FLASHTUNE_TEST_DEVICES", "")
    for module in (unprepared, repeats):
        monkeypatch.setattr(module, "provenance", lambda **_: MADE_BY)


WORDS: dict[str, Any] = {"command": "python", "seed": 0, "jobs": 2, "seconds": 0.1}


@pytest.mark.usefixtures("gpu")
def test_each_shape_is_checked_searched_and_raced_with_what_its_search_found(
    here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(unprepared, "check_cell", check_cell)
    monkeypatch.setattr(unprepared, "time_cell", time_cell)
    monkeypatch.setattr(unprepared, "compile_first", compile_first)
    two = drawn(2)
    rows = unprepared.run(two, H200, tmp_path, trials=3, limit_s=9.0, budget_s=math.inf, **WORDS)
    assert here == ["check_cell"] * 2 + ["compile_first"] * 2 + ["time_cell"] * 2
    assert [row.ratio(OWN) for row in rows] == [pytest.approx(110 / 109)] * 2
    kept = json.loads((tmp_path / "unprepared.json").read_text())
    assert [row["over_own"] for row in kept["rows"]] == [pytest.approx(110 / 109)] * 2
    assert {name: found["trials"] for name, found in kept["searches"].items()} == {cell.problem.label(): 3 for cell in two}
    assert (tmp_path / "unprepared.sqlite").exists()


def test_a_run_without_time_says_of_each_shape_that_it_was_left_out(
    here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(unprepared, "check_cell", check_cell)
    monkeypatch.setattr(unprepared, "time_cell", time_cell)
    monkeypatch.setattr(unprepared, "searched", lambda *_, **__: [])
    monkeypatch.setattr(unprepared, "provenance", lambda **_: MADE_BY)
    rows = unprepared.run(drawn(3), H200, tmp_path, trials=3, limit_s=9.0, budget_s=0.0, **WORDS)
    assert [bool(row.times) for row in rows] == [True, False, False], "what was begun is ended"
    assert [row.failed for row in rows[1:]] == [forward.NO_TIME] * 2
    assert json.loads((tmp_path / "unprepared.json").read_text())["rows"][2]["failed"] == forward.NO_TIME


@pytest.mark.usefixtures("gpu", "here")
def test_repeated_searches_begin_without_the_row_of_their_problem_and_their_picks_race(tmp_path: Path) -> None:
    [problem] = repeats.chosen()[:1]
    [row] = repeats.run([problem], H200, tmp_path, times=2, trials=2, budget_s=math.inf, **WORDS)
    assert (row["searches"], row["trials"]) == (2, [2, 2])
    assert set(row["raced_us"]) == set(row["picks"]) and row["failed"] == ""
    kept = json.loads((tmp_path / "repeats.json").read_text())
    assert len(kept["seconds"]) == 2 and kept["rows"] == [row]
    assert "of 2 searches alike" in repeats.said(row)


def test_picks_that_differ_are_told_by_how_much() -> None:
    [problem] = repeats.chosen()[:1]
    row = repeats.row_of(problem, [], {"a": 100.0, "b": 100.4})
    assert row["spread"] == pytest.approx(0.004)
    assert "differ by 0.40% in one race" in repeats.said(row)


def test_candidates_are_compiled_beforehand_the_winners_of_near_rows_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def keep(source: tasks.Source, *_: object) -> Compiled | Failed:
        compiled.append(source.stem)
        return simulated.compiled(source, problem, H200)

    problem = drawn(1)[0].problem
    monkeypatch.setattr(tasks, "compile_candidate", keep)
    assert searches.compile_first(problem, H200, 6, 0) == 6 == len(set(compiled))


def test_models_cells_are_prefill_and_steps_of_every_model_once() -> None:
    found = cells(("models",))
    assert len({cell.name for cell in found}) == len(found) == len({cell.problem for cell in found})
    assert not {cell.problem for cell in cells()} & {cell.problem for cell in found if "llama-3" in cell.case}
    prefill = [cell.problem for cell in found if cell.problem.n_q > 1]
    assert all(p.batch == 1 or p.batch * p.n_q <= AT_ONCE for p in prefill)
    llama = {(cell.problem.n_q, cell.problem.n_kv) for cell in found if cell.case.startswith("llama-3-8b")}
    assert llama == {(512, 512), (2048, 2048), (8192, 8192), (1, 4096)}
    assert {cell.problem.d for cell in found} >= {64, 72, 80, 96, 128, 160, 192, 256}
    rows = [timed(cell, **{OURS: 100.0, "default": 90.0 if cell.problem.n_kv < 512 else 130.0}) for cell in found]
    said = summary(rows, {})
    assert said["models' prefill"]["min"] == pytest.approx(1.3)
    assert said["models' decoding"]["cells"] == sum(cell.problem.n_q == 1 for cell in found)


def test_models_rows_that_lack_come_by_what_they_are_worth() -> None:
    plain = {cell.problem.key("h200") for cell in cells(("plain",))}
    rows = [row for row in searches.shipped() if row.key in plain]
    known = {row.key for row in rows}
    found = tune.wanting(d=[128], records=rows)
    keys = [problem.key("h200") for problem, _ in found]
    assert len(set(keys)) == len(keys) and not set(keys) & known
    worths = [worth for _, worth in found]
    assert worths[0] == max(worths) and worths[-1] == min(worths) >= 0.0
    # What the first may stand in for is worth less after it.
    assert worths[0] >= stand_in.LOSSES["features"].median


def test_flash_attention_4_is_asked_for_what_it_has() -> None:
    def words(cell: Cell) -> dict[str, Any] | None:
        p, n_q = cell.problem, 1 if cell.problem.n_q == 1 else 16
        p = replace(p, batch=1, heads=2 * p.gqa_ratio, kv_heads=2, n_q=n_q, n_kv=16)
        return flash_attention_4.words_of(p, data_of(replace(cell, problem=p), "cpu", 0).inputs.parameters)

    found = {cell.name: words(cell) for cell in cells(("features", "models"), d=[64, 128], n=[4096, 8192])}
    assert found["features mask D=64 N=4096"] is found["features alibi D=64 N=4096"] is found["features dropout D=64 N=4096"] is None
    softcap, window = found["features softcap D=128 N=4096"], found["features window D=128 N=4096"]
    assert softcap == {"causal": True, "softmax_scale": 128**-0.5, "softcap": 30.0}
    assert window == {"causal": True, "softmax_scale": 128**-0.5, "window_size": (1024, 0)}
    sinks = found["models gpt-oss local D=64 N=8192"]
    assert sinks is not None and sinks["learnable_sink"].shape == (16,) and sinks["window_size"] == (127, 0)
    # Its diagonal ends at the last key.
    cell = next(cell for cell in cells(("small",)) if cell.case == "128 rows")
    parameters = data_of(replace(cell, problem=replace(cell.problem, n_q=8, n_kv=16)), "cpu", 0).inputs.parameters
    assert flash_attention_4.words_of(cell.problem, parameters) is not None
    assert flash_attention_4.words_of(replace(cell.problem, features=Features(causal=True)), parameters) is None
