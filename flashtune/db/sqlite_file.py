"""Access to one SQLite file: reading never changes it or its folder, and writing is atomic and durable.

Reading: SQLite leaves `-wal` and `-shm` files behind when it reads a file in WAL mode, so a quiet file is opened `immutable` (no locks,
no files) and read again if it changed meanwhile. Where there is a `-wal` or `-journal` beside it (a writer is busy, or was killed), the
files are copied to a private folder and recovered there. A file of an older schema is migrated in such a copy, so that databases shipped
with models stay readable.

Writing: WAL, a busy timeout with retries, one `BEGIN IMMEDIATE` transaction for each write, and no connection kept between writes, so that
the file is complete (no `-wal` beside it) whenever nobody writes. A new file is built under another name and linked into place.
"""

import errno
import math
import os
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from flashtune.core.system import folders
from flashtune.core.system.errors import DatabaseError, FlashtuneError
from flashtune.core.system.files import aside_of
from flashtune.db import inspection, values
from flashtune.db.connecting import OPENING_SECONDS, Allowance, bounded, connect, patience
from flashtune.db.inspection import (
    SIDECARS,
    MissingDatabaseError,
    examine,
    explain,
    header_size,
    is_busy,
    is_quiet,
    signature,
    unfinished,
)
from flashtune.db.records import COPY

T = TypeVar("T")

FAULTS = (DBAPIError, sqlite3.Error, UnicodeDecodeError, OSError)
"""Exceptions of reading and writing a file; Python's driver fails to decode messages of SQLite with damaged names."""
BUSY_SECONDS = 60.0
"""Seconds that a write waits for other writers."""
SETTLE_SECONDS = 5.0
"""Seconds that a reader waits for a pause of writers, before it reads under SQLite's own locks."""
CHECKED_BYTES = 64 << 20
"""Largest files that are checked in full whenever they are opened, in bytes."""
LEAST_UNFINISHED, MOST_UNFINISHED = 64 << 20, 4
"""Largest unfinished writes that are copied with a database: bytes, plus a multiple of the database's size."""
LARGEST_COPY = 1 << 30
"""Largest private copy, in bytes."""

_EMPTY: dict[Path, bytes] = {}
"""The database without rows that the migrations of a folder make, by folder."""


def unwritable(path: Path) -> str | None:
    """Reason why records can't be written to the database at `path`, found by a write that is rolled back; None where they can."""
    path = Path(os.path.realpath(path))
    folder = next(place for place in path.parents if os.path.lexists(place))
    if (why := folders.unwritable(folder)) is not None or not path.exists():
        return why
    uri = f"file:{quote(os.fsencode(path))}?mode=rw"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=1.0, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE flashtune_probe (x)")
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        # A busy file is writable, and readers report a file that is no database.
        return None if is_busy(error) or "not a database" in str(error) else f"{path} can't be written ({error})"
    return None


