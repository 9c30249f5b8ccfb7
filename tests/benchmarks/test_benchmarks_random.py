"""The case `random_shapes` and the models' cells without a GPU: shapes, searches, races, and runs that are cut short."""

import argparse
import gc
import json
import math
import operator
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import simulated
from children_here import Here

from benchmarks.cases import random_shapes as unprepared
from benchmarks.shared import flash_attention_4, random_shapes, searches
from benchmarks.shared.cells import AT_ONCE, Cell, cells
from benchmarks.shared.children import NO_TIME, Children, Job, in_children
from benchmarks.shared.peers import OURS, OWN, Checked, data_of
from benchmarks.shared.report import Row, summary
from flashtune import dispatch
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Fate, Measurement
from flashtune.dispatch.policy.choose import torch_has
from flashtune.templates import families
from flashtune.tuner.children import tasks
from flashtune.tuner.propose.space import Candidate, SearchSpace, transfer_candidates
from flashtune.tuner.replies import Checked as CheckedCandidate
from flashtune.tuner.replies import Compiled, Failed

H200 = find_target("h200")


def drawn(count: int, seed: int = 0) -> list[Cell]:
    return random_shapes.random_problems(count, seed=seed, gpu="h200", known={row.key for row in searches.shipped()})


def test_what_is_drawn_has_no_row_is_of_every_kind_and_repeats_with_its_seed() -> None:
    cells = drawn(200)
    keys = {cell.problem.key("h200") for cell in cells}
    assert len(keys) == 200 and not keys & {row.key for row in searches.shipped()}
    assert [cell.problem for cell in drawn(40)] == [cell.problem for cell in cells[:40]]
    assert {cell.problem for cell in drawn(40, seed=1)}.isdisjoint(cell.problem for cell in cells)
    problems = [cell.problem for cell in cells]
    assert {(p.d, p.d_v) for p in problems} == set(random_shapes.HEAD_SIZES)
    assert {Features(**features) for features in random_shapes.FEATURES} <= {
        replace(p.features, alignment="top_left", window=p.features.window) for p in problems
    }
    assert {1, 2, 4, 5, 8} == {p.gqa_ratio for p in problems} and {p.dtype for p in problems} == {"bf16", "fp16"}
    assert {p.n_q == 1 for p in problems} == {False, True} and any(1 < p.n_q < p.n_kv for p in problems)
    assert all(20 <= random_shapes.guess_us(p) <= 2000 for p in problems)
    # A row that comes to be takes its shape out of the draw, and no other.
    without = random_shapes.random_problems(
        40, seed=0, gpu="h200", known={row.key for row in searches.shipped()} | {cells[0].problem.key("h200")}
    )
    assert [cell.problem for cell in without[:39]] == problems[1:40]


def test_short_sequences_and_backwards_are_drawn_on_demand() -> None:
    known = {row.key for row in searches.shipped()}
    short = [cell.problem for cell in random_shapes.random_problems(60, seed=0, gpu="h200", known=known, kind="short")]
    assert all(16 <= p.n_q == p.n_kv <= 512 and p.batch >= 64 for p in short)
    assert {p.d for p in short} == set(random_shapes.SHORT_HEAD_SIZES)
    trained = [cell.problem for cell in random_shapes.random_problems(40, seed=0, gpu="h200", known=known, kind="training")]
    assert {p.direction for p in trained} == {"bwd"} and all(p.n_q > 1 for p in trained)
    captions = [cell.problem for cell in random_shapes.random_problems(40, seed=0, gpu="h200", known=known, kind="captions")]
    assert {p.direction for p in captions} == {"bwd"} and all(16 <= p.n_kv <= 128 for p in captions)
    assert {p.n_q == p.n_kv for p in captions} == {True, False}


def test_what_is_drawn_is_served_by_what_was_measured_or_by_torch() -> None:
    kinds = set()
    for cell in drawn(40, seed=3):
        found = dispatch.explain_problem(cell.problem, "h200")
        kinds.add(found.kind)
        assert found.source == "measured" or found.kind == "framework", f"{cell.name}: {found.reason}"
        if found.kind == "framework":
            assert torch_has(cell.problem), f"torch has no call for {cell.name}"
        else:
            assert found.differences and found.estimated_loss is None, f"{cell.name}: {found.reason}"
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
    monkeypatch.setattr(unprepared, "Children", lambda **_: Here(asked))
    return asked


