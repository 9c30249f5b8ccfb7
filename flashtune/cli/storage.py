"""Optuna storage of a search's study, in the cache directory or at the URL of --storage."""

import re
import sqlite3
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from flashtune.core.system.errors import DatabaseError, EnvironmentProblem, FlashtuneError, InputError
from flashtune.core.system.secrets import mask_secrets, mask_url

STUDIES = "studies.sqlite"
"""Name of the default storage's file, in the cache directory."""
CREATION_S = 30.0
"""Seconds to retry while several processes create the tables."""
LOCK_S = 60
"""Seconds that SQLite waits for other writers."""
LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems that no other host writes to."""

COMPLETE = frozenset({"alembic_version", "studies", "trials", "version_info"})
"""Tables of every study storage of Optuna that is complete: the first one is made last."""
_OPTUNAS = re.compile(r"(?:study|trial)_\w+|studies|trials|version_info")


class WrittenAhead(sqlite3.Connection):
    """SQLite connection in WAL mode: with a rollback journal, each transaction of a trial would wait for the disk several times.

    Committed data survives any end of this process; a power failure may lose the last transactions.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The mode stays where the file is read-only or another process is using it.
        with suppress(sqlite3.Error, OSError):
            self.execute("PRAGMA busy_timeout=1000")
            if _is_local(self) and self.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",):
                self.execute("PRAGMA synchronous=NORMAL")
        self.execute(f"PRAGMA busy_timeout={LOCK_S * 1000}")


def _is_local(connection: sqlite3.Connection) -> bool:
    """True if a database's file is on a disk of this machine: WAL needs shared memory, which several hosts don't have."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    # A later mount on the same place hides an earlier one.
    kinds = dict(line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines())
    return bool(path) and kinds[max((place for place in kinds if Path(path).is_relative_to(place)), key=len)] in LOCAL


@contextmanager
def study_storage(url: str | None) -> Iterator[Any]:
    """The Optuna storage at `url`, or the one in the user's cache directory.

    Raises InputError for a malformed URL, EnvironmentProblem where a driver, a permission or space is missing, and DatabaseError where
    the server can't be used, when it is opened or later, and where the database is another application's or another Optuna's, which is
    left as it was.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    from flashtune.core.system.folders import cache_dir
    from flashtune.tuner.propose.storage import storage_fault

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where = url or f"sqlite:///{cache_dir() / STUDIES}"
    shown = mask_url(where)
    try:
        try:
            storage = _opened(where)
        except ModuleNotFoundError as error:
            raise _missing(shown, error.name or str(error)) from error
        except ImportError as error:
            # Optuna's own error doesn't name the missing module.
            cause = error.__cause__
            raise _missing(shown, (cause.name if isinstance(cause, ImportError) else None) or mask_secrets(str(error))) from error
        try:
            yield storage
        finally:
            # The last connection to close checkpoints the log; the process itself ends without closing anything.
            storage.engine.dispose()
    except SQLAlchemyError as error:
        raise storage_fault(shown, error) from error
    except optuna.exceptions.StorageInternalError as error:
        raise storage_fault(shown, error.__cause__ or error) from error


def _opened(where: str) -> Any:
    """The storage, with its tables, which another process may be creating at the same time."""
    import optuna
    from sqlalchemy.exc import ArgumentError, DBAPIError

    from flashtune.tuner.propose.claims import BEAT_S, GRACE_S

    server = not where.startswith("sqlite")
    # A connection that a server dropped (after a restart, say) is replaced before use.
    engine = {"pool_pre_ping": True} if server else {"connect_args": {"timeout": LOCK_S, "factory": WrittenAhead}}
    deadline = time.monotonic() + CREATION_S
    while True:
        try:
            complete = _is_complete(where)
            if complete:
                # Before the journal's mode is changed; Optuna itself looks only after it has made its tables.
                _refuse_other_schema(where)
            with warnings.catch_warnings():
                # Optuna calls heartbeats experimental.
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                known: Any = {"skip_table_creation": complete, "skip_compatibility_check": complete}
                return optuna.storages.RDBStorage(where, engine_kwargs=engine, heartbeat_interval=BEAT_S, grace_period=GRACE_S, **known)
        except (ValueError, ArgumentError) as error:
            said = mask_secrets(" ".join(str(error).split()))
            raise InputError(
                f"the study storage {mask_url(where)!r} can't be opened ({said}): give a URL such as sqlite:///study.sqlite"
            ) from error
        except (DBAPIError, optuna.exceptions.StorageInternalError, AssertionError):
            if time.monotonic() > deadline or not _has_tables(where):
                raise
            time.sleep(0.1)


def _is_complete(where: str) -> bool:
    """True if all tables of a study storage are there; raises DatabaseError for the database of another application."""
    tables = _tables(where)
    complete = tables >= COMPLETE
    # Others' tables on a server may lie beside Optuna's, but Alembic keeps one application's version alone.
    foreign = () if complete else [name for name in sorted(tables) if not _OPTUNAS.fullmatch(name)]
    if foreign and (where.startswith("sqlite") or "alembic_version" in foreign):
        raise DatabaseError(f"{mask_url(where)} holds {foreign[0]!r} of another application, not Optuna's studies: give another --storage")
    return complete


def _refuse_other_schema(where: str) -> None:
    """Raise DatabaseError where a storage was made by an Optuna with other tables, or Alembic's version is another application's."""
    import optuna

    server = not where.startswith("sqlite")
    try:
        connect = {} if server else {"connect_args": {"timeout": LOCK_S}}
        optuna.storages.RDBStorage(where, engine_kwargs=connect, skip_table_creation=True).engine.dispose()
    except RuntimeError as error:
        upgrade = "upgrade it with 'optuna storage upgrade'" if "storage upgrade" in str(error) else "pip install -U optuna"
        raise DatabaseError(
            f"the study storage {mask_url(where)} has another schema than Optuna {optuna.__version__} knows: {upgrade}, "
            "or give another --storage"
        ) from error


def _tables(where: str) -> set[str]:
    """Names of the tables and views of a database; none where its file is missing."""
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.pool import NullPool

    path = storage_file(where)
    if path is not None and not path.exists():
        return set()
    options = {"connect_args": {"timeout": LOCK_S}} if where.startswith("sqlite") else {}
    found = inspect(create_engine(where, poolclass=NullPool, **options))
    return {*found.get_table_names(), *found.get_view_names()}


def _has_tables(where: str) -> bool:
    """True if a process has begun to create Optuna's tables there."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return "studies" in _tables(where)
    except SQLAlchemyError:
        return False


def storage_file(url: str | None) -> Path | None:
    """The file of a study storage, whether it is there or not; None for a server's URL, memory, and what is no URL."""
    if url is None:
        from flashtune.core.system.folders import wanted_cache_dir

        return wanted_cache_dir() / STUDIES
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
            return None
        # What Python's own driver is given: a path, or a URI (`file:study.sqlite?mode=rw`).
        (name,), _ = parsed.get_dialect()().create_connect_args(parsed)
    except (ArgumentError, ValueError, TypeError, ImportError):
        return None
    return Path(unquote(urlsplit(name).path) if name.startswith("file:") else name)


def _missing(shown: str, driver: str) -> FlashtuneError:
    from flashtune.db.server import driver_remedy

    return EnvironmentProblem(f"the study storage {shown} needs the Python driver {driver!r}: {driver_remedy(driver)}")
