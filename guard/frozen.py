"""A frozen file of this folder: read, compared, and frozen anew with a reason."""

import argparse
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MOST_SHOWN = 20


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
    return [f"{name}: {frozen.get(name)} became {now.get(name)}" for name in names if frozen.get(name) != now.get(name)]


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
