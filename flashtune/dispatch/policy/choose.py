"""Choice of a kernel for a problem: a pure function of the problem, the GPU and the records; no tensors, no I/O, no clock."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from flashtune.core.gpu.target import Target, targets
from flashtune.core.problems.config import Config, KernelSpec, Variant, settles
from flashtune.core.problems.problem import DECODE_ROWS, Problem, ProblemKey
from flashtune.core.records.results import Fate, Outcome, Source, TuningRecord
from flashtune.core.system.errors import InputError
from flashtune.dispatch.policy.records import Pool, differences, group_of, same_features, time_of, unaligned, valid_config
from flashtune.dispatch.policy.torch_times import calls_tie, slower_reading, step_ratio, torch_has
from flashtune.templates.expected import LOG_HOST, logs_us
from flashtune.templates.family import Family

__all__ = ["Choice", "Kind", "Pool", "Refusal", "choose", "group_of", "rank", "torch_has"]

Kind = Literal["exact", "near_n", "stand_in", "near_gpu", "predicted", "default", "framework", "provider", "frozen"]

COMPARED = 24
"""Configs of the nearest records whose times are predicted."""
CAUTION = 1.0
"""Standard deviations of the regression's uncertainty added to predicted times (benchmarks/run.py fit_residual)."""
COMPILING = 0.03
"""Logarithm of predicted time that a kernel without machine code has to gain to be compiled (benchmarks/run.py replay_random)."""
MOST_LOOKED = 300_000
"""Changes of other kernels' configs evaluated per choice (about half a second), after which records that need such changes are skipped."""

BUCKET = 64
"""Numbers of keys in a length bucket, whose decode steps have one choice: a growing sequence would make one for each token."""


class Choice(NamedTuple):
    """One way to serve a problem: a family with a config, another `provider`, or PyTorch (neither). `note` is the reason in a sentence.

    Where the record is of another key, `differences` lists the differences. `fallback` is the config of the kernel that serves where the
    softmax is mispredicted, if `config` has a frozen row max and the record's search measured such a kernel; `in_graphs` is that of the
    kernel that CUDA graphs run, if whole calls chose one that is slower on the GPU. `origin` says where a config of functions comes from.
    """

    kind: Kind
    spec: KernelSpec
    note: str
    record: TuningRecord | None = None
    family: Family | None = None
    config: Config | None = None
    differences: tuple[str, ...] = ()
    fallback: Config | None = None
    in_graphs: Config | None = None
    provider: str | None = None
    origin: str = ""

    @property
    def variant(self) -> Variant | None:
        """Variant of the kernel that serves; None for PyTorch and other providers."""
        if self.family is None or self.config is None:
            return None
        return Variant(template=self.family.name, spec=self.spec, config=self.config)


class Refusal(NamedTuple):
    """Record or family that can't serve. `invalid` marks a record that no version of flashtune would have written for this GPU."""

    reason: str
    invalid: bool = False
    record: TuningRecord | None = None


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


def choose(
    problem: Problem, target: Target, records: Sequence[TuningRecord] | Pool, families: Mapping[str, Family], **words: Any
) -> Choice:
    """Best choice of `rank`, which has the same arguments; PyTorch where nothing else serves."""
    return next(choice for choice in rank(problem, target, records, families, **words) if isinstance(choice, Choice))


