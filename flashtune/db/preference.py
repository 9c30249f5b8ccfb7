"""Which of several records of one key is the best; one rule for a database, for layers of databases and for dispatch."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from flashtune.core.problem import ProblemKey
from flashtune.core.results import Bits, TuningRecord
from flashtune.db.rows import moment

FEWEST_SAMPLES, WIDEST_SPREAD = 10, 0.5
"""Evidence of a gain: samples of each time, and the spread of their quantiles over the median. Of 1671 shipped records one spreads more."""

_RELEASE = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?(?![0-9])")

_COLUMNS = attrgetter(*(field.name for field in fields(ProblemKey)))


def preference(record: TuningRecord) -> tuple[object, ...]:
    """Sorts the best record of a key first.

    Measured beats predicted, and then a layer that was requested those that lie below it. Times of different runs can't be compared
    (clocks, inputs and batch sizes differ), but their ratios to the framework's time in the same run can
    (`TuningRecord.relative_time`). So of measured records those that have one go first, of these those with enough evidence, then the
    newest torch and Triton: a ratio to a torch that was slower says nothing of today's. Among equals the lowest ratio wins. Next come
    measured records without the framework's time, the newest first; then predictions, the newest first, because a later cost model
    supersedes an earlier one. Ties go to the smaller variant id, so that two machines choose alike.
    """
    age = -moment(record.provenance.created_at).timestamp()
    layer = -record.precedence
    if record.outcome.source == "predicted":
        return 2, layer, 0, age, record.outcome.variant_id
    relative = record.relative_time
    if relative is None:
        return 1, layer, 1, age, record.outcome.variant_id
    return 1, layer, 0, not _evident(record), _newest_first(record), relative, record.outcome.variant_id


def _evident(record: TuningRecord) -> bool:
    """Whether its time and the framework's were taken often enough, and alike enough, to be compared."""
    times = (record.outcome.measurement, record.baseline.measurement if record.baseline else None)
    return all(time is not None and time.samples >= FEWEST_SAMPLES and time.noise <= WIDEST_SPREAD for time in times)


def _newest_first(record: TuningRecord) -> tuple[int, ...]:
    """The versions of torch and Triton, negated; what isn't a release's number counts as the oldest."""
    found = (_RELEASE.match(text) for text in (record.provenance.torch, record.provenance.triton))
    return tuple(-int(part or 0) for release in found for part in (release.groups() if release else (0, 0, 0)))


def by_key(records: Iterable[TuningRecord]) -> dict[ProblemKey, list[TuningRecord]]:
    """The records of each key, the best first; equals stay in the order in which they came."""
    found: dict[ProblemKey, list[TuningRecord]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record)
    return {key: sorted(same, key=preference) for key, same in found.items()}


def serve_all(record: TuningRecord) -> None:
    """Passes over no record."""


ALL_REPEAT = Bits(repeats=lambda record: True, may_vary=lambda record: False)
"""Every kernel writes the same bits each time, so that one serves all calls."""


def raced_for_same_bits(record: TuningRecord, *, repeatable: bool) -> bool:
    """Whether a record raced among kernels alone that write the same bits every time, beside no framework: calls that take others, too,
    are served by every other row of its key first."""
    return repeatable and record.framework_us is None


def foremost(same: Sequence[TuningRecord], passed_over: Callable[[TuningRecord], object]) -> TuningRecord:
    """The first of these records, the best first, that is not `passed_over`; the very first where all are."""
    return next((record for record in same if not passed_over(record)), same[0])


def worth_keeping(same: Sequence[TuningRecord], passed_over: Callable[[TuningRecord], object], bits: Bits) -> list[TuningRecord]:
    """Of one key's records, the best first, those that a small database keeps; none where all are `passed_over`.

    That is the one that serves, and where its kernel's bits vary also the first whose don't, which serves calls that ask for the same
    bits every time.
    """

    def order(record: TuningRecord) -> tuple[bool, bool]:
        # Measured rows serve before any prediction.
        demoted = bits.may_vary(record) and raced_for_same_bits(record, repeatable=bits.repeats(record))
        return record.outcome.source == "predicted", demoted

    served = [record for record in same if not passed_over(record)]
    first, repeating = sorted(served, key=order)[:1], [record for record in served if bits.repeats(record)][:1]
    return first if first == repeating else first + repeating


def key_order(key: ProblemKey) -> tuple[Any, ...]:
    """Sorts keys by their columns, the user's four first."""
    found: tuple[Any, ...] = _COLUMNS(key)
    return found
