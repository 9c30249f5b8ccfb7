"""Search of the forward cells on this machine's GPU, which made the first shipped records.

Plain cells are searched in bf16 and, with fewer trials, in fp16, whose winners are nearly the same. Each group tries the family that is
made for it, and small cells both that may be, whatever sizes are thought to suit them; `flashtune search` would try all that suit.
`--cells models` are the attentions of models that have no record.
"""

import argparse
import time
from collections.abc import Collection
from dataclasses import replace

from benchmarks.shared.cells import USUAL, Group, cells, dtypes_of, groups_of
from benchmarks.shared.environment import argument_parser, command, numbers_of, this_gpu
from benchmarks.shared.searches import shipped
from flashtune.cli.search import SearchOptions, run_search
from flashtune.core.problem import Problem
from flashtune.core.target import Target

FAMILIES: dict[Group, tuple[str, ...]] = {
    "plain": ("flash_fwd_hopper",),
    "features": ("flash_fwd_hopper",),
    "fp8": ("flash_fwd_hopper",),
    "decode": ("flash_decode",),
    "small": ("flash_fwd_hopper", "flash_decode"),
    "models": (),
    "scores": ("flash_fwd_hopper",),
}
"""Families that each group tries; nothing for all that suit."""

SECONDS_EACH = 11.0
"""Time of a search on an H200 with 16 cores: as many problems are searched as a limit of time allows."""


def problems_of(group: Group, gpu: str = "h200", *, d: Collection[int] | None = None, n: Collection[int] | None = None) -> list[Problem]:
    """Problems of a group of cells; all N of one spec side by side, so that compiled kernels serve them all."""
    found = list(dict.fromkeys(cell.problem for cell in cells((group,), d=d, n=n)))
    if group == "models":
        known = {record.key for record in shipped()}
        return [problem for problem in found if problem.key(gpu) not in known]
    return found + [replace(problem, dtype="fp16") for problem in found] if group == "plain" else found


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--db", help="the database to write")
    parser.add_argument("--list", action="store_true", help="print the problems that would be searched, of an H200, and end")
    parser.add_argument("--limit-s", type=float, help=f"seconds for all: the first problems, {SECONDS_EACH:g} seconds for each")
    parser.add_argument("--cells", type=groups_of, default=",".join(USUAL), help="groups of cells; also models and scores (%(default)s)")
    parser.add_argument("--d", type=numbers_of, help="only these head sizes, with commas between them")
    parser.add_argument("--n", type=numbers_of, help="only these numbers of keys, with commas between them")
    parser.add_argument("--dtype", type=dtypes_of, help="only these element types, with commas between them")
    parser.add_argument("--trials", type=int, default=40, help="trials per problem (default: %(default)s)")
    parser.add_argument("--fp16-trials", type=int, default=10, help="the same for fp16 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.db is None and not options.list:
        parser.error("the following arguments are required: --db")
    return options


def search(group: Group, problems: list[Problem], target: Target, options: argparse.Namespace, budget_s: float | None) -> None:
    """Search problems of one element type and print the records."""
    started, dtype = time.monotonic(), problems[0].dtype
    how = SearchOptions(
        templates=FAMILIES[group],
        trials=options.fp16_trials if dtype == "fp16" else options.trials,
        seed=options.seed,
        budget_s=budget_s,
        location=options.db,
    )
    records = run_search(target, problems, how, quiet=True, command=command())
    for record in records:
        beside = f"{record.framework_us / record.median_us:.3f}x PyTorch" if record.framework_us else ""
        kernel = f"{record.outcome.template} {record.outcome.config.label()}"
        print(record.problem.label(), f"{record.median_us:.1f} us", beside, kernel, flush=True)
    print(f"{group} {dtype}: {len(records)} records in {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    """Search group by group, or list the problems."""
    options = arguments()
    target, began = None if options.list else this_gpu(), time.monotonic()
    for group in options.cells:
        every = problems_of(group, "h200" if target is None else target.slug, d=options.d, n=options.n)
        for dtype in dict.fromkeys(problem.dtype for problem in every if not options.dtype or problem.dtype in options.dtype):
            mine = [problem for problem in every if problem.dtype == dtype]
            if target is None:
                print(*(f"b{problem.batch} h{problem.heads}/{problem.kv_heads} {problem.label()}" for problem in mine), sep="\n")
                continue
            left = None if options.limit_s is None else options.limit_s - (time.monotonic() - began)
            mine = mine if left is None else mine[: max(0, int(left / SECONDS_EACH))]
            if mine:
                search(group, mine, target, options, left)
            else:
                print(f"{group} {dtype}: left out, time was up", flush=True)
