"""Interleaved races of final candidates, until each is known to be slower than the fastest or tied with it, and the choice of the winner.

A candidate is compared by its time over the fastest one's in the same round: clocks drift, ratios within a round don't. The statistic is
the trimmed mean of these ratios with its confidence interval (Yuen, "The two-sample trimmed t for unequal population variances", Biometrika
61, 1974). A candidate is decided when its interval lies on one side of `TIE`; undecided ones race again with the fastest, up to `RACES`
times in all.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from flashtune.core.problems.config import lost_where_misled, settles
from flashtune.core.records.results import Measurement, Outcome
from flashtune.tuner.propose.space import Candidate

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

    def __init__(self, count: int) -> None:
        self._count = count
        self._rounds: list[Mapping[int, float]] = []
        self.races = 0

    def racers(self) -> list[int]:
        """Places of the candidates to race next; empty when all is decided or the races are at an end."""
        if not self.races:
            return list(range(self._count))
        if self.races >= RACES:
            return []
        first = self._fastest()
        open_ones = [place for place in range(self._count) if place != first and self._open(place, first)]
        return sorted([first, *open_ones]) if open_ones else []

    def add(self, racers: Sequence[int], times: Sequence[Sequence[float]]) -> None:
        """Add a race: for each of `racers` its time in every round, in microseconds."""
        self._rounds += [dict(zip(racers, times_of, strict=True)) for times_of in zip(*times, strict=True)]
        self.races += 1

    def behind(self) -> tuple[float, ...]:
        """Distances behind the fastest, as shares, by all rounds."""
        first = self._fastest()
        return tuple(0.0 if place == first else math.expm1(self._ratio(place, first)[0]) for place in range(self._count))

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


FINAL_CANDIDATES = 12
"""Most candidates in the closing races; beyond them, neighbours' times differ by noise."""

WITHIN = 0.1
"""Largest slowdown against the best trial, as a share, of a final candidate."""

HOST_US = 15.0
"""Approximate host time of a call in microseconds: shorter kernels differ by their number of launches."""

CALLED = 3
"""Number of the first ranks, the race's winner among them, whose whole calls are timed (see `to_call`)."""

CALL_GAIN = 0.1
"""Least gain in the time of a whole call, as a share, that outweighs a lead on the GPU: callers see the slower of host and GPU, and smaller
differences may be the host's noise."""


def to_race(correct: Sequence[Candidate], times: Sequence[float], d: int) -> list[Candidate]:
    """Final candidates for heads of `d` columns, the fastest first: the first few within `WITHIN`; where the GPU would wait for the host
    the fastest of each other way to combine splits, for whole calls decide there; and beside kernels with a frozen row max the one with an
    online softmax that is fastest on mispredicted rows, as their fallback kernel."""
    found = [candidate for candidate, us in zip(correct[:FINAL_CANDIDATES], times, strict=False) if us <= (1 + WITHIN) * times[0]]
    for candidate, us in zip(correct, times, strict=True):
        if us <= HOST_US and all(candidate.config.get("combine", "") != other.config.get("combine", "") for other in found):
            found.append(candidate)
    frozen = {candidate.family for candidate in found if settles(candidate.config)}
    online = {
        candidate: us for candidate, us in zip(correct, times, strict=True) if candidate.family in frozen and not settles(candidate.config)
    }
    return found + [candidate for candidate in list(by_mispredicted(online, d))[:1] if candidate not in found]


def by_mispredicted(times: Mapping[Candidate, float], d: int) -> dict[Candidate, float]:
    """Estimated times of kernels with an online softmax on inputs that mispredict a frozen row max, the least first, from their times on
    random numbers."""
    found = {candidate: (1 + lost_where_misled(candidate.config, d)) * us for candidate, us in times.items()}
    return dict(sorted(found.items(), key=lambda one: one[1]))


def fallback_ahead(ranks: Sequence[Candidate], times: Mapping[Candidate, float], d: int) -> list[Candidate]:
    """Ranks, the winner first, with the best of `by_mispredicted` moved before the others with an online softmax: the winner's fallback
    kernel, if it freezes row maxima."""
    online = [one for one in ranks[1:] if not settles(one.config) and one.family == ranks[0].family]
    if not online or not settles(ranks[0].config):
        return list(ranks)
    fallback = next(iter(by_mispredicted({one: times[one] for one in online}, d)))
    found = [one for one in ranks if one != fallback]
    found.insert(ranks.index(online[0]), fallback)
    return found


def to_call(ranks: Sequence[Candidate]) -> list[Candidate]:
    """Final candidates, the best first, whose whole calls are timed: the first few, and the first of each other way to combine splits,
    since a second launch costs host time that no race measures."""
    found = list(ranks[:CALLED])
    for candidate in ranks[CALLED:]:
        if all(candidate.config.get("combine", "") != other.config.get("combine", "") for other in found):
            found.append(candidate)
    return found


def first_by_calls(calls: Sequence[float | None]) -> int:
    """Place of the winner by whole calls of each (microseconds, the race's winner first): the race's winner, unless another's calls are
    shorter by more than `CALL_GAIN`."""
    known = {place: call for place, call in enumerate(calls) if call is not None}
    if 0 not in known:
        return 0
    shortest = min(known, key=lambda place: known[place])
    return shortest if known[shortest] < (1 - CALL_GAIN) * known[0] else 0


def ranked(
    candidates: Sequence[tuple[Candidate, Outcome]], *, behind: Sequence[float] | None = None, known: Candidate | None = None
) -> list[Candidate]:
    """Final candidates, the winner first: those tied with the fastest, of them the stored record's (`known`), then the simplest; the rest
    by their times. Distances `behind` the fastest follow from the times where there was no race (predictions).

    Simpler means fewer threads (warps), then less shared memory (stages, tiles), then fewer registers; the variant id comes last.
    """
    times = [outcome.measurement.median_us for _, outcome in candidates if outcome.measurement is not None]
    distances = [time / min(times) - 1 for time in times] if behind is None else behind

    def place(index: int) -> tuple[object, ...]:
        (candidate, outcome), distance = candidates[index], distances[index]
        if distance > TIE:
            return True, distance, outcome.variant_id
        facts = outcome.facts
        size = (facts.threads, facts.shared_bytes, facts.registers) if facts is not None else (math.inf,) * 3
        return False, candidate != known, size, outcome.variant_id

    return [candidates[index][0] for index in sorted(range(len(candidates)), key=place)]
