"""Preference among records of one key: the same rule for a database, for layers of databases and for dispatch."""

import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import ProblemKey
from flashtune.core.records.results import PROVIDERS, REQUALIFIED, Bits, Fate, Finding, Outcome, TuningRecord
from flashtune.db.rows import moment

FEWEST_SAMPLES, WIDEST_SPREAD = 10, 0.5
"""Least samples of each time, and largest spread of their quantiles over the median, of a ratio with enough evidence."""

NEWEST: Mapping[str, tuple[int, int]] = {"torch": (2, 15), "triton": (3, 10)}
"""Newest releases that exist, as far as this version knows; one that is newer and installed exists, too."""

AHEAD_S = 300.0
"""Seconds by which the clock of another host may be ahead of this one's."""

_BEFORE_ALL_S = 1e12
"""Seconds between dates that are ahead of now and their places in the order: more than all years of dates have."""

_RELEASE = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])")

_COLUMNS = attrgetter(*(field.name for field in fields(ProblemKey)))


CLAIMED = "claimed"
"""Reason of a run whose times are a stranger's word: its kernels race on this machine before one of them serves."""

UNRACED = "a stranger says how fast it is: `flashtune verify --requalify` on its GPU races it"


def claimed(record: TuningRecord) -> bool:
    """True for a record that is a candidate alone."""
    return record.ending is not None and record.ending.reason == CLAIMED


def preference(record: TuningRecord) -> tuple[object, ...]:
    """Sort key that puts the best record of a key first.

    Measured records go before predicted ones, then records of requested layers before those of lower layers. Times of different runs
    can't be compared (clocks, inputs and batch sizes differ), but their ratios to PyTorch's time in the same run can
    (`TuningRecord.relative_time`). So measured records with a ratio go first, of these those with enough evidence, then those of the
    newest torch and Triton, since ratios to an older torch may not hold for today's; then the lowest ratio wins. Measured records
    without PyTorch's time follow, the newest first; last predictions, the newest first, because a later cost model supersedes an
    earlier one; and last of all candidates. Ties go to the smaller variant id, so that
    two machines choose alike. What can't be true, a date ahead of now or a version that doesn't exist, counts as the oldest.
    """
    if claimed(record):
        return 3, record.relative_time or math.inf, record.outcome.variant_id
    age = -made(record)
    layer = -record.precedence
    if record.outcome.source == "predicted":
        return 2, layer, 0, age, record.outcome.variant_id
    relative = record.relative_time
    if relative is None:
        return 1, layer, 1, age, record.outcome.variant_id
    return 1, layer, 0, not _evident(record), _newest_first(record), relative, record.outcome.variant_id


def made(record: TuningRecord) -> float:
    """Seconds since the epoch at which its run began, as `_seconds` orders them."""
    return _seconds(record.provenance.created_at)


def _seconds(date: str) -> float:
    """Seconds since the epoch of a date; one that is ahead of now comes before all others, in order, also where this clock is behind."""
    found = moment(date).timestamp()
    return found if found <= time.time() + AHEAD_S else found - _BEFORE_ALL_S


def _evident(record: TuningRecord) -> bool:
    """True if both its time and PyTorch's have enough samples and little enough spread."""
    times = (record.outcome.measurement, record.baseline.measurement if record.baseline else None)
    return all(time is not None and time.samples >= FEWEST_SAMPLES and time.noise <= WIDEST_SPREAD for time in times)


def _newest_first(record: TuningRecord) -> tuple[int, ...]:
    """Negated releases of torch and Triton; texts that are no release number, and releases that don't exist, count as the oldest."""
    return tuple(-part for name in NEWEST for part in _release(name, getattr(record.provenance, name)))


