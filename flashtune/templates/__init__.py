"""Template families: Jinja text beside its search space."""

import functools

from flashtune.core.gpu.target import targets
from flashtune.core.problems.config import KernelSpec
from flashtune.core.problems.problem import Problem, wide_heads
from flashtune.core.records.results import PROVIDERS, Bits, TuningRecord
from flashtune.core.system.errors import InputError
from flashtune.templates.family import Family
from flashtune.templates.mods.known import known


def families() -> dict[str, Family]:
    """Every family of keys in rows by name, in order of preference without tuned records."""
    return {family.name: family for family in _found()}


def every_family() -> dict[str, Family]:
    """Every family by name: those of keys in rows, then those of pages."""
    return families() | families_of_pages()


@functools.cache
def families_of_pages() -> dict[str, Family]:
    """Every family of keys in pages by name, in order of preference."""
    from flashtune.templates.hopper import flash_fwd_hopper_paged
    from flashtune.templates.paged import flash_paged

    return {one.name: one for one in (flash_fwd_hopper_paged.FAMILY, flash_paged.FAMILY)}


def families_for(problem: Problem) -> dict[str, Family]:
    """The families of a problem's kind of keys, in rows or in pages."""
    return families_of_pages() if problem.features.page else families()


@functools.cache
def _found() -> tuple[Family, ...]:
    from flashtune.templates.backward import flash_bwd
    from flashtune.templates.backward.hopper import flash_bwd_hopper, flash_bwd_hopper_split, flash_bwd_hopper_wide
    from flashtune.templates.decode import flash_decode
    from flashtune.templates.forward import flash_fwd
    from flashtune.templates.hopper import flash_fwd_hopper, flash_fwd_hopper_wide

    # Wide heads without a record are flash_fwd_hopper_wide's by its place before flash_fwd.
    forward = flash_decode.FAMILY, flash_fwd_hopper.FAMILY, flash_fwd_hopper_wide.FAMILY, flash_fwd.FAMILY
    return *forward, flash_bwd_hopper.FAMILY, flash_bwd_hopper_split.FAMILY, flash_bwd_hopper_wide.FAMILY, flash_bwd.FAMILY


def family(name: str) -> Family:
    """The family `name`; raises InputError for one that this version doesn't have."""
    found = families().get(name)
    # Few need to import those of pages.
    if found is None and (found := families_of_pages().get(name)) is None:
        raise InputError(f"unknown template {name!r}: this flashtune has {', '.join(every_family())}")
    return found


def repeats(record: TuningRecord) -> bool:
    """True if the family of a record's kernel guarantees equal bits at every launch; False for unknown families."""
    found = every_family().get(record.outcome.template)
    return found is not None and found.repeatable


def may_vary(record: TuningRecord) -> bool:
    """True if a family whose bits vary may serve a record's problem on its GPU, so that dispatch prefers records without that restriction
    (flashtune.dispatch.policy.records.Pool.exact)."""
    problem, target = record.problem, targets().get(record.key.gpu)
    varying = [family for family in _found() if family.direction == problem.direction and not family.repeatable]
    return target is not None and any(family.refusal(problem, problem.spec(), target) is None for family in varying)


BITS = Bits(repeats=repeats, may_vary=may_vary)
"""The predicates of these families."""


def unservable(record: TuningRecord) -> str | None:
    """The reason why a record doesn't serve on its own GPU: this version's templates can't serve it, or its kernel failed there since; None
    where it does. Of an unknown GPU only the config is checked. Other providers serve heads that are larger than kernels take."""
    if record.refuted:
        return record.refuted
    target = targets().get(record.key.gpu)
    if record.outcome.template in PROVIDERS:
        wide = wide_heads(record.problem.d, record.problem.d_v)
        return None if wide else f"its run had no kernel, and {record.outcome.template} runs its calls"
    try:
        chosen = family(record.outcome.template)
        chosen.validate(record.outcome.config)
    except InputError as error:
        return str(error)
    if (why := chosen.reads(record.problem)) is not None:
        return why
    spec = record.problem.spec()
    # Functions of other processes are as good as any, but their kernels can't be looked at here.
    return None if target is None or not written_here(spec) else chosen.unfit(record.outcome.config, spec, target)


def without_kernel(record: TuningRecord) -> str | None:
    """The same for files of kernels, which have no use for a record of another provider."""
    provider = record.outcome.template if record.outcome.template in PROVIDERS else ""
    return f"{provider} runs its calls, and there is no kernel of it" if provider else unservable(record)


def written_here(spec: KernelSpec) -> bool:
    """True if this process can write a spec's kernels: without functions, or with its own."""
    return not spec.mods or spec.mods in known()
