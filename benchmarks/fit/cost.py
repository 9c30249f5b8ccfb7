"""Fit of the cost model's constants to the committed sweeps and trials, and its rank of problems that it was not fitted to.

With `--held-out` each sweep is ranked by constants that never saw its problem, nor any of its N, D and mask. Prints the fitted constants.
A problem's times are compared with each other alone: what all of them have in common doesn't bear on a search.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.cases import sweeps as replay
from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import ARCHIVED, todays
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts, SearchResult
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.templates.cost import predict_us
from flashtune.templates.cost_constants import CONSTANTS, Constants

FITTED = (
    "tile_overhead",
    "block_overhead",
    "fill",
    "chained_fill",
    "edge_ops_per_score",
    "softcap_ops_per_score",
    "dropout_ops_per_score",
    "bias_ops_per_score",
    "tile_bytes_per_clock",
    "uneven_drawn",
    "draw_clocks",
)
"""Constants that the committed sweeps alone say little of; the others were fitted to three of these sweeps."""
KEPT_NEAR = 0.5
"""Standard deviation of a constant's logarithm around its value of before; one of these weighs as much as one trial that is 5 % off."""
NEAR_THE_BEST = 0.3
"""Candidates this much slower than the best (the logarithm) count a third."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One time that was measured."""

    problem: Problem
    config: Config
    facts: CompileFacts
    log_us: float
    weight: float


def trials_of(result: SearchResult, every: int = 1) -> list[Trial]:
    """Times of a search's trials; of families that win nothing here, each `every`-th."""
    timed = [(o, o.trial or o.measurement) for o in result.outcomes if o.facts is not None]
    best = min(time.median_us for _, time in timed if time is not None)
    found = []
    for index, (outcome, time) in enumerate(timed):
        tried = todays(outcome.template, outcome.config)
        if time is None or outcome.facts is None or tried is None or (index % every and outcome.template == "flash_fwd"):
            continue
        weight = math.exp(-math.log(time.median_us / best) / NEAR_THE_BEST)
        found.append(Trial(result.problem, tried[1], outcome.facts, math.log(time.median_us), weight))
    return found


def errors(constants: Constants, groups: Iterable[Sequence[Trial]]) -> NDArray[np.float64]:
    """The weighted log errors, each group less its mean."""
    target, found = find_target("h200"), []
    for group in groups:
        weights = np.array([trial.weight for trial in group])
        error = np.array([t.log_us - math.log(predict_us(t.config, t.facts, t.problem, target, constants)) for t in group])
        # A search of 28 trials says as much of its problem as a sweep of some hundreds that are much alike.
        found.append(np.sqrt(weights / np.sqrt(len(group))) * (error - np.average(error, weights=weights)))
    return np.concatenate(found)


def fitted(groups: Sequence[Sequence[Trial]], start: Constants = CONSTANTS, rounds: int = 12) -> Constants:
    """The constants with the least squared errors, not far from `start`."""
    begin = np.log([max(getattr(start, name), 1e-3) for name in FITTED])

    def constants(logs: NDArray[np.float64]) -> Constants:
        return start._replace(**{name: float(math.exp(value)) for name, value in zip(FITTED, logs, strict=True)})

    def loss(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([errors(constants(logs), groups) / 0.05, (logs - begin) / KEPT_NEAR])

    return constants(least_squares(loss, begin, max_nfev=rounds, loss="soft_l1").x)


def ranks(constants: Constants, sweep: SearchResult) -> dict[str, float]:
    """Quality of a sweep's ranking by the times that are predicted before candidates are compiled."""
    target, known = find_target(sweep.gpu), families()
    timed = [o for o in sweep.outcomes if o.measurement is not None]
    times = np.array([o.measurement.median_us for o in timed if o.measurement is not None])
    expected = [known[o.template].expected(o.config, sweep.problem.spec(), target) for o in timed]
    predicted = np.array([predict_us(o.config, f, sweep.problem, target, constants) for o, f in zip(timed, expected, strict=True) if f])
    order = np.argsort(predicted, kind="stable")
    fast = times <= 1.3 * times.min()
    spearman = np.corrcoef(np.argsort(np.argsort(times[fast])), np.argsort(np.argsort(predicted[fast])))[0, 1]
    return {"spearman_fast": float(spearman), **{f"regret_{k}": float(times[order[:k]].min() / times.min() - 1) for k in (5, 10, 20, 30)}}


def main() -> None:
    """Print the constants, or their rankings of held-out sweeps."""
    parser = argument_parser(__doc__)
    parser.add_argument("--held-out", action="store_true", help="rank each sweep by constants fitted without it")
    parser.add_argument("--rounds", type=int, default=12, help="most evaluations of a fit (default: %(default)s)")
    options = parser.parse_args()
    sweeps = replay.sweeps()
    with Store.open(ARCHIVED, writable=False) as store:
        trials = [trials_of(result) for result in store.results()]
    print("as they are:")
    for sweep in sweeps:
        print(" ", sweep.problem.label(), said(ranks(CONSTANTS, sweep)))
    if options.held_out:
        for sweep in sweeps:
            p = sweep.problem
            others = [trials_of(other, every=4) for other in sweeps if other is not sweep]
            others += [group for group in trials if (group[0].problem.n_kv, group[0].problem.d) != (p.n_kv, p.d)]
            print("held out:", p.label(), said(ranks(fitted(others, rounds=options.rounds), sweep)), flush=True)
        return
    found = fitted([*(trials_of(sweep, every=4) for sweep in sweeps), *trials], rounds=options.rounds)
    for name in FITTED:
        print(f"    {name}: {getattr(CONSTANTS, name):.4g} -> {getattr(found, name):.4g}")
    for sweep in sweeps:
        print("fitted:", sweep.problem.label(), said(ranks(found, sweep)))


def said(figures: dict[str, float]) -> str:
    """One line."""
    return "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
