"""Short searches on this machine's GPU for benchmarks: the project's own, with a few trials, and what they will want compiled before."""

import sys
from collections.abc import Callable, Sequence

import optuna

from flashtune.cli.console import messages
from flashtune.cli.progress import SearchProgress
from flashtune.core.errors import NoKernelFound
from flashtune.core.problem import Problem
from flashtune.core.results import Provenance, SearchResult, TuningRecord
from flashtune.core.target import Target
from flashtune.db.library import Library, shipped_path
from flashtune.templates import families
from flashtune.tuner import tasks
from flashtune.tuner.carrying import carried
from flashtune.tuner.sampling import ByExpectedImprovement
from flashtune.tuner.searching import Search, SearchPlan
from flashtune.tuner.space import Candidate, SearchSpace


def source_of(result: SearchResult) -> tasks.Source | None:
    """The winner's text, None where nothing was found."""
    if result.best is None:
        return None
    candidate = Candidate(family=families()[result.best.template], config=result.best.config)
    return tasks.Source.of(candidate.family, candidate.variant(result.problem.spec()))


def compile_first(problem: Problem, target: Target, count: int, seed: int) -> int:
    """In a child process: have the compiler keep the first candidates of a search, so that its GPU needn't wait for them; says how many.

    These are winners of near rows, then those that the cost model and the starts open with.
    """
    space = SearchSpace(families(), problem, target)
    opening = ByExpectedImprovement(space, problem, seed=seed).opening
    candidates = list(dict.fromkeys([*carried(space, problem, shipped(), "measured"), *opening]))[:count]
    for candidate in candidates:
        tasks.compile_candidate(tasks.Source.of(candidate.family, candidate.variant(space.spec)), problem, target)
    return len(candidates)


def shipped() -> list[TuningRecord]:
    """The rows that a search begins with here: those of the package alone, whatever was searched on this machine."""
    return Library.of(shipped_path()).winners()


def searched(
    problems: Sequence[Problem],
    target: Target,
    *,
    made_by: Provenance,
    known: Sequence[TuningRecord],
    trials: int,
    seed: int,
    jobs: int,
    race_s: float = 0.6,
    budget_s: float | None,
    save: Callable[[SearchResult], object] | None = None,
) -> list[SearchResult]:
    """What short searches of these problems find, within `budget_s` seconds if that is given, one by one; those that fail are missing."""
    found: list[SearchResult] = []

    def keep(result: SearchResult) -> None:
        found.append(result)
        if save is not None:
            save(result)

    plan = SearchPlan(
        target=target,
        problems=tuple(problems),
        families=families(),
        source="measured",
        trials=trials,
        budget_s=budget_s,
        until=0.005,
        seed=seed,
        jobs=jobs,
        known=tuple(known),
        race_s=race_s,
    )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.InMemoryStorage()
    with SearchProgress(messages(), problems=problems, trials=trials, budget_s=budget_s, quiet=False) as progress:
        try:
            Search(plan, storage=storage, provenance=made_by, save=keep, listener=progress).run()
        except NoKernelFound as error:
            print(error, file=sys.stderr, flush=True)
    return found
