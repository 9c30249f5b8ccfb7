"""Which kernel serves a problem: a pure function of the problem, the GPU and the records; no tensors, no I/O, no clock."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flashtune.core.config import Config, KernelSpec
from flashtune.core.errors import InputError
from flashtune.core.problem import DECODE_ROWS, Problem, ProblemKey
from flashtune.core.results import Fate, TuningRecord
from flashtune.core.target import Target, targets
from flashtune.db.ranking import by_key, preference
from flashtune.templates.family import Family

Kind = Literal["exact", "near_n", "near_gpu", "predicted", "default", "framework"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to serve a problem: a family with a config, or the framework (no family). `note` says in a sentence why."""

    kind: Kind
    spec: KernelSpec
    note: str
    record: TuningRecord | None = None
    family: Family | None = None
    config: Config | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A record or family that can't serve. `invalid` marks a row that no flashtune would have written for this GPU."""

    reason: str
    invalid: bool = False
    record: TuningRecord | None = None


def choose(
    problem: Problem, target: Target, records: Sequence[TuningRecord], families: Mapping[str, Family], *, framework_serves: bool = True
) -> Choice:
    """The best choice that `rank` finds; the framework where nothing else serves."""
    return next(c for c in rank(problem, target, records, families, framework_serves=framework_serves) if isinstance(c, Choice))


def rank(
    problem: Problem, target: Target, records: Sequence[TuningRecord], families: Mapping[str, Family], *, framework_serves: bool = True
) -> Iterator[Choice | Refusal]:
    """Every way to serve `problem` on `target`, best first, with the refused ones where they would have stood.

    The order of fallbacks, the only one there is:

    1. `exact`: a measured record of exactly this key;
    2. `near_n`: a measured record of this GPU that differs only in the sizes N_kv, N_q and batch * heads, nearest first;
    3. `near_gpu`: a measured record of another GPU of the same architecture, nearest sizes first;
    4. `predicted`: the same three steps over records that a cost model ranked;
    5. `default`: the default config of each family that supports the problem and suits its sizes, in the families' order;
    6. `framework`: torch's own attention.

    Near means |log2| of the ratios of the sizes, N_kv weighing most (4 : 2 : 1); ties go to the same alignment, then to the GPU
    with the nearest number of SMs, then among records of one key to the preferred one (flashtune.db.ranking), then to records of the
    user over shipped ones, the larger sizes, the shorter time and the lower variant id, so that equal libraries choose equally
    everywhere. A record that says that the framework was faster (as a whole call where that was measured, host included) makes it the
    choice, provided that `framework_serves` (torch has the features). A record is never served when its config, completed by axes that
    came later, is outside the family's declared space or breaks a constraint on this target; the next one of its key may serve. Which
    sizes suit a family is a rule of thumb, which gives way to measurements: step 1 doesn't ask for it. A record of any other step is
    served only where the problem's sizes suit its family, and stands in for other sizes only where every family that suits these suits
    its own: one that was never tried there may be far better here.
    """
    spec, key = problem.spec(), problem.key(target.slug)
    group = group_of(key)
    suited = [family for family in families.values() if (family.supports(spec, target) or family.suits(problem, target)) is None]
    same = [
        record
        for record in records
        if group_of(record.key) == group and (record.key == key or all(family.suits(record.problem, target) is None for family in suited))
    ]
    places = _places(same)
    for measured in (True, False):
        mine = [record for record in same if (record.outcome.source == "measured") is measured]
        steps: tuple[tuple[Kind, Iterable[TuningRecord]], ...] = (
            ("exact", [record for record in mine if record.key == key]),
            ("near_n", [record for record in mine if record.key.gpu == key.gpu and record.key != key]),
            ("near_gpu", [record for record in mine if record.key.gpu != key.gpu and _arch(record.key.gpu) == target.arch]),
        )
        for step, found in steps:
            for record in sorted(found, key=lambda record: _order(record, places.get(id(record), 0), key, target)):
                yield _from_record(record, step if measured else "predicted", key, problem, target, families, framework_serves)
    for family in (family for family in families.values() if family.direction == problem.direction):
        yield _from_default(family, problem, target)
    yield Choice(kind="framework", spec=spec, note="no template serves this problem here, torch's own attention does")


