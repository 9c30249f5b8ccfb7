"""The closing races: who is slower is told from who is tied, by ratios within rounds, and repeated picks agree."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import simulated_races
from db_samples import outcome

from benchmarks.cases.archive import folder
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts, Measurement, Outcome
from flashtune.db.store import Store
from flashtune.templates import family
from flashtune.tuner.children import tasks
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Timed
from flashtune.tuner.timing.racing import RACES, TIE, Contest, fallback_ahead, first_by_calls, ranked, to_call, to_race, trimmed_mean
from flashtune.tuner.timing.stopwatch import Run, Stopwatch

TRIALS = folder() / "2026-11-21-h200-forward" / "tuned.sqlite"
STEP = Problem(batch=1, heads=8, kv_heads=2, n_q=1, n_kv=4096, d=64, d_v=64, dtype="bf16")


def rounds(times: list[float], noise: float, count: int, dice: random.Random) -> list[list[float]]:
    """Interleaved rounds on a GPU whose clock halves and recovers, alike for all."""
    clock = [1.5 + math.sin(turn / 3) for turn in range(count)]
    return [[time * now * math.exp(dice.gauss(0, noise)) for now in clock] for time in times]


def raced(times: list[float], noise: float, count: int = 40) -> Contest:
    contest, dice = Contest(len(times)), random.Random(0)
    while racers := contest.racers():
        contest.add(racers, rounds([times[place] for place in racers], noise, count, dice))
    return contest


def test_clocks_that_drift_by_far_more_than_the_difference_hide_nothing() -> None:
    contest = raced([100.0, 101.0, 100.2], noise=0.003)
    assert contest.races < RACES, "each is decided"
    assert contest.behind() == pytest.approx((0.0, 0.01, 0.002), abs=0.002)


def test_a_whole_call_that_is_clearly_shorter_wins_whatever_the_gpu_says() -> None:
    assert first_by_calls([20.3, 19.9, 15.1]) == 2, "a second launch that the GPU hides costs the host"
    assert first_by_calls([20.3, 19.9, 18.4]) == 0, "that much is noise"
    assert first_by_calls([20.3, None, 15.1, None]) == 2
    assert first_by_calls([None, 15.1]) == first_by_calls([]) == 0


def test_calls_are_timed_of_the_first_few_and_of_each_other_way_to_add_up_splits() -> None:
    chosen = family("flash_decode")
    config = chosen.default(STEP.spec(), find_target("h200"))
    ways = ["kernel", "kernel", "kernel", "kernel", "rows", "kernel", "rows", "last"]
    ranks = [Candidate(family=chosen, config=config.replace(combine=way, programs=1 + place)) for place, way in enumerate(ways)]
    assert [ranks.index(candidate) for candidate in to_call(ranks)] == [0, 1, 2, 4, 7]


def test_where_the_gpu_would_wait_for_the_host_every_way_to_add_up_splits_races() -> None:
    chosen = family("flash_decode")
    config = chosen.default(STEP.spec(), find_target("h200"))
    ways = ["kernel", "kernel", "kernel", "last", "last", "rows"]
    found = [Candidate(family=chosen, config=config.replace(combine=way, programs=1 + place)) for place, way in enumerate(ways)]

    def racing(*times: float) -> list[int]:
        return [found.index(candidate) for candidate in to_race(found, times, 64)]

    assert racing(6.0, 6.5, 7.0, 7.5, 8.0, 16.0) == [0, 1, 3], "rows would keep the GPU busy for longer than a call takes the host"
    assert racing(6.0, 6.5, 7.0, 7.5, 8.0, 9.0) == [0, 1, 3, 5]
    assert racing(60.0, 65.0, 70.0, 75.0, 80.0, 90.0) == [0, 1]
    assert racing(60.0, 61.0, 62.0, 62.0, 63.0, 64.0) == [0, 1, 2, 3, 4, 5]


def test_beside_kernels_that_settle_maxima_the_fastest_that_does_not_races() -> None:
    chosen, target = family("flash_fwd_hopper"), find_target("h200")
    config = chosen.default(replace(STEP, n_q=4096).spec(), target)

    def racing(*maxima: str) -> list[int]:
        found = [Candidate(family=chosen, config=config.replace(maximum=word, section=place)) for place, word in enumerate(maxima)]
        return [found.index(candidate) for candidate in to_race(found, [60.0 + 50 * place for place in range(len(found))], 64)]

    assert racing("first", "first", "running", "running") == [0, 2], "however far behind"
    assert racing("first", "first") == [0]
    assert racing("running", "first", "running") == [0]


def test_the_twin_is_what_takes_least_where_scores_mislead_the_winner() -> None:
    chosen, target = family("flash_fwd_hopper"), find_target("h200")
    config = chosen.default(replace(STEP, n_q=4096).spec(), target)
    settled, outgrown, grown, always = (
        Candidate(family=chosen, config=config.replace(maximum=maximum, rescale=rescale))
        for maximum, rescale in (("first", "grown"), ("running", "outgrown"), ("running", "grown"), ("running", "always"))
    )
    # As measured at D = 64, N = 1024: on random numbers, where each is served least.
    times = {settled: 280.2, outgrown: 296.3, grown: 305.3, always: 310.2}
    assert fallback_ahead([settled, outgrown, grown, always], times, 64) == [settled, always, outgrown, grown]
    assert to_race([settled, outgrown, grown, always][:1] + [outgrown] * 12 + [always], [280.2] + [296.3] * 12 + [310.2], 64)[-1] == always
    assert fallback_ahead([outgrown, settled, grown, always], times, 64) == [outgrown, settled, grown, always], "it needs no twin"
    # As at D = 256, where asking first costs less than it saves.
    times = {settled: 668.0, outgrown: 669.0, grown: 681.0, always: 733.0}
    assert fallback_ahead([settled, always, grown, outgrown], times, 256) == [settled, outgrown, always, grown]
    assert fallback_ahead([settled], times, 256) == [settled]


def test_only_those_that_are_not_decided_race_again_and_not_for_ever() -> None:
    contest, dice = Contest(4), random.Random(1)
    assert contest.racers() == [0, 1, 2, 3]
    # The third is so near to the edge that no number of rounds decides; the last is far off.
    times = [100.0, 100.0 * (1 - TIE), 100.0, 120.0]
    seen = []
    while racers := contest.racers():
        seen.append(racers)
        contest.add(racers, rounds([times[place] for place in racers], 0.01, 20, dice))
    assert len(seen) <= RACES and seen[0] == [0, 1, 2, 3]
    assert all(3 not in racers and 1 in racers for racers in seen[1:])
    assert contest.races == len(seen)


def test_one_finalist_races_once() -> None:
    assert raced([50.0], noise=0.01).races == 1


def test_who_left_early_is_put_into_the_scale_of_all_rounds() -> None:
    """The second race is run while the clock is at half: the first one's median is of both, and so is the loser's."""
    contest = Contest(3)
    contest.add([0, 1, 2], [[100.0] * 10, [100.65, 100.85] * 5, [120.0] * 10])
    assert contest.racers() == [0, 1]
    contest.add([0, 1], [[200.0] * 30, [201.3] * 30])
    assert contest.measurement(0).median_us == 200.0
    assert contest.measurement(2).median_us == pytest.approx(240.0)


def test_the_framework_races_beside_them_and_never_for_the_place() -> None:
    contest = Contest(2)
    contest.add([0, 1, 2], [[100.0, 101.0] * 5, [110.0, 111.0] * 5, [50.0, 50.5] * 5])
    assert contest.racers() == [] and contest.behind()[0] == 0.0
    assert contest.measurement(2) == Measurement.of([50.0, 50.5] * 5)


def test_a_trimmed_mean_is_not_moved_by_a_host_that_is_held_up() -> None:
    dice = random.Random(2)
    quiet = [dice.gauss(0.01, 0.002) for _ in range(50)]
    middle, half = trimmed_mean([*quiet, 3.0, 5.0])
    assert abs(middle - 0.01) < half < 0.002
    assert trimmed_mean([1.0, 2.0])[1] == math.inf


def test_its_interval_holds_the_truth_as_often_as_it_says() -> None:
    dice = random.Random(3)
    held = 0
    for _ in range(1000):
        middle, half = trimmed_mean([dice.gauss(0.0, 1.0) for _ in range(20)])
        held += abs(middle) <= half
    assert 980 <= held <= 998


def sized(name: str, threads: int, shared: int) -> Outcome:
    return outcome(name, facts=CompileFacts(registers=64, spills=0, shared_bytes=shared, threads=threads))


def test_ties_go_to_the_stored_row_then_to_fewer_warps_then_to_less_memory() -> None:
    outcomes = [sized("a", 256, 1), sized("b", 128, 9), sized("c", 128, 3), sized("d", 512, 9), sized("e", 32, 0)]
    behind = [0.0, 0.006, 0.001, 0.003, 0.008]
    candidates: Any = list(zip("abcde", outcomes, strict=True))
    for known, order in ((None, "cbade"), ("d", "dcbae"), ("e", "cbade")):
        assert "".join(ranked(candidates, behind=behind, known=known)) == order, "only e isn't tied"  # type: ignore[arg-type]


def test_repeated_searches_pick_alike_under_the_noise_of_committed_races() -> None:
    """Every ninth record of a search of many trials."""
    with Store.open(TRIALS, writable=False) as store:
        rows = [found for result in store.results()[::9] if len(found := simulated_races.finalists_of(result)) > 1]
    found = [simulated_races.repeated(finalists, 10, seed=1) for finalists in rows]
    assert len(rows) >= 10
    assert sum(agreement >= 0.8 for agreement, _, _ in found) >= 0.9 * len(rows)
    assert all(loss <= 2 * TIE for _, loss, _ in found)


def test_a_lead_by_a_disturbed_race_is_no_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay while the incumbent was timed would put every later trial in a wrong scale."""

    class Disturbed(Stopwatch):
        def __init__(self) -> None:
            self.races = iter([[220.0, 345.0], [290.0, 270.0]])

        def rounds(self, runs: Sequence[Run], count: int) -> list[list[float]]:
            return [[290.0] * count, [270.0] * count]

        def race(self, runs: Sequence[Run], **_: Any) -> list[Measurement]:
            return [Measurement.of([time] * 7) for time in next(self.races)]

    verifier = SimpleNamespace(verdict=lambda *_, **__: SimpleNamespace(reason="", error=0.0))
    bench = SimpleNamespace(inputs=None, verifier=verifier, stopwatch=Disturbed())
    monkeypatch.setattr(tasks, "_ready", lambda *_: bench)
    monkeypatch.setattr(tasks, "launch_of", lambda *_: lambda: None)
    monkeypatch.setattr(tasks, "_loaded", lambda source: (None, None))
    source: Any = SimpleNamespace(repeats=True, text="")
    reply = tasks.evaluate_candidate(source, source, cast(Any, None), cast(Any, None), 0, 1.0, 3.0)
    assert isinstance(reply, Timed) and reply.incumbent is not None
    assert (reply.time.median_us, reply.incumbent.median_us) == (290.0, 270.0)
