"""Sweeps of today's kernels: random valid candidates of eight problems, checked and timed on this GPU, in the format of the case `sweeps`.

Each problem's first candidates are winners of near records and the hand-written starts, so that the best of its sweep is a good one; all
others are drawn evenly from its whole space. Writes sweeps-GPU.sqlite, a result to each problem as soon as it is done, and prints how many
of its candidates have a time. `plain` is meant for another GPU than the rest.
"""

import sys
from functools import partial
from pathlib import Path

import optuna

from benchmarks.shared.environment import argument_parser, command, names_of, output_folder, this_gpu
from benchmarks.shared.searches import shipped
from flashtune.cli.console import messages
from flashtune.cli.progress import SearchProgress
from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import SearchResult
from flashtune.core.system.errors import NoKernelFound
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.tuner.machine import cores, provenance
from flashtune.tuner.search.plan import SearchPlan
from flashtune.tuner.searching import Search


def square(n: int, d: int, *, batch: int = 4, dtype: str = "bf16", direction: str = "fwd", **features: object) -> Problem:
    """A problem of 16 heads with as many queries as keys."""
    sizes = {"batch": batch, "heads": 16, "kv_heads": 16, "n_q": n, "n_kv": n, "d": d, "d_v": d}
    return Problem(**sizes, dtype=dtype, direction=direction, features=Features(**features))  # type: ignore[arg-type]


def step(n_kv: int, batch: int, heads: int, kv_heads: int) -> Problem:
    """A decoding step of one query to a head; all have one spec, so that their kernels are compiled once."""
    return Problem(batch=batch, heads=heads, kv_heads=kv_heads, n_q=1, n_kv=n_kv, d=128, d_v=128, dtype="bf16")


PROBLEMS = {
    "step-shared": step(9000, 8, 32, 8),
    "step-alone": step(2500, 48, 8, 8),
    "backward": square(3000, 128, batch=2, direction="bwd", causal=True),
    "mask": square(1500, 64, mask="bool"),
    "window": square(6000, 128, batch=2, causal=True, window=(500, 0)),
    "fp16": square(3000, 96, dtype="fp16", causal=True),
    "backward-mask": square(1500, 64, direction="bwd", mask="bool"),
    "plain": square(2500, 128),
}
"""Problems by name, none of which has a record."""

RACE_S = 0.2
"""Seconds of each closing race: what counts are the trials' times."""


def record(problems: tuple[Problem, ...], target: Target, path: Path, *, trials: int, budget_s: float, jobs: int) -> list[SearchResult]:
    """Try candidates of each problem, and keep its result in a database as soon as it is there."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found: list[SearchResult] = []
    plan = SearchPlan(
        target=target,
        problems=problems,
        families=families(),
        source="measured",
        sampler="random",
        seed=0,
        trials=trials,
        budget_s=budget_s,
        until=None,
        race_s=RACE_S,
        jobs=jobs,
        known=shipped(),
    )
    with (
        Store.open(str(path), writable=True) as store,
        SearchProgress(messages(), problems=problems, trials=trials, budget_s=budget_s, quiet=False) as progress,
    ):
        storage = optuna.storages.InMemoryStorage()
        origin = provenance(command=command(), seed=0, measured=True, target=target)
        try:
            save = partial(store.save, once=True)
            found += Search(plan, storage=storage, provenance=origin, save=save, listener=progress).run()
        except NoKernelFound as error:
            print(error, file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Record, and print a line to each problem."""
    parser = argument_parser(__doc__)
    parser.add_argument("--only", type=lambda text: names_of(text, list(PROBLEMS), "problem"), default=tuple(PROBLEMS), metavar="NAMES")
    parser.add_argument("--trials", type=int, default=340, help="candidates of each (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for everything (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=max(1, cores() - 1), help="compilers (default: %(default)s)")
    options = parser.parse_args()
    target = this_gpu()
    problems = tuple(PROBLEMS[name] for name in options.only)
    path = output_folder() / f"sweeps-{target.slug}.sqlite"
    for result in record(problems, target, path, trials=options.trials, budget_s=options.budget_s, jobs=options.jobs):
        timed = [o for o in result.outcomes if o.fate.timed and o.measurement is not None]
        best = min(o.measurement.median_us for o in timed if o.measurement is not None) if timed else float("nan")
        print(f"{result.problem.label()}: {len(timed)} of {len(result.outcomes)} candidates have a time, the best {best:.1f} us")
