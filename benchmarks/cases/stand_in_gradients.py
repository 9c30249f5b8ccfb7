"""Losses of substitute backwards: configs that were the best on another GPU, or of another head size or length, by records' trials.

A config is looked up among the trials of another record of the same N, heads to a key head and features; where it was never tried there it
counts as unknown. Of another GPU only races of FEWEST kernels or more count. Needs no GPU.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import GAVE_WAY, Trials, times_of
from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.results import SearchResult
from flashtune.core.target import find_target
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates import family
from flashtune.templates.family import Family

HERE, OTHER = "h100", "h200"

FEWEST = 5


def of_databases(databases: Iterable[Path] = (shipped_path(), GAVE_WAY)) -> list[SearchResult]:
    """Backward records, shipped and replaced, the latest of each GPU and problem."""
    found = {}
    for path in databases:
        with Store.open(path, writable=False) as store:
            for result in store.results(direction="bwd"):
                if result.best is not None:
                    found.setdefault((result.gpu, result.problem), result)
    return list(found.values())


def winner(result: SearchResult) -> tuple[Family, Config]:
    """Best kernel of a record, by today's axes."""
    assert result.best is not None
    kind = family(result.best.template)
    return kind, kind.completed(result.best.config)


def lost(trials: Trials, kind: Family, config: Config | None) -> float | None:
    """Loss of a config against the best trial, None where it wasn't tried."""
    us = None if config is None else trials.get((kind.name, config))
    return None if us is None else us / min(trials.values()) - 1


def of_gpus(results: Iterable[SearchResult]) -> Iterator[float]:
    """Losses of the other GPU's winners here."""
    others = {result.problem.key(HERE): result for result in results if result.gpu == OTHER}
    for result in results:
        if result.gpu != HERE or (other := others.get(result.problem.key(HERE))) is None:
            continue
        kind, config = winner(other)
        trials = times_of(result)
        if len(trials) >= FEWEST and (loss := lost(trials, kind, config)) is not None:
            yield loss


def of_others(
    results: Iterable[SearchResult], varying: Callable[[Problem], int], same: Callable[[Problem], int]
) -> Iterator[tuple[tuple[int, int], float]]:
    """Losses of winners, moved to what fits, by the varying size here and there; the `same` size, features and
    heads to a key head agree."""
    square, target = [result for result in results if result.problem.d == result.problem.d_v], find_target(HERE)
    problems = {(r.gpu, varying(r.problem), same(r.problem), r.problem.features.label(), r.problem.gqa_ratio): r for r in square}
    for (gpu, mine, *rest), result in problems.items():
        trials = times_of(result)
        for theirs in sorted({key[1] for key in problems} - {mine}):
            if (other := problems.get((gpu, theirs, *rest))) is not None:  # type: ignore[arg-type]
                kind, config = winner(other)
                if (loss := lost(trials, kind, kind.refitted(config, result.problem.spec(), target))) is not None:
                    yield (mine, theirs), loss


def head_size(problem: Problem) -> int:
    """D."""
    return problem.d


def keys(problem: Problem) -> int:
    """N."""
    return problem.n_kv


def said(losses: list[float]) -> str:
    """Losses in a line."""
    worst = sorted(losses)[int(0.9 * len(losses))]
    return f"median {statistics.median(losses):.1%} longer, 90th percentile {worst:.1%}, at most {max(losses):.1%}, of {len(losses)}"


def main() -> None:
    """Print."""
    argument_parser(__doc__).parse_args()
    results = of_databases()
    print(f"winners of an {OTHER} on an {HERE}: {said(list(of_gpus(results)))}")
    for name, varying, same in (("D", head_size, keys), ("N", keys, head_size)):
        found = defaultdict(list)
        for sizes, loss in of_others(results, varying, same):
            found[sizes].append(loss)
        for (mine, theirs), losses in sorted(found.items()):
            print(f"winners of {name} = {theirs} at {name} = {mine}: {said(losses)}")
        print(f"winners of another {name}: {said([loss for losses in found.values() for loss in losses])}")
