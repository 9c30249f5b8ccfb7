"""Whether repeated searches pick alike on this machine's GPU: `python benchmarks/repeats.py --budget-s 150`.

Three problems are searched again and again, each time with another seed, as if for the first time: with the shipped rows of all other
problems, but none of their own, whose config would win ties. It is the pick that is repeated and not the compiler: what was compiled
once is not compiled again, and all searches share their processes. At the end all that was picked of a problem races, interleaved, in one
process.

Prints a line for each problem and writes repeats.json, after each round of searches, to the folder named by OUT (default: the current one).
`spread` is how much slower the slowest pick is than the fastest; `alike` how often the most frequent config was picked.
"""

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forward_cells import Cell, cells
from searches import searched, shipped, source_of

from flashtune.core.problem import Problem
from flashtune.core.results import Measurement, Outcome, SearchResult
from flashtune.core.target import Target
from flashtune.tuner.children import tasks
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.machine import cores, local_gpu, provenance
from flashtune.tuner.replies import Failed

RACING = 0.85
"""Where in the time the searches end."""


def chosen() -> list[Problem]:
    """A long causal problem, a small full one and a decoding step."""
    wanted = ("plain causal D=128 N=4096", "small full D=64 B=1 N=1024", "decode one row D=128 B=16 N=4096")
    known: dict[str, Cell] = {cell.name: cell for cell in cells()}
    return [known[name].problem for name in wanted]


def run(
    problems: Sequence[Problem],
    target: Target,
    folder: Path,
    *,
    command: str,
    times: int,
    trials: int,
    seed: int,
    jobs: int,
    seconds: float,
    budget_s: float,
) -> list[dict[str, Any]]:
    """Search, race and report; the rows of repeats.json."""
    began = time.monotonic()
    made_by = provenance(command=command, seed=seed, measured=True)
    own = {problem.key(target.slug) for problem in problems}
    known = [row for row in shipped() if row.key not in own]
    picks: dict[Problem, list[SearchResult]] = {problem: [] for problem in problems}
    spent: list[float] = []
    rows: list[dict[str, Any]] = []

    def keep() -> None:
        found = {"provenance": made_by.as_json(), "seconds": spent, "rows": rows}
        (folder / "repeats.json").write_text(json.dumps(found, indent=1, allow_nan=False))

    with Workers(jobs=jobs) as workers:
        for number in range(times):
            left = began + RACING * budget_s - time.monotonic()
            # A round that is cut short would pick differently for that.
            if spent and left < spent[-1]:
                break
            start = time.monotonic()
            how: dict[str, Any] = {"trials": trials, "seed": seed + number, "jobs": jobs, "workers": workers}
            results = searched(problems, target, made_by=made_by, known=known, **how)
            spent.append(round(time.monotonic() - start, 1))
            for result in results:
                picks[result.problem].append(result)
            rows = [row_of(problem, picks[problem], {}) for problem in problems]
            keep()
        sources = {problem: {r.best.variant_id: source_of(r) for r in picks[problem] if r.best} for problem in problems}
        for place, (problem, found) in enumerate(sources.items()):
            if not found:
                continue
            fixed = (list(found.values()), problem, target, seed, seconds)
            answer = workers.submit("device", tasks.race_finalists, *fixed, limit_s=60.0 + 20 * seconds).reply()
            medians, failed = {}, ""
            if isinstance(answer, Failed):
                failed = answer.reason
            else:
                medians = {name: Measurement.of(list(row)).median_us for name, row in zip(found, answer.times, strict=False)}
            rows[place] = row_of(problem, picks[problem], medians) | {"failed": failed}
            keep()
    return rows


def row_of(problem: Problem, results: Sequence[SearchResult], medians: Mapping[str, float]) -> dict[str, Any]:
    """What is known of a problem: its picks in the order of the searches, how many were alike, and how their times in one race differ."""
    names = [result.best.variant_id for result in results if result.best is not None]
    configs = {result.best.variant_id: result.best.config.label() for result in results if result.best is not None}
    most = Counter(names).most_common(1)
    return {
        "problem": problem.label(),
        "picks": names,
        "configs": configs,
        "trials": [len(result.outcomes) for result in results],
        "endings": [[result.ending.reason, result.ending.regret] if result.ending else None for result in results],
        # Of the first of each search: who it is, its time in the race, and a whole call's.
        "finalists": [
            [[o.variant_id, o.measurement.median_us if o.measurement else None, o.call_us] for o in first_of(result)] for result in results
        ],
        "searches": len(results),
        "alike": most[0][1] if most else 0,
        "raced_us": dict(medians),
        "spread": max(medians.values()) / min(medians.values()) - 1 if medians else None,
    }


def first_of(result: SearchResult, count: int = 6) -> list[Outcome]:
    """The first finalists of a search, by their ranks."""
    return sorted((outcome for outcome in result.outcomes if outcome.rank is not None), key=lambda outcome: outcome.rank or 0)[:count]


def said(row: Mapping[str, Any]) -> str:
    """A row for people."""
    spread = "not raced" if row["spread"] is None else f"picks differ by {row['spread']:.2%} in one race"
    return f"{row['problem']}: {row['alike']} of {row['searches']} searches alike, {len(row['configs'])} configs, {spread}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="searches of each problem (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=60, help="candidates of a search at most (default: %(default)s)")
    parser.add_argument("--problems", type=int, default=3, help="only so many of the three (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of the last race of each problem (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for everything; the rounds that fit are made")
    parser.add_argument("--jobs", type=int, default=max(1, cores() - 1), help="compilers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first search; the others count on from it")
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise SystemExit("repeats.py measures kernels and found no GPU that flashtune knows: run it on the GPU's machine")
    folder = Path(os.environ.get("OUT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    rows = run(
        chosen()[: options.problems],
        gpu.target,
        folder,
        command=shlex.join(["python", *sys.argv]),
        times=options.times,
        trials=options.trials,
        seed=options.seed,
        jobs=options.jobs,
        seconds=options.seconds,
        budget_s=options.budget_s,
    )
    for row in rows:
        print(said(row))


if __name__ == "__main__":
    main()
