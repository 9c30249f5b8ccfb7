"""A frozen file of this folder: read, compared, and frozen anew with a reason."""

import argparse
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MOST_SHOWN = 20
MOST_PARTS = 3


def read(name: str) -> dict[str, Any]:
    """The content frozen under this name, empty where nothing was."""
    path = FOLDER / f"{name}.json.xz"
    found: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes())) if path.is_file() else {}
    return found


def write(name: str, values: dict[str, Any], reason: str) -> None:
    """Freeze values and note why."""
    text = json.dumps(values, indent=0, sort_keys=True)
    (FOLDER / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    with (FOLDER / "README.md").open("a") as readme:
        readme.write(f"- {name}, {len(values)} entries: {reason}\n")


def differences(frozen: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each entry that is missing, new or other."""
    names = sorted(frozen.keys() | now.keys())
    return [f"{name}: {_said(frozen.get(name), now.get(name))}" for name in names if frozen.get(name) != now.get(name)]


def _said(before: Any, after: Any) -> str:
    """The first parts in which two values differ."""
    parts = list(_apart("", before, after))
    more = f"; and {len(parts) - MOST_PARTS} more" if len(parts) > MOST_PARTS else ""
    return "; ".join(parts[:MOST_PARTS]) + more


def _apart(place: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from _apart(f"{place}{name}: ", before.get(name), after.get(name))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from _apart(place, one, other)
    elif isinstance(before, str) and isinstance(after, str) and len(words := before.split(", ")) == len(others := after.split(", ")) > 1:
        # Of a launch the kernel's name says which it is.
        head = f"{words[0]} " if words[0] == others[0] else ""
        for one, other in zip(words, others, strict=True):
            yield from _apart(f"{place}{head}", one, other)
    elif before != after:
        yield f"{place}{before} became {after}"


def main(name: str, description: str | None, current: Callable[[bool], dict[str, Any]]) -> int:
    """The command of one guard: `current` gives today's values, with new entries where its argument says so."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--freeze", metavar="REASON", help="freeze today's values in place of the frozen ones, for this reason")
    reason = parser.parse_args().freeze
    now = current(reason is not None)
    changed = differences(read(name), now)
    print(f"{name}: {len(now)} entries, {len(changed)} changed")
    if reason is not None:
        write(name, now, reason)
        return 0
    print(*changed[:MOST_SHOWN], sep="\n")
    return bool(changed)
