"""Whether repeated searches pick alike, simulated with the noise of committed races, without a GPU: `python benchmarks/picks.py`.

For each row of a database that has several timed candidates: their committed medians are taken for the truth and their committed spread for
the noise of a launch; clocks drift from round to round, alike for all, and now and then a launch is held up. The finalists then race again
and again, each time with other noise, by today's rule and by the one before (one race of six, medians, ties of 1 % to the variant id).
Agreement is the share of the most frequent pick; the loss is the pick's true time over the best one's, less one.
"""

import argparse
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from archived import folder

from flashtune.core.results import Outcome, SearchResult
from flashtune.db.store import Store
from flashtune.tuner.timing.finalists import placed
from flashtune.tuner.timing.racing import Contest

TRIALS = folder() / "2026-11-21-h200-forward" / "tuned.sqlite"

DRIFT = 0.002
"""What clocks change from round to round (the standard deviation of a step)."""
HELD_UP, DELAY = 0.01, 0.1
"""How often a launch is held up, and by how much of its time."""
RACE_S, BESIDE_US, FEWEST, MOST = 0.6, 200.0, 15, 100
"""A race's length and what is beside each launch, as in the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """What a repetition chose, and how many races it took."""

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


def today(finalists: Sequence[Outcome], dice: random.Random) -> Pick:
    """Races until each finalist is decided."""
    contest = Contest(len(finalists))
    while racers := contest.racers():
        contest.add(racers, race(finalists, racers, dice))
    standing = contest.standing()
    return Pick(place=placed(finalists, standing.behind, is_stored=lambda outcome: False)[0], races=standing.races)


def before(finalists: Sequence[Outcome], dice: random.Random) -> Pick:
    """One race of six; of those within 1 % of the smallest median the smallest variant id."""
    noisy = sorted(range(len(finalists)), key=lambda place: _median(finalists[place]) * math.exp(dice.gauss(0, 0.01)))[:6]
    medians = [statistics.median(row) for row in race(finalists, noisy, dice)]
    tied = [place for place, median in zip(noisy, medians, strict=True) if median <= 1.01 * min(medians)]
    return Pick(place=min(tied, key=lambda place: finalists[place].variant_id), races=1)


def repeated(
    finalists: Sequence[Outcome], rule: Callable[[Sequence[Outcome], random.Random], Pick], times: int, seed: int = 0
) -> tuple[float, float, float]:
    """Agreement, the largest loss, and the mean number of races, of `times` repetitions."""
    picks = [rule(finalists, random.Random(f"{seed} {number}")) for number in range(times)]
    best = min(map(_median, finalists))
    agreement = Counter(pick.place for pick in picks).most_common(1)[0][1] / times
    loss = max(_median(finalists[pick.place]) for pick in picks) / best - 1
    return agreement, loss, statistics.fmean(pick.races for pick in picks)


def main() -> None:
    """A line for each rule, over all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default=str(TRIALS), help="the database whose rows race (default: %(default)s)")
    parser.add_argument("--times", type=int, default=10, help="repetitions of each row (default: %(default)s)")
    options = parser.parse_args()
    with Store.open(options.db, writable=False) as store:
        rows = [found for result in store.results() if len(found := finalists_of(result)) > 1]
    for name, rule in (("today", today), ("before", before)):
        found = [repeated(finalists, rule, options.times) for finalists in rows]
        agreements, losses, races = (sorted(values) for values in zip(*found, strict=True))
        print(
            f"{name}: {len(rows)} rows, the same pick at least 8 times of 10 in {sum(a >= 0.8 for a in agreements) / len(rows):.0%}, "
            f"mean agreement {statistics.fmean(agreements):.0%}, largest loss median {statistics.median(losses):.2%} "
            f"p90 {losses[int(0.9 * len(losses))]:.2%} worst {losses[-1]:.2%}, races {statistics.fmean(races):.1f}"
        )


if __name__ == "__main__":
    main()
