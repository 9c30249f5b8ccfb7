"""One SQLite file: opened so that reading never changes a byte of it or its folder, and writing loses nothing.

Reading. SQLite itself leaves `-wal` and `-shm` files behind when it reads a file in WAL mode, so a quiet file is opened `immutable`
(no locks, no files) and read again if it changed meanwhile. Where a `-wal` or `-journal` lies beside it (a writer is busy, or was
killed), the files are copied to a private folder and recovered there. A file of an older schema is read through such a copy too,
migrated; so the databases that models ship stay readable for good.

Writing. WAL, a busy timeout with retries, one `BEGIN IMMEDIATE` transaction for each write, and no connection kept between writes: so the
file is whole (no `-wal` beside it) whenever nobody is writing. A new file is built aside and linked into place.
"""

import os
import secrets
import shutil
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from flashtune.core.errors import DatabaseError, EnvironmentProblem, FlashtuneError
from flashtune.db.rows import tidy
from flashtune.db.schema import APPLICATION_ID, SCHEMA_VERSION, VERSION_TABLE, Base

T = TypeVar("T")

BUSY_SECONDS = 60.0
"""How long a write waits for other writers."""
QUIET_SECONDS = 0.02
"""A file changed within this time may be changing still: clocks of file systems tick every few milliseconds."""
SETTLE_SECONDS = 5.0
"""How long a reader waits for a moment in which nobody writes, before it reads under SQLite's own locks."""
LARGEST_VALUE = 1 << 20
"""SQLite refuses any value longer than this many bytes, so that a hostile file can't fill the memory."""
CHECKED_BYTES = 64 << 20
"""Files up to this size are checked in full whenever they are opened (about 3 ms a megabyte)."""

_MAGIC = b"SQLite format 3\0"
_COPY = "copy.sqlite"
_SIDECARS = ("-wal", "-journal", "-shm")


class MissingDatabaseError(DatabaseError):
    """There is no database at this place: normal for an overlay that was never written."""


class SqliteFile:
    """A tuned database in one file. `read` and `write` call back with a connection inside a transaction."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.name = str(path)
        # SQLite puts its -wal beside the real file, not beside a link to it.
        self._path = Path(os.path.realpath(path))
        self._writable = writable
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._copied_from: tuple[object, ...] = ()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Check the file, create it where it is missing (for writing), and bring an older schema up to date."""
        try:
            size = _header_size(self._path, self.name)
        except MissingDatabaseError:
            if not self._writable:
                raise
            self._create()
            size = self._path.stat().st_size
        check = size <= CHECKED_BYTES
        version = self.read(lambda connection: examine(connection, self.name, thorough=check))
        if self._writable:
            # An empty transaction where nothing needs a migration: a read-only file must be refused now, not after a long search.
            self.write(_upgrade if version != SCHEMA_VERSION else _nothing)

    def close(self) -> None:
        """Remove the private copy, if there is one."""
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch, self._copied_from = None, ()

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns; it may be called again when the file changed while it ran."""
        if self._writable:
            return self._attempt(lambda: _transact(_engine(self._path, "mode=rw"), work, write=False))
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            before = _signature(self._path)
            if not _quiet(before):
                time.sleep(QUIET_SECONDS)
                continue
            try:
                found = self._read_settled(before, work)
            except (DBAPIError, sqlite3.Error, OSError, FlashtuneError) as error:
                if _signature(self._path) == before:
                    raise explain(error, self.name) from error
            else:
                if _signature(self._path) == before:
                    return found
        return self._attempt(lambda: _transact(_engine(self._path, "mode=ro"), work, write=False))

    def write(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns; all that it wrote is kept, or nothing. It may be called again after a lock."""
        if not self._path.exists():
            self._create()
        return self._attempt(lambda: _transact(_engine(self._path, "mode=rw"), work, write=True))

    def _read_settled(self, signature: tuple[object, ...], work: Callable[[Connection], T]) -> T:
        """Read a file that nobody is writing; through a private copy where writes are unfinished or the schema is older."""
        _header_size(self._path, self.name)
        if not _sidecars(self._path):
            engine = _engine(self._path, "mode=ro&immutable=1")
            if not _transact(engine, _is_older, write=False):
                return _transact(engine, work, write=False)
        with self._lock:
            if self._copied_from != signature:
                self._copy()
                self._copied_from = signature
            assert self._scratch is not None
            return _transact(_engine(Path(self._scratch.name) / _COPY, "mode=rw"), work, write=False)

    def _copy(self) -> None:
        """Recover the file in a private folder, and bring it to the newest schema there."""
        self.close()
        self._scratch = tempfile.TemporaryDirectory(prefix="flashtune-db-")
        copy = Path(self._scratch.name) / _COPY
        for source in (self._path, *_sidecars(self._path)):
            shutil.copyfile(source, copy.with_name(_COPY + source.name[len(self._path.name) :]))
        engine = _engine(copy, "mode=rw")
        if _transact(engine, lambda connection: examine(connection, self.name, thorough=True), write=False) != SCHEMA_VERSION:
            _transact(engine, _upgrade, write=True)

    def _attempt(self, work: Callable[[], T]) -> T:
        """`work`, tried again while another process holds the lock."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return work()
            except (DBAPIError, sqlite3.Error, OSError) as error:
                if not _busy(error) or time.monotonic() > deadline:
                    raise explain(error, self.name) from error
                time.sleep(0.01 + 0.04 * secrets.randbelow(1000) / 1000)

    def _create(self) -> None:
        """A new, empty database, built aside so that no other process ever sees half of it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain(error, self.name) from error
        if self._path.exists():
            # An empty file (mktemp makes them) can't be replaced: another process may be filling it now.
            self._attempt(lambda: _transact(_engine(self._path, "mode=rw"), _upgrade, write=True))
            self._attempt(lambda: _alone(self._path, "PRAGMA journal_mode=WAL"))
            return
        try:
            _build(self._path, self.name, _nothing, wal=True)
        except FileExistsError:
            # Another process was first.
            return