def _release(package: str, version: str) -> tuple[int, int]:
    """The major and minor number of a version; zeros where it names no release that exists."""
    found = _RELEASE.match(version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    return release if release <= NEWEST[package] or release <= _installed(package) else (0, 0)


@functools.cache
def _installed(package: str) -> tuple[int, int]:
    """The major and minor number of an installed package; zeros where there is none."""
    # Hardly any process meets a version that is newer than the newest known.
    import importlib.metadata

    try:
        found = _RELEASE.match(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        found = None
    return (int(found[1]), int(found[2])) if found else (0, 0)


def by_key(records: Iterable[TuningRecord]) -> dict[ProblemKey, list[TuningRecord]]:
    """Records of each key, the best first; equals keep their order."""
    found: dict[ProblemKey, list[TuningRecord]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record)
    return {key: by_preference(same) for key, same in found.items()}


def by_preference(same: Iterable[TuningRecord]) -> list[TuningRecord]:
    """Records of one key, the best first (`preference`); equals keep their order.

    A record that `verify --requalify` timed again goes before the older measured records of its own and of lower layers, since it
    replaces them, and nothing is written to the shipped database.
    """
    ordered = sorted(same, key=preference)
    again = [record for record in ordered if record.ending is not None and record.ending.reason == REQUALIFIED]
    if not again:
        return ordered
    newest = max(again, key=made)

    def outdated(record: TuningRecord) -> bool:
        return record.outcome.source == "measured" and record.precedence <= newest.precedence and made(record) < made(newest)

    old = [record for record in ordered if outdated(record)]
    kept = [record for record in ordered if not outdated(record)]
    place = kept.index(newest) + 1
    return kept[:place] + old + kept[place:]


Findings = Mapping[tuple[str, str, str], Finding]
"""The latest failure of each kernel, by GPU, variant and the database whose records it refutes (`Finding.origin`)."""


def latest(findings: Iterable[Finding]) -> Findings:
    """The latest finding about each kernel, of each database."""
    ordered = sorted((one for one in findings if one.versions is None), key=lambda one: _seconds(one.found_at))
    return {(one.gpu, one.variant_id, one.origin): one for one in ordered}


Wrong = Mapping[tuple[str, str], tuple[Finding, ...]]
"""Findings of wrong providers by GPU and variant, the latest first."""


def wrong_providers(findings: Iterable[Finding]) -> Wrong:
    """The findings about providers, which hold for their versions (flashtune.core.records.versions.holding)."""
    found: dict[tuple[str, str], tuple[Finding, ...]] = {}
    for one in sorted(findings, key=lambda one: -_seconds(one.found_at)):
        if one.versions is not None:
            found[one.gpu, one.variant_id] = (*found.get((one.gpu, one.variant_id), ()), one)
    return found


def refutation(findings: Findings, gpu: str, variant_id: str, record: TuningRecord | None = None) -> str:
    """Cause of a kernel's failure on a GPU, unless the record that leads to it was measured later; empty where there is none.

    The user's own findings count for every record, those of another database for its own records.
    """
    for origin in ("",) if record is None else ("", record.origin):
        found = findings.get((gpu, variant_id, origin))
        if found is not None and (record is None or made(record) <= _seconds(found.found_at)):
            return f"`flashtune verify --requalify` found that its kernel fails on {gpu}: {found.reason}"
    return ""


def refuted(record: TuningRecord, findings: Findings) -> TuningRecord:
    """Record with the cause of its kernel's later failure, or that nobody raced it here, and without kernels beside it that failed."""
    if claimed(record):
        return replace(record, refuted=UNRACED)

    def failed(outcome: Outcome | None) -> str:
        return "" if outcome is None else refutation(findings, record.key.gpu, outcome.variant_id, record)

    if not findings or not any(map(failed, (record.outcome, record.fallback, record.in_graphs))):
        return record
    fallback = None if failed(record.fallback) else record.fallback
    in_graphs = None if failed(record.in_graphs) else record.in_graphs
    return replace(record, refuted=failed(record.outcome), fallback=fallback, in_graphs=in_graphs)


def serve_all(record: TuningRecord) -> None:
    """Filter that passes over no record."""


ALL_REPEAT = Bits(repeats=lambda record: True, may_vary=lambda record: False)
"""Bits of families whose kernels are all repeatable, so that one record serves all calls."""


def raced_for_same_bits(record: TuningRecord, *, repeatable: bool) -> bool:
    """True if a record's race had only bitwise repeatable kernels and no PyTorch: for calls without that demand it comes after all
    others of its key."""
    return repeatable and record.framework_us is None


def foremost(same: Sequence[TuningRecord], passed_over: Callable[[TuningRecord], object]) -> TuningRecord:
    """The first of these sorted records that is not `passed_over`; the very first where all are."""
    return next((record for record in same if not passed_over(record)), same[0])


def worth_keeping(same: Sequence[TuningRecord], passed_over: Callable[[TuningRecord], object], bits: Bits) -> list[TuningRecord]:
    """Records that a small database keeps of one key's sorted records; none where all are `passed_over`.

    These are the one that serves, and where its kernel isn't bitwise repeatable also the first repeatable one, for deterministic
    calls.
    """

    def order(record: TuningRecord) -> tuple[bool, bool]:
        # Measured records serve before any prediction.
        demoted = bits.may_vary(record) and raced_for_same_bits(record, repeatable=bits.repeats(record))
        return record.outcome.source == "predicted", demoted

    served = [record for record in same if not passed_over(record)]
    first, repeating = sorted(served, key=order)[:1], [record for record in served if bits.repeats(record)][:1]
    return first if first == repeating else first + repeating


def with_verdicts(kept: Iterable[TuningRecord], wrong: Iterable[Finding]) -> list[TuningRecord]:
    """Kept records with these findings among their providers, each beside a record of its kernel spec, or else of its GPU: the fastest run
    may be older than the one in which a provider was wrong."""
    found = list(kept)
    variants = {
        place: {Variant(template=name, spec=record.problem.spec(), config=Config.of()).id for name in PROVIDERS}
        for place, record in enumerate(found)
    }
    told = {replace(one, origin="") for one in wrong}
    # In one order, whichever database was named first.
    for one in sorted(told, key=lambda one: (one.gpu, one.variant_id, one.found_at, one.reason, str(one.versions))):
        places = [place for place, record in enumerate(found) if record.key.gpu == one.gpu]
        place = next((place for place in places if one.variant_id in variants[place]), next(iter(places), None))
        if place is not None:
            outcome = Outcome.of_provider(one.provider, one.variant_id, versions=one.versions, fate=Fate.CORRECTNESS, reason=one.reason)
            record = found[place]
            found[place] = replace(record, providers=tuple(dict.fromkeys((*record.providers, outcome))))
    return found


def key_order(key: ProblemKey) -> tuple[Any, ...]:
    """Sort key of keys: their columns, gpu, n, d and dtype first."""
    found: tuple[Any, ...] = _COLUMNS(key)
    return found
