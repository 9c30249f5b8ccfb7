"""Merge of several databases into one with the best records of every key."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashtune.core.errors import DatabaseError, NoKernelFound
from flashtune.core.results import Bits, TuningRecord
from flashtune.db.library import Layer, Library
from flashtune.db.preference import ALL_REPEAT, by_key, flex_tuned, key_order, serve_all, worth_keeping
from flashtune.db.store import sqlite_path
from flashtune.db.writing import write_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Result of a merge: records that were `kept`, those that `lost` with the record that won, and those `passed_over`.

    A record is passed over where neither it nor any other of its key can be served."""

    kept: tuple[TuningRecord, ...]
    lost: tuple[tuple[TuningRecord, TuningRecord], ...]
    passed_over: tuple[TuningRecord, ...]


def merge(
    locations: Sequence[str | Path],
    destination: str | Path,
    *,
    replace: bool = False,
    passed_over: Callable[[TuningRecord], object] = serve_all,
    bits: Bits = ALL_REPEAT,
) -> Merged:
    """Write the best record of each key in any of these databases to a new SQLite file, with its provenance unchanged.

    Of several records of a key the one with the largest speedup over PyTorch in its own run is kept (`preference`, as in a library);
    ties go to the database that is named first. Where its kernel isn't bitwise repeatable, the best record of a repeatable one is kept
    beside it, for deterministic calls (`worth_keeping`). Records that are `passed_over` lose to the next. The file is written atomically;
    `replace` allows it to replace another tuned database, but not one of these.

    Raises NoKernelFound where there is nothing to write, and DatabaseError where the destination can't be written to.
    """
    target = sqlite_path(destination)
    if target is None:
        raise DatabaseError("databases can be merged into a SQLite file only: give the path of a file")
    sources = [path for path in map(sqlite_path, locations) if path is not None]
    # Not Path.resolve, which raises for circular links.
    if any(os.path.realpath(path) == os.path.realpath(target) for path in sources):
        raise DatabaseError(f"{target} is one of the databases to merge: write to another path")
    kept, lost, refused = [], [], []
    found = by_key(record for location in locations for record in Library([Layer(location=location)]).winners())
    for key in sorted(found, key=key_order):
        stay = worth_keeping(found[key], passed_over, bits)
        tuned = flex_tuned(found[key])
        kept += stay + tuned
        if not stay:
            refused += [] if tuned else found[key][:1]
            continue
        runs = [_run(record) for record in stay + tuned]
        lost += [(record, stay[-1] if bits.repeats(record) else stay[0]) for record in found[key] if _run(record) not in runs]
    if not kept:
        raise NoKernelFound("these databases hold no record that could be served: search first, or name others")
    write_file(target, [record.as_result() for record in kept], replace=replace)
    return Merged(kept=tuple(kept), lost=tuple(lost), passed_over=tuple(refused))


def _run(record: TuningRecord) -> tuple[object, ...]:
    """Identity of a record's run, by which copies of it in several databases are recognized."""
    return record.problem, record.outcome, record.provenance, record.baseline
