"""Times Hopper kernels with settled and with running maxima beside cuDNN on scores as models make them: `python benchmarks/maxima.py`.

Each distribution's kernels run interleaved with cuDNN on the same inputs, 16,384 tokens per batch and a model width of 2048. A line names
the distribution and cuDNN's TFLOP/s, then for each kernel its TFLOP/s, its ratio to cuDNN, the largest and the norm of its error over
cuDNN's own, and the largest error of its LSE, against a float64 oracle of the first and the last head. DIFF says that two launches
weren't bit-equal.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from forward_cells import problem_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtune.core.launching import launcher
from flashtune.core.modules import load_source
from flashtune.core.problem import Features
from flashtune.templates import family
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.correctness import oracle
from flashtune.tuner.distributions import PRESENT, redistribute
from flashtune.tuner.inputs import Inputs, make_inputs
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.stopwatch import Stopwatch

FAMILY = family("flash_fwd_hopper")


def errors(inputs: Inputs, out: torch.Tensor) -> tuple[float, float, float]:
    """The largest error of the output, its norm over the output's, and the LSE's largest error, in the first and the last head."""
    p = inputs.problem
    found = []
    for want in oracle(inputs, [(0, 0, 0, p.n_q), (p.batch - 1, p.heads - 1, 0, p.n_q)]):
        off = out[want.batch, want.head].double() - want.out
        lse = inputs.lse[want.batch, want.head].double() - want.lse
        found.append((float(off.abs().max()), float(off.norm() / want.out.norm()), float(lse.abs().max())))
    largest, norm, lse = (max(column) for column in zip(*found, strict=True))
    return largest, norm, lse


def of_cudnn(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """The framework's own call."""

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            causal = inputs.problem.features.causal
            return torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=causal)

    return run


def main() -> None:
    """Time the first starts of a problem with each way of maxima, on every distribution, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--d", type=int, default=128, help="head size (default: %(default)s)")
    parser.add_argument("--n", type=int, default=4096, help="sequence length (default: %(default)s)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--scores", default=",".join(PRESENT), help="distributions, with commas between them (default: all)")
    parser.add_argument("--configs", type=int, default=2, help="how many of the family's starts of each kind (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="timing for each distribution (default: %(default)s)")
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None or not gpu.target.is_hopper:
        raise SystemExit("maxima.py times kernels of compute capability 9.0 and found no such GPU: run it on an H100 or H200")
    problem = problem_of(options.d, options.n, Features(causal=options.causal), dtype=options.dtype)
    spec, starts = problem.spec(), FAMILY.starts(problem.spec(), gpu.target)
    kernels = {}
    for maximum in ("first", "running"):
        for config in [config for config in starts if config["maximum"] == maximum][: options.configs]:
            name = f"{chr(ord('A') + len(kernels))} ({maximum})"
            print(name, config.label(), flush=True)
            kernels[name] = launcher(load_source(render(FAMILY, variant_of(FAMILY, spec, config)), "maxima"))
    stopwatch = Stopwatch(torch.device("cuda"), gpu.target.l2_bytes)
    for scores in options.scores.split(","):
        inputs = make_inputs(problem, device="cuda", seed=1)
        redistribute(inputs, scores)
        cudnn = of_cudnn(inputs)
        inputs.lse.zero_()
        theirs = errors(inputs, cudnn())
        runs: list[Callable[[], object]] = [cudnn]
        remarks = []
        for launch in kernels.values():
            outputs = []
            for _ in range(2):
                inputs.poison()
                launch(*inputs.arguments, **inputs.keywords)
                outputs.append(inputs.out.view(torch.int16).clone())
            ours = errors(inputs, inputs.out)
            ratios = "/".join(f"{a / max(b, 1e-9):.2f}" for a, b in zip(ours[:2], theirs[:2], strict=True))
            remarks.append(f"{ratios}/{ours[2]:.0e}{'' if torch.equal(*outputs) else ' DIFF'}")
            runs.append(partial(launch, *inputs.arguments, **inputs.keywords))
        times = [time.median_us for time in stopwatch.race(runs, budget_s=options.seconds)]
        rates = [problem.flops() / time / 1e6 for time in times]
        shown = [f"{n} {r:4.0f} x{r / rates[0]:.2f} e {e}" for n, r, e in zip(kernels, rates[1:], remarks, strict=True)]
        print(f"{scores:13s} cudnn {rates[0]:4.0f} | " + " | ".join(shown), flush=True)


if __name__ == "__main__":
    main()
