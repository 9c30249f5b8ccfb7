"""One SQLite file: opened so that reading never changes a byte of it or its folder, and writing loses nothing.

Reading. SQLite itself leaves `-wal` and `-shm` files behind when it reads a file in WAL mode, so a quiet file is opened `immutable`
(no locks, no files) and read again if it changed meanwhile. Where a `-wal` or `-journal` lies beside it (a writer is busy, or was
killed), the files are copied to a private folder and recovered there. A file of an older schema is read through such a copy too,
migrated; so the databases that models ship stay readable for good.

Writing. WAL, a busy timeout with retries, one `BEGIN IMMEDIATE` transaction for each write, and no connection kept between writes: so the
file is whole (no `-wal` beside it) whenever nobody is writing. A new file is built aside and linked into place.
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

from flashtune.core import folders
from flashtune.core.errors import DatabaseError, FlashtuneError
from flashtune.db import values
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
"""What reading and writing a file can raise. SQLite quotes damaged names in its messages, and Python's driver then fails to decode them."""
BUSY_SECONDS = 60.0
"""How long a write waits for other writers."""
QUIET_SECONDS = 0.02
"""A file changed within this time may be changing still: clocks of file systems tick every few milliseconds."""
SETTLE_SECONDS = 5.0
"""How long a reader waits for a moment in which nobody writes, before it reads under SQLite's own locks."""
CHECKED_BYTES = 64 << 20
"""Files up to this size are checked in full whenever they are opened; the time of that grows with the size."""
LEAST_UNFINISHED, MOST_UNFINISHED = 64 << 20, 4
"""Files with unfinished writes may have so many bytes, and so many times those of their database besides, to be copied with it."""
LARGESTCOPY = 1 << 30
"""So many bytes at most are copied."""


def unwritable(path: Path) -> str | None:
    """Why rows can't be written to the database at `path`, found out by writing what is taken back; None where they can."""
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
        # Who waits for another writer may write. What is no database at all is for those to say who read it.
        return None if is_busy(error) or "not a database" in str(error) else f"{path} can't be written ({error})"
    return None


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
        self._opening: Allowance | None = None

    def is_at(self, path: Path) -> bool:
        """Whether `path` names this file, directly or through links."""
        return Path(os.path.realpath(path)) == self._path

    def open(self) -> None:
        """Check the file, create it where it is missing (for writing), and bring an older schema up to date."""
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
            # What can't be written must be refused now, not after a long search.
            self.write(_upgrade if version != values.SCHEMA_VERSION else _change_no_row)
            if not os.access(self._path.parent, os.W_OK):
                raise explain(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), self.name)

    def recovered(self) -> "tempfile.TemporaryDirectory[str] | None":
        """The folder of the private copy that is read in the file's place, now the caller's; None where the file itself is read."""
        found, self._scratch, self._copied_from = self._scratch, None, ()
        return found

    def close(self) -> None:
        """Remove the private copy, if there is one."""
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch, self._copied_from = None, ()

    def read(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns; it may be called again when the file changed while it ran."""
        if self._writable:
            return self._attempt(lambda: _transact(self._engine(self._path, "mode=rw"), work, write=False))
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            before = signature(self._path)
            if not is_quiet(before, QUIET_SECONDS):
                time.sleep(QUIET_SECONDS)
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
        """What `work` returns; all that it wrote is kept, or nothing. It may be called again after a lock."""
        if not self._path.exists():
            self._create()
        return self._attempt(lambda: _transact(self._engine(self._path, "mode=rw"), work, write=True))

    def _read_settled(self, seen: tuple[object, ...], work: Callable[[Connection], T]) -> T:
        """Read a file that nobody is writing; through a private copy where writes are unfinished or the schema is older."""
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
        """Recover the file in a private folder, and bring it to the newest schema there."""
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
        """How long SQLite may compute: in all while the file is opened, then in each transaction as its size allows."""
        return self._opening or patience(*(path.with_name(path.name + suffix) for suffix in ("", *SIDECARS[:2])))

    def _attempt(self, work: Callable[[], T]) -> T:
        """`work`, tried again while another process holds the lock."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return work()
            except FAULTS as error:
                if not is_busy(error) or time.monotonic() > deadline:
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
            self._attempt(lambda: _transact(self._engine(self._path, "mode=rw"), _upgrade, write=True))
            self._attempt(lambda: _alone(self._path, "PRAGMA journal_mode=WAL", self.name, self._allowance(self._path)))
            return
        try:
            _build(self._path, self.name, _nothing, wal=True)
        except FileExistsError:
            # Another process was first.
            return


def _engine(path: Path, query: str, name: str, allowance: Allowance) -> Engine:
    engine = create_engine(
        "sqlite://",
        creator=lambda: connect(path, query, name, allowance, busy_seconds=min(5.0, BUSY_SECONDS)),
        poolclass=NullPool,
        execution_options={"flashtune_name": name, "flashtune_allowance": allowance},
    )
    # pysqlite's own BEGIN comes late and deferred; ours says at once whether the transaction will write.
    event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("flashtune_write") else "BEGIN")


