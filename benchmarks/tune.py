"""Searches the cells of forward.py on this machine's GPU, which is how the shipped rows were made: `python benchmarks/tune.py --db FILE`.

Plain cells are searched in bf16 and, with fewer trials, in fp16, whose winners are nearly the same. Each group tries the family that
is made for it, and small cells both that may be, whatever sizes are thought to suit them; `flashtune search` would try all that suit.

`--cells models` are the attentions of models that have no row yet, those of most worth first; `--list` shows them.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from forward_cells import USUAL, Group, cells, dtypes_of, groups_of, numbers_of

from flashtune.cli.search import SearchOptions, run_search
from flashtune.core.problem import Problem, ProblemKey
from flashtune.core.results import TuningRecord
from flashtune.core.target import find_target
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch.policy import choose, torch_has
from flashtune.dispatch.policy.losses import comparable, estimate
from flashtune.templates import families
from flashtune.tuner.machine import local_gpu

FAMILIES: dict[Group, tuple[str, ...]] = {
    "plain": ("flash_fwd_hopper",),
    "features": ("flash_fwd_hopper",),
    "fp8": ("flash_fwd_hopper",),
    "decode": ("flash_decode",),
    "small": ("flash_fwd_hopper", "flash_decode"),
    "models": (),
    "scores": ("flash_fwd_hopper",),
}
"""What each group tries; nothing for all that suit. The race between families, as between configs, decides what is recorded."""


STEP_BATCHES = (1, 32)
"""Sequences of models' decoding steps, beside the usual number."""

GPU = find_target("h200")

NOTHING = 0.3
"""What a problem is taken to lose for which no row can stand in."""

SECONDS_EACH = 11.0
"""What a search takes on an H200 with 16 cores: a time limit is given to as many problems as that allows."""


def problems_of(group: Group, *, d: Collection[int] | None = None, n: Collection[int] | None = None) -> list[Problem]:
    """The problems of a group of cells; all N of one spec side by side, so that compiled kernels serve them all."""
    if group == "models":
        return [problem for problem, _ in wanting(d=d, n=n)]
    found = list(dict.fromkeys(cell.problem for cell in cells((group,), d=d, n=n)))
    return found + [replace(problem, dtype="fp16") for problem in found] if group == "plain" else found


def wanting(
    *, d: Collection[int] | None = None, n: Collection[int] | None = None, records: Sequence[TuningRecord] | None = None
) -> list[tuple[Problem, float]]:
    """Problems of the models' cells, and their steps at other batches, whose keys have no measured row of an H200 (among
    `records`, by default the shipped ones), those of most worth first.

    A row's worth is by how much the estimated losses (flashtune.dispatch.policy.losses) of all these problems then fall, in sum: its own,
    and those of problems that it may stand in for. After each that is taken, the rest is judged anew. What has no stand-in loses NOTHING.
    """
    records = Library.of(shipped_path()).records(gpu=GPU.slug) if records is None else records
    known = {record.key for record in records if record.outcome.source == "measured"}
    problems: dict[ProblemKey, Problem] = {}
    for cell in cells(("models",), d=d, n=n):
        batches = (cell.problem.batch, *STEP_BATCHES) if cell.problem.n_q == 1 else (cell.problem.batch,)
        for problem in (replace(cell.problem, batch=batch) for batch in batches):
            if (key := problem.key(GPU.slug)) not in known:
                problems.setdefault(key, problem)
    losses: dict[ProblemKey, float] = {}
    for key, problem in problems.items():
        found = choose(problem, GPU, records, families(), framework_serves=torch_has(problem)).estimate
        losses[key] = NOTHING if found is None else found.median
    # What each loses by each: nothing by its own row.
    by = {row: {key: estimate(row, key).median for key in problems if comparable(row, key)} for row in problems}
    taken: list[tuple[Problem, float]] = []
    while by:
        worths = {row: sum(max(0.0, losses[key] - loss) for key, loss in reach.items()) for row, reach in by.items()}
        best = max(worths, key=lambda row: (worths[row], losses[row]))
        taken.append((problems[best], worths[best]))
        losses |= {key: min(losses[key], loss) for key, loss in by.pop(best).items()}
    return taken


def show(groups: tuple[Group, ...], *, d: Collection[int] | None, n: Collection[int] | None) -> None:
    """The problems, a line each."""
    for group in groups:
        if group != "models":
            print(*(problem.label() for problem in problems_of(group, d=d, n=n)), sep="\n")
            continue
        for problem, worth in wanting(d=d, n=n):
            print(f"b{problem.batch} h{problem.heads}/{problem.kv_heads} {problem.label()}: {worth:.1%}")


def main() -> None:
    """Search group by group and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", help="the database to write")
    parser.add_argument("--list", action="store_true", help="print what would be searched, for models with its worth, and end")
    parser.add_argument("--limit-s", type=float, help=f"seconds for all: the first problems, {SECONDS_EACH:g} seconds for each")
    parser.add_argument(
        "--cells",
        type=groups_of,
        default=",".join(USUAL),
        help="groups of cells, with commas between them; also models and scores (%(default)s)",
    )
    parser.add_argument("--d", type=numbers_of, help="only these head sizes, with commas between them")
    parser.add_argument("--n", type=numbers_of, help="only these numbers of keys, with commas between them")
    parser.add_argument("--dtype", type=dtypes_of, help="only these element types, with commas between them")
    parser.add_argument("--trials", type=int, default=40, help="trials per problem (default: %(default)s)")
    parser.add_argument("--fp16-trials", type=int, default=10, help="the same for fp16 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.list:
        show(options.cells, d=options.d, n=options.n)
        return
    if options.db is None:
        parser.error("the following arguments are required: --db")
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise SystemExit("tune.py measures kernels and found no GPU that flashtune knows: run it on the GPU's machine")
    began = time.monotonic()
    for group in options.cells:
        every = problems_of(group, d=options.d, n=options.n)
        for dtype in dict.fromkeys(problem.dtype for problem in every):
            if options.dtype and dtype not in options.dtype:
                continue
            started = time.monotonic()
            mine = [problem for problem in every if problem.dtype == dtype]
            left = None if options.limit_s is None else options.limit_s - (started - began)
            if left is not None:
                mine = mine[: max(0, int(left / SECONDS_EACH))]
            if not mine:
                print(f"{group} {dtype}: left out, time was up", flush=True)
                continue
            how = SearchOptions(
                templates=FAMILIES[group],
                trials=options.fp16_trials if dtype == "fp16" else options.trials,
                seed=options.seed,
                budget_s=left,
                location=options.db,
            )
            records = run_search(
                gpu.target,
                mine,
                how,
                quiet=True,
                command=shlex.join(["python", *sys.argv]),
            )
            for record in records:
                beside = f"{record.framework_us / record.median_us:.3f}x the framework" if record.framework_us else ""
                served = f"{record.outcome.template} {record.outcome.config.label()}"
                print(record.problem.label(), f"{record.median_us:.1f} us", beside, served, flush=True)
            print(f"{group} {dtype}: {len(records)} rows in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
