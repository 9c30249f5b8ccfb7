"""Problems for a search: those that kernels run, their stored records, and their order."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashtune.cli.console import messages
from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.system.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from flashtune.core.records.results import TuningRecord


def searchable(problems: Sequence[Problem], target: Target, *, templates: Sequence[str] = ()) -> tuple[list[Problem], list[str]]:
    """Problems that a family (one of `templates`, if any are named) takes on `target`, and a sentence for each of the others."""
    from flashtune.templates import every_family, family
    from flashtune.tuner.propose.space import SearchSpace

    known = {name: family(name) for name in templates} or every_family()
    served: list[Problem] = []
    others: list[str] = []
    for problem in problems:
        try:
            SearchSpace(known, problem, target, only_suited=not templates)
            served.append(problem)
        except InputError as error:
            others.append(f"{problem.label()}: {error}")
    return served, others


def stored(location: str | None) -> "list[TuningRecord]":
    """Best records of the database at `location` (None: the user's own) and of the shipped one."""
    from flashtune.db.library import Layer, Library, overlay_path, shipped_path

    return Library([Layer(location=path, optional=True) for path in (location or overlay_path(), shipped_path())]).winners()


def worth_searching(
    problems: Sequence[Problem], target: Target, *, templates: Sequence[str], location: str | None, notes: "Console | None" = None
) -> list[Problem]:
    """The searchable problems in the order of a search.

    First come those without a record in the database at `location` (None: the user's own) or the shipped one, then those with a predicted
    record, then those with a measured one. `notes` (None: standard error) names the others; raises InputError where none is left."""
    served, left_out = searchable(problems, target, templates=templates)
    if not served:
        raise InputError(f"none of the calls can be searched for {target.name}: {left_out[0]}")
    notes = notes or messages()
    for line in left_out:
        notes.print(f"left out {line}")
    known_records = {(record.key, record.outcome.source) for record in stored(location)}

    def priority(problem: Problem) -> tuple[bool, bool]:
        key = problem.key(target.slug)
        return (key, "measured") in known_records, (key, "predicted") in known_records

    return sorted(served, key=priority)
