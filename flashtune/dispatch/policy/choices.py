"""Choices: records, and families' defaults, as ways to serve a problem. Pure functions."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from flashtune.core.config import Config, KernelSpec, settles
from flashtune.core.errors import InputError
from flashtune.core.problem import DECODE_ROWS, Problem, ProblemKey
from flashtune.core.results import Fate, TuningRecord
from flashtune.core.target import Target, targets
from flashtune.dispatch.policy import losses
from flashtune.dispatch.policy.losses import Estimate, calls_tie, torch_runs_alike
from flashtune.dispatch.policy.pool import Pool
from flashtune.templates.family import Family

Kind = Literal["exact", "near_n", "stand_in", "near_gpu", "predicted", "default", "framework"]


class Choice(NamedTuple):
    """One way to serve a problem: a family with a config, or PyTorch (no family). `note` is the reason in a sentence.

    Where the record is of another key, `differences` lists the differences, and `estimate` their estimated loss. `fallback` is that of
    the fallback kernel for mispredicted softmax, where `config` has a frozen row max and the record's search measured one. `behind` is the
    logarithm of the cost model's expected time over the best of those compared; None where it wasn't evaluated.
    """

    kind: Kind
    spec: KernelSpec
    note: str
    record: TuningRecord | None = None
    family: Family | None = None
    config: Config | None = None
    differences: tuple[str, ...] = ()
    estimate: Estimate | None = None
    fallback: Config | None = None
    behind: float | None = None


class Refusal(NamedTuple):
    """Record or family that can't serve. `invalid` marks a record that no version of flashtune would have written for this GPU."""

    reason: str
    invalid: bool = False
    record: TuningRecord | None = None


MOST_LOOKED = 300_000
"""Changes of other kernels' configs evaluated per choice (about half a second), after which records that need such changes are skipped."""


class Work:
    """Changes of configs evaluated by one choice: the same in every process, whatever earlier choices have cached in the pool."""

    __slots__ = ("_moved", "looked")

    def __init__(self) -> None:
        self.looked = 0
        self._moved: dict[tuple[str, Config], Config | str] = {}

    def moved(self, family: Family, config: Config, spec: KernelSpec, pool: Pool) -> Config | str:
        """Config of another kernel, moved to satisfy the constraints of this one, or the reason why there is none."""
        known = (family.name, config)
        if known not in self._moved:
            if self.looked > MOST_LOOKED:
                return "too many configs of nearer records can't satisfy the constraints here, so that it isn't tried"
            found = pool.refit(family, config, spec)
            self.looked += found.looked
            self._moved[known] = found.config or f"no config of {family.name} keeps the constraints here"
        return self._moved[known]


class Context(NamedTuple):
    """Problem to be served, with its target, key, records and families."""

    problem: Problem
    target: Target
    key: ProblemKey
    pool: Pool
    families: Mapping[str, Family]
    framework_serves: bool
    work: Work


class Fit(NamedTuple):
    """Record that may serve, with its config adapted to the problem.

    `own` is True for a record of this kernel. `changed` names axes that were moved to keep the constraints of another kernel, `resized`
    those that follow from the sizes.
    """

    record: TuningRecord
    family: Family
    config: Config
    own: bool
    changed: str = ""
    resized: str = ""


class Preferred(NamedTuple):
    """Reason for a record that precedes the nearest one (`nearest`): the logarithm of the gain that the cost model expects."""

    nearest: TuningRecord
    gain: float


def fit_of(record: TuningRecord, context: Context) -> Fit | Refusal:
    """Record as it would serve, or the reason why it can't."""
    problem, target, key = context.problem, context.target, context.key
    family = context.families.get(record.outcome.template)
    if family is None:
        return Refusal(reason=f"there is no template {record.outcome.template!r} here", record=record)
    found = context.pool.cached(record, problem.spec(), lambda: _configured(record, family, context))
    if isinstance(found, Refusal):
        return found
    if not found.own:
        if isinstance(moved := context.work.moved(family, found.config, problem.spec(), context.pool), str):
            return Refusal(reason=moved, record=record)
        found = found._replace(config=moved, changed=_changes(found.config, moved))
    if _is_own(record, key):
        return found
    if (why := found.family.suits(problem, target)) is not None:
        return Refusal(reason=why, record=record)
    config = found.family.resized(found.config, problem, target)
    return found if config == found.config else found._replace(config=config, resized=_changes(found.config, config))


