"""Predicted times of configs at sizes without measurements. Pure functions of configs and problems."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, rescales_grown, settles
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import DECODE_ROWS, Problem
from flashtune.templates.cost import predict_us
from flashtune.templates.family import Family, blocks_of_problem
from flashtune.templates.hopper.layout import HopperLayout, tile_queries
from flashtune.templates.learned.forwards import FORWARDS
from flashtune.templates.learned.gradients import GRADIENTS
from flashtune.templates.learned.residual import learned
from flashtune.templates.learned.steps import STEPS

LEFT_OUT = {
    "settling": 0.26,
    "settling small": 0.07,
    "settling features": 0.03,
    "rescaling what grew": 0.03,
    "pieces": 0.085,
    "chunks": -0.05,
    "in turns small": -0.09,
    "odd rows": 0.2,
    "four warpgroups wide": 0.35,
    "small tiles under a cap": -0.1,
    "ping-pong": -0.03,
    "three stages": -0.02,
    "drawn": 0.015,
    "chained": 0.025,
    "chained beside others": 0.11,
    "one tile": 0.19,
    "tall tiles": 0.35,
    "padding": -0.26,
}
"""Corrections to the cost model of Hopper kernels, logarithms of time.

In order: frozen row maxima, also for heads of up to 64 columns, also beside dropout or a soft cap; running maxima with thresholded
rescale; a split accumulator; swizzle-width tiles without padding; no overlap of products and softmax for such heads; tiles of 64 rows
where a row of Q is an odd number of 16 bytes (D = 40 and 72); four warpgroups for a tile of wider heads, which run out of registers; tiles
of 64 rows under a soft cap; ping-pong; three stages or more; tiles that are scheduled dynamically, chained, or chained with several
programs on an SM; one tile per program; a tile's excess over 128 rows (a share of them); and the logarithm of the rows' padding. Those of
frozen maxima, of one tile per program and of tall tiles shrink with the blocks of keys of a tile.
Fitted to trials on an H200 (benchmarks/run.py fit_expected; benchmarks/results/2026-11-23-stand-in/expected.json)."""

LIKENESSES = (FORWARDS, STEPS, GRADIENTS)
"""Sets of trials for the learned residual, each for its own problems."""

RANGES = {"flash_fwd": (1.05, 1.4, 2.15), "flash_bwd": (1.0, 1.15, 1.7), "flash_decode": (0.75, 0.9, 1.25)}
"""The 10th, 50th and 90th percentile of measured over predicted times by family, of the candidate that the cost model puts first, on an
H100 and an H200 (benchmarks/run.py fit_ranges). No other GPU's times are known."""

SMALL = 64
"""Greatest head size of small heads."""

LOG_HOST = math.log(22.0)
"""Logarithm of the host's microseconds of a PyTorch call: shorter kernels wait for the host
(benchmarks/results/2026-11-22-h200-steps/steps.json)."""


class Likely(NamedTuple):
    """Range of the microseconds that a predicted time stands for: what 8 of 10 problems of measured GPUs would take, and the median."""

    low: float
    about: float
    high: float

    def __str__(self) -> str:
        return f"about {self.about:.0f} us, likely {self.low:.0f} to {self.high:.0f}"


def likely(template: str, direction: str, predicted_us: float) -> Likely:
    """Range of a predicted time; families that RANGES lacks have that of the generic one of their direction."""
    return Likely(*(ratio * predicted_us for ratio in RANGES.get(template, RANGES[f"flash_{direction}"])))


class Estimate(NamedTuple):
    """The logarithm of a config's predicted microseconds, learned residual included, and that residual."""

    log_us: float
    learned: float


def estimates(
    candidates: Sequence[tuple[Family, Config]], problem: Problem, target: Target, *, caution: float = 0.0
) -> list[Estimate | None]:
    """Estimate of each candidate, None where `log_us` has none: its residual is learned from trials of similar problems
    (flashtune.templates.learned); `caution` is for choices without a measurement (`Residual.of`)."""
    logs = [log_us(family, config, problem, target) for family, config in candidates]
    found = [None if log is None else Estimate(log, 0.0) for log in logs]
    likeness = next((likeness for likeness in LIKENESSES if likeness.serves(problem)), None)
    if likeness is None:
        return found
    told = {
        place: log
        for place, ((family, _), log) in enumerate(zip(candidates, logs, strict=True))
        if log is not None and family.name in likeness.families
    }
    known = learned(likeness) if told else None
    if known is not None:
        wrong = known.of(problem, [(candidates[place][0].name, candidates[place][1]) for place in told], target, caution=caution)
        for (place, log), more in zip(told.items(), wrong, strict=True):
            found[place] = Estimate(log + more, more)
    return found


def logs_us(candidates: Sequence[tuple[Family, Config]], problem: Problem, target: Target, *, caution: float = 0.0) -> list[float | None]:
    """The logarithms of `estimates`."""
    return [None if one is None else one.log_us for one in estimates(candidates, problem, target, caution=caution)]


def log_us(family: Family, config: Config, problem: Problem, target: Target) -> float | None:
    """The logarithm of the predicted microseconds on the GPU; None for families without estimates and for configs that
    don't fit."""
    facts = family.expected(config, problem.spec(), target)
    if facts is None:
        return None
    found = predict_us(config, facts, problem, target)
    return math.log(found) + left_out(config, problem) if 0.0 < found < math.inf else None


def left_out(config: Config, problem: Problem) -> float:
    """The sum of LEFT_OUT for a config; 0 for families other than Hopper's and for decoding steps, to
    which it wasn't fitted."""
    if "pingpong" not in config or problem.n_q <= DECODE_ROWS:
        return 0.0
    return sum(constant * share for constant, share in zip(LEFT_OUT.values(), shares(config, problem), strict=True))


def shares(config: Config, problem: Problem) -> tuple[float, ...]:
    """Factors of LEFT_OUT for a Hopper kernel of this config, in order."""
    f, frozen, narrow = problem.features, settles(config), max(problem.d, problem.d_v) <= SMALL
    rows, keys, queries = config.number("BLOCK_M"), config.number("BLOCK_N"), tile_queries(config)
    shapes = problem.shapes()
    tiles = sum(count * math.ceil(one.n_q / queries) for one, count in shapes) / problem.batch
    padded_rows = sum(count * math.ceil(one.n_q / rows) for one, count in shapes) * rows / problem.batch
    of_a_block = tiles / max(tiles, blocks_of_problem(problem, queries, keys))
    return (
        frozen * of_a_block,
        frozen and narrow,
        frozen and (f.dropout or f.softcap),
        not frozen and rescales_grown(config),
        config.get("v_columns", "padded") == "pieces",
        HopperLayout.of(problem.spec(), config).chunked,
        config["intra_wg_overlap"] == 0 and narrow,
        rows == 64 and problem.d * ITEMSIZE[problem.dtype] % 32 != 0,
        rows == 256 and not narrow,
        rows == 64 and f.softcap,
        bool(config["pingpong"]),
        config.number("num_stages") > 2,
        config["order"] == "drawn",
        config["tiles"] == "chained",
        config["tiles"] == "chained" and config["ctas_per_sm"] != 1,
        (config["tiles"] == "one") * of_a_block,
        (rows / 128 - 1) * of_a_block,
        # For packed heads, too: packing saves whole tiles, which the cost model counts.
        math.log(padded_rows / problem.n_q),
    )
