"""Bits of kernels in Triton's interpreter, for comparison with those of the interpreter that caches; see test_tuner_interpreter."""

import hashlib

from flashtune.core.code.launching import launcher
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.inputs import make_inputs

EVERYTHING = Features(causal=True, window=(20, 0), mask="bias", softcap=True, alibi=True, sinks=True)
CASES = {
    "flash_fwd": ("fwd", Features(causal=True, mask="bool", dropout=True), {"BLOCK_M": 32, "BLOCK_N": 64}),
    "flash_decode": ("fwd", EVERYTHING, {"BLOCK_M": 16, "BLOCK_N": 32, "combine": "last"}),
    "flash_bwd": ("bwd", EVERYTHING, {"BLOCK_M": 16, "BLOCK_N": 32, "DQ_BLOCK_M": 16, "DQ_BLOCK_N": 32}),
}


def main() -> dict[str, list[str]]:
    """Digests of all that the kernel of each case reads and writes."""
    found: dict[str, list[str]] = {}
    for name, (direction, features, changes) in CASES.items():
        sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "n_q": 3, "n_kv": 40, "d": 16, "d_v": 24}
        problem = Problem(**sizes, dtype="fp16", features=features, direction=direction)  # type: ignore[arg-type]
        chosen, target = family(name), find_target("h200")
        config = chosen.default(problem.spec(), target).replace(**changes)
        launch = launcher(load_kernel(render(chosen, variant_of(chosen, problem.spec(), config)), name))
        inputs = make_inputs(problem, device="cpu", seed=3)
        launch(*inputs.arguments, **inputs.keywords)
        tensors = [x for x in inputs.arguments if x is not None]
        found[name] = [hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest() for x in tensors]
    return found