def rank(
    problem: Problem,
    target: Target,
    records: Sequence[TuningRecord] | Pool,
    families: Mapping[str, Family],
    *,
    framework_serves: bool = True,
    unmeasured: bool = False,
    compiled: Callable[[Family, KernelSpec, Config], bool] = lambda *_: True,
) -> Iterator[Choice | Refusal]:
    """Every way to serve `problem` on `target`, best first, with the refused ones where they would have stood.

    The order of fallbacks, the only one there is:

    1. `exact`: a measured record of exactly this key;
    2. a measured record of another key of the architecture: `near_n` where only the sizes N_kv, N_q and batch * heads differ, `near_gpu`
       where the GPU does and perhaps these, `stand_in` where the head size, the heads to a key head, the features or the 16-bit type do;
    3. `predicted`: the same two steps over records that a cost model ranked;
    4. `default`: the default config of each family that supports the problem and suits its sizes, in the families' order;
    5. `framework`: PyTorch's own attention.

    Kernels of steps 3 and 4 have no measurement on this architecture. They serve where PyTorch can't
    (`framework_serves` is True where it has the features), and elsewhere only if `unmeasured` allows it, or if a committed run says that a
    family outruns PyTorch at such sizes (`Family.outruns_torch`).

    In steps 2 and 3 the first COMPARED configs of the nearest records (`flashtune.core.records.nearness`) are sorted by predicted times
    (`flashtune.templates.expected.logs_us`); equal ones, all backwards, and kernels that end before the host has made the next call stay in
    the order of distance. Ties of that go to the preferred record of one key (flashtune.db.preference), to records of the user over shipped
    ones, the larger sizes, the shorter time and the lower variant id, so that equal libraries choose equally everywhere. A kernel that is
    not `compiled` has to gain COMPILING. Decode steps aren't near more rows, nor are other passes, nor element types of other sizes.

    PyTorch is the choice where it is expected to be faster, provided that `framework_serves`: for a record of the key by its whole calls
    where they were measured, host included; for other decoding steps by `torch_times.step_ratio` and the predicted gain over the nearest
    record's config (`resolve.backwards.gradient_choice` decides of gradients).
    A record never serves when its config is outside the family's declared space or breaks a constraint on this target; the next one may
    serve. For another kernel a config is first moved to the nearest one that satisfies the constraints
    (`Family.refit`), within MOST_LOOKED changes per choice.
    A family's suitable sizes are a rule of thumb, which measurements override: step 1 ignores it. A record of any other step
    serves only where the problem's sizes suit its family, and serves other sizes only where every family that suits these was
    tried at its own: an untried one may be far better here.
    """
    spec, key = problem.spec(), problem.key(target.slug)
    computing = [family for family in families.values() if family.direction == problem.direction]
    suited = [family for family in computing if family.refusal(problem, spec, target) is None]
    pool = records if isinstance(records, Pool) else Pool(key, target, records, families)
    ranking = Ranking(problem, target, key, pool, families, framework_serves, compiled)
    names = frozenset(family.name for family in suited)
    yield from ranking.steps(names, "measured")
    if unmeasured or not framework_serves:
        yield from ranking.steps(names, "predicted")
    elif suited:
        for family in suited:
            if (run := family.outruns_torch(problem, target)) is not None:
                yield ranking.default(family, note=f"no record has these sizes; {family.name} outran PyTorch at all sizes of the run {run}")
        why = f"no kernel for this problem was measured on GPUs like {target.name}"
        note = f"{why}, so PyTorch's own attention runs the call (FLASHTUNE_UNMEASURED=1 lets {suited[0].name} run it)"
        yield Choice(kind="framework", spec=spec, note=note)
        return
    yield from map(ranking.default, computing)
    yield Choice(kind="framework", spec=spec, note="no template takes this problem here, so PyTorch's own attention runs the call")


