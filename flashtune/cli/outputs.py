"""Files that a command is to write, checked before it writes: no two options name one file, and none names a file of another kind."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from flashtune.core.system.errors import InputError
from flashtune.core.system.files import head

STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")
"""Beginning of every line of a search's log."""
PICTURES = {
    ".html": re.compile(rb"\s*<(?:!doctype html|html)\b", re.IGNORECASE),
    ".png": re.compile(rb"\x89PNG\r\n"),
    ".svg": re.compile(rb"\s*<(?:\?xml|svg)\b"),
}
"""Beginnings of the files of `--plot`, by their ending."""


def refuse_shared(places: Mapping[str, Path | None]) -> None:
    """Raise InputError where two of these options name one file, through whatever links."""
    named = [(option, path) for option, path in places.items() if path is not None]
    for (first, one), (second, other) in combinations(named, 2):
        if _is_same(one, other):
            raise InputError(f"{first} and {second} both name {other}: give each a file of its own")


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.realpath(one) == os.path.realpath(other) or os.path.samefile(one, other)
    except OSError:
        # One of them isn't there yet.
        return False


def refuse_foreign(option: str, path: Path, ours: re.Pattern[bytes], kind: str) -> None:
    """Raise InputError where an option names a file with content that doesn't begin as a `kind` of file does."""
    if (begun := head(path, 1000)) and not ours.match(begun):
        raise InputError(f"{option} {path} is no {kind}, and would be lost: name another file")


def refuse_plot(path: Path, endings: Sequence[str]) -> None:
    """Raise InputError where `--plot` names a file of another ending or kind, or one that can't be written."""
    ending = path.suffix.lower()
    if ending not in endings:
        raise InputError(f"--plot {path} has no known ending: use {', '.join(endings)}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"--plot {path} can't be written: name a file in an existing folder that you may write to")
    refuse_foreign("--plot", path, PICTURES[ending], f"{ending.removeprefix('.').upper()} file")
