"""How many programs should share a decoding step's keys, by this machine's GPU: `python benchmarks/split_counts.py`.

Steps whose key heads in all batches don't divide the GPU's SMs, by the decoding kernel that dispatch would choose, with its keys split by
the kernel's own rule and otherwise, interleaved with torch's attention. Prints microseconds by splits, and writes split_counts.json to the
folder named by OUT (default: the current one).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forward_report import sizes_of
from random_inputs import random_inputs
from searches import shipped

from flashtune.core.launching import launcher, provided
from flashtune.core.modules import load_source
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.dispatch.policy import choose
from flashtune.templates import family
from flashtune.templates.cost import sharing
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.timing.baseline import framework_call
from flashtune.tuner.timing.stopwatch import Stopwatch

DECODE = family("flash_decode")
KEY_HEADS = (40, 54, 72, 80, 96, 100, 112, 128, 140, 160, 168, 200, 224, 300)
"""Key heads in all batches; 128 fill 132 SMs nearly once."""
OTHERS = (1, 2, 3, 4, 5, 6, 8, 12)
"""Numbers of splits beside the rule's."""


def problems() -> list[Problem]:
    """A step for each number of key heads, head size, heads to a key head and number of keys; the plainest first."""
    found = []
    for d, shared, n in ((128, 4, 4096), (64, 1, 4096), (128, 1, 12288), (128, 8, 2048), (72, 4, 12288), (160, 1, 8192), (64, 8, 8192)):
        for heads in KEY_HEADS:
            batch = next(one for one in (8, 10, 4, 6, 2, 1) if heads % one == 0)
            shape = {"batch": batch, "heads": heads // batch * shared, "kv_heads": heads // batch}
            found.append(Problem(**shape, n_q=1, n_kv=n, d=d, d_v=d, dtype="bf16"))
    return found


def raced(problem: Problem, target: Target, stopwatch: Stopwatch, seconds: float) -> dict[str, Any]:
    """Medians in microseconds by the number of splits, and torch's; `rule` is the kernel's own number."""
    chosen = choose(problem, target, shipped(), {DECODE.name: DECODE}, framework_serves=False)
    assert chosen.config is not None, "a decoding kernel serves every plain step"
    text = render(DECODE, variant_of(DECODE, problem.spec(), chosen.config))
    inputs = random_inputs(problem, seed=0)
    module = load_source(text, "split_counts")
    blocks = -(-problem.n_kv // chosen.config.number("BLOCK_N"))
    rule = sharing(chosen.config, problem, target).splits
    launch, words = launcher(module), inputs.keywords | provided(module, inputs.q, inputs.k)

    def by(splits: int) -> None:
        module.split_count = lambda *_: splits  # type: ignore[attr-defined]
        launch(*inputs.arguments, **words)

    counts = sorted({rule, *(min(other, blocks) for other in OTHERS)})
    runs: list[Callable[[], object]] = [partial(by, splits) for splits in counts]
    framework = framework_call(inputs)
    assert framework is not None, "torch has plain attention"
    runs.append(framework)
    for run in runs:
        run()
    times = stopwatch.race(runs, budget_s=seconds)
    return {
        "sizes": sizes_of(problem),
        "config": chosen.config.as_dict(),
        "blocks": blocks,
        "rule": rule,
        "us": {splits: one.median_us for splits, one in zip(counts, times, strict=False)},
        "torch_us": times[-1].median_us,
    }


def main() -> None:
    """Race all steps that there is time for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.06, help="timing of each step (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=100.0, help="for everything (default: %(default)s)")
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise SystemExit("split_counts.py times kernels and found no GPU that flashtune knows: run it on the GPU's machine")
    stopwatch = Stopwatch(torch.device("cuda"), gpu.target.l2_bytes)
    began, found = time.monotonic(), []
    for problem in problems():
        if time.monotonic() - began > options.budget_s:
            print("out of time", file=sys.stderr)
            break
        found.append(one := raced(problem, gpu.target, stopwatch, options.seconds))
        us = " ".join(f"{splits}:{time_us:.1f}" for splits, time_us in one["us"].items())
        heads = f"{problem.label()} key heads {problem.batch * problem.kv_heads}"
        print(f"{heads} rule {one['rule']} | {us} | torch {one['torch_us']:.1f} | {one['config']}", flush=True)
    Path(os.environ.get("OUT", "."), "split_counts.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
