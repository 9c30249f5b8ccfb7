"""Backwards whose programs share the queries of a tile of keys: checked by the gate on this GPU, and timed beside the same without.

    python benchmarks/divided_queries.py

Prints the gate's verdict of each, then microseconds by how many programs share a tile, in turns, beside torch's choice, and how many the
host's rule takes. Without a GPU `--read FILE` compares what such a file says with today's rule; of a number of programs that was not timed
the slower neighbour counts.
"""

import argparse
import math
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from forward_peers import stopwatch
from searches import shipped, text_of

from flashtune.core.config import Config
from flashtune.core.dtypes import DType
from flashtune.core.launching import launcher
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.core.target import Target, find_target
from flashtune.dispatch.policy import choose
from flashtune.templates import family
from flashtune.templates.backward.hopper.layout import divisions_of
from flashtune.templates.family import Family
from flashtune.tuner.children import tasks
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Failed
from flashtune.tuner.timing.baseline import framework_call
from flashtune.tuner.timing.stopwatch import Run
from flashtune.tuner.verify.inputs import Inputs, make_inputs

CAUSAL = Features(causal=True)
FULL = Features()


def _of(heads: tuple[int, int], n: tuple[int, int], d: int, features: Features, dtype: DType = "bf16", batch: int = 1) -> Problem:
    sizes: dict[str, Any] = {"batch": batch, "heads": heads[0], "kv_heads": heads[1], "n_q": n[0], "n_kv": n[1], "d": d, "d_v": d}
    return Problem(**sizes, dtype=dtype, features=features, direction="bwd").seen()


CASES: tuple[Problem, ...] = (
    *(_of((32, 8), (n, n), 128, CAUSAL) for n in (512, 1024, 2048, 4096)),
    *(_of((28, 4), (n, n), 128, CAUSAL) for n in (1024, 2048, 4096, 8192)),
    *(_of((32, 8), (n, n), 64, CAUSAL) for n in (1024, 2048, 4096)),
    *(_of((14, 2), (n, n), 64, CAUSAL) for n in (1024, 4096)),
    _of((12, 12), (1024, 1024), 64, CAUSAL),
    _of((16, 16), (577, 577), 64, FULL),
    _of((12, 12), (1500, 1500), 64, FULL),
    _of((8, 8), (1024, 1024), 128, FULL),
    _of((20, 5), (1245, 1303), 80, FULL, dtype="fp16"),
    _of((32, 8), (2048, 2048), 128, Features(causal=True, window=(1024, 0))),
    _of((32, 8), (2048, 2048), 80, Features(causal=True, dropout=True)),
    _of((16, 4), (2048, 2048), 128, Features(mask="bool")),
    _of((16, 4), (1024, 1024), 64, Features(causal=True, mask="bias")),
    *(_of((8, 4), (n, n), 256, CAUSAL) for n in (1024, 2048, 4096)),
    _of((8, 4), (2048, 2048), 256, Features(causal=True, softcap=True)),
    _of((16, 4), (1300, 1300), 160, FULL),
    _of((24, 4), (2048, 2048), 192, CAUSAL),
)
DIVISIONS = (1, 2, 3, 4, 6, 8)

SECONDS = 0.15
"""Of timing for each."""


def family_of(problem: Problem) -> Family:
    """The one that calls are served by which ask for no repeatable bits."""
    return family("flash_bwd_hopper" if problem.d <= 128 else "flash_bwd_hopper_split")


def stored_config(problem: Problem, target: Target) -> Config:
    """What the nearest row stands with here, undivided, with sums from registers and a tile to a program, as divided ones have them."""
    kind = family_of(problem)
    choice = choose(problem, target, shipped(), {kind.name: kind}, framework_serves=False)
    config = choice.config if choice.config is not None else kind.default(problem.spec(), target)
    config = config.replace(divided_queries=False)
    return config.replace(dq_sums="registers", persistent=False) if problem.d <= 128 else config


def source_of(problem: Problem, config: Config) -> tasks.Source:
    """The text of a backward."""
    return text_of(Candidate(family=family_of(problem), config=config), problem)


