"""Replays search strategies and the cost model on the committed sweeps, without a GPU: `python benchmarks/replay.py`.

A sweep (benchmarks/sweeps/*.sqlite) holds the outcome of every candidate of a problem, written by
`flashtune search --sampler exhaustive`. A strategy asks for candidates, and the sweep answers what became of them.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import optuna

from flashtune.core.config import Config
from flashtune.core.results import Fate, Outcome, SearchResult
from flashtune.core.target import find_target
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.templates.family import Constraint, Family
from flashtune.tuner.cost import predict_us
from flashtune.tuner.space import SearchSpace
from flashtune.tuner.study import Sampler, Study

SWEEPS = Path(__file__).parent / "sweeps"


def sweeps(folder: Path = SWEEPS) -> list[SearchResult]:
    """Every recorded sweep, by problem."""
    found: list[SearchResult] = []
    for path in sorted(folder.glob("*.sqlite")):
        with Store.open(path, writable=False) as store:
            found += [_completed(sweep) for sweep in store.results()]
    return found


def _completed(sweep: SearchResult) -> SearchResult:
    """A sweep with the axes that its spaces have gained since, at what configs did without them."""
    known = families()
    return replace(sweep, outcomes=tuple(replace(o, config=known[o.template].completed(o.config)) for o in sweep.outcomes))


def best_us(outcomes: list[Outcome]) -> float:
    """The fastest correct outcome's time, in microseconds."""
    return min(o.measurement.median_us for o in outcomes if o.fate is Fate.CORRECT and o.measurement is not None)


def top_by_cost(sweep: SearchResult, count: int) -> list[Outcome]:
    """The `count` candidates that the cost model ranks first, from what the compiler said of each."""
    target = find_target(sweep.gpu)
    known = [o for o in sweep.outcomes if o.facts is not None]
    return sorted(known, key=lambda o: (predict_us(o.config, o.facts, sweep.problem, target), o.variant_id))[:count]  # type: ignore[arg-type]


def cost_ratio(sweep: SearchResult, count: int = 10) -> float:
    """The best measured time among the cost model's first `count` over the sweep's best (1 is perfect)."""
    return best_us(top_by_cost(sweep, count)) / best_us(list(sweep.outcomes))


def strategy_ratio(sweep: SearchResult, sampler: Sampler, trials: int, seed: int) -> float:
    """The best time that a strategy finds in `trials` over the sweep's best."""
    answers = {(o.template, o.config): o for o in sweep.outcomes}
    space = SearchSpace(_as_swept(sweep), sweep.problem, find_target(sweep.gpu))
    study = Study(space, sweep.problem, sampler=sampler, seed=seed, source="measured", storage=optuna.storages.InMemoryStorage())
    study.enqueue(space.starts())
    found: list[Outcome] = []
    while len(found) < trials and (batch := study.ask(min(16, trials - len(found)))):
        for candidate in batch:
            found.append(answers[candidate.family.name, candidate.config])
            study.tell(candidate, found[-1])
    return best_us(found) / best_us(list(sweep.outcomes))


def _as_swept(sweep: SearchResult) -> dict[str, Family]:
    """The families of a sweep, without what their spaces have gained since."""
    swept: dict[str, set[Config]] = {}
    for outcome in sweep.outcomes:
        swept.setdefault(outcome.template, set()).add(outcome.config)
    return {
        name: replace(family, constraints=(*family.constraints, _known(swept[name])))
        for name, family in families().items()
        if name in swept
    }


def _known(configs: set[Config]) -> Constraint:
    return Constraint(name="swept", holds=lambda config, spec, target: config in configs, why="the sweep has no answer for others")


def main() -> None:
    """A table, or JSON, of every sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows = []
    for sweep in sweeps():
        ratios: dict[str, float] = {
            sampler: statistics.median(strategy_ratio(sweep, sampler, options.trials, seed) for seed in range(options.seeds))
            for sampler in ("tpe", "random")  # type: ignore[misc]
        }
        rows.append(
            {
                "problem": sweep.problem.label(),
                "gpu": sweep.gpu,
                "candidates": len(sweep.outcomes),
                "best_us": best_us(list(sweep.outcomes)),
                "cost_model_top10": cost_ratio(sweep),
                **{f"{name}_{options.trials}": ratio for name, ratio in ratios.items()},
            }
        )
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print("  ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
