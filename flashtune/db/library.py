"""What dispatch and `flashtune show` read: the user's own results over the ones that ship with the package.

Everything is loaded into memory once, so that no SQL is on the hot path. Importing this module loads neither torch nor SQLAlchemy.
"""

import os
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

import platformdirs

from flashtune.core.problem import ProblemKey
from flashtune.core.results import TuningRecord

if TYPE_CHECKING:
    from flashtune.db.store import KeyFilter


def shipped_path() -> Path:
    """The database inside the package; it is only ever read."""
    return Path(__file__).with_name("tuned.sqlite")


def overlay_path() -> str:
    """Where the user's own results are: `FLASHTUNE_DB` (a path or URL), or the user's data directory."""
    return os.environ.get("FLASHTUNE_DB") or str(Path(platformdirs.user_data_dir("flashtune")) / "tuned.sqlite")


class Library:
    """The best record of every key over some layers; the earlier layer wins a tie."""

    def __init__(self, layers: Iterable[Iterable[TuningRecord]]) -> None:
        from flashtune.db.ranking import best_of

        best = best_of(record for layer in layers for record in layer)
        self._best = {key: best[key] for key in sorted(best, key=lambda key: tuple(getattr(key, field.name) for field in fields(key)))}

    @classmethod
    def default(cls) -> Self:
        """The overlay over the shipped database; either may be missing. Raises DatabaseError where one is broken."""
        return cls([_layer(overlay_path(), "overlay"), _layer(shipped_path(), "shipped")])

    @classmethod
    def of(cls, location: str | Path) -> Self:
        """One database alone; raises DatabaseError where it is missing or broken. Records name it as their origin."""
        from flashtune.db.store import Store

        with Store.open(location, writable=False) as store:
            return cls([store.records()])

    def best(self, key: ProblemKey) -> TuningRecord | None:
        """The best record of exactly this key, or None."""
        return self._best.get(key)

    def records(self, **where: Unpack["KeyFilter"]) -> list[TuningRecord]:
        """The best record of every key that passes the filter, in order of keys."""
        wanted = {name: value for name, value in where.items() if value is not None}
        return [record for key, record in self._best.items() if all(getattr(key, name) == value for name, value in wanted.items())]


def _layer(location: str | Path, origin: str) -> list[TuningRecord]:
    from flashtune.db.sqlite_file import MissingDatabaseError
    from flashtune.db.store import Store

    try:
        with Store.open(location, writable=False) as store:
            return [replace(record, origin=origin) for record in store.records()]
    except MissingDatabaseError:
        return []
