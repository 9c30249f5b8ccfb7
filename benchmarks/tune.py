"""Searches the cells of forward.py on this machine's GPU, which is how the shipped rows were made: `python benchmarks/tune.py --db FILE`.

Plain cells are searched in bf16 and, with fewer trials, in fp16, whose winners are nearly the same. Each group tries the family that
is made for it, and small cells both that may be, whatever sizes are thought to suit them; `flashtune search` would try all that suit.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Collection
from dataclasses import replace

from forward_cells import GROUPS, Group, cells, dtypes_of, groups_of, numbers_of

from flashtune.cli.search import SearchOptions, run_search
from flashtune.core.problem import Problem
from flashtune.tuner.machine import local_gpu

FAMILIES: dict[Group, tuple[str, ...]] = {
    "plain": ("flash_fwd_hopper",),
    "features": ("flash_fwd_hopper",),
    "fp8": ("flash_fwd_hopper",),
    "decode": ("flash_decode",),
    "small": ("flash_fwd_hopper", "flash_decode"),
}
"""What each group tries. The race between families, as between configs, decides what is recorded."""


def problems_of(group: Group, *, d: Collection[int] | None = None, n: Collection[int] | None = None) -> list[Problem]:
    """The problems of a group of cells; all N of one spec side by side, so that compiled kernels serve them all."""
    found = [cell.problem for cell in cells((group,), d=d, n=n)]
    return found + [replace(problem, dtype="fp16") for problem in found] if group == "plain" else found


def main() -> None:
    """Search group by group and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", required=True, help="the database to write")
    parser.add_argument(
        "--cells", type=groups_of, default=",".join(GROUPS), help="groups of cells, with commas between them (default: %(default)s)"
    )
    parser.add_argument("--d", type=numbers_of, help="only these head sizes, with commas between them")
    parser.add_argument("--n", type=numbers_of, help="only these numbers of keys, with commas between them")
    parser.add_argument("--dtype", type=dtypes_of, help="only these element types, with commas between them")
    parser.add_argument("--trials", type=int, default=40, help="trials per problem (default: %(default)s)")
    parser.add_argument("--fp16-trials", type=int, default=10, help="the same for fp16 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise SystemExit("tune.py measures kernels and found no GPU that flashtune knows: run it on the GPU's machine")
    for group in options.cells:
        every = problems_of(group, d=options.d, n=options.n)
        for dtype in dict.fromkeys(problem.dtype for problem in every):
            if options.dtype and dtype not in options.dtype:
                continue
            started = time.monotonic()
            how = SearchOptions(
                templates=FAMILIES[group],
                trials=options.fp16_trials if dtype == "fp16" else options.trials,
                seed=options.seed,
                location=options.db,
            )
            records = run_search(
                gpu.target,
                [problem for problem in every if problem.dtype == dtype],
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
