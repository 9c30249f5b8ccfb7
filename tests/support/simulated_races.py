"""Closing races simulated with the noise of committed ones: committed medians are the truth, their spread the noise of a launch.

Clocks drift from round to round, alike for all, and now and then a launch is held up.
"""

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from flashtune.core.records.results import Outcome, SearchResult
from flashtune.tuner.timing.racing import Contest, ranked

DRIFT = 0.002
"""What clocks change from round to round (the standard deviation of a step)."""
HELD_UP, DELAY = 0.01, 0.1
"""How often a launch is held up, and by how much of its time."""
RACE_S, BESIDE_US, FEWEST, MOST = 0.6, 200.0, 15, 100
"""A race's length and what is beside each launch, as in the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """Choice of a repetition, and how many races it took."""

    place: int
    races: int


def finalists_of(result: SearchResult, count: int = 12) -> list[Outcome]:
    """The candidates that would race: the fastest of those with a time, none 10 % slower than the first."""
    timed = sorted((o for o in result.outcomes if o.measurement is not None and o.measurement.samples > 3), key=_median)
    return [outcome for outcome in timed[:count] if _median(outcome) <= 1.1 * _median(timed[0])]


def _median(outcome: Outcome) -> float:
    assert outcome.measurement is not None
    return outcome.measurement.median_us


def _noise(outcome: Outcome) -> float:
    """The standard deviation of a launch's time over its median, from the quantiles."""
    assert outcome.measurement is not None
    return outcome.measurement.noise / 2.563


def race(finalists: Sequence[Outcome], racers: Sequence[int], dice: random.Random) -> list[list[float]]:
    """One simulated race: the times of each of `racers` in every round."""
    round_s = sum(_median(finalists[place]) + BESIDE_US for place in racers) * 1e-6
    rounds = max(FEWEST, min(MOST, int(RACE_S / round_s)))
    times: list[list[float]] = [[] for _ in racers]
    clock = 0.0
    for _ in range(rounds):
        clock += dice.gauss(0, DRIFT)
        for row, place in zip(times, racers, strict=True):
            delay = DELAY if dice.random() < HELD_UP else 0.0
            row.append(_median(finalists[place]) * math.exp(clock + dice.gauss(0, _noise(finalists[place]))) * (1 + delay))
    return times


def pick(finalists: Sequence[Outcome], dice: random.Random) -> Pick:
    """One search's pick: races until each finalist is decided."""
    contest = Contest(len(finalists))
    while racers := contest.racers():
        contest.add(racers, race(finalists, racers, dice))
    by_place: Any = list(enumerate(finalists))
    return Pick(place=cast(int, ranked(by_place, behind=contest.behind())[0]), races=contest.races)


def repeated(finalists: Sequence[Outcome], times: int, seed: int = 0) -> tuple[float, float, float]:
    """Agreement, the largest loss, and the mean number of races, of `times` repetitions."""
    picks = [pick(finalists, random.Random(f"{seed} {number}")) for number in range(times)]
    best = min(map(_median, finalists))
    agreement = Counter(pick.place for pick in picks).most_common(1)[0][1] / times
    loss = max(_median(finalists[pick.place]) for pick in picks) / best - 1
    return agreement, loss, statistics.fmean(pick.races for pick in picks)
