"""The records of a SQLite file, read with sqlite3 alone and only as they are requested: a new process's first call waits neither for
SQLAlchemy nor for records that have no say in it, however many there are."""

import os
import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from flashtune.core.dtypes import OTHER_16_BITS
from flashtune.core.errors import DatabaseError
from flashtune.core.problem import DECODE_ROWS, ProblemKey
from flashtune.core.results import TuningRecord
from flashtune.db import rows, values
from flashtune.db.connecting import OPENING_SECONDS, Allowance, bounded, connect, patience
from flashtune.db.inspection import examine, explain, header_size, is_quiet, row_named, signature, unfinished
from flashtune.db.preference import by_key
from flashtune.db.values import LARGEST, TABLES, Row

QUIET_SECONDS = 0.02
"""A file changed within this time may be changing still: clocks of file systems tick every few milliseconds."""
CHECKED_BYTES, READ_WHOLE = 4 << 20, 1 << 18
"""Files of at most so many bytes are checked in full when they are opened, and read in full, so that what is wrong is said at once."""
MOST_RUNS = 4096
"""Runs of one key, beyond which a file isn't read."""
MOST_NEAR = 24
"""So many keys with more N than a call's and as many with less are candidates for it, of its spec and of any, on each GPU."""
COPY = "copy.sqlite"
"""The name of a private copy in its folder."""
FAR = 16
"""Other keys of the call's spec are within this factor of its N."""

_KEY = tuple(field.name for field in fields(ProblemKey))

# What Store.winners reads; a test compares the two.
_FIRST_OF_EACH_RUN = f"""
    WITH ranked AS (
        SELECT id, row_number() OVER (PARTITION BY run_id ORDER BY coalesce(rank, {LARGEST}), median_us, variant_id, number) AS place
        FROM trial WHERE ({{which}}) {{only}}
    )
    SELECT {{columns}} FROM ranked JOIN trial ON trial.id = ranked.id
"""
_WINNERS = f"""
    {_FIRST_OF_EACH_RUN} JOIN run ON run.id = trial.run_id JOIN problem ON problem.id = run.problem_id
    WHERE place = 1 ORDER BY run.id DESC
"""
_TWINS = f"{_FIRST_OF_EACH_RUN} WHERE place = 1"

_OF_ONE_KEY = "AND run_id IN (SELECT id FROM run WHERE problem_id = ?)"

_COMPARABLE = "gpu = :gpu AND direction = :direction AND dtype IN (:dtype, :other) AND (n_q <= :decode) = (:n_q <= :decode)"
_SAME_SPEC = "d = :d AND d_v = :d_v AND features = :features AND n BETWEEN :n / :far AND :n * :far"

_INDEXES = (("problem", "gpu, n"), ("run", "problem_id"), ("trial", "run_id"))
"""What look-ups by key take, which files of ours have by their keys."""


class FileChanged(Exception):
    """The file was written in place since it was opened, is being written, or needs a migration."""


