"""Huge scores through flash_fwd and flash_decode in Triton's interpreter: a sentence for each that is wrong."""

from flashtune.core.code.launching import launcher
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.correctness import compare, everywhere, oracle, run, stacked
from flashtune.tuner.verify.distributions import HUGE, HUGE_OF_BF16, redistribute
from flashtune.tuner.verify.inputs import make_inputs

FEATURES = (Features(), Features(causal=True, sinks=True), Features(mask="bool"))


def main() -> list[str]:
    """Run them with tiles of few rows, and splits of one block each."""
    found = []
    for name, n_q in (("flash_fwd", 20), ("flash_decode", 3)):
        for index, features in enumerate(FEATURES):
            problem = Problem(batch=1, heads=2, kv_heads=1, n_q=n_q, n_kv=140, d=32, d_v=16, dtype="fp32", features=features)
            chosen, spec = family(name), problem.spec()
            changes: dict[str, int | str] = {"BLOCK_M": 32 if name == "flash_fwd" else 16, "BLOCK_N": 32}
            if name == "flash_decode":
                changes["combine"] = next(axis for axis in chosen.axes if axis.name == "combine").values[index]
            config = chosen.default(spec, find_target("h200")).replace(**changes)
            launch = launcher(load_kernel(render(chosen, variant_of(chosen, spec, config)), name))
            for distribution in HUGE + HUGE_OF_BF16:
                inputs = make_inputs(problem, device="cpu", seed=1)
                redistribute(inputs, distribution)
                run(launch, inputs, 1000)
                verdict = compare(inputs, stacked(problem, oracle(inputs, everywhere(problem))))
                found += [f"{config.label()} {distribution}: {verdict.reason}"] * bool(verdict.reason)
    return found
