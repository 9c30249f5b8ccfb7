"""Times Hopper kernels with the output's columns in pieces beside the same kernels with padded ones: `python benchmarks/v_pieces.py`.

Configs are the family's first starts of both kinds; they run interleaved on the same inputs, 16,384 tokens per batch and 2048 columns of
queries or the next fewer that whole heads make. A line names a config's time, its TFLOP/s without columns of padding, and the
largest difference of its output to that of the first padded one.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from flashtune.core.launching import launcher
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.inputs import make_inputs
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.stopwatch import Stopwatch

FAMILY = family("flash_fwd_hopper")


def problem_of(d: int, n: int, causal: bool) -> Problem:
    """16,384 tokens per batch and at most 2048 columns."""
    heads = 2048 // d
    sizes = dict(batch=max(1, 16384 // n), heads=heads, kv_heads=heads, n_q=n, n_kv=n, d=d, d_v=d)
    return Problem(**sizes, dtype="bf16", features=Features(causal=causal))


def main() -> None:
    """Time the starts of each head size, full and causal, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, nargs="+", default=[96, 192], help="head sizes (default: 96 192)")
    parser.add_argument("--n", type=int, default=4096, help="sequence length (default: %(default)s)")
    parser.add_argument("--configs", type=int, default=4, help="how many padded starts, beside those in pieces (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="timing for all configs of a problem (default: %(default)s)")
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None or not gpu.target.is_hopper:
        raise SystemExit("v_pieces.py times kernels of compute capability 9.0 and found no such GPU: run it on an H100 or H200")
    stopwatch = Stopwatch(torch.device("cuda"), gpu.target.l2_bytes)
    for d in options.d:
        for causal in (False, True):
            problem = problem_of(d, options.n, causal)
            print(problem.label(), flush=True)
            inputs = make_inputs(problem, device="cuda", seed=0)
            starts = FAMILY.starts(problem.spec(), gpu.target)
            padded = [config for config in starts if config["v_columns"] == "padded"][: options.configs]
            configs = padded + [config for config in starts if config["v_columns"] == "pieces"]
            runs: list[Callable[[], object]] = []
            outputs = []
            for config in configs:
                launch = launcher(load_source(render(FAMILY, variant_of(FAMILY, problem.spec(), config)), "v_pieces"))
                runs.append(partial(launch, *inputs.arguments, **inputs.keywords))
                inputs.out.fill_(float("nan"))
                runs[-1]()
                outputs.append(inputs.out.float())
            for config, out, time in zip(configs, outputs, stopwatch.race(runs, budget_s=options.seconds), strict=True):
                speed, off = problem.flops() / time.median_us / 1e6, float((out - outputs[0]).abs().max())
                print(f"  {time.median_us:9.1f} us {speed:7.1f} TFLOP/s  off {off:.1e}  {config.label()}", flush=True)


if __name__ == "__main__":
    main()