class SqliteFile:
    """Tuned database in one file; `read` and `write` call functions with a connection inside a transaction."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.name = str(path)
        # SQLite creates its -wal beside the real file, not beside a link to it.
        self._path = Path(os.path.realpath(path))
        self._writable = writable
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._copied_from: tuple[object, ...] = ()
        self._lock = threading.Lock()
        self._opening: Allowance | None = None

    def is_at(self, path: Path) -> bool:
        """True if `path` names this file, directly or through links."""
        return Path(os.path.realpath(path)) == self._path

    def open(self) -> None:
        """Check the file; for writing, create it where it is missing and upgrade an older schema."""
        self._opening = Allowance(OPENING_SECONDS)
        try:
            self._open()
        finally:
            self._opening = None

    def _open(self) -> None:
        try:
            size = header_size(self._path, self.name)
        except MissingDatabaseError:
            if not self._writable:
                raise
            self._create()
            size = self._path.stat().st_size
        check = size <= CHECKED_BYTES
        version = self.read(lambda connection: examine(_raw(connection), self.name, thorough=check))
        if self._writable:
            # A read-only file must be refused now, not after a long search.
            self.write(_upgrade if version != values.SCHEMA_VERSION else _change_no_row)
            if not os.access(self._path.parent, os.W_OK):
                raise explain(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), self.name)

    def recovered(self) -> "tempfile.TemporaryDirectory[str] | None":
        """Folder of the private copy that is read in place of the file, which the caller then owns; None where there is no copy."""
        found, self._scratch, self._copied_from = self._scratch, None, ()
        return found

    def close(self) -> None:
        """Remove the private copy, if there is one."""
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch, self._copied_from = None, ()

    def read(self, work: Callable[[Connection], T]) -> T:
        """Result of `work`, which is called again if the file changed while it ran."""
        if self._writable:
            return self._attempt(lambda: _transact(self._engine(self._path, "mode=rw"), work, write=False))
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            before = signature(self._path)
            if not is_quiet(before):
                time.sleep(inspection.QUIET_SECONDS)
                continue
            try:
                found = self._read_settled(before, work)
            except (*FAULTS, FlashtuneError) as error:
                if signature(self._path) == before:
                    raise explain(error, self.name) from error
            else:
                if signature(self._path) == before:
                    return found
        return self._attempt(lambda: _transact(self._engine(self._path, "mode=ro"), work, write=False))

    def write(self, work: Callable[[Connection], T]) -> T:
        """Result of `work` in a transaction that is committed or rolled back as a whole; it is called again after a lock."""
        if not self._path.exists():
            self._create()
        return self._attempt(lambda: _transact(self._engine(self._path, "mode=rw"), work, write=True))

    def _read_settled(self, seen: tuple[object, ...], work: Callable[[Connection], T]) -> T:
        """Read a file that nobody writes, through a private copy where writes are unfinished or the schema is older."""
        header_size(self._path, self.name)
        if not unfinished(self._path):
            engine = self._engine(self._path, "mode=ro&immutable=1")
            if not _transact(engine, _is_older, write=False):
                return _transact(engine, work, write=False)
        with self._lock:
            if self._copied_from != seen:
                self._copy()
                self._copied_from = seen
            assert self._scratch is not None
            return _transact(self._engine(Path(self._scratch.name) / COPY, "mode=rw"), work, write=False)

    def _copy(self) -> None:
        """Recover the file in a private folder, and migrate it to the newest schema there."""
        self.close()
        self._scratch = tempfile.TemporaryDirectory(prefix="flashtune-db-")
        copy = Path(self._scratch.name) / COPY
        beside = unfinished(self._path)
        _refuse_large(self._path, beside, self.name)
        for source in (self._path, *beside):
            shutil.copyfile(source, copy.with_name(COPY + source.name[len(self._path.name) :]))
        engine = self._engine(copy, "mode=rw")
        if _transact(engine, lambda connection: examine(_raw(connection), self.name, thorough=True), write=False) != values.SCHEMA_VERSION:
            _transact(engine, _upgrade, write=True)

    def _engine(self, path: Path, query: str) -> Engine:
        return _engine(path, query, self.name, self._allowance(path))

    def _allowance(self, path: Path) -> Allowance:
        """Time limit of SQLite: one for opening the file, then one for each transaction by the file's size."""
        return self._opening or patience(*(path.with_name(path.name + suffix) for suffix in ("", *SIDECARS[:2])))

    def _attempt(self, work: Callable[[], T]) -> T:
        """Result of `work`, retried while another process has the lock."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return work()
            except FAULTS as error:
                if not is_busy(error) or time.monotonic() > deadline:
                    raise explain(error, self.name) from error
                time.sleep(0.01 + 0.04 * secrets.randbelow(1000) / 1000)

    def _create(self) -> None:
        """Create an empty database, built under another name so that no other process sees a part of it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain(error, self.name) from error
        if self._path.exists():
            # An empty file (as from mktemp) can't be replaced: another process may be filling it.
            self._attempt(lambda: _transact(self._engine(self._path, "mode=rw"), _upgrade, write=True))
            self._attempt(lambda: _alone(self._path, "PRAGMA journal_mode=WAL", self.name, self._allowance(self._path)))
            return
        try:
            _build(self._path, self.name, lambda connection: None, wal=True)
        except FileExistsError:
            # Another process created it first.
            return


def _engine(path: Path, query: str, name: str, allowance: Allowance) -> Engine:
    engine = create_engine(
        "sqlite://",
        creator=lambda: connect(path, query, name, allowance, busy_seconds=min(5.0, BUSY_SECONDS)),
        poolclass=NullPool,
        execution_options={"flashtune_name": name, "flashtune_allowance": allowance},
    )
    # pysqlite's own BEGIN is late and deferred; ours locks for writing at the start of the transaction.
    event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("flashtune_write") else "BEGIN")


def _transact(engine: Engine, work: Callable[[Connection], T], *, write: bool) -> T:
    """Result of `work` in a transaction, within the engine's allowance."""
    with engine.execution_options(flashtune_write=write).begin() as connection:
        options = connection.get_execution_options()
        with bounded(_raw(connection), options["flashtune_name"], options["flashtune_allowance"]):
            return work(connection)


