"""What an earlier run of forward.py found of the cells of this one, where the same kernels serve them still. Nothing here needs a GPU."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forward_cells import Cell
from forward_peers import Checked, Error
from forward_report import Row, sizes_of
from searches import shipped

from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.results import Measurement
from flashtune.core.target import Target, find_target
from flashtune.dispatch.policy import choose, torch_has
from flashtune.templates import families
from flashtune.templates.rendering import variant_of


def serving(problem: Problem, target: Target) -> tuple[str | None, str | None]:
    """The ids of the variant that serves a problem by the shipped rows, and of its twin; they tell text and config. None for none."""
    choice = choose(problem, target, shipped(), families(), framework_serves=torch_has(problem))
    if choice.family is None or choice.config is None:
        return None, None
    own = variant_of(choice.family, choice.spec or problem.spec(), choice.config).id
    return own, None if choice.twin is None else variant_of(choice.family, problem.spec(), choice.twin).id


def rows_of(path: Path, chosen: Sequence[Cell]) -> dict[Cell, Row]:
    """Those of the chosen cells that the run of the file `path` timed and found right, beside the same peers, with kernels that serve
    them today on its GPU; each row says of which run it is."""
    found = json.loads(path.read_text())
    target = find_target(found["provenance"]["gpu_name"])
    by_name = {(row["group"], row["case"], *row["problem"].values()): row for row in found["rows"]}
    rows = {cell: by_name.get((cell.group, cell.case, *sizes_of(cell.problem).values())) for cell in chosen}
    sound = {cell: row for cell, row in rows.items() if row is not None and row["times"] and not row["failed"] and not row["wrong"]}
    today = {problem: serving(problem, target) for problem in {cell.problem for cell in sound}}
    made_by = {name: found["provenance"][name] for name in ("command", "created_at")}
    return {
        cell: _row(cell, row, row.get("run") or made_by)
        for cell, row in sound.items()
        if set(cell.peers) <= row["times"].keys() | row["notes"].keys()
        and (row["served"]["variant"], row["served"].get("twin")) == today[cell.problem]
    }


def _row(cell: Cell, row: dict[str, Any], run: dict[str, Any]) -> Row:
    served = row["served"]
    errors = {
        name: Error(**{what: float("nan") if value is None and what != "lse" else value for what, value in error.items()})
        for name, error in row["errors"].items()
    }
    checked = Checked(
        kind=served["kind"],
        template=served["template"],
        variant=served["variant"],
        config=None if served["config"] is None else Config.of(served["config"]),
        reason=served["reason"],
        twin=served["twin"],
        errors=errors,
        notes=row["notes"],
    )
    return Row(cell=cell, checked=checked, times={name: Measurement(**time) for name, time in row["times"].items()}, run=run)
