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

from benchmarks.shared.cells import USUAL, Cell, cells, groups_of, peers_of_text
from benchmarks.shared.children import NO_TIME, check_then_time
from benchmarks.shared.environment import cell_options, made_by, output_folder, this_gpu
from benchmarks.shared.peers import Checked, check_cell, start, time_cell
from benchmarks.shared.report import Row, summary, tables

DEVICE = "cuda:0"
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
    rows = {cell: Row(cell=cell, failed=NO_TIME) for cell in chosen}
    found = check_then_time(
        chosen,
        lambda cell: (check_cell, (cell, DEVICE, seed)),
        lambda cell: (time_cell, (cell, DEVICE, seed, seconds)),
        start=start,
        count=jobs,
        limit_s=limit_s,
        budget_s=budget_s,
        sound=lambda cell, checked: not Row(cell=cell, checked=checked).wrong,
    )
    for cell, checked, times, failed in found:
        rows[cell] = Row(cell=cell, checked=checked or Checked(), times=times or {}, failed=failed)
        print(f"{cell.name} {rows[cell].remark or 'timed'}", file=sys.stderr, flush=True)
        if keep is not None:
            keep(list(rows.values()))
    return list(rows.values())


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = cell_options(__doc__, limit=120.0, jobs=min(8, os.cpu_count() or 1))
    parser.add_argument("--cells", type=groups_of, default=",".join(USUAL), help="groups of cells; also models and scores (%(default)s)")
    parser.add_argument("--without", type=peers_of_text, default="", help="peers to leave out, such as flex, which compiles for longest")
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
