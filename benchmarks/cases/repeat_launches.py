"""Repeatability of kernels with a bias: whether launches write the same bits each time, and the right ones.

For some problems with a bias that the copy engine reads: dispatch's choice, and configs of which a check on an H200 once reported errors
that changed from launch to launch. Each is compared with the oracles and launched many times, with others in other processes first and then
alone on the GPU, and each launch is compared with the one before it. Prints a line for each and exits with 1 where one was wrong. Needs a
GPU of compute capability 9.0.
"""

import time
from collections import Counter
from dataclasses import replace

from benchmarks.shared.children import Children, Job
from benchmarks.shared.environment import argument_parser, this_gpu
from benchmarks.shared.searches import shipped
from flashtune.core.config import Config
from flashtune.core.problem import Features, Problem
from flashtune.core.target import Target
from flashtune.dispatch.policy import choose
from flashtune.templates import families, family
from flashtune.tuner.children import tasks
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.verify.correctness import differs

PROBLEMS = ((16, 8, 1024, 256), (16, 16, 1024, 96), (32, 16, 512, 128), (16, 16, 1024, 64))
"""Batch, heads, length, head size."""

BASE: dict[str, int | str | bool] = dict(
    BLOCK_N=64, num_stages=2, intra_wg_overlap=1, pingpong=False, section=1, order="fixed", ctas_per_sm=1, maximum="running"
)
SUSPECTS: tuple[dict[str, int | str | bool], ...] = (
    {"BLOCK_M": 128, "tiles": "one"},
    {"BLOCK_M": 192, "tiles": "loop"},
    {"BLOCK_M": 128, "tiles": "one", "intra_wg_overlap": 0},
)


def problems() -> list[Problem]:
    """PROBLEMS in bf16, and the first with a boolean mask, which is loaded otherwise."""
    found = [
        Problem(batch=batch, heads=heads, kv_heads=heads, n_q=n, n_kv=n, d=d, d_v=d, dtype="bf16", features=Features(mask="bias"))
        for batch, heads, n, d in PROBLEMS
    ]
    return [*found, replace(found[0], features=Features(mask="bool"))]


def candidates_of(problem: Problem, target: Target) -> list[Candidate]:
    """Dispatch's choice, and the suspects that are valid for the problem."""
    served = choose(problem, target, shipped(), families(), framework_serves=False)
    assert served.family is not None and served.config is not None, "a kernel serves biases"
    kind, spec = family("flash_fwd_hopper"), problem.spec()
    configs = [kind.completed(Config.of({**BASE, **words})) for words in SUSPECTS]
    suspects = [Candidate(family=kind, config=config) for config in configs if kind.violated(config, spec, target) is None]
    return list(dict.fromkeys([Candidate(family=served.family, config=served.config), *suspects]))


def repeat(problem: Problem, candidate: Candidate, target: Target, seed: int, times: int, limit_s: float) -> str:
    """In a child process: two verdicts of the oracles, and the number of launches that differ from the one before."""
    bench = tasks._ready(problem, target, seed)
    launch = tasks._loaded(tasks.Source.of(candidate.family, candidate.variant(problem.spec())))[1]
    said: Counter[str] = Counter()
    for _ in range(2):
        verdict = bench.verifier.verdict(launch)
        said[verdict.reason or f"right, {verdict.error:.2f} of the tolerance"] += 1
    began, made, differing = time.monotonic(), 0, 0
    while made < times and time.monotonic() < began + limit_s:
        differing += bool(differs(launch, bench.inputs))
        made += 1
    return f"{differing} of {made} launches differ; " + "; ".join(f"{reason} ({number})" for reason, number in said.items())


def main() -> None:
    """Together, then alone."""
    parser = argument_parser(__doc__)
    parser.add_argument("--times", type=int, default=200, help="launches of each (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=1.0, help="seconds of launches of each (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=12, help="processes at once in the second round (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    target, wrong = this_gpu(), False
    chosen = [(problem, candidate) for problem in problems() for candidate in candidates_of(problem, target)]
    how = (target, options.seed, options.times, options.limit_s)
    jobs: list[Job] = [(repeat, (problem, one, *how)) for problem, one in chosen]
    # Together first: everything is compiled then.
    for word, count in (("together", options.jobs), ("alone", 1)):
        with Children(count=count, limit_s=120.0) as children:
            for (problem, one), (found, failed) in zip(chosen, children.each(jobs), strict=True):
                wrong |= found is None or not found.startswith("0 ") or "right" not in found or "off" in found
                print(f"{word}: {problem.label()} {one.config.label()}: {found or failed}", flush=True)
    if wrong:
        raise SystemExit(1)
