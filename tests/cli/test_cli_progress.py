"""Progress of a search: its stage and that stage's time, and an estimate that neither jumps nor guesses."""

import io
import threading
import time
from dataclasses import replace
from typing import Any, Literal

import pytest
from planted import PLANTED_PROBLEM
from rich.console import Console

from flashtune.cli import progress
from flashtune.cli.progress import SearchProgress, lasting
from flashtune.core.problems.config import Config
from flashtune.core.records.results import Ending, Fate, Measurement, Outcome, Provenance, SearchResult

GRID = [replace(PLANTED_PROBLEM, n_q=n, n_kv=n) for n in (64, 96, 128)]
PROVENANCE = Provenance(flashtune="", torch="", triton="")


class Clock:
    """Seconds, as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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


def drawn(clock: Clock, *, terminal: bool = False, quiet: bool = False, **plan: Any) -> tuple[SearchProgress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, highlight=False)
    return SearchProgress(console, problems=GRID, quiet=quiet, clock=clock, **{"trials": 8, **plan}), out


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
    shown.trial_finished(GRID[0], correct(12.34), correct(12.34))
    shown.tick()
    for number in range(3, 6):
        clock.now += 1.0
        shown.trial_finished(GRID[0], correct(12.34), correct(12.34))
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
        "[1/3] n64-d16-fp32-full: compiling 7 of 8, 0 s; best 12.3 us predicted; about 20 s left",
        "n128-d16-fp32-full: waiting for other processes, 1 min 3 s",
    ]


def left(shown: SearchProgress, out: io.StringIO) -> str:
    """Words of the remaining time in a line of this moment, or an empty text."""
    shown.tick()
    *_, last = out.getvalue().splitlines()[-1].split("; ")
    return last if last.endswith(" left") else ""


def test_the_time_left_is_that_of_all_trials_at_the_present_rate() -> None:
    clock = Clock()
    shown, out = drawn(clock)
    shown.problem_started(GRID[0], 0, 3, 2)
    shown.stage_started(GRID[0], "compiling", 2)
    assert left(shown, out) == "", "nothing was observed"
    for _ in range(4):
        clock.now += 5.0
        shown.trial_finished(GRID[0], correct(1.0), None)
    # Of three problems of 8 trials 2 were done before, and 4 in 15 s after the first.
    assert left(shown, out) == "about 1 min 30 s left"
    done = SearchResult(gpu="a100", problem=GRID[1], outcomes=(correct(1.0),), provenance=PROVENANCE)
    shown.problem_known(done, 1, 3)
    for _ in range(2):
        clock.now += 5.0
        shown.trial_finished(GRID[0], correct(1.0), None)
    shown.stage_started(GRID[0], "racing", 8)
    assert left(shown, out) == "about 40 s left", "the other problem is somebody else's"


def test_a_budget_bounds_the_time_left_and_tells_it_before_the_first_trial() -> None:
    clock = Clock()
    shown, out = drawn(clock, budget_s=90.0)
    shown.stage_started(GRID[0], "compiling", 0)
    assert left(shown, out) == "at most 1 min 30 s left"
    for _ in range(3):
        clock.now += 10.0
        shown.trial_finished(GRID[0], correct(1.0), None)
    assert left(shown, out) == "at most 1 min 0 s left", "at this rate the trials would take longer"


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
    assert [task.completed for task in shown._bars.tasks[:2]] == [0, 8]
    result = SearchResult(gpu="a100", problem=GRID[0], outcomes=(correct(1.0),), provenance=PROVENANCE)
    shown.problem_finished(result)
    shown.problem_known(replace(result, problem=GRID[1]), 1, 3)
    assert shown._bars.tasks[0].completed == 2


@pytest.mark.parametrize("source", ["measured", "predicted"])
def test_a_predicted_time_is_a_range_and_what_was_tried_is_told_without_a_share_left(source: Literal["measured", "predicted"]) -> None:
    shown, out = drawn(Clock())
    best, ending = replace(correct(10.0), source=source), Ending(reason="patience", regret=0.104, candidates=1560)
    shown.problem_finished(SearchResult(gpu="a100", problem=GRID[0], outcomes=(best,), provenance=PROVENANCE, ending=ending))
    said = out.getvalue()
    predicted = source == "predicted"
    assert ("us, likely " in said and "(predicted)" in said) == predicted
    assert ("10.0 us measured" in said) != predicted and "(1 of 1560 candidates tried; stopped: 8 trials or more without a gain)" in said
    assert "%" not in said, "no replay calibrates what may be left"


def test_ended_problems_say_how_many_trials_they_had() -> None:
    shown, out = drawn(Clock())
    one = SearchResult(gpu="a100", problem=GRID[0], outcomes=(correct(1.0),), provenance=PROVENANCE)
    shown.problem_known(one, 0, 3)
    shown.problem_finished(replace(one, outcomes=(correct(1.0), correct(2.0))))
    shown.problem_finished(replace(one, outcomes=()))
    known, finished, without = out.getvalue().splitlines()
    assert (
        known.endswith("done before (1 trial)") and finished.endswith("(2 trials)") and without.endswith("stopped before its first trial")
    )


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
