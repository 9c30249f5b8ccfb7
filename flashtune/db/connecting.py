"""Connections to untrusted SQLite files: nothing in their schema is evaluated, and statements have time limits."""

import os
import sqlite3
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from flashtune.core.system.errors import DatabaseError
from flashtune.db.inspection import refuse_expressions

OPENING_SECONDS = 10.0
"""Processor seconds of SQLite to open a file of any size: to check it for damage, recover it and migrate it."""
LEAST_SECONDS, SECONDS_PER_MIB = 5.0, 1.0
"""Processor seconds of SQLite for each later block of statements, at least and per MiB of the file."""
LARGEST_VALUE = 1 << 20
"""Longest value that SQLite accepts, in bytes, so that a hostile file can't fill the memory."""
LONGEST_STATEMENT = 1 << 16
"""Longest statement, including those of the file's schema, in bytes."""
MOST_COLUMNS = 128
"""Most columns of a table, since NULL columns take no space; our tables have 75 together."""

_STEPS = 20_000
"""Instructions of SQLite's virtual machine between two checks of clock and signals: about a millisecond."""


class Allowance:
    """Remaining seconds of SQLite in `bounded` blocks, of processor time, so that a busy machine doesn't use them up."""

    __slots__ = ("left", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = self.left = seconds


def connect(path: Path, query: str, name: str, allowance: Allowance, *, busy_seconds: float = 5.0) -> sqlite3.Connection:
    """Open a connection whose commits are durable; raises DatabaseError where the schema has anything but plain tables and indexes."""
    uri = f"file:{quote(os.fsencode(path))}?{query}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=busy_seconds, check_same_thread=False)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, LONGEST_STATEMENT)
        connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MOST_COLUMNS)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 1)
        settings = ("trusted_schema=OFF", "ignore_check_constraints=ON", "cell_size_check=ON", "mmap_size=0")
        for pragma in (*settings, "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")
        with bounded(connection, name, allowance):
            refuse_expressions(connection, name)
    except BaseException:
        connection.close()
        raise
    return connection


def patience(*files: Path) -> Allowance:
    """Time limit of SQLite by the total size of those files that exist."""
    size = 0
    for file in files:
        with suppress(OSError):
            size += file.stat().st_size
    return Allowance(LEAST_SECONDS + SECONDS_PER_MIB * (size >> 20))


@contextmanager
def bounded(connection: sqlite3.Connection, name: str, allowance: Allowance) -> Iterator[None]:
    """Interrupt statements in the block, with a DatabaseError at the end of the allowance, and when a signal handler raises."""
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
                f"{name} takes more than {allowance.seconds:g} s to read, so it is damaged or malicious: don't use it"
            ) from error
        raise
    finally:
        connection.set_progress_handler(None, 0)
        allowance.left = deadline - time.thread_time()


def _watch(deadline: float, raised: list[BaseException]) -> Generator[int, None, None]:
    """Progress handler as a generator: yields 1 once a statement has to end.

    A generator catches exceptions of signal handlers as it resumes; sqlite3 drops those that a function raises.
    """
    while True:
        try:
            while True:
                yield int(bool(raised) or time.thread_time() > deadline)
        except GeneratorExit:
            return
        except BaseException as error:
            raised.append(error)