def _engine(path: Path, query: str) -> Engine:
    engine = create_engine("sqlite://", creator=lambda: connect(path, query), poolclass=NullPool)
    # pysqlite's own BEGIN comes late and deferred; ours says at once whether the transaction will write.
    event.listen(engine, "begin", _begin)
    return engine


def connect(path: Path, query: str) -> sqlite3.Connection:
    """A connection on which nothing in the file's schema is trusted and every write is durable once committed."""
    uri = f"file:{quote(os.fsencode(path))}?{query}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=min(5.0, BUSY_SECONDS), check_same_thread=False)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
        for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "foreign_keys=ON", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("flashtune_write") else "BEGIN")


def _transact(engine: Engine, work: Callable[[Connection], T], *, write: bool) -> T:
    with engine.execution_options(flashtune_write=write).begin() as connection:
        return work(connection)


def _upgrade(connection: Connection) -> None:
    # Imported only here: reading needs no Alembic.
    from flashtune.db.migrations import upgrade

    upgrade(connection)


def _nothing(connection: Connection) -> None:
    """Write nothing."""


def _is_older(connection: Connection) -> bool:
    """Whether this is one of our databases and needs a migration before it can be read."""
    if connection.exec_driver_sql("PRAGMA application_id").scalar() != APPLICATION_ID:
        return False
    version = connection.exec_driver_sql(f"SELECT max(version_num) FROM {VERSION_TABLE}").scalar()
    return isinstance(version, str) and version < SCHEMA_VERSION


def _alone(path: Path, statement: str) -> None:
    """Run a statement that no transaction may hold."""
    connection = connect(path, "mode=rw")
    try:
        connection.execute(statement)
    finally:
        connection.close()


def _build(path: Path, name: str, work: Callable[[Connection], None], *, wal: bool, replace: bool = False) -> None:
    """A new database with what `work` writes, built aside so that no other process ever sees half of it.

    Raises FileExistsError where the name was taken meanwhile and `replace` is not given.
    """
    aside = path.with_name(f".flashtune-{secrets.token_hex(8)}.new")
    try:
        engine = _engine(aside, "mode=rwc")
        _transact(engine, _upgrade, write=True)
        _transact(engine, work, write=True)
        _alone(aside, "PRAGMA journal_mode=WAL" if wal else "VACUUM")
        if replace:
            os.replace(aside, path)
        else:
            _link(aside, path)
    except FileExistsError:
        raise
    except (DBAPIError, sqlite3.Error, OSError) as error:
        raise explain(error, name) from error
    finally:
        for leftover in (aside, *(aside.with_name(aside.name + suffix) for suffix in _SIDECARS)):
            leftover.unlink(missing_ok=True)


def export_file(path: Path, work: Callable[[Connection], None], *, replace: bool) -> None:
    """A compact database with what `work` writes, in one file that needs no other beside it."""
    name = str(path)
    taken = f"{name} exists already: choose another path or ask for it to be replaced"
    path = Path(os.path.realpath(path))
    try:
        _header_size(path, name)
    except MissingDatabaseError:
        replace = replace or path.exists()
    else:
        if not replace:
            raise DatabaseError(taken)
        if _sidecars(path):
            raise DatabaseError(f"{name} is being written by another process: wait until it ends, or choose another path")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _build(path, name, work, wal=False, replace=replace)
    except FileExistsError as error:
        raise DatabaseError(taken) from error
    except OSError as error:
        raise explain(error, name) from error


