"""Similarity of trials of Hopper's backward kernels."""

import math

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem, padded
from flashtune.templates.backward.hopper.layout import divisions_of
from flashtune.templates.learned.residual import Likeness, Tried

FUSED, SPLIT = "flash_bwd_hopper", "flash_bwd_hopper_split"


def _of_problem(problem: Problem) -> list[float]:
    f, n = problem.features, problem.n_q
    return [
        math.log2(n),
        math.log2(problem.n_kv),
        math.log2(problem.batch * problem.heads * n),
        math.log2(max(64, padded(problem.d))),
        math.log2(max(64, padded(problem.d_v))),
        math.log2(problem.d / max(64, padded(problem.d))),
        f.causal,
        f.window is not None,
        math.log2(max(1, problem.visible_pairs() / n)),
        f.mask == "bool",
        f.mask == "bias",
        f.dropout,
        f.softcap,
        f.alibi,
        f.dbias,
        f.dslopes,
        math.log2(problem.gqa_ratio),
        problem.dtype == "fp16",
        f.packed,
    ]


def _of_config(problem: Problem, tried: Tried, target: Target) -> list[float]:
    name, config = tried
    fused, held = name == FUSED, str(config.get("held", "none"))
    tiles = problem.batch * problem.kv_heads * math.ceil(problem.n_kv / config.number("BLOCK_N")) * divisions_of(config, problem, target)
    rounds = tiles / target.sms
    persistent = config.get("persistent", False)
    return [
        fused,
        math.log2(config.number("BLOCK_N")),
        math.log2(config.number("num_stages")),
        config.get("dq_sums", "") == "own",
        bool(config.get("exp_poly", False)),
        bool(config.get("wait_early", False)),
        persistent is True,
        persistent == "dynamic",
        held in ("k", "both") or config.get("held_columns", 0) == 64,
        held in ("v", "both") or config.get("held_columns", 0) == 128,
        bool(config.get("divided_queries", False)),
        math.log2(int(config.get("section", 4))),
        math.log2(int(config.get("DQ_BLOCK_M", 128))),
        math.log2(int(config.get("DQ_BLOCK_N", 64))),
        math.log2(int(config.get("DQ_num_stages", 2))),
        0.0 if persistent or rounds <= 1 else math.ceil(rounds) / rounds - 1.0,
    ]


GRADIENTS = Likeness(
    families={FUSED: 0.0, SPLIT: 0.0},
    serves=lambda problem: problem.direction == "bwd",
    file="gradients.npz",
    problem_scales={
        "log N_q": 16.0,
        "log N_kv": 14.0,
        "log query rows": 1.4,
        "log padded D": 3.3,
        "log padded D_v": 5.1,
        "log D of padded": 4.1,
        "causal": 1.3,
        "window": 42.0,
        "log keys to a query": 2.3,
        "mask": 4.2,
        "bias": 2.3,
        "dropout": 1.8,
        "soft cap": 2.5,
        "ALiBi": 32.0,
        "bias's gradient": 11.0,
        "slopes' gradient": 35.0,
        "log heads to a key head": 1.1,
        "fp16": 12.0,
        "packed": 1.3,
    },
    config_scales={
        "fused": 1.5,
        "log BLOCK_N": 7.4,
        "log num_stages": 5.2,
        "exclusive dQ": 0.2,
        "exp_poly": 17.0,
        "wait_early": 2.4,
        "persistent": 0.2,
        "persistent=dynamic": 3.0,
        "held keys": 9.3,
        "held values": 4.5,
        "split-Q": 0.23,
        "log section": 4.5,
        "log DQ_BLOCK_M": 1.4,
        "log DQ_BLOCK_N": 0.2,
        "log DQ_num_stages": 3.5,
        "idle in the last round": 0.18,
    },
    lengths=frozenset({"log N_q", "log N_kv", "log query rows", "log keys to a query"}),
    of_problem=_of_problem,
    of_config=_of_config,
    together=0.18,
    alone=0.077,
    noise=0.012,
    offset=0.02,
)
"""The similarity of backwards."""
