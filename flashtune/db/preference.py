"""Which of several records of one key is the best; one rule for a database, for layers of databases and for dispatch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from flashtune.core.problem import ProblemKey
from flashtune.core.results import Bits, TuningRecord
from flashtune.db.rows import moment

_COLUMNS = attrgetter(*(field.name for field in fields(ProblemKey)))


def preference(record: TuningRecord) -> tuple[int, int, int, float, str]:
    """Sorts the best record of a key first.

    Measured beats predicted, and then a layer that was asked for those that lie below it. Times of different runs can't be compared
    (clocks, inputs and batch sizes differ), but their ratios to the framework's time in the same run can: among measured records that
    have one, the lowest ratio wins (`TuningRecord.relative_time`). Next come measured records without the framework's time, the newest
    first; then predictions, the newest first, because a later cost model supersedes an earlier one. Ties go to the smaller variant id,
    so that two machines choose alike.
    """
    age = -moment(record.provenance.created_at).timestamp()
    layer = -record.precedence
    if record.outcome.source == "predicted":
        return 2, layer, 0, age, record.outcome.variant_id
    relative = record.relative_time
    if relative is None:
        return 1, layer, 1, age, record.outcome.variant_id
    return 1, layer, 0, relative, record.outcome.variant_id


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
