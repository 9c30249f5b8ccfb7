"""Store of search results, which keeps all trials; the best records are a query."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypedDict, TypeVar, Unpack, cast

from sqlalchemy import ColumnElement, Connection, Executable, Subquery, func, make_url, or_, select
from sqlalchemy.exc import ArgumentError
from sqlalchemy.sql.selectable import FromClause

from flashtune.core.config import Direction
from flashtune.core.dtypes import DType
from flashtune.core.errors import DatabaseError, NoKernelFound
from flashtune.core.problem import ProblemKey
from flashtune.core.results import Bits, Outcome, SearchResult, TuningRecord
from flashtune.core.secrets import mask_secrets
from flashtune.db import rows
from flashtune.db.inspection import row_named
from flashtune.db.preference import ALL_REPEAT, by_key, foremost, key_order, serve_all, worth_keeping
from flashtune.db.schema import ProblemRow, RunRow, TrialRow
from flashtune.db.server import Server
from flashtune.db.sqlite_file import SqliteFile
from flashtune.db.values import LARGEST, Row
from flashtune.db.writing import ResultRows, write_file

T = TypeVar("T")

_PROBLEM, _RUN, _TRIAL = (model.__table__ for model in (ProblemRow, RunRow, TrialRow))


class KeyFilter(TypedDict, total=False):
    """Filter by columns of the key; None and an absent name mean any value."""

    gpu: str | None
    n: int | None
    d: int | None
    dtype: DType | None
    direction: Direction | None
    d_v: int | None
    n_q: int | None
    features: str | None
    gqa_ratio: int | None
    bh_bucket: int | None


class _Access(Protocol):
    name: str

    def open(self) -> None: ...
    def close(self) -> None: ...
    def read(self, work: Callable[[Connection], T]) -> T: ...
    def write(self, work: Callable[[Connection], T]) -> T: ...


class Store:
    """Tuned database in a SQLite file or on a server; a context manager, safe to use from several threads and after a fork.

    Every method raises DatabaseError where the database is damaged or has a row that flashtune would not write, and
    EnvironmentProblem where the disk is full or a permission is missing. A failed write changes nothing.
    """

    def __init__(self, access: _Access, *, writable: bool) -> None:
        self._access = access
        self._writable = writable
        self.name = access.name

    @classmethod
    def open(cls, location: str | Path, *, writable: bool) -> Self:
        """Open the database at a path or SQLAlchemy URL.

        Read-only: it must exist; neither it nor its folder is changed. Writable: it and its parent folders are created where they are
        missing, and an older schema is upgraded. A file that is damaged, of another application or of a newer flashtune is refused and
        left unchanged.
        """
        access = _access(location, writable=writable)
        try:
            access.open()
        except BaseException:
            access.close()
            raise
        return cls(access, writable=writable)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release resources; the store can't be used afterwards."""
        self._access.close()

    def save(self, result: SearchResult, *, once: bool = False) -> None:
        """Save all of `result` in one transaction; any number of processes may save at the same time.

        With `once` nothing is saved where the same run is there already, from a writer that died after saving it. Free texts are
        tidied (see `values.tidy`). Raises InputError where the result could not be read back, such as a time of zero.
        """
        if not self._writable:
            raise DatabaseError(f"{self.name} is open for reading only: open it for writing to save results")
        rows_of_result = ResultRows.of(result)
        self._access.write(lambda connection: rows_of_result.insert(connection, once=once))

    def best(self, key: ProblemKey) -> TuningRecord | None:
        """Best record of exactly this key, or None."""
        return next(iter(by_key(self.winners(**cast(KeyFilter, asdict(key)))).get(key, [])), None)

    def records(self, *, passed_over: Callable[[TuningRecord], object] = serve_all, **where: Unpack[KeyFilter]) -> list[TuningRecord]:
        """Best record of every key that passes the filter, in order of keys.

        Each run's winner is rank 1 of its closing race, or else its fastest correct outcome (ties by variant id); `preference` chooses
        between runs. A record that is `passed_over` loses to the next of its key, if there is one.
        """
        found = by_key(self.winners(**where))
        return [foremost(found[key], passed_over) for key in sorted(found, key=key_order)]

    def winners(self, **where: Unpack[KeyFilter]) -> list[TuningRecord]:
        """Winner of every run that passes the filter (see `records`), newest run first."""
        condition = _filtered(where)
        # Selected by time or rank, not by fate, so that an impossible fate is read and refused.
        timed = or_(_TRIAL.c.median_us.is_not(None), _TRIAL.c.rank.is_not(None))
        first = _first_of_each_run(timed, *condition)
        query = (
            select(*_labelled(_PROBLEM), *_labelled(_RUN), *_labelled(_TRIAL))
            .select_from(first.join(_TRIAL, _TRIAL.c.id == first.c.id).join(_RUN).join(_PROBLEM))
            .where(first.c.place == 1)
            .order_by(_RUN.c.id.desc())
        )
        running = _first_of_each_run(_TRIAL.c.median_us.is_not(None), _TRIAL.c.config.like(rows.RUNNING_PATTERN), *condition)
        fallback_query = (
            select(*_labelled(_TRIAL)).select_from(running.join(_TRIAL, _TRIAL.c.id == running.c.id)).where(running.c.place == 1)
        )
        found_winners, found_fallbacks = self._access.read(lambda connection: (_all(connection, query), _all(connection, fallback_query)))
        fallbacks = {found["trial.run_id"]: found for found in found_fallbacks}
        return [self._record(found, fallbacks.get(found["run.id"])) for found in found_winners]

    def results(self, **where: Unpack[KeyFilter]) -> list[SearchResult]:
        """Results as they were saved, one for each run that passes the filter, oldest first."""
        condition = _filtered(where)
        run_query = select(*_labelled(_PROBLEM), *_labelled(_RUN)).select_from(_RUN.join(_PROBLEM)).where(*condition).order_by(_RUN.c.id)
        trial_query = (
            select(*_labelled(_TRIAL))
            .select_from(_TRIAL.join(_RUN).join(_PROBLEM))
            .where(*condition)
            .order_by(_TRIAL.c.run_id, _TRIAL.c.number)
        )
        found_runs, found_trials = self._access.read(lambda connection: (_all(connection, run_query), _all(connection, trial_query)))
        outcomes: dict[int, list[Outcome]] = {}
        for found in found_trials:
            outcomes.setdefault(found["trial.run_id"], []).append(self._outcome(found))
        results = []
        for found in found_runs:
            key, run = self._run(found)
            results.append(SearchResult(gpu=key.gpu, outcomes=tuple(outcomes.get(found["run.id"], ())), **run))
        return results

    def export(
        self,
        destination: str | Path,
        *,
        winners_only: bool,
        replace: bool = False,
        passed_over: Callable[[TuningRecord], object] = serve_all,
        bits: Bits = ALL_REPEAT,
        **where: Unpack[KeyFilter],
    ) -> int:
        """Write runs that pass the filter to a new, compact SQLite file, to ship beside model weights; returns the number of runs.

        `winners_only` keeps the best record of each key that is not `passed_over`, and where its kernel isn't bitwise repeatable also
        the best repeatable one (`worth_keeping`), else all runs with all trials. Equal contents give equal bytes (under one version of
        SQLite). The file is written atomically; `replace` allows it to replace another tuned database.

        Raises NoKernelFound where nothing passes the filter, and DatabaseError where the destination can't be written to.
        """
        if winners_only:
            found = by_key(self.winners(**where))
            kept = (record for key in sorted(found, key=key_order) for record in worth_keeping(found[key], passed_over, bits))
            results = [record.as_result() for record in kept]
        else:
            results = sorted(self.results(**where), key=lambda result: key_order(result.problem.key(result.gpu)))
        if not results:
            wanted = ", ".join(f"{name} {value}" for name, value in where.items() if value is not None)
            of = f" of {wanted}" if wanted else ""
            raise NoKernelFound(f"{self._access.name} holds nothing{of} to export: search for it first, or loosen the filters")
        target = sqlite_path(destination)
        if target is None:
            raise DatabaseError(f"{self._access.name} can be exported to a SQLite file only: give the path of a file")
        if isinstance(self._access, SqliteFile) and self._access.is_at(target):
            raise DatabaseError(f"{self._access.name} can't be exported to itself: give another path")
        write_file(target, results, replace=replace)
        return len(results)

    def _record(self, found: dict[str, Any], fallback: dict[str, Any] | None) -> TuningRecord:
        (key, run), outcome = self._run(found), self._outcome(found)
        with row_named(self.name, "trial", "" if fallback is None else fallback["trial.id"]):
            fallback_outcome = rows.fallback_of(outcome, None if fallback is None else _part(fallback, "trial"))
        with row_named(self.name, "trial", found["trial.id"]):
            rows.refuse_impossible(key.gpu, run["problem"], outcome, run["baseline"])
        return TuningRecord(key=key, outcome=outcome, fallback=fallback_outcome, origin=self.name, **run)

    def _run(self, found: dict[str, Any]) -> tuple[ProblemKey, dict[str, Any]]:
        with row_named(self.name, "problem", found["problem.id"]):
            key = rows.read_key(_part(found, "problem"))
        with row_named(self.name, "run", found["run.id"]):
            return key, rows.read_run(_part(found, "run"), key)

    def _outcome(self, found: dict[str, Any]) -> Outcome:
        with row_named(self.name, "trial", found["trial.id"]):
            return rows.read_outcome(_part(found, "trial"))


