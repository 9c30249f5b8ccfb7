"""The referee's results as tables, for a terminal and for a page."""

from dataclasses import replace

from flashtune.bench.page import Table, origin, page
from flashtune.bench.rulings import NAMES, VERDICTS, Results, Ruled, Ruling
from flashtune.core.records.versions import TITLES

LOUD = ("wrong", "failed", "undecided")
"""Verdicts that are listed with their reasons."""

WORDS = ("shape", "reason", "versions", "why not")
"""Columns of sentences."""


def providers_in(results: Results) -> list[str]:
    """Providers that take some of the shapes, in order."""
    taking = {name for one in results.ruled for name, ruling in one.rulings.items() if ruling.verdict != "refused"}
    return [name for name in NAMES if name in taking]


def cell(one: Ruled, name: str) -> str:
    """A ruling in a table: the median of its calls in microseconds, or its verdict."""
    ruling = one.rulings.get(name)
    if ruling is None or ruling.verdict == "refused":
        return "-"
    return ruling.verdict if ruling.time is None else f"{ruling.time.median_us:.1f}"


def said(ruling: Ruling) -> str:
    """Versions for messages."""
    return ", ".join(f"{TITLES.get(part, part)} {version}" for part, version in ruling.versions.items())


def times(results: Results) -> Table:
    """A line for each shape, with the medians or verdicts of all, and the fastest."""
    names = providers_in(results)
    rows = [(one.title, *(cell(one, name) for name in names), one.fastest or "-") for one in results.ruled]
    note = "medians of whole calls, host included, in microseconds; of bwd training steps"
    return Table(title="Who is right, and how fast", columns=("shape", *names, "fastest"), rows=rows, note=note)


def totals(results: Results) -> Table:
    """How often each is right, wrong, refuses, fails, and is the fastest; why one that takes no shape refuses."""
    rows = []
    for name in NAMES:
        rulings = [one.rulings[name] for one in results.ruled if name in one.rulings]
        if not rulings:
            continue
        counts = [sum(ruling.verdict == verdict for ruling in rulings) for verdict in VERDICTS]
        first = sum(one.fastest == name for one in results.ruled)
        why = rulings[0].reason if all(ruling.verdict == "refused" for ruling in rulings) else ""
        rows.append((name, *map(str, counts), str(first), why))
    return Table(title="Providers", columns=("provider", *VERDICTS, "fastest", "why not"), rows=rows)


def findings(results: Results) -> Table:
    """Who is wrong or fails, and why."""
    rows = [
        (name, one.title, ruling.verdict, ruling.reason, said(ruling))
        for verdict in LOUD
        for one in results.ruled
        for name, ruling in one.rulings.items()
        if ruling.verdict == verdict
    ]
    return Table(title="Findings", columns=("provider", "shape", "verdict", "reason", "versions"), rows=rows)


def html(results: Results) -> str:
    """Page of the results: what matters most first, empty tables left out."""
    tables = (replace(table, words=WORDS, loud=LOUD, stacked=True) for table in (totals(results), findings(results), times(results)))
    versions = ", ".join(f"{TITLES.get(part, part)} {version}" for part, version in results.versions().items())
    written = f"{origin(results.provenance)}\nLibraries: {versions}"
    return page(f"Who is right, and how fast: {results.gpu}", [table for table in tables if table.rows], written)
