"""Replay of dispatch's choices of today by committed times, without a GPU: random shapes, and gradients with their records left out.

A run of the case `random_shapes` keeps every candidate of each shape's search with its time. Where today's choice is one of them, or the
kernel that was chosen then, or torch, its time is known; the share is the search's best over it. Shapes that have a record by now are left
out, and the regression of the cost model's error is without the run's own trials. Of gradients each record with enough trials is left out
in turn, of whichever GPU, and its key served by the rest.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.fit.residual import all_trials, without_run
from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import RUNS, RUNS_ON_H100, shapes_of, times_of, tried_as
from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import DECODE_ROWS, Problem
from flashtune.db.library import Library, shipped_path
from flashtune.db.store import Store
from flashtune.dispatch.policy.choose import choose
from flashtune.templates import expected, families
from flashtune.templates.expected import LIKENESSES

FEWEST = 5
"""Trials of a left-out record from which on their best counts as that of a search."""

Shares = dict[str, list[float | None]]
"""Shares by kind of problem; None where the time of today's choice isn't known."""


def shares(path: Path, gpu: str) -> Iterator[tuple[Problem, float, float | None]]:
    """Each timed shape with its share of its own search then and now; None where the time of today's choice isn't known."""
    for problem, row, search in shapes_of(path):
        times = {name: found["median_us"] for name, found in row["times"].items()}
        if not search or "own search" not in times:
            continue
        now = dispatch.explain_problem(problem.seen(), gpu)
        if now.kind == "exact":
            continue
        known = {tried: one["us"] for one in search.get("tried", [search]) if one["config"] and (tried := tried_as(one)) is not None}
        then = times["own search"] / times["flashtune"]
        if now.kind == "framework":
            yield problem, then, times["own search"] / times["default"] if "default" in times else None
        elif now.variant_id == row["served"]["variant"]:
            yield problem, then, then
        else:
            us = known.get((now.template, now.config)) if now.template is not None and now.config is not None else None
            yield problem, then, None if us is None else min(known.values()) / us


def of_gradients() -> Iterator[tuple[Problem, float | None]]:
    """Each backward record with FEWEST trials, and the share of its best trial that the rest's choice reaches."""
    records = [record for record in Library.of(shipped_path()).records() if record.key.direction == "bwd"]
    with Store.open(shipped_path(), writable=False) as store:
        results = [result for result in store.results(direction="bwd") if result.best is not None]
    for result in results:
        times, target = times_of(result), find_target(result.gpu)
        if len(times) < FEWEST:
            continue
        others = [record for record in records if record.problem.key("") != result.problem.key("")]
        found = choose(result.problem, target, others, families(), framework_serves=False)
        us = times.get((found.family.name, found.config)) if found.family is not None and found.config is not None else None
        yield result.problem, None if us is None else min(times.values()) / us


def said(found: Sequence[float | None]) -> str:
    """Shares in a line."""
    known = [share for share in found if share is not None]
    reached = ", ".join(f"{sum(share >= least for share in known)} from {least:.2f}" for least in (0.97, 0.9))
    mean, worst = float(np.mean(known)), float(np.quantile(known, 0.1))
    return (
        f"mean {mean:.4f}, 10th percentile {worst:.3f}, least {min(known):.2f}, {reached}, of {len(known)} of known time and {len(found)}"
    )


def main() -> None:
    """Print a line to each shape, then the mean, the 10th percentile, the least, and how many reach 0.97 and 0.90."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="files of random_shapes on an H200 (default: every committed run)"
    )
    files = parser.parse_args().files
    trials = {likeness: all_trials(likeness) for likeness in LIKENESSES}
    found: Shares = defaultdict(list)
    for gpu, paths in (("h200", files or RUNS), ("h100", [] if files else RUNS_ON_H100)):
        for path in paths:
            dispatch.reload(alone=True)
            known = {likeness: without_run(likeness, rows, runs, path.stem) for likeness, (rows, runs) in trials.items()}
            with patch.object(expected, "learned", known.__getitem__):
                for problem, then, now in shares(path, gpu):
                    print(f"{problem.label():56s} {then:5.2f} then, {'time unknown' if now is None else f'{now:.2f}'} now", flush=True)
                    found["steps" if problem.n_q <= DECODE_ROWS else "forwards"].append(now)
    if not files:
        found["gradients"] = [share for _, share in of_gradients()]
    for kind, of in found.items():
        print(f"{kind}: {said(of)}")
