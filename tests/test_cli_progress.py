"""Progress of a search: its stage and that stage's time, and an estimate that neither jumps nor guesses."""

import io
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import PLANTED_PROBLEM
from rich.console import Console

from flashtune.cli import progress
from flashtune.cli.estimate import TimeLeft, lasting
from flashtune.cli.progress import SearchProgress
from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.results import Fate, Measurement, Outcome, Provenance, SearchResult

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "fixtures" / "search_times.json").read_text())["problems"]
GRID = [replace(PLANTED_PROBLEM, n_q=n, n_kv=n) for n in (64, 96, 128)]
PROVENANCE = Provenance(flashtune="", torch="", triton="")


class Clock:
    """Seconds, as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def replayed(events: Sequence[tuple[float, str, Problem]], trials: int, every: float) -> Iterator[tuple[float, float | None]]:
    """Lines printed `every` so many seconds of a search with these events, and what would have been right."""
    clock = Clock()
    left = TimeLeft(list(dict.fromkeys(problem for _, _, problem in events)), trials=trials, clock=clock)
    asked = every
    for at, what, problem in events:
        while asked < at:
            clock.now = asked
            yield events[-1][0] - asked, left.seconds()
            asked += every
        clock.now = at
        if what == "began":
            left.begin(problem, 0)
        elif what == "trial":
            left.trial()
        else:
            left.done(problem, trials)


def recorded() -> list[tuple[float, str, Problem]]:
    events = []
    for one in RECORDED:
        problem = Problem(batch=1, heads=8, kv_heads=8, n_q=one["n"], n_kv=one["n"], d=64, d_v=64, dtype=one["dtype"])
        events.append((one["began"], "began", problem))
        events += [(at, "trial", problem) for at in one["trials"]]
        events.append((one["ended"], "ended", problem))
    return events


def assert_no_jumps(said: Sequence[tuple[float, float | None]], every: float) -> None:
    """From one to the next it at most halves or doubles, but for the time that passed."""
    for (_, before), (_, after) in itertools.pairwise(said):
        if before is not None and after is not None:
            assert max(1.0, before - every) / 2.01 <= after <= 2.01 * max(1.0, before)


def test_the_time_left_of_a_real_search_is_near_and_does_not_jump() -> None:
    said = list(replayed(recorded(), 12, 10.0))
    # Problems of the first kind take 60 s and those of the second 4 s: before one of these was seen, nothing is known.
    assert [after for _, after in said[:6]] == [None] * 6 and None not in [after for _, after in said[6:]]
    for right, estimate in said:
        assert estimate is None or right < 10 or 1 / 2.5 < estimate / right < 2.5
    assert_no_jumps(said, 10.0)


@settings(deadline=None, max_examples=30)
@given(times=st.lists(st.floats(0.01, 100.0), min_size=20, max_size=20), same=st.booleans())
def test_no_times_of_trials_make_it_jump(times: list[float], same: bool) -> None:
    events, now = [], 0.0
    for index, problem in enumerate(GRID[:2]):
        problem = problem if same else replace(problem, d=16 * (index + 1))
        events.append((now, "began", problem))
        for seconds in times[10 * index : 10 * (index + 1)]:
            now += seconds
            events.append((now, "trial", problem))
        events.append((now, "ended", problem))
    assert_no_jumps(list(replayed(events, 10, 10.0)), 10.0)


def test_a_trial_that_hangs_makes_it_grow() -> None:
    clock = Clock()
    left = TimeLeft(GRID[:1], trials=20, clock=clock)
    left.begin(GRID[0], 0)
    for _ in range(10):
        clock.now += 2.0
        left.trial()
    before = left.seconds()
    said = []
    for _ in range(12):
        clock.now += 10.0
        said.append(left.seconds())
    assert before == pytest.approx(20.0)
    assert min(one or 0.0 for one in said) > 10.0 and (said[-1] or 0.0) > 80.0
    assert said[2:] == sorted(said[2:], key=lambda one: one or 0.0)


def test_before_the_first_trial_only_a_budget_says_anything() -> None:
    clock = Clock()
    assert TimeLeft(GRID, trials=20, clock=clock).words() == ""
    left = TimeLeft(GRID[:1], trials=1000, budget_s=90.0, clock=clock)
    left.begin(GRID[0], 0)
    assert left.words() == "at most 1 min 30 s left"
    for _ in range(10):
        clock.now += 3.0
        left.trial()
    assert left.words() == "about 60 s left"
    left.done(GRID[0], 10)
    assert left.words() == ""


def test_times_read_as_people_say_them() -> None:
    assert [lasting(seconds) for seconds in (0, 4.9, 125, 4200)] == ["0 s", "4 s", "2 min 5 s", "1 h 10 min"]


def correct(median_us: float) -> Outcome:
    measurement = Measurement.predicted(median_us)
    config = Config.of(BLOCK_M=64)
    return Outcome(
        template="flash_fwd",
        template_hash="0",
        variant_id="0",
        config=config,
        fate=Fate.CORRECT,
        source="predicted",
        measurement=measurement,
    )


def drawn(clock: Clock, *, terminal: bool = False, quiet: bool = False, trials: int | None = 8) -> tuple[SearchProgress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160)
    return SearchProgress(console, problems=GRID, trials=trials, quiet=quiet, clock=clock), out


def test_a_line_tells_the_stage_its_time_the_best_and_what_is_left() -> None:
    clock = Clock()
    shown, out = drawn(clock)
    shown.tick()
    assert out.getvalue() == "", "nothing began"
    shown.problem_started(GRID[0], 0, 3, 0)
    shown.stage_started(GRID[0], "compiling", 2)
    clock.now = 4.0
    shown.tick()
    shown.stage_started(GRID[0], "checking", 2)
    clock.now = 9.0
    shown.trial_finished(correct(12.34), correct(12.34))
    shown.tick()
    for number in range(3, 6):
        clock.now += 1.0
        shown.trial_finished(correct(12.34), correct(12.34))
        shown.stage_started(GRID[0], "compiling", number + 1)
    shown.tick()
    # Others have done the rest, and this problem is theirs to end.
    shown.stage_started(GRID[2], "waiting", 8)
    clock.now = 75.0
    shown.stage_started(GRID[2], "waiting", 8)
    shown.tick()
    assert out.getvalue().splitlines() == [
        "[1/3] n64-d16-fp32-full: compiling 3 of 8, 4 s",
        "[1/3] n64-d16-fp32-full: checking 3 of 8, 5 s; best 12.3 us predicted",
        "[1/3] n64-d16-fp32-full: compiling 7 of 8, 0 s; best 12.3 us predicted",
        "n128-d16-fp32-full: waiting for other processes, 1 min 3 s",
    ]


def test_a_search_without_an_end_in_sight_tells_no_total() -> None:
    shown, out = drawn(Clock(), trials=None)
    shown.stage_started(GRID[0], "measuring", 36)
    shown.tick()
    assert out.getvalue() == "n64-d16-fp32-full: measuring 37, 0 s\n"


def test_lines_come_by_themselves_where_there_is_no_terminal_and_it_is_not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.005)
    ticked = threading.Event()
    monkeypatch.setattr(SearchProgress, "tick", lambda self: ticked.set())
    with drawn(Clock())[0]:
        ticked.wait()
    ticked.clear()
    for quiet, terminal in ((True, False), (False, True)):
        with drawn(Clock(), quiet=quiet, terminal=terminal)[0]:
            time.sleep(0.05)
    assert not ticked.is_set()


def test_the_live_display_tells_the_same() -> None:
    clock = Clock()
    shown, out = drawn(clock, terminal=True)
    with shown:
        shown.problem_started(GRID[0], 0, 3, 0)
        shown.stage_started(GRID[0], "racing", 8)
        clock.now = 7.0
    assert "racing the best, 7 s" in out.getvalue()
    assert [task.completed for task in shown._bars.tasks] == [0, 8]
    result = SearchResult(gpu="a100", problem=GRID[0], outcomes=(correct(1.0),), provenance=PROVENANCE)
    shown.problem_finished(result)
    shown.problem_known(replace(result, problem=GRID[1]), 1, 3)
    assert shown._bars.tasks[0].completed == 2


def test_ended_problems_say_how_many_trials_they_had() -> None:
    shown, out = drawn(Clock())
    one = SearchResult(gpu="a100", problem=GRID[0], outcomes=(correct(1.0),), provenance=PROVENANCE)
    shown.problem_known(one, 0, 3)
    shown.problem_finished(replace(one, outcomes=(correct(1.0), correct(2.0))))
    shown.problem_finished(replace(one, outcomes=()))
    known, finished, without = out.getvalue().splitlines()
    assert known.endswith("done before (1 trial)") and finished.endswith("(2 trials)") and without.endswith("no correct kernel in 0 trials")


@pytest.mark.parametrize(
    ("winner", "others", "said"),
    [
        # (time among the trials, in the race, whole call)
        ((80.0, 81.0, 90.0), [(85.0, 86.0, 90.0)], "the best trial's 80.0 us were its own: the closing race times final candidates"),
        ((82.0, 81.0, 90.0), [(80.0, 83.0, 90.0)], "the best trial, of 80.0 us, was no faster in the closing race (83.0 us)"),
        ((82.0, 81.0, 90.0), [(80.0, 80.8, 90.0)], "a tie with the best trial, of 80.8 us in the closing race, goes to the stored record"),
        (
            (82.0, 81.0, 60.0),
            [(70.0, 71.0, 90.0)],
            "whole calls decided: of the winner they take 60.0 us, of the fastest",
        ),
        # Of the best trial no whole calls were timed.
        ((85.0, 80.0, 50.0), [(71.0, 70.0, 60.0), (69.0, 71.0, None)], "whole calls decided: of the winner they take 50.0 us"),
        ((85.0, 81.0, None), [(59.0, 60.0, None)], ""),
        ((82.0, 80.0, 60.0), [(82.5, 71.0, 90.0)], ""),
        ((82.0, 80.0, 60.0), [], ""),
    ],
)
def test_a_pick_that_is_slower_than_the_best_trial_says_why(
    winner: tuple[float, float, float | None], others: list[tuple[float, float, float | None]], said: str
) -> None:
    shown, out = drawn(Clock())
    outcomes = [
        replace(
            correct(raced),
            variant_id=str(place),
            trial=Measurement.of([trial]),
            call_us=call,
            rank=place + 1,
            finalist=True,
        )
        for place, (trial, raced, call) in enumerate([winner, *others])
    ]
    shown.problem_finished(SearchResult(gpu="a100", problem=GRID[0], outcomes=tuple(outcomes), provenance=PROVENANCE))
    text = " ".join(out.getvalue().split())
    assert said in text and ("best trial" in text or "whole calls" in text) == bool(said)


def test_a_best_trial_that_did_not_race_is_not_said_to_have_raced() -> None:
    shown, out = drawn(Clock())
    apart = replace(correct(70.0), variant_id="apart")
    winner = replace(correct(81.0), variant_id="winner", rank=1, finalist=True, trial=Measurement.of([80.0]))
    shown.problem_finished(SearchResult(gpu="a100", problem=GRID[0], outcomes=(winner, apart), provenance=PROVENANCE))
    assert "the best trial, of 70.0 us, didn't run in the closing race" in " ".join(out.getvalue().split())
