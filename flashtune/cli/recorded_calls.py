"""Selection and order of a model's recorded problems for a search."""

from collections.abc import Sequence

from flashtune.cli.console import messages
from flashtune.core.errors import InputError
from flashtune.core.problem import Problem
from flashtune.core.target import Target


def worth_searching(problems: Sequence[Problem], target: Target, *, templates: Sequence[str], location: str | None) -> list[Problem]:
    """Problems that a family (one of `templates`, if any are named) serves on `target`, in the order of a search.

    First come those without a record in the database at `location` (None: the user's own) or the shipped one, then those with a predicted
    record, then those with a measured one. The others are named on standard error; raises InputError where none is left."""
    from flashtune.db.library import Layer, Library, overlay_path, shipped_path
    from flashtune.templates import families, family
    from flashtune.tuner.propose.space import SearchSpace

    known = {name: family(name) for name in templates} or families()
    served: list[Problem] = []
    left_out: list[str] = []
    for problem in problems:
        try:
            SearchSpace(known, problem, target, only_suited=not templates)
            served.append(problem)
        except InputError as error:
            left_out.append(f"{problem.label()}: {error}")
    if not served:
        raise InputError(f"none of the calls can be searched for {target.name}: {left_out[0]}")
    for line in left_out:
        messages().print(f"left out {line}")
    records = Library([Layer(location=path, optional=True) for path in (location or overlay_path(), shipped_path())]).winners()
    known_records = {(record.key, record.outcome.source) for record in records}

    def priority(problem: Problem) -> tuple[bool, bool]:
        key = problem.key(target.slug)
        return (key, "measured") in known_records, (key, "predicted") in known_records

    return sorted(served, key=priority)