def group_of(key: ProblemKey) -> tuple[object, ...]:
    """What records must share to stand in for one another: all of the key but the GPU, the sizes and the alignment.

    Of N_q it keeps whether it is a decoding step (at most `DECODE_ROWS` rows). The alignment moves the band but compiles to the same code.
    """
    features = key.features.replace('"alignment":"bottom_right",', "").replace(',"alignment":"bottom_right"', "")
    return key.d, key.d_v, key.dtype, key.direction, features, key.gqa_ratio, key.n_q <= DECODE_ROWS


def _from_record(
    record: TuningRecord,
    kind: Kind,
    key: ProblemKey,
    problem: Problem,
    target: Target,
    families: Mapping[str, Family],
    framework_serves: bool,
) -> Choice | Refusal:
    spec, outcome = problem.spec(), record.outcome
    family = families.get(outcome.template)
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
    if kind != "exact" and (why := family.suits(problem, target)) is not None:
        return Refusal(reason=why, record=record)
    own_gpu = record.key.gpu == key.gpu
    if (why := family.unfit(config, spec, target)) is not None:
        return Refusal(reason=why, invalid=own_gpu, record=record)
    note = _note(record, kind, key)
    relative = record.relative_time
    if relative is not None and relative > 1.0 and framework_serves:
        calls = (record.outcome.call_us, record.framework_call_us)
        if None in calls:
            note = f"{note}, and there the framework was faster: {record.framework_us:.1f} us"
        else:
            note = f"{note}, and there whole calls of the framework were faster: {calls[1]:.1f} us, and ours {calls[0]:.1f} us"
        return Choice(kind="framework", spec=spec, note=note, record=record)
    return Choice(kind=kind, spec=spec, note=note, record=record, family=family, config=config)


def _from_default(family: Family, problem: Problem, target: Target) -> Choice | Refusal:
    spec = problem.spec()
    if (why := family.supports(spec, target) or family.suits(problem, target)) is not None:
        return Refusal(reason=f"{family.name}: {why}")
    config = family.default(spec, target)
    if (broken := family.violated(config, spec, target)) is not None:
        return Refusal(reason=f"the default of {family.name} breaks {broken.name}: {broken.why}")
    note = f"no record stands for this problem, so the default config of {family.name} serves it"
    return Choice(kind="default", spec=spec, note=note, family=family, config=config)


def _order(record: TuningRecord, place: int, key: ProblemKey, target: Target) -> tuple[object, ...]:
    """The sort key among records of one step; the smallest is served. `place` counts the records of its key that are preferred to it."""
    other, outcome = record.key, record.outcome
    known = targets().get(other.gpu)
    return (
        4 * _octaves(other.n, key.n) + 2 * _octaves(other.n_q, key.n_q) + _octaves(other.bh_bucket, key.bh_bucket),
        other.features != key.features,
        0.0 if other.gpu == key.gpu or known is None else _octaves(known.sms, target.sms),
        place,
        record.origin == "shipped",
        -other.n,
        -other.n_q,
        -other.bh_bucket,
        outcome.measurement.median_us if outcome.measurement is not None else math.inf,
        outcome.variant_id,
        other.gpu,
        record.origin,
    )


def _places(records: Iterable[TuningRecord]) -> dict[int, int]:
    """How many records of its key are preferred to each record that has a time, by its id()."""
    found: dict[int, int] = {}
    for known in by_key(record for record in records if record.outcome.measurement is not None).values():
        ranks = [preference(record) for record in known]
        found |= {id(record): ranks.index(rank) for record, rank in zip(known, ranks, strict=True)}
    return found


def _octaves(a: int, b: int) -> float:
    return abs(math.log2(max(1, a) / max(1, b)))


def _arch(gpu: str) -> str | None:
    known = targets().get(gpu)
    return None if known is None else known.arch


def _note(record: TuningRecord, kind: Kind, key: ProblemKey) -> str:
    other = record.key
    verb = "measured" if record.outcome.source == "measured" else "predicted, not measured,"
    if record.outcome.fate is Fate.UNCHECKED:
        verb = "predicted, neither measured nor checked,"
    if kind == "exact" or other == key:
        place = f"for exactly this problem on {other.gpu}"
    else:
        sizes = [("n", other.n, key.n), ("n_q", other.n_q, key.n_q), ("batch*heads bucket", other.bh_bucket, key.bh_bucket)]
        differing = ", ".join(f"{name}={theirs} for {ours}" for name, theirs, ours in sizes if theirs != ours) or "the same sizes"
        place = f"on {other.gpu}" + (f" in place of {key.gpu}" if other.gpu != key.gpu else "") + f", the nearest there is ({differing})"
    return f"{verb} {place}: {record.median_us:.1f} us"
