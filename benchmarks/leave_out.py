"""Times the Hopper family's softmax with stages left out, which shows what limits it: `python benchmarks/leave_out.py [--dtype fp8]`.

Each variant is the rendered kernel with a few lines changed; all but `whole` compute nonsense. They run interleaved on one problem,
16,384 tokens per batch and a model width of 2048. The difference to `whole` is what a stage costs where the others go on beside it.
"""

import argparse
from collections.abc import Callable

import torch
from forward_cells import problem_of

from flashtune.core.config import Config, KernelSpec, rescales_grown
from flashtune.core.launching import launcher
from flashtune.core.modules import load_source
from flashtune.core.problem import Features
from flashtune.templates import family
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.timing.stopwatch import Stopwatch
from flashtune.tuner.verify.inputs import make_inputs

FAMILY = family("flash_fwd_hopper")

EXPONENTIAL = ("gl.exp2(scores * scale - shift[:, None])", "(scores * scale - shift[:, None])")
MAXIMUM = ("gl.maximum(row_max, gl.max(scores, 1) * scale)", "gl.maximum(row_max, 0.0)")
SUM = ("[:, None] + quarter_sums(probs)", "[:, None]")
RESCALING = ("acc = acc * gl.convert_layout(rescale, OUT_ROW_LAYOUT)[:, None]", "pass")
ROUNDING = (
    "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;\n        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;\n        mov.b32 $0, {low, high};",
    ".reg .b32 a, b;\n        xor.b32 a, $1, $2;\n        xor.b32 b, $3, $4;\n        xor.b32 $0, a, b;",
)

SETTLED = {
    EXPONENTIAL: ("gl.exp2(scores * scale - row_max[:, None])", "(scores * scale - row_max[:, None])"),
    SUM: ("return probs, quarter_sums(probs), row_max", "return probs, quarter_sums(gl.zeros_like(probs)), row_max"),
}
"""The same where maxima have settled."""

GROWN = {
    MAXIMUM: ("block_max = gl.max(scores, 1) * scale", "block_max = row_max"),
    SUM: ("return probs, quarter_sums(probs), growth", "return probs, quarter_sums(gl.zeros_like(probs)), growth"),
}
"""The same where maxima stay as they are until one grew far."""

UNASKED = (
    ("if vote_outgrown(part, row_sum, W) != 0:", "if vote_outgrown(part, row_sum, W) > 1:"),
    ("wrong = vote_overflowed(row_sum, W) != 0", "wrong = vote_overflowed(row_sum, W) > 1"),
)
"""No row is looked at for its nonsense."""

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
    chosen = LEFT_OUT | ({"no rounding": (ROUNDING,)} if spec.dtype == "fp8" else {"no rescaling": (RESCALING,)})
    found = {}
    for name, changes in chosen.items():
        text = whole
        if changes and config["maximum"] == "first":
            changes = (*changes, *(SETTLED[change] for change in changes if change in SETTLED), *UNASKED)
        if rescales_grown(config):
            changes = (*changes, *(GROWN[change] for change in changes if change in GROWN))
        for before, after in changes:
            if before not in text:
                raise ValueError(f"{name}: the kernel has no {before!r}")
            text = text.replace(before, after)
        found[name] = text
    return found


def main() -> None:
    """Time every variant of the family's first starts, interleaved, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp8"), default="fp8")
    parser.add_argument("--d", type=int, default=128, help="head size (default: %(default)s)")
    parser.add_argument("--n", type=int, default=16384, help="sequence length (default: %(default)s)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--configs", type=int, default=3, help="how many of the family's first starts (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="timing for all variants of a config (default: %(default)s)")
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None or not gpu.target.is_hopper:
        raise SystemExit("leave_out.py times kernels of compute capability 9.0 and found no such GPU: run it on an H100 or H200")
    problem = problem_of(options.d, options.n, Features(causal=options.causal), dtype=options.dtype)
    print(problem.label(), flush=True)
    inputs = make_inputs(problem, device="cuda", seed=0)
    stopwatch = Stopwatch(torch.device("cuda"), gpu.target.l2_bytes)
    for config in FAMILY.starts(problem.spec(), gpu.target)[: options.configs]:
        print(config.label(), flush=True)
        runs: dict[str, Callable[[], object]] = {}
        for name, text in variants(problem.spec(), config).items():
            launch = launcher(load_source(text, "leave_out"))
            runs[name] = lambda launch=launch: launch(*inputs.arguments, **inputs.keywords)
            runs[name]()
        for name, time in zip(runs, stopwatch.race(list(runs.values()), budget_s=options.seconds), strict=True):
            print(f"  {name:16s} {time.median_us:9.1f} us {problem.flops() / time.median_us / 1e6:7.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
