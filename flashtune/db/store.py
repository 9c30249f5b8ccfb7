"""Store of search results, which keeps all trials; the best records are a query."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, Unpack, cast

from sqlalchemy import Connection, make_url, text
from sqlalchemy.exc import ArgumentError

from flashtune.core.problems.config import Direction
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import ProblemKey
from flashtune.core.records.results import Bits, Finding, SearchResult, TuningRecord
from flashtune.core.system.errors import DatabaseError, NoKernelFound
from flashtune.core.system.secrets import mask_url
from flashtune.db import queries
from flashtune.db.preference import ALL_REPEAT, by_key, foremost, key_order, latest, refuted, serve_all, with_verdicts, worth_keeping
from flashtune.db.server import Server
from flashtune.db.sqlite_file import SqliteFile
from flashtune.db.writing import ResultRows, write_file


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


class Store:
    """Tuned database in a SQLite file or on a server; a context manager, safe to use from several threads and after a fork.

    Every method raises DatabaseError where the database is damaged or has a row that flashtune would not write, and
    EnvironmentProblem where the disk is full or a permission is missing. A failed write changes nothing.
    """

    def __init__(self, access: SqliteFile | Server, *, writable: bool) -> None:
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

    def save(self, result: SearchResult, *, once: bool = False, replacing: bool = False) -> None:
        """Save all of `result` in one transaction; any number of processes may save at the same time.

        With `once` nothing is saved where the same run is there already, from a writer that died after saving it, and one that was saved
        before its last trials or its baseline is completed; with `replacing` it takes the place of all earlier runs of its key. Free texts
        are tidied (see `values.tidy`). Raises InputError where the result could not be read back, such as a time of zero.
        """
        if not self._writable:
            raise DatabaseError(f"{self.name} is open for reading only: open it for writing to save results")
        rows_of_result = ResultRows.of(result)
        self._access.write(lambda connection: rows_of_result.insert(connection, once=once, replacing=replacing))

    def best(self, key: ProblemKey) -> TuningRecord | None:
        """Best record of exactly this key, or None."""
        return next(iter(by_key(self.winners(**cast(KeyFilter, asdict(key)))).get(key, [])), None)

    def records(self, *, passed_over: Callable[[TuningRecord], object] = serve_all, **where: Unpack[KeyFilter]) -> list[TuningRecord]:
        """Best record of every key that passes the filter, in order of keys.

        `preference` chooses between the winners of runs (`queries.winners`). A record that is `passed_over` loses to the next of its
        key, if there is one.
        """
        found = by_key(self.winners(**where))
        return [foremost(found[key], passed_over) for key in sorted(found, key=key_order)]

    def winners(self, **where: Unpack[KeyFilter]) -> list[TuningRecord]:
        """Winner of every run that passes the filter (see `records`), newest run first."""
        found = self._access.read(lambda connection: queries.winners(_executing(connection), *_filtered(where)))
        findings = latest(self.findings())
        return [refuted(record, findings) for record in queries.records(found, self.name)]

    def findings(self) -> list[Finding]:
        """Kernels that failed when records were timed again."""
        return self._access.read(lambda connection: queries.findings(_executing(connection), self.name))

    def results(self, **where: Unpack[KeyFilter]) -> list[SearchResult]:
        """Results as they were saved, one for each run that passes the filter, oldest first."""
        found = self._access.read(lambda connection: queries.runs(_executing(connection), *_filtered(where)))
        return queries.results(found, self.name)

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

        `winners_only` keeps the best record of each key that is not `passed_over`, where its kernel isn't bitwise repeatable also the best
        repeatable one (`worth_keeping`), else all runs with all trials. Equal contents give equal bytes
        (under one version of SQLite). The file is written atomically; `replace` allows it to replace another tuned database.

        Raises NoKernelFound where nothing passes the filter, and DatabaseError where the destination can't be written to.
        """
        if winners_only:
            found = by_key(self.winners(**where))
            kept = [record for key in sorted(found, key=key_order) for record in worth_keeping(found[key], passed_over, bits)]
            wrong = [one for one in self.findings() if one.provider]
            results = [record.as_result() for record in with_verdicts(kept, wrong)]
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


def _access(location: str | Path, *, writable: bool) -> SqliteFile | Server:
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
            raise DatabaseError(f"{mask_url(location)} has options after '?', which flashtune sets itself: give the plain path of the file")
        text = url.database or ":memory:"
    if not text or text == ":memory:":
        raise DatabaseError(f"{repr(text) if text else 'an empty path'} names no file, and a database in memory would be lost: give a path")
    if "\0" in text:
        raise DatabaseError(f"{text!r} holds a NUL character: give the path of a file")
    return Path(os.path.expanduser(text))


def _executing(connection: Connection) -> queries.Execute:
    return lambda query, parameters: connection.execute(text(query), parameters).all()


def _filtered(where: KeyFilter) -> tuple[str, dict[str, object]]:
    """Condition on rows of `problem`, and its parameters."""
    wanted = {name: value for name, value in where.items() if value is not None}
    return " AND ".join(["TRUE", *(f"problem.{name} = :{name}" for name in wanted)]), wanted