def _link(aside: Path, path: Path) -> None:
    """Give the finished file its name; raises FileExistsError where another process was first."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError as error:
        # No hard links here (FAT, some network file systems).
        if path.exists():
            raise FileExistsError(path) from error
        os.replace(aside, path)


def examine(connection: Connection, name: str, *, thorough: bool) -> str:
    """The schema version of a database that is sound and ours; raises DatabaseError for any other. Reads only."""
    again = "restore a copy of it, or delete it and search again"
    if connection.exec_driver_sql("PRAGMA application_id").scalar() != APPLICATION_ID:
        raise DatabaseError(f"{name} is a SQLite file of another application, not a tuned database: give another path")
    objects = connection.exec_driver_sql("SELECT type, name, sql FROM sqlite_schema").all()
    for kind, item, sql in objects:
        if kind not in ("table", "index") or (kind == "table" and not str(sql).upper().startswith("CREATE TABLE")):
            raise DatabaseError(f"{name} holds the {str(kind)[:20]} {str(item)[:40]!r}, which flashtune never writes: don't use this file")
    tables = {str(item) for kind, item, _ in objects if kind == "table"}
    for table in (VERSION_TABLE, *Base.metadata.tables):
        if table not in tables:
            raise DatabaseError(f"{name} lacks the table {table!r}, so it is damaged: {again}")
        computed = connection.exec_driver_sql(f"SELECT name FROM pragma_table_xinfo('{table}') WHERE hidden <> 0").scalar()
        if computed is not None:
            raise DatabaseError(
                f"{name} computes the column {table}.{str(computed)[:40]!r}, which flashtune never does: don't use this file"
            )
    versions = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalars().all()
    version = versions[0] if len(versions) == 1 else None
    if not isinstance(version, str) or len(version) != 4 or not (version.isascii() and version.isdigit()):
        raise DatabaseError(f"{name} has the impossible schema version {str(version)[:20]!r}: {again}")
    if version > SCHEMA_VERSION:
        raise DatabaseError(
            f"{name} was written by a newer flashtune (schema {version}, this one knows {SCHEMA_VERSION}): upgrade flashtune to read it"
        )
    if thorough:
        problem = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if problem != "ok":
            raise DatabaseError(f"{name} is damaged ({' '.join(str(problem).split())[:200]}): {again}")
        stray = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        if stray is not None:
            raise DatabaseError(f"{name} is damaged (row {stray[1]} of {stray[0]!r} points at no {stray[2]!r}): {again}")
    return version


def explain(error: Exception, name: str) -> FlashtuneError:
    """One sentence for what SQLite or the system said of the file `name`."""
    if isinstance(error, FlashtuneError):
        return error
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    said = tidy(" ".join(str(cause).split()), 200)
    if isinstance(cause, PermissionError):
        return EnvironmentProblem(
            f"no permission for the database {name} ({cause.strerror}): choose another path or change its permissions"
        )
    if isinstance(cause, OSError):
        return EnvironmentProblem(f"the database {name} can't be opened ({cause.strerror or said}): choose another path or free space")
    code = getattr(cause, "sqlite_errorcode", None)
    match code & 0xFF if isinstance(code, int) else None:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return DatabaseError(f"{name} was locked by another process for {BUSY_SECONDS:g} s: end that process, then try again")
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR:
            return EnvironmentProblem(
                f"{name} can't be written or read ({said}): free space on its disk, then try again; what it held is intact"
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
            return EnvironmentProblem(f"{name} can't be opened or written ({said}): choose a path in a folder that you may write to")
        case _:
            return DatabaseError(f"{name} is damaged ({said}): restore a copy of it, or delete it and search again")


def _busy(error: Exception) -> bool:
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    return isinstance(code, int) and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _header_size(path: Path, name: str) -> int:
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
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise DatabaseError(f"{name} is a SQLite file of another application, not a tuned database: give another path")
    return status.st_size


def _sidecars(path: Path) -> list[Path]:
    """The files with unfinished writes that lie beside the database."""
    beside = [path.with_name(path.name + suffix) for suffix in _SIDECARS[:2]]
    return [file for file, seen in zip(beside, _signature(path)[1:], strict=True) if isinstance(seen, tuple) and seen[1] > 0]


def _signature(path: Path) -> tuple[object, ...]:
    """Changes whenever the file or its unfinished writes change."""
    found: list[object] = []
    for file in (path, *(path.with_name(path.name + suffix) for suffix in _SIDECARS[:2])):
        try:
            status = file.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def _quiet(signature: tuple[object, ...]) -> bool:
    """Whether nothing was written in the last moment."""
    now = time.time_ns()
    return all(abs(now - entry[2]) > QUIET_SECONDS * 1e9 for entry in signature if isinstance(entry, tuple))
