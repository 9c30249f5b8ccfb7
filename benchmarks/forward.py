"""Times our kernels beside cuDNN, FlashAttention-2 and FlexAttention on this machine's GPU: `python benchmarks/forward.py`.

All peers of a cell run interleaved, on the same inputs, and against a float64 oracle. First every cell is compiled and checked, in
several processes; then one process alone times them. A cell that hangs or crashes costs itself. FlashAttention-4 appears by its ratio
to cuDNN, which is known for some cells (fa4_h200.json). Ours is what `dispatch.attention` serves: `exact` names a kernel that was tuned
for the very cell, `framework` no kernel of ours at all.

Prints tables (of rates, and for small cells, which latency limits, of microseconds), writes forward.json to the folder named by OUT
(default: the current one), and exits with 1 where a result is wrong (its error more than twice the framework's) or a cell failed.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as Overdue
from pathlib import Path
from typing import Any

from forward_cells import GROUPS, Cell, cells, groups_of, numbers_of, peers_of_text
from forward_peers import Checked, check_cell, start, time_cell
from forward_report import FA4, Row, fa4_ratios, summary, tables
from pebble import ProcessExpired, ProcessPool

from flashtune.tuner.machine import local_gpu, provenance
from flashtune.tuner.tasks import one_line

DEVICE = "cuda:0"


def in_children(task: Callable[..., Any], chosen: list[Cell], *words: Any, count: int, limit_s: float) -> Iterator[tuple[Cell, Any, str]]:
    """Each cell with `task`'s answer (None where there is none) and why there is none; no process outlives this."""
    pool = ProcessPool(max_workers=count, context=multiprocessing.get_context("spawn"), initializer=start)
    try:
        futures = [pool.schedule(task, args=(cell, *words), timeout=limit_s) for cell in chosen]
        for cell, future in zip(chosen, futures, strict=True):
            try:
                yield cell, future.result(), ""
            except Overdue:
                yield cell, None, f"killed after {limit_s:g} s"
            except ProcessExpired as crash:
                yield cell, None, f"its process died (exit code {crash.exitcode}), as after a CUDA error"
            except Exception as error:
                yield cell, None, one_line(error)
    finally:
        pool.stop()
        pool.join()


def run(chosen: list[Cell], *, seed: int, seconds: float, jobs: int, limit_s: float) -> list[Row]:
    """Check all in parallel, then time those that have something to time one after another."""
    rows: dict[Cell, Row] = {}
    for cell, checked, failed in in_children(check_cell, chosen, DEVICE, seed, count=jobs, limit_s=limit_s):
        rows[cell] = Row(cell=cell, checked=checked or Checked(), failed=failed)
        print(f"checked {cell.name} {rows[cell].remark}".rstrip(), file=sys.stderr, flush=True)
    sound = [cell for cell, row in rows.items() if not row.remark]
    for cell, times, failed in in_children(time_cell, sound, DEVICE, seed, seconds, count=1, limit_s=limit_s):
        rows[cell] = Row(cell=cell, checked=rows[cell].checked, times=times or {}, failed=failed)
        print(f"timed {cell.name} {rows[cell].remark}".rstrip(), file=sys.stderr, flush=True)
    return list(rows.values())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cells", type=groups_of, default=",".join(GROUPS), help="groups of cells, with commas between them (default: %(default)s)"
    )
    parser.add_argument("--d", type=numbers_of, help="only these head sizes, with commas between them")
    parser.add_argument("--n", type=numbers_of, help="only these numbers of keys, with commas between them")
    parser.add_argument(
        "--without", type=peers_of_text, default="", help="peers to leave out, such as flex, which takes longest to compile"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="timing per cell (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a cell is given up (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), help="cells that are checked at once (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Run, print and write."""
    options = arguments()
    if local_gpu() is None:
        raise SystemExit("forward.py times kernels on a GPU and found none: run it on the GPU's machine")
    chosen = cells(options.cells, d=options.d, n=options.n, without=options.without)
    rows = run(chosen, seed=options.seed, seconds=options.seconds, jobs=options.jobs, limit_s=options.limit)
    known = fa4_ratios()
    command = shlex.join(["python", *sys.argv])
    found = {
        "provenance": provenance(command=command, seed=options.seed, measured=True).as_json(),
        "fa4": json.loads(FA4.read_text()),
        "summary": summary(rows, known),
        "rows": [row.as_json(known) for row in rows],
    }
    Path(os.environ.get("OUT", "."), "forward.json").write_text(json.dumps(found, indent=1, allow_nan=False))
    print(tables(rows, known))
    if any(row.wrong or row.failed for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
