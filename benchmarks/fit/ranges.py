"""Fit of the ranges that predicted times are shown with: measured over predicted times of each generic family on measured GPUs.

Of every problem's trials it takes the one that the cost model puts first, as a predicted record does. Prints the 10th, 50th and 90th
percentile over problems, and how many there are.
"""

import math
from collections.abc import Iterator

import numpy as np

from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import ARCHIVED, GAVE_WAY, todays
from flashtune.core.gpu.target import find_target
from flashtune.core.records.results import SearchResult
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates.cost import predict_us
from flashtune.templates.expected import RANGES


def results() -> Iterator[SearchResult]:
    """Every result that ships or is archived."""
    for path in (shipped_path(), ARCHIVED, GAVE_WAY):
        with Store.open(path, writable=False) as store:
            yield from store.results()


def ratio_of(result: SearchResult, template: str) -> float | None:
    """Measured over predicted time of a family's trial that the cost model puts first; None where it has none."""
    target, found = find_target(result.gpu), []
    for outcome in result.outcomes:
        measured = outcome.trial or outcome.measurement
        if outcome.template != template or outcome.source != "measured" or measured is None or outcome.facts is None:
            continue
        if (tried := todays(outcome.template, outcome.config)) is not None:
            us = predict_us(tried[1], outcome.facts, result.problem, target)
            found.append((us, measured.median_us / us))
    return min(found)[1] if found and min(found)[0] < math.inf else None


def ratios() -> dict[str, list[float]]:
    """Ratios of all problems by family of RANGES."""
    every = list(results())
    return {name: [ratio for one in every if (ratio := ratio_of(one, name)) is not None] for name in RANGES}


def main() -> None:
    """Print a line to each family."""
    argument_parser(__doc__).parse_args()
    for name, found in ratios().items():
        print(name, *np.quantile(found, (0.1, 0.5, 0.9)).round(2), f"of {len(found)} problems")
