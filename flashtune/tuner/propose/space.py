"""Search space of one problem: the families that can serve it, its valid candidates with their features and predicted times, and those that
other problems suggest."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec, Variant
from flashtune.core.problems.problem import Problem, wide_heads
from flashtune.core.records.nearness import mods_in, nearest
from flashtune.core.records.results import PROVIDERS, SearchResult, Source, TuningRecord
from flashtune.core.system.errors import InputError
from flashtune.templates.expected import Estimate, estimates
from flashtune.templates.family import Family
from flashtune.templates.mods.known import alike
from flashtune.templates.rendering import variant_of

NEIGHBOURS = 4
"""Number of transfer candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Family with one of its configs."""

    family: Family
    config: Config

    def variant(self, spec: KernelSpec) -> Variant:
        """Variant of this candidate for `spec`."""
        return variant_of(self.family, spec, self.config)


class SearchSpace:
    """Valid configs for a problem's sizes on a target, of families that support it and, with `only_suited`, suit its sizes.

    It is empty for heads that are larger than kernels take, where other providers alone are timed. Raises InputError where there is no such
    family.
    """

    def __init__(self, families: Mapping[str, Family], problem: Problem, target: Target, *, only_suited: bool = True) -> None:
        spec = problem.spec()
        alike = {name: family for name, family in families.items() if family.direction == problem.direction}
        mine = {name: family for name, family in alike.items() if family.reads(problem) is None} or alike or families
        refusals = {
            name: (family.refusal if only_suited else family.inability)(problem, spec, target) or _uncompilable(family, spec, target)
            for name, family in mine.items()
        }
        self.families = {name: families[name] for name, refusal in refusals.items() if refusal is None}
        self.spec, self.target, self.problem = spec, target, problem
        if not target.compilable:
            why = f"Triton no longer supports its architecture ({target.arch})"
            raise InputError(f"{target.name} can't run Triton kernels, since {why}: PyTorch runs calls there without a search")
        if not self.families and not wide_heads(problem.d, problem.d_v):
            why = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
            raise InputError(f"no template takes {spec.label()} on {target.slug} ({why})")

    def starts(self) -> list[Candidate]:
        """Default and published tiles of each family."""
        found: dict[tuple[str, Config], Candidate] = {}
        lists = [
            [
                f.resized(config, self.problem, self.target)
                for config in (f.default_of(self.problem, self.target), *f.starts(self.spec, self.target))
            ]
            for f in self.families.values()
        ]
        # Round robin over the families, so that a few trials already see all of them.
        for place in range(max(map(len, lists), default=0)):
            for family, configs in zip(self.families.values(), lists, strict=True):
                if place < len(configs):
                    found.setdefault((family.name, configs[place]), Candidate(family=family, config=configs[place]))
        return list(found.values())

    def of_sizes(self) -> list[Candidate]:
        """Defaults that depend on a problem's sizes, by which calls run until there is a record."""
        families = (family for family in self.families.values() if family.at_sizes is not None)
        return [Candidate(family=family, config=family.default_of(self.problem, self.target)) for family in families]

    def every(self) -> Iterator[Candidate]:
        """All candidates that break no constraint, in a fixed order."""
        for family in self.families.values():
            for config in family.configs(self.spec, self.target):
                if family.resized(config, self.problem, self.target) == config:
                    yield Candidate(family=family, config=config)


def _uncompilable(family: Family, spec: KernelSpec, target: Target) -> str | None:
    """The reason why the installed Triton compiles none of a family's starting points; None where it compiles some."""
    reasons = [family.uncompilable(spec, config) for config in family.starts(spec, target)]
    return reasons[0] if reasons and None not in reasons else None


def transfer_candidates(space: SearchSpace, problem: Problem, records: Iterable[TuningRecord], source: Source) -> list[Candidate]:
    """Winners of the records that are nearest to `problem`, the nearest first, each once.

    A config that breaks a constraint of this problem is moved to the nearest that breaks none, and axes that follow from sizes
    are set for this problem's. Records of families that don't serve it, or whose config no
    version of the family declares, are left out; so are predictions for a search that measures.
    """
    found: dict[tuple[str, str], Candidate] = {}
    useful = [record for record in records if source == "predicted" or record.outcome.source == "measured"]
    for _, record in _nearest(problem, space.target, useful):
        candidate = _refitted(space, record)
        if candidate is not None:
            candidate = replace(candidate, config=candidate.family.resized(candidate.config, problem, space.target))
            found.setdefault((candidate.family.name, candidate.config.as_json()), candidate)
        if len(found) == NEIGHBOURS:
            break
    return list(found.values())


