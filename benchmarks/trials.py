"""Trials of rows of an H200, as stored."""

from pathlib import Path

from flashtune.core.config import Config
from flashtune.core.results import SearchResult
from flashtune.core.target import find_target
from flashtune.templates import families

GPU = find_target("h200")

ARCHIVED = Path(__file__).parent / "results" / "2026-11-21-h200-forward" / "tuned.sqlite"
"""Rows of longer searches, of older kernels."""

Tried = tuple[str, Config]


def times_of(result: SearchResult) -> dict[Tried, float]:
    """Every config that has a time in the scale of the trials, in microseconds; finalists by their race where that is all there is."""
    known, found = families(), {}
    for outcome in result.outcomes:
        measured = outcome.trial or outcome.measurement
        if measured is not None and outcome.fate.timed:
            found[outcome.template, known[outcome.template].completed(outcome.config)] = measured.median_us
    return found
