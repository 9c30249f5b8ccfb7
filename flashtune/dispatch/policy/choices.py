"""Which kernel serves a problem: a pure function of the problem, the GPU and the records; no tensors, no I/O, no clock."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flashtune.core.config import Config, KernelSpec, settles
from flashtune.core.errors import InputError
from flashtune.core.problem import Problem, ProblemKey
from flashtune.core.results import Fate, Source, TuningRecord
from flashtune.core.target import Target
from flashtune.dispatch.policy import losses
from flashtune.dispatch.policy.losses import Estimate, torch_runs_alike
from flashtune.dispatch.policy.pool import Pool
from flashtune.templates.family import Family

Kind = Literal["exact", "near_n", "stand_in", "near_gpu", "predicted", "default", "framework"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to serve a problem: a family with a config, or the framework (no family). `note` says in a sentence why.

    Where the record is of another key, `differences` are what differs, and `estimate` what that is thought to lose. `twin` is the config
    that serves in the place of one that settles row maxima while scores mislead that, where the record's run measured such a one.
    """

    kind: Kind
    spec: KernelSpec
    note: str
    record: TuningRecord | None = None
    family: Family | None = None
    config: Config | None = None
    differences: tuple[str, ...] = ()
    estimate: Estimate | None = None
    twin: Config | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A record or family that can't serve. `invalid` marks a row that no flashtune would have written for this GPU."""

    reason: str
    invalid: bool = False
    record: TuningRecord | None = None


def choose(
    problem: Problem, target: Target, records: Sequence[TuningRecord] | Pool, families: Mapping[str, Family], **words: bool
) -> Choice:
    """The best choice that `rank` finds, which takes the same; the framework where nothing else serves."""
    return next(choice for choice in rank(problem, target, records, families, **words) if isinstance(choice, Choice))


def rank(
    problem: Problem,
    target: Target,
    records: Sequence[TuningRecord] | Pool,
    families: Mapping[str, Family],
    *,
    framework_serves: bool = True,
    unmeasured: bool = False,
) -> Iterator[Choice | Refusal]:
    """Every way to serve `problem` on `target`, best first, with the refused ones where they would have stood.

    The order of fallbacks, the only one there is:

    1. `exact`: a measured record of exactly this key;
    2. a measured record of another key of the architecture, the nearest first: `near_n` where only the sizes N_kv, N_q and batch * heads
       differ, `near_gpu` where the GPU does and perhaps these, `stand_in` where the head size, the heads to a key head, the features or
       the 16-bit type do;
    3. `predicted`: the same two steps over records that a cost model ranked;
    4. `default`: the default config of each family that supports the problem and suits its sizes, in the families' order;
    5. `framework`: torch's own attention.

    Steps 3 and 4 hold kernels behind which nothing was measured on this architecture. They serve where the framework can't
    (`framework_serves` says whether torch has the features), and elsewhere only if `unmeasured` allows it.

    Near is `flashtune.core.nearness.distance`, with head sizes as kernels pad them and another GPU as far as two octaves of N; ties go to
    the same alignment, then among records of one key to the preferred one (flashtune.db.ranking), then to records of the user over
    shipped ones, the larger sizes, the shorter time and the lower variant id, so that equal libraries choose equally everywhere. Between
    a decoding step and more rows, between passes, and between element types of other sizes nothing is near.

    A record that says that the framework was faster makes it the choice, provided that `framework_serves`. For its own key a record says
    so by its whole calls where they were measured, host included; for another by `losses.expected_ratio`, and of a decoding step far from
    its keys only if the record says so, too, that is near in these (`Pool.near_in_keys`). A record is never served when
    its config, completed by axes that came later, is outside the family's declared space or breaks a constraint on this target; the next
    one may serve. In another kernel's place a config is first moved to the nearest one that keeps the constraints (`Family.refitted`).
    Which sizes suit a family is a rule of thumb, which gives way to measurements: step 1 doesn't ask for it. A record of any other step
    is served only where the problem's sizes suit its family, and stands in for other sizes only where every family that suits these was
    tried at its own: one that never was may be far better here.
    """
    spec, key = problem.spec(), problem.key(target.slug)
    computing = [family for family in families.values() if family.direction == problem.direction]
    suited = [family for family in computing if (family.supports(spec, target) or family.suits(problem, target)) is None]
    pool = records if isinstance(records, Pool) else Pool(key, target, records, families)
    context = _Context(problem=problem, target=target, key=key, pool=pool, families=families, framework_serves=framework_serves)
    names = frozenset(family.name for family in suited)
    yield from _steps(context, names, "measured")
    if unmeasured or not framework_serves:
        yield from _steps(context, names, "predicted")
        yield from (_from_default(family, problem, target) for family in computing)
    elif suited:
        why = f"nothing that was measured on GPUs like {target.name} stands behind a kernel for this problem"
        note = f"{why}, so torch's own attention serves (FLASHTUNE_UNMEASURED=1 lets {suited[0].name} serve)"
        yield Choice(kind="framework", spec=spec, note=note)
        return
    else:
        yield from (_from_default(family, problem, target) for family in computing)
    yield Choice(kind="framework", spec=spec, note="no template serves this problem here, torch's own attention does")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    problem: Problem
    target: Target
    key: ProblemKey
    pool: Pool
    families: Mapping[str, Family]
    framework_serves: bool


def _steps(context: _Context, suited: frozenset[str], source: Source) -> Iterator[Choice | Refusal]:
    """Records of the key itself first, then the others."""
    for record in context.pool.exact(context.key, suited):
        if record.outcome.source == source:
            yield _from_record(record, context)
    for record in context.pool.near(context.problem, context.key, suited):
        if record.outcome.source == source:
            yield _from_record(record, context)


