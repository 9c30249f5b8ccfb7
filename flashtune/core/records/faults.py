"""Faults of providers that are known without a measurement here: a table of what is wrong, where, in which versions, with its source.

Databases hold what was found on a machine (flashtune.core.records.versions); this table (`faults.json`) ships with the package.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flashtune.core.problems.config import Direction
from flashtune.core.problems.problem import Problem
from flashtune.core.system.versions import minor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A provider's fault: the versions of PyTorch `torch`, from one on and before another (empty: all), and the problems that it spoils.

    Empty `archs` and `masks` mean all GPUs, and problems with and without a mask; `most` are the largest values of fields of a problem.
    """

    provider: str
    torch: tuple[str, str]
    directions: tuple[Direction, ...]
    wrong: str
    source: str
    archs: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)

    @property
    def said(self) -> str:
        """The fault in words for messages, in which `wrong` has no article."""
        return f"its {self.wrong} ({self.source})"

    def in_version(self, torch: str) -> bool:
        """True for a version of PyTorch that has it."""
        first, fixed = self.torch
        return (not first or minor(torch) >= minor(first)) and (not fixed or minor(torch) < minor(fixed))

    def spoils(self, problem: Problem, arch: str) -> bool:
        """True for a problem that it concerns, on a GPU of this architecture (`Target.arch`)."""
        here = problem.direction in self.directions and (not self.archs or arch in self.archs)
        here = here and (not self.masks or problem.features.mask in self.masks)
        return here and all(getattr(problem, name) <= most for name, most in self.most.items())


FAULTS = Path(__file__).with_name("faults.json")
"""The table."""


@cache
def faults() -> tuple[Fault, ...]:
    """Every fault of the table."""
    found: list[dict[str, Any]] = json.loads(FAULTS.read_text())
    rows: list[dict[str, Any]] = [
        {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()} for row in found
    ]
    return tuple(Fault(**row) for row in rows)


def known_fault(provider: str, problem: Problem, arch: str, torch: str) -> Fault | None:
    """The fault because of which a provider of this PyTorch is wrong for a problem; None where none is known."""
    return next((one for one in faults() if one.provider == provider and one.in_version(torch) and one.spoils(problem, arch)), None)


def wrong_everywhere(torch: str, direction: Direction, *, masked: bool) -> dict[str, Fault]:
    """Faults of this PyTorch on every GPU and at all sizes, by provider, of a direction with or without a mask."""
    found = (one for one in faults() if one.in_version(torch) and direction in one.directions and not one.archs and not one.most)
    return {one.provider: one for one in found if masked or not one.masks}
