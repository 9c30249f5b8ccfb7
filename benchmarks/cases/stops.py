"""Calibration of what a search knows at its own end: its regret beside the surrogate's samples of it, on the sweeps.

Regret is that of the best candidate by the sweep's own times. A stop without regret leaves nothing to state, so that percentiles are judged
by the others: how many lie below the 90th percentile of the samples, and below that percentile times the factor by which it would hold in
nine of ten such stops of all other sweeps. Prints a line to each sweep, and one to all. A percentile can be stated once at least nine
sweeps have such stops and 85 to 95 % of them hold.
"""

import math
from statistics import median

import numpy as np
import optuna

from benchmarks.cases import sweeps
from benchmarks.cases.sweeps import Run, Stop
from benchmarks.shared.environment import argument_parser

MOST = 60
"""Trials at which a search ends in any case, as the command's do."""
SHARE = 0.9
LEAST = 1e-4
"""Least percentile that a factor is taken of."""


def stopped(place: sweeps.Swept, starts: str, seed: int) -> Run:
    """A search until its rule ends it."""
    return sweeps.replayed(place, "gp", starts, MOST, seed, beyond=False)


def percentile(stop: Stop) -> float:
    """The 90th percentile of the samples of a stop's regret."""
    assert stop.sampled is not None, "a surrogate samples it"
    return float(np.quantile(stop.sampled, SHARE))


def share(stops: list[Stop], factor: float = 1.0) -> float:
    """The share of stops with a regret, of these, whose percentile times this holds; not a number without any."""
    held = [stop.regret <= factor * percentile(stop) for stop in stops if stop.regret > 0]
    return sum(held) / len(held) if held else math.nan


def factor_of(stops: list[Stop]) -> float:
    """The factor by which nine of ten percentiles hold among stops with a regret; infinite where they are too few for one."""
    ratios = sorted(stop.regret / max(percentile(stop), LEAST) for stop in stops if stop.regret > 0)
    place = math.ceil(SHARE * (len(ratios) + 1))
    return ratios[place - 1] if place <= len(ratios) else math.inf


def said(name: str, stops: list[Stop], left_out: float) -> str:
    """A line of the table."""
    trials, regret, stated, at_most = (
        median(found)
        for found in (
            [stop.trials for stop in stops],
            [stop.regret for stop in stops],
            [0.0 if stop.sampled is None else float(stop.sampled.mean()) for stop in stops],
            [percentile(stop) for stop in stops],
        )
    )
    with_regret, largest = sum(stop.regret > 0 for stop in stops), max(stop.regret for stop in stops)
    shares = f"{with_regret:5d} {share(stops):7.0%} {left_out:9.0%}"
    return f"{name:42s} {len(stops):5d} {trials:7.0f} {regret:8.2%} {largest:8.2%} {stated:8.2%} {at_most:8.2%} {shares}"


def main() -> None:
    """Print the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="searches of each kind (default: %(default)s)")
    parser.add_argument("--starts", default="all,none", help="hand-written starts: all, less5, less20, none (default: %(default)s)")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    by_sweep = {
        sweeps.swept(sweep).label: [
            stopped(sweeps.swept(sweep), starts, seed).stop for starts in options.starts.split(",") for seed in range(options.seeds)
        ]
        for sweep in sweeps.sweeps()
    }
    heads = ("regret", "largest", "stated", "90th")
    print(f"{'':42s} {'stops':>5s} {'trials':>7s} {' '.join(f'{head:>8s}' for head in heads)} {'>0':>5s} {'holds':>7s} {'left out':>9s}")
    held: list[bool] = []
    for name, stops in by_sweep.items():
        factor = factor_of([stop for other, theirs in by_sweep.items() if other != name for stop in theirs])
        held += [stop.regret <= factor * percentile(stop) for stop in stops if stop.regret > 0]
        print(said(name, stops, share(stops, factor)), flush=True)
    print(said("all", [stop for stops in by_sweep.values() for stop in stops], sum(held) / len(held) if held else math.nan))
