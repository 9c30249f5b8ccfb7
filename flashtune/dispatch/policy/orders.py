"""Choices for packed sequences and for functions: the order in which records and defaults serve, by the rules of `choose.Ranking`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem, ProblemKey
from flashtune.core.records.nearness import FEATURE, distance
from flashtune.core.records.results import Source, TuningRecord
from flashtune.dispatch.policy.choose import Choice, Fit, Kind, Pool, Ranking, Refusal, choose
from flashtune.dispatch.policy.records import time_of
from flashtune.templates.family import Family
from flashtune.templates.mods import known

MOST_RECORDS = 64
"""Records of a step that are looked at for one that serves."""

REASONS: dict[Kind, str] = {
    "exact": "a record of {} like these",
    "predicted": "a predicted record of {} like these, which were not measured",
    "near_n": "the nearest record of {}",
    "near_gpu": "the nearest record of {}",
    "stand_in": "{} take the config of the nearest dense record",
    "default": "{} take the config of the family",
}
"""Reasons for choices of packed sequences, and of paged keys and values."""

TYPICAL = 4096
"""Queries and keys of the problem whose record gives the config of functions without one."""

BUILT_FOR_IT = ("flash_fwd_hopper", "flash_bwd_hopper")
"""Families that serve functions though unmeasured: they are made for one architecture, with the matrix products of `attention`'s kernels
there."""

UNMEASURED = "kernels with these functions weren't measured on this GPU (FLASHTUNE_UNMEASURED=1 allows them)"
"""The reason why PyTorch serves what kernels could: no measurement says that they are faster."""

Records = Callable[[Problem], Pool | Sequence[TuningRecord]]
"""Records that may serve problems like one."""


def rank_packed(
    problem: Problem,
    target: Target,
    records: Records,
    families: Mapping[str, Family],
    *,
    unmeasured: bool = False,
    default: Callable[[Family], Config] | None = None,
) -> Iterator[Choice | Refusal]:
    """Ways to serve packed sequences, best first, each by one record: one of packed sequences nearer than any dense one can be, the nearest
    dense one, and a predicted one of the key where `unmeasured` ones may serve; then the families' defaults, and PyTorch.

    For keys in pages only records of pages serve. `default` is a family's config without a record, None that of the problem's sizes.
    """
    spec, key = problem.spec(), problem.key(target.slug)
    paged = problem.features.page > 0
    what = "paged keys and values" if paged else "packed sequences"
    able = {name: family for name, family in families.items() if family.refusal(problem, spec, target) is None}
    steps: list[tuple[Problem, Source, Callable[[TuningRecord], bool]]]
    steps = [(problem, "measured", lambda record: distance(record.key, key) < FEATURE)]
    if not paged:
        steps.append((dense_of(problem), "measured", lambda record: True))
    if unmeasured:
        steps.append((problem, "predicted", lambda record: record.key == key))
    ranking: Ranking | None = None
    for like, source, allowed in steps:
        place = like.key(target.slug)
        ranking = Ranking(problem, target, key, _pool(records(like), place, target, able), able)
        if (fit := first(ranking, place, source, allowed)) is not None:
            choice = ranking.by(fit, "", alike=like is problem)
            yield choice._replace(note=REASONS[choice.kind].format(what))
    assert ranking is not None, "there is one step at least"
    for family in able.values():
        config = family.default_of(problem, target) if default is None else default(family)
        yield ranking.default(family, config, f"{what} take the family's default config" if paged else REASONS["default"].format(what))
    why = f"no kernel takes {problem.label()}, so each sequence is a call of its own"
    yield Choice(kind="framework", spec=spec, note=why)


def first(ranking: Ranking, like: ProblemKey, source: Source, allowed: Callable[[TuningRecord], bool]) -> Fit | None:
    """The nearest of the `allowed` records of problems like a key that serves."""
    every = chain(ranking.pool.exact(like, frozenset()), ranking.pool.near(like, frozenset()))
    fits = map(ranking.fit, islice((one for one in every if one.outcome.source == source and allowed(one)), MOST_RECORDS))
    return next((fit for fit in fits if isinstance(fit, Fit)), None)


def rank_coded(
    problem: Problem,
    target: Target,
    records: Records,
    families: Mapping[str, Family],
    *,
    searched: str | None = None,
    framework_serves: bool = True,
    unmeasured: bool = False,
    repeatable: bool = False,
) -> Iterator[Choice | Refusal]:
    """Ways to serve a problem with functions, best first: by the record of its functions on this GPU, of its head sizes and element type,
    whose lengths are nearest; by families' configs without one; and PyTorch.

    `searched` is the hash of the functions as searches have them, without gradients of captured tensors (None: the problem's own). Where
    `framework_serves` is True PyTorch comes before a record by which it is faster, and families that aren't `BUILT_FOR_IT` serve without
    one only if `unmeasured` kernels may, as predicted records do. `repeatable` leaves out families whose bits vary.
    """
    spec = problem.spec()
    plain = problem if searched is None else replace(problem, features=replace(problem.features, mods=searched))
    key, theirs = plain.key(target.slug), plain.spec()
    usable = [one for one in families.values() if one.functions and one.direction == spec.direction and (one.repeatable or not repeatable)]
    able = {one.name: one for one in usable}
    ranking = Ranking(problem, target, key, _pool(records(plain), key, target, able), able)
    # The alternative of packed sequences is a call for each.
    framework_serves = framework_serves and not spec.packed
    sources: tuple[Source, ...] = ("measured", "predicted")
    for source in sources[: 1 + unmeasured]:
        fit = first(ranking, key, source, lambda record: record.key.gpu == target.slug and record.problem.spec() == theirs)
        if fit is None or fit.changed:
            continue
        record, verb = fit.record, "measured" if source == "measured" else "predicted, not measured,"
        origin = f"{_of(record)}, {verb} with these functions: {time_of(record)}"
        if framework_serves and record.relative_time is not None and record.relative_time > 1:
            note = f"the config {origin}, and there PyTorch was faster: {record.framework_us:.1f} us"
            yield Choice(kind="framework", spec=spec, note=note, record=record)
        yield ranking.by(fit, f"the config {origin}")._replace(origin=origin)
        break
    free = unmeasured or not framework_serves
    for family in usable:
        if free or family.name in BUILT_FOR_IT:
            yield ranking.pool.cached(family, spec, partial(_without_record, ranking, family, records))
    why = "no template takes these functions here" if free else UNMEASURED
    yield Choice(kind="framework", spec=spec, note=f"{why}, so PyTorch's flex_attention runs the call")


def _without_record(ranking: Ranking, family: Family, records: Records) -> Choice | Refusal:
    """The choice without a record of the functions: by the config of the nearest record of this family with a bias or a mask at TYPICAL
    queries and keys, or by the family's default.

    The sizes of the call don't count, so that one kernel serves every length. Hopper's kernels have no registers to spare: of their configs
    the default is known to leave enough for functions.
    """
    spec, target, features = ranking.spec, ranking.target, ranking.problem.features
    if (why := family.supports(spec, target)) is not None:
        return Refusal(why)
    if not (starts := family.starts(spec, target)):
        return Refusal(f"no config of {family.name} fits into {target.name} at the head sizes {spec.d} and {spec.d_v}")
    config, origin = family.pick(starts, spec, target), "the family's default, not measured"
    if family.interpretable:
        plain = replace(ranking.problem, features=Features(mods=features.mods, tf32=features.tf32), lengths=None)
        alike = known.alike(replace(plain, batch=1, heads=16, kv_heads=16, n_q=TYPICAL, n_kv=TYPICAL))
        found = choose(alike, target, records(alike), {family.name: family}, framework_serves=False, unmeasured=True)
        record, near = found.record, found.config
        if record is not None and near is not None and record.problem.n_kv >= TYPICAL // 4 and family.unfit(near, spec, target) is None:
            config, origin = near, f"{_of(record)}, not measured"
    choice = ranking.default(family, config, f"no record has these functions, so {family.name} runs the call ({origin})")
    return choice._replace(origin=origin) if isinstance(choice, Choice) else choice


def _of(record: TuningRecord) -> str:
    return f"of the record {record.problem.label()}"


def dense_of(problem: Problem) -> Problem:
    """A dense problem as large as the longest of packed sequences."""
    assert problem.lengths is not None, "packed sequences have lengths"
    longest, features = problem.lengths.longest, replace(problem.features, packed=False)
    return replace(problem, n_q=max(1, problem.n_q * longest // problem.n_kv), n_kv=longest, features=features, lengths=None)


def _pool(records: Pool | Sequence[TuningRecord], key: ProblemKey, target: Target, families: Mapping[str, Family]) -> Pool:
    return records if isinstance(records, Pool) else Pool(key, target, records, families)
