"""Random shapes without records: dispatch's choice beside a short search of their own and the best peer.

Draws calls of many kinds (benchmarks/shared/random_shapes.py) that have no shipped record, compares what dispatch chooses with a float64
oracle, and searches each on this GPU, half of its candidates drawn evenly. All take part in each phase (see `Run`): what lacks time is
tried of fewer candidates. At the end one process alone times, interleaved: ours as it is chosen, the fastest kernel that the search found,
torch's default and its best backends, and FlashAttention-4 where it is installed.

Prints a table in microseconds and writes unprepared.json after each cell. `/own search` is the search's time over ours: at 0.97 dispatch's
choice takes 3 % longer. `run.py replay_random` says what today's dispatch makes of the same shapes.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared.cells import Cell
from benchmarks.shared.children import NO_TIME, Answer, Children, Job, until
from benchmarks.shared.environment import argument_parser, made_by, output_folder, this_gpu
from benchmarks.shared.peers import OURS, OWN, Checked, check_cell, data_of, leave_if_sticky, peers_of, start, stopwatch
from benchmarks.shared.random_shapes import guess_us, random_problems
from benchmarks.shared.report import Row, tables
from benchmarks.shared.searches import check_first, propose, shipped, text_of
from flashtune.core.gpu.target import Target
from flashtune.core.records.results import Measurement
from flashtune.tuner.children import tasks
from flashtune.tuner.machine import cores
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Failed
from flashtune.tuner.timing.stopwatch import Run as Launch
from flashtune.tuner.verify.inputs import Inputs

DEVICE = "cuda:0"
SHARES = {"checking": 0.5, "looking": 0.78, "timing": 1.0}
"""Shares of the time at which the phases end."""

AT_ONCE = 3
"""Candidates of a shape that one job checks; the first ones of every shape come before any shape's later ones."""

MORE = 3
"""A search's second batch, proposed from the times of its first candidates, is so many times smaller."""

LOOKS = 3
"""Rounds in which all candidates of a shape are timed."""

FINALISTS = 3
"""Number of a search's fastest candidates that race at its end."""

FINAL_S = 0.1
"""Seconds of that race."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Figures of a shape: all times of the last race, the search's candidates with their microseconds, and its best."""

    times: dict[str, Measurement] = field(default_factory=dict)
    times_us: dict[Candidate, float] = field(default_factory=dict)
    own: Candidate | None = None


