"""Interleaved races of final candidates, until each is known to be slower than the fastest or tied with it.

A candidate is compared by its time over the fastest one's in the same round: clocks drift, ratios within a round don't. The statistic is
the trimmed mean of these ratios with its confidence interval (Yuen, "The two-sample trimmed t for unequal population variances", Biometrika
61, 1974). A candidate is decided when its interval lies on one side of `TIE`; undecided ones race again with the fastest, up to `RACES`
times in all.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from flashtune.core.results import Measurement
from flashtune.tuner.replies import Standing

TIE = 0.0075
"""Largest slowdown that counts as a tie with the fastest, as a share; a fixed rule then chooses, so that repeated searches agree."""

CONFIDENCE = 0.99
"""Confidence of each decision."""

RACES = 5
"""Most races; open decisions are then taken by their estimates."""

_TRIMMED = 0.1
"""Share of ratios trimmed at each end: a delayed host, a clock that changes between two launches."""


class Contest:
    """Races of some final candidates: schedules them, and collects their times."""

    def __init__(self, count: int, *, most: int = RACES) -> None:
        self._count, self._most = count, most
        self._rounds: list[Mapping[int, float]] = []
        self._races = 0

    def racers(self) -> list[int]:
        """Places of the candidates to race next; empty when all is decided or the races are at an end."""
        if not self._races:
            return list(range(self._count))
        if self._races >= self._most:
            return []
        first = self._fastest()
        open_ones = [place for place in range(self._count) if place != first and self._open(place, first)]
        return sorted([first, *open_ones]) if open_ones else []

    def add(self, racers: Sequence[int], times: Sequence[Sequence[float]]) -> None:
        """Add a race: for each of `racers` its time in every round, in microseconds."""
        self._rounds += [dict(zip(racers, times_of, strict=True)) for times_of in zip(*times, strict=True)]
        self._races += 1

    def standing(self) -> Standing:
        """Distances behind the fastest, by all rounds."""
        first = self._fastest()
        behind = [0.0 if place == first else self._ratio(place, first)[0] for place in range(self._count)]
        settled = not any(self._open(place, first) for place in range(self._count) if place != first)
        return Standing(
            behind=tuple(math.expm1(log) for log in behind),
            tied=tuple(log <= math.log1p(TIE) for log in behind),
            races=self._races,
            settled=settled,
        )

    def times(self, place: int) -> list[float]:
        """All times of a final candidate, in microseconds."""
        return [times_of[place] for times_of in self._rounds if place in times_of]

    def measurement(self, place: int) -> Measurement:
        """Quantiles of a final candidate in the scale of all rounds: fewer races are rescaled by the fastest one's times."""
        first = self._fastest()
        own = Measurement.of(self.times(place))
        beside = statistics.median(times_of[first] for times_of in self._rounds if place in times_of)
        return own.scaled(statistics.median(self.times(first)) / beside)

    def _fastest(self) -> int:
        """Place of the fastest; every possible one has raced in all rounds."""
        racers = [place for place in range(self._count) if all(place in times_of for times_of in self._rounds)]
        return min(racers, key=lambda place: (self._ratio(place, racers[0])[0], place))

    def _open(self, place: int, first: int) -> bool:
        middle, half = self._ratio(place, first)
        return abs(middle - math.log1p(TIE)) <= half

    def _ratio(self, place: int, other: int) -> tuple[float, float]:
        """Logarithm of `place`'s time over that of `other`, and half the width of its confidence interval."""
        return trimmed_mean([math.log(times_of[place] / times_of[other]) for times_of in self._rounds if place in times_of])


def trimmed_mean(values: Sequence[float]) -> tuple[float, float]:
    """Trimmed mean of some numbers and half the width of its confidence interval (infinite for fewer than three)."""
    # Imported late, since only closing races need it.
    from scipy.special import stdtrit

    ordered = sorted(values)
    count, cut = len(ordered), int(_TRIMMED * len(ordered))
    kept = ordered[cut : count - cut]
    middle = statistics.fmean(kept)
    if len(kept) < 3:
        return middle, math.inf
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.stdev(winsorised) / ((1 - 2 * cut / count) * math.sqrt(count))
    return middle, float(stdtrit(len(kept) - 1, 0.5 + CONFIDENCE / 2)) * error
