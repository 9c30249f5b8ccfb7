"""Tuned database on a server: any database that SQLAlchemy has a dialect and an installed driver for."""

import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import URL, Connection, create_engine, inspect, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from flashtune.core.system.errors import DatabaseError, EnvironmentProblem
from flashtune.core.system.secrets import mask_secrets, mask_url
from flashtune.db.inspection import MissingDatabaseError, checked_version
from flashtune.db.schema import METADATA
from flashtune.db.values import SCHEMA_VERSION, VERSION_TABLE

T = TypeVar("T")

ATTEMPTS = 5
"""Attempts of a write, which another writer of the same new key or a deadlock may fail."""

AWAY_S = 30.0
"""Seconds to wait for a server that answered before, such as during a restart."""

PACKAGES = {"MySQLdb": "mysqlclient", "mysql": "mysql-connector-python"}
"""Packages of SQLAlchemy's drivers that aren't called as their modules are."""


class Server:
    """Server with the interface of `SqliteFile`, over its own transactions; no connection is kept between calls."""

    def __init__(self, url: URL, *, writable: bool) -> None:
        self.name = mask_url(url.render_as_string(hide_password=True))
        self._writable = writable
        self._reached = False
        try:
            self._engine = create_engine(url, poolclass=NullPool)
        except ModuleNotFoundError as error:
            raise EnvironmentProblem(f"{self.name} needs the Python driver {error.name!r}: {driver_remedy(error.name or '')}") from error
        except (ArgumentError, NoSuchModuleError) as error:
            raise DatabaseError(f"{self.name} is no database URL that SQLAlchemy knows ({error}): give a path or another URL") from error

    def open(self) -> None:
        """Check the schema; create or upgrade it (for writing)."""
        version = self.read(self._version)
        if version == SCHEMA_VERSION:
            return
        if not self._writable:
            if version is None:
                raise MissingDatabaseError(f"{self.name} holds no tuned database: run a search to write one")
            raise DatabaseError(f"{self.name} has the older schema {version}: open it for writing once (any search does) to upgrade it")
        try:
            self.write(self._upgrade)
        except DatabaseError:
            # Another process may have upgraded it first.
            if self.read(self._version) != SCHEMA_VERSION:
                raise

    def close(self) -> None:
        """Do nothing, since no connection is kept."""

    def read(self, work: Callable[[Connection], T]) -> T:
        """Result of `work` in one transaction that is rolled back."""
        return self._when_there(lambda: self._read(work))

    def _read(self, work: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            self._reached = True
            return work(connection)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Result of `work` in a committed transaction; `work` is called again after a conflict with another writer."""
        return self._when_there(lambda: self._write(work))

    def _write(self, work: Callable[[Connection], T]) -> T:
        for attempt in range(ATTEMPTS):
            try:
                with self._engine.begin() as connection:
                    self._reached = True
                    return work(connection)
            except DBAPIError as error:
                # 40001 and 40P01: serialisation failure and deadlock.
                if attempt == ATTEMPTS - 1 or not (isinstance(error, IntegrityError) or _code(error).startswith("40")):
                    raise
                time.sleep(0.05 * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _when_there(self, work: Callable[[], T]) -> T:
        """Result of `work`, retried for a while where a server that answered before is away."""
        deadline = time.monotonic() + AWAY_S
        while True:
            try:
                return work()
            except DBAPIError as error:
                # No statement: the connection failed. 57P01 to 57P03: the server stops or starts.
                away = error.connection_invalidated or error.statement is None or _code(error).startswith("57P")
                if not (self._reached and away) or time.monotonic() > deadline:
                    raise self._explained(error) from error
                time.sleep(0.5)

    def _version(self, connection: Connection) -> str | None:
        present = set(inspect(connection).get_table_names())
        if VERSION_TABLE in present:
            return checked_version(connection.execute(text(f"SELECT max(version_num) FROM {VERSION_TABLE}")).scalar(), self.name)
        if taken := sorted(present & set(METADATA.tables)):
            raise DatabaseError(f"{self.name} has a table {taken[0]!r} of another application: give flashtune a database of its own")
        return None

    def _upgrade(self, connection: Connection) -> None:
        from flashtune.db.migrations import upgrade

        upgrade(connection)

    def _explained(self, error: DBAPIError) -> DatabaseError:
        said = mask_secrets(" ".join(str(error.orig).split()))[:300]
        return DatabaseError(f"the database {self.name} answered with an error ({said}): check the URL, its permissions and the server")


def _code(error: DBAPIError) -> str:
    """SQLSTATE of an error, five characters; empty where the driver gives none."""
    return str(getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None) or "")


def driver_remedy(module: str) -> str:
    """The way to install a database driver's module."""
    if module.startswith("psycopg") and module != "psycopg2":
        return "pip install 'flashtune[postgresql]'"
    if module == "psycopg2":
        return "pip install 'flashtune[postgresql]', and write postgresql+psycopg://"
    return f"pip install {PACKAGES.get(module, module)}"
