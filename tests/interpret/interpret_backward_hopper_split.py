"""flash_bwd_hopper_split without a GPU: its plain kernels in Triton's interpreter, the warp-specialised ones in `hopper_emulator`."""

from typing import Any

import torch
from interpret_backward_hopper import launcher_of, problem

from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.tuner.verify.cases import make_extreme
from flashtune.tuner.verify.correctness import check, everywhere, oracle
from flashtune.tuner.verify.inputs import make_inputs

FAMILY = family("flash_bwd_hopper_split")
WIDE, NARROW = {"BLOCK_N": 64, "DQ_BLOCK_N": 64}, {"BLOCK_N": 128}

CASES: dict[str, tuple[Problem, dict[str, Any]]] = {
    "full": (problem(Features(), n_q=140, n_kv=80, d=200, d_v=136), {**WIDE, "num_stages": 2, "held_columns": 128, "DQ_num_stages": 2}),
    # More queries than keys: the first rows see nothing.
    "causal": (
        problem(Features(causal=True, alignment="bottom_right"), n_q=150, n_kv=70, d=128, d_v=72),
        {**NARROW, "BLOCK_M": 64, "num_stages": 2, "DQ_BLOCK_N": 64, "DQ_num_stages": 2},
    ),
    # Chunks of columns in three stages, each of which is filled again.
    "three stages": (
        problem(Features(causal=True), n_q=330, n_kv=270, d=160, d_v=192, heads=1),
        {**WIDE, "num_stages": 3, "held_columns": 128, "DQ_num_stages": 3},
    ),
    # Products of 96 columns of tiles of 128.
    "pieces": (
        problem(Features(causal=True, dropout=True), n_q=70, n_kv=130, d=96, d_v=80, kv_heads=2),
        {**NARROW, "BLOCK_M": 64, "num_stages": 2, "held_columns": 64, "DQ_BLOCK_N": 64, "DQ_num_stages": 2},
    ),
    "window": (
        problem(Features(window=(70, 30), sinks=True), n_q=190, n_kv=200, d=40, d_v=40),
        {
            **NARROW,
            "BLOCK_M": 64,
            "num_stages": 1,
            "held_columns": 0,
            "DQ_BLOCK_M": 192,
            "DQ_BLOCK_N": 64,
            "DQ_num_stages": 3,
        },
    ),
    "everything": (
        problem(Features(window=(70, 30), mask="bool", dropout=True, softcap=True, alibi=True), n_q=130, n_kv=70, d=136, d_v=136, heads=1),
        {**WIDE, "num_stages": 2, "held_columns": 0, "DQ_num_stages": 1},
    ),
    "everything narrow": (
        problem(Features(causal=True, mask="bool", dropout=True, softcap=True, alibi=True), n_q=70, n_kv=130, heads=1),
        {**NARROW, "BLOCK_M": 64, "DQ_BLOCK_N": 128, "num_stages": 2},
    ),
    "small heads": (
        problem(Features(causal=True, mask="bool"), n_q=130, n_kv=70, d=24, d_v=32),
        {**NARROW, "BLOCK_M": 64, "DQ_BLOCK_N": 64, "num_stages": 2, "held_columns": 64},
    ),
    "small values": (
        problem(Features(), n_q=90, n_kv=80, d=200, d_v=24),
        {**WIDE, "num_stages": 2, "held_columns": 128, "DQ_num_stages": 2},
    ),
    "divided": (
        problem(Features(causal=True, dropout=True, alibi=True), n_q=200, n_kv=140, d=160, d_v=136, heads=3),
        {**WIDE, "num_stages": 2, "held_columns": 128, "DQ_num_stages": 1, "divided_queries": True},
    ),
    "divided narrow": (
        problem(Features(window=(70, 30), mask="bool"), n_q=330, n_kv=140, batch=2, d=40, d_v=40),
        {**NARROW, "BLOCK_M": 64, "num_stages": 2, "held_columns": 0, "DQ_BLOCK_N": 64, "DQ_num_stages": 2, "divided_queries": True},
    ),
    "bias": (
        problem(Features(causal=True, mask="bias", dbias=True), n_q=70, n_kv=90, kv_heads=2, d=136, d_v=72),
        {**WIDE, "num_stages": 1, "held_columns": 128},
    ),
}


def main() -> dict[str, object]:
    """Check the cases, then what they can't show, and print what was found."""
    report: dict[str, object] = {}
    for seed, (name, (p, changes)) in enumerate(CASES.items()):
        launch = launcher_of(p, changes, seed, FAMILY)
        inputs = make_inputs(p, device="cpu", seed=seed, heads_inside=seed % 2 == 1)
        report[name] = check(launch, inputs, oracle(inputs, everywhere(p))).reason
        if name == "full":
            before = {written.name: inputs.operands[written.name].clone() for written in p.contract.written}
            inputs.poison()
            launch(*{**inputs.operands, "dk": None, "dv": None}.values(), **inputs.keywords)
            launch(*{**inputs.operands, "dq": None}.values(), **inputs.keywords)
            report["each gradient alone"] = all(torch.equal(inputs.operands[name], before[name]) for name in before)
            # Scores around 150 and -150: past the last key, where they are 0, exponentials overflow.
            make_extreme(inputs)
            report["extreme"] = check(launch, inputs, oracle(inputs, everywhere(p))).reason
    return report
