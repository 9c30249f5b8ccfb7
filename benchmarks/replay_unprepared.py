"""What today's policy makes of the shapes of a run of unprepared.py, without a GPU: `python benchmarks/replay_unprepared.py FILE ...`.

A run keeps every candidate of each shape's search with its time. Where what would be served now is one of them, or what was served
then, or torch, its time is known; the share is the search's best over it. Shapes that have a row by now are left out, and what a run's
own trials told of the cost model's errors (fit_residual.py) is forgotten.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from drawn import shapes_of, tried_as
from fit_residual import all_trials, without_run

from flashtune import dispatch
from flashtune.core.problem import Problem
from flashtune.templates import expected
from flashtune.templates.expected import LIKENESSES

GPU = "h200"


def shares(path: Path) -> Iterator[tuple[Problem, float, float | None]]:
    """Each timed shape, what it was served at of its own search, and what it would be now; None where no time is known of that."""
    for problem, row, search in shapes_of(path):
        times = {name: found["median_us"] for name, found in row["times"].items()}
        if not search or "own search" not in times:
            continue
        now = dispatch.explain_problem(problem.seen(), GPU)
        if now.kind == "exact":
            continue
        known = {tried_as(one): one["us"] for one in search.get("tried", [search]) if one["config"]}
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="an unprepared.json")
    files = parser.parse_args().files
    trials = {likeness: all_trials(likeness) for likeness in LIKENESSES}
    for path in files:
        dispatch.reload(alone=True)
        own = sum(name == path.stem for _, runs in trials.values() for name, _ in runs)
        print(f"{path.name}: trials of {own} of its problems are forgotten")
        known = {likeness: without_run(likeness, rows, runs, path.stem) for likeness, (rows, runs) in trials.items()}
        with patch.object(expected, "learned", known.__getitem__):
            found = list(shares(path))
        for problem, then, now in found:
            print(f"{problem.label():56s} {then:5.2f} then, {'no time is known' if now is None else f'{now:.2f}'} now")
        told = [(then, now) for _, then, now in found if now is not None]
        for word, of in (("then", [then for then, _ in told]), ("now", [now for _, now in told])):
            reached = ", ".join(f"{sum(share >= least for share in of)} from {least:.2f}" for least in (0.97, 0.9))
            print(f"{path.name}, {word}: median {statistics.median(of):.3f}, least {min(of):.2f}, {reached}, of {len(of)} that can be told")


if __name__ == "__main__":
    main()
