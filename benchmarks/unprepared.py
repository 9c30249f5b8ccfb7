"""Shapes without a row of their own, drawn at random: what serves them, beside a short search of their own and the best peer.

    python benchmarks/unprepared.py --seed 7 --budget-s 200

Draws calls of many kinds (see `drawn`) that have no row among the shipped ones, checks what dispatch serves against a float64 oracle, and
searches each on this machine's GPU with a few trials, winners of near rows first. Then one process alone times, interleaved: ours as it is
served, the kernel that the search found, torch's default and its best backends, and FlashAttention-4 where it is installed.

Prints a table in microseconds and writes unprepared.json, after each cell, and unprepared.sqlite, the searches, to the folder named by OUT
(default: the current one). `/own search` is the search's time over ours: at 0.97 the stand-in takes 3 % longer.
"""

import argparse
import json
import math
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from children import in_children
from forward import until
from forward_cells import DEFAULT_AND_FA4, Cell
from forward_peers import OWN, Checked, check_cell, start, time_cell
from forward_report import NO_TIME, Row, fa4_ratios, tables
from searches import compile_first, searched, shipped, source_of

from flashtune.core.dtypes import ITEMSIZE
from flashtune.core.errors import InputError
from flashtune.core.problem import Features, Problem, ProblemKey
from flashtune.core.results import SearchResult
from flashtune.core.target import Target
from flashtune.db.store import Store
from flashtune.tuner.machine import local_gpu, provenance

DEVICE = "cuda:0"
HEAD_SIZES = ((40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (160, 160), (192, 192), (192, 128), (256, 256))
HEADS = (4, 8, 12, 16, 20, 24, 32, 40, 64)
SHARING = (1, 1, 1, 2, 4, 5, 8)
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"causal": True},
    {"causal": True},
    {"causal": True},
    {"causal": True, "window": (1024, 0)},
    {"causal": True, "window": (300, 0)},
    {"mask": "bool"},
    {"mask": "bias"},
    {"causal": True, "dropout": True},
    {"causal": True, "softcap": True},
    {"causal": True, "alibi": True},
    {"causal": True, "sinks": True},
)
"""As likely as they stand here often; all else is even, N to its logarithm."""
KEYS = (128, 16384)
DECODING, CROSS, FP16 = 0.1, 0.15, 0.2
"""How many are steps of one row over a cache, have other numbers of rows than of keys, or are fp16."""

TFLOPS, TB_S = 450.0, 3.0
"""Rates that times are guessed by before anything runs."""
FROM_US, TO_US = 20.0, 2000.0
MOST_BYTES = 1 << 30
"""Of a mask, and of all else."""

RACE_S = 0.2
"""Seconds of a search's races: a third of the usual."""

SHARES = {"checking": 0.35, "searching": 0.7}
"""Where in the time the checks and the searches end."""


def drawn(count: int, *, seed: int, gpu: str, known: Collection[ProblemKey]) -> list[Cell]:
    """`count` calls of usual sizes whose keys are not `known`, which take 20 us to 2 ms by a guess."""
    dice, cells = random.Random(seed), dict[ProblemKey, Cell]()
    while len(cells) < count:
        problem = _draw(dice)
        if problem is None or not FROM_US <= guess_us(problem) <= TO_US or max(_bytes(problem)) > MOST_BYTES:
            continue
        key = problem.key(gpu)
        if key not in known and key not in cells:
            case = f"{problem.label()} H={problem.heads}"
            cells[key] = Cell(group="unprepared", case=case, problem=problem, peers=DEFAULT_AND_FA4)
    return list(cells.values())


