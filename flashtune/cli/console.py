"""Consoles of all commands: tables and progress for people, JSON for machines.

Printed texts may come from strangers (values of a database, paths), so they are never parsed as markup (styled text is a
`rich.text.Text`), and characters that move the cursor, colour or reorder the screen become blanks.
"""

import json
from typing import Any

import click
from rich.console import Console
from rich.text import Text


class _PlainConsole(Console):
    """Console that prints texts literally, without control characters."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The printable text of a line, a cell or a title."""
        return super().render_str(printable(text), **options)


def console(*, width: int | None = None) -> Console:
    """Console on standard output; 160 columns wide where that is no terminal, so that tables don't wrap in logs."""
    return _sized(stderr=False, width=width)


def messages() -> Console:
    """Console on standard error, for progress and notes: standard output is for results alone."""
    return _sized(stderr=True, width=None)


def _sized(*, stderr: bool, width: int | None) -> Console:
    found = _PlainConsole(stderr=stderr, width=width)
    return found if found.is_terminal or width is not None else _PlainConsole(stderr=stderr, width=160)


def printable(text: str) -> str:
    """`text` with blanks for control characters and for marks that reorder text; line ends are kept."""
    return text if text.isprintable() else "".join(mark if mark.isprintable() or mark == "\n" else " " for mark in text)


def one_line(text: str) -> str:
    """`text` as one printable line."""
    return printable(text.replace("\n", " "))


def print_json(value: Any) -> None:
    """Print one indented JSON document to standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))
