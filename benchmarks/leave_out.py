"""Times the Hopper family's softmax with stages left out, which shows what limits it: `python benchmarks/leave_out.py [--dtype fp8]`.

Each variant is the rendered kernel with a few lines changed; all but `whole` compute nonsense. They run interleaved on one problem:
D = 128, N = 16384, one batch, full. The difference to `whole` is what a stage costs where the others go on beside it.
"""

import argparse
from collections.abc import Callable

import torch

from flashtune.core.config import Config, KernelSpec
from flashtune.core.modules import load_source
from flashtune.core.problem import Problem
from flashtune.templates import family
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.inputs import make_inputs
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.measure import Stopwatch

FAMILY = family("flash_fwd_hopper")

EXPONENTIAL = ("gl.exp2(scores * scale - centre[:, None])", "(scores * scale - centre[:, None])")
MAXIMUM = ("gl.maximum(row_max, gl.max(scores, 1) * scale)", "gl.maximum(row_max, 0.0)")
SUM = ("[:, None] + quarter_sums(weights)", "[:, None]")
ROUNDING = (
    "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;\n        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;\n        mov.b32 $0, {low, high};",
    ".reg .b32 a, b;\n        xor.b32 a, $1, $2;\n        xor.b32 b, $3, $4;\n        xor.b32 $0, a, b;",
)

LEFT_OUT = {
    "whole": (),
    "no exponentials": (EXPONENTIAL,),
    "no maxima": (MAXIMUM,),
    "no sums": (SUM,),
    "none of these": (EXPONENTIAL, MAXIMUM, SUM),
}


def variants(spec: KernelSpec, config: Config) -> dict[str, str]:
    """Name to source; raises ValueError where the template no longer holds what a variant changes."""
    whole = render(FAMILY, variant_of(FAMILY, spec, config))
    chosen = LEFT_OUT | ({"no rounding": (ROUNDING,)} if spec.dtype == "fp8" else {})
    found = {}
    for name, changes in chosen.items():
        text = whole
        for before, after in changes:
            if before not in text:
                raise ValueError(f"{name}: the kernel has no {before!r}")
            text = text.replace(before, after)
        found[name] = text
    return found


def problem_of(dtype: str) -> Problem:
    """The problem that is timed."""
    return Problem(batch=1, heads=16, kv_heads=16, n_q=16384, n_kv=16384, d=128, d_v=128, dtype=dtype)  # type: ignore[arg-type]


def main() -> None:
    """Time every variant of the family's first starts, interleaved, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp8"), default="fp8")
    parser.add_argument("--seconds", type=float, default=1.0, help="timing for all variants of a config (default: %(default)s)")
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None or not gpu.target.is_hopper:
        raise SystemExit("leave_out.py times kernels of compute capability 9.0 and found no such GPU: run it on an H100 or H200")
    problem = problem_of(options.dtype)
    inputs = make_inputs(problem, device="cuda", seed=0)
    stopwatch = Stopwatch(torch.device("cuda"), gpu.target.l2_bytes)
    for config in FAMILY.starts(problem.spec(), gpu.target)[:3]:
        print(config.label(), flush=True)
        runs: dict[str, Callable[[], object]] = {}
        for name, text in variants(problem.spec(), config).items():
            launch = load_source(text, "leave_out").launch
            runs[name] = lambda launch=launch: launch(*inputs.arguments, **inputs.keywords)
            runs[name]()
        for name, time in zip(runs, stopwatch.race(list(runs.values()), budget_s=options.seconds), strict=True):
            print(f"  {name:16s} {time.median_us:9.1f} us {problem.flops() / time.median_us / 1e6:7.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
