"""Backward pass beside cuDNN, FlashAttention-2 and FlashAttention-4, and whole training calls at random shapes.

A backward includes its preprocessing and whatever follows the kernels. Peers of a cell run interleaved, on the same inputs, and are
compared with a float64 oracle. Ours is the kernel that dispatch chooses with FLASHTUNE_UNMEASURED=1: `exact` names one tuned for the very
cell. With `--random` or `--combined` dispatch chooses as for users, and calls with their gradients are timed as well, the host included.

Prints tables, writes backward.json after each cell, and exits with 1 where a cell failed, a gradient isn't finite, or an error is more than
twice PyTorch's (beyond its tolerance, where PyTorch has no such gradient).
"""

import argparse
import dataclasses
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.shared.backward_cells import (
    DEFAULT_STEP,
    DETERMINISTIC,
    FA2_REPEATABLE,
    FA4_REPEATABLE,
    GROUPS,
    OURS,
    STEP,
    Checked,
    cells,
    check_cell,
    combined_cells,
    random_cells,
    start,
    start_as_user,
    time_cell,
)
from benchmarks.shared.cells import Cell
from benchmarks.shared.children import check_then_time
from benchmarks.shared.environment import cell_options, made_by, names_of, output_folder, this_gpu
from flashtune.core.problems.tolerances import tolerance
from flashtune.core.records.results import Measurement

Row = dict[str, Any]


def wrong(checked: Checked, bound: float) -> str:
    """Reason that our gradients are wrong, or empty: not finite, more than twice as far off as torch's best, or, where no backend
    computes the same (as with dropout), beyond this bound on the norm."""
    ours = [checked.errors[name] for name in (OURS, STEP) if name in checked.errors]
    if not all(math.isfinite(mine) for errors in ours for mine in errors):
        return "not finite"
    theirs = [
        errors
        for name, errors in checked.errors.items()
        if name in ("cudnn", "flash", "efficient", FA2_REPEATABLE) and all(map(math.isfinite, errors))
    ]
    # Gradients that peers lack stand last.
    limits = [2 * max(best) for best in zip(*theirs, strict=True)]
    if any(mine > limit for errors in ours for mine, limit in zip(errors, limits, strict=False)):
        return "more than twice PyTorch's error"
    return "beyond its tolerance" if any(mine > bound for errors in ours for mine in errors[len(limits) :]) else ""


def row_of(cell: Cell, checked: Checked, times: dict[str, Measurement], failed: str) -> Row:
    """Figures of a cell as JSON."""
    us = {name: time.median_us for name, time in times.items()}
    peers = {name: time for name, time in us.items() if name not in (OURS, STEP, DEFAULT_STEP)}
    return {
        "cell": cell.name,
        "problem": cell.problem.label(),
        "scores": cell.scores,
        **dataclasses.asdict(checked),
        "median_us": us,
        "tflops": {name: cell.problem.flops() / time / 1e6 for name, time in us.items()},
        "noise": {name: time.noise for name, time in times.items()},
        "best_peer": min(peers, key=lambda name: peers[name]) if peers else None,
        "over_best": min(peers.values()) / us[OURS] if peers and OURS in us else None,
        "over": {name: time / us[OURS] for name, time in us.items() if name != OURS and OURS in us},
        "step_over": us[DEFAULT_STEP] / us[STEP] if STEP in us and DEFAULT_STEP in us else None,
        "wrong": wrong(checked, tolerance(cell.problem.spec()).gradient_norm),
        "failed": failed,
    }


def table(rows: list[Row]) -> str:
    """A line for each cell: rates in TFLOP/s, and ours over the best peer's; of deterministic cells, in a table of their own, over each."""
    groups = [[row for row in rows if row["cell"].startswith(DETERMINISTIC) == deterministic] for deterministic in (False, True)]
    found = "\n\n".join(_table(group, OVER_EACH if group is groups[1] else OVER_BEST) for group in groups if group)
    steps = sorted(row["step_over"] for row in rows if row["step_over"])
    if steps:
        found += f"\n\nwhole training steps over torch's default: median {statistics.median(steps):.2f}, least {steps[0]:.2f}"
    return found


