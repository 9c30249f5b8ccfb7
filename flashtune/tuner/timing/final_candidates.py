"""Choice of final candidates, of those whose whole calls are timed, and of the winner."""

import math
from collections.abc import Callable, Mapping, Sequence

from flashtune.core.config import lost_where_misled, settles
from flashtune.core.results import Outcome
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.timing.racing import TIE

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


def placed(outcomes: Sequence[Outcome], behind: Sequence[float], *, is_stored: Callable[[Outcome], bool]) -> list[int]:
    """Ranking of final candidates: those tied with the fastest first, of them the stored record's, then the simplest; the rest by their
    times.

    Simpler means fewer threads (warps), then less shared memory (stages, tiles), then fewer registers; the variant id comes last.
    """

    def place(index: int) -> tuple[object, ...]:
        outcome, log = outcomes[index], behind[index]
        if log > TIE:
            return True, log, outcome.variant_id
        facts = outcome.facts
        size = (facts.threads, facts.shared_bytes, facts.registers) if facts is not None else (math.inf,) * 3
        return False, not is_stored(outcome), size, outcome.variant_id

    return sorted(range(len(outcomes)), key=place)


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
    """Final candidates, the winner first (see `placed`): by each one's distance `behind` the fastest, or by their times alone (predictions,
    and races without it); `known` is the stored record's."""
    outcomes = [outcome for _, outcome in candidates]
    if behind is None:
        times = [outcome.measurement.median_us for outcome in outcomes if outcome.measurement is not None]
        behind = [time / min(times) - 1 for time in times]
    is_known = {outcome.variant_id for candidate, outcome in candidates if candidate == known}
    order = placed(outcomes, behind, is_stored=lambda outcome: outcome.variant_id in is_known)
    return [candidates[place][0] for place in order]