def _draw(dice: random.Random) -> Problem | None:
    """Any call; None for one that makes no sense."""
    d, d_v = dice.choice(HEAD_SIZES)
    heads, sharing, features = dice.choice(HEADS), dice.choice(SHARING), dict(dice.choice(FEATURES))
    low, high = map(math.log2, KEYS)
    n = int(2 ** dice.uniform(low, high))
    if dice.random() < 0.5:
        n = -(-n // 64) * 64
    n_q, kind = n, dice.random()
    if kind < DECODING:
        n_q, features = 1, {}
    elif kind < DECODING + CROSS:
        n_q = int(2 ** dice.uniform(low, math.log2(n + 1)))
        if features.get("causal"):
            features["alignment"] = "bottom_right"
    batch = int(2 ** dice.uniform(0, 7))
    dtype = "fp16" if dice.random() < FP16 else "bf16"
    if heads % sharing:
        return None
    try:
        return Problem(
            batch=batch, heads=heads, kv_heads=heads // sharing, n_q=n_q, n_kv=n, d=d, d_v=d_v, dtype=dtype, features=Features(**features)
        )  # fmt: skip
    except InputError:
        return None


def guess_us(problem: Problem) -> float:
    """About how long a call takes."""
    return max(problem.flops() / TFLOPS, sum(_bytes(problem)) / TB_S) / 1e6


def _bytes(p: Problem) -> tuple[int, int]:
    """Of the mask, and of all else."""
    mask = {"none": 0, "bool": p.n_q * p.n_kv, "bias": 2 * p.heads * p.n_q * p.n_kv}[p.features.mask]
    heads = p.heads * p.n_q * (p.d + p.d_v) + p.kv_heads * p.n_kv * (p.d + p.d_v)
    return mask, ITEMSIZE[p.dtype] * p.batch * heads


def verdict(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By what ours is held against: median, least, and how many cells of how many reach 0.90, 0.97 and 1."""
    found = {}
    for name, way in (("own search", lambda row: row.ratio(OWN)), ("best peer", lambda row: row.best_ratio)):
        every: list[float] = [ratio for row in rows if row.times and (ratio := way(row)) is not None]
        if every:
            reached = {f"from {least:.2f}": sum(ratio >= least for ratio in every) for least in (0.9, 0.97, 1.0)}
            found[name] = {"median": statistics.median(every), "least": min(every), **reached, "cells": len(every)}
    return found


def run(
    cells: Sequence[Cell],
    target: Target,
    folder: Path,
    *,
    command: str,
    seed: int,
    trials: int,
    jobs: int,
    seconds: float,
    limit_s: float,
    budget_s: float,
) -> list[Row]:
    """Check and compile in parallel, search one after another, then time one after another; what is known is written after each."""
    began = time.monotonic()
    made_by = provenance(command=command, seed=seed, measured=True)
    rows = {cell: Row(cell=cell, failed=NO_TIME) for cell in cells}
    own: dict[Problem, SearchResult] = {}

    def keep() -> None:
        found = {
            "provenance": made_by.as_json(),
            "verdict": verdict(list(rows.values())),
            "searches": {result.problem.label(): _said(result) for result in own.values()},
            "rows": [{**row.as_json({}), "over_own": row.ratio(OWN) if row.times else None} for row in rows.values()],
        }
        (folder / "unprepared.json").write_text(json.dumps(found, indent=1, allow_nan=False))

    # What a search begins with is compiled beside the checks: then the GPU doesn't wait for compilers.
    first = [(compile_first, (cell.problem, target, trials, seed)) for cell in cells]
    jobs_first = [*((check_cell, (cell, DEVICE, seed)) for cell in cells), *first]
    answers = in_children(jobs_first, start=start, count=jobs, limit_s=limit_s)
    for place, (checked, failed) in enumerate(until(began + SHARES["checking"] * budget_s, answers)):
        if place < len(cells):
            rows[cells[place]] = Row(cell=cells[place], checked=checked or Checked(), failed=failed)
    answers.close()
    sound = [cell for cell in cells if not rows[cell].remark]
    rows |= {cell: Row(cell=cell, checked=rows[cell].checked, failed=NO_TIME) for cell in sound}
    keep()
    print(f"{len(sound)} of {len(cells)} checked after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    with Store.open(folder / "unprepared.sqlite", writable=True) as store:
        left = began + SHARES["searching"] * budget_s - time.monotonic()
        problems = [cell.problem for cell in sound]
        if problems:
            results = searched(
                problems,
                target,
                made_by=made_by,
                known=shipped(),
                trials=trials,
                seed=seed,
                jobs=jobs,
                race_s=RACE_S,
                budget_s=max(1.0, left) if math.isfinite(left) else None,
                save=store.save,
            )
            own |= {result.problem: result for result in results}
    keep()
    print(f"{len(own)} searched after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    sources = {cell: source_of(own[cell.problem]) if cell.problem in own else None for cell in sound}
    times = in_children(
        [(time_cell, (cell, DEVICE, seed, seconds, source)) for cell, source in sources.items()], start=start, limit_s=limit_s
    )
    for cell, (found, failed) in until(began + budget_s, zip(sound, times, strict=True)):
        rows[cell] = Row(cell=cell, checked=rows[cell].checked, times=found or {}, failed=failed)
        keep()
    times.close()
    return list(rows.values())


def _said(result: SearchResult) -> dict[str, Any]:
    """What a search found."""
    best = result.best
    return {
        "trials": len(result.outcomes),
        "variant": None if best is None else best.variant_id,
        "us": None if best is None or best.measurement is None else best.measurement.median_us,
        "framework_us": None if result.baseline is None else result.baseline.measurement.median_us,
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="shapes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes, their inputs and the searches (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=8, help="candidates of each search (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.25, help="timing per cell (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a cell is given up (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for everything; what doesn't fit is left out")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="checks, or compilers, at once (default: %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="print the shapes and end; needs no GPU")
    return parser.parse_args()


def main() -> None:
    """Draw, run, print."""
    options = arguments()
    gpu = local_gpu()
    target: Target | None = gpu.target if gpu is not None else None
    known = [record.key for record in shipped()]
    if options.list:
        for cell in drawn(options.count, seed=options.seed, gpu=known[0].gpu if target is None else target.slug, known=known):
            print(f"{cell.name}: about {guess_us(cell.problem):.0f} us")
        return
    if target is None:
        raise SystemExit("unprepared.py times kernels and found no GPU that flashtune knows: run it on the GPU's machine, or add --list")
    folder = Path(os.environ.get("OUT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    rows = run(
        drawn(options.count, seed=options.seed, gpu=target.slug, known=known),
        target,
        folder,
        command=shlex.join(["python", *sys.argv]),
        seed=options.seed,
        trials=options.trials,
        jobs=options.jobs,
        seconds=options.seconds,
        limit_s=options.limit,
        budget_s=options.budget_s,
    )
    print(tables(rows, fa4_ratios()))
    for name, found in verdict(rows).items():
        print(f"ours / {name}: " + ", ".join(f"{word} {value:.2f}" for word, value in found.items()))
    if any(row.wrong for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
