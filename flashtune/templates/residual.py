"""What the cost model is still wrong by for a Hopper forward, told by the trials of similar problems and configs.

Gaussian process regression (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter 2) of the logarithm of measured
over expected time. benchmarks/fit_residual.py solves for the weights; here they are only multiplied with how alike trials are.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashtune.core.config import Config
from flashtune.core.problem import Problem

if TYPE_CHECKING:
    # A first call does without.
    from numpy.typing import NDArray

FAMILY = "flash_fwd_hopper"

PROBLEM_SCALES: Mapping[str, float] = {
    "log N_q": 4.0,
    "log N_kv": 4.0,
    "log query rows": 4.0,
    "log padded D": 2.0,
    "log padded D_v": 2.0,
    "log D of padded": 1.0,
    "log D_v of padded": 1.0,
    "causal": 1.3,
    "window": 1.3,
    "log keys in the window": 4.0,
    "mask": 1.3,
    "bias": 1.0,
    "dropout": 1.3,
    "soft cap": 1.3,
    "ALiBi": 2.0,
    "sinks": 4.0,
    "log heads to a key head": 10.0,
    "fp16": 8.0,
    "padding to 128 rows": 1.0,
    "padding to 192 rows": 1.0,
}
"""By how much two problems differ in each for one to say little of the other."""

LENGTHS = frozenset({"log N_q", "log N_kv", "log query rows", "log keys in the window"})
"""Of these what is longer than all trials is told of by the longest."""

CONFIG_SCALES: Mapping[str, float] = {
    "log BLOCK_M": 1.0,
    "192 rows": 1.5,
    "log BLOCK_N": 1.0,
    "intra_wg_overlap": 2.0,
    "maximum=first": 3.0,
    "rescale=grown": 4.0,
    "rescale=outgrown": 4.0,
    "log num_stages": 4.0,
    "order=drawn": 5.0,
    "pingpong": 4.0,
    "tiles=one": 2.0,
    "tiles=chained": 3.0,
    "v_columns=pieces": 4.0,
    "smem_columns=chunks": 3.0,
    "ctas_per_sm": 2.0,
    "log section": 8.0,
}
"""The same of two configs."""

TOGETHER, ALONE = 0.14, 0.10
"""How far off the model is (a standard deviation of logarithms): of a config at a problem, and of a config at all problems alike."""
NOISE, OFFSET = 0.03, 0.1
"""How far off a trial is by chance, and all trials of a problem together, which says nothing of its configs.

