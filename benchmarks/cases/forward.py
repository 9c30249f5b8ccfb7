"""Forward pass beside cuDNN, FlashAttention-2, FlashAttention-4 and FlexAttention.

Peers of a cell run interleaved, on the same inputs, and are compared with a float64 oracle. First every cell is compiled and checked, in
several processes; then one process alone times them. A cell that hangs or crashes costs itself. FlashAttention-4 and cuDNN's fp8 are peers
where they are installed (`pip install flash-attn-4`, `nvidia-cudnn-frontend`). Ours is the kernel that `dispatch.attention` chooses:
`exact` names a kernel that was tuned for the very cell, `framework` PyTorch.

`--cells models` are the attentions of the models that flashtune knows (`flashtune show --models`), prefill and a decoding step, beside
torch's default and FlashAttention-4. `--cells scores` are the plain cells on adversarial scores (flashtune.tuner.verify.distributions),
some with half of the keys masked, beside cuDNN and beside the same kernel on random numbers; the most informative ones come first.

Prints tables (rates, or microseconds where latency limits), writes forward.json after each cell, but only every WRITING_S, and exits with 1
where a result is wrong (its error more than twice PyTorch's) or a cell failed.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.shared.cells import USUAL, Cell, cells, groups_of, peers_of_text
from benchmarks.shared.children import NO_TIME, in_children, until
from benchmarks.shared.environment import argument_parser, made_by, numbers_of, output_folder, this_gpu
from benchmarks.shared.peers import Checked, check_cell, start, time_cell
from benchmarks.shared.report import Row, summary, tables

DEVICE = "cuda:0"
CHECKING = 0.5
"""Share of a run's time after which no more cells are checked."""
WRITING_S = 2.0
"""Seconds from one writing to the next: hundreds of cells are written each time."""


def run(
    chosen: list[Cell],
    *,
    seed: int,
    seconds: float,
    jobs: int,
    limit_s: float,
    budget_s: float = math.inf,
    keep: Callable[[list[Row]], object] | None = None,
) -> list[Row]:
    """Check all cells in parallel, then time the sound ones one after another; `keep` gets all rows after each.

    Cells that `budget_s` leaves no time for have a row that says so.
    """
    began = time.monotonic()
    rows = {cell: Row(cell=cell, failed=NO_TIME) for cell in chosen}
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


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--cells", type=groups_of, default=",".join(USUAL), help="groups of cells; also models and scores (%(default)s)")
    parser.add_argument("--d", type=numbers_of, help="only these head sizes, with commas between them")
    parser.add_argument("--n", type=numbers_of, help="only these numbers of keys, with commas between them")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only cells whose name this regular expression finds")
    parser.add_argument("--without", type=peers_of_text, default="", help="peers to leave out, such as flex, which compiles for longest")
    parser.add_argument("--seconds", type=float, default=0.5, help="timing per cell (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for everything; cells beyond it are left out")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a cell is killed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="cells checked at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Run, print and write."""
    options = arguments()
    this_gpu()
    provenance, file, written = made_by(options.seed), output_folder() / "forward.json", -math.inf

    def keep(rows: list[Row], *, last: bool = False) -> None:
        nonlocal written
        if not last and time.monotonic() < written + WRITING_S:
            return
        written = time.monotonic()
        found = {"provenance": provenance, "summary": summary(rows), "rows": [row.as_json() for row in rows]}
        # Replaced as a whole: who ends this process finds a complete file.
        new = file.with_suffix(".json.new")
        new.write_text(json.dumps(found, indent=1, allow_nan=False))
        new.replace(file)

    rows = run(
        cells(options.cells, d=options.d, n=options.n, without=options.without, only=options.only),
        seed=options.seed,
        seconds=options.seconds,
        jobs=options.jobs,
        limit_s=options.limit,
        budget_s=options.budget_s,
        keep=keep,
    )
    keep(rows, last=True)
    print(tables(rows))
    if any(row.wrong or row.failed for row in rows):
        raise SystemExit(1)