class FileRecords(Mapping[ProblemKey, list[TuningRecord]]):
    """The records of each key in a SQLite file, the best first (flashtune.db.preference), each value checked when it is read.

    Raises FileChanged where the file needs more than reading, and DatabaseError where it is damaged. A file that is deleted or replaced
    is read on as it was. What is `shipped` with the package isn't examined. Where there is a private `copy` of the file in this folder,
    recovered, up to date and examined, that is read in its place, whatever becomes of the file.
    """

    def __init__(self, path: Path, *, shipped: bool = False, copy: "tempfile.TemporaryDirectory[str] | None" = None) -> None:
        self._name, self._path, self._copy = str(path), Path(os.path.realpath(path)), copy
        settled = shipped or copy is not None
        self._lock = threading.Lock()
        self._ids: dict[ProblemKey, int] = {}
        self._whole: dict[ProblemKey, list[TuningRecord]] | None = None
        size = header_size(self._source, self._name)
        self._seen = None if settled else signature(self._path)
        if self._seen is not None and (unfinished(self._path) or not is_quiet(self._seen, QUIET_SECONDS)):
            raise FileChanged
        self._opening: Allowance | None = Allowance(OPENING_SECONDS)
        self._process, self._connection = self._connected()
        with self._reading():
            if not settled and examine(self._connection, self._name, thorough=size <= CHECKED_BYTES) != values.SCHEMA_VERSION:
                raise FileChanged
            found = {table: self._connection.execute(f"PRAGMA table_info({table})").fetchall() for table in TABLES}
            self._names = {table: [str(row[1]) for row in rows] for table, rows in found.items()}
            if not shipped and size > CHECKED_BYTES and not all(self._finds(table, columns) for table, columns in _INDEXES):
                self._index()
        self._queries = {only: self._written(only) for only in ("", _OF_ONE_KEY)}
        if not shipped and size <= READ_WHOLE:
            self._whole = by_key(self.winners())
        self._opening = None

    def __getitem__(self, key: ProblemKey) -> list[TuningRecord]:
        if self._whole is not None:
            return self._whole[key]
        number = self._ids.get(key)
        if number is None:
            where = " AND ".join(f"{name} = ?" for name in _KEY)
            found = self._execute(f"SELECT id FROM problem WHERE {where} LIMIT 1", [getattr(key, name) for name in _KEY])
            if not found:
                raise KeyError(key)
            number = found[0][0]
        return by_key(self._read(number)).get(key, [])

    def __iter__(self) -> Iterator[ProblemKey]:
        return iter(self._keys("TRUE", {})) if self._whole is None else iter(self._whole)

    def __len__(self) -> int:
        return int(self._execute("SELECT count(*) FROM problem", ())[0][0]) if self._whole is None else len(self._whole)

    def near(self, key: ProblemKey, gpus: Collection[str]) -> set[ProblemKey]:
        """Those keys on these GPUs that are nearest to a key by N, of its spec and of any that may stand in for it."""
        call: dict[str, Any] = {**asdict(key), "other": OTHER_16_BITS.get(key.dtype, key.dtype), "decode": DECODE_ROWS, "far": FAR}
        found: set[ProblemKey] = set()
        for gpu in gpus:
            for spec in ("TRUE", _SAME_SPEC):
                for side in ("n <= :n ORDER BY n DESC", "n > :n ORDER BY n"):
                    found.update(self._keys(f"{_COMPARABLE} AND {spec} AND {side} LIMIT {MOST_NEAR}", {**call, "gpu": gpu}))
        return found

    def winners(self) -> list[TuningRecord]:
        """The candidate of every run, newest run first."""
        return self._read(None)

    @property
    def _source(self) -> Path:
        """The file that is read."""
        return self._path if self._copy is None else Path(self._copy.name) / COPY

    def _connected(self) -> tuple[int, sqlite3.Connection]:
        """The process and its connection, which is kept: to open one takes longer than to query it."""
        with self._explained():
            connection = connect(self._source, "mode=ro&immutable=1", self._name, self._allowance())
        weakref.finalize(self, connection.close)
        return os.getpid(), connection

    def _allowance(self) -> Allowance:
        """How long SQLite may compute: all statements together while the file is opened, each as its size allows then."""
        return self._opening or patience(self._path)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """DatabaseError in place of what sqlite3 raises; FileChanged where the file was written meanwhile."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OSError, DatabaseError) as error:
            self._refuse_change()
            raise explain(error, self._name) from error

    def _refuse_change(self) -> None:
        """Raise FileChanged where the file was written in place; one that was deleted or replaced is still open as it was."""
        if self._seen is None or (now := signature(self._path)) == self._seen:
            return
        old, new = self._seen[0], now[0]
        if not (isinstance(old, tuple) and (new is None or (isinstance(new, tuple) and new[0] != old[0]))):
            raise FileChanged

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Holds the lock, with errors explained, and a connection of this process that ends what takes too long."""
        with self._lock, self._explained():
            if self._process != os.getpid():
                # A connection mustn't be taken through a fork.
                self._process, self._connection = self._connected()
            with bounded(self._connection, self._name, self._allowance()):
                yield
            self._refuse_change()

    def _execute(self, query: str, parameters: Sequence[object] | Mapping[str, object]) -> list[tuple[Any, ...]]:
        with self._reading():
            return self._connection.execute(query, parameters).fetchall()

    def _finds(self, table: str, columns: str) -> bool:
        """Whether SQLite looks these columns up in an index."""
        where = " AND ".join(f"{name} = 1" for name in columns.split(", "))
        plan = self._connection.execute(f"EXPLAIN QUERY PLAN SELECT 1 FROM {table} WHERE {where}").fetchall()
        return all(str(step[-1]).startswith("SEARCH") for step in plan)

    def _index(self) -> None:
        """Go on with a private copy that has the indexes this file lacks."""
        if self._copy is None:
            self._copy = tempfile.TemporaryDirectory(prefix="flashtune-db-")
            shutil.copyfile(self._path, self._source)
        allowance = self._allowance()
        with closing(connect(self._source, "mode=rw", self._name, allowance)) as connection, bounded(connection, self._name, allowance):
            for pragma in ("journal_mode=OFF", "synchronous=OFF"):
                connection.execute(f"PRAGMA {pragma}")
            for table, columns in _INDEXES:
                name = f"flashtune_{table}_{columns.replace(', ', '_')}"
                connection.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {table} ({columns})")
        self._process, self._connection = self._connected()

    def _written(self, only: str) -> tuple[str, str]:
        """The queries for candidates, and for their twins."""
        names = self._names
        columns = ", ".join(f"{table}.{name}" for table in TABLES for name in names[table])
        trial_columns = ", ".join(f"trial.{name}" for name in names["trial"])
        twin_trials = f"median_us IS NOT NULL AND config LIKE '{rows.RUNNING_PATTERN}'"
        return (
            _WINNERS.format(which="median_us IS NOT NULL OR rank IS NOT NULL", columns=columns, only=only),
            _TWINS.format(which=twin_trials, columns=trial_columns, only=only),
        )

    def _keys(self, where: str, parameters: Mapping[str, object]) -> list[ProblemKey]:
        """The keys of these rows of `problem`, whose ids are remembered."""
        keys = []
        for number, *found in self._execute(f"SELECT id, {', '.join(_KEY)} FROM problem WHERE {where}", parameters):
            with row_named(self._name, "problem", number):
                key = rows.read_key(Row(dict(zip(_KEY, found, strict=True))))
            self._ids[key] = number
            keys.append(key)
        return keys

    def _read(self, problem: int | None) -> list[TuningRecord]:
        """The candidates of the runs of one row of `problem`, or of all."""
        names, parameters = self._names, () if problem is None else (problem,)
        winners, twins_of = self._queries["" if problem is None else _OF_ONE_KEY]
        with self._reading():
            most = -1 if problem is None else MOST_RUNS
            found = self._connection.execute(f"{winners} LIMIT {most}", parameters).fetchall()
            others = self._connection.execute(f"{twins_of} LIMIT {most}", parameters).fetchall()
        twins = {
            fields["run_id"]: Row(fields) for fields in (dict(zip(names["trial"], found_values, strict=True)) for found_values in others)
        }
        return [self._record(one, twins) for one in found]

    def _record(self, found_values: Sequence[object], twins: Mapping[object, Row]) -> TuningRecord:
        """The record of one row of the query for candidates."""
        rest = iter(found_values)
        problem, run, trial = (Row({name: next(rest) for name in self._names[table]}) for table in TABLES)
        with row_named(self._name, "problem", problem.values["id"]):
            key = rows.read_key(problem)
        with row_named(self._name, "run", run.values["id"]):
            found = rows.read_run(run, key)
        with row_named(self._name, "trial", trial.values["id"]):
            outcome = rows.read_outcome(trial)
            twin = rows.fallback_of(outcome, twins.get(trial.values["run_id"]))
            rows.refuse_impossible(key.gpu, found["problem"], outcome, found["baseline"])
        return TuningRecord(key=key, outcome=outcome, twin=twin, origin=self._name, **found)