def _from_record(record: TuningRecord, context: _Context) -> Choice | Refusal:
    problem, target, key = context.problem, context.target, context.key
    spec, outcome = problem.spec(), record.outcome
    family = context.families.get(outcome.template)
    if family is None:
        return Refusal(reason=f"there is no template {outcome.template!r} here", record=record)
    time_us = outcome.measurement.median_us if outcome.measurement is not None else math.nan
    if not outcome.fate.timed or not 0.0 < time_us < math.inf:
        return Refusal(reason=f"its fate is {outcome.fate} with a time of {time_us} us", invalid=True, record=record)
    config = family.completed(outcome.config)
    try:
        family.validate(config)
    except InputError as error:
        return Refusal(reason=str(error), invalid=True, record=record)
    exact = record.key == key
    if not (exact and outcome.source == "measured") and (why := family.suits(problem, target)) is not None:
        return Refusal(reason=why, record=record)
    note = _note(record, key)
    if (own := record.problem.spec()) != spec:
        if (why := family.supports(spec, target) or (family.unfit(config, own, target) if record.key.gpu == key.gpu else None)) is not None:
            return Refusal(reason=why, record=record)
        moved = context.pool.refitted(family, config, spec)
        if moved is None:
            return Refusal(reason=f"no config of {family.name} keeps the constraints here", record=record)
        changed = [f"{name} {config[name]} to {moved[name]}" for name in config if config[name] != moved[name]]
        note += f", with {', '.join(changed)} to keep the constraints" if changed else ""
        config = moved
    elif (why := family.unfit(config, spec, target)) is not None:
        return Refusal(reason=why, invalid=record.key.gpu == key.gpu, record=record)
    if exact:
        return _exact(record, context, family, config, note)
    differing, loss = losses.differences(record, key), losses.estimate(record.key, key)
    kind: Kind = "near_gpu" if record.key.gpu != key.gpu else "near_n"
    if own != spec or record.key.gqa_ratio != key.gqa_ratio or not losses.same_features(record.key, key):
        kind = "stand_in"
    if outcome.source == "predicted":
        kind = "predicted"
    note = f"{note}; {loss.label()}"
    if not losses.same_features(record.key, key):
        note += "; what the features that differ cost is in none of these times"
    ratio = losses.expected_ratio(record, key, loss) if torch_runs_alike(record.problem, problem) else None
    if ratio is not None and ratio > 1.0 and losses.far_in_keys(record.key, key):
        # What torch gained so far off it needn't gain here.
        telling = context.pool.near_in_keys(problem, key)
        if telling is not None:
            ratio = losses.expected_ratio(telling, key, loss)
            note += f"; what torch takes is told by a row of {telling.key.n} keys, d={telling.key.d}"
    if ratio is not None and ratio > 1.0 and context.framework_serves:
        note += f"; by that the framework would take {1 / ratio:.2f} times as long, so it serves"
        return Choice(kind="framework", spec=spec, note=note, record=record, differences=differing, estimate=loss)
    twin = _twin(record, context, family, config)
    return Choice(
        kind=kind, spec=spec, note=note, record=record, family=family, config=config, differences=differing, estimate=loss, twin=twin
    )


def _twin(record: TuningRecord, context: _Context, family: Family, config: Config) -> Config | None:
    """The config of a record's twin, where `config` settles row maxima, moved like that where it has to be; None where it can't serve."""
    if record.twin is None or record.twin.template != family.name or not settles(config):
        return None
    twin, spec = family.completed(record.twin.config), context.problem.spec()
    try:
        family.validate(twin)
    except InputError:
        return None
    moved = context.pool.refitted(family, twin, spec)
    return moved if moved is not None and not settles(moved) else None


def _exact(record: TuningRecord, context: _Context, family: Family, config: Config, note: str) -> Choice:
    """The choice by a record of this very key."""
    spec, relative = context.problem.spec(), record.relative_time
    if relative is not None and relative > 1.0 and context.framework_serves:
        calls = (record.outcome.call_us, record.framework_call_us)
        if None in calls:
            note = f"{note}, and there the framework was faster: {record.framework_us:.1f} us"
        else:
            note = f"{note}, and there whole calls of the framework were faster: {calls[1]:.1f} us, and ours {calls[0]:.1f} us"
        return Choice(kind="framework", spec=spec, note=note, record=record)
    kind: Kind = "exact" if record.outcome.source == "measured" else "predicted"
    twin = _twin(record, context, family, config)
    return Choice(kind=kind, spec=spec, note=note, record=record, family=family, config=config, twin=twin)


def _from_default(family: Family, problem: Problem, target: Target) -> Choice | Refusal:
    spec = problem.spec()
    if (why := family.supports(spec, target) or family.suits(problem, target)) is not None:
        return Refusal(reason=f"{family.name}: {why}")
    config = family.default(spec, target)
    if (broken := family.violated(config, spec, target)) is not None:
        return Refusal(reason=f"the default of {family.name} breaks {broken.name}: {broken.why}")
    note = f"no record stands for this problem, so the default config of {family.name} serves it, which nothing was measured of"
    return Choice(kind="default", spec=spec, note=note, family=family, config=config)


def _note(record: TuningRecord, key: ProblemKey) -> str:
    other = record.key
    verb = "measured" if record.outcome.source == "measured" else "predicted, not measured,"
    if record.outcome.fate is Fate.UNCHECKED:
        verb = "predicted, neither measured nor checked,"
    if other == key:
        place = f"for exactly this problem on {other.gpu}"
    else:
        differing = ", ".join(losses.differences(record, key)) or "the same sizes"
        place = f"on {other.gpu}" + (f" in place of {key.gpu}" if other.gpu != key.gpu else "") + f", the nearest there is ({differing})"
    return f"{verb} {place}: {record.median_us:.1f} us"
