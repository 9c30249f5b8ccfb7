"""Surrogate that predicts times of untried candidates: a Gaussian process over the cost model's error, whose prior is what trials of other
problems leave open.

Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.linalg import cho_solve, solve_triangular
from threadpoolctl import ThreadpoolController

from flashtune.templates.expected import learned_of
from flashtune.templates.learned.residual import alike
from flashtune.tuner.propose.space import Array, Candidates

ERROR = 0.11
"""Standard deviation of the cost model's error from candidate to candidate, in log time, in families without trials of other problems."""
OWN_ERROR = 0.02
"""That of what trials of other problems can't tell, in the other families (benchmarks/run.py stops)."""
TOLD = 0.5
"""Share of the regression's deviations that counts among candidates worth a trial: its trials are also of bad ones, whose errors are
larger."""
SCALE_ERROR = 0.5
"""Standard deviation of its error common to all candidates of a problem, in log time."""
FAMILY_ERROR = 0.11
"""Standard deviation of its error common to all candidates of a family, in log time."""
NOISE = 0.01
"""Standard deviation between two times of one candidate, in log time."""
JITTER = 1e-8
"""Variance added to the diagonal, for covariances of nearly equal candidates that rounding makes indefinite."""
LENGTH = 2.5
"""Length scale of an axis without fitted data, in steps of its values."""
LENGTHS = {
    "BLOCK_M": 2.2,
    "BLOCK_N": 1.5,
    "ctas_per_sm": 3.2,
    "intra_wg_overlap": 1.7,
    "num_stages": 1.9,
    "num_warps": 3.9,
    "pingpong": 6.0,
    "programs": 1.2,
    "section": 5.3,
    "tiles": 1.0,
}
"""Fitted length scales by axis (benchmarks/run.py fit_lengths, with `ERROR`, on an earlier cost model); a new fit finds the best of the
committed sweeps no sooner."""
NEAR = 400
"""Trials of other problems that covariances are conditioned on: means are of all of them, and more change deviations little."""


_BLAS = ThreadpoolController()
"""Threads of numpy's and scipy's BLAS: where compilers use the cores, more than one makes products of a few hundred rows five times
slower."""


class Surrogate:
    """Expected log times of a pool's candidates with their uncertainty, from those that were tried.

    The prior's mean is the cost model's time with its learned error, and its covariance that of `Covariances`.
    """

    def __init__(self, pool: Candidates) -> None:
        self._pool = pool
        with _BLAS.limit(limits=1):
            self._covariances = Covariances(pool)
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
        variance = self._covariances.variances[places] - np.square(explained).sum(axis=0)
        return self._mean(across, places), np.sqrt(np.maximum(variance, 0.0))

    def samples(self, places: Sequence[int], count: int) -> Array:
        """Joint samples of the log times: (places, count)."""
        places = list(places)
        with _BLAS.limit(limits=1):
            across = self._across(places)
            explained = solve_triangular(self._factor, across, lower=True, check_finite=False) if self._known else across
            covariance = self._covariances.among(places) - explained.T @ explained
            factor = np.linalg.cholesky(covariance + JITTER * np.eye(len(places)))
            sampled = factor @ np.random.default_rng(0).standard_normal((len(places), count))
        return np.asarray(sampled + self._mean(across, places)[:, None])

    def _fit(self, places: list[int], errors: Array) -> None:
        self._known = places
        if places:
            with _BLAS.limit(limits=1):
                factor: Array = np.linalg.cholesky(self._covariances.among(places) + NOISE**2 * np.eye(len(places)))  # type: ignore[assignment]
                self._factor, self._weights = factor, cho_solve((factor, True), errors, check_finite=False)

    def _across(self, places: list[int]) -> Array:
        """Covariances of the known candidates with these: (known, places)."""
        return np.array([self._covariances.row(place)[places] for place in self._known]).reshape(len(self._known), len(places))

    def _mean(self, across: Array, places: list[int]) -> Array:
        wrong = self._weights @ across if self._known else np.zeros(len(places))
        return np.asarray(wrong + self._pool.log_times[places] + self._log_scale)


class Covariances:
    """Prior covariances of a pool's log times; rows are cached because a search needs them again and again.

    They add up a part common to all candidates, one common to a family, one that nearby candidates share (Matern's kernel), and in
    families with trials of other problems that of the regression over these trials, given those of the nearest problems. There the third
    part is small.
    """

    def __init__(self, pool: Candidates) -> None:
        self._families = np.unique(pool.families, return_inverse=True)[1]
        lengths = np.array([LENGTHS.get(name, LENGTH) for name in pool.columns])
        self._features = pool.features / lengths
        self._own = np.full(len(pool), ERROR)
        self._rows: dict[int, Array] = {}
        # Places of candidates that trials of other problems tell of, their coordinates, and what these explain (trials, candidates).
        self._told, self._prior = np.zeros(0, dtype=np.intp), 0.0
        self._coordinates, self._explained = np.zeros((0, 0)), np.zeros((0, 0))
        self._learn(pool)
        # Of each candidate its index among the told ones, or -1.
        self._told_as = np.full(len(pool), -1)
        self._told_as[self._told] = np.arange(len(self._told))
        self.variances = SCALE_ERROR**2 + FAMILY_ERROR**2 + self._own**2
        self.variances[self._told] += np.maximum(self._prior - np.square(self._explained).sum(axis=0), 0.0)

    def _learn(self, pool: Candidates) -> None:
        found = learned_of(pool.problem)
        if found is None:
            return
        likeness, known = found
        told = [place for place, name in enumerate(pool.families) if name in likeness.families and pool.estimated[place]]
        if not told:
            return
        self._told = np.array(told, dtype=np.intp)
        self._own[self._told] = OWN_ERROR
        tried = ((pool.candidates[place].family.name, pool.candidates[place].config) for place in told)
        self._coordinates = np.array([likeness.config(pool.problem, one, pool.target) for one in tried])
        self._prior = TOLD**2 * (likeness.together**2 + likeness.alone**2)
        near = known.near(pool.problem, NEAR)
        across = near.there[:, None] * alike(near.configs, self._coordinates)
        self._explained = TOLD * solve_triangular(np.linalg.cholesky(near.among), across, lower=True, check_finite=False)

    def row(self, place: int) -> Array:
        """Covariances of one candidate with all."""
        if place not in self._rows:
            self._rows[place] = self._between([place], slice(None))[0]
        return self._rows[place]

    def among(self, places: Sequence[int]) -> Array:
        """Covariances of these candidates with each other."""
        return self._between(list(places), list(places))

    def _between(self, places: list[int], others: slice | list[int]) -> Array:
        """Covariances (places, others)."""
        steps = self._features[places, None] - self._features[others]
        apart = math.sqrt(5.0) * np.sqrt(np.square(steps).sum(axis=2))
        near = self._own[places, None] * self._own[others] * (1.0 + apart + np.square(apart) / 3.0) * np.exp(-apart)
        found = SCALE_ERROR**2 + FAMILY_ERROR**2 * (self._families[places, None] == self._families[others]) + near
        rows, columns = self._told_as[places], self._told_as[others]
        mine, theirs = rows[rows >= 0], columns[columns >= 0]
        if len(mine):
            same = alike(self._coordinates[mine], self._coordinates[theirs])
            found[np.ix_(rows >= 0, columns >= 0)] += self._prior * same - self._explained[:, mine].T @ self._explained[:, theirs]
        return np.asarray(found)
