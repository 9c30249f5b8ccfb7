"""Transfer candidates: the winners of the nearest records of other problems, which are tried first."""

from collections.abc import Iterable
from dataclasses import replace

from flashtune.core.errors import InputError
from flashtune.core.nearness import nearest
from flashtune.core.problem import Problem
from flashtune.core.results import SearchResult, Source, TuningRecord
from flashtune.tuner.propose.space import Candidate, SearchSpace

NEIGHBOURS = 4
"""Number of transfer candidates."""


def transfer_candidates(space: SearchSpace, problem: Problem, records: Iterable[TuningRecord], source: Source) -> list[Candidate]:
    """Winners of the records that are nearest to `problem`, the nearest first, each once.

    A config that breaks a constraint of this problem is moved to the nearest that breaks none, one of an earlier version becomes its
    successor, and axes that follow from sizes are set for this problem's. Records of families that don't serve it, or whose config no
    version of the family declares, are left out; so are predictions for a search that measures.
    """
    found: dict[tuple[str, str], Candidate] = {}
    useful = (record for record in records if source == "predicted" or record.outcome.source == "measured")
    for _, record in nearest(problem.key(space.target.slug), useful):
        candidate = _refitted(space, record)
        if candidate is not None:
            config = candidate.family.successor(candidate.config)
            candidate = replace(candidate, config=candidate.family.resized(config, problem, space.target))
            found.setdefault((candidate.family.name, candidate.config.as_json()), candidate)
        if len(found) == NEIGHBOURS:
            break
    return list(found.values())


def stored(space: SearchSpace, problem: Problem, records: Iterable[TuningRecord]) -> Candidate | None:
    """Config of the measured record of exactly this problem's key, as it was raced, where it keeps the constraints; the first of several
    counts."""
    key = problem.key(space.target.slug)
    measured = next((record for record in records if record.key == key and record.outcome.source == "measured"), None)
    if measured is None:
        return None
    family = space.families.get(measured.outcome.template)
    candidate = _refitted(space, measured)
    same = family is not None and candidate is not None and candidate.config == family.completed(measured.outcome.config)
    return candidate if same else None


def record_of(result: SearchResult) -> TuningRecord | None:
    """Record of a search's result; None where nothing was found."""
    if result.best is None:
        return None
    return TuningRecord(
        key=result.problem.key(result.gpu),
        problem=result.problem,
        outcome=result.best,
        provenance=result.provenance,
        baseline=result.baseline,
        ending=result.ending,
        fallback=result.fallback,
    )


def _refitted(space: SearchSpace, record: TuningRecord) -> Candidate | None:
    family = space.families.get(record.outcome.template)
    if family is None:
        return None
    config = family.completed(record.outcome.config)
    try:
        family.validate(config)
    except InputError:
        return None
    moved = family.refitted(config, space.spec, space.target)
    return None if moved is None else Candidate(family=family, config=moved)
