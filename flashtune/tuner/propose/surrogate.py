"""What the times of tried candidates say of the others: a Gaussian process over the cost model's error."""

# scikit-learn has no types, and what pyright makes of its code is narrower than its documents.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportReturnType=false

from collections.abc import Mapping, Sequence

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, Matern
from threadpoolctl import ThreadpoolController

from flashtune.tuner.propose.candidates import Array, Candidates

ERROR = 0.11
"""How far the cost model is off from candidate to candidate, as a share of the time."""
SCALE_ERROR = 0.5
"""How far it is off for all candidates of a problem alike."""
FAMILY_ERROR = 0.11
"""How far it is off for all candidates of a family alike."""
NOISE = 0.01
"""How far two times of one candidate lie apart."""
JITTER = 1e-8
"""A variance that is added to each, for what rounding took from covariances of candidates that are all but one."""
LENGTH = 2.5
"""How many steps of an axis it takes for errors to be little akin, where trials say nothing else of the axis."""
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
"""The same where they do. The lengths and `ERROR` made trials of earlier rows the likeliest by an earlier cost model
(benchmarks/run.py fit_lengths); by today's others would, and find the best of the committed sweeps no sooner."""
MANY = 128
"""Of so many candidates the covariances with each other are computed alone: rows of all of them would hardly be asked for again."""
SAME, OTHER = 1e6, 0.3
"""Lengths on which nothing changes, and on which everything does."""


_BLAS = ThreadpoolController()
"""Of the libraries that numpy and scipy multiply by: where compilers have the cores, more than one thread of theirs takes five times as
long for matrices of a few hundred rows."""


class Surrogate:
    """Expected log times of a pool's candidates, and how sure they are, given those that were tried.

    The mean is the cost model's; what a Gaussian process (scikit-learn's) adds is its error: one of all candidates alike, one of a family,
    and one that nearby candidates share (Matern's kernel).
    """

    def __init__(self, pool: Candidates) -> None:
        self._pool = pool
        self._kernel = _Looked(_Rows(pool))
        self._process = self._fresh()
        self._log_scale = 0.0

    def learn(self, times: Mapping[int, float], believed: Sequence[int] = ()) -> None:
        """Take the log times of candidates by their places, and believe of others (those under way) what is expected of them."""
        places = list(times)
        errors = np.array([times[place] for place in places]) - self._pool.log_times[places]
        # The error of all alike is as good as known after one time; without it numbers stay small.
        self._log_scale = float(np.median(errors)) if places else 0.0
        self._fit(places, errors - self._log_scale)
        if believed:
            expected = self.expected(believed)[0] - self._pool.log_times[list(believed)] - self._log_scale
            self._fit([*places, *believed], np.concatenate([errors - self._log_scale, expected]))

    def expected(self, places: Sequence[int]) -> tuple[Array, Array]:
        """Means and standard deviations of the log times at these places."""
        with _BLAS.limit(limits=1):
            mean, deviation = self._process.predict(_column(places), return_std=True)
        return mean + self._pool.log_times[list(places)] + self._log_scale, deviation

    def draws(self, places: Sequence[int], count: int) -> Array:
        """Log times that may well be, all places together: a row to a place, a column to a draw."""
        with _BLAS.limit(limits=1):
            mean, covariance = self._process.predict(_column(places), return_cov=True)
            # By Cholesky's factor: scikit-learn's own draws take a decomposition that costs some hundred times as much.
            factor = np.linalg.cholesky(covariance + JITTER * np.eye(len(places)))
            drawn = factor @ np.random.default_rng(0).standard_normal((len(places), count))
        return np.asarray(drawn + (mean + self._pool.log_times[list(places)] + self._log_scale)[:, None])

    def _fit(self, places: list[int], errors: Array) -> None:
        self._process = self._fresh()
        if places:
            with _BLAS.limit(limits=1):
                self._process.fit(_column(places), errors)

    def _fresh(self) -> GaussianProcessRegressor:
        return GaussianProcessRegressor(self._kernel, alpha=NOISE**2, optimizer=None)


class _Rows:
    """How errors of candidates are akin, a row to a candidate that was tried: computed once, for a search asks for them again and again."""

    def __init__(self, pool: Candidates) -> None:
        own_family = [SAME if name else OTHER for name in pool.columns]
        self._features = pool.features
        self._kernel = (
            ConstantKernel(SCALE_ERROR**2)
            + ConstantKernel(FAMILY_ERROR**2) * RBF(own_family)
            + ConstantKernel(ERROR**2) * Matern([LENGTHS.get(name, LENGTH) for name in pool.columns], nu=2.5)
        )
        self._rows: dict[int, Array] = {}
        self.variance = float(self._kernel.diag(self._features[:1])[0])

    def row(self, place: int) -> Array:
        """The covariances of one candidate with all."""
        if place not in self._rows:
            self._rows[place] = self._kernel(self._features[place : place + 1], self._features)[0]
        return self._rows[place]

    def among(self, places: Array) -> Array:
        """The covariances of these candidates with each other, without those with all others."""
        return np.asarray(self._kernel(self._features[places.astype(np.intp)]))

    def __deepcopy__(self, memo: object) -> "_Rows":
        # scikit-learn copies a kernel before it fits.
        return self


class _Looked(Kernel):  # type: ignore[misc]
    """A kernel of scikit-learn whose points are the places of candidates."""

    def __init__(self, rows: _Rows) -> None:
        self.rows = rows

    def __call__(self, X: Array, Y: Array | None = None, eval_gradient: bool = False) -> Array:
        """Covariances of points `X` (n, 1) with `Y` (m, 1), or with themselves."""
        own = X[:, 0].astype(int)
        if Y is None and len(own) >= MANY:
            return self.rows.among(own)
        others = own if Y is None else Y[:, 0].astype(int)
        if len(others) < len(own):
            return np.array([self.rows.row(int(place))[own] for place in others]).T
        return np.array([self.rows.row(int(place))[others] for place in own])

    def diag(self, X: Array) -> Array:
        """Variances, all alike."""
        return np.full(len(X), self.rows.variance)

    def is_stationary(self) -> bool:
        """Only distances count."""
        return True


def _column(places: Sequence[int]) -> Array:
    return np.array(places, dtype=float)[:, None]
