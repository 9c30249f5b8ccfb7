"""When a search stops and what it then has missed, replayed on the committed sweeps without a GPU: `python benchmarks/stopping.py`.

The shipped search on each sweep (benchmarks/sweeps), without those starts that are among its best five, with as many candidates ahead
as a measured search has. A line for each run: why it stopped, after how many trials, the regret that it has (its best time over the sweep's
best, less one), the regret that it expected, and what all of the trials would have had.
"""

import argparse
import math

import optuna
import replay

from flashtune.core.results import Fate, Outcome, SearchResult
from flashtune.core.target import find_target
from flashtune.tuner.propose.space import Candidate, SearchSpace
from flashtune.tuner.propose.study import Study
from flashtune.tuner.search.problem_search import AHEAD
from flashtune.tuner.search.stopping import UNTIL, StoppingRule


def run(sweep: SearchResult, trials: int, until: float, seed: int) -> str:
    """One search, to its end and on to the last trial."""
    answers = {(o.template, o.config): o for o in sweep.outcomes}
    timed = sorted((o for o in sweep.outcomes if o.fate is Fate.CORRECT and o.measurement is not None), key=_us)
    space = SearchSpace(replay._as_swept(sweep), sweep.problem, find_target(sweep.gpu))
    best_five = {(o.template, o.config) for o in timed[:5]}
    starts = [c for c in space.starts() if (c.family.name, c.config) not in best_five]
    sampler = replay.KINDS["gp"](space, sweep.problem, seed=seed, starts=starts)
    memory = optuna.storages.InMemoryStorage()
    study = Study(space, sweep.problem, sampler="gp", seed=seed, source="measured", storage=memory, by=sampler)
    rule, waiting, told = StoppingRule(until), list[Candidate](), 0
    best, left, in_all, ended = math.inf, math.inf, math.inf, ""
    while told < trials:
        if len(waiting) <= AHEAD - AHEAD // 4:
            waiting += study.ask(AHEAD - len(waiting), limit=trials)
            left, in_all = study.left_to_gain(), study.expected_regret()
        if not waiting:
            break
        if not ended and (reason := rule.verdict(left, in_all)) is not None:
            ended = f"{reason} after {told} trials, regret {best / _us(timed[0]) - 1:.2%}, expected {study.expected_regret():.2%}"
        candidate = waiting.pop(0)
        outcome = answers[candidate.family.name, candidate.config]
        study.tell(candidate, outcome)
        rule.add(outcome)
        told += 1
        best = min(best, _us(outcome))
    return f"{ended or 'no stop'}; after {told} trials {best / _us(timed[0]) - 1:.2%}"


def _us(outcome: Outcome) -> float:
    return outcome.measurement.median_us if outcome.fate.timed and outcome.measurement is not None else math.inf


def main() -> None:
    """A line for each sweep and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--until", type=float, default=UNTIL)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for sweep in replay.sweeps():
        for seed in range(options.seeds):
            print(f"{sweep.problem.label()} seed {seed}: {run(sweep, options.trials, options.until, seed)}", flush=True)


if __name__ == "__main__":
    main()
