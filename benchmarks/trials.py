"""Trials of rows of an H200 or another GPU, as stored."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from archived import folder

from flashtune.core.problem import Problem
from flashtune.core.results import SearchResult
from flashtune.core.target import Target, find_target
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.templates.learned.residual import Tried

GPU = find_target("h200")

ARCHIVED = folder() / "2026-11-21-h200-forward" / "tuned.sqlite"
"""Rows of longer searches, of older kernels."""

GAVE_WAY = folder() / "2026-11-25-h100-units" / "gave_way.sqlite"
"""Rows in whose place another GPU's ship (give_way.py)."""

Trials = dict[Tried, float]
"""Microseconds of each."""


def of_rows(databases: Sequence[Path] = (shipped_path(), ARCHIVED, GAVE_WAY), *, gpu: Target = GPU) -> Iterator[tuple[Problem, Trials]]:
    """The trials of each row of a GPU in these databases."""
    for path in databases:
        with Store.open(path, writable=False) as store:
            for result in store.results():
                if result.gpu == gpu.slug:
                    yield result.problem, times_of(result)


def times_of(result: SearchResult) -> Trials:
    """Every config that has a time in the scale of the trials, in microseconds; finalists by their race where that is all there is."""
    known, found = families(), {}
    for outcome in result.outcomes:
        measured = outcome.trial or outcome.measurement
        if measured is not None and outcome.fate.timed:
            found[outcome.template, known[outcome.template].completed(outcome.config)] = measured.median_us
    return found
