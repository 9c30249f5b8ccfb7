"""What the cost model says of a config at sizes at which nobody measured it. Pure functions of configs and problems."""

import math
from collections.abc import Sequence

from flashtune.core.config import Config, rescales_grown, settles
from flashtune.core.dtypes import ITEMSIZE
from flashtune.core.problem import DECODE_ROWS, Problem
from flashtune.core.target import Target
from flashtune.templates.cost import predict_us
from flashtune.templates.family import Family, blocks_of_head
from flashtune.templates.hopper.layout import tile_queries
from flashtune.templates.learned.forwards import FORWARDS
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
"""What the model leaves out of a Hopper kernel's time, logarithms.

Settling a tile's row maxima, and besides for heads of up to 64 columns, and beside dropout or a soft cap; running maxima that rescale
only what grew; an output in pieces; tiles in chunks of columns, without padding; products and softmax in turns, for such heads; tiles of
64 rows where a row of Q is an odd number of 16 bytes (D = 40 and 72); four warpgroups for a tile of wider heads, whose registers don't
suffice; tiles of 64 rows under a soft cap; warpgroups that take turns; three stages or more; tiles that are drawn, chained, or chained
beside another program's; a program for each tile; how much taller than 128 rows a tile is (a share of them); and the logarithm of what
padding adds to the rows. Of settling, of a program for each tile and of tall tiles it is that for tiles of one block of keys, and as much
less as they have more.
From the trials of an H200's rows (benchmarks/run.py fit_expected); searches of random shapes agree in every sign
(benchmarks/results/2026-11-23-stand-in/expected.json)."""

LIKENESSES = (FORWARDS, STEPS)
"""What trials are learned from, each for problems of its own."""

SMALL = 64
"""Columns of heads: up to so many."""

LOG_HOST = math.log(22.0)
"""Calls that take the GPU no longer wait for the host, which needs 15 to 22 us for one of torch's
(benchmarks/results/2026-11-22-h200-steps/steps.json): of these the GPU's time tells little. A logarithm of microseconds."""


def logs_us(candidates: Sequence[tuple[Family, Config]], problem: Problem, target: Target, *, caution: float = 0.0) -> list[float | None]:
    """`log_us` of each of these, and by how much longer trials of such problems took than that (flashtune.templates.learned); `caution`
    is for a choice that nobody measures (`Residual.of`)."""
    found = [log_us(family, config, problem, target) for family, config in candidates]
    for likeness in LIKENESSES:
        places = [
            place
            for place, (family, _) in enumerate(candidates)
            if found[place] is not None and family.name in likeness.families and likeness.serves(problem)
        ]
        known = learned(likeness) if places else None
        if known is not None:
            wrong = known.of(problem, [(candidates[place][0].name, candidates[place][1]) for place in places], target, caution=caution)
            for place, more in zip(places, wrong, strict=True):
                found[place] = (found[place] or 0.0) + more
    return found


def log_us(family: Family, config: Config, problem: Problem, target: Target) -> float | None:
    """The logarithm of the microseconds that the GPU is expected to take; None where nothing can be said of a family, or of a config that
    doesn't fit."""
    facts = family.expected(config, problem.spec(), target)
    if facts is None:
        return None
    found = predict_us(config, facts, problem, target)
    return math.log(found) + left_out(config, problem) if 0.0 < found < math.inf else None


def left_out(config: Config, problem: Problem) -> float:
    """The logarithm of what a config takes beside what the cost model says; 0 for families other than Hopper's, and for decoding steps, to
    which nothing of it was fitted."""
    if "intra_wg_overlap" not in config or problem.n_q <= DECODE_ROWS:
        return 0.0
    return sum(constant * share for constant, share in zip(LEFT_OUT.values(), shares(config, problem), strict=True))


def shares(config: Config, problem: Problem) -> tuple[float, ...]:
    """How much of each of LEFT_OUT a Hopper kernel of this config has, in their order."""
    f, settled, narrow = problem.features, settles(config), max(problem.d, problem.d_v) <= SMALL
    rows, keys, queries = config.number("BLOCK_M"), config.number("BLOCK_N"), tile_queries(config)
    tiles = math.ceil(problem.n_q / queries)
    of_a_block = tiles / max(tiles, blocks_of_head(problem.band, problem.n_q, problem.n_kv, queries, keys))
    return (
        settled * of_a_block,
        settled and narrow,
        settled and (f.dropout or f.softcap),
        not settled and rescales_grown(config),
        config.get("v_columns", "padded") == "pieces",
        config.get("smem_columns", "padded") == "chunks",
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
        # Of heads that aren't packed, too, for packing spares whole tiles, which the cost model counts.
        math.log(math.ceil(problem.n_q / rows) * rows / problem.n_q),
    )
