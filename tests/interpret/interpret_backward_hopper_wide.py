"""flash_bwd_hopper_wide without a GPU: its plain kernels in Triton's interpreter, the warp-specialised ones in `hopper_emulator`."""

from dataclasses import replace
from typing import Any

import torch
from interpret_backward_hopper import launcher_of, problem

from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.launches.hopper_backward_wide import WideBackwardHost
from flashtune.tuner.verify.cases import make_extreme
from flashtune.tuner.verify.correctness import check, everywhere, oracle
from flashtune.tuner.verify.inputs import make_inputs

FAMILY = family("flash_bwd_hopper_wide")
CAUSAL = Features(causal=True, alignment="bottom_right")

CASES: dict[str, tuple[Problem, dict[str, Any]]] = {
    "full": (problem(Features(), n_q=140, n_kv=200, d=264, d_v=264), {"COLUMNS": 128}),
    # More queries than keys: the first rows see nothing. The other way round, tiles of the last row see more keys than there are.
    "causal": (problem(CAUSAL, n_q=300, n_kv=150, d=320, d_v=320, heads=1), {"COLUMNS": 128}),
    "causal, few queries": (problem(CAUSAL, n_q=70, n_kv=290, d=512, d_v=512, heads=1), {"COLUMNS": 256}),
    "causal from the top": (
        problem(Features(causal=True), n_q=140, n_kv=270, d=512, d_v=512, heads=1, dtype="bf16"),
        {"COLUMNS": 256},
    ),
    "window": (
        problem(Features(window=(70, 30), sinks=True), n_q=400, n_kv=410, d=384, d_v=320, heads=1),
        {"COLUMNS": 128},
    ),
    "small values": (problem(Features(softcap=True), n_q=90, n_kv=140, d=288, d_v=40, heads=1), {"COLUMNS": 128}),
    "small keys": (problem(CAUSAL, n_q=140, n_kv=150, d=64, d_v=296, heads=1), {"COLUMNS": 256}),
    "everything": (
        problem(replace(CAUSAL, window=(150, 0), mask="bool", dropout=True, softcap=True, alibi=True), n_q=290, n_kv=300, d=264, d_v=264),
        {"COLUMNS": 128},
    ),
    "groups": (
        problem(replace(CAUSAL, dropout=True, mask="bool"), n_q=200, n_kv=120, batch=2, heads=6, kv_heads=2, d=264, d_v=264),
        {"COLUMNS": 128},
    ),
}

CHUNKED: dict[str, tuple[str, int]] = {
    "chunks of key heads": ("groups", 3 * 2 * 256 * 128 * 4),
    "chunks of query heads": ("groups", 2 * 256 * 128 * 4),
    "chunks of queries": ("everything", 2 * 128 * 384 * 4),
    "chunks of a tile": ("causal", 1),
    "chunks of a window": ("window", 1),
}
"""Cases again, with so much memory for scores."""


def main() -> dict[str, object]:
    """Check the cases, then what they can't show, and print what was found."""
    report: dict[str, object] = {}
    usual = WideBackwardHost.most_scratch
    alike = {name: (*CASES[name], usual) for name in CASES} | {name: (*CASES[of], most) for name, (of, most) in CHUNKED.items()}
    for seed, (name, (p, changes, most)) in enumerate(alike.items()):
        WideBackwardHost.most_scratch = most
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
