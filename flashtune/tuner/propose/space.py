"""Search space of one problem: the families that can serve it, and candidates as (family, config)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashtune.core.config import Config, KernelSpec, Variant
from flashtune.core.errors import InputError
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.family import Family
from flashtune.templates.rendering import variant_of


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
