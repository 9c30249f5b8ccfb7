"""Shapes without a row of their own, drawn at random: what serves them, beside a short search of their own and the best peer.

    python benchmarks/unprepared.py --seed 7 --budget-s 240

Draws calls of many kinds (see `drawn`) that have no row among the shipped ones, checks what dispatch serves against a float64 oracle, and
searches each on this machine's GPU, winners of near rows first. All take part in each phase (see `run`), so that no shape goes without
its figures for want of time: what lacks time is tried of fewer candidates. At the end one process alone times, interleaved: ours as it is
served, the fastest kernel that the search found, torch's default and its best backends, and FlashAttention-4 where it is installed.

Prints a table in microseconds and writes unprepared.json, after each cell, to the folder named by OUT (default: the current one).
`/own search` is the search's time over ours: at 0.97 the stand-in takes 3 % longer.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from children import Children, Job
from forward import until
from forward_cells import Cell
from forward_peers import OURS, OWN, Checked, check_cell, data_of, leave_if_sticky, peers_of, start, stopwatch
from forward_report import NO_TIME, Row, fa4_ratios, tables
from random_shapes import drawn, guess_us
from searches import check_first, propose, shipped, text_of

from flashtune.core.results import Measurement
from flashtune.core.target import Target
from flashtune.tuner.children import tasks
from flashtune.tuner.machine import cores, local_gpu, provenance
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Failed
from flashtune.tuner.timing.stopwatch import Run
from flashtune.tuner.verify.inputs import Inputs

DEVICE = "cuda:0"
SHARES = {"checking": 0.5, "looking": 0.78}
"""Where in the time the checks and the first looks end."""

AT_ONCE = 3
"""So many candidates of a shape are checked in one go: those of its rows come before others' later ones."""

MORE = 3
"""What a search tries next, once it knows times of its first candidates, is a third as many."""

LOOKS = 3
"""Rounds in which all candidates of a shape are timed."""

FINALISTS = 3
"""So many of them race for being what the search found."""

FINAL_S = 0.1
"""Seconds of that race."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the last process says of a shape: all times of its race, the search's candidates with theirs in microseconds, and which of
    them took part in the race."""

    times: dict[str, Measurement] = field(default_factory=dict)
    told: dict[Candidate, float] = field(default_factory=dict)
    own: Candidate | None = None


