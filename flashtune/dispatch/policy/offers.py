"""Implementations of a call by the records: the provider that was the fastest, and the times of all. Pure functions of records."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem, wide_heads
from flashtune.core.records.results import IMPLEMENTATIONS, PROVIDERS, TuningRecord
from flashtune.dispatch.policy.choose import Choice
from flashtune.dispatch.policy.records import Pool, differences, same_features
from flashtune.templates.family import Family

OURS, TORCHS = IMPLEMENTATIONS[:2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An implementation that may be named for a call.

    Attributes:
        name: its name, as `implementation` takes it.
        us: its time of a whole call in the record's run, in microseconds; None where it wasn't timed.
        why: the reason why it can't run the call; None where it can, or where no call was given.
    """

    name: str
    us: float | None = None
    why: str | None = None


def offers(record: TuningRecord | None, refusal: Callable[[str], str | None]) -> tuple[Offer, ...]:
    """All implementations, with their times in a record's run; `refusal` is a provider's reason for refusing."""
    times: dict[str, float | None] = {}
    if record is not None:
        times[TORCHS] = record.framework_call_us or record.framework_us
        if record.baseline is not None:
            times[record.baseline.backend] = times[TORCHS]
        times |= record.provider_times()
        if record.outcome.template not in PROVIDERS:
            times[OURS] = record.outcome.call_us or record.median_us
    others = (Offer(name=name, us=times.get(name), why=refusal(name)) for name in PROVIDERS)
    return Offer(name=OURS, us=times.get(OURS)), Offer(name=TORCHS, us=times.get(TORCHS)), *others


def measured_record(pool: Pool, problem: Problem, target: Target) -> TuningRecord | None:
    """The measured record of exactly a problem's key that is preferred; None where there is none."""
    return next((one for one in pool.exact(problem.key(target.slug), frozenset()) if one.outcome.source == "measured"), None)


def deciding_record(pool: Pool, problem: Problem, target: Target) -> TuningRecord | None:
    """The measured record whose run says which provider is the fastest: the key's own, or else the nearest of equal features."""
    own = measured_record(pool, problem, target)
    if own is not None:
        return own
    key = problem.key(target.slug)
    nearest = next((one for one in pool.near(key, frozenset(), any_width=True) if one.outcome.source == "measured"), None)
    if nearest is None or not same_features(nearest.key, key):
        return None
    # Where there are few kernels, others lead.
    return nearest if wide_heads(nearest.key.d, nearest.key.d_v) is wide_heads(key.d, key.d_v) else None


def provider_choice(
    record: TuningRecord | None,
    problem: Problem,
    target: Target,
    provided: Callable[[str], bool],
    *,
    framework_serves: bool,
    families: Iterable[Family] = (),
) -> Choice | None:
    """Provider that was the fastest in the run of the record that decides; PyTorch where it was, and the key's own run had no kernel; None
    where kernels are to be compared.

    `provided` is True where the provider of a name is installed and takes the call, `framework_serves` where PyTorch has the features.
    Of `families` one may outrun PyTorch though that run had no kernel of it.
    """
    if record is None or not record.providers:
        return None
    key = problem.key(target.slug)
    own, unlike = record.key == key, () if record.key == key else differences(record, key)
    place = f"on {record.key.gpu}" + ("" if own else f", for another problem ({', '.join(unlike) or 'the same sizes'})")
    if (name := record.fastest(provided)) is not None:
        us = next(one.call_us for one in record.providers if one.template == name)
        note = f"its whole calls took the least time {place}: {us:.1f} us"
        return Choice(kind="provider", spec=problem.spec(), note=note, record=record, differences=unlike, provider=name)
    outrun = any(one.supports(problem.spec(), target) is None and one.outruns_torch(problem, target) for one in families)
    if not own or record.outcome.template not in PROVIDERS or not framework_serves or outrun:
        return None
    return Choice(kind="framework", spec=problem.spec(), note=f"PyTorch's own choice took the least time {place}", record=record)