OVER_BEST: dict[str, Callable[[Row], float | None]] = {"the best": lambda row: row["over_best"]}
OVER_EACH = {name: lambda row, name=name: row["over"].get(name) for name in (FA2_REPEATABLE, FA4_REPEATABLE)}


def _table(rows: list[Row], over: dict[str, Callable[[Row], float | None]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["tflops"] if name not in (STEP, DEFAULT_STEP)))
    whole = any(row["step_over"] for row in rows)
    titles = ["cell", "served", *names, *(f"over {name}" for name in over), *(["steps over torch's"] if whole else []), "remark"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        rates = [f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "-" for name in names]
        ratios = ["-" if ratio is None else f"{ratio:.2f}x" for ratio in (of(row) for of in over.values())]
        ratios += ["-" if row["step_over"] is None else f"{row['step_over']:.2f}x"] if whole else []
        lines.append(f"| {' | '.join([row['cell'], row['kind'], *rates, *ratios, row['wrong'] or row['failed']])} |")
    for name, of in over.items():
        found = [ratio for ratio in map(of, rows) if ratio]
        if found:
            which = "the best peer" if of is OVER_BEST["the best"] else name
            lines.append(f"\ngeometric mean over {which}: {math.exp(sum(map(math.log, found)) / len(found)):.2f}x")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = cell_options(__doc__, limit=180.0, jobs=4)
    parser.add_argument("--cells", type=lambda text: names_of(text, GROUPS, "cells"), default=",".join(GROUPS), help="groups (%(default)s)")
    parser.add_argument("--random", type=int, default=0, metavar="COUNT", help="random shapes without records instead, chosen as for users")
    parser.add_argument("--combined", action="store_true", help="several features at once instead, chosen as for users")
    kinds = parser.add_mutually_exclusive_group()
    for kind, what in (("sequences", "one sequence or two, as models are fine-tuned"), ("captions", "16 to 128 keys, as captions have")):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, default="training", help=f"random shapes of {what}")
    return parser.parse_args()


def chosen_cells(options: argparse.Namespace, gpu: str) -> list[Cell]:
    """Cells that the options name."""
    if options.random:
        found = random_cells(options.random, seed=options.seed, gpu=gpu, kind=options.kind)
    else:
        found = combined_cells() if options.combined else cells(options.cells)
    return [
        cell
        for cell in found
        if (options.d is None or cell.problem.d in options.d)
        and (options.n is None or cell.problem.n_kv in options.n)
        and re.search(options.only, cell.name)
    ]


def main() -> None:
    """Run, print and write."""
    options = arguments()
    chosen = chosen_cells(options, this_gpu().slug)
    provenance, rows = made_by(options.seed), dict[Cell, Row]()
    found = check_then_time(
        chosen,
        lambda cell: (check_cell, (cell, options.seed)),
        lambda cell: (time_cell, (cell, options.seed, options.seconds)),
        start=start_as_user if options.random or options.combined else start,
        count=options.jobs,
        limit_s=options.limit,
        budget_s=options.budget_s,
    )
    for cell, checked, times, failed in found:
        rows[cell] = row_of(cell, checked or Checked(), times or {}, failed)
        kept = {"provenance": provenance, "rows": list(rows.values())}
        (output_folder() / "backward.json").write_text(json.dumps(kept, indent=1))
        print(f"{cell.name}: {rows[cell]['failed'] or rows[cell]['wrong'] or 'right'}", file=sys.stderr, flush=True)
    print(table(list(rows.values())))
    if any(row["failed"] or row["wrong"] for row in rows.values()):
        raise SystemExit(1)