def _transact(engine: Engine, work: Callable[[Connection], T], *, write: bool) -> T:
    """What `work` returns, within the engine's allowance."""
    with engine.execution_options(flashtune_write=write).begin() as connection:
        options = connection.get_execution_options()
        with bounded(_raw(connection), options["flashtune_name"], options["flashtune_allowance"]):
            return work(connection)


def _raw(connection: Connection) -> sqlite3.Connection:
    """The driver's own connection."""
    found = connection.connection.driver_connection
    assert isinstance(found, sqlite3.Connection)
    return found


def _upgrade(connection: Connection) -> None:
    # Imported only here: reading needs no Alembic.
    from flashtune.db.migrations import upgrade

    upgrade(connection)


def _nothing(connection: Connection) -> None:
    """Write nothing."""


def _change_no_row(connection: Connection) -> None:
    """Write nothing, by a statement that a read-only file refuses: outside of WAL mode SQLite lets a writing transaction begin there."""
    connection.exec_driver_sql(f"UPDATE {values.VERSION_TABLE} SET version_num = version_num WHERE 0")


def _is_older(connection: Connection) -> bool:
    """Whether this is one of our databases and needs a migration before it can be read."""
    if connection.exec_driver_sql("PRAGMA application_id").scalar() != values.APPLICATION_ID:
        return False
    version = connection.exec_driver_sql(f"SELECT max(version_num) FROM {values.VERSION_TABLE}").scalar()
    return isinstance(version, str) and version < values.SCHEMA_VERSION


def _refuse_large(path: Path, beside: list[Path], name: str) -> None:
    """Raise DatabaseError where what lies beside a database is larger than writers of ours let it become."""
    size = path.stat().st_size
    most = LEAST_UNFINISHED + MOST_UNFINISHED * size
    if (found := sum(file.stat().st_size for file in beside)) > most:
        raise DatabaseError(
            f"{name} has {found >> 20} MiB of unfinished writes beside it, too many for its {size >> 10} KiB: "
            "open it where it was written, or delete them"
        )
    if size + found > LARGESTCOPY:
        raise DatabaseError(
            f"{name} has {size + found >> 20} MiB with its unfinished writes, too much for a private copy: open it where it was written"
        )


def _alone(path: Path, statement: str, name: str, allowance: Allowance) -> None:
    """Run a statement that no transaction may hold."""
    connection = connect(path, "mode=rw", name, allowance)
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
        endless = Allowance(math.inf)
        engine = _engine(aside, "mode=rwc", name, endless)
        _transact(engine, _upgrade, write=True)
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
    finally:
        for leftover in (aside, *(aside.with_name(aside.name + suffix) for suffix in SIDECARS)):
            leftover.unlink(missing_ok=True)


def export_file(path: Path, work: Callable[[Connection], None], *, replace: bool) -> None:
    """A compact database with what `work` writes, in one file that needs no other beside it."""
    name = str(path)
    taken = f"{name} exists already: choose another path, or replace it with --force"
    if os.path.islink(path) and not replace:
        # What it leads to may be anybody's; with `replace` the link itself is replaced.
        raise DatabaseError(taken)
    if not os.path.lexists(path.parent):
        raise DatabaseError(f"there is no folder {path.parent} for {name}: make it first, or choose another path")
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
