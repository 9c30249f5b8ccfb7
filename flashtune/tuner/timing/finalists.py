"""Which candidates race at the end, which of them have whole calls timed, and which wins."""

import math
from collections.abc import Callable, Mapping, Sequence

from flashtune.core.config import lost_where_misled, settles
from flashtune.core.results import Outcome
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.timing.racing import TIE

FINALISTS = 12
"""Candidates in the closing races; their neighbours' times are noise apart."""

WITHIN = 0.1
"""Who was slower than the best trial by more than this doesn't race."""

HOST_US = 15.0
"""What the host needs for a call, or so: kernels that take the GPU less are told apart by how often they launch."""

CALLED = 3
"""So many of the first, the race's winner among them, have whole calls timed (see `to_call`)."""

CALL_GAIN = 0.1
"""A whole call that is shorter by more than this is worth more than a lead on the GPU: what callers see is the slower of host and GPU, and
a second launch takes host time that no race sees. Less than this may be noise: calls' times are the host's."""


def to_race(correct: Sequence[Candidate], times: Sequence[float], d: int) -> list[Candidate]:
    """Of candidates for heads of `d` columns, the fastest first, those that race: the first few that are within reach, where the GPU would
    wait for the host the fastest of each other way to add up splits, for whole calls decide there, and beside kernels that settle row
    maxima the one that doesn't and takes least where scores mislead them, for there it serves."""
    found = [candidate for candidate, us in zip(correct[:FINALISTS], times, strict=False) if us <= (1 + WITHIN) * times[0]]
    for candidate, us in zip(correct, times, strict=True):
        if us <= HOST_US and all(candidate.config.get("combine", "") != other.config.get("combine", "") for other in found):
            found.append(candidate)
    settling = {candidate.family for candidate in found if settles(candidate.config)}
    running = {
        candidate: us
        for candidate, us in zip(correct, times, strict=True)
        if candidate.family in settling and not settles(candidate.config)
    }
    return found + [candidate for candidate in list(by_misled(running, d))[:1] if candidate not in found]


def by_misled(times: Mapping[Candidate, float], d: int) -> dict[Candidate, float]:
    """Kernels with running maxima by what they take where scores mislead those that settle them, the least first, of their times on random
    numbers."""
    found = {candidate: (1 + lost_where_misled(candidate.config, d)) * us for candidate, us in times.items()}
    return dict(sorted(found.items(), key=lambda one: one[1]))


def twin_ahead(ranks: Sequence[Candidate], times: Mapping[Candidate, float], d: int) -> list[Candidate]:
    """`ranks`, whose first wins, with the best of `by_misled` before the others with running maxima: the row's twin, if the winner settles
    maxima."""
    running = [one for one in ranks[1:] if not settles(one.config) and one.family == ranks[0].family]
    if not running or not settles(ranks[0].config):
        return list(ranks)
    twin = next(iter(by_misled({one: times[one] for one in running}, d)))
    found = [one for one in ranks if one != twin]
    found.insert(ranks.index(running[0]), twin)
    return found


def to_call(ranks: Sequence[Candidate]) -> list[Candidate]:
    """Of finalists, the best first, those whose whole calls are timed: the first few, and the first that adds up splits in each other way,
    since a second launch costs the host what no race sees."""
    found = list(ranks[:CALLED])
    for candidate in ranks[CALLED:]:
        if all(candidate.config.get("combine", "") != other.config.get("combine", "") for other in found):
            found.append(candidate)
    return found


def placed(outcomes: Sequence[Outcome], behind: Sequence[float], *, is_stored: Callable[[Outcome], bool]) -> list[int]:
    """The order of finalists: those tied with the fastest first, of them the stored row's, then the simplest; the rest by their times.

    Simple is what takes fewer threads (warps), then less shared memory (stages, tiles), then fewer registers; the variant id comes last.
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
    """Which of some finalists wins, by what whole calls of each take (microseconds, the race's winner first): the race's winner, unless
    another's calls are shorter by more than `CALL_GAIN`."""
    known = {place: call for place, call in enumerate(calls) if call is not None}
    if 0 not in known:
        return 0
    shortest = min(known, key=lambda place: known[place])
    return shortest if known[shortest] < (1 - CALL_GAIN) * known[0] else 0


def ranked(
    finalists: Sequence[tuple[Candidate, Outcome]], *, behind: Sequence[float] | None = None, known: Candidate | None = None
) -> list[Candidate]:
    """The winner first (see `placed`): by how far each is `behind` the fastest, or by their times alone (predictions, and races of other
    ways); `known` is the stored row's."""
    outcomes = [outcome for _, outcome in finalists]
    if behind is None:
        times = [outcome.measurement.median_us for outcome in outcomes if outcome.measurement is not None]
        behind = [time / min(times) - 1 for time in times]
    is_known = {outcome.variant_id for candidate, outcome in finalists if candidate == known}
    order = placed(outcomes, behind, is_stored=lambda outcome: outcome.variant_id in is_known)
    return [finalists[place][0] for place in order]
