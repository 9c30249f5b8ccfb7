"""Committed times that models are fitted to: trials of records, shipped and archived, and searches of random shapes."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.cases.archive import folder
from benchmarks.shared.earlier import completed
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import SearchResult
from flashtune.core.system.errors import InputError
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.templates.learned.residual import Tried

RESULTS = folder()
GPU = find_target("h200")

ARCHIVED = RESULTS / "2026-11-21-h200-forward" / "tuned.sqlite"
"""Records of longer searches, of older kernels."""

GAVE_WAY = RESULTS / "2026-11-25-h100-units" / "gave_way.sqlite"
"""Records in whose place another GPU's ship."""

PACKED = RESULTS / "2026-11-27-h100-functions-and-pages" / "packed-search.sqlite"
"""Records of packed sequences that don't ship."""

Trials = dict[Tried, float]
"""Microseconds of each."""


def of_rows(
    databases: Sequence[Path] = (shipped_path(), ARCHIVED, GAVE_WAY, PACKED), *, gpu: Target = GPU
) -> Iterator[tuple[Problem, Trials]]:
    """Trials of each record of a GPU in these databases."""
    for path in databases:
        for slug, problem, times in _of_database(path):
            if slug == gpu.slug:
                yield problem, dict(times)


@cache
def _of_database(path: Path) -> list[tuple[str, Problem, Trials]]:
    """GPU, problem and trials of each such record, read once a process."""
    with Store.open(path, writable=False) as store:
        return [(result.gpu, result.problem, times_of(result)) for result in store.results()]


PAGES = RESULTS / "2026-11-27-h100-functions-and-pages" / "paged-configs.json"
"""Times of steps over pages by config, on an H100."""


def of_pages() -> Iterator[tuple[Target, Problem, Trials]]:
    """Steps over pages in 16 bits; their times are those of calls back to back, host included."""
    features = {"causal": True, "alignment": "bottom_right", "packed": True}
    for cell in json.loads(PAGES.read_text())["1 queries"]:
        if cell["cache"] == "bf16":
            sizes = {
                "n_q": cell["rows"],
                "n_kv": cell["keys"],
                "d_v": cell["d"],
                **{name: cell[name] for name in ("heads", "kv_heads", "d")},
            }
            problem = Problem(
                batch=cell["sequences"], dtype="bf16", features=Features.from_json(features | {"page": cell["page"]}), **sizes
            )
            yield find_target("h100"), problem, {("flash_paged", _labelled(label)): us for label, us in cell["configs"].items()}


def _labelled(label: str) -> Config:
    """The config with this label, of numbers and truth values."""
    return Config.of({name: json.loads(value.lower()) for name, value in (one.split("=") for one in label.split())})


def times_of(result: SearchResult) -> Trials:
    """Every config that has a time in the scale of the trials, in microseconds; finalists by their race where that is all there is."""
    found = {}
    for outcome in result.outcomes:
        measured, tried = outcome.trial or outcome.measurement, todays(outcome.template, outcome.config)
        if measured is not None and tried is not None and outcome.fate.timed:
            found[tried] = measured.median_us
    return found


def todays(template: str, config: Config) -> Tried | None:
    """A config of an earlier version under today's axes; None where no kernel has it today."""
    kind = families().get(template)
    if kind is None:
        return None
    found = completed(template, config)
    try:
        kind.validate(found)
    except InputError:
        return None
    return template, found


RUNS = sorted(RESULTS.glob("*-h200-unprepared/*.json"))
"""Committed runs of the case `random_shapes` on an H200."""

RUNS_ON_H100 = sorted(path for name in ("seed", "few", "short") for path in RESULTS.glob(f"*-h100*/{name}[0-9]*.json"))
"""Committed runs on an H100."""


def shapes_of(path: Path) -> Iterator[tuple[Problem, dict[str, Any], dict[str, Any]]]:
    """Each shape of a run with its row and its search, empty where there was none."""
    kept = json.loads(path.read_text())
    for row in kept["rows"]:
        problem = Problem(**row["problem"], features=Features.from_json(row["features"]))
        yield problem, row, kept["searches"].get(problem.label(), {})


def tried_in(search: dict[str, Any]) -> Trials:
    """Trials of a shape's search, where the run kept them."""
    return {tried: one["us"] for one in search.get("tried", []) if (tried := tried_as(one)) is not None}


def tried_as(one: dict[str, Any]) -> Tried | None:
    """The config of a trial, or of a search's best; None where no kernel has it today."""
    return todays(one["template"], Config.of(one["config"]))
