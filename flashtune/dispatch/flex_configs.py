"""Configs of kernels with a mask and a score as code: of a record of these functions, else of the most similar built-in feature."""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from flashtune.core.config import Config, Direction, KernelSpec
from flashtune.core.problem import Features, Problem, ProblemKey
from flashtune.core.results import TuningRecord
from flashtune.core.target import Target
from flashtune.dispatch.choose import Choice, Kind, Pool, choose
from flashtune.dispatch.context import Memo, current
from flashtune.dispatch.records import valid_config
from flashtune.templates import family
from flashtune.templates.family import Family
from flashtune.templates.mods import known

FAMILIES: dict[Direction, tuple[str, ...]] = {"fwd": ("flash_fwd_hopper", "flash_fwd"), "bwd": ("flash_bwd_hopper", "flash_bwd")}
"""Families with places for functions, the fastest first."""

TYPICAL = 4096
"""Queries and keys of the problem whose record gives the config."""

BUILT_FOR_IT = ("flash_fwd_hopper", "flash_bwd_hopper")
"""Families that serve though unmeasured: they are made for one architecture, with the matrix products of `attention`'s kernels there."""

UNMEASURED = "kernels with these functions weren't measured on this GPU (FLASHTUNE_UNMEASURED=1 allows them)"
"""The reason why PyTorch serves what kernels could: no measurement says that they are faster."""


class Recorded(NamedTuple):
    """A record of the functions of a call, with its config as it serves there."""

    record: TuningRecord
    kind: Family
    config: Config


def choices(
    spec: KernelSpec, own: Recorded | None, *, unmeasured: bool, repeatable: bool = False
) -> Iterator[tuple[Family, Recorded | None]]:
    """Families in the order in which they serve a pass: first that of the functions' `own` record, with the record, then those that serve
    without one. Plain pointers do only if `unmeasured` kernels may (else UNMEASURED), and `repeatable` leaves out bits that vary."""
    if own is not None and (own.kind.repeatable or not repeatable):
        yield own.kind, own
    for kind in map(family, FAMILIES[spec.direction]):
        if (unmeasured or kind.name in BUILT_FOR_IT) and (kind.repeatable or not repeatable):
            yield kind, None


def refusal(kind: Family, spec: KernelSpec, target: Target) -> str | None:
    """The reason why a family has no config for functions without a record; None where it has one."""
    if (why := kind.supports(spec, target)) is not None:
        return why
    if not kind.starts(spec, target):
        return f"no config of {kind.name} fits into {target.name} at the head sizes {spec.d} and {spec.d_v}"
    return None


def recorded(problem: Problem, target: Target, pool: Pool, *, unmeasured: bool) -> Recorded | None:
    """The record of a problem's functions on this GPU, of its head sizes and element type, whose lengths are nearest.

    Measured ones come first, and are the only ones unless `unmeasured` ones may serve. Records whose config breaks a constraint, and
    kernels that failed since, are passed over.
    """
    spec, key, every = problem.spec(), problem.key(target.slug), frozenset[str]()
    predicted = (one for one in chain(pool.exact(key, every), pool.near(key, every)) if one.outcome.source == "predicted")
    for record in chain(pool.near_or_exact(key), predicted if unmeasured else ()):
        name, theirs = record.outcome.template, record.problem.spec()
        if record.key.gpu != target.slug or theirs != spec or name not in FAMILIES[spec.direction]:
            continue
        kind = family(name)
        if (config := valid_config(kind, record.outcome)) is None:
            continue
        config = config if record.key == key else kind.resized(config, problem, target)
        if kind.unfit(config, spec, target) is None and not pool.refutation(kind, config, spec, record):
            return Recorded(record, kind, config)
    return None


def recorded_with(problem: Problem, device: torch.device) -> Recorded | None:
    """The record for a call of a problem's functions, looked up once."""
    memo = current()
    found, place = _RECORDS.setdefault(memo, {}), (problem, device)
    if place not in found:
        with memo.lock:
            target, _, records = memo.surroundings(device, problem)
        if len(found) >= MOST_LOOKUPS:
            found.clear()
        found[place] = recorded(problem, target, records, unmeasured=memo.unmeasured) if isinstance(records, Pool) else None
    return found[place]