def _nearest(problem: Problem, target: Target, records: Sequence[TuningRecord]) -> list[tuple[float, TuningRecord]]:
    """Records with their distances, the nearest first: of functions their own, then those of the built-in feature that is most alike."""
    key, hashed = problem.key(target.slug), problem.features.mods
    found = nearest(key, (record for record in records if mods_in(record.key.features) == hashed))
    if hashed:
        found += nearest(alike(problem).key(target.slug), (record for record in records if not mods_in(record.key.features)))
    return found


def stored(space: SearchSpace, problem: Problem, records: Iterable[TuningRecord]) -> Candidate | None:
    """Config of the measured record that serves exactly this problem's key, as it was raced, where it keeps the constraints; the first
    counts."""
    key = problem.key(space.target.slug)
    served = (record for record in records if record.outcome.source == "measured" and not record.refuted)
    measured = next((record for record in served if record.key == key), None)
    if measured is None:
        return None
    candidate = _refitted(space, measured)
    return candidate if candidate is not None and candidate.config == measured.outcome.config else None


def record_of(result: SearchResult) -> TuningRecord | None:
    """Record of a search's result; None where nothing was found."""
    if result.best is None:
        return None
    return TuningRecord(
        key=result.problem.key(result.gpu),
        problem=result.problem,
        outcome=result.best,
        provenance=result.provenance,
        baseline=result.baseline,
        ending=result.ending,
        fallback=result.fallback,
        in_graphs=result.in_graphs,
        providers=tuple(one for one in result.outcomes if one.template in PROVIDERS),
    )


def _refitted(space: SearchSpace, record: TuningRecord) -> Candidate | None:
    family = space.families.get(record.outcome.template)
    if family is None:
        return None
    try:
        family.validate(record.outcome.config)
    except InputError:
        return None
    moved = family.refitted(record.outcome.config, space.spec, space.target)
    return None if moved is None else Candidate(family=family, config=moved)


MOST = 20_000
"""Most candidates kept of a larger space, sampled evenly, so that scoring them all stays cheap beside one compilation."""

Array = NDArray[np.float64]


class Candidates:
    """Candidates of `space` in their fixed order (an even sample of `MOST` where there are more), and those of `starts` that it lacks."""

    def __init__(self, space: SearchSpace, problem: Problem, starts: Sequence[Candidate] = (), *, most: int = MOST) -> None:
        self.problem, self.target = problem, space.target
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
        logs = [one.log_us for one in self._estimates if one is not None]
        unknown = math.log(1.5) + max(logs) if logs else 0.0
        return np.array([unknown if one is None else one.log_us for one in self._estimates])

    @cached_property
    def learned(self) -> Array:
        """Learned residual of each candidate's log time; 0 for those without."""
        return np.array([0.0 if one is None else one.learned for one in self._estimates])

    @cached_property
    def _estimates(self) -> list[Estimate | None]:
        return estimates([(candidate.family, candidate.config) for candidate in self.candidates], self.problem, self.target)

    @cached_property
    def features(self) -> Array:
        """Features of each candidate, (candidates, columns): values of a numeric axis are a step apart, other axes have a column per value.

        An axis that a family lacks is at its middle. The last columns are the families.
        """
        return np.array([values for _, values in self._columns]).T

    @cached_property
    def columns(self) -> list[str]:
        """Axis of each column of `features`; "" for those of the families."""
        return [name for name, _ in self._columns]

    @cached_property
    def _columns(self) -> list[tuple[str, list[float]]]:
        """Columns of all axes on which candidates differ, then those of the families."""
        found: list[tuple[str, list[float]]] = []
        one_of_each = {candidate.family.name: candidate for candidate in self.candidates}.values()
        for name in dict.fromkeys(name for candidate in one_of_each for name in candidate.config):
            known = {value for one in one_of_each for axis in one.family.axes if axis.name == name for value in axis.values}
            kinds = sorted(known, key=lambda value: (type(value).__name__, value))
            values = [candidate.config.as_dict().get(name) for candidate in self.candidates]
            if len(kinds) > 1 and all(isinstance(value, int) for value in kinds):
                middle = (len(kinds) - 1) / 2
                found.append((name, [middle if value is None else float(kinds.index(value)) for value in values]))
            elif len(kinds) > 1:
                found += [(name, [_APART * (value == kind) for value in values]) for kind in kinds]
        return found + [("", [_APART * (family == name) for family in self.families]) for name in dict.fromkeys(self.families)]


_APART = math.sqrt(0.5)
"""Value of an indicator column, which puts two different names at a distance of 1."""


def _even_sample(candidates: Iterable[Candidate], most: int) -> list[Candidate]:
    """All of them, or an even sample of `most` of them in their order (Vitter's algorithm R, 1985)."""
    rng, kept = random.Random(0), []
    for index, candidate in enumerate(candidates):
        if index < most:
            kept.append((index, candidate))
        elif (place := rng.randrange(index + 1)) < most:
            kept[place] = index, candidate
    return [candidate for _, candidate in sorted(kept, key=lambda entry: entry[0])]
