"""Times Hopper kernels with the output's columns in pieces beside the same kernels with padded ones: `python benchmarks/v_pieces.py`.

Configs are the family's first starts that settle, each padded and in pieces, and those whose tiles only pieces leave registers for. They
run interleaved on the same inputs, 16,384 tokens per batch and 2048 columns of queries or the next fewer that whole heads make. A line
names a config's time, its TFLOP/s without columns of padding, and the largest difference of its output to that of the first padded one.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch

from flashtune.core.config import Config
from flashtune.core.launching import launcher
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.core.target import Target
from flashtune.templates import family
from flashtune.templates.rendering import variant_of
from flashtune.tuner import tasks
from flashtune.tuner.inputs import make_inputs
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.replies import Failed
from flashtune.tuner.stopwatch import Stopwatch
from flashtune.tuner.tasks import Source
from flashtune.tuner.workers import Workers

FAMILY = family("flash_fwd_hopper")


def problem_of(d: int, n: int, causal: bool) -> Problem:
    """16,384 tokens per batch and at most 2048 columns."""
    heads = 2048 // d
    sizes = dict(batch=max(1, 16384 // n), heads=heads, kv_heads=heads, n_q=n, n_kv=n, d=d, d_v=d)
    return Problem(**sizes, dtype="bf16", features=Features(causal=causal))


def configs_of(problem: Problem, target: Target, most: int) -> list[Config]:
    """`most` padded starts, those in pieces that are otherwise the same, and those in pieces that are valid in no other way."""
    starts = FAMILY.starts(problem.spec(), target)
    padded = [config for config in starts if config["v_columns"] == "padded" and config["maximum"] == "first"][:most]
    pieces = [config for config in starts if config["v_columns"] == "pieces"]
    alone = [config for config in pieces if FAMILY.violated(config.replace(v_columns="padded"), problem.spec(), target) is not None]
    return padded + [config.replace(v_columns="pieces") for config in padded] + alone


def main() -> None:
    """Compile all in parallel, then time each head size, full and causal, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, nargs="+", default=[96, 192], help="head sizes (default: 96 192)")
    parser.add_argument("--n", type=int, default=4096, help="sequence length (default: %(default)s)")
    parser.add_argument("--configs", type=int, default=3, help="how many padded starts (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="timing for all configs of a problem (default: %(default)s)")
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None or not gpu.target.is_hopper:
        raise SystemExit("v_pieces.py times kernels of compute capability 9.0 and found no such GPU: run it on an H100 or H200")
    problems = [problem_of(d, options.n, causal) for d in options.d for causal in (False, True)]
    compiling = []
    with Workers(jobs=os.cpu_count() or 1) as workers:
        for problem in problems:
            for config in configs_of(problem, gpu.target, options.configs):
                source = Source.of(FAMILY, variant_of(FAMILY, problem.spec(), config))
                limit_s = workers.limits.compile_s
                task = workers.submit("compile", tasks.compile_candidate, source, problem, gpu.target, limit_s=limit_s)
                compiling.append((problem, config, source, task))
        ready = [(problem, config, source) for problem, config, source, task in compiling if not isinstance(task.reply(), Failed)]
    print(f"{len(ready)} of {len(compiling)} configs compile", flush=True)
    stopwatch = Stopwatch(torch.device("cuda"), gpu.target.l2_bytes)
    for problem in problems:
        print(problem.label(), flush=True)
        inputs = make_inputs(problem, device="cuda", seed=0)
        configs, runs, outputs = list[Config](), list[Callable[[], object]](), list[torch.Tensor]()
        for config, source in ((config, source) for which, config, source in ready if which == problem):
            run = partial(launcher(load_source(source.text, source.stem)), *inputs.arguments, **inputs.keywords)
            inputs.out.fill_(float("nan"))
            run()
            configs.append(config)
            runs.append(run)
            outputs.append(inputs.out.float())
        for config, out, time in zip(configs, outputs, stopwatch.race(runs, budget_s=options.seconds), strict=True):
            speed, off = problem.flops() / time.median_us / 1e6, float((out - outputs[0]).abs().max())
            print(f"  {time.median_us:9.1f} us {speed:7.1f} TFLOP/s  off {off:.1e}  {config.label()}", flush=True)


if __name__ == "__main__":
    main()
