"""Searches on this machine's GPU for benchmarks: the project's own with a few trials, and the parts of one that takes turns with others."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache

import optuna

from flashtune.cli.console import messages
from flashtune.cli.progress import SearchProgress
from flashtune.core.errors import NoKernelFound
from flashtune.core.problem import Problem
from flashtune.core.results import Provenance, SearchResult, TuningRecord
from flashtune.core.target import Target
from flashtune.db.library import Library, shipped_path
from flashtune.templates import families
from flashtune.templates.family import Family
from flashtune.tuner.children import tasks
from flashtune.tuner.children.forkserver import start_server
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.propose.carrying import carried
from flashtune.tuner.propose.sampling import ByExpectedImprovement, Sampler
from flashtune.tuner.propose.space import Candidate, SearchSpace
from flashtune.tuner.replies import Failed
from flashtune.tuner.search.plan import SearchPlan
from flashtune.tuner.searching import Search


def source_of(result: SearchResult) -> tasks.Source | None:
    """The winner's text, None where nothing was found."""
    if result.best is None:
        return None
    candidate = Candidate(family=families()[result.best.template], config=result.best.config)
    return text_of(candidate, result.problem)


def text_of(candidate: Candidate, problem: Problem) -> tasks.Source:
    """A candidate's text for this problem."""
    return tasks.Source.of(candidate.family, candidate.variant(problem.spec()))


@cache
def shipped() -> tuple[TuningRecord, ...]:
    """The rows that a search begins with here: those of the package alone, whatever was searched on this machine."""
    return tuple(Library.of(shipped_path()).winners())


def first_candidates(problem: Problem, target: Target, *, count: int, seed: int) -> list[Candidate]:
    """What a search tries first: winners of near rows, then those that the cost model and the starts open with."""
    space = SearchSpace(families(), problem, target)
    opening = ByExpectedImprovement(space, problem, seed=seed).opening
    return list(dict.fromkeys([*carried(space, problem, shipped(), "measured"), *opening]))[:count]


def check_first(problem: Problem, target: Target, seed: int, begin: int, end: int) -> list[Candidate]:
    """In a child process: of the candidates `begin` to `end` that a search tries first, those that are right on this GPU, compiled."""
    found = []
    for candidate in first_candidates(problem, target, count=end, seed=seed)[begin:]:
        if not isinstance(tasks.recheck_on_device(text_of(candidate, problem), problem, target, seed), Failed):
            found.append(candidate)
    return found


def propose(problem: Problem, target: Target, seed: int, told: Mapping[Candidate, float], count: int) -> list[Candidate]:
    """In a child process: what a search tries after it was `told` these times in microseconds; compiled, and not yet checked."""
    space = SearchSpace(families(), problem, target)
    found = ByExpectedImprovement(space, problem, seed=seed).propose(count, dict(told), ())
    return [one for one in found if not isinstance(tasks.compile_candidate(text_of(one, problem), problem, target), Failed)]


def searched(
    problems: Sequence[Problem],
    target: Target,
    *,
    made_by: Provenance,
    known: Sequence[TuningRecord],
    trials: int,
    seed: int,
    jobs: int,
    budget_s: float | None = None,
    sampler: Sampler = "gp",
    until: float | None = 0.005,
    only: Mapping[str, Family] | None = None,
    race_s: float = 0.6,
    workers: Workers | None = None,
) -> list[SearchResult]:
    """What short searches of these problems find, within `budget_s` seconds if that is given, one by one; those that fail are missing.

    `only` are the families to try, where it isn't all of them; `workers` processes that go on running afterwards.
    """
    if workers is None:
        # As the command line does, before anything else.
        start_server()
    found: list[SearchResult] = []
    plan = SearchPlan(
        target=target,
        problems=tuple(problems),
        families=only or families(),
        source="measured",
        trials=trials,
        budget_s=budget_s,
        until=until,
        sampler=sampler,
        seed=seed,
        jobs=jobs,
        known=tuple(known),
        race_s=race_s,
    )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.InMemoryStorage()
    shown = None if sampler == "exhaustive" else trials
    with SearchProgress(messages(), problems=problems, trials=shown, budget_s=budget_s, quiet=False) as progress:
        try:
            Search(plan, storage=storage, provenance=made_by, save=found.append, listener=progress).run(workers)
        except NoKernelFound as error:
            print(error, file=sys.stderr, flush=True)
    return found