def verdict(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Ratios to the own search and to the best peer: median, least, and the cells that reach 0.90, 0.97 and 1."""
    found = {}
    for name, way in (("own search", lambda row: row.ratio(OWN)), ("best peer", lambda row: row.best_ratio)):
        every: list[float] = [ratio for row in rows if row.times and (ratio := way(row)) is not None]
        if every:
            reached = {f"from {least:.2f}": sum(ratio >= least for ratio in every) for least in (0.9, 0.97, 1.0)}
            found[name] = {"median": statistics.median(every), "least": min(every), **reached, "cells": len(every)}
    return found


def wake(device: str) -> None:
    """In a child process: start CUDA and allocate the stopwatch's buffer."""
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
    times_us: Mapping[Candidate, float],
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
    known = sorted(times_us, key=lambda candidate: times_us[candidate])[:FINALISTS]
    runs = _runs([*known, *sound], data.inputs, math.inf)
    own: dict[str, Launch] = {}
    best = None
    if runs:
        looks = dict(zip(runs, watch.rounds(list(runs.values()), LOOKS), strict=True))
        times_us = {**times_us, **{candidate: Measurement.of(looks[candidate]).median_us for candidate in runs}}
        last = sorted(runs, key=lambda candidate: times_us[candidate])[:FINALISTS]
        raced = watch.race([runs[candidate] for candidate in last], budget_s=FINAL_S)
        times_us |= {candidate: found.median_us for candidate, found in zip(last, raced, strict=True)}
        best = min(last, key=lambda candidate: times_us[candidate])
        own = {OWN: runs[best]}
    every: dict[str, Launch] = {OURS: data.ours, **own, **peers_of(cell, data)[0]}
    try:
        timed = watch.race(list(every.values()), budget_s=seconds, least=11)
    except Exception as error:
        leave_if_sticky(error)
        raise
    return Shape(times=dict(zip(every, timed, strict=True)), times_us=dict(times_us), own=best)


def _runs(candidates: Sequence[Candidate], inputs: Inputs, deadline: float) -> dict[Candidate, Launch]:
    """The launches of those that run, each launched once; after the deadline (time.monotonic) no more are loaded than the first."""
    runs: dict[Candidate, Launch] = {}
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


class Run:
    """A run's rows and searches, and its three phases, each with its share of the time; every cell of the last is written at once.

    1. In parallel: check dispatch's choice and the peers, then the first candidates of each cell's search, the foremost of each first.
    2. One process looks at all candidates of one cell after another; meanwhile what its search would try next is compiled.
    3. One process checks these, races the best, and times everything.
    """

    def __init__(self, cells: Sequence[Cell], target: Target, folder: Path, options: argparse.Namespace) -> None:
        self.began = time.monotonic()
        self.cells, self.target, self.options, self.file = cells, target, options, folder / "unprepared.json"
        self.provenance = made_by(options.seed)
        self.rows = {cell: Row(cell=cell, failed=NO_TIME) for cell in cells}
        self.sound: list[Cell] = []
        self.shapes: dict[Cell, Shape] = {}
        self.times: dict[Cell, dict[Candidate, float]] = {}
        """Microseconds of the candidates of cells that were looked at."""

    def all(self) -> list[Row]:
        """Run the three phases."""
        with Children(start=start, limit_s=self.options.limit) as alone:
            # It takes seconds to start, in which the others have enough to do.
            alone.begin((wake, (DEVICE,)))
            with Children(start=start, count=self.options.jobs, limit_s=self.options.limit) as many:
                candidates = self.check(many)
                proposed = self.look(many, alone, candidates)
            self.time(alone, proposed)
        return list(self.rows.values())

    def check(self, many: Children) -> dict[Cell, list[Candidate]]:
        """Phase 1; returns the candidates that are right."""
        seed, trials, cells = self.options.seed, self.options.trials, self.cells
        firsts = [(cell, begin) for begin in range(0, trials, AT_ONCE) for cell in cells]
        work: list[Job] = [(check_cell, (cell, DEVICE, seed)) for cell in cells]
        work += [(check_first, (cell.problem, self.target, seed, begin, min(begin + AT_ONCE, trials))) for cell, begin in firsts]
        answers = many.by(self._deadline("checking"), work, late=NO_TIME)
        for cell, (checked, failed) in zip(cells, answers, strict=False):
            self.rows[cell] = Row(cell=cell, checked=checked or Checked(), failed=failed)
        candidates: dict[Cell, list[Candidate]] = {cell: [] for cell in cells}
        for (cell, _), (found, _) in zip(firsts, answers[len(cells) :], strict=True):
            candidates[cell] += found or []
        self.sound = [cell for cell in cells if not self.rows[cell].remark]
        self.rows |= {cell: Row(cell=cell, checked=self.rows[cell].checked, failed=NO_TIME) for cell in self.sound}
        self._keep()
        self._say(f"{len(self.sound)} of {len(cells)} checked, with {sum(map(len, candidates.values()))} candidates,")
        self._say_lost(answers[len(cells) :])
        return candidates

    def look(self, many: Children, alone: Children, candidates: Mapping[Cell, Sequence[Candidate]]) -> dict[Cell, list[Candidate]]:
        """Phase 2; returns the candidates that searches would try next."""
        seed, sound, deadline = self.options.seed, self.sound, self._deadline("looking")

        def proposing() -> Iterator[Job]:
            """Look at one cell after another, with a job each for the candidates that follow."""
            share_s = self._share_s("looking")
            with closing(alone.each([(look, (c, DEVICE, seed, candidates[c], share_s)) for c in sound])) as looks:
                for cell, (found, _) in until(deadline, zip(sound, looks, strict=True)):
                    self.times[cell] = found or {}
                    yield propose, (cell.problem, self.target, seed, self.times[cell], math.ceil(self.options.trials / MORE))

        more = many.by(deadline, proposing(), late=NO_TIME)
        self._say_lost(more)
        proposed = {cell: found or [] for cell, (found, _) in zip(self.times, more, strict=True)}
        self._say(f"{len(self.times)} looked at, with {sum(map(len, proposed.values()))} candidates more,")
        return proposed

    def time(self, alone: Children, proposed: Mapping[Cell, Sequence[Candidate]]) -> None:
        """Phase 3."""
        seed, seconds, sound, share_s = self.options.seed, self.options.seconds, self.sound, self._share_s("timing")
        last: list[Job] = [
            (time_shape, (c, DEVICE, seed, seconds, self.target, self.times.get(c, {}), proposed.get(c, []), share_s)) for c in sound
        ]
        for cell, (shape, failed) in until(self._deadline("timing"), zip(sound, alone.each(last), strict=True)):
            self.shapes[cell] = shape or Shape()
            self.rows[cell] = Row(cell=cell, checked=self.rows[cell].checked, times=self.shapes[cell].times, failed=failed)
            self._keep()
        self._say(f"{len(self.shapes)} timed")

    def _deadline(self, phase: str) -> float:
        return self.began + SHARES[phase] * self.options.budget_s

    def _share_s(self, phase: str) -> float:
        """Each sound cell's part of the time until a phase ends."""
        return max(0.0, self._deadline(phase) - time.monotonic()) / max(1, len(self.sound))

    def _say(self, done: str) -> None:
        print(f"{done} after {time.monotonic() - self.began:.0f} s", file=sys.stderr, flush=True)

    def _say_lost(self, answers: Sequence[Answer]) -> None:
        for why in sorted({why for _, why in answers if why and why != NO_TIME}):
            self._say(f"candidates were lost: {why},")

    def _keep(self) -> None:
        found = {
            "provenance": self.provenance,
            "verdict": verdict(list(self.rows.values())),
            "searches": {cell.problem.label(): search_json(cell, shape) for cell, shape in self.shapes.items()},
            "rows": [{**row.as_json(), "over_own": row.ratio(OWN) if row.times else None} for row in self.rows.values()],
        }
        self.file.write_text(json.dumps(found, indent=1, allow_nan=False))


def search_json(cell: Cell, shape: Shape) -> dict[str, Any]:
    """A shape's search as JSON; `tried` are all candidates with the last time of each, from looks or the race of finalists."""
    best, default = shape.own, shape.times.get("default")
    return {
        "trials": len(shape.times_us),
        "variant": None if best is None else best.variant(cell.problem.spec()).id,
        "template": None if best is None else best.family.name,
        "config": None if best is None else best.config.as_dict(),
        "us": None if best is None else shape.times[OWN].median_us,
        "framework_us": None if default is None else default.median_us,
        "tried": [
            {"template": one.family.name, "config": one.config.as_dict(), "us": us}
            for one, us in sorted(shape.times_us.items(), key=lambda item: item[1])
        ],
    }


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--count", type=int, default=40, help="shapes (default: %(default)s)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--steps", dest="kind", action="store_const", const="steps", default="any", help="decoding steps alone")
    kinds.add_argument("--few", dest="kind", action="store_const", const="few", help="few queries over a cache alone")
    kinds.add_argument("--short", dest="kind", action="store_const", const="short", help="many short sequences alone")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes, their inputs and the searches (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=60, help="candidates of each shape, half drawn evenly (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.25, help="timing per cell (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a cell is killed (default: %(default)s)")
    parser.add_argument(
        "--budget-s", type=float, default=math.inf, help="seconds for everything; what lacks time is tried of less or left out"
    )
    parser.add_argument("--jobs", type=int, default=max(1, cores() - 1), help="checks, or compilers, at once (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the shapes of an H200 and end")
    return parser.parse_args()


def main() -> None:
    """Draw, run, print."""
    options = arguments()
    shapes = partial(random_problems, options.count, seed=options.seed, known=[record.key for record in shipped()], kind=options.kind)
    if options.list:
        for cell in shapes(gpu="h200"):
            print(f"{cell.name}: about {guess_us(cell.problem):.0f} us")
        return
    target = this_gpu()
    # Children fit surrogates side by side, each of which would take all cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    rows = Run(shapes(gpu=target.slug), target, output_folder(), options).all()
    print(tables(rows))
    for name, found in verdict(rows).items():
        print(f"ours / {name}: " + ", ".join(f"{word} {value:.2f}" for word, value in found.items()))
    if any(row.wrong for row in rows):
        raise SystemExit(1)
