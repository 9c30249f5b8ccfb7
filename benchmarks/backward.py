"""Times our backward beside cuDNN, FlashAttention-2 and FlashAttention-4 on this machine's GPU: `python benchmarks/backward.py`.

A backward is all of it: what prepares, the kernels and what follows. All peers of a cell run interleaved, on the same inputs, and against
a float64 oracle. Ours is what dispatch serves with FLASHTUNE_UNMEASURED=1: `exact` names a kernel that was tuned for the very cell. Then:
whether gradients under a mask are finite, the peak memory of a long call, the losses of a small model trained by our kernels and by the
framework's math backend, and whole training steps of a larger one. Every part runs in a process that is killed when it takes too long.

Prints tables, writes backward.json to the folder named by OUT (default: the current one), and exits with 1 where a part failed, a gradient
isn't finite, or an error is more than twice the framework's (beyond its tolerance, where the framework has no such gradient).
"""

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import backward_training
from backward_cells import (
    DEFAULT_STEP,
    DETERMINISTIC,
    FA2_REPEATABLE,
    FA4_REPEATABLE,
    OURS,
    STEP,
    Cell,
    Checked,
    cells,
    check_cell,
    combined_cells,
    drawn_cells,
    here,
    start,
    start_drawn,
    time_cell,
)
from children import in_children
from forward import until
from forward_report import NO_TIME
from random_shapes import Kind

from flashtune.core.results import Measurement
from flashtune.core.tolerances import tolerance
from flashtune.tuner.machine import local_gpu, provenance

GROUPS = ("plain", "deterministic", "features", "scores")
PARTS: dict[str, Callable[..., Any]] = {
    "nan": backward_training.masked_nan,
    "memory": backward_training.memory,
    "curves": backward_training.curves,
    "step d64": backward_training.step_times,
    "step d128": backward_training.step_times,
}


def wrong(checked: Checked, bound: float) -> str:
    """What is wrong with our gradients, empty where nothing is: not finite, more than twice as far off as torch's best, or of those that no
    backend of torch's gives, as with dropout, beyond this bound on the norm."""
    ours = [checked.errors[name] for name in (OURS, STEP) if name in checked.errors]
    if not all(math.isfinite(mine) for errors in ours for mine in errors):
        return "not finite"
    theirs = [
        errors
        for name, errors in checked.errors.items()
        if name in ("cudnn", "flash", "efficient", FA2_REPEATABLE) and all(map(math.isfinite, errors))
    ]
    # What peers lack stands last.
    limits = [2 * max(best) for best in zip(*theirs, strict=True)]
    if any(mine > limit for errors in ours for mine, limit in zip(errors, limits, strict=False)):
        return "more than twice the framework's error"
    return "beyond its tolerance" if any(mine > bound for errors in ours for mine in errors[len(limits) :]) else ""


def row_of(cell: Cell, checked: Checked, times: dict[str, Measurement], failed: str) -> dict[str, Any]:
    """A cell's JSON."""
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


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each cell: rates in TFLOP/s, and ours over the best peer's; of deterministic cells, in a table of their own, over each."""
    groups = [[row for row in rows if row["cell"].startswith(DETERMINISTIC) == deterministic] for deterministic in (False, True)]
    found = "\n\n".join(_table(group, OVER_EACH if group is groups[1] else OVER_BEST) for group in groups if group)
    steps = sorted(row["step_over"] for row in rows if row["step_over"])
    if steps:
        found += f"\n\nwhole training steps over torch's default: median {statistics.median(steps):.2f}, least {steps[0]:.2f}"
    return found


OVER_BEST: dict[str, Callable[[dict[str, Any]], float | None]] = {"the best": lambda row: row["over_best"]}
OVER_EACH = {name: lambda row, name=name: row["over"].get(name) for name in (FA2_REPEATABLE, FA4_REPEATABLE)}


