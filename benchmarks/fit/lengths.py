"""Fit of the surrogate's length scales to trials of archived records, none of which is of a sweep.

Each problem is a Gaussian process of its own over the cost model's error. Lengths, errors and noise are those that make the times of all
problems together likeliest (type II maximum likelihood), each drawn to a common value, so that an axis of which trials say little has that.
Prints them, and the log likelihood of trials and sweeps with one length for all axes and with these. The sweeps are not fitted to.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks.cases import sweeps as replay
from benchmarks.fit.cost import NEAR_THE_BEST
from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import ARCHIVED, todays
from flashtune.core.gpu.target import find_target
from flashtune.core.records.results import SearchResult
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.tuner.propose.space import Array, Candidate, Candidates, SearchSpace

SCALE_ERROR, COMMON = 0.5, {"length": 2.5, "error": 0.1, "family": 0.1, "noise": 0.01}
"""Where the fit begins, and what it is drawn to: by a factor of two a length, of three an error."""
MOST = 250
"""Candidates of one problem, of which a sweep has more."""
ROOT_5 = math.sqrt(5)


class Tried(SearchSpace):
    """A space that holds tried candidates alone."""

    tried: Sequence[Candidate] = ()

    def every(self) -> Iterable[Candidate]:
        """In place of all that is valid."""
        return self.tried


@dataclass(frozen=True, slots=True)
class Group:
    """One problem's trials: squared steps apart by axis, whether two are of one family, and the cost model's log errors."""

    steps: dict[str, Array]
    same: NDArray[np.bool_]
    errors: Array


def group_of(result: SearchResult) -> Group | None:
    """Trials of a problem that are not far behind its best; None where they are too few."""
    known, spec, target = families(), result.problem.spec(), find_target(result.gpu)
    times: dict[Candidate, float] = {}
    for outcome in result.outcomes:
        measured, tried = outcome.trial or outcome.measurement, todays(outcome.template, outcome.config)
        if tried is None:
            continue
        family, config = known[tried[0]], tried[1]
        if measured is not None and family.violated(config, spec, target) is None and family.expected(config, spec, target) is not None:
            times[Candidate(family=family, config=config)] = math.log(measured.median_us)
    near = [candidate for candidate, time in times.items() if time < min(times.values()) + NEAR_THE_BEST]
    space = Tried(known, result.problem, target, only_suited=False)
    space.tried = [near[index] for index in sorted(np.random.default_rng(0).permutation(len(near))[:MOST])]
    if len(space.tried) < 4:
        return None
    pool = Candidates(space, result.problem)
    apart = np.square(pool.features[:, None] - pool.features[None])
    columns = np.array(pool.columns)
    steps = {name: apart[:, :, columns == name].sum(axis=2) for name in dict.fromkeys(pool.columns)}
    errors = np.array([times[candidate] for candidate in pool.candidates]) - pool.log_times
    return Group(steps, steps[""] == 0, errors - np.median(errors))


def loss(logs: Array, axes: Sequence[str], groups: Iterable[Group]) -> tuple[float, Array]:
    """The negative log likelihood, less a constant, and its derivatives by the logarithms of lengths, error, family's error and noise."""
    lengths, (error, family, noise) = np.exp(logs[:-3]), np.exp(2 * logs[-3:])
    total, slopes = 0.0, np.zeros(len(logs))
    for group in groups:
        scaled = {place: group.steps[name] / lengths[place] ** 2 for place, name in enumerate(axes) if name in group.steps}
        squared = sum(scaled.values()) + np.zeros_like(group.steps[""])
        distance = np.sqrt(squared)
        fading = np.exp(-ROOT_5 * distance)
        alike = (1 + ROOT_5 * distance + 5 / 3 * squared) * fading
        kin = np.where(group.same, 1.0, 0.0)
        inverse = np.linalg.inv(SCALE_ERROR**2 + family * kin + error * alike + noise * np.eye(len(kin)))
        explained = inverse @ group.errors
        total += 0.5 * float(group.errors @ explained - np.linalg.slogdet(inverse)[1])
        by_covariance = 0.5 * (inverse - np.outer(explained, explained))
        by_distance = by_covariance * error * (5 / 3) * (1 + ROOT_5 * distance) * fading
        for place, steps in scaled.items():
            slopes[place] += float((by_distance * steps).sum())
        slopes[-3:] += [float((by_covariance * part).sum()) for part in (2 * error * alike, 2 * family * kin)] + [
            2 * noise * float(np.trace(by_covariance))
        ]
    return total, slopes


def main() -> None:
    """Fit, and print its likelihood on trials and on sweeps."""
    argument_parser(__doc__).parse_args()
    with Store.open(ARCHIVED, writable=False) as store:
        trials = [group for result in store.results() if (group := group_of(result)) is not None]
    sweeps = {sweep.problem.label(): group for sweep in replay.sweeps() if (group := group_of(sweep)) is not None}
    axes = sorted({name for group in trials for name in group.steps})
    start = np.log([COMMON["length"]] * len(axes) + [COMMON[name] for name in ("error", "family", "noise")])
    widths = np.log([2.0] * len(axes) + [3.0] * 3)

    def drawn(logs: Array) -> tuple[float, Array]:
        value, slopes = loss(logs, axes, trials)
        return value + 0.5 * float(np.square((logs - start) / widths).sum()), slopes + (logs - start) / widths**2

    fitted = minimize(drawn, start, jac=True, method="L-BFGS-B").x
    for name, value in zip([*(axis or "of another family" for axis in axes), *list(COMMON)[1:]], np.exp(fitted), strict=True):
        print(f"{name}: {value:.2f}")
    for name, groups in (("trials", trials), *((label, [group]) for label, group in sweeps.items())):
        common, own = (-loss(logs, axes, groups)[0] for logs in (start, fitted))
        print(f"log likelihood of {name}: {common:.0f} with one length, {own:.0f} with these")