def check_cell(cell: Cell, device: str, seed: int) -> Checked:
    return Checked(kind="stand_in", template="flash_fwd_hopper")


def check_first(problem: Problem, target: Target, seed: int, begin: int, end: int) -> list[Candidate]:
    return searches.first_candidates(problem, target, count=end, seed=seed)[begin:]


def propose(problem: Problem, target: Target, seed: int, told: dict[Candidate, float], count: int) -> list[Candidate]:
    found = searches.first_candidates(problem, target, count=len(told) + count, seed=seed)
    return [candidate for candidate in found if candidate not in told]


class Watch:
    """A stopwatch that believes what runs return."""

    def rounds(self, runs: Sequence[Callable[[], float]], count: int) -> list[list[float]]:
        return [[run()] * count for run in runs]

    def race(self, runs: Sequence[Callable[[], float]], **_: object) -> list[Measurement]:
        return [Measurement.of(times) for times in self.rounds(runs, 1)]


@pytest.fixture
def timed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are checked and timed by a simulated GPU: ours takes 150 us, torch 300, and a candidate what its text says."""

    def data_of(cell: Cell, *_: object) -> SimpleNamespace:
        return SimpleNamespace(inputs=SimpleNamespace(problem=cell.problem), ours=lambda: 150.0)

    stand_ins: dict[str, Any] = {
        "check_cell": check_cell,
        "check_first": check_first,
        "propose": propose,
        "data_of": data_of,
        "peers_of": lambda *_: ({"default": lambda: 300.0}, {}),
        "stopwatch": lambda _: Watch(),
        "made_by": lambda seed: {},
    }
    for name, stand_in_for in stand_ins.items():
        monkeypatch.setattr(unprepared, name, stand_in_for)
    monkeypatch.setattr(tasks, "recheck_on_device", lambda *_: CheckedCandidate(error=0.5))
    monkeypatch.setattr(tasks, "launch_of", lambda source, _: lambda: simulated.time_us(source))


def options(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"seed": 0, "jobs": 2, "seconds": 0.1, "trials": 4, "limit": 9.0, "budget_s": math.inf} | changed)


@pytest.mark.usefixtures("timed_here")
def test_each_shape_is_checked_searched_and_raced_with_what_its_search_found(here: list[str], tmp_path: Path) -> None:
    two = drawn(2)
    rows = unprepared.Run(two, H200, tmp_path, options()).all()
    checks = ["check_cell"] * 2 + ["check_first"] * 4
    looks = [name for _ in two for name in ("look", "propose")]
    assert here[:7] == ["wake", *checks] and sorted(here[7:11]) == sorted(looks) and here[11:] == ["time_shape"] * 2
    kept = json.loads((tmp_path / "unprepared.json").read_text())
    for cell, row in zip(two, rows, strict=True):
        tried = searches.first_candidates(cell.problem, H200, count=6, seed=0)
        best = min(tried, key=lambda candidate: simulated.time_us(searches.text_of(candidate, cell.problem)))
        found = kept["searches"][cell.problem.label()]
        assert found["trials"] == 6 and found["variant"] == best.variant(cell.problem.spec()).id and found["framework_us"] == 300.0
        every = sorted(simulated.time_us(searches.text_of(candidate, cell.problem)) for candidate in tried)
        assert [one["us"] for one in found["tried"]] == pytest.approx(every) and found["tried"][0]["config"] == best.config.as_dict()
        assert row.ratio(OWN) == pytest.approx(found["us"] / 150.0) and row.best_ratio == pytest.approx(2.0)
    assert [row["over_own"] for row in kept["rows"]] == [row.ratio(OWN) for row in rows]


@pytest.mark.usefixtures("here", "timed_here")
def test_a_shape_that_lacks_time_is_tried_of_fewer_candidates_but_timed() -> None:
    [cell] = drawn(1)
    candidates = searches.first_candidates(cell.problem, H200, count=4, seed=0)
    assert list(unprepared.look(cell, "cpu", 0, candidates, 0.0)) == candidates[:1]
    told = {candidates[0]: 170.0}
    shape = unprepared.time_shape(cell, "cpu", 0, 0.1, H200, told, candidates[1:], -1.0)
    assert shape.own == candidates[0] and set(shape.times_us) == set(told) and set(shape.times) == {OURS, OWN, "default"}
    # What nothing could be found for is held against its peers alone.
    assert set(unprepared.time_shape(cell, "cpu", 0, 0.1, H200, {}, [], 9.0).times) == {OURS, "default"}


def test_a_run_without_time_says_of_each_shape_that_it_was_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(unprepared, "made_by", lambda seed: {})
    rows = unprepared.Run(drawn(3), H200, tmp_path, options(trials=3, budget_s=0.0)).all()
    assert [row.failed for row in rows] == [NO_TIME] * 3
    assert json.loads((tmp_path / "unprepared.json").read_text())["rows"][2]["failed"] == NO_TIME


def test_children_answer_in_order_cost_themselves_alone_and_end_in_time() -> None:
    # On a busy machine a new process may take its first jobs' time too, so that the next job is given more than once.
    hanging: list[Job] = [(time.sleep, (600.0,)), *[(abs, (-1,))] * 20]
    killed, *others = in_children(hanging, start=gc.freeze, limit_s=6.0)
    assert killed == (None, "killed after 6 s")
    assert len(others) == 20 and (1, "") in others and {*others} <= {killed, (1, "")}
    with Children(start=gc.freeze, count=2, limit_s=60.0) as children:
        jobs: list[Job] = [(os.getpid, ()), (os._exit, (3,)), (operator.truediv, (1, 0)), (abs, (-2,))]
        (pid, _), (none, died), (_, raised), (two, fine) = children.by(math.inf, iter(jobs), late="late")
        assert pid not in (None, os.getpid()) and none is None and "exit code 3" in died and raised.startswith("ZeroDivisionError")
        assert (two, fine) == (2, "")
        assert children.by(0.0, [(time.sleep, (600.0,))] * 2, late="late") == [(None, "late")] * 2
        assert list(children.each([(abs, (-3,))])) == [(3, "")], "what sleeps was ended"
        some: list[Job] = [(abs, (-4,)), (time.sleep, (600.0,)), (time.sleep, (600.0,))]
        assert children.by(math.inf, some, late="late", enough=lambda ended: ended > 0) == [(4, ""), (None, "late"), (None, "late")]


def test_half_of_what_a_choice_is_compared_with_is_drawn_evenly() -> None:
    """The rest is proposed by what dispatch chooses by, and would agree with it."""
    problem = drawn(1)[0].problem
    found, again, other = (searches.compared_candidates(problem, H200, count=60, seed=seed) for seed in (0, 0, 1))
    first = set(searches.first_candidates(problem, H200, count=30, seed=0))
    assert len(set(found)) == 60 and found == again and len(first & set(found[:20])) == 10
    assert first <= set(found) and len(set(found) - first) >= 30 and len((set(found) - first) & set(other)) < 15


def test_a_search_in_parts_tries_winners_of_near_rows_first_and_then_what_the_surrogate_proposes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def keep(source: tasks.Source, *_: object) -> Compiled | Failed:
        compiled.append(source.stem)
        return simulated.compiled(source, problem, H200)

    problem = drawn(1)[0].problem
    monkeypatch.setattr(tasks, "compile_candidate", keep)
    first = searches.first_candidates(problem, H200, count=6, seed=0)
    space = SearchSpace(families(), problem, H200)
    near = transfer_candidates(space, problem, searches.shipped(), "measured")
    assert len(set(first)) == 6 and first[: len(near)] == near
    wrong: tasks.Source
    monkeypatch.setattr(
        tasks, "recheck_on_device", lambda source, *_: Failed(fate=Fate.CORRECTNESS, reason="") if source == wrong else None
    )
    compared = searches.compared_candidates(problem, H200, count=6, seed=0)
    wrong = searches.text_of(compared[4], problem)
    assert searches.check_first(problem, H200, 0, 3, 6) == [compared[3], compared[5]], "what is wrong isn't timed"
    proposed = searches.propose(problem, H200, 0, {candidate: 100.0 for candidate in first}, 2)
    assert len(proposed) == 2 == len(compiled) and not set(proposed) & set(first)


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
    said = summary(rows)
    assert said["models' prefill"]["min"] == pytest.approx(1.3)
    assert said["models' decoding"]["cells"] == sum(cell.problem.n_q == 1 for cell in found)


def test_flash_attention_4_gets_the_features_that_it_has() -> None:
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