class Ranking:
    """One choice: problem, target, key, records and families, and the changes of configs evaluated so far.

    These are counted alike in every process, whatever earlier choices have cached in the pool.
    """

    def __init__(
        self,
        problem: Problem,
        target: Target,
        key: ProblemKey,
        pool: Pool,
        families: Mapping[str, Family],
        framework_serves: bool = True,
        compiled: Callable[[Family, KernelSpec, Config], bool] = lambda *_: True,
    ) -> None:
        self.problem, self.target, self.key, self.pool, self.families = problem, target, key, pool, families
        self.framework_serves, self.compiled, self.spec = framework_serves, compiled, problem.spec()
        self._looked = 0
        self._moved: dict[tuple[str, Config], Config | str] = {}

    def steps(self, suited: frozenset[str], source: Source) -> Iterator[Choice | Refusal]:
        """Records of exactly the key first, then the others."""
        for record in self.pool.exact(self.key, suited):
            if record.outcome.source == source:
                fit = self.fit(record)
                yield fit if isinstance(fit, Refusal) else self._exact(fit)
        near = (record for record in self.pool.near(self.key, suited) if record.outcome.source == source)
        fits: list[Fit] = []
        compared: set[tuple[str, Config]] = set()
        for record in near:
            fit = self.fit(record)
            if isinstance(fit, Refusal):
                yield fit
                continue
            fits.append(fit)
            compared.add((fit.family.name, fit.config))
            if len(compared) == (1 if self.problem.direction == "bwd" else COMPARED):
                break
        if fits:
            logs = self._predicted(fits)
            waiting = [0.0 if self.compiled(fit.family, self.spec, fit.config) else COMPILING for fit in fits]
            # Predictions leave out how a bias is read.
            bias = [unaligned(fit.record.key) != unaligned(self.key) for fit in fits]
            order = list(zip(bias, map(sum, zip(logs, waiting, strict=True)), strict=True))
            for place in sorted(range(len(fits)), key=order.__getitem__):
                yield self._near(fits[place], fits[0], logs[place] - logs[0])
        for record in near:
            fit = self.fit(record)
            yield fit if isinstance(fit, Refusal) else self._near(fit, fits[0], 0.0)

    def _predicted(self, fits: Sequence[Fit]) -> list[float]:
        """Logarithms of predicted times, infinite where there is no prediction; zeros where there is none of the nearest record's."""
        distinct = {(fit.family.name, fit.config): (fit.family, fit.config) for fit in fits}
        logs = dict(zip(distinct, logs_us(list(distinct.values()), self.problem, self.target, caution=CAUTION), strict=True))
        found = [logs[fit.family.name, fit.config] for fit in fits]
        return [0.0 if found[0] is None else math.inf if log is None else max(log, LOG_HOST) for log in found]

    def fit(self, record: TuningRecord) -> Fit | Refusal:
        """Record as it would serve, or the reason why it can't, which may be a failure of its kernel after it was measured."""
        found = self._fit(record)
        if isinstance(found, Fit) and (why := self.pool.refutation(found.family, found.config, self.spec, record)):
            return Refusal(reason=why, record=record)
        return found

    def _fit(self, record: TuningRecord) -> Fit | Refusal:
        family = self.families.get(record.outcome.template)
        if family is None:
            return Refusal(reason=f"there is no template {record.outcome.template!r} here", record=record)
        found = self.pool.cached(record, self.spec, lambda: self._configured(record, family))
        if isinstance(found, Refusal):
            return found
        if not found.own:
            if isinstance(moved := self._move(family, found.config), str):
                return Refusal(reason=moved, record=record)
            found = found._replace(config=moved, changed=_changes(found.config, moved))
        if self._is_own(record):
            return found
        if (why := found.family.suits(self.problem, self.target)) is not None:
            return Refusal(reason=why, record=record)
        config = self._resized(found.family, found.config)
        return found if config == found.config else found._replace(config=config, resized=_changes(found.config, config))

    def _configured(self, record: TuningRecord, family: Family) -> Fit | Refusal:
        """Record with its own config, or the reason why it can't serve at any sizes."""
        spec, gpu, outcome = self.spec, self.key.gpu, record.outcome
        time_us = outcome.measurement.median_us if outcome.measurement is not None else math.nan
        if not outcome.fate.timed or not 0.0 < time_us < math.inf:
            return Refusal(reason=f"its fate is {outcome.fate} with a time of {time_us} us", invalid=True, record=record)
        config = outcome.config
        try:
            family.validate(config)
        except InputError as error:
            return Refusal(reason=str(error), invalid=True, record=record)
        own = record.problem.spec()
        there = targets().get(record.key.gpu, self.target)
        if (own, record.key.gpu) != (spec, gpu) and (why := family.unfit(config, own, there)) is not None:
            return Refusal(reason=why, invalid=True, record=record)
        if own != spec:
            if (why := family.supports(spec, self.target)) is not None:
                return Refusal(reason=why, record=record)
        elif (why := family.unfit(config, spec, self.target)) is not None:
            return Refusal(reason=why, invalid=record.key.gpu == gpu, record=record)
        return Fit(record=record, family=family, config=config, own=own == spec)

    def _move(self, family: Family, config: Config) -> Config | str:
        """Config of another kernel, moved to satisfy the constraints of this one, or the reason why there is none."""
        known = (family.name, config)
        if known not in self._moved:
            if self._looked > MOST_LOOKED:
                return "too many configs of nearer records can't satisfy the constraints here, so that it isn't tried"
            found = self.pool.refit(family, config, self.spec)
            self._looked += found.looked
            self._moved[known] = found.config or f"no config of {family.name} keeps the constraints here"
        return self._moved[known]

    def _resized(self, family: Family, config: Config) -> Config:
        """Config adapted to the problem's sizes, where it keeps the constraints then."""
        resized = family.resized(config, self.problem, self.target)
        return config if resized == config or family.violated(resized, self.spec, self.target) is not None else resized

    def _is_own(self, record: TuningRecord) -> bool:
        """True for a record that was measured at exactly the call's key, which serves unchanged."""
        return record.key == self.key and record.outcome.source == "measured"

    def _exact(self, fit: Fit) -> Choice:
        """Choice by a record of exactly this key."""
        record, note, relative = fit.record, self._note(fit), fit.record.relative_time
        slower = slower_reading(record, self.problem, self.target)
        if relative is not None and relative * slower > 1.0 and not calls_tie(record) and self.framework_serves:
            calls = (record.outcome.call_us, record.framework_call_us)
            if slower != 1.0:
                note = f"{note}, of PyTorch's {record.framework_us:.1f}{_reading(slower)}, so PyTorch runs the call"
            elif None in calls:
                note = f"{note}, and there PyTorch was faster: {record.framework_us:.1f} us"
            else:
                note = f"{note}, and there whole calls of PyTorch were faster: {calls[1]:.1f} us, and ours {calls[0]:.1f} us"
            return Choice(kind="framework", spec=self.spec, note=note, record=record)
        note += _reading(slower) if relative is not None and relative > 1.0 else ""
        return self._with_graphs(fit, self.by(fit, note))

    def _near(self, fit: Fit, nearest: Fit, more: float) -> Choice:
        """Choice by a record of another key: its kernel, or PyTorch where that is expected to be faster.

        `more` is the logarithm of its predicted time over that of the nearest record's config.
        """
        key, record, note = self.key, fit.record, self._note(fit)
        if record.outcome.source == "predicted":
            note += "; nothing was measured: its own time is the cost model's"
        if more < 0.0:
            note += f", preferred to {nearest.record.problem.label()}, which the cost model expects to take longer"
        if not same_features(record.key, key):
            note += "; these times don't include the cost of features that differ"
        step = self.framework_serves and self.problem.direction == "fwd" and self.problem.n_q <= DECODE_ROWS
        # A config that is preferred has its ratio to PyTorch from the nearest record's.
        basis = (nearest.record, more) if more < 0.0 else (record, 0.0)
        if step and (faster := self._torch_is_faster(*basis)) is not None:
            note += f"{faster}; by its record and the cost model PyTorch is expected to take less time, so PyTorch runs the call"
            return Choice(kind="framework", spec=self.spec, note=note, record=record, differences=differences(record, key))
        alike = record.problem.spec() == self.spec and record.key.gqa_ratio == key.gqa_ratio and same_features(record.key, key)
        return self._with_graphs(fit, self.by(fit, note, alike=alike))

    def _torch_is_faster(self, nearest: TuningRecord, more: float) -> str | None:
        """Remark on records by which PyTorch is expected to be faster at a decoding step; None where it isn't."""
        found = step_ratio(nearest, self.problem, self.pool, self.target)
        if found is None or math.log(found[0]) + more <= 0.0:
            return None
        said = ", ".join(f"n={reference.key.n} d={reference.key.d}" for reference in found[1])
        return f"; PyTorch's time is that of records of {said}" if said else _reading(slower_reading(nearest, self.problem, self.target))

    def by(self, fit: Fit, note: str, *, alike: bool = True) -> Choice:
        """Choice of a fit's kernel; `alike` is False for a record of a problem that differs in more than its sizes."""
        fallback = self._beside(fit, fit.record.fallback) if settles(fit.config) else None
        kind = kind_by(fit.record, self.key, alike=alike)
        return Choice(kind, self.spec, note, fit.record, fit.family, fit.config, differences(fit.record, self.key), fallback)

    def _with_graphs(self, fit: Fit, choice: Choice) -> Choice:
        """The choice with the kernel that CUDA graphs run."""
        if (in_graphs := self._beside(fit, fit.record.in_graphs)) is None:
            return choice
        note = f"{choice.note}; CUDA graphs run {in_graphs.label()}, which takes less time on the GPU alone"
        return choice._replace(note=note, in_graphs=in_graphs)

    def _beside(self, fit: Fit, other: Outcome | None) -> Config | None:
        """Config of another kernel of the record's run, adapted where necessary; None where it can't serve."""
        family = fit.family
        if other is None or other.template != family.name:
            return None
        if (config := valid_config(family, other)) is None:
            return None
        moved = self._move(family, config)
        if isinstance(moved, str) or settles(moved):
            return None
        found = moved if self._is_own(fit.record) else self._resized(family, moved)
        return None if self.pool.refutation(family, found, self.spec, fit.record) else found

    def default(self, family: Family, config: Config | None = None, note: str = "") -> Choice | Refusal:
        """Choice of a family without a record, by a `config` or its default, or the reason why it can't serve."""
        if (why := family.refusal(self.problem, self.spec, self.target)) is not None:
            return Refusal(reason=f"{family.name}: {why}")
        config = config or family.resized(family.default(self.spec, self.target), self.problem, self.target)
        if (broken := family.violated(config, self.spec, self.target)) is not None:
            return Refusal(reason=f"the default of {family.name} breaks {broken.name}: {broken.why}")
        if failed := self.pool.refutation(family, config, self.spec, None):
            return Refusal(reason=f"{family.name}: {failed}")
        note = note or f"no record applies to this problem, so the unmeasured default config of {family.name} runs the call"
        return Choice(kind="default", spec=self.spec, note=note, family=family, config=config)

    def _note(self, fit: Fit) -> str:
        """The record's time, where it is from, and how its config was adapted."""
        record, other, key = fit.record, fit.record.key, self.key
        verb = "measured" if record.outcome.source == "measured" else "predicted, not measured,"
        if record.outcome.fate is Fate.UNCHECKED:
            verb = "predicted, neither measured nor checked,"
        place = f"for exactly this problem on {other.gpu}"
        if other != key:
            unlike = ", ".join(differences(record, key)) or "the same sizes"
            place = f"on {other.gpu}" + (f" in place of {key.gpu}" if other.gpu != key.gpu else "") + f", for another problem ({unlike})"
        adapted = ((fit.changed, "keep the constraints"), (fit.resized, "fill its tiles"))
        return f"{verb} {place}: {time_of(record)}" + "".join(f", with {axes} to {why}" for axes, why in adapted if axes)


