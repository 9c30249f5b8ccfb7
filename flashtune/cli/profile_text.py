"""A profile as text for people: plain aligned columns, the same in a terminal, a log and the documents."""

import click

from flashtune.profiler.summary import Profile
from flashtune.profiler.tables import Table, counted_tables, heading, measured_tables, target_line, verdict


def render(profile: Profile) -> str:
    """Everything that is known of `profile`."""
    tensors, steps, strategies = counted_tables(profile)
    parts = [f"{heading(profile)}\n{target_line(profile)}", _lines(tensors), _lines(steps), "\n".join(verdict(profile)), _lines(strategies)]
    if profile.measured is None:
        return "\n\n".join([*parts, f"Nothing was measured: {profile.not_measured}."])
    parts.append(f"Measured on {profile.measured.device}: medians, L2 flushed before each launch.")
    parts += [_lines(table) for table in measured_tables(profile, profile.measured)]
    parts += [f"Left out: {sentence}." for sentence in profile.measured.skipped]
    return "\n\n".join(parts)


def _lines(table: Table) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(table.columns, *table.rows, strict=True)]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [click.style(table.title, bold=True), _line(table.columns, widths), rule]
    for index, row in enumerate(table.rows):
        if table.summary_rows and index == len(table.rows) - table.summary_rows:
            lines.append(rule)
        lines.append(_line(row, widths))
    return "\n".join([*lines, *([f"({table.note})"] if table.note else [])])


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *figures = (
        cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *figures]).rstrip()