def check(problem: Problem, target: Target) -> str:
    """In a child process: what the gate says of a divided kernel."""
    config = stored_config(problem, target).replace(divided_queries=True)
    reply = tasks.recheck_on_device(source_of(problem, config), problem, target, 0)
    return f"{reply.fate} {reply.reason}" if isinstance(reply, Failed) else f"right, {reply.error:.2f} of the tolerance at most"


def divided_run(problem: Problem, config: Config, divisions: int, inputs: Inputs) -> Run:
    """A backward whose every tile is shared by so many programs."""
    source = source_of(problem, config.replace(divided_queries=True))
    module = load_source(source.text + f"\n\n\ndef query_divisions(*_):\n    return {divisions}\n", f"{source.stem}_{divisions}")
    return partial(launcher(module), *inputs.arguments, **inputs.keywords)


def rule_of(problem: Problem, target: Target) -> int:
    """Among how many programs a kernel's queries are divided that stands in here; 1 where it isn't worth while."""
    config = family_of(problem).resized(stored_config(problem, target), problem, target)
    return divisions_of(config, problem, target)


def losses(text: str, target: Target) -> dict[str, float]:
    """How much longer what the rule takes was than the best, of the problems that a file has times of."""
    found = {}
    for problem in CASES:
        sizes = f"{problem.label()} b{problem.batch} h{problem.heads}/{problem.kv_heads}: "
        line = next((line for line in text.splitlines() if line.startswith(sizes)), None)
        if line is None:
            continue
        pairs = (pair.split() for pair in line.removeprefix(sizes).split(" us")[0].split(", "))
        us = {name: float(time) for name, time in pairs}
        times = {1: us["undivided"]} | {count: us[str(count)] for count in DIVISIONS[1:]}
        rule = min(rule_of(problem, target), DIVISIONS[-1])
        around = max(count for count in times if count <= rule), min(count for count in times if count >= rule)
        found[sizes] = max(times[count] for count in around) / min(times.values())
    return found


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="of the problems those whose label this regular expression finds")
    parser.add_argument("--read", metavar="FILE", help="what this script printed on an H100")
    options = parser.parse_args()
    only = options.only
    if options.read:
        found = losses(Path(options.read).read_text(), find_target("h100"))
        for sizes, loss in found.items():
            print(f"{sizes}{loss:.3f} of the best")
        mean = math.exp(sum(map(math.log, found.values())) / len(found))
        print(f"{len(found)} problems: {mean:.3f} in the mean, {max(found.values()):.3f} at most")
        return
    gpu = local_gpu()
    if gpu is None or gpu.target is None or not gpu.target.is_hopper:
        raise SystemExit("divided_queries.py runs kernels for Hopper and found no such GPU: run it on an H100 or H200")
    cases = [problem for problem in CASES if re.search(only, problem.label())]
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        for problem, said in zip(cases, pool.map(partial(check, target=gpu.target), cases), strict=True):
            print(f"{problem.label()}: {said}", flush=True)
    watch = stopwatch("cuda:0")
    for problem in cases:
        inputs, config = make_inputs(problem, device="cuda:0", seed=0), stored_config(problem, gpu.target)
        runs: dict[str, Run] = {"undivided": tasks.launch_of(source_of(problem, config), inputs)}
        runs |= {str(divisions): divided_run(problem, config, divisions, inputs) for divisions in DIVISIONS}
        framework = framework_call(inputs)
        if framework is not None:
            runs["torch"] = framework
        for run in runs.values():
            run()
        times = watch.race(list(runs.values()), budget_s=SECONDS)
        found = ", ".join(f"{name} {one.median_us:.1f}" for name, one in zip(runs, times, strict=True))
        sizes = f"{problem.label()} b{problem.batch} h{problem.heads}/{problem.kv_heads}"
        print(f"{sizes}: {found} us; the rule takes {divisions_of(config.replace(divided_queries=True), problem, gpu.target)}", flush=True)


if __name__ == "__main__":
    main()
