"""Records of a SQLite file, read on request with sqlite3 alone.

The first call of a process waits neither for SQLAlchemy nor for records that it doesn't look at.
"""

import os
import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashtune.core.problems.dtypes import OTHER_16_BITS
from flashtune.core.problems.problem import DECODE_ROWS, ProblemKey
from flashtune.core.records.results import Finding, TuningRecord
from flashtune.core.system.errors import DatabaseError
from flashtune.db import queries, rows, values
from flashtune.db.connecting import OPENING_SECONDS, Allowance, bounded, connect, patience
from flashtune.db.inspection import examine, explain, header_size, is_quiet, row_named, signature, unfinished
from flashtune.db.preference import by_key
from flashtune.db.values import Row, read_key

CHECKED_BYTES, READ_WHOLE = 4 << 20, 1 << 18
"""Largest files that are checked in full, and read in full, when they are opened, in bytes: errors show at once."""
MOST_RUNS = 4096
"""Most runs of one key that are read."""
MOST_NEAR = 24
"""Number of candidate keys for a call on each side of its N, of its spec and of any, on each GPU."""
COPY = "copy.sqlite"
"""File name of a private copy in its folder."""
FAR = 16
"""Largest ratio of N between a call and candidate keys of its spec."""

_COMPARABLE = "gpu = :gpu AND direction = :direction AND dtype IN (:dtype, :other) AND (n_q <= :decode) = (:n_q <= :decode)"
_SAME_SPEC = "d = :d AND d_v = :d_v AND features = :features AND n BETWEEN :n / :far AND :n * :far"

_INDEXES = (("problem", "gpu, n"), ("run", "problem_id"), ("trial", "run_id"))
"""Tables and columns of look-ups by key, which have indexes in our files."""


class FileChanged(Exception):
    """Signal that the file was written since it was opened, is being written, or needs a migration."""


