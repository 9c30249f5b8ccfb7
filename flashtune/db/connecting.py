"""Connections to SQLite files, none of which is trusted: nothing in their schema is evaluated, and no statement runs without end."""

import os
import sqlite3
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from flashtune.core.errors import DatabaseError
from flashtune.db.inspection import refuse_expressions

OPENING_SECONDS = 10.0
"""So long may SQLite compute until a file is open, whatever its size: to look for damage, to recover it and to bring it up to date."""
LEAST_SECONDS, SECONDS_PER_MIB = 5.0, 1.0
"""And so long may it for what is read or written then."""
LARGEST_VALUE = 1 << 20
"""SQLite refuses any value longer than this many bytes, so that a hostile file can't fill the memory."""
LONGEST_STATEMENT = 1 << 16
"""And any statement, those of the file's schema included."""
MOST_COLUMNS = 128
"""And tables of more columns, which are NULL in no space at all: ours have 75 together."""

_STEPS = 20_000
"""Instructions of SQLite's machine between two looks at the clock and at signals: about a millisecond."""


class Allowance:
    """How many seconds SQLite may still compute in `bounded` blocks: of the processor, so that no busy machine uses them up."""

    __slots__ = ("left", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = self.left = seconds


def connect(path: Path, query: str, name: str, allowance: Allowance, *, busy_seconds: float = 5.0) -> sqlite3.Connection:
    """A connection on which every write is durable once committed; raises DatabaseError where the schema holds anything but plain tables
    and indexes."""
    uri = f"file:{quote(os.fsencode(path))}?{query}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=busy_seconds, check_same_thread=False)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, LONGEST_STATEMENT)
        connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MOST_COLUMNS)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 1)
        settings = ("trusted_schema=OFF", "ignore_check_constraints=ON", "cell_size_check=ON", "mmap_size=0", "foreign_keys=ON")
        for pragma in (*settings, "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")
        with bounded(connection, name, allowance):
            refuse_expressions(connection, name)
    except BaseException:
        connection.close()
        raise
    return connection


def patience(*files: Path) -> Allowance:
    """How long SQLite may compute over these files, those that are there."""
    size = 0
    for file in files:
        with suppress(OSError):
            size += file.stat().st_size
    return Allowance(LEAST_SECONDS + SECONDS_PER_MIB * (size >> 20))


@contextmanager
def bounded(connection: sqlite3.Connection, name: str, allowance: Allowance) -> Iterator[None]:
    """Statements end with a DatabaseError once the allowance is used up, and at once where a signal's handler raises."""
    raised: list[BaseException] = []
    deadline = time.thread_time() + allowance.left
    connection.set_progress_handler(_watch(deadline, raised).__next__, _STEPS)
    try:
        yield
    except Exception as error:
        if raised:
            raise raised[0] from None
        cause = getattr(error, "orig", None) or error
        if getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise DatabaseError(
                f"{name} takes more than {allowance.seconds:g} s to read, so it is damaged or made to do harm: don't use it"
            ) from error
        raise
    finally:
        connection.set_progress_handler(None, 0)
        allowance.left = deadline - time.thread_time()


def _watch(deadline: float, raised: list[BaseException]) -> Generator[int, None, None]:
    """Yields 1 once a statement has to end. A generator, since what a signal's handler raises as it resumes is caught here: sqlite3 drops
    what a function raises."""
    while True:
        try:
            while True:
                yield int(bool(raised) or time.thread_time() > deadline)
        except GeneratorExit:
            return
        except BaseException as error:
            raised.append(error)
