"""Search space of one problem: the families that can serve it, candidates as (family, config), and those that other problems suggest."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from flashtune.core.config import Config, KernelSpec, Variant
from flashtune.core.errors import InputError
from flashtune.core.nearness import nearest
from flashtune.core.problem import Problem
from flashtune.core.results import SearchResult, Source, TuningRecord
from flashtune.core.target import Target
from flashtune.templates.family import Family
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

    Raises InputError where there is no such family.
    """

    def __init__(self, families: Mapping[str, Family], problem: Problem, target: Target, *, only_suited: bool = True) -> None:
        spec = problem.spec()
        mine = {name: family for name, family in families.items() if family.direction == problem.direction} or families
        refusals = {
            name: family.refusal(problem, spec, target) if only_suited else family.supports(spec, target) for name, family in mine.items()
        }
        self.families = {name: families[name] for name, refusal in refusals.items() if refusal is None}
        self.spec, self.target, self.problem = spec, target, problem
        if not target.compilable:
            raise InputError(f"{target.name} can't run Triton kernels: Triton no longer supports its architecture ({target.arch})")
        if not self.families:
            why = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
            raise InputError(f"no template serves {spec.label()} on {target.slug} ({why})")

    def starts(self) -> list[Candidate]:
        """Default and published tiles of each family."""
        found: dict[tuple[str, Config], Candidate] = {}
        lists = [
            [
                f.resized(config, self.problem, self.target)
                for config in (f.default(self.spec, self.target), *f.starts(self.spec, self.target))
            ]
            for f in self.families.values()
        ]
        # Round robin over the families, so that a few trials already see all of them.
        for place in range(max(map(len, lists))):
            for family, configs in zip(self.families.values(), lists, strict=True):
                if place < len(configs):
                    found.setdefault((family.name, configs[place]), Candidate(family=family, config=configs[place]))
        return list(found.values())

    def every(self) -> Iterator[Candidate]:
        """All candidates that break no constraint, in a fixed order."""
        for family in self.families.values():
            for config in family.configs(self.spec, self.target):
                if family.resized(config, self.problem, self.target) == config:
                    yield Candidate(family=family, config=config)


def transfer_candidates(space: SearchSpace, problem: Problem, records: Iterable[TuningRecord], source: Source) -> list[Candidate]:
    """Winners of the records that are nearest to `problem`, the nearest first, each once.

    A config that breaks a constraint of this problem is moved to the nearest that breaks none, one of an earlier version becomes its
    successor, and axes that follow from sizes are set for this problem's. Records of families that don't serve it, or whose config no
    version of the family declares, are left out; so are predictions for a search that measures.
    """
    found: dict[tuple[str, str], Candidate] = {}
    useful = (record for record in records if source == "predicted" or record.outcome.source == "measured")
    for _, record in nearest(problem.key(space.target.slug), useful):
        candidate = _refitted(space, record)
        if candidate is not None:
            config = candidate.family.successor(candidate.config)
            candidate = replace(candidate, config=candidate.family.resized(config, problem, space.target))
            found.setdefault((candidate.family.name, candidate.config.as_json()), candidate)
        if len(found) == NEIGHBOURS:
            break
    return list(found.values())


def stored(space: SearchSpace, problem: Problem, records: Iterable[TuningRecord]) -> Candidate | None:
    """Config of the measured record of exactly this problem's key, as it was raced, where it keeps the constraints; the first of several
    counts."""
    key = problem.key(space.target.slug)
    measured = next((record for record in records if record.key == key and record.outcome.source == "measured"), None)
    if measured is None:
        return None
    family = space.families.get(measured.outcome.template)
    candidate = _refitted(space, measured)
    same = family is not None and candidate is not None and candidate.config == family.completed(measured.outcome.config)
    return candidate if same else None


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
    )


def _refitted(space: SearchSpace, record: TuningRecord) -> Candidate | None:
    family = space.families.get(record.outcome.template)
    if family is None:
        return None
    config = family.completed(record.outcome.config)
    try:
        family.validate(config)
    except InputError:
        return None
    moved = family.refitted(config, space.spec, space.target)
    return None if moved is None else Candidate(family=family, config=moved)
