"""What runs of unprepared.py kept: drawn shapes, what served them, and what their searches found."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archived import folder
from trials import Trials

from flashtune.core.config import Config
from flashtune.core.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.learned.residual import Tried

RESULTS = folder()

DRAWN = sorted(RESULTS.glob("*-h200-unprepared/*.json"))
"""The committed runs on an H200."""

DRAWN_ON_H100 = sorted(path for name in ("seed", "few", "short") for path in RESULTS.glob(f"*-h100*/{name}[0-9]*.json"))
"""Those on an H100."""


def shapes_of(path: Path) -> Iterator[tuple[Problem, dict[str, Any], dict[str, Any]]]:
    """Each shape of a run with its row and what is kept of its search, which is empty where there is none."""
    kept = json.loads(path.read_text())
    for row in kept["rows"]:
        problem = Problem(**row["problem"], features=Features.from_json(row["features"]))
        yield problem, row, kept["searches"].get(problem.label(), {})


def tried_in(search: dict[str, Any]) -> Trials:
    """What a shape's search tried, where the run kept that."""
    return {tried_as(one): one["us"] for one in search.get("tried", [])}


def tried_as(one: dict[str, Any]) -> Tried:
    """The config of a trial, or of a search's best."""
    return one["template"], family(one["template"]).completed(Config.of(one["config"]))
