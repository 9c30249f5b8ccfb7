"""Beside kernels that settle row maxima, the configs that race so that a row has a twin: the best with running maxima; and which of
kernels that are nearly as fast becomes a row's winner or twin.

A winner's own tiles with running maxima may be far from the best that there are, and what serves where scores mislead the winner shall be.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from archived import folder

from flashtune.core.config import asks_first, settles
from flashtune.core.problem import Problem, ProblemKey
from flashtune.core.results import Fate, Outcome, SearchResult
from flashtune.core.target import Target
from flashtune.db.store import Store
from flashtune.templates import family
from flashtune.templates.rendering import variant_of
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.timing.finalists import by_misled

ARCHIVED = folder() / "2026-11-21-h200-forward" / "tuned.sqlite"
"""Trials of searches from before maxima settled everywhere, among them the best configs whose maxima run."""

SHIPPED_GAIN = 0.01
"""What a kernel that doesn't ship yet must gain over one that does, to be worth its machine code and the time that compiling it takes."""

Archive = Mapping[ProblemKey, Sequence[SearchResult]]


def read_archive(location: str | Path, target: Target) -> Archive:
    """The results of a database on this GPU by their keys."""
    found: dict[ProblemKey, list[SearchResult]] = {}
    with Store.open(location, writable=False) as store:
        for result in store.results(gpu=target.slug):
            found.setdefault(result.problem.key(target.slug), []).append(result)
    return found


def measured(results: Iterable[SearchResult]) -> list[Outcome]:
    """What was measured right, the best of the closing races first, then by time."""
    known = [o for result in results for o in result.outcomes if o.measurement is not None and o.fate is Fate.CORRECT]
    return sorted(known, key=lambda o: (o.rank or 99, o.measurement.median_us if o.measurement else 0.0))


def is_rendered(result: SearchResult) -> bool:
    """Whether the winner's text, where there is one, is still what was measured."""
    best = result.best
    if best is None:
        return True
    kind = family(best.template)
    return variant_of(kind, result.problem.spec(), kind.completed(best.config)).template_hash == best.template_hash


def has_settling_winner(result: SearchResult) -> bool:
    """Whether the best of a result settles maxima."""
    return any(settles(outcome.config) for outcome in measured([result])[:1])


def with_twins(chosen: Sequence[Candidate], result: SearchResult, archive: Archive, target: Target) -> list[Candidate]:
    """`chosen`, and where some of them settle maxima: the best with running ones of the stored result and of the archive's trials of the
    problem, also in bf16; where nothing was measured, the family's starts."""
    if not any(settles(candidate.config) for candidate in chosen):
        return list(chosen)
    found = dict.fromkeys(chosen)
    in_bf16 = replace(result.problem, dtype="bf16")
    trials = (by_trial(archive.get(problem.key(result.gpu), ())) for problem in (result.problem, in_bf16))
    for outcomes in (measured([result]), *trials):
        valid = (candidate for outcome in outcomes if (candidate := _running(outcome, result.problem, target)) is not None)
        found |= dict.fromkeys(candidate for candidate, _ in zip(valid, range(1), strict=False))
    if all(settles(candidate.config) for candidate in found):
        kind = chosen[0].family
        starts = [config for config in kind.starts(result.problem.spec(), target) if not settles(config)]
        found |= dict.fromkeys(Candidate(family=kind, config=config) for config in starts[:2])
    return list(found)


def by_trial(results: Iterable[SearchResult]) -> list[Outcome]:
    """What was measured right, by the times that compare all trials of a search."""
    return sorted(measured(results), key=lambda o: time.median_us if (time := o.trial or o.measurement) is not None else 0.0)


def _running(outcome: Outcome, problem: Problem, target: Target) -> Candidate | None:
    """The candidate of an outcome, completed, where its maxima run and it is valid today."""
    kind = family(outcome.template)
    config = kind.completed(outcome.config)
    if "maximum" not in config or settles(config) or kind.violated(config, problem.spec(), target) is not None:
        return None
    return Candidate(family=kind, config=config)


def shipped_first(
    ranks: Sequence[Candidate], times: Mapping[Candidate, float], ships: Callable[[Candidate], bool], *, d: int
) -> list[Candidate]:
    """`ranks` of kernels for heads of `d` columns, the first of which gives way, where that costs no more than SHIPPED_GAIN, to one that
    takes less where scores mislead kernels that settle maxima (a twin then serves for these), or else to one whose maxima run, or that
    already ships; and so does the first with running maxima, which is the row's twin, of those that take least there. What has a successor
    gives way whatever ships."""
    running = by_misled({one: times[one] for one in ranks if not settles(one.config)}, d)
    misled = dict(running)
    misled |= {one: min(running.values(), default=0.0) for one in ranks if settles(one.config)}

    def among(some: Sequence[Candidate], by: Mapping[Candidate, float]) -> Candidate:
        near = [one for one in some if by[one] <= (1 + SHIPPED_GAIN) * by[some[0]]]
        least = min(misled[one] for one in near)
        return min(
            near,
            key=lambda one: (
                one.family.successor(one.config) != one.config,
                misled[one] > (1 + SHIPPED_GAIN) * least,
                settles(one.config),
                not asks_first(one.config),
                not ships(one),
            ),
        )

    winner = among(ranks, times)
    others = [one for one in ranks if one != winner]
    if rest := [one for one in running if one != winner]:
        twin = among(rest, misled)
        first = next(place for place, one in enumerate(others) if not settles(one.config))
        others.remove(twin)
        others.insert(first, twin)
    return [winner, *others]
