"""The database inside the package, read with sqlite3 alone, and of its rows those that are asked for: a new process's first call waits
neither for SQLAlchemy nor for rows that have no say in it."""

import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from flashtune.core.problem import ProblemKey
from flashtune.core.results import TuningRecord
from flashtune.db import rows
from flashtune.db.preference import by_key
from flashtune.db.values import LARGEST, Row

_TABLES = ("problem", "run", "trial")

# What Store.winners asks for; a test compares the two.
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


class Shipped(Mapping[ProblemKey, list[TuningRecord]]):
    """The records of each key in the package's own database, the best first (flashtune.db.preference); a key's are read when they are asked
    for, each value checked as always.

    Raises sqlite3.Error or RowError where the file isn't what was shipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._process, self._connection = self._connected()
        connection = self._connection
        self._names = {table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] for table in _TABLES}
        self._asking = {only: self._queries(only) for only in ("", _OF_ONE_KEY)}
        names = self._names["problem"]
        found = [dict(zip(names, values, strict=True)) for values in connection.execute(f"SELECT {', '.join(names)} FROM problem")]
        self._ids = {rows.read_key(Row(fields)): fields["id"] for fields in found}

    def __getitem__(self, key: ProblemKey) -> list[TuningRecord]:
        return by_key(self._read(self._ids[key])).get(key, [])

    def __iter__(self) -> Iterator[ProblemKey]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def winners(self) -> list[TuningRecord]:
        """The candidate of every run, newest run first."""
        return self._read(None)

    def _connected(self) -> tuple[int, sqlite3.Connection]:
        """The process and its connection, which is kept: to open one takes longer than to ask it."""
        connection = sqlite3.connect(f"file:{quote(str(self._path))}?mode=ro&immutable=1", uri=True, check_same_thread=False)
        weakref.finalize(self, connection.close)
        return os.getpid(), connection

    def _queries(self, only: str) -> tuple[str, str]:
        """What asks for candidates, and for their twins."""
        names = self._names
        columns = ", ".join(f"{table}.{name}" for table in _TABLES for name in names[table])
        trial_columns = ", ".join(f"trial.{name}" for name in names["trial"])
        twin_trials = f"median_us IS NOT NULL AND config LIKE '{rows.RUNNING_PATTERN}'"
        return (
            _WINNERS.format(which="median_us IS NOT NULL OR rank IS NOT NULL", columns=columns, only=only),
            _TWINS.format(which=twin_trials, columns=trial_columns, only=only),
        )

    def _read(self, problem: int | None) -> list[TuningRecord]:
        """The candidates of the runs of one row of `problem`, or of all."""
        names, asked = self._names, () if problem is None else (problem,)
        winners, twins_of = self._asking["" if problem is None else _OF_ONE_KEY]
        with self._lock:
            if self._process != os.getpid():
                # A connection mustn't be taken through a fork.
                self._process, self._connection = self._connected()
            found = self._connection.execute(winners, asked).fetchall()
            others = self._connection.execute(twins_of, asked)
            running = [dict(zip(names["trial"], values, strict=True)) for values in others]
        twins = {fields["run_id"]: Row(fields) for fields in running}
        records = []
        for values in found:
            rest = iter(values)
            problem_row, run, trial = (Row({name: next(rest) for name in names[table]}) for table in _TABLES)
            key, outcome = rows.read_key(problem_row), rows.read_outcome(trial)
            twin = rows.twin_of(outcome, twins.get(trial.values["run_id"]))
            records.append(TuningRecord(key=key, outcome=outcome, twin=twin, origin=str(self._path), **rows.read_run(run, key)))
        return records