def _raw(connection: Connection) -> sqlite3.Connection:
    """Connection of the driver."""
    found = connection.connection.driver_connection
    assert isinstance(found, sqlite3.Connection)
    return found


def _upgrade(connection: Connection) -> None:
    # Imported here, since reading needs no Alembic.
    from flashtune.db.migrations import upgrade

    upgrade(connection)


def _fill(engine: Engine, path: Path) -> None:
    """Write a database without rows; the migrations run once a process."""
    from flashtune.db import migrations

    if (known := _EMPTY.get(migrations.FOLDER)) is None:
        _transact(engine, _upgrade, write=True)
        _EMPTY[migrations.FOLDER] = path.read_bytes()
    else:
        path.write_bytes(known)


def _change_no_row(connection: Connection) -> None:
    """Write nothing, by a statement that fails on a read-only file, where SQLite without WAL lets a writing transaction begin."""
    connection.exec_driver_sql(f"UPDATE {values.VERSION_TABLE} SET version_num = version_num WHERE 0")


def _is_older(connection: Connection) -> bool:
    """True if this is one of our databases and needs a migration before it can be read."""
    if connection.exec_driver_sql("PRAGMA application_id").scalar() != values.APPLICATION_ID:
        return False
    version = connection.exec_driver_sql(f"SELECT max(version_num) FROM {values.VERSION_TABLE}").scalar()
    return isinstance(version, str) and values.OLDEST_VERSION <= version < values.SCHEMA_VERSION


def _refuse_large(path: Path, beside: list[Path], name: str) -> None:
    """Raise DatabaseError where unfinished writes beside a database are larger than our writers leave, or a copy would be too large."""
    size = path.stat().st_size
    most = LEAST_UNFINISHED + MOST_UNFINISHED * size
    if (found := sum(file.stat().st_size for file in beside)) > most:
        raise DatabaseError(
            f"{name} has {found >> 20} MiB of unfinished writes beside it, too many for its {size >> 10} KiB: "
            "open it where it was written, or delete them"
        )
    if size + found > LARGEST_COPY:
        raise DatabaseError(
            f"{name} has {size + found >> 20} MiB with its unfinished writes, too much for a private copy: open it where it was written"
        )


def _alone(path: Path, statement: str, name: str, allowance: Allowance) -> None:
    """Run a statement outside of any transaction."""
    with closing(connect(path, "mode=rw", name, allowance)) as connection:
        connection.execute(statement)


def _build(path: Path, name: str, work: Callable[[Connection], None], *, wal: bool, replace: bool = False) -> None:
    """Create a database with the writes of `work`, built under another name so that no other process sees a part of it.

    Raises FileExistsError where the name exists meanwhile, without `replace`.
    """
    try:
        with aside_of(path) as aside:
            endless = Allowance(math.inf)
            engine = _engine(aside, "mode=rwc", name, endless)
            _fill(engine, aside)
            _transact(engine, work, write=True)
            _alone(aside, "PRAGMA journal_mode=WAL" if wal else "VACUUM", name, endless)
            if replace:
                os.replace(aside, path)
            else:
                _link(aside, path)
    except FileExistsError:
        raise
    except FAULTS as error:
        raise explain(error, name) from error


def export_file(path: Path, work: Callable[[Connection], None], *, replace: bool) -> None:
    """Write a compact database with the writes of `work` to a single file; raises DatabaseError where the destination is refused."""
    name = str(path)
    taken = f"{name} exists already: choose another path, or replace it with --force"
    if os.path.islink(path) and not replace:
        # The link's target may be any file; with `replace` the link itself is replaced.
        raise DatabaseError(taken)
    if not os.path.lexists(path.parent):
        raise DatabaseError(f"there is no folder {path.parent} for {name}: create it first, or choose another path")
    try:
        header_size(path, name)
    except MissingDatabaseError:
        replace = replace or os.path.lexists(path)
    else:
        if not replace:
            raise DatabaseError(taken)
        if unfinished(path):
            raise DatabaseError(f"{name} is being written by another process: wait until it ends, or choose another path")
    try:
        _build(path, name, work, wal=False, replace=replace)
    except FileExistsError as error:
        raise DatabaseError(taken) from error
    except OSError as error:
        raise explain(error, name) from error


def _link(aside: Path, path: Path) -> None:
    """Link the finished file to its name; raises FileExistsError where another process was first."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError as error:
        # Some file systems have no hard links (FAT, some network file systems).
        if path.exists():
            raise FileExistsError(path) from error
        os.replace(aside, path)
