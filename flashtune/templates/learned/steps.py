"""Similarity of trials of decoding steps.

A config's time depends on the split of a launch's keys, more than on `programs` itself: the number of splits, programs
per SM, rounds, and bytes in flight.
"""

import math

from flashtune.core.gpu.target import Target
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import DECODE_ROWS, Problem, padded
from flashtune.templates import family
from flashtune.templates.cost import sharing
from flashtune.templates.cost_constants import programs_per_sm
from flashtune.templates.decode import flash_decode
from flashtune.templates.hopper.layout import packed_problem, tiles_of
from flashtune.templates.learned.residual import Likeness, Tried


def _of_problem(problem: Problem) -> list[float]:
    f, size = problem.features, ITEMSIZE[problem.dtype]
    heads = problem.batch * problem.kv_heads
    keys = max(1, problem.keys_read)
    return [
        math.log2(heads),
        math.log2(keys),
        math.log2(problem.d),
        math.log2(padded(problem.d)),
        math.log2(problem.d_v / problem.d),
        math.log2(problem.n_q * problem.gqa_ratio),
        problem.d * size % 32 != 0,
        f.window is not None,
        f.mask != "none",
        f.softcap,
        f.alibi,
        f.sinks,
        math.log2(size),
        math.log2(heads * keys * (problem.d + problem.d_v * (not f.latent)) * size),
    ]


def _of_config(problem: Problem, tried: Tried, target: Target) -> list[float]:
    name, config = tried
    decodes = name == flash_decode.FAMILY.name
    facts = family(name).expected(config, problem.spec(), target)
    assert facts is not None, "only configs with expected facts are predicted"
    block_m, block_n = config.number("BLOCK_M"), config.number("BLOCK_N")
    # Kernels for many rows don't split keys, and read shared ones once per tile.
    tiles, splits, share = (
        sharing(config, problem, target) if decodes else (tiles_of(config, problem), 1, math.ceil(max(1, problem.keys_read) / block_n))
    )
    programs, slots = tiles * splits, max(1, programs_per_sm(facts, target)) * target.sms
    on_an_sm, rounds = min(programs, slots) / target.sms, programs / slots
    in_flight = (
        block_n
        * (problem.d + problem.d_v * (not problem.features.latent))
        * ITEMSIZE[problem.dtype]
        * max(0.6, config.number("num_stages") - 1)
    )
    return [
        *(name == other for other in FAMILIES if other != flash_decode.FAMILY.name),
        0.0 if decodes else math.log2(packed_problem(config, problem).gqa_ratio),
        math.log2(block_m),
        math.log2(block_n),
        math.log2(facts.threads / target.warp_size),
        math.log2(config.number("num_stages")),
        config.get("combine", "none") == "last",
        config.get("combine", "none") == "rows",
        config.get("loads", "tma") == "tma" and name != "flash_fwd",
        math.log2(on_an_sm),
        math.log2(max(1.0, rounds)),
        math.ceil(rounds) / rounds - 1.0 if rounds > 1.0 else 0.0,
        math.log2(splits),
        math.log2(in_flight * on_an_sm),
        math.log2(share),
    ]


FAMILIES = {"flash_decode": 0.0, "flash_fwd_hopper": 0.25, "flash_fwd": 0.77}
"""The cost model's mean optimism for each relative to flash_decode, a logarithm (benchmarks/run.py fit_expected)."""

STEPS = Likeness(
    families=FAMILIES,
    serves=lambda problem: problem.direction == "fwd" and problem.n_q <= DECODE_ROWS,
    file="steps.npz",
    problem_scales={
        "log key heads": 18.0,
        "log keys": 49.0,
        "log D": 1.8,
        "log padded D": 1.3,
        "log D_v of D": 0.91,
        "log rows of a key head": 5.8,
        "odd rows": 1.1,
        "window": 3.8,
        "mask": 1.3,
        "soft cap": 47.0,
        "ALiBi": 1.3,
        "sinks": 11.0,
        "log element size": 1.0,
        "log bytes": 8.4,
    },
    config_scales={
        "flash_fwd_hopper": 3.3,
        "flash_fwd": 0.71,
        "log heads that share what is read anew": 1.4,
        "log BLOCK_M": 2.1,
        "log BLOCK_N": 4.0,
        "log num_warps": 1.8,
        "log num_stages": 2.9,
        "combine=last": 1.9,
        "combine=rows": 4.4,
        "loads=tma": 1.9,
        "log programs on an SM": 3.6,
        "log rounds": 7.6,
        "idle in the last round": 1.8,
        "log splits": 9.5,
        "log bytes in flight": 1.8,
        "log blocks of a split": 10.0,
    },
    lengths=frozenset({"log key heads", "log keys", "log bytes"}),
    of_problem=_of_problem,
    of_config=_of_config,
    together=0.37,
    alone=0.36,
    noise=0.048,
    offset=0.069,
)
"""The similarity of decoding steps; scales are rounded, and halving or doubling matters only for the idle share of the last round."""
