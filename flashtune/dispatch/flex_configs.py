"""Configs of kernels with a mask and a score as code: of a record of these functions, else of the most similar built-in feature."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from flashtune.core.config import Config, Direction, KernelSpec
from flashtune.core.problem import MAX_HEAD_DIM, Features, Problem
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


class Recorded(NamedTuple):
    """A record of the functions of a call, with its config as it serves there."""

    record: TuningRecord
    kind: Family
    config: Config


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
        if (config := valid_config(kind, record)) is None:
            continue
        config = config if record.key == key else kind.resized(config, problem, target)
        if kind.unfit(config, spec, target) is None and not pool.refutation(kind, config, spec, record):
            return Recorded(record, kind, config)
    return None


def recorded_with(spec: KernelSpec, query: Tensor, key: Tensor) -> Recorded | None:
    """The record for a call of these functions, looked up once for its sizes; none for the interpreter, whose times mean nothing."""
    if query.device.type != "cuda" or max(spec.d, spec.d_v) > MAX_HEAD_DIM:
        return None
    memo = current()
    found, place = _RECORDS.setdefault(memo, {}), (spec, query.device, query.shape, key.shape[1:3])
    if place not in found:
        batch, heads, n_q, _ = query.shape
        problem = problem_of(spec, batch=batch, heads=heads, kv_heads=key.shape[1], n_q=n_q, n_kv=key.shape[2])
        with memo.lock:
            target, _, records = memo.surroundings(query.device, problem)
        if len(found) >= MOST_RECORDS:
            found.clear()
        found[place] = recorded(problem, target, records, unmeasured=memo.unmeasured) if isinstance(records, Pool) else None
    return found[place]


_RECORDS: "weakref.WeakKeyDictionary[Memo, dict[Hashable, Recorded | None]]" = weakref.WeakKeyDictionary()
MOST_RECORDS = 1024
"""Most signatures of calls with a look-up of their record at hand."""


def usual(
    kind: Family, spec: KernelSpec, target: Target, records_of: Callable[[Problem], Pool | Sequence[TuningRecord]]
) -> tuple[Config, str]:
    """The config for functions without a record: that of the nearest record of this family with a bias or a mask at TYPICAL queries and
    keys, or the family's default; and why.

    The sizes of the call don't count, so that one kernel serves every length. Hopper's kernels have no registers to spare: of their configs
    the default is known to leave enough for functions.
    """
    if not kind.interpretable:
        return kind.default(spec, target), "the family's default"
    problem = known.alike(problem_of(spec, batch=1, heads=16, kv_heads=16, n_q=TYPICAL, n_kv=TYPICAL))
    choice = choose(problem, target, records_of(problem), {kind.name: kind}, framework_serves=False, unmeasured=True)
    if choice.record is None or choice.config is None or kind.unfit(choice.config, spec, target) is not None:
        return kind.default(spec, target), "the family's default"
    if choice.record.problem.n_kv < TYPICAL // 4:
        return kind.default(spec, target), "the family's default"
    return choice.config, f"of the record {choice.record.problem.label()}"


def source_note(record: TuningRecord) -> str:
    """Words for the source of a record of functions."""
    return "measured with these functions" if record.outcome.source == "measured" else "predicted, not measured, with these functions"


def choice_of(problem: Problem, target: Target, memo: Memo) -> Choice:
    """The choice for one pass of a call with functions: their record, the config without one, or PyTorch."""
    spec, key = problem.spec(), problem.key(target.slug)
    found = recorded(problem, target, memo.pool(key, target), unmeasured=memo.unmeasured)
    if found is not None:
        record = found.record
        note = f"{source_note(record)}, {record.problem.label()}: {record.median_us:.1f} us"
        if record.relative_time is not None and record.relative_time > 1:
            note += f", and there PyTorch was faster: {record.framework_us:.1f} us"
            return Choice(kind="framework", spec=spec, note=note, record=record)
        kind: Kind = "predicted" if record.outcome.source == "predicted" else "exact" if record.key == key else "near_n"
        return Choice(kind=kind, spec=spec, note=note, record=record, family=found.kind, config=found.config)
    why = "no template serves these functions here"
    for name in FAMILIES[problem.direction]:
        chosen = family(name)
        if chosen.supports(spec, target) is not None or not chosen.starts(spec, target):
            continue
        if name not in BUILT_FOR_IT and not memo.unmeasured:
            why = f"{name} wasn't measured with these functions on {target.name} (FLASHTUNE_UNMEASURED=1 lets it serve)"
            continue
        config, origin = usual(chosen, spec, target, lambda one: memo.pool(one.key(target.slug), target))
        note = f"no record is of these functions, so {name} serves unmeasured ({origin})"
        return Choice(kind="default", spec=spec, note=note, family=chosen, config=config)
    return Choice(kind="framework", spec=spec, note=f"{why}, so PyTorch's flex_attention serves")


def problem_of(spec: KernelSpec, *, batch: int, heads: int, kv_heads: int, n_q: int, n_kv: int) -> Problem:
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