Rounded by hand: scales of the greatest likelihood choose no better (benchmarks/fit_residual.py)."""

_DATA = "residual.npz"
_AT_ONCE = 1024
"""So many configs are compared at once: a search asks of 20,000."""


def of_problem(problem: Problem) -> list[float]:
    """The coordinates of a problem, in units of PROBLEM_SCALES."""
    f, n = problem.features, problem.n_q
    padded, padded_v = (max(64, 1 << (d - 1).bit_length()) for d in (problem.d, problem.d_v))
    seen = min(problem.n_kv, 1 + sum(problem.n_kv if side is None else side for side in f.window or (None, 0)))
    values = (
        math.log2(n),
        math.log2(problem.n_kv),
        math.log2(problem.batch * problem.heads * n),
        math.log2(padded),
        math.log2(padded_v),
        math.log2(problem.d / padded),
        math.log2(problem.d_v / padded_v),
        f.causal,
        f.window is not None,
        math.log2(seen),
        f.mask == "bool",
        f.mask == "bias",
        f.dropout,
        f.softcap,
        f.alibi,
        f.sinks,
        math.log2(problem.heads / problem.kv_heads),
        problem.dtype == "fp16",
        -n % 128 / max(n, 128),
        -n % 192 / max(n, 192),
    )
    return [value / scale for value, scale in zip(values, PROBLEM_SCALES.values(), strict=True)]


def of_config(config: Config) -> list[float]:
    """The coordinates of a completed config of FAMILY, in units of CONFIG_SCALES."""
    rows = config.number("BLOCK_M")
    values = (
        math.log2(rows),
        rows == 192,
        math.log2(config.number("BLOCK_N")),
        config.number("intra_wg_overlap"),
        config["maximum"] == "first",
        config["rescale"] == "grown",
        config["rescale"] == "outgrown",
        math.log2(config.number("num_stages")),
        config["order"] == "drawn",
        bool(config["pingpong"]),
        config["tiles"] == "one",
        config["tiles"] == "chained",
        config["v_columns"] == "pieces",
        config["smem_columns"] == "chunks",
        config.number("ctas_per_sm"),
        math.log2(config.number("section")),
    )
    return [value / scale for value, scale in zip(values, CONFIG_SCALES.values(), strict=True)]


def alike(ours: "NDArray[np.float64]", theirs: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """The squared exponential covariance of coordinates, (n, c) and (m, c): 1 for the same, towards 0 for what differs."""
    # Without a product of matrices: a BLAS wakes all its threads for that, which takes longer than a call's few configs do.
    squares = np.zeros((len(ours), len(theirs)))
    for mine, other in zip(ours.T, theirs.T, strict=True):
        squares += np.square(mine[:, None] - other)
    return np.exp(-0.5 * squares)


class Residual:
    """What is known of a set of trials: coordinates of distinct problems (p, .) and configs (c, .), of each trial the places of its
    problem and config in these, and its weight.

    Raises KeyError or ValueError where these don't belong together.
    """

    def __init__(self, known: "Mapping[str, NDArray[Any]]") -> None:
        self._problems, self._configs, self._weights = (np.asarray(known[name], dtype=float) for name in ("problems", "configs", "weights"))
        self._problem_of, self._config_of = (np.asarray(known[name], dtype=np.intp) for name in ("problem_of", "config_of"))
        shapes = (self._problems.shape[1:], self._configs.shape[1:], self._problem_of.shape, self._config_of.shape)
        if shapes != ((len(PROBLEM_SCALES),), (len(CONFIG_SCALES),), self._weights.shape, self._weights.shape):
            raise ValueError(f"arrays of these shapes don't belong together: {shapes}")
        if not all(np.isfinite(one).all() for one in (self._problems, self._configs, self._weights)):
            raise ValueError("some of its numbers aren't finite")
        for places, there in ((self._problem_of, self._problems), (self._config_of, self._configs)):
            if not len(places) or places.min() < 0 or places.max() >= len(there):
                raise ValueError("some of its trials are of nothing")
        longest = self._problems.max(0)
        self._most = np.array([most if name in LENGTHS else math.inf for name, most in zip(PROBLEM_SCALES, longest, strict=True)])

    def of(self, problem: Problem, configs: Sequence[Config]) -> list[float]:
        """By how much longer than expected these completed configs take, logarithms; all of a problem are off by the same besides."""
        there = alike(np.minimum([of_problem(problem)], self._most), self._problems)[0]
        weights = self._weights * (TOGETHER**2 * there[self._problem_of] + ALONE**2)
        by_config = np.bincount(self._config_of, weights, len(self._configs))
        ours = np.array([of_config(config) for config in configs])
        found: list[float] = []
        for begin in range(0, len(ours), _AT_ONCE):
            found += (alike(ours[begin : begin + _AT_ONCE], self._configs) * by_config).sum(1).tolist()
        return found


@cache
def learned() -> Residual | None:
    """What was learned from the trials of an H200, for all GPUs with these kernels; None, with a warning, where the package's file is
    damaged or missing."""
    path = Path(str(resources.files("flashtune.templates"))) / _DATA
    try:
        with np.load(path, allow_pickle=False) as known:
            return Residual(known)
    except Exception as error:
        # A damaged archive is met with errors of zipfile, zlib, numpy and its parser of headers alike.
        warnings.warn(
            f"flashtune: {path} can't be read ({error}), so stand-ins are chosen by the cost model alone: install flashtune again",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