def kind_by(record: TuningRecord, key: ProblemKey, *, alike: bool = True) -> Kind:
    """Kind of a choice by a record for a problem, which is `alike` but for its sizes and its GPU."""
    kind: Kind = "stand_in" if not alike else "near_n" if record.key.gpu == key.gpu else "near_gpu"
    return "predicted" if record.outcome.source == "predicted" else "exact" if record.key == key else kind


def _changes(config: Config, moved: Config) -> str:
    """Changed axes of a moved config, for notes."""
    return ", ".join(f"{name} {config[name]} to {moved[name]}" for name in config if config[name] != moved[name])


def _reading(slower: float) -> str:
    """Remark on PyTorch's read bandwidth."""
    return "" if slower == 1.0 else f"; PyTorch is expected to read at {slower:.2f} times its rate there"


def choice_of_bucket(problem: Problem, target: Target, pool: Pool, families: Mapping[str, Family], **words: Any) -> Choice | None:
    """Choice for every decode step of the problem's length bucket, with the arguments of `rank`; None where steps differ.

    It is made for both ends: between them only records of a length in the bucket could change it.
    """
    last = -(-problem.n_kv // BUCKET) * BUCKET
    first = last - BUCKET + 1
    if any(first <= n <= last for n in pool.lengths):
        return None
    one, other = (choose(replace(problem, n_kv=n), target, pool, families, **words) for n in (first, last))
    return other if one.variant == other.variant else None
