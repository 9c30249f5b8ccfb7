"""A profile as text: plain aligned columns, all of them in logs and documents, fewer in a narrow terminal."""

import textwrap
from dataclasses import replace

import click

from flashtune.profiler.summary import Profile
from flashtune.profiler.tables import Table, counted_tables, heading, measured_tables, target_line, verdict

SPARED = ("total MB", "MB", "write MiB", "read MiB", "GFLOP", "of peak", "TB/s", "MLP us", "projections us", "total MiB", "FLOP/byte")
"""Columns left out in a narrow terminal, in this order."""

_LEAST_WORDS = 16
"""Least width of the first column, in characters."""
_LEAST_COLUMNS = 3


def render(profile: Profile, *, width: int | None = None) -> str:
    """Text of a whole profile, in lines of at most `width` characters (None: of any length)."""
    tensors, steps, strategies = (_lines(table, width) for table in counted_tables(profile))
    parts = [
        "\n".join(_prose(line, width) for line in (heading(profile), target_line(profile))),
        tensors,
        steps,
        "\n".join(_prose(line, width) for line in verdict(profile)),
        strategies,
    ]
    if profile.measured is None:
        return "\n\n".join([*parts, _prose(f"Nothing was measured: {profile.not_measured}.", width)])
    parts.append(_prose(f"Measured on {profile.measured.device}: medians, L2 flushed before each launch.", width))
    parts += [_lines(table, width) for table in measured_tables(profile, profile.measured)]
    parts += [_prose(f"Left out: {sentence}.", width) for sentence in profile.measured.skipped]
    return "\n\n".join(parts)


def _prose(line: str, width: int | None) -> str:
    return line if width is None else textwrap.fill(line, width)


def _fitted(table: Table, width: int) -> Table:
    """The table without columns that don't fit into `width`, and with a shorter first column where that isn't enough."""
    for spared in SPARED:
        if _width(table) <= width:
            return table
        kept = [place for place, name in enumerate(table.columns) if name != spared]
        rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
        table = replace(table, columns=tuple(table.columns[place] for place in kept), rows=rows)
    words = max(len(row[0]) for row in table.rows)
    room = max(_LEAST_WORDS, words - max(0, _width(table) - width))
    rows = tuple((row[0] if len(row[0]) <= room else f"{row[0][: room - 1]}…", *row[1:]) for row in table.rows)
    table = replace(table, rows=rows)
    while _width(table) > width and len(table.columns) > _LEAST_COLUMNS:
        # Latencies lose the smallest N first.
        table = replace(table, columns=(table.columns[0], *table.columns[2:]), rows=tuple((row[0], *row[2:]) for row in table.rows))
    return table


def _width(table: Table) -> int:
    widths = [max(len(cell) for cell in column) for column in zip(table.columns, *table.rows, strict=True)]
    return sum(widths) + 2 * (len(widths) - 1)


def _lines(table: Table, width: int | None) -> str:
    table = table if width is None else _fitted(table, width)
    widths = [max(len(cell) for cell in column) for column in zip(table.columns, *table.rows, strict=True)]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [click.style(_prose(table.title, width), bold=True), _line(table.columns, widths), rule]
    for index, row in enumerate(table.rows):
        if table.summary_rows and index == len(table.rows) - table.summary_rows:
            lines.append(rule)
        lines.append(_line(row, widths))
    return "\n".join([*lines, *([_prose(f"({table.note})", width)] if table.note else [])])


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *figures = (
        cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *figures]).rstrip()
