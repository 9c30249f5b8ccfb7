"""What runs of unprepared.py kept: drawn shapes, what served them, and what their searches found."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashtune.core.problem import Features, Problem

DRAWN = sorted((Path(__file__).parent / "results").glob("*-h200-unprepared/*.json"))
"""The committed runs on an H200."""


def shapes_of(path: Path) -> Iterator[tuple[Problem, dict[str, Any], dict[str, Any]]]:
    """Each shape of a run with its row and what is kept of its search, which is empty where there is none."""
    kept = json.loads(path.read_text())
    for row in kept["rows"]:
        problem = Problem(**row["problem"], features=Features.from_json(row["features"]))
        yield problem, row, kept["searches"].get(problem.label(), {})
