"""Residual of the cost model for kernels of some families, learned from trials of similar problems and configs.

Gaussian process regression (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter 2) of the logarithm of measured
over expected time. benchmarks/run.py fit_residual solves for the weights; here they are only multiplied with covariances of trials.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem

if TYPE_CHECKING:
    # A first call needn't import this.
    from numpy.typing import NDArray


Tried = tuple[str, Config]
"""A family's name, and a config of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Likeness:
    """Similarity of two trials of kernels of some families.

    `of_problem` returns a problem's coordinates, and `of_config` those of a family's config at a problem on a GPU: numbers in
    the order of `problem_scales` and `config_scales`, the length scales of their covariance. Coordinates of `lengths` are capped at the
    longest of all trials.

    `families` maps each family to its prior mean, a logarithm of time over the model's. `together` and `alone` are prior standard
    deviations of logarithms: of a config at a problem, and of a config over all problems; `noise` is that of a trial, and `offset` that
    of all trials of a problem together.
    """

    families: Mapping[str, float]
    serves: Callable[[Problem], bool]
    file: str
    problem_scales: Mapping[str, float]
    config_scales: Mapping[str, float]
    lengths: frozenset[str]
    of_problem: Callable[[Problem], Sequence[float]]
    of_config: Callable[[Problem, Tried, Target], Sequence[float]]
    together: float
    alone: float
    noise: float
    offset: float

    def problem(self, problem: Problem) -> list[float]:
        """A problem's coordinates in units of their scales."""
        return [value / scale for value, scale in zip(self.of_problem(problem), self.problem_scales.values(), strict=True)]

    def config(self, problem: Problem, tried: Tried, target: Target) -> list[float]:
        """A config's coordinates in units of their scales."""
        return [value / scale for value, scale in zip(self.of_config(problem, tried, target), self.config_scales.values(), strict=True)]


_AT_ONCE = 1024
"""Configs that are compared at once; a search has up to 20,000."""


def alike(ours: "NDArray[np.float64]", theirs: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """The squared exponential covariance (n, m) of coordinates (n, c) and (m, c): 1 for equal ones, towards 0 for distant ones."""
    # A matrix product would wake all threads of a BLAS, which takes longer than a call's few configs.
    squares = np.zeros((len(ours), len(theirs)))
    for mine, other in zip(ours.T, theirs.T, strict=True):
        squares += np.square(mine[:, None] - other)
    return np.exp(-0.5 * squares)


class Residual:
    """Regression over a set of trials: coordinates of distinct problems (p, .) and configs (c, .), and of each trial the indices of its
    problem and config, and its weight.

    Raises KeyError or ValueError for inconsistent arrays.
    """

    def __init__(self, likeness: Likeness, known: "Mapping[str, NDArray[Any]]") -> None:
        self._likeness = likeness
        self._problems, self._configs, self._weights = (np.asarray(known[name], dtype=float) for name in ("problems", "configs", "weights"))
        self._problem_of, self._config_of = (np.asarray(known[name], dtype=np.intp) for name in ("problem_of", "config_of"))
        scales = (len(likeness.problem_scales),), (len(likeness.config_scales),)
        shapes = (self._problems.shape[1:], self._configs.shape[1:], self._problem_of.shape, self._config_of.shape)
        if shapes != (*scales, self._weights.shape, self._weights.shape):
            raise ValueError(f"inconsistent shapes of arrays: {shapes}")
        if not all(np.isfinite(one).all() for one in (self._problems, self._configs, self._weights)):
            raise ValueError("some of its numbers aren't finite")
        for places, there in ((self._problem_of, self._problems), (self._config_of, self._configs)):
            if not len(places) or places.min() < 0 or places.max() >= len(there):
                raise ValueError("some of its trials lack a problem or a config")
        longest = zip(likeness.problem_scales, self._problems.max(0), strict=True)
        self._most = np.array([most if name in likeness.lengths else math.inf for name, most in longest])

    def of(self, problem: Problem, configs: Sequence[Tried], target: Target, *, caution: float = 0.0) -> list[float]:
        """Logarithms of the configs' times over the model's, up to an offset common to a problem.

        `caution` adds that many standard deviations given the nearest single trial, so that a config far from all trials isn't chosen by
        the cost model alone.
        """
        likeness = self._likeness
        there = alike(np.minimum([likeness.problem(problem)], self._most), self._problems)[0]
        covariances = likeness.together**2 * there[self._problem_of] + likeness.alone**2
        by_config = np.bincount(self._config_of, self._weights * covariances, len(self._configs))
        ours = np.array([likeness.config(problem, config, target) for config in configs])
        found: list[float] = []
        for begin in range(0, len(ours), _AT_ONCE):
            same = alike(ours[begin : begin + _AT_ONCE], self._configs)
            wrong = (same * by_config).sum(1)
            found += (wrong + caution * self._left_open(same, covariances) if caution else wrong).tolist()
        return [more + likeness.families[name] for (name, _), more in zip(configs, found, strict=True)]

    def _left_open(self, same: "NDArray[np.float64]", covariances: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """The standard deviation of each config given its nearest trial; `same` are covariances with known configs (n, c), `covariances`
        those of a problem with each trial's."""
        variance, nearest = self._likeness.together**2 + self._likeness.alone**2, np.zeros(len(self._configs))
        np.maximum.at(nearest, self._config_of, covariances / variance)
        found: NDArray[np.float64] = np.sqrt(variance * np.maximum(0.0, 1.0 - np.square((same * nearest).max(1))))
        return found


@cache
def learned(likeness: Likeness) -> Residual | None:
    """The residual learned from trials on an H200, for all GPUs with these kernels; None, with a warning, where the package's file is
    damaged or missing."""
    path = Path(str(resources.files("flashtune.templates.learned"))) / likeness.file
    try:
        with np.load(path, allow_pickle=False) as known:
            return Residual(likeness, known)
    except Exception as error:
        # A damaged archive raises errors of zipfile, zlib, numpy or its parser of headers.
        warnings.warn(
            f"flashtune: {path} can't be read ({error}), so near records are chosen by the cost model alone: install flashtune again",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
