"""What dispatch and `flashtune show` read: databases that were asked for, the user's own results below them, then the shipped ones.

Records are loaded into memory once, so that no SQL is on the hot path; the shipped ones key by key, as they are asked for. Importing this
module loads neither torch nor SQLAlchemy.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

import platformdirs

from flashtune.core.problem import ProblemKey
from flashtune.core.results import Bits, TuningRecord
from flashtune.db.card import check_card
from flashtune.db.preference import by_key, foremost, key_order, preference, serve_all, worth_keeping
from flashtune.db.shipped import Shipped

if TYPE_CHECKING:
    from flashtune.db.store import KeyFilter


def shipped_path() -> Path:
    """The database inside the package; it is only ever read."""
    return Path(__file__).with_name("tuned.sqlite")


def overlay_path() -> str:
    """Where the user's own results are, which searches write: `FLASHTUNE_OWN_DB` (a path or URL), or a file in the data directory."""
    return os.environ.get("FLASHTUNE_OWN_DB") or str(Path(platformdirs.user_data_dir("flashtune")) / "tuned.sqlite")


def asked_path() -> str | None:
    """The database that `FLASHTUNE_DB` (a path or URL) lays over the user's own results for reading, or None."""
    return os.environ.get("FLASHTUNE_DB") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One database of a library. `origin` is what its records say of where they come from (its name, if empty)."""

    location: str | Path
    origin: str = ""
    optional: bool = False
    """Whether the database may be missing."""
    precedence: int = 0
    """That of its records (TuningRecord.precedence)."""


class Library(Mapping[ProblemKey, list[TuningRecord]]):
    """The records of every key over some layers, the best first; the earlier layer wins a tie.

    Raises DatabaseError where a layer is broken, or is missing and not optional.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self._rows = [_rows(layer) for layer in self.layers]
        self._known: dict[ProblemKey, list[TuningRecord]] = {}
        self._keys = dict.fromkeys(sorted({key for found in self._rows for key in found}, key=key_order))

    def __getitem__(self, key: ProblemKey) -> list[TuningRecord]:
        if key not in self._known:
            if key not in self._keys:
                raise KeyError(key)
            found: list[TuningRecord] = []
            for place, layer in enumerate(self.layers):
                found += _labelled(layer, self._of(place, key))
            self._known[key] = sorted(found, key=preference)
        return self._known[key]

    def __iter__(self) -> Iterator[ProblemKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def _of(self, place: int, key: ProblemKey) -> list[TuningRecord]:
        try:
            return self._rows[place].get(key, [])
        except (sqlite3.Error, ValueError):
            # Whatever is wrong with it, the store says it best.
            self._rows[place] = by_key(_through_store(self.layers[place]))
            return self._rows[place].get(key, [])

    @classmethod
    def default(cls) -> Self:
        """What `FLASHTUNE_DB` names over the user's own results over the shipped ones; either of these two may be missing."""
        return cls.over(())

    @classmethod
    def over(cls, databases: Sequence[str | Path], *, alone: bool = False) -> Self:
        """These databases, the topmost first, over what `default` reads, or `alone`.

        Their measured records go before those of lower layers for the same key, whatever either gained over the framework.
        """
        asked: list[str | Path] = list(databases)
        if not alone and (named := asked_path()) is not None and named != overlay_path():
            asked.append(named)
        layers = [Layer(location=location, precedence=len(asked) - place) for place, location in enumerate(asked)]
        if not alone:
            layers.append(Layer(location=overlay_path(), origin="overlay", optional=True))
            layers.append(Layer(location=shipped_path(), origin="shipped", optional=True))
        return cls(layers)

    @classmethod
    def of(cls, location: str | Path) -> Self:
        """One database alone, at a path or URL; its records name it as their origin."""
        return cls([Layer(location=location)])

    def best(self, key: ProblemKey) -> TuningRecord | None:
        """The best record of exactly this key, or None."""
        return next(iter(self.get(key, [])), None)

    def records(
        self,
        *,
        passed_over: Callable[[TuningRecord], object] = serve_all,
        bits: Bits | None = None,
        **where: Unpack["KeyFilter"],
    ) -> list[TuningRecord]:
        """The best record of every key that passes the filter, in order of keys; where `bits` say which kernels repeat theirs, all that
        is `worth_keeping`, with those of deterministic calls.

        One that is `passed_over` gives way to the next of its key, where there is one that is not.
        """
        wanted = {name: value for name, value in where.items() if value is not None}
        chosen = (self[key] for key in self if all(getattr(key, name) == value for name, value in wanted.items()))
        if bits is None:
            return [foremost(same, passed_over) for same in chosen if same]
        return [record for same in chosen if same for record in worth_keeping(same, passed_over, bits) or same[:1]]

    def winners(self) -> list[TuningRecord]:
        """What every search found best, in order of keys and of preference: where a record can't be served, the next one may."""
        return [record for same in self.values() for record in same]


def _rows(layer: Layer) -> Mapping[ProblemKey, list[TuningRecord]]:
    """What every search of a layer found best. The two layers that every process has are read without SQLAlchemy: the package's own
    database, and the user's while there is none."""
    if layer.precedence:
        path = _file_of(layer.location)
        if path is not None and os.path.isfile(path):
            check_card(path)
    if layer.optional and "://" not in str(layer.location) and not os.path.lexists(layer.location):
        return {}
    if layer.location == shipped_path() and not shipped_path().with_name(f"{shipped_path().name}-wal").exists():
        try:
            return Shipped(shipped_path())
        except (sqlite3.Error, ValueError):
            # Whatever is wrong with it, the store says it best.
            pass
    return by_key(_through_store(layer))


def _file_of(location: str | Path) -> Path | None:
    """The file that a path or URL names; None for a server."""
    if "://" not in str(location):
        return Path(os.path.expanduser(location))
    from flashtune.db.store import sqlite_path

    return sqlite_path(location)


def _labelled(layer: Layer, records: list[TuningRecord]) -> list[TuningRecord]:
    """The records, with what the layer says of them."""
    if not layer.origin and not layer.precedence:
        return records
    return [replace(record, origin=layer.origin or record.origin, precedence=layer.precedence) for record in records]


def _through_store(layer: Layer) -> list[TuningRecord]:
    """What every search of a layer found best; nothing where an optional layer is missing."""
    from flashtune.db.inspection import MissingDatabaseError
    from flashtune.db.store import Store

    try:
        with Store.open(layer.location, writable=False) as store:
            return store.winners()
    except MissingDatabaseError:
        if layer.optional:
            return []
        raise
