"""Replay of random shapes: dispatch's choices of today by the times that runs of the case `random_shapes` kept, without a GPU.

A run keeps every candidate of each shape's search with its time. Where today's choice is one of them, or the kernel that was chosen then,
or torch, its time is known; the share is the search's best over it. Shapes that have a record by now are left out, and the regression of
the cost model's error is without the run's own trials.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from benchmarks.fit.residual import all_trials, without_run
from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import shapes_of, tried_as
from flashtune import dispatch
from flashtune.core.problem import Problem
from flashtune.templates import expected
from flashtune.templates.expected import LIKENESSES

GPU = "h200"


def shares(path: Path) -> Iterator[tuple[Problem, float, float | None]]:
    """Each timed shape with its share of its own search then and now; None where the time of today's choice isn't known."""
    for problem, row, search in shapes_of(path):
        times = {name: found["median_us"] for name, found in row["times"].items()}
        if not search or "own search" not in times:
            continue
        now = dispatch.explain_problem(problem.seen(), GPU)
        if now.kind == "exact":
            continue
        known = {tried: one["us"] for one in search.get("tried", [search]) if one["config"] and (tried := tried_as(one)) is not None}
        then = times["own search"] / times["flashtune"]
        if now.kind == "framework":
            yield problem, then, times["own search"] / times["default"] if "default" in times else None
        elif now.variant_id == row["served"]["variant"]:
            yield problem, then, then
        else:
            us = known.get((now.template, now.config))
            yield problem, then, None if us is None else min(known.values()) / us


def main() -> None:
    """Print a line to each shape, then the median, the least, and how many reach 0.97 and 0.90."""
    parser = argument_parser(__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="an unprepared.json")
    files = parser.parse_args().files
    trials = {likeness: all_trials(likeness) for likeness in LIKENESSES}
    for path in files:
        dispatch.reload(alone=True)
        own = sum(name == path.stem for _, runs in trials.values() for name, _ in runs)
        print(f"{path.name}: trials of {own} of its problems are left out")
        known = {likeness: without_run(likeness, rows, runs, path.stem) for likeness, (rows, runs) in trials.items()}
        with patch.object(expected, "learned", known.__getitem__):
            found = list(shares(path))
        for problem, then, now in found:
            print(f"{problem.label():56s} {then:5.2f} then, {'time unknown' if now is None else f'{now:.2f}'} now")
        known_now = [(then, now) for _, then, now in found if now is not None]
        for word, of in (("then", [then for then, _ in known_now]), ("now", [now for _, now in known_now])):
            reached = ", ".join(f"{sum(share >= least for share in of)} from {least:.2f}" for least in (0.97, 0.9))
            print(f"{path.name}, {word}: median {statistics.median(of):.3f}, least {min(of):.2f}, {reached}, of {len(of)} of known time")