def verdict(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By what ours is held against: median, least, and how many cells of how many reach 0.90, 0.97 and 1."""
    found = {}
    for name, way in (("own search", lambda row: row.ratio(OWN)), ("best peer", lambda row: row.best_ratio)):
        every: list[float] = [ratio for row in rows if row.times and (ratio := way(row)) is not None]
        if every:
            reached = {f"from {least:.2f}": sum(ratio >= least for ratio in every) for least in (0.9, 0.97, 1.0)}
            found[name] = {"median": statistics.median(every), "least": min(every), **reached, "cells": len(every)}
    return found


def wake(device: str) -> None:
    """In a child process: what begins there once."""
    stopwatch(device)


def look(cell: Cell, device: str, seed: int, candidates: Sequence[Candidate], share_s: float) -> dict[Candidate, float]:
    """In a child process that times alone: microseconds of these candidates, the first of them at least, within `share_s` seconds or so."""
    began = time.monotonic()
    inputs = data_of(cell, device, seed).inputs
    runs = _runs(candidates, inputs, began + share_s / 2)
    times = stopwatch(device).rounds(list(runs.values()), LOOKS)
    return {candidate: Measurement.of(found).median_us for candidate, found in zip(runs, times, strict=True)}


def time_shape(
    cell: Cell,
    device: str,
    seed: int,
    seconds: float,
    target: Target,
    told: Mapping[Candidate, float],
    proposed: Sequence[Candidate],
    share_s: float,
) -> Shape:
    """In a child process that times alone: check and look at what was `proposed`, race for the search's best, and race that
    with all others.

    Whoever wins a race was lucky in it, so its time is from another one.
    """
    began = time.monotonic()
    data = data_of(cell, device, seed)
    watch = stopwatch(device)
    sound = []
    for candidate in proposed:
        if time.monotonic() > began + share_s / 3:
            break
        if not isinstance(tasks.recheck_on_device(text_of(candidate, cell.problem), cell.problem, target, seed), Failed):
            sound.append(candidate)
    known = sorted(told, key=lambda candidate: told[candidate])[:FINALISTS]
    runs = _runs([*known, *sound], data.inputs, math.inf)
    own: dict[str, Run] = {}
    best = None
    if runs:
        looks = dict(zip(runs, watch.rounds(list(runs.values()), LOOKS), strict=True))
        told = {**told, **{candidate: Measurement.of(looks[candidate]).median_us for candidate in runs}}
        last = sorted(runs, key=lambda candidate: told[candidate])[:FINALISTS]
        raced = watch.race([runs[candidate] for candidate in last], budget_s=FINAL_S)
        told |= {candidate: found.median_us for candidate, found in zip(last, raced, strict=True)}
        best = min(last, key=lambda candidate: told[candidate])
        own = {OWN: runs[best]}
    every: dict[str, Run] = {OURS: data.ours, **own, **peers_of(cell, data)[0]}
    try:
        timed = watch.race(list(every.values()), budget_s=seconds, least=11)
    except Exception as error:
        leave_if_sticky(error)
        raise
    return Shape(times=dict(zip(every, timed, strict=True)), told=dict(told), own=best)


def _runs(candidates: Sequence[Candidate], inputs: Inputs, deadline: float) -> dict[Candidate, Run]:
    """The launches of those that run, each launched once; after the deadline (time.monotonic) no more are loaded than the first."""
    runs: dict[Candidate, Run] = {}
    for candidate in candidates:
        if runs and time.monotonic() > deadline:
            break
        try:
            run = tasks.launch_of(text_of(candidate, inputs.problem), inputs)
            run()
        except Exception as error:
            leave_if_sticky(error)
            continue
        runs[candidate] = run
    return runs


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
    """All cells in three phases, of which each has its share of the time; what is known is written after each cell of the last.

    1. In parallel: check what is served and the peers, then the first candidates of each cell's search, the foremost of each first.
    2. One process looks at all candidates of one cell after another; meanwhile what its search would try next is compiled.
    3. One process checks these, races the best, and times everything.
    """
    began = time.monotonic()
    made_by = provenance(command=command, seed=seed, measured=True)
    rows = {cell: Row(cell=cell, failed=NO_TIME) for cell in cells}
    shapes: dict[Cell, Shape] = {}

    def keep() -> None:
        found = {
            "provenance": made_by.as_json(),
            "verdict": verdict(list(rows.values())),
            "searches": {cell.problem.label(): _said(cell, shape) for cell, shape in shapes.items()},
            "rows": [{**row.as_json({}), "over_own": row.ratio(OWN) if row.times else None} for row in rows.values()],
        }
        (folder / "unprepared.json").write_text(json.dumps(found, indent=1, allow_nan=False))

    def say(done: str) -> None:
        print(f"{done} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    def left_s(share: float, count: int) -> float:
        """What each of `count` has of the time until there."""
        return max(0.0, began + share * budget_s - time.monotonic()) / max(1, count)

    firsts = [(cell, begin) for begin in range(0, trials, AT_ONCE) for cell in cells]
    work: list[Job] = [(check_cell, (cell, DEVICE, seed)) for cell in cells]
    work += [(check_first, (cell.problem, target, seed, begin, min(begin + AT_ONCE, trials))) for cell, begin in firsts]
    looked: dict[Cell, dict[Candidate, float]] = {}
    with Children(start=start, limit_s=limit_s) as alone:
        # It takes seconds to start, in which the others have enough to do.
        alone.begin((wake, (DEVICE,)))
        with Children(start=start, count=jobs, limit_s=limit_s) as many:
            answers = many.by(began + SHARES["checking"] * budget_s, work, late=NO_TIME)
            for cell, (checked, failed) in zip(cells, answers, strict=False):
                rows[cell] = Row(cell=cell, checked=checked or Checked(), failed=failed)
            candidates: dict[Cell, list[Candidate]] = {cell: [] for cell in cells}
            for (cell, _), (found, _) in zip(firsts, answers[len(cells) :], strict=True):
                candidates[cell] += found or []
            sound = [cell for cell in cells if not rows[cell].remark]
            rows |= {cell: Row(cell=cell, checked=rows[cell].checked, failed=NO_TIME) for cell in sound}
            keep()
            say(f"{len(sound)} of {len(cells)} checked, with {sum(map(len, candidates.values()))} candidates,")

            deadline = began + SHARES["looking"] * budget_s

            def proposing() -> Iterator[Job]:
                """Look at the candidates of one cell after another, and ask for what its search would try next."""
                share_s = left_s(SHARES["looking"], len(sound))
                with closing(alone.each([(look, (c, DEVICE, seed, candidates[c], share_s)) for c in sound])) as looks:
                    for cell, (found, _) in until(deadline, zip(sound, looks, strict=True)):
                        looked[cell] = found or {}
                        yield propose, (cell.problem, target, seed, looked[cell], math.ceil(trials / MORE))

            more = many.by(deadline, proposing(), late=NO_TIME)
            for why in sorted({why for _, why in [*answers[len(cells) :], *more] if why and why != NO_TIME}):
                say(f"candidates were lost: {why},")
        proposed = {cell: found or [] for cell, (found, _) in zip(looked, more, strict=True)}
        say(f"{len(looked)} looked at, with {sum(map(len, proposed.values()))} candidates more,")

        share_s = left_s(1.0, len(sound))
        last = [(time_shape, (c, DEVICE, seed, seconds, target, looked.get(c, {}), proposed.get(c, []), share_s)) for c in sound]
        for cell, (shape, failed) in until(began + budget_s, zip(sound, alone.each(last), strict=True)):
            shapes[cell] = shape or Shape()
            rows[cell] = Row(cell=cell, checked=rows[cell].checked, times=shapes[cell].times, failed=failed)
            keep()
    say(f"{len(shapes)} timed")
    return list(rows.values())


def _said(cell: Cell, shape: Shape) -> dict[str, Any]:
    """What a search tried and found; `tried` are all its candidates with the last time of each, from looks or the race of finalists."""
    best, default = shape.own, shape.times.get("default")
    return {
        "trials": len(shape.told),
        "variant": None if best is None else best.variant(cell.problem.spec()).id,
        "template": None if best is None else best.family.name,
        "config": None if best is None else best.config.as_dict(),
        "us": None if best is None else shape.times[OWN].median_us,
        "framework_us": None if default is None else default.median_us,
        "tried": [
            {"template": one.family.name, "config": one.config.as_dict(), "us": us}
            for one, us in sorted(shape.told.items(), key=lambda item: item[1])
        ],
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="shapes (default: %(default)s)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--steps", dest="kind", action="store_const", const="steps", default="any", help="decoding steps alone")
    kinds.add_argument("--few", dest="kind", action="store_const", const="few", help="few queries over a cache alone")
    kinds.add_argument("--short", dest="kind", action="store_const", const="short", help="many short sequences alone")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes, their inputs and the searches (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=12, help="first candidates of each search (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.25, help="timing per cell (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a cell is given up (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for everything; what doesn't fit is left out")
    parser.add_argument("--jobs", type=int, default=max(1, cores() - 1), help="checks, or compilers, at once (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the shapes and end; without a GPU, those of an H200")
    return parser.parse_args()


def main() -> None:
    """Draw, run, print."""
    options = arguments()
    gpu = local_gpu()
    target: Target | None = gpu.target if gpu is not None else None
    known = [record.key for record in shipped()]
    shapes = partial(drawn, options.count, seed=options.seed, known=known, kind=options.kind)
    if options.list:
        for cell in shapes(gpu="h200" if target is None else target.slug):
            print(f"{cell.name}: about {guess_us(cell.problem):.0f} us")
        return
    if target is None:
        raise SystemExit("unprepared.py times kernels and found no GPU that flashtune knows: run it on the GPU's machine, or add --list")
    # Children fit surrogates side by side, each of which would take all cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    folder = Path(os.environ.get("OUT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    rows = run(
        shapes(gpu=target.slug),
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
