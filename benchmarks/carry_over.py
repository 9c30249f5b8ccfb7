"""What winners of near rows are worth to a search, without a GPU: `python benchmarks/carry_over.py`.

For each problem of a database in turn, its own row is left out, and the winners of the nearest other rows are looked up among the trials of
the problem, as a search would try them first. What was never tried there has no time and is passed over. Regret is the best time so far
over the best of all trials, less one. Starts are what a search without other rows begins with.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterable

from archived import folder

from flashtune.core.config import Config
from flashtune.core.nearness import SIXTEEN_BITS, distance
from flashtune.core.problem import ProblemKey
from flashtune.core.results import SearchResult
from flashtune.core.target import find_target
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.tuner.propose.space import SearchSpace

TRIALS = folder() / "2026-11-21-h200-forward" / "tuned.sqlite"

Tried = tuple[str, Config]
"""A family's name and a config."""


def times_of(result: SearchResult) -> dict[Tried, float]:
    """Every candidate that has a time in the scale of the trials, in microseconds; finalists by their race where that is all there is."""
    known = families()
    found: dict[Tried, float] = {}
    for outcome in result.outcomes:
        measured = outcome.trial or outcome.measurement
        if outcome.template in known and measured is not None and outcome.fate.timed:
            found[outcome.template, known[outcome.template].completed(outcome.config)] = measured.median_us
    return found


def carried(result: SearchResult, others: Iterable[SearchResult], most: int = 12) -> list[Tried]:
    """The first `most` winners of other rows, the nearest row first, moved to where this problem's constraints hold; each once."""
    key, spec, target = result.problem.key(result.gpu), result.problem.spec(), find_target(result.gpu)
    known = families()
    found: dict[Tried, None] = {}
    for other in sorted(others, key=lambda other: distance(key, other.problem.key(other.gpu))):
        best = other.best
        if best is None or best.template not in known or distance(key, other.problem.key(other.gpu)) == math.inf:
            continue
        family = known[best.template]
        config = None if family.supports(spec, target) else family.refitted(family.completed(best.config), spec, target)
        if config is not None:
            found[best.template, config] = None
        if len(found) == most:
            break
    return list(found)


def starts(result: SearchResult) -> list[Tried]:
    """What a search begins with that has no other rows."""
    space = SearchSpace(families(), result.problem, find_target(result.gpu))
    return [(candidate.family.name, candidate.config) for candidate in space.starts()]


def regret(times: dict[Tried, float], order: list[Tried], trials: int) -> float | None:
    """The best of the first `trials` of `order` that have a time, over the best of all, less one; None where none has."""
    found = [times[one] for one in order if one in times][:trials]
    return min(found) / min(times.values()) - 1 if found else None


def is_twin(a: ProblemKey, b: ProblemKey) -> bool:
    """Whether the keys differ in nothing but the 16-bit type."""
    return {a.dtype, b.dtype} == SIXTEEN_BITS and distance(a, b) <= 1.0


def main() -> None:
    """Median and 90th percentile of the regret after one and after four trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default=str(TRIALS), help="the database whose trials are replayed (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with Store.open(options.db, writable=False) as store:
        results = [result for result in store.results() if result.best is not None]
    keys = {id(result): result.problem.key(result.gpu) for result in results}
    regrets: dict[str, dict[int, list[float]]] = {}
    unknown: dict[str, list[bool]] = {}
    for result in results:
        times = times_of(result)
        others = [other for other in results if keys[id(other)] != keys[id(result)]]
        distant = [other for other in others if not is_twin(keys[id(other)], keys[id(result)])]
        for name, order in (
            ("nearest rows", carried(result, others)),
            ("nearest rows, without the other 16-bit type's", carried(result, distant)),
            ("starts", starts(result)),
        ):
            unknown.setdefault(name, []).extend(one not in times for one in order[:4])
            for trials in (1, 4):
                found = regret(times, order, trials)
                if found is not None:
                    regrets.setdefault(name, {}).setdefault(trials, []).append(found)
    rows = [
        {
            "first": name,
            "trials": trials,
            "problems": len(values),
            "median_percent": round(100 * statistics.median(values), 2),
            "p90_percent": round(100 * statistics.quantiles(values, n=10, method="inclusive")[8], 2),
            "never_tried_percent": round(100 * statistics.mean(unknown[name]), 1),
        }
        for name, by_trials in regrets.items()
        for trials, values in by_trials.items()
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
