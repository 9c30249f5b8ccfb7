"""Packed gradients on Hopper without a GPU: plain kernels in Triton's interpreter, the others on a stand-in."""

import math
import traceback
from typing import Any

import torch
from packed_machine import Ragged, numbers_of
from triton.experimental.gluon._runtime import GluonJITFunction
from varlen_cases import SEED, Inputs, inputs, wanted

from flashtune.core.code.launching import provided
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.dispatch.call.sequences import Packed, problem_of, rows_last
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of

GPU = find_target("h200")
LENGTHS = ((5, 0, 130, 64, 1, 0), (70, 3, 130, 0, 200, 0))

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({"is_causal": True}, {"section": 4, "wait_early": True}),
    "causal from the first": ({"is_causal": True, "causal_alignment": "top_left"}, {"persistent": "dynamic"}),
    "window": ({"window_size": (20, 9)}, {"persistent": True, "num_stages": 3}),
    "sinks": ({"sinks": True}, {"held": "both", "section": 2}),
    "dropout": ({"dropout_p": 0.3, "seed": SEED, "is_causal": True}, {"persistent": "dynamic"}),
    "narrow": ({"d": 80, "is_causal": True}, {"held": "k", "wait_early": True}),
    "used keys": ({"used": (60, 3, 7, 0, 150, 0), "is_causal": True}, {"persistent": "dynamic"}),
}
"""Arguments, and changes of a config of flash_bwd_hopper."""

SPLIT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split": ({}, {}),
    "split, used keys": ({"used": (60, 3, 7, 0, 150, 0), "is_causal": True}, {"DQ_BLOCK_M": 192, "DQ_BLOCK_N": 64}),
    "split, window": ({"window_size": (20, 9), "sinks": True, "d": 128}, {"DQ_BLOCK_M": 128, "DQ_BLOCK_N": 64}),
    "split, wide": ({"d": 256, "is_causal": True, "dropout_p": 0.3, "seed": SEED}, {}),
    "split, chunks": ({"d": 160, "is_causal": True, "causal_alignment": "top_left"}, {"num_stages": 2}),
}
"""Likewise of flash_bwd_hopper_split."""

ONE_KERNEL: dict[str, Any] = {
    "BLOCK_M": 64,
    "num_stages": 2,
    "dq_sums": "registers",
    "section": 1,
    "held": "none",
    "persistent": False,
    "wait_early": False,
}


def gradients(name: str, given: Inputs, changes: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """Gradients of query, key and value by the family of this name on poisoned memory, from the reference's output."""
    chosen = family(name)
    out, lse, _ = wanted(given, LENGTHS)
    q, k, v = (x.detach() for x in given.tensors)
    used = given.words.get("seqused_k")
    packed = Packed(q, k, v, *given.bounds, used, None, given.words.get("sinks"))
    numbers = numbers_of(given)
    problem = problem_of(packed, numbers, "bwd")
    assert problem is not None
    spec = problem.spec()
    config = chosen.default(spec, GPU).replace(**(ONE_KERNEL if name == "flash_bwd_hopper" else {}) | changes)
    assert chosen.violated(config, spec, GPU) is None
    module = load_kernel(render(chosen, variant_of(chosen, spec, config)), "packed")
    found = [torch.full_like(x, math.nan) for x in (q, k, v)]
    tensors = [
        *map(rows_last, (q, k, v, out.to(q.dtype))),
        lse.float()[None],
        rows_last(given.dout),
        given.dlse[None],
        *map(rows_last, found),
    ]
    words: dict[str, Any] = {"scale": numbers.scale, "diagonal": int(numbers.bottom_right), "lengths": (*given.bounds, used)}
    words |= {"window_left": numbers.left, "window_right": numbers.right, "dropout_p": numbers.dropout_p, "seed": SEED}
    words |= {} if packed.sinks is None else {"sinks": packed.sinks.detach().expand(packed.sequences, -1)}
    for kernel, grid, args, options in module.launches(*tensors, **words | provided(module, q, k) | {"sms": 3}):
        if isinstance(kernel, GluonJITFunction):
            Ragged(module, (kernel, grid, args, options), seed=seed).run()
        else:
            kernel[grid](*args, **options)
    return found


def failure_of(name: str, case: dict[str, Any], changes: dict[str, Any], seed: int) -> str:
    """Empty where a case's gradients by a family are the reference's, and 0 where no sequence is and of keys that aren't used."""
    case = dict(case)
    given = inputs(case, LENGTHS, dtype=torch.float16, d=case.pop("d", 64), heads=4, padding=70)
    _, _, right = wanted(given, LENGTHS)
    try:
        if (used := given.words.get("seqused_k")) is not None:
            for start, count, end in zip(given.bounds[1].tolist(), used.tolist(), given.bounds[1][1:].tolist(), strict=False):
                for x in given.tensors[1:]:
                    x.detach()[min(start + count, end) : end] = math.nan
        found = gradients(name, given, changes, seed)
        for ours, theirs, bounds in zip(found, right, (given.bounds[0], given.bounds[1], given.bounds[1]), strict=False):
            gap, norm = float((ours.double() - theirs).norm()), float(theirs.norm())
            assert gap <= TOLERANCES["fp16"].gradient_norm * norm, f"off by {gap:.3g} of {norm:.3g}"
            assert not ours[int(bounds[-1]) :].any()
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> dict[str, str]:
    """Failures by case."""
    found = {case: failure_of("flash_bwd_hopper", *CASES[case], seed) for seed, case in enumerate(CASES)}
    return found | {case: failure_of("flash_bwd_hopper_split", *SPLIT[case], seed) for seed, case in enumerate(SPLIT)}
