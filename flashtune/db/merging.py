"""Merge of several databases into one with the best records of every key."""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path

from flashtune.core.problems.problem import ProblemKey
from flashtune.core.records.results import PROVIDERS, Bits, Ending, Finding, TuningRecord
from flashtune.core.system.errors import DatabaseError, NoKernelFound
from flashtune.db.card import check_card
from flashtune.db.inspection import MissingDatabaseError, unfinished
from flashtune.db.library import Library
from flashtune.db.preference import ALL_REPEAT, CLAIMED, by_key, claimed, key_order, serve_all, with_verdicts, worth_keeping
from flashtune.db.store import sqlite_path
from flashtune.db.writing import write_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Result of a merge: records that were `kept`, those that `lost` with the record that won, and those `passed_over`.

    A record is passed over where neither it nor any other of its key can be served. `candidates` are kept, too, and don't serve."""

    kept: tuple[TuningRecord, ...]
    lost: tuple[tuple[TuningRecord, TuningRecord], ...]
    passed_over: tuple[TuningRecord, ...]
    candidates: tuple[TuningRecord, ...] = ()


MOST_CANDIDATES = 3
"""Most candidates that are kept of a key: as many race beside its winner."""


def merge(
    locations: Sequence[str | Path],
    destination: str | Path,
    *,
    replace: bool = False,
    passed_over: Callable[[TuningRecord], object] = serve_all,
    bits: Bits = ALL_REPEAT,
    strangers: Collection[str | Path] = (),
) -> Merged:
    """Write the best record of each key in any of these databases to a new SQLite file, with its provenance unchanged.

    Of several records of a key the one with the largest speedup over PyTorch in its own run is kept (`preference`, as in a library);
    ties go to the database that is named first. Where its kernel isn't bitwise repeatable, the best record of a repeatable one is kept
    beside it, for deterministic calls (`worth_keeping`). Providers that any of them found wrong stay so (`with_verdicts`). Records that are
    `passed_over` lose to the next. Of the databases of `strangers` nothing serves and no verdict counts: their best measured kernels are
    kept as candidates, which `flashtune verify --requalify` races. The file is written atomically; `replace` allows it to replace another
    tuned database, but not one of these.

    Raises NoKernelFound where there is nothing to write, and DatabaseError where the destination can't be written to.
    """
    target = sqlite_path(destination)
    if target is None:
        raise DatabaseError("databases can be merged into a SQLite file only: give the path of a file")
    sources = [path for path in map(sqlite_path, locations) if path is not None]
    # Not Path.resolve, which raises for circular links.
    if any(os.path.realpath(path) == os.path.realpath(target) for path in sources):
        raise DatabaseError(f"{target} is one of the databases to merge: write to another path")
    libraries = {location: Library.of(location) for location in locations}
    known = [library for location, library in libraries.items() if location not in strangers]
    wrong = [one for library in known for same in library.wrong.values() for one in same]
    records = (
        _of_strangers(record) if location in strangers else record
        for location, library in libraries.items()
        for record in library.winners()
    )
    found = merged(records, passed_over, bits, wrong)
    if not (found.kept or found.candidates):
        raise NoKernelFound("these databases hold no record that could be used: search first, or name others")
    write_file(target, [record.as_result() for record in (*found.kept, *found.candidates)], replace=replace)
    return found


def held(path: Path) -> list[TuningRecord]:
    """Records of a file that others are to be added to; raises as `_held` does."""
    return _held(path)[0]


def _held(path: Path) -> tuple[list[TuningRecord], list[Finding]]:
    """Records of a file that others are to be added to, and the providers that were wrong; none where it is missing or empty.

    Raises DatabaseError where it is damaged, another file than its metadata file names, or being written.
    """
    try:
        library = Library.of(path)
        found = library.winners(), [one for same in library.wrong.values() for one in same]
    except MissingDatabaseError:
        return [], []
    check_card(path)
    if unfinished(path):
        raise DatabaseError(f"{path} is being written by another process: wait until it ends, or choose another path")
    return found


def add(
    records: Iterable[TuningRecord],
    path: Path,
    *,
    passed_over: Callable[[TuningRecord], object] = serve_all,
    bits: Bits = ALL_REPEAT,
    wrong: Iterable[Finding] = (),
) -> Merged:
    """Write the best of each key among these records and those of a file to the file, which is made where it is missing; `wrong` are
    findings about providers beside the file's own.

    What is passed over stays, unlike in a `merge`: another version may serve it. Raises as `held` does.
    """
    own, of_file = _held(path)
    found = merged([*records, *own], passed_over, bits, [*wrong, *of_file])
    write_file(path, [record.as_result() for record in (*found.kept, *found.candidates, *found.passed_over)], replace=True)
    return found


def best_of_each(kept: Iterable[TuningRecord]) -> dict[ProblemKey, TuningRecord]:
    """The record that serves each key, of those that a merge kept."""
    found: dict[ProblemKey, TuningRecord] = {}
    for record in kept:
        found.setdefault(record.key, record)
    return found


def merged(
    records: Iterable[TuningRecord], passed_over: Callable[[TuningRecord], object], bits: Bits, wrong: Iterable[Finding] = ()
) -> Merged:
    """The best of each key among these records, the earlier of equal ones, with what was found of `wrong` providers."""
    kept, lost, refused, candidates = [], [], [], []
    found = by_key(records)
    for key in sorted(found, key=key_order):
        same = [record for record in found[key] if not claimed(record)]
        stay = worth_keeping(same, passed_over, bits)
        kept += stay
        others, beyond = _candidates(found[key], stay, passed_over)
        candidates += others
        if not stay:
            refused += same[:1] or ([] if others else beyond[:1])
            continue
        runs = [_run(record) for record in stay]
        lost += [(record, stay[-1] if bits.repeats(record) else stay[0]) for record in same if _run(record) not in runs]
    kept = with_verdicts(kept, wrong)
    return Merged(kept=tuple(kept), lost=tuple(lost), passed_over=tuple(refused), candidates=tuple(candidates))


def _of_strangers(record: TuningRecord) -> TuningRecord:
    """A record as a candidate; one that failed where it comes from stays refuted, and is passed over."""
    return record if record.refuted else replaced(record, ending=Ending(reason=CLAIMED))


def _candidates(
    same: Sequence[TuningRecord], stay: Sequence[TuningRecord], passed_over: Callable[[TuningRecord], object]
) -> tuple[list[TuningRecord], list[TuningRecord]]:
    """Candidates among a key's records, other kernels than those that stay, the best first; and those that can't race here."""
    claims = [record for record in same if claimed(record)]
    able = [
        record
        for record in claims
        if record.outcome.source == "measured"
        and record.outcome.template not in PROVIDERS
        and not passed_over(replaced(record, refuted=""))
    ]
    known = {record.outcome.variant_id for record in stay}
    first = {record.outcome.variant_id: record for record in reversed(able) if record.outcome.variant_id not in known}
    found = [record for record in able if first.get(record.outcome.variant_id) is record]
    return found[:MOST_CANDIDATES], [record for record in claims if record not in able]


def _run(record: TuningRecord) -> tuple[object, ...]:
    """Identity of a record's run, by which copies of it in several databases are recognized."""
    return record.problem, record.outcome, record.provenance, record.baseline
