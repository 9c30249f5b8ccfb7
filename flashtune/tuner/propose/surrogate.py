"""Surrogate that predicts times of untried candidates: a Gaussian process over the cost model's error."""

# scikit-learn has no types, and pyright infers narrower ones from its code than its documents allow.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportReturnType=false

from collections.abc import Mapping, Sequence

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, Matern
from threadpoolctl import ThreadpoolController

from flashtune.tuner.propose.space import Array, Candidates

ERROR = 0.11
"""Standard deviation of the cost model's error from candidate to candidate, in log time."""
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
MANY = 128
"""Number of candidates from which covariances are computed among them alone: full rows would hardly be reused."""
SAME, OTHER = 1e6, 0.3
"""Length scales so long that nothing varies, and so short that everything does."""


_BLAS = ThreadpoolController()
"""Threads of numpy's and scipy's BLAS: where compilers use the cores, more than one makes products of a few hundred rows five times
slower."""


class Surrogate:
    """Expected log times of a pool's candidates with their uncertainty, from those that were tried.

    The mean is the cost model's; scikit-learn's Gaussian process models its error: a part common to all candidates, one common to a family,
    and one that nearby candidates share (Matern's kernel).
    """

    def __init__(self, pool: Candidates) -> None:
        self._pool = pool
        self._kernel = _PlaceKernel(_Covariances(pool))
        self._process = self._fresh()
        self._log_scale = 0.0

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
        with _BLAS.limit(limits=1):
            mean, deviation = self._process.predict(_column(places), return_std=True)
        return mean + self._pool.log_times[list(places)] + self._log_scale, deviation

    def samples(self, places: Sequence[int], count: int) -> Array:
        """Joint samples of the log times: (places, count)."""
        with _BLAS.limit(limits=1):
            mean, covariance = self._process.predict(_column(places), return_cov=True)
            # scikit-learn's own samples need a decomposition some hundred times as expensive as Cholesky's.
            factor = np.linalg.cholesky(covariance + JITTER * np.eye(len(places)))
            sampled = factor @ np.random.default_rng(0).standard_normal((len(places), count))
        return np.asarray(sampled + (mean + self._pool.log_times[list(places)] + self._log_scale)[:, None])

    def _fit(self, places: list[int], errors: Array) -> None:
        self._process = self._fresh()
        if places:
            with _BLAS.limit(limits=1):
                self._process.fit(_column(places), errors)

    def _fresh(self) -> GaussianProcessRegressor:
        return GaussianProcessRegressor(self._kernel, alpha=NOISE**2, optimizer=None)


class _Covariances:
    """Covariances of errors, a row per tried candidate, cached because a search needs them again and again."""

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
        """Covariances of one candidate with all."""
        if place not in self._rows:
            self._rows[place] = self._kernel(self._features[place : place + 1], self._features)[0]
        return self._rows[place]

    def among(self, places: Array) -> Array:
        """Covariances of these candidates with each other alone."""
        return np.asarray(self._kernel(self._features[places.astype(np.intp)]))

    def __deepcopy__(self, memo: object) -> "_Covariances":
        # scikit-learn copies a kernel before it fits.
        return self


class _PlaceKernel(Kernel):  # type: ignore[misc]
    """Kernel of scikit-learn whose points are the places of candidates."""

    def __init__(self, rows: _Covariances) -> None:
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
        """Variances, which are all equal."""
        return np.full(len(X), self.rows.variance)

    def is_stationary(self) -> bool:
        """True: only distances count."""
        return True


def _column(places: Sequence[int]) -> Array:
    return np.array(places, dtype=float)[:, None]
