"""Times our kernels beside cuDNN, FlashAttention-2 and FlexAttention on this machine's GPU: `python benchmarks/forward.py`.

All peers of a cell run interleaved, on the same inputs, and against a float64 oracle. First every cell is compiled and checked, in
several processes; then one process alone times them. A cell that hangs or crashes costs itself. FlashAttention-4 is a peer where it is
installed; elsewhere it appears by its ratio to cuDNN, which is known for some cells (fa4_h200.json). cuDNN's fp8 takes cuDNN's frontend
(cudnn_fp8.py). Ours is what `dispatch.attention` serves: `exact` names a kernel that was tuned for the very cell, `framework` no kernel of
ours at all.

`--cells models` are the attentions of the models that flashtune knows (`flashtune show --models`), prefill and a decoding step, beside
torch's default and FlashAttention-4 itself, where it is installed. `--cells scores` are the plain cells in bf16 and fp16 on the scores that
models make (flashtune.tuner.verify.distributions), some with half of the keys hidden by a mask, beside cuDNN and beside the kernel of the
same plan on random numbers, with errors of output and LSE; calls before the timing let the plan remember that scores mislead it. Those
without which a run says least come first, so that it may be cut short.

With `--known FILE` the cells that an earlier run's forward.json has are taken from it where the same kernels serve them still, and each
such row says of which run it is: several runs make a whole where there is no time for one. Without a GPU only these are put together.

Prints tables (of rates, and of microseconds for models and for small cells, which latency limits), writes forward.json to the folder named
by OUT (default: the current one) after each cell, but only every WRITING_S, and exits with 1 where a result is wrong (its error more than
twice the framework's) or a cell failed.
"""

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from children import in_children
from forward_cells import USUAL, Cell, cells, groups_of, numbers_of, peers_of_text
from forward_known import rows_of
from forward_peers import Checked, check_cell, start, time_cell
from forward_report import FA4, NO_TIME, Row, fa4_ratios, summary, tables

from flashtune.tuner.machine import local_gpu, provenance

DEVICE = "cuda:0"
CHECKING = 0.5
"""The share of a run's time after which no more cells are checked."""
WRITING_S = 2.0
"""Seconds from one writing to the next: hundreds of cells are written each time."""

Found = TypeVar("Found")


def run(
    chosen: list[Cell],
    *,
    seed: int,
    seconds: float,
    jobs: int,
    limit_s: float,
    budget_s: float = math.inf,
    keep: Callable[[list[Row]], object] | None = None,
    known: Mapping[Cell, Row] | None = None,
) -> list[Row]:
    """Check all in parallel but what is `known`, then time those that have something to time one after another; `keep` gets the rows after
    each.

    Of the time `budget_s` no more than CHECKING is for checks. What is left out for want of time has a row that says so.
    """
    began = time.monotonic()
    rows = {cell: Row(cell=cell, failed=NO_TIME) for cell in chosen} | dict(known or {})
    chosen = [cell for cell in chosen if cell not in (known or {})]
    checks = in_children([(check_cell, (cell, DEVICE, seed)) for cell in chosen], start=start, count=jobs, limit_s=limit_s)
    for cell, (checked, failed) in until(began + CHECKING * budget_s, zip(chosen, checks, strict=True)):
        rows[cell] = Row(cell=cell, checked=checked or Checked(), failed=failed)
        print(f"checked {cell.name} {rows[cell].remark}".rstrip(), file=sys.stderr, flush=True)
    checks.close()
    sound = [cell for cell in chosen if not rows[cell].remark]
    rows |= {cell: replace(rows[cell], failed=NO_TIME) for cell in sound}
    times = in_children([(time_cell, (cell, DEVICE, seed, seconds)) for cell in sound], start=start, limit_s=limit_s)
    for cell, (found, failed) in until(began + budget_s, zip(sound, times, strict=True)):
        rows[cell] = replace(rows[cell], times=found or {}, failed=failed)
        print(f"timed {cell.name} {rows[cell].remark}".rstrip(), file=sys.stderr, flush=True)
        if keep is not None:
            keep(list(rows.values()))
    times.close()
    return list(rows.values())


def until(deadline: float, found: Iterable[Found]) -> Iterator[Found]:
    """All of `found` that there is before the deadline, by time.monotonic."""
    for one in found:
        yield one
        if time.monotonic() > deadline:
            return


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cells",
        type=groups_of,
        default=",".join(USUAL),
        help="groups of cells, with commas between them; also models and scores (%(default)s)",
    )
    parser.add_argument("--d", type=numbers_of, help="only these head sizes, with commas between them")
    parser.add_argument("--n", type=numbers_of, help="only these numbers of keys, with commas between them")
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="of all these the cells whose name this regular expression finds (see what a run prints)",
    )
    parser.add_argument(
        "--without", type=peers_of_text, default="", help="peers to leave out, such as flex, which takes longest to compile"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="timing per cell (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for everything; what doesn't fit is left out")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a cell is given up (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), help="cells that are checked at once (default: %(default)s)"
    )
    parser.add_argument(
        "--known",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an earlier run's forward.json, whose cells aren't run again",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Run, print and write."""
    options = arguments()
    gpu = local_gpu()
    if gpu is None and not options.known:
        raise SystemExit("forward.py times kernels on a GPU and found none: run it on the GPU's machine")
    chosen = cells(options.cells, d=options.d, n=options.n, without=options.without, only=options.only)
    known = fa4_ratios()
    made_by = provenance(command=shlex.join(["python", *sys.argv]), seed=options.seed, measured=True).as_json()

    before = {cell: row for path in options.known for cell, row in rows_of(path, chosen).items()}
    if options.known:
        print(f"{len(before)} of {len(chosen)} cells are known", file=sys.stderr, flush=True)
    written = -math.inf

    def keep(rows: list[Row], *, last: bool = False) -> None:
        nonlocal written
        if not last and time.monotonic() < written + WRITING_S:
            return
        written = time.monotonic()
        found = {
            "provenance": made_by,
            "fa4": json.loads(FA4.read_text()),
            "summary": summary(rows, known),
            "rows": [row.as_json(known) for row in rows],
        }
        folder = Path(os.environ.get("OUT", "."))
        folder.mkdir(parents=True, exist_ok=True)
        # Whoever ends this process finds one whole file.
        (folder / "forward.json.new").write_text(json.dumps(found, indent=1, allow_nan=False))
        (folder / "forward.json.new").replace(folder / "forward.json")

    if gpu is None:
        rows = [before.get(cell, Row(cell=cell, failed=NO_TIME)) for cell in chosen]
    else:
        rows = run(
            chosen,
            seed=options.seed,
            seconds=options.seconds,
            jobs=options.jobs,
            limit_s=options.limit,
            budget_s=options.budget_s,
            keep=keep,
            known=before,
        )
    keep(rows, last=True)
    print(tables(rows, known))
    if any(row.wrong or row.failed for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
