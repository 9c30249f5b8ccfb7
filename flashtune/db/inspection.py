"""Checks of database files before they are trusted, and messages for errors of SQLite and the system."""

import re
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashtune.core.system.errors import DatabaseError, EnvironmentProblem, FlashtuneError
from flashtune.db import values
from flashtune.db.values import RowError, tidy

AGAIN = "restore a copy of it, or delete it and search again"
SIDECARS = ("-wal", "-journal", "-shm")
"""Suffixes of SQLite's own files beside a database; the first two may have writes that the database lacks."""
QUIET_SECONDS = 0.02
"""Seconds after a change in which a file may still be changing: file systems' clocks tick every few milliseconds."""

_MAGIC = b"SQLite format 3\0"

_BLANKS = re.compile(r" ?([(),]) ?")
_NAME = r'(?:\w+|"\w+")'
_NAMES = rf"\({_NAME}(?:,{_NAME})*\)"
_TYPE = r"(?:INT|INTEGER|NUM|BIGINT|SMALLINT|FLOAT|REAL|DOUBLE(?: PRECISION)?|TEXT|VARCHAR)(?:\(\d+\))?"
_COLUMN = rf"{_NAME}(?: {_TYPE})?(?: ?NOT NULL)?(?: PRIMARY KEY)?"
_KEY = rf"(?:CONSTRAINT {_NAME} )?(?:(?:PRIMARY KEY|UNIQUE){_NAMES}|FOREIGN KEY{_NAMES}REFERENCES {_NAME}{_NAMES})"
_PLAIN = re.compile(
    rf"CREATE TABLE {_NAME}\((?:{_COLUMN}|{_KEY})(?:,(?:{_COLUMN}|{_KEY}))*\)|CREATE (?:UNIQUE )?INDEX {_NAME} ON {_NAME}{_NAMES}",
    re.ASCII | re.IGNORECASE,
)
"""Allowed statements for tables and indexes, without blanks around brackets and commas."""


class MissingDatabaseError(DatabaseError):
    """Error for a path without a database, which is normal for a user's database that was never written."""


