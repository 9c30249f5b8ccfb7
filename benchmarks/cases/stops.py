"""Calibration of what a search says of its own end: its regret at the stop beside the 90th percentile that it states, on the sweeps.

Each search of each seed runs until the stopping rule ends it. Regret is that of its best candidate by the sweep's own times. Stops are
calibrated where the regret lies below the stated 90th percentile in 80 to 97 % of them. Prints a line to each sweep, and one to all.
"""

import random
from dataclasses import dataclass
from statistics import median
from unittest.mock import patch

import optuna

from benchmarks.cases import sweeps
from benchmarks.shared.environment import argument_parser
from flashtune.core.records.results import Outcome
from flashtune.templates import expected
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.search.stopping import UNTIL, Reason, StoppingRule, ending_of

MOST = 60
"""Trials at which a search ends in any case, as the command's do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One search's end: its trials, its true regret, and what it stated: the mean and the 90th percentile."""

    trials: int
    regret: float
    stated: float
    worst: float

    @property
    def holds(self) -> bool:
        """True if the regret is no larger than stated."""
        return self.regret <= self.worst


def stopped(place: sweeps.Swept, starts: str, seed: int) -> Stop:
    """A search until its rule ends it."""
    with patch.object(expected, "learned", place.learned):
        study, rule, noise = sweeps.study_of(place, "gp", starts, seed), StoppingRule(UNTIL), random.Random(seed)
        waiting: list[Candidate] = []
        found: list[Outcome] = []
        reason: Reason | None = None
        while len(found) < MOST and reason is None:
            waiting += study.ask(sweeps.AHEAD - len(waiting), limit=MOST)
            if not waiting:
                reason = "space"
                break
            candidate = waiting.pop(0)
            found.append(place.outcome(candidate, noise))
            study.tell(candidate, found[-1])
            rule.add(found[-1])
            if rule.nearly:
                regrets = study.regrets()
                assert regrets is not None, "some were timed"
                reason = rule.verdict(study.left_to_gain(), float(regrets.mean()))
        ending = ending_of(reason or "trials", study.regrets())
    assert ending.regret is not None and ending.worst is not None, "a surrogate knows"
    return Stop(trials=len(found), regret=place.regret(found), stated=ending.regret, worst=ending.worst)


def share(stops: list[Stop]) -> float:
    """The share of stops whose stated 90th percentile holds."""
    return sum(stop.holds for stop in stops) / len(stops)


def said(name: str, stops: list[Stop]) -> str:
    """A line of the table."""
    trials, regret, stated, at_most = (median(getattr(stop, field) for stop in stops) for field in ("trials", "regret", "stated", "worst"))
    largest = max(stop.regret for stop in stops)
    return f"{name:42s} {len(stops):5d} {trials:7.0f} {regret:8.2%} {largest:8.2%} {stated:8.2%} {at_most:8.2%} {share(stops):7.0%}"


def main() -> None:
    """Print the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="searches of each kind (default: %(default)s)")
    parser.add_argument("--starts", default="all,none", help="hand-written starts: all, less5, less20, none (default: %(default)s)")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    every: list[Stop] = []
    print(f"{'':42s} {'stops':>5s} {'trials':>7s} {'regret':>8s} {'largest':>8s} {'stated':>8s} {'90th':>8s} {'holds':>7s}")
    for sweep in sweeps.sweeps():
        for starts in options.starts.split(","):
            stops = [stopped(sweeps.swept(sweep), starts, seed) for seed in range(options.seeds)]
            every += stops
            print(said(f"{sweep.gpu} {sweep.problem.label()} {starts}", stops), flush=True)
    print(said("all", every))
