"""Parts of a search on this machine's GPU, for cases in which several searches take turns: first candidates, checks, proposals."""

from collections.abc import Mapping
from functools import cache

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import SearchResult, TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.tuner.children import tasks
from flashtune.tuner.propose.sampling import ByExpectedImprovement, Evenly
from flashtune.tuner.propose.space import Candidate, SearchSpace, transfer_candidates
from flashtune.tuner.replies import Failed


def text_of(candidate: Candidate, problem: Problem) -> tasks.Source:
    """Rendered text of a candidate for this problem."""
    return tasks.Source.of(candidate.family, candidate.variant(problem.spec()))


@cache
def shipped() -> tuple[TuningRecord, ...]:
    """Records of the package alone, whatever was searched on this machine."""
    return tuple(Library.of(shipped_path()).winners())


@cache
def results_in(path: str) -> tuple[SearchResult, ...]:
    """All runs in a database, read once a process: those that ship take seconds."""
    with Store.open(path, writable=False) as store:
        return tuple(store.results())


def first_candidates(problem: Problem, target: Target, *, count: int, seed: int) -> list[Candidate]:
    """First candidates of a search: winners of near records, then those of the cost model and the hand-written starts."""
    space = SearchSpace(families(), problem, target)
    opening = ByExpectedImprovement(space, problem, seed=seed).initial_candidates
    return list(dict.fromkeys([*transfer_candidates(space, problem, shipped(), "measured"), *opening]))[:count]


def compared_candidates(problem: Problem, target: Target, *, count: int, seed: int) -> list[Candidate]:
    """Candidates to compare dispatch's choice with: those that a search tries first, and in turn with them, and in place of missing ones,
    others drawn evenly from all that are valid.

    The first ones are proposed by what dispatch chooses by: alone they would say how well that agrees with itself.
    """
    first = first_candidates(problem, target, count=(count + 1) // 2, seed=seed)
    space = SearchSpace(families(), problem, target)
    drawn = Evenly(space, problem, seed=seed, starts=()).propose(count - len(first), {}, first)
    turns = [candidate for pair in zip(first, drawn, strict=False) for candidate in pair]
    return list(dict.fromkeys([*turns, *first, *drawn]))


def check_first(problem: Problem, target: Target, seed: int, begin: int, end: int) -> list[Candidate]:
    """In a child process: of the compared candidates `begin` to `end` those that are right on this GPU, compiled."""
    found = []
    for candidate in compared_candidates(problem, target, count=end, seed=seed)[begin:]:
        if not isinstance(tasks.recheck_on_device(text_of(candidate, problem), problem, target, seed), Failed):
            found.append(candidate)
    return found


def propose(problem: Problem, target: Target, seed: int, times_us: Mapping[Candidate, float], count: int) -> list[Candidate]:
    """In a child process: candidates that a search tries next, after these times in microseconds; compiled, and not yet checked."""
    space = SearchSpace(families(), problem, target)
    found = ByExpectedImprovement(space, problem, seed=seed).propose(count, dict(times_us), ())
    return [one for one in found if not isinstance(tasks.compile_candidate(text_of(one, problem), problem, target), Failed)]