def _configured(record: TuningRecord, family: Family, context: Context) -> Fit | Refusal:
    """Record with its own config, or the reason why it can't serve at any sizes."""
    target, key = context.target, context.key
    spec, outcome = context.problem.spec(), record.outcome
    time_us = outcome.measurement.median_us if outcome.measurement is not None else math.nan
    if not outcome.fate.timed or not 0.0 < time_us < math.inf:
        return Refusal(reason=f"its fate is {outcome.fate} with a time of {time_us} us", invalid=True, record=record)
    config = family.completed(outcome.config)
    try:
        family.validate(config)
    except InputError as error:
        return Refusal(reason=str(error), invalid=True, record=record)
    own = record.problem.spec()
    if (own, record.key.gpu) != (spec, key.gpu) and (why := family.unfit(config, own, targets().get(record.key.gpu, target))) is not None:
        return Refusal(reason=why, invalid=True, record=record)
    if own != spec:
        if (why := family.supports(spec, target)) is not None:
            return Refusal(reason=why, record=record)
    elif (why := family.unfit(config, spec, target)) is not None:
        return Refusal(reason=why, invalid=record.key.gpu == key.gpu, record=record)
    return Fit(record=record, family=family, config=config, own=own == spec)


def _is_own(record: TuningRecord, key: ProblemKey) -> bool:
    """True for a record that was measured at exactly the call's key, which serves unchanged."""
    return record.key == key and record.outcome.source == "measured"


def _changes(config: Config, moved: Config) -> str:
    """Changed axes of a moved config, for notes."""
    return ", ".join(f"{name} {config[name]} to {moved[name]}" for name in config if config[name] != moved[name])


def near_choice(fit: Fit, context: Context, *, preferred: Preferred | None = None, behind: float | None = None) -> Choice:
    """Choice by a record of another key: its kernel, or PyTorch where that is expected to be faster."""
    problem, key, record = context.problem, context.key, fit.record
    note = _note(fit, context.key)
    differing, loss = losses.differences(record, key), losses.estimate(record.key, key)
    kind: Kind = "near_gpu" if record.key.gpu != key.gpu else "near_n"
    if record.problem.spec() != problem.spec() or record.key.gqa_ratio != key.gqa_ratio or not losses.same_features(record.key, key):
        kind = "stand_in"
    if record.outcome.source == "predicted":
        kind = "predicted"
    ratio = _ratio(record, context, loss)
    if preferred is not None:
        # A config expected to beat the nearest record's loses no more than it, and its ratio to PyTorch follows from that record.
        nearest = losses.estimate(preferred.nearest.key, key)
        loss = min(loss, nearest, key=lambda one: one.median)
        note += f", preferred to {preferred.nearest.problem.label()}, which the cost model expects to take longer"
        near = _ratio(preferred.nearest, context, nearest)
        if near is not None:
            ratio = (near[0] * math.exp(-preferred.gain), near[1])
    if kind == "predicted":
        note += "; nothing was measured: its own time is the cost model's"
    if not losses.same_features(record.key, key):
        note += "; these times don't include the cost of features that differ"
    if ratio is not None:
        note += ratio[1]
        if ratio[0] > 1.0 and context.framework_serves:
            note += "; by its record and the cost model PyTorch is expected to take less time, so it serves"
            spec = problem.spec()
            return Choice(kind="framework", spec=spec, note=note, record=record, differences=differing, estimate=loss)
    return Choice(
        kind=kind,
        spec=problem.spec(),
        note=note,
        record=record,
        family=fit.family,
        config=fit.config,
        differences=differing,
        estimate=loss,
        fallback=_fallback(record, context, fit.family, fit.config),
        behind=behind,
    )


def _ratio(record: TuningRecord, context: Context, loss: Estimate) -> tuple[float, str] | None:
    """Expected time of ours over PyTorch's by a record of another key, and a remark for the note; None where no record informs."""
    if not torch_runs_alike(record.problem, context.problem):
        return None
    ratio = losses.expected_ratio(record, context.key, loss)
    if ratio is None:
        return None
    key, step, slower = context.key, context.key.n_q <= DECODE_ROWS, _torch_slower(record, context)
    ratio, remark = ratio * slower, _torch_remark(slower)
    stray = step and losses.odd_rows(record.key) != losses.odd_rows(key)
    if ratio <= 1.0 and not stray:
        return ratio, remark
    references = context.pool.reference_records(context.problem, key)
    if all(reference.key == record.key for reference in references):
        return ratio, remark
    ratio_of_references = math.exp(
        sum(math.log((reference.relative_time or 1.0) * _torch_slower(reference, context)) for reference in references) / len(references)
    )
    said = ", ".join(f"n={reference.key.n} d={reference.key.d}" for reference in references)
    return (
        (ratio_of_references, f"; PyTorch's time is that of records of {said}") if stray or ratio_of_references < 1.0 else (ratio, remark)
    )