def _access(location: str | Path, *, writable: bool) -> _Access:
    path = sqlite_path(location)
    return Server(make_url(str(location)), writable=writable) if path is None else SqliteFile(path, writable=writable)


def sqlite_path(location: str | Path) -> Path | None:
    """Path of the file of a path or SQLite URL; None for the URL of a server."""
    text = os.fspath(location)
    if isinstance(location, str) and "://" in location:
        try:
            url = make_url(location)
        except (ArgumentError, ValueError) as error:
            # The text may hold a password, so only its scheme is shown.
            scheme = location.split("://")[0]
            raise DatabaseError(f"{scheme}://... is no database URL: give a path, or a URL such as sqlite:///tuned.sqlite") from error
        if url.get_backend_name() != "sqlite":
            return None
        if url.drivername not in ("sqlite", "sqlite+pysqlite"):
            raise DatabaseError(f"{url.drivername} is another driver than Python's own: write sqlite:///path")
        if url.query:
            raise DatabaseError(
                f"{mask_secrets(location)} has options after '?', which flashtune sets itself: give the plain path of the file"
            )
        text = url.database or ":memory:"
    if not text or text == ":memory:":
        raise DatabaseError(f"{text or 'an empty path'!r} names no file, and a database in memory would be lost: give a path")
    if "\0" in text:
        raise DatabaseError(f"{text!r} holds a NUL character: give the path of a file")
    return Path(os.path.expanduser(text))


def _first_of_each_run(*where: ColumnElement[bool]) -> Subquery:
    """Ids of the trials that pass the filter, and each one's `place` in its run, the best first."""
    place = func.row_number().over(
        partition_by=_TRIAL.c.run_id,
        order_by=(func.coalesce(_TRIAL.c.rank, LARGEST), _TRIAL.c.median_us, _TRIAL.c.variant_id, _TRIAL.c.number),
    )
    return select(_TRIAL.c.id, place.label("place")).select_from(_TRIAL.join(_RUN).join(_PROBLEM)).where(*where).subquery()


def _all(connection: Connection, query: Executable) -> list[dict[str, Any]]:
    return [dict(found) for found in connection.execute(query).mappings()]


def _labelled(table: FromClause) -> list[ColumnElement[Any]]:
    """The table's columns, named `table.column` in the result."""
    return [column.label(str(column)) for column in table.c]


def _part(found: dict[str, Any], table: str) -> Row:
    prefix = f"{table}."
    return Row({name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)})


def _filtered(where: KeyFilter) -> list[ColumnElement[bool]]:
    return [_PROBLEM.c[name] == value for name, value in where.items() if value is not None]
