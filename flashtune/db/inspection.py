"""What can be said of a database file before it is trusted, and of the errors that SQLite and the system give."""

import sqlite3
import stat
import time
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from flashtune.core.errors import DatabaseError, EnvironmentProblem, FlashtuneError
from flashtune.db import schema
from flashtune.db.values import tidy

AGAIN = "restore a copy of it, or delete it and search again"
FAULTS = (DBAPIError, sqlite3.Error, UnicodeDecodeError, OSError)
"""What reading and writing a file can raise. SQLite quotes damaged names in its messages, and Python's driver then fails to decode them."""
SIDECARS = ("-wal", "-journal", "-shm")
"""SQLite's own files beside a database; the first two may hold writes that the database lacks."""

_MAGIC = b"SQLite format 3\0"


class MissingDatabaseError(DatabaseError):
    """There is no database at this place: normal for an overlay that was never written."""


def examine(connection: Connection, name: str, *, thorough: bool) -> str:
    """The schema version of a database that is sound and ours; raises DatabaseError for any other. Reads only."""
    if connection.exec_driver_sql("PRAGMA application_id").scalar() != schema.APPLICATION_ID:
        raise DatabaseError(f"{name} is a SQLite file of another application, not a tuned database: give another path")
    objects = connection.exec_driver_sql("SELECT type, name, sql FROM sqlite_schema").all()
    for kind, item, sql in objects:
        if kind not in ("table", "index") or (kind == "table" and not str(sql).upper().startswith("CREATE TABLE")):
            raise DatabaseError(f"{name} holds the {str(kind)[:20]} {str(item)[:40]!r}, which flashtune never writes: don't use this file")
    tables = {str(item) for kind, item, _ in objects if kind == "table"}
    for table in (schema.VERSION_TABLE, *schema.Base.metadata.tables):
        if table not in tables:
            raise DatabaseError(f"{name} lacks the table {table!r}, so it is damaged: {AGAIN}")
        computed = connection.exec_driver_sql(f"SELECT name FROM pragma_table_xinfo('{table}') WHERE hidden <> 0").scalar()
        if computed is not None:
            raise DatabaseError(
                f"{name} computes the column {table}.{str(computed)[:40]!r}, which flashtune never does: don't use this file"
            )
    versions = connection.exec_driver_sql(f"SELECT version_num FROM {schema.VERSION_TABLE}").scalars().all()
    version = checked_version(versions[0] if len(versions) == 1 else None, name)
    if thorough:
        problem = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if problem != "ok":
            raise DatabaseError(f"{name} is damaged ({tidy(' '.join(str(problem).split()), 200)}): {AGAIN}")
        stray = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        if stray is not None:
            raise DatabaseError(f"{name} is damaged (row {stray[1]} of {stray[0]!r} points at no {stray[2]!r}): {AGAIN}")
    return version


def checked_version(version: object, name: str) -> str:
    """The schema version that the database `name` holds; raises DatabaseError for one that no flashtune wrote, or only a newer one."""
    if (
        not isinstance(version, str)
        or len(version) != 4
        or not (version.isascii() and version.isdigit())
        or version < schema.OLDEST_VERSION
    ):
        raise DatabaseError(f"{name} has the impossible schema version {str(version)[:20]!r}: {AGAIN}")
    if version > schema.SCHEMA_VERSION:
        raise DatabaseError(
            f"{name} was written by a newer flashtune (schema {version}, this one knows {schema.SCHEMA_VERSION}): upgrade flashtune"
        )
    return version


def explain(error: Exception, name: str) -> FlashtuneError:
    """One sentence for what SQLite or the system said of the file `name`."""
    if isinstance(error, FlashtuneError):
        return error
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
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


def is_busy(error: Exception) -> bool:
    """Whether another process holds a lock, so that the same may succeed later."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    return isinstance(code, int) and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def header_size(path: Path, name: str) -> int:
    """The file's size in bytes, once its first bytes say that it may be one of ours; changes nothing."""
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
    if int.from_bytes(header[68:72], "big") != schema.APPLICATION_ID:
        raise DatabaseError(f"{name} is a SQLite file of another application, not a tuned database: give another path")
    # 1 stands for 65536. SQLite would take a page that lacks its end for one that ends in zeros.
    page_size = int.from_bytes(header[16:18], "big") or 1
    if status.st_size % (65536 if page_size == 1 else page_size) and not unfinished(path):
        raise DatabaseError(f"{name} is damaged (its end is missing): {AGAIN}")
    return status.st_size


def unfinished(path: Path) -> list[Path]:
    """The files with unfinished writes that lie beside the database."""
    beside = [path.with_name(path.name + suffix) for suffix in SIDECARS[:2]]
    return [file for file, seen in zip(beside, signature(path)[1:], strict=True) if isinstance(seen, tuple) and seen[1] > 0]


def signature(path: Path) -> tuple[object, ...]:
    """Changes whenever the file or its unfinished writes change."""
    found: list[object] = []
    for file in (path, *(path.with_name(path.name + suffix) for suffix in SIDECARS[:2])):
        try:
            status = file.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def is_quiet(seen: tuple[object, ...], seconds: float) -> bool:
    """Whether a signature says that nothing was written within the last `seconds`."""
    now = time.time_ns()
    return all(abs(now - entry[2]) > seconds * 1e9 for entry in seen if isinstance(entry, tuple))
