"""What it is worth that kernels are told what divides the strides of head sizes that 16 doesn't divide (decision 0003), on this GPU.

    python benchmarks/aligned_loads.py

Times each kernel's default config as it is launched and as it would be on strides that nothing is known of (`ALIGNED` false), in turns.
"""

from functools import partial
from typing import Any

from forward_peers import stopwatch
from searches import text_of

from flashtune.core.launching import compiler_options, provided
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.templates import family
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.verify.inputs import Inputs, make_inputs

SECONDS = 0.2
"""Of timing for each."""

TEMPLATES = ("flash_fwd", "flash_bwd", "flash_decode", "flash_bwd_hopper")


def problems(template: str) -> list[Problem]:
    """Of 4096 and 256 keys, of D = 40 and 72."""
    found = []
    for n in (4096, 256):
        for d in (40, 72):
            step = template == "flash_decode"
            sizes: dict[str, Any] = {"batch": 16384 // n, "heads": 16, "kv_heads": 4 if step else 16, "n_q": 1 if step else n, "n_kv": n}
            direction = "bwd" if "bwd" in template else "fwd"
            found.append(Problem(**sizes, d=d, d_v=d, dtype="bf16", features=Features(), direction=direction))
    return found


def launch(module: Any, inputs: Inputs, *, told: bool) -> None:
    """One call, of kernels that are told of strides or not."""
    words = inputs.keywords | provided(module, inputs.q, inputs.k)
    for kernel, grid, args, options in module.launches(*inputs.arguments, **words):
        if "ALIGNED" in kernel.arg_names:
            place = kernel.arg_names.index("ALIGNED")
            args = (*args[:place], told and args[place], *args[place + 1 :])
        kernel[grid](*args, **compiler_options(options))


def main() -> None:
    """Time and print."""
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise SystemExit("aligned_loads.py times kernels and found no GPU that flashtune knows: run it on the GPU's machine")
    watch = stopwatch("cuda:0")
    for template in TEMPLATES:
        for problem in problems(template):
            kind, spec = family(template), problem.spec()
            if kind.supports(spec, gpu.target) is not None:
                continue
            source = text_of(Candidate(family=kind, config=kind.default(spec, gpu.target)), problem)
            module, inputs = load_source(source.text, source.stem), make_inputs(problem, device="cuda:0", seed=0)
            runs = [partial(launch, module, inputs, told=told) for told in (True, False)]
            for run in runs:
                run()
            told, untold = (one.median_us for one in watch.race(runs, budget_s=SECONDS))
            print(f"{template} {problem.label()}: {told:.1f} us, {untold:.1f} us untold, {untold / told:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
