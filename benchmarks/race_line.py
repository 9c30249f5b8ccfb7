"""What one line of settled forwards costs on this machine's GPU: `python benchmarks/race_line.py`.

Shipped bf16 kernels whose row maxima settle, with their text as it is and with the line NEW as it was before, OLD, interleaved as in a
search's closing race. Prints both medians in microseconds and their ratio. Where a line of a branch that is rarely taken changes, this
says whether rows may keep the times of the text before (docs/decisions/0013-hash-of-the-text.md). Needs a GPU of compute capability 9.0.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from forward_cells import problem_of
from race_twins import measured

from flashtune.core.config import Config, settles
from flashtune.core.launching import launcher, provided
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates import family
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.timing.stopwatch import Stopwatch
from flashtune.tuner.verify.inputs import make_inputs

FAMILY = family("flash_fwd_hopper")
NEW = "gl.minimum(gl.log2(gl.maximum(gl.max(probs, 1), 1.0)), 126.0)"
OLD = "gl.log2(gl.maximum(gl.max(probs, 1), 1.0))"


def settled_rows(gpu: str) -> Iterator[tuple[Problem, Config]]:
    """Plain problems of which a row's best settled config ships."""
    with Store.open(shipped_path(), writable=False) as store:
        found = {result.problem.label(): measured([result]) for result in store.results() if result.gpu == gpu}
    for d in (64, 128, 256):
        for n in (1024, 4096, 16384):
            for causal in (False, True):
                problem = problem_of(d, n, Features(causal=causal), dtype="bf16")
                ours = (one.config for one in found.get(problem.label(), ()) if one.template == FAMILY.name and settles(one.config))
                if (config := next(ours, None)) is not None:
                    yield problem, config


def main() -> None:
    """Race each row's two texts and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new", default=NEW, help="the line's expression as it is (default: %(default)s)")
    parser.add_argument("--old", default=OLD, help="what stood there before (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="timing of each pair (default: %(default)s)")
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None or not gpu.target.is_hopper:
        raise SystemExit("race_line.py times kernels of compute capability 9.0 and found no such GPU: run it on an H100 or H200")
    stopwatch = Stopwatch(torch.device("cuda"), gpu.target.l2_bytes)
    for problem, config in settled_rows(gpu.target.slug):
        text = render(FAMILY, variant_of(FAMILY, problem.spec(), FAMILY.completed(config)))
        if options.new not in text:
            continue
        inputs = make_inputs(problem, device="cuda", seed=0)
        runs: list[Callable[[], object]] = []
        for number, source in enumerate((text, text.replace(options.new, options.old))):
            module = load_source(source, f"race_line_{number}")
            launch, words = launcher(module), inputs.keywords | provided(module, inputs.q, inputs.k)
            runs.append(partial(launch, *inputs.arguments, **words))
            runs[-1]()
        new, old = stopwatch.race(runs, budget_s=options.seconds)
        print(f"{problem.label():36s} {new.median_us:9.1f} {old.median_us:9.1f} {new.median_us / old.median_us:.4f}", flush=True)


if __name__ == "__main__":
    main()
