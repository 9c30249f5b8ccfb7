"""Similarity of trials of Hopper's forward kernels."""

import math

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import DECODE_ROWS, Problem
from flashtune.templates.hopper.layout import HopperLayout, packed_heads
from flashtune.templates.learned.residual import Likeness, Tried


def _of_problem(problem: Problem) -> list[float]:
    f, n = problem.features, problem.n_q
    padded, padded_v = (max(64, 1 << (d - 1).bit_length()) for d in (problem.d, problem.d_v))
    seen = min(problem.n_kv, 1 + sum(problem.n_kv if side is None else side for side in f.window or (None, 0)))
    return [
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
        f.packed,
        math.log2(problem.longest[1] / problem.n_kv),
    ]


def _of_config(problem: Problem, tried: Tried, _: Target) -> list[float]:
    config = tried[1]
    layout = HopperLayout.of(problem.spec(), config)
    rows = config.number("BLOCK_M")
    return [
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
        layout.chunked,
        config.number("ctas_per_sm"),
        math.log2(config.number("section")),
        math.log2(packed_heads(config)),
        layout.narrow_unit,
    ]


FORWARDS = Likeness(
    families={"flash_fwd_hopper": 0.0},
    serves=lambda problem: problem.direction == "fwd" and problem.n_q > DECODE_ROWS,
    file="forwards.npz",
    problem_scales={
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
        "packed": 1.3,
        "log longest over mean": 4.0,
    },
    config_scales={
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
        "swizzle-width tiles": 3.0,
        "ctas_per_sm": 2.0,
        "log section": 8.0,
        "log packed heads": 2.0,
        "16 columns to a unit": 4.0,
    },
    lengths=frozenset({"log N_q", "log N_kv", "log query rows", "log keys in the window"}),
    of_problem=_of_problem,
    of_config=_of_config,
    together=0.14,
    alone=0.10,
    noise=0.03,
    offset=0.1,
)
"""The similarity of forwards; scales are rounded, as those of the greatest likelihood choose no better (benchmarks/run.py fit_residual)."""