_RECORDS: "weakref.WeakKeyDictionary[Memo, dict[Hashable, Recorded | None]]" = weakref.WeakKeyDictionary()
MOST_LOOKUPS = 1024
"""Most signatures of calls with a look-up of their record at hand."""


def config_without_record(
    kind: Family, spec: KernelSpec, target: Target, records_of: Callable[[Problem], Pool | Sequence[TuningRecord]]
) -> tuple[Config, str]:
    """The config for functions without a record: that of the nearest record of this family with a bias or a mask at TYPICAL queries and
    keys, or the family's default; and why.

    The sizes of the call don't count, so that one kernel serves every length. Hopper's kernels have no registers to spare: of their configs
    the default is known to leave enough for functions.
    """
    if not kind.interpretable:
        return kind.default(spec, target), "the family's default"
    problem = known.alike(problem_with_functions(spec, batch=1, heads=16, kv_heads=16, n_q=TYPICAL, n_kv=TYPICAL))
    choice = choose(problem, target, records_of(problem), {kind.name: kind}, framework_serves=False, unmeasured=True)
    if choice.record is None or choice.config is None or kind.unfit(choice.config, spec, target) is not None:
        return kind.default(spec, target), "the family's default"
    if choice.record.problem.n_kv < TYPICAL // 4:
        return kind.default(spec, target), "the family's default"
    return choice.config, origin_of(choice.record)


def origin_of(record: TuningRecord) -> str:
    """Words for the record that a config is from."""
    return f"of the record {record.problem.label()}"


def source_note(record: TuningRecord | None) -> str:
    """Words for the source and the time of a record of functions, if there is one."""
    if record is None:
        return "not measured"
    measured = "measured" if record.outcome.source == "measured" else "predicted, not measured,"
    return f"{measured} with these functions: {record.median_us:.1f} us"


def choice_of(problem: Problem, target: Target, memo: Memo) -> Choice:
    """The choice for one pass of a call with functions: their record, the config without one, or PyTorch."""
    spec, key = problem.spec(), problem.key(target.slug)
    found = recorded(problem, target, memo.pool(key, target), unmeasured=memo.unmeasured)
    # The alternative of packed sequences is a call for each.
    unmeasured = memo.unmeasured or spec.packed
    for kind, own in choices(spec, found, unmeasured=unmeasured):
        if own is not None:
            return _of_record(own, spec, key)
        if refusal(kind, spec, target) is None:
            config, origin = config_without_record(kind, spec, target, lambda one: memo.pool(one.key(target.slug), target))
            note = f"no record is of these functions, so {kind.name} serves unmeasured ({origin})"
            return Choice(kind="default", spec=spec, note=note, family=kind, config=config)
    why = "no template serves these functions here" if unmeasured else UNMEASURED
    return Choice(kind="framework", spec=spec, note=f"{why}, so PyTorch's flex_attention serves")


def _of_record(own: Recorded, spec: KernelSpec, key: ProblemKey) -> Choice:
    """The choice by the record of a key's functions."""
    record, note = own.record, f"the config {origin_of(own.record)}, {source_note(own.record)}"
    if record.relative_time is not None and record.relative_time > 1 and not spec.packed:
        note += f", and there PyTorch was faster: {record.framework_us:.1f} us"
        return Choice(kind="framework", spec=spec, note=note, record=record)
    return Choice(kind=kind_of(record, key), spec=spec, note=note, record=record, family=own.kind, config=own.config)


def kind_of(record: TuningRecord, key: ProblemKey | None) -> Kind:
    """The kind of a choice by a record of the functions of a key."""
    return "predicted" if record.outcome.source == "predicted" else "exact" if record.key == key else "near_n"


def problem_with_functions(spec: KernelSpec, *, batch: int, heads: int, kv_heads: int, n_q: int, n_kv: int) -> Problem:
    """The problem of a kernel with functions at these sizes."""
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        n_q=n_q,
        n_kv=n_kv,
        d=spec.d,
        d_v=spec.d_v,
        dtype=spec.dtype,
        features=Features(mods=spec.mods, tf32=spec.tf32),
        direction=spec.direction,
    )
