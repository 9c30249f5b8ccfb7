"""Archive of earlier runs: unpacks it into benchmarks/results, as every case that reads earlier runs does by itself.

`--pack` puts all folders of benchmarks/results into the archive, and writes the tables anew. A run is a folder `<date>-<gpu>-<what>`, which
git ignores. Beside the archive most cases have a table of their figures.
"""

import csv
import hashlib
import io
import json
import lzma
import re
import statistics
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.shared.environment import argument_parser

HERE = Path(__file__).parent.parent / "results"
ARCHIVE = HERE / "archive.tar.xz"
MARK = HERE / ".unpacked"
RUN = re.compile(r"20\d\d-\d\d-\d\d-[\w-]+")

TABLED = ("forward", "backward", "unprepared", "calls")
"""Results with a table."""
RESULT_OF = {"random_shapes": "unprepared", "models": "calls"}
"""Results of cases that have another name."""
COLUMNS = ("run", "file", "gpu", "torch", "part", "figure", "cells", "median", "least", "most")
FIGURES = ("ratio", "speedup", "forward_ratio", "tokens_ratio", "new_tokens_ratio", "first_call_s", "over_own")
"""Figures of a row in tables, beside its ratios to peers."""


@cache
def folder() -> Path:
    """benchmarks/results with all runs unpacked."""
    digest = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()
    mark, *runs = MARK.read_text().split("\n") if MARK.is_file() else [""]
    # Git may have taken folders away that another commit tracks.
    if mark != digest or not all((HERE / run).is_dir() for run in runs):
        with tempfile.TemporaryDirectory(dir=HERE, prefix=".unpacking-") as aside:
            with tarfile.open(ARCHIVE) as archive:
                archive.extractall(aside, filter="data")
            for path in sorted(path for path in Path(aside).rglob("*") if path.is_file()):
                place = HERE / path.relative_to(aside)
                place.parent.mkdir(parents=True, exist_ok=True)
                # Whole files in one step, since other processes may do the same.
                path.replace(place)
            MARK.write_text("\n".join([digest, *sorted(path.name for path in Path(aside).iterdir())]))
    return HERE


def pack() -> None:
    """Write the archive of all runs, the same bytes for the same files, then the tables."""
    folder()
    files = [path for run in HERE.iterdir() if RUN.fullmatch(run.name) for path in run.rglob("*") if path.is_file()]
    # Files of one kind beside each other pack better.
    files.sort(key=lambda path: (path.suffix, path))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(HERE).as_posix())
            entry.size = path.stat().st_size
            with path.open("rb") as content:
                archive.addfile(entry, content)
    ARCHIVE.write_bytes(lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    runs: dict[str, list[tuple[str, Path, dict[str, Any]]]] = defaultdict(list)
    for path in files:
        kept = json.loads(path.read_text()) if path.suffix == ".json" else None
        made_by = isinstance(kept, dict) and (kept.get("provenance") or kept.get("machine"))
        found = re.search(r"benchmarks/(?:run\.py )?(\w+)", made_by["command"]) if made_by else None
        result = RESULT_OF.get(found[1], found[1]) if found else ""
        if result in TABLED:
            runs[result].append((made_by["created_at"], path, kept))
    for name, members in runs.items():
        members.sort(key=lambda one: one[:2])
        with (HERE / f"{name}.csv").open("w", newline="") as table:
            writer = csv.writer(table, lineterminator="\n")
            writer.writerows([COLUMNS, *(line for _, path, kept in members for line in lines_of(path, kept))])


def lines_of(path: Path, kept: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Lines of a run's file in a table: median, least and most of each figure of its rows."""
    made_by = kept.get("provenance") or kept["machine"]
    for part, rows in kept.items():
        figures: dict[str, list[float]] = defaultdict(list)
        for row in rows if isinstance(rows, list) else []:
            peers = {f"times as fast as {name}": value for name, value in (row.get("ratio_to") or row.get("over") or {}).items()}
            for name, value in (peers | {name: row.get(name) for name in FIGURES}).items():
                if isinstance(value, int | float):
                    figures[name].append(value)
        for name, values in figures.items():
            shown = (f"{value:.4g}" for value in (statistics.median(values), min(values), max(values)))
            yield (path.parent.name, path.name, made_by["gpu_name"], made_by["torch"], part, name, len(values), *shown)


def main() -> None:
    """Unpack or pack."""
    parser = argument_parser(__doc__)
    parser.add_argument("--pack", action="store_true", help="write the archive and the tables anew")
    if parser.parse_args().pack:
        pack()
    else:
        print(folder())