def _table(rows: list[dict[str, Any]], over: dict[str, Callable[[dict[str, Any]], float | None]]) -> str:
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


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(GROUPS), help="groups of cells, with commas between them (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="the other parts, or nothing (default: %(default)s)")
    parser.add_argument(
        "--drawn", type=int, default=0, help="in place of these cells so many that are drawn at random (--seed), served as users are"
    )
    parser.add_argument(
        "--combined", action="store_true", help="in their place calls with several features that no row has, served so, too"
    )
    parser.add_argument(
        "--sequences", action="store_true", help="those that are drawn are of one sequence or two, as models are fine-tuned"
    )
    parser.add_argument("--captions", action="store_true", help="those that are drawn have 16 to 128 keys, as captions and sentences do")
    parser.add_argument("--d", type=int, help="only cells of this head size")
    parser.add_argument("--n", type=int, help="only cells of this length")
    parser.add_argument("--only", default="", help="only cells whose name this regular expression finds")
    parser.add_argument("--seconds", type=float, default=0.5, help="timing per cell (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which a cell or part is given up (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=4, help="cells that are checked at the same time (default: %(default)s)")
    parser.add_argument(
        "--budget-s", type=float, default=math.inf, help="seconds for all cells; those that don't fit are named as left out"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None:
        raise SystemExit("backward.py times kernels on a GPU and found none: run it on the GPU's machine")
    kind: Kind = "captions" if options.captions else "sequences" if options.sequences else "training"
    listed = combined_cells() if options.combined else cells(tuple(options.cells.split(",")))
    listed = drawn_cells(options.drawn, seed=options.seed, gpu=here(), kind=kind) if options.drawn else listed
    prepare = start_drawn if options.drawn or options.combined else start
    chosen = [
        cell
        for cell in listed
        if options.d in (None, cell.problem.d) and options.n in (None, cell.problem.n_kv) and re.search(options.only, cell.name)
    ]
    began = time.monotonic()
    made_by = provenance(command=shlex.join(["python", *sys.argv]), seed=options.seed, measured=True).as_json()
    rows: list[dict[str, Any]] = []
    parts: dict[str, Any] = {}

    def keep() -> None:
        Path(os.environ.get("OUT", "."), "backward.json").write_text(
            json.dumps({"provenance": made_by, "rows": rows, "parts": parts}, indent=1)
        )

    # All before the first is timed: one process at a time has the GPU.
    checking = [(check_cell, (cell, options.seed)) for cell in chosen]
    checks = list(in_children(checking, start=prepare, count=options.jobs, limit_s=options.limit))
    print(f"{len(checks)} checked after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    sound = [(cell, checked) for cell, (checked, failed) in zip(chosen, checks, strict=True) if not failed]
    rows += [row_of(cell, Checked(), {}, failed) for cell, (_, failed) in zip(chosen, checks, strict=True) if failed]
    timing = in_children([(time_cell, (cell, options.seed, options.seconds)) for cell, _ in sound], start=prepare, limit_s=options.limit)
    for (cell, checked), (times, failed) in until(began + options.budget_s, zip(sound, timing, strict=True)):
        rows.append(row_of(cell, checked, times or {}, failed))
        keep()
        print(f"{cell.name}: {rows[-1]['failed'] or rows[-1]['wrong'] or 'right'}", file=sys.stderr, flush=True)
    timing.close()
    rows += [row_of(cell, checked, {}, NO_TIME) for cell, checked in sound if all(row["cell"] != cell.name for row in rows)]
    keep()
    words: dict[str, tuple[Any, ...]] = {"nan": (options.seed,), "memory": (), "curves": (options.seed,)}
    words |= {"step d64": (64, options.seed), "step d128": (128, options.seed)}
    asked = [name for name in options.parts.split(",") if name]
    for name, (answer, failed) in zip(
        asked, in_children([(PARTS[name], words[name]) for name in asked], start=start, limit_s=5 * options.limit), strict=True
    ):
        parts[name] = {"failed": failed} if failed else answer
        keep()
    print(table(rows))
    for name, answer in parts.items():
        shown = answer["mean of the last 20"] if name == "curves" and "curves" in answer else answer
        print(f"{name}: {json.dumps(shown)}")
    finite = all(one["ours"] == 0 for one in parts["nan"]) if isinstance(parts.get("nan"), list) else True
    failures = [row for row in rows if row["failed"] or row["wrong"]]
    if failures or not finite or any("failed" in part for part in parts.values() if isinstance(part, dict)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
