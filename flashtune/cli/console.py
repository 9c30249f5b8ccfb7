"""Where output goes: tables and progress for people, JSON for machines.

Whatever is printed may hold a stranger's words: a value of a database, a path. So nothing in a text is markup (what has a style is a
`rich.text.Text`), and what could move the cursor, colour or reorder what stands on the screen becomes a blank.
"""

import json
from typing import Any

import click
from rich.console import Console
from rich.text import Text


class _PlainConsole(Console):
    """A console that takes every text as it is, without what a terminal would obey."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of every string that is printed, be it a line, a cell or a title."""
        return super().render_str(printable(text), **options)


def console(*, width: int | None = None) -> Console:
    """Standard output for people; where it is not a terminal it is 160 columns wide, so that tables don't wrap in logs."""
    return _sized(stderr=False, width=width)


def messages() -> Console:
    """Standard error, for progress and notes: standard output stays clean for results."""
    return _sized(stderr=True, width=None)


def _sized(*, stderr: bool, width: int | None) -> Console:
    found = _PlainConsole(stderr=stderr, width=width)
    return found if found.is_terminal or width is not None else _PlainConsole(stderr=stderr, width=160)


def printable(text: str) -> str:
    """`text` with blanks for control characters and for marks that reorder what follows; line ends are kept."""
    return text if text.isprintable() else "".join(mark if mark.isprintable() or mark == "\n" else " " for mark in text)


def one_line(text: str) -> str:
    """`text` as one printable line."""
    return printable(text.replace("\n", " "))


def print_json(value: Any) -> None:
    """One JSON document, indented, to standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))
