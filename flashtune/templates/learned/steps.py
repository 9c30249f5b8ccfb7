"""Similarity of trials of decoding steps.

A config's time depends on the split of a launch's keys, more than on `programs` itself: the number of splits, programs
per SM, rounds, and bytes in flight.
"""

import math

from flashtune.core.dtypes import ITEMSIZE
from flashtune.core.problem import DECODE_ROWS, Problem
from flashtune.core.target import Target
from flashtune.templates import family
from flashtune.templates.cost import sharing
from flashtune.templates.cost_constants import programs_per_sm
from flashtune.templates.decode import flash_decode
from flashtune.templates.family import padded
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
        math.log2(heads * keys * (problem.d + problem.d_v) * size),
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
    in_flight = block_n * (problem.d + problem.d_v) * ITEMSIZE[problem.dtype] * max(0.6, config.number("num_stages") - 1)
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


FAMILIES = {"flash_decode": 0.0, "flash_fwd_hopper": 0.25, "flash_fwd_tma": 0.35, "flash_fwd": 0.77}
"""The cost model's mean optimism for each relative to flash_decode, a logarithm (benchmarks/run.py fit_expected). Of flash_fwd_tma only
trials are left."""

STEPS = Likeness(
    families=FAMILIES,
    serves=lambda problem: problem.n_q <= DECODE_ROWS,
    file="steps.npz",
    problem_scales={
        "log key heads": 2.0,
        "log keys": 4.0,
        "log D": 1.0,
        "log padded D": 1.0,
        "log D_v of D": 1.0,
        "log rows of a key head": 3.0,
        "odd rows": 1.0,
        "window": 1.3,
        "mask": 1.3,
        "soft cap": 1.3,
        "ALiBi": 1.3,
        "sinks": 1.3,
        "log element size": 1.0,
        "log bytes": 4.0,
    },
    config_scales={
        **{name: 0.7 for name in FAMILIES if name != flash_decode.FAMILY.name},
        "log heads that share what is read anew": 1.5,
        "log BLOCK_M": 1.0,
        "log BLOCK_N": 1.0,
        "log num_warps": 1.5,
        "log num_stages": 1.0,
        "combine=last": 1.0,
        "combine=rows": 1.0,
        "loads=tma": 1.0,
        "log programs on an SM": 1.0,
        "log rounds": 1.0,
        "idle in the last round": 0.5,
        "log splits": 4.0,
        "log bytes in flight": 1.5,
        "log blocks of a split": 6.0,
    },
    lengths=frozenset({"log key heads", "log keys", "log bytes"}),
    of_problem=_of_problem,
    of_config=_of_config,
    together=0.2,
    alone=0.15,
    noise=0.03,
    offset=0.15,
)
"""The similarity of decoding steps; scales are rounded, and halving or doubling matters only for the idle share of the last round."""