class FileRecords(Mapping[ProblemKey, list[TuningRecord]]):
    """Records of each key in a SQLite file, the best first (flashtune.db.preference); values are checked when they are read.

    Raises FileChanged where the file needs more than reading, and DatabaseError where it is damaged. After the file is deleted or
    replaced, the old one is still read. The database `shipped` with the package isn't examined. A private `copy` in this folder
    (recovered, migrated and examined) is read in place of the file, whatever happens to the file.
    """

    def __init__(self, path: Path, *, shipped: bool = False, copy: "tempfile.TemporaryDirectory[str] | None" = None) -> None:
        self._name, self._path, self._copy = str(path), Path(os.path.realpath(path)), copy
        settled = shipped or copy is not None
        self._lock = threading.Lock()
        self._ids: dict[ProblemKey, int] = {}
        self._whole: dict[ProblemKey, list[TuningRecord]] | None = None
        self._findings: list[Finding] | None = None
        size = header_size(self._source, self._name)
        self._seen = None if settled else signature(self._path)
        if self._seen is not None and (unfinished(self._path) or not is_quiet(self._seen)):
            raise FileChanged
        self._opening: Allowance | None = Allowance(OPENING_SECONDS)
        self._process, self._connection = self._connected()
        with self._reading():
            if not settled and examine(self._connection, self._name, thorough=size <= CHECKED_BYTES) != values.SCHEMA_VERSION:
                raise FileChanged
            if not shipped and size > CHECKED_BYTES and not all(self._finds(table, columns) for table, columns in _INDEXES):
                self._index()
        if not shipped and size <= READ_WHOLE:
            self._whole = by_key(self.winners())
            _ = self.findings
        self._opening = None

    def __getitem__(self, key: ProblemKey) -> list[TuningRecord]:
        if self._whole is not None:
            return self._whole[key]
        number = self._ids.get(key)
        if number is None:
            where = " AND ".join(f"{name} = :{name}" for name in rows.PROBLEM)
            found = self._execute(f"SELECT id FROM problem WHERE {where} LIMIT 1", asdict(key))
            if not found:
                raise KeyError(key)
            number = found[0][0]
        with self._reading():
            same = queries.winners(self._fetched, "problem.id = :problem", {"problem": number}, MOST_RUNS)
        return by_key(queries.records(same, self._name)).get(key, [])

    def read_whole(self) -> None:
        """Read the records of all keys at once, which takes less time than one after the other, where the file doesn't change."""
        if self._whole is None and self._seen is None:
            self._whole = by_key(self.winners())

    def __iter__(self) -> Iterator[ProblemKey]:
        return iter(self._keys("TRUE", {})) if self._whole is None else iter(self._whole)

    def __len__(self) -> int:
        return int(self._execute("SELECT count(*) FROM problem", {})[0][0]) if self._whole is None else len(self._whole)

    def near(self, key: ProblemKey, gpus: Collection[str]) -> set[ProblemKey]:
        """Keys on these GPUs that are nearest to a key by N, of its spec and of any comparable one."""
        call: dict[str, Any] = {**asdict(key), "other": OTHER_16_BITS.get(key.dtype, key.dtype), "decode": DECODE_ROWS, "far": FAR}
        found: set[ProblemKey] = set()
        for gpu in gpus:
            for spec in ("TRUE", _SAME_SPEC):
                for side in ("n <= :n ORDER BY n DESC", "n > :n ORDER BY n"):
                    found.update(self._keys(f"{_COMPARABLE} AND {spec} AND {side} LIMIT {MOST_NEAR}", {**call, "gpu": gpu}))
        return found

    def winners(self) -> list[TuningRecord]:
        """Winner of every run, newest run first."""
        with self._reading():
            found = queries.winners(self._fetched)
        return queries.records(found, self._name)

    @property
    def findings(self) -> list[Finding]:
        """Kernels that failed when records were timed again."""
        if self._findings is None:
            with self._reading():
                self._findings = queries.findings(self._fetched, self._name)
        return self._findings

    @property
    def _source(self) -> Path:
        """Path of the file that is read."""
        return self._path if self._copy is None else Path(self._copy.name) / COPY

    def _connected(self) -> tuple[int, sqlite3.Connection]:
        """Process id and a connection, which is kept, since opening one takes longer than a query."""
        with self._explained():
            connection = connect(self._source, "mode=ro&immutable=1", self._name, self._allowance())
        weakref.finalize(self, connection.close)
        return os.getpid(), connection

    def _allowance(self) -> Allowance:
        """Time limit of SQLite: one for all statements that open the file, then one for each block by the file's size."""
        return self._opening or patience(self._path)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn exceptions of sqlite3 in the block into DatabaseError, or FileChanged where the file was written meanwhile."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OSError, DatabaseError) as error:
            self._refuse_change()
            raise explain(error, self._name) from error

    def _refuse_change(self) -> None:
        """Raise FileChanged where the file was written in place; one that was deleted or replaced is still open unchanged."""
        if self._seen is None or (now := signature(self._path)) == self._seen:
            return
        old, new = self._seen[0], now[0]
        if not (isinstance(old, tuple) and (new is None or (isinstance(new, tuple) and new[0] != old[0]))):
            raise FileChanged

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Lock the connection of this process for the block, with a time limit and explained errors."""
        with self._lock, self._explained():
            if self._process != os.getpid():
                # SQLite connections can't be used after a fork.
                self._process, self._connection = self._connected()
            with bounded(self._connection, self._name, self._allowance()):
                yield
            self._refuse_change()

    def _execute(self, query: str, parameters: Mapping[str, object]) -> list[tuple[Any, ...]]:
        with self._reading():
            return self._fetched(query, parameters)

    def _fetched(self, query: str, parameters: Mapping[str, object]) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, parameters).fetchall()

    def _finds(self, table: str, columns: str) -> bool:
        """True if SQLite looks these columns up in an index."""
        where = " AND ".join(f"{name} = 1" for name in columns.split(", "))
        plan = self._connection.execute(f"EXPLAIN QUERY PLAN SELECT 1 FROM {table} WHERE {where}").fetchall()
        return all(str(step[-1]).startswith("SEARCH") for step in plan)

    def _index(self) -> None:
        """Replace the connection by one to a private copy with the indexes that this file lacks."""
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

    def _keys(self, where: str, parameters: Mapping[str, object]) -> list[ProblemKey]:
        """Keys of these rows of `problem`, whose ids are cached."""
        keys = []
        for number, *found in self._execute(f"SELECT id, {', '.join(rows.PROBLEM)} FROM problem WHERE {where}", parameters):
            with row_named(self._name, "problem", number):
                key = read_key(Row(dict(zip(rows.PROBLEM, found, strict=True))))
            self._ids[key] = number
            keys.append(key)
        return keys
