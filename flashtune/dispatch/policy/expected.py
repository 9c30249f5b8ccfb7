"""What the cost model says of a config at sizes at which nobody measured it. Pure functions of configs and problems."""

import math

from flashtune.core.band import blocks_of_tiles
from flashtune.core.config import Config, settles
from flashtune.core.dtypes import ITEMSIZE
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.cost import predict_us
from flashtune.templates.family import Family

LEFT_OUT = {
    "settling": 0.191,
    "settling small": 0.047,
    "settling features": 0.049,
    "pieces": 0.104,
    "shared": -0.028,
    "in turns small": -0.086,
    "in turns large": 0.081,
    "odd rows": 0.204,
    "no ping-pong": 0.054,
    "three warpgroups": -0.049,
    "chained beside others": 0.187,
}
"""What the model leaves out of a Hopper kernel's time, logarithms: settling a tile's row maxima, for a tile of one block of keys and as
much less as it has more, and besides for heads of up to 64 columns, and beside dropout or a soft cap; an output in pieces; three programs
or more on an SM without a band; products and softmax in turns, for such heads and for those above 128; tiles of 64 rows where a row of
Q is an odd number of 16 bytes (D = 40 and 72); blocks of 128 keys whose warpgroups don't take turns; three of these for a tile; and tiles
chained beside another program's. From the trials of an H200's rows (benchmarks/fit_expected.py); searches of random shapes agree in
every sign (benchmarks/results/2026-11-23-stand-in/expected.json)."""

SMALL, LARGE = 64, 128
"""Columns of heads: up to so many, and from there on."""

LOG_HOST = math.log(22.0)
"""Calls that take the GPU no longer wait for the host, which needs 15 to 22 us for one of torch's
(benchmarks/results/2026-11-22-h200-steps/steps.json): of these the GPU's time tells little. A logarithm of microseconds."""


def log_us(family: Family, config: Config, problem: Problem, target: Target) -> float | None:
    """The logarithm of the microseconds that the GPU is expected to take; None where nothing can be said of a family, of a config that
    doesn't fit, or of a backward, to whose measurements the model was never fitted."""
    if problem.direction != "fwd":
        return None
    facts = family.expected(config, problem.spec(), target)
    if facts is None:
        return None
    found = predict_us(config, facts, problem, target)
    return math.log(found) + left_out(config, problem) if 0.0 < found < math.inf else None


def left_out(config: Config, problem: Problem) -> float:
    """The logarithm of what a config takes beside what the cost model says; 0 for families other than Hopper's."""
    if "intra_wg_overlap" not in config:
        return 0.0
    return sum(constant * share for constant, share in zip(LEFT_OUT.values(), shares(config, problem), strict=True))


def shares(config: Config, problem: Problem) -> tuple[float, ...]:
    """How much of each of LEFT_OUT a Hopper kernel of this config has, in their order."""
    f, wide, settled, in_turns = problem.features, max(problem.d, problem.d_v), settles(config), config["intra_wg_overlap"] == 0
    settling = 0.0
    if settled:
        blocks = blocks_of_tiles(problem.band, problem.n_q, problem.n_kv, config.number("BLOCK_M"), config.number("BLOCK_N"))
        settling = len(blocks) / max(len(blocks), sum(blocks))
    return (
        settling,
        settled and wide <= SMALL,
        settled and (f.dropout or f.softcap),
        config.get("v_columns", "padded") == "pieces",
        not f.banded and config.number("ctas_per_sm") > 2,
        in_turns and wide <= SMALL,
        in_turns and wide > LARGE,
        config["BLOCK_M"] == 64 and problem.d * ITEMSIZE[problem.dtype] % 32 != 0,
        config["BLOCK_N"] == 128 and not config["pingpong"],
        config["BLOCK_M"] == 192,
        config["tiles"] == "chained" and config["ctas_per_sm"] != 1,
    )
