"""Consoles of all commands: tables and progress for people, JSON for machines.

Printed texts may come from strangers (values of a database, paths), so they are never parsed as markup (styled text is a
`rich.text.Text`), and characters that move the cursor, colour or reorder the screen become blanks.
"""

import io
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

LEAST = 12
"""Characters of a table's first column that every terminal shows."""


class _PlainConsole(Console):
    """Console that prints texts literally, without control characters."""

    def __init__(self, *, width: int | None = None, **settings: Any) -> None:
        super().__init__(width=width, highlight=False, markup=False, emoji=False, **settings)

    def render_str(self, text: str, **options: Any) -> Text:
        """The printable text of a line, a cell or a title."""
        return super().render_str(printable(text), **options)


def console(*, width: int | None = None) -> Console:
    """Console on standard output; 160 columns wide where that is no terminal, so that tables don't wrap in logs."""
    return _sized(stderr=False, width=width)


def messages() -> Console:
    """Console on standard error, for progress and notes: standard output is for results alone."""
    return _sized(stderr=True, width=None)


def silent() -> Console:
    """Console that prints nothing."""
    return _PlainConsole(quiet=True)


@contextmanager
def log_of(path: Path, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Iterator[Console]:
    """Console whose lines are added to the end of a file as they come, each after its time in UTC; raises OSError where that can't be
    written."""
    with path.open("a", encoding="utf-8", buffering=1) as file:
        yield _PlainConsole(file=_Stamped(file, clock), width=160)


class _Stamped(io.TextIOBase):
    """Text file that puts the time before each line."""

    def __init__(self, file: IO[str], clock: Callable[[], datetime]) -> None:
        self._file, self._clock, self._begun = file, clock, False

    def write(self, text: str) -> int:
        """Add a text, which may end within a line."""
        stamp = f"{self._clock():%Y-%m-%dT%H:%M:%SZ} "
        for line in text.splitlines(keepends=True):
            self._file.write(line if self._begun else stamp + line)
            self._begun = not line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """Hand the text on to the system."""
        self._file.flush()


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


def fitted(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    words: Collection[str] = (),
    spared: Sequence[str] = (),
    least: int = LEAST,
    marked: Collection[str] = (),
    note: str = "",
    blanks: int = 3,
    folded: bool = False,
) -> Table:
    """Table of one line a row, at most `width` characters wide: the first column is shortened (or `folded` over lines), figures never are.

    Columns of `words` begin on the left, as the first does, and are broken where nothing else helps. Columns of `spared` are left out, in
    their order, where the first would have less than `least` characters, or its own width. Cells in `marked` are yellow. Columns are 1 or
    3 `blanks` apart.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, blanks // 2))
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    table.caption, table.caption_justify = (f"({note})" if note else None), "left"
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    kept, left_out = list(range(len(columns))), [columns.index(name) for name in spared if name in columns]
    while (room := width - sum(blanks + widths[place] for place in kept[1:])) < min(widths[0], least) and left_out:
        kept.remove(left_out.pop(0))
    widths[0] = max(min(widths[0], LEAST), min(widths[0], room))
    for place in kept:
        worded = columns[place] in words
        whole = not worded and not (folded and not place)
        table.add_column(
            columns[place],
            justify="left" if worded or not place else "right",
            no_wrap=whole,
            overflow="ellipsis" if whole else "fold",
            width=widths[place],
        )
    for row in rows:
        table.add_row(*(Text(row[place], "yellow") if row[place] in marked else row[place] for place in kept))
    return table