def examine(connection: sqlite3.Connection, name: str, *, thorough: bool) -> str:
    """Schema version of a sound database of ours; raises DatabaseError for any other. Reads only."""
    if connection.execute("PRAGMA application_id").fetchone() != (values.APPLICATION_ID,):
        raise DatabaseError(f"{name} is a SQLite file of another application, not a tuned database: give another path")
    refuse_expressions(connection, name)
    tables = {str(item) for (item,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if values.VERSION_TABLE not in tables:
        raise DatabaseError(f"{name} lacks the table {values.VERSION_TABLE!r}, so it is damaged: {AGAIN}")
    versions = connection.execute(f"SELECT version_num FROM {values.VERSION_TABLE} LIMIT 2").fetchall()
    version = checked_version(versions[0][0] if len(versions) == 1 else None, name)
    for table in values.TABLES:
        if table not in tables:
            raise DatabaseError(f"{name} lacks the table {table!r}, so it is damaged: {AGAIN}")
        keys = [(column, str(kind).upper()) for _, column, kind, _, _, place in connection.execute(f"PRAGMA table_info({table})") if place]
        if keys != [("id", "INTEGER")]:
            # Joins with several rows of one id could have any number of rows.
            raise DatabaseError(f"{name} lacks the key of its table {table!r}, so it is damaged: {AGAIN}")
    if thorough:
        (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            raise DatabaseError(f"{name} is damaged ({tidy(' '.join(str(problem).split()), 200)}): {AGAIN}")
        stray = connection.execute("PRAGMA foreign_key_check").fetchone()
        if stray is not None:
            raise DatabaseError(f"{name} is damaged (row {stray[1]} of {stray[0]!r} points at no {stray[2]!r}): {AGAIN}")
    return version


def refuse_expressions(connection: sqlite3.Connection, name: str) -> None:
    """Raise DatabaseError unless the schema consists of plain tables and indexes, without anything for SQLite to evaluate.

    By an allow-list, which excludes CHECK, DEFAULT, COLLATE, generated columns, partial indexes and indexes on expressions, views,
    triggers and virtual tables, whatever version wrote the file.
    """
    for kind, item, sql in connection.execute("SELECT type, name, sql FROM sqlite_schema"):
        if sql is None and kind == "index" and str(item).startswith("sqlite_autoindex_"):
            continue
        if not isinstance(sql, str) or not _PLAIN.fullmatch(_BLANKS.sub(r"\1", " ".join(sql.split()))):
            raise DatabaseError(
                f"{name} holds the {str(kind)[:20]} {str(item)[:40]!r} with more than plain columns, which flashtune never writes: "
                "don't use this file"
            )


def checked_version(version: object, name: str) -> str:
    """The checked schema version of the database `name`; raises DatabaseError for an impossible one, one of a newer flashtune, or one
    that no release wrote."""
    if not isinstance(version, str) or len(version) != 4 or not (version.isascii() and version.isdigit()):
        raise DatabaseError(f"{name} has the impossible schema version {str(version)[:20]!r}: {AGAIN}")
    if version > values.SCHEMA_VERSION:
        raise DatabaseError(
            f"{name} was written by a newer flashtune (schema {version}, this one knows {values.SCHEMA_VERSION}): upgrade flashtune"
        )
    if version < values.OLDEST_VERSION:
        raise DatabaseError(
            f"{name} has the schema {version}, which no release wrote (this one reads {values.OLDEST_VERSION} and later): "
            "search again into a new database"
        )
    return version


def explain(error: Exception, name: str) -> FlashtuneError:
    """Error with a one-sentence message for an exception of SQLite or the system about the file `name`."""
    if isinstance(error, FlashtuneError):
        return error
    # SQLAlchemy, which isn't imported here, wraps the driver's error as `orig`.
    cause = getattr(error, "orig", None) or error
    said = "unreadable names" if isinstance(cause, UnicodeDecodeError) else tidy(" ".join(str(cause).split()), 200)
    if isinstance(cause, PermissionError):
        return EnvironmentProblem(
            f"no permission for the database {name} ({cause.strerror}): choose another path or change its permissions"
        )
    if isinstance(cause, OSError):
        return EnvironmentProblem(f"the database {name} can't be opened ({cause.strerror or said}): choose another path or free space")
    code = getattr(cause, "sqlite_errorcode", None)
    match code & 0xFF if isinstance(code, int) else None:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return DatabaseError(f"{name} is locked by another process: wait until that process ends, then try again")
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR:
            return EnvironmentProblem(
                f"{name} can't be written or read ({said}): free space on its disk, then try again; what it held is intact"
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
            return EnvironmentProblem(f"{name} can't be opened or written ({said}): choose a path in a folder that you may write to")
        case _:
            return DatabaseError(f"{name} is damaged ({said}): {AGAIN}")


@contextmanager
def row_named(name: str, table: str, number: object) -> Iterator[None]:
    """Turn a RowError in the block into a DatabaseError that names the file, table and row."""
    try:
        yield
    except RowError as error:
        raise DatabaseError(
            f"{name}: in row {number} of {table!r}, {error}: the file was edited or damaged, restore a copy or search again"
        ) from error


def is_busy(error: Exception) -> bool:
    """True if another process has a lock, so that a retry may succeed."""
    cause = getattr(error, "orig", None) or error
    code = getattr(cause, "sqlite_errorcode", None)
    return isinstance(code, int) and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def header_size(path: Path, name: str) -> int:
    """Size of the file in bytes; raises DatabaseError unless its header may be one of ours. Reads only."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise DatabaseError(f"{name} is a folder, not a database: give the path of a file in it, such as {Path(name) / 'tuned.sqlite'}")
        if not stat.S_ISREG(status.st_mode):
            raise DatabaseError(f"{name} is no ordinary file: give the path of a database")
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError as error:
        raise MissingDatabaseError(f"there is no database at {name}: check the path, or run a search to write one") from error
    except NotADirectoryError as error:
        raise DatabaseError(f"{name} lies below a file, not a folder: check the path") from error
    except OSError as error:
        raise explain(error, name) from error
    if not header:
        raise MissingDatabaseError(f"{name} is empty, not a database: check the path, or run a search to fill it")
    if len(header) < 100 or not header.startswith(_MAGIC):
        raise DatabaseError(f"{name} is not a SQLite database: give another path")
    if int.from_bytes(header[68:72], "big") != values.APPLICATION_ID:
        raise DatabaseError(f"{name} is a SQLite file of another application, not a tuned database: give another path")
    # 1 means 65536. SQLite would read a truncated page as one that ends in zeros.
    page_size = int.from_bytes(header[16:18], "big") or 1
    if status.st_size % (65536 if page_size == 1 else page_size) and not unfinished(path):
        raise DatabaseError(f"{name} is damaged (its end is missing): {AGAIN}")
    return status.st_size


def unfinished(path: Path) -> list[Path]:
    """Files with unfinished writes beside the database."""
    beside = [path.with_name(path.name + suffix) for suffix in SIDECARS[:2]]
    return [file for file, seen in zip(beside, signature(path)[1:], strict=True) if isinstance(seen, tuple) and seen[1] > 0]


def signature(path: Path) -> tuple[object, ...]:
    """Signature that changes whenever the file or its unfinished writes change: inode, size and time of each file."""
    found: list[object] = []
    for file in (path, *(path.with_name(path.name + suffix) for suffix in SIDECARS[:2])):
        try:
            status = file.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def is_quiet(seen: tuple[object, ...]) -> bool:
    """True if no file of a signature was written within the last QUIET_SECONDS."""
    now = time.time_ns()
    return all(abs(now - entry[2]) > QUIET_SECONDS * 1e9 for entry in seen if isinstance(entry, tuple))
