"""Surrogate that predicts times of untried candidates: a Gaussian process over the error of the cost model and its learned residual.

Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from threadpoolctl import ThreadpoolController

from flashtune.tuner.propose.space import Array, Candidates

ERROR = 0.065
"""Standard deviation of the prior's error that near candidates share, in log time; that of held-out problems' trials is 0.04 to 0.10
(benchmarks/run.py fit_residual)."""
LEARNED_ERROR = 0.5
"""Standard deviation of the share by which the learned residual is wrong of all candidates of a problem alike: held-out problems' trials
are mostly 0.2 to 1.5 times what it says (benchmarks/run.py fit_residual)."""
SCALE_ERROR = 0.5
"""Standard deviation of its error common to all candidates of a problem, in log time."""
FAMILY_ERROR = 0.11
"""Standard deviation of its error common to all candidates of a family, in log time."""
NOISE = 0.01
"""Standard deviation between two times of one candidate, in log time."""
JITTER = 1e-8
"""Variance added to the diagonal, for covariances of nearly equal candidates that rounding makes indefinite."""
LENGTH = 3.0
"""Length scale of every axis, in steps of its values."""


_BLAS = ThreadpoolController()
"""Threads of numpy's and scipy's BLAS: where compilers use the cores, more than one makes products of a few hundred rows five times
slower."""


class Surrogate:
    """Expected log times of a pool's candidates with their uncertainty, from those that were tried.

    The prior's mean is the cost model's time with its learned residual. Its covariance adds up a part common to all candidates, one common
    to a family, one that nearby candidates share (Matern's kernel), and one in proportion to the learned residuals, which times may refute.
    """

    def __init__(self, pool: Candidates) -> None:
        self._pool = pool
        self._families = np.unique(pool.families, return_inverse=True)[1]
        self._features = pool.features / LENGTH
        self._variances = SCALE_ERROR**2 + FAMILY_ERROR**2 + ERROR**2 + np.square(LEARNED_ERROR * pool.learned)
        # Rows of covariances are cached because a search needs them again and again.
        self._rows: dict[int, Array] = {}
        self._log_scale = 0.0
        self._known: list[int] = []
        self._factor: Array = np.zeros((0, 0))
        self._weights: Array = np.zeros(0)

    def learn(self, times: Mapping[int, float], believed: Sequence[int] = ()) -> None:
        """Fit to the log times of candidates by their places; `believed` ones (pending) count with their expected times."""
        places = list(times)
        errors = np.array([times[place] for place in places]) - self._pool.log_times[places]
        # One time all but determines the common error; without it numbers stay small.
        self._log_scale = float(np.median(errors)) if places else 0.0
        self._fit(places, errors - self._log_scale)
        if believed:
            expected = self.expected(believed)[0] - self._pool.log_times[list(believed)] - self._log_scale
            self._fit([*places, *believed], np.concatenate([errors - self._log_scale, expected]))

    def expected(self, places: Sequence[int]) -> tuple[Array, Array]:
        """Means and standard deviations of the log times at these places."""
        places = list(places)
        with _BLAS.limit(limits=1):
            across = self._across(places)
            explained = solve_triangular(self._factor, across, lower=True, check_finite=False) if self._known else across
        variance = self._variances[places] - np.square(explained).sum(axis=0)
        return self._mean(across, places), np.sqrt(np.maximum(variance, 0.0))

    def samples(self, places: Sequence[int], count: int) -> Array:
        """Joint samples of the log times: (places, count)."""
        places = list(places)
        with _BLAS.limit(limits=1):
            across = self._across(places)
            explained = solve_triangular(self._factor, across, lower=True, check_finite=False) if self._known else across
            covariance = self.among(places) - explained.T @ explained
            factor = np.linalg.cholesky(covariance + JITTER * np.eye(len(places)))
            sampled = factor @ np.random.default_rng(0).standard_normal((len(places), count))
        return np.asarray(sampled + self._mean(across, places)[:, None])

    def _fit(self, places: list[int], errors: Array) -> None:
        self._known = places
        if places:
            with _BLAS.limit(limits=1):
                factor: Array = np.linalg.cholesky(self.among(places) + NOISE**2 * np.eye(len(places)))  # type: ignore[assignment]
                self._factor, self._weights = factor, cho_solve((factor, True), errors, check_finite=False)

    def _across(self, places: list[int]) -> Array:
        """Covariances of the known candidates with these: (known, places)."""
        for place in self._known:
            if place not in self._rows:
                self._rows[place] = self._between([place], slice(None))[0]
        return np.array([self._rows[place][places] for place in self._known]).reshape(len(self._known), len(places))

    def _mean(self, across: Array, places: list[int]) -> Array:
        wrong = self._weights @ across if self._known else np.zeros(len(places))
        return np.asarray(wrong + self._pool.log_times[places] + self._log_scale)

    def among(self, places: Sequence[int]) -> Array:
        """Prior covariances of these candidates with each other."""
        return self._between(list(places), list(places))

    def _between(self, places: list[int], others: slice | list[int]) -> Array:
        """Prior covariances (places, others)."""
        steps = self._features[places, None] - self._features[others]
        apart = math.sqrt(5.0) * np.sqrt(np.square(steps).sum(axis=2))
        near = ERROR**2 * (1.0 + apart + np.square(apart) / 3.0) * np.exp(-apart)
        kin = self._families[places, None] == self._families[others]
        alike = np.outer(self._pool.learned[places], self._pool.learned[others])
        return np.asarray(SCALE_ERROR**2 + FAMILY_ERROR**2 * kin + near + LEARNED_ERROR**2 * alike)
