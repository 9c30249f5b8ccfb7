"""What the times of tried candidates say of the others: a Gaussian process over the cost model's error."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashtune.tuner.pool import Array, Pool

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor

ERROR = 0.15
"""How far the cost model is off from candidate to candidate, as a share of the time."""
SCALE_ERROR = 0.5
"""How far it is off for all candidates of a problem alike."""
FAMILY_ERROR = 0.1
"""How far it is off for all candidates of a family alike."""
NOISE = 0.01
"""How far two times of one candidate lie apart."""
LENGTH = 1.5
"""How many steps of an axis it takes for errors to be little akin."""
SAME = 1e6
"""A length on which nothing changes."""


class Surrogate:
    """Expected log times of a pool's candidates, and how sure they are, given those that were tried.

    The mean is the cost model's; what a Gaussian process (scikit-learn's, with Matern's kernel and a length for each axis) adds is its
    error: one of all candidates alike, one of a family, and one that nearby candidates share.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._process = _process(pool)
        self._log_scale = 0.0

    def learn(self, times: Mapping[int, float], believed: Sequence[int] = ()) -> None:
        """Take the log times of candidates by their places, and believe of others (those under way) what is expected of them."""
        # The error of all alike is as good as known after one time; without it numbers stay small.
        places = list(times)
        errors = np.array([times[place] for place in places]) - self._pool.log_times[places]
        self._log_scale = float(np.median(errors)) if places else 0.0
        self._fit(places, errors - self._log_scale)
        if believed:
            expected = self.expected(believed)[0] - self._pool.log_times[list(believed)] - self._log_scale
            self._fit([*places, *believed], np.concatenate([errors - self._log_scale, expected]))

    def expected(self, places: Sequence[int]) -> tuple[Array, Array]:
        """Means and standard deviations of the log times at these places."""
        mean, deviation = self._process.predict(self._pool.features[list(places)], return_std=True)
        return mean + self._pool.log_times[list(places)] + self._log_scale, deviation

    def draws(self, places: Sequence[int], count: int) -> Array:
        """Log times that may well be, all places together: a row to a place, a column to a draw."""
        drawn: Array = self._process.sample_y(self._pool.features[list(places)], count, random_state=0)
        return drawn + (self._pool.log_times[list(places)] + self._log_scale)[:, None]

    def _fit(self, places: list[int], errors: Array) -> None:
        self._process = _process(self._pool)
        if places:
            self._process.fit(self._pool.features[places], errors)


def _process(pool: Pool) -> "GaussianProcessRegressor":
    # Takes a second to import, which only searches that ask it should pay.
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

    of_a_family = [SAME if name else 0.3 for name in pool.columns]
    kernel = (
        ConstantKernel(SCALE_ERROR**2)
        + ConstantKernel(FAMILY_ERROR**2) * RBF(of_a_family)
        + ConstantKernel(ERROR**2) * Matern([LENGTH] * len(pool.columns), nu=2.5)
    )
    return GaussianProcessRegressor(kernel, alpha=NOISE**2, optimizer=None)