def _torch_slower(record: TuningRecord, context: Context) -> float:
    """Correction of our time over PyTorch's for its lower read bandwidth at this number of key heads.

    Single-query decode, GPU-bound only; else 1, as nothing was measured of more rows.
    """
    if context.key.n_q > 1 or record.key.n_q > 1 or losses.waits(record, context.key):
        return 1.0
    here = losses.torch_fills(context.problem, context.target.sms)
    return here / losses.torch_fills(record.problem, targets()[record.key.gpu].sms)


def _torch_remark(slower: float) -> str:
    """Remark on that correction."""
    return "" if slower == 1.0 else f"; PyTorch is expected to read at {slower:.2f} times its rate there"


def _fallback(record: TuningRecord, context: Context, family: Family, config: Config) -> Config | None:
    """Config of the record's fallback kernel, where `config` has a frozen row max, adapted where necessary; None where it can't serve."""
    if record.fallback is None or record.fallback.template != family.name or not settles(config):
        return None
    fallback = family.completed(record.fallback.config)
    try:
        family.validate(fallback)
    except InputError:
        return None
    moved = context.work.moved(family, fallback, context.problem.spec(), context.pool)
    if isinstance(moved, str) or settles(moved):
        return None
    return moved if _is_own(record, context.key) else family.resized(moved, context.problem, context.target)


def exact_choice(fit: Fit, context: Context) -> Choice:
    """Choice by a record of exactly this key."""
    record, note, family, config = fit.record, _note(fit, context.key), fit.family, fit.config
    spec, relative = context.problem.spec(), record.relative_time
    slower = _torch_slower(record, context)
    if relative is not None and relative * slower > 1.0 and not calls_tie(record) and context.framework_serves:
        calls = (record.outcome.call_us, record.framework_call_us)
        if slower != 1.0:
            note = f"{note}, of PyTorch's {record.framework_us:.1f}{_torch_remark(slower)}, so it serves"
        elif None in calls:
            note = f"{note}, and there PyTorch was faster: {record.framework_us:.1f} us"
        else:
            note = f"{note}, and there whole calls of PyTorch were faster: {calls[1]:.1f} us, and ours {calls[0]:.1f} us"
        return Choice(kind="framework", spec=spec, note=note, record=record)
    note += _torch_remark(slower) if relative is not None and relative > 1.0 else ""
    kind: Kind = "exact" if record.outcome.source == "measured" else "predicted"
    fallback = _fallback(record, context, family, config)
    return Choice(kind=kind, spec=spec, note=note, record=record, family=family, config=config, fallback=fallback)


def default_choice(family: Family, problem: Problem, target: Target) -> Choice | Refusal:
    """Choice of a family's default config, or the reason why it can't serve."""
    spec = problem.spec()
    if (why := family.refusal(problem, spec, target)) is not None:
        return Refusal(reason=f"{family.name}: {why}")
    config = family.resized(family.default(spec, target), problem, target)
    if (broken := family.violated(config, spec, target)) is not None:
        return Refusal(reason=f"the default of {family.name} breaks {broken.name}: {broken.why}")
    note = f"no record applies to this problem, so the unmeasured default config of {family.name} serves it"
    return Choice(kind="default", spec=spec, note=note, family=family, config=config)


def _note(fit: Fit, key: ProblemKey) -> str:
    record = fit.record
    other = record.key
    verb = "measured" if record.outcome.source == "measured" else "predicted, not measured,"
    if record.outcome.fate is Fate.UNCHECKED:
        verb = "predicted, neither measured nor checked,"
    if other == key:
        place = f"for exactly this problem on {other.gpu}"
    else:
        differing = ", ".join(losses.differences(record, key)) or "the same sizes"
        place = f"on {other.gpu}" + (f" in place of {key.gpu}" if other.gpu != key.gpu else "") + f", for another problem ({differing})"
    return f"{verb} {place}: {record.median_us:.1f} us" + "".join(
        f", with {changed} to {why}" for changed, why in ((fit.changed, "keep the constraints"), (fit.resized, "fill its tiles")) if changed
    )
