"""Valid candidates of a problem's space, with their features and predicted times."""

import math
import random
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flashtune.core.config import Value
from flashtune.core.problem import Problem
from flashtune.templates.expected import logs_us
from flashtune.tuner.propose.space import Candidate, SearchSpace

MOST = 20_000
"""Most candidates kept of a larger space, sampled evenly, so that scoring them all stays cheap beside one compilation."""

Array = NDArray[np.float64]


class Candidates:
    """Candidates of `space` in their fixed order (an even sample of `MOST` where there are more), and those of `starts` that it lacks."""

    def __init__(self, space: SearchSpace, problem: Problem, starts: Sequence[Candidate] = (), *, most: int = MOST) -> None:
        self._problem, self._target = problem, space.target
        self.candidates = _even_sample(space.every(), most)
        self.place = {candidate: index for index, candidate in enumerate(self.candidates)}
        for candidate in starts:
            if candidate not in self.place:
                self.place[candidate] = len(self.candidates)
                self.candidates.append(candidate)

    def __len__(self) -> int:
        return len(self.candidates)

    @cached_property
    def families(self) -> list[str]:
        """Family name of each candidate."""
        return [candidate.family.name for candidate in self.candidates]

    @cached_property
    def log_times(self) -> Array:
        """Cost model's time of each candidate, from expected compiler facts: the natural logarithm of microseconds.

        Equal for all candidates of a space without expected facts; a little above the slowest for those without them in a mixed space.
        """
        logs = logs_us([(candidate.family, candidate.config) for candidate in self.candidates], self._problem, self._target)
        times = np.array([np.nan if log is None else log for log in logs])
        known = np.isfinite(times)
        found: Array = np.where(known, times, math.log(1.5) + times[known].max() if known.any() else 0.0)
        return found

    @cached_property
    def features(self) -> Array:
        """Features of each candidate, (candidates, columns): values of a numeric axis are a step apart, other axes have a column per value.

        An axis that a family lacks is at its middle. The last columns are the families.
        """
        columns = [column for name in self.axes for column in self._columns(name)]
        return np.array([*columns, *self._families()]).T

    @cached_property
    def axes(self) -> list[str]:
        """Names of all axes on which candidates differ."""
        names = dict.fromkeys(name for candidate in self._one_of_each_family() for name in candidate.config)
        return [name for name in names if len(self._values(name)) > 1]

    @cached_property
    def columns(self) -> list[str]:
        """Axis of each column of `features`; "" for those of the families."""
        return [name for name in self.axes for _ in self._columns(name)] + [""] * len(self._families())

    def _one_of_each_family(self) -> Iterable[Candidate]:
        return {candidate.family.name: candidate for candidate in self.candidates}.values()

    def _values(self, name: str) -> list[Value]:
        return sorted(
            {value for c in self._one_of_each_family() for axis in c.family.axes if axis.name == name for value in axis.values}, key=_order
        )

    def _columns(self, name: str) -> list[list[float]]:
        kinds, values = self._values(name), [candidate.config.as_dict().get(name) for candidate in self.candidates]
        if all(isinstance(value, int) for value in kinds):
            middle = (len(kinds) - 1) / 2
            return [[middle if value is None else float(kinds.index(value)) for value in values]]
        return [[_APART * (value == kind) for value in values] for kind in kinds]

    def _families(self) -> list[list[float]]:
        return [[_APART * (family == name) for family in self.families] for name in dict.fromkeys(self.families)]


_APART = math.sqrt(0.5)
"""Value of an indicator column, which puts two different names at a distance of 1."""


def _order(value: Value) -> tuple[str, Value]:
    return type(value).__name__, value


def _even_sample(candidates: Iterable[Candidate], most: int) -> list[Candidate]:
    """All of them, or an even sample of `most` of them in their order (Vitter's algorithm R, 1985)."""
    rng, kept = random.Random(0), []
    for index, candidate in enumerate(candidates):
        if index < most:
            kept.append((index, candidate))
        elif (place := rng.randrange(index + 1)) < most:
            kept[place] = index, candidate
    return [candidate for _, candidate in sorted(kept, key=lambda entry: entry[0])]
