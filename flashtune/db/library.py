"""Library of database layers for dispatch and the command line: requested databases over the user's own over the shipped one.

Records of a file are loaded once, key by key on request, so that no SQL is on the hot path. Importing this module loads neither torch
nor SQLAlchemy.
"""

import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import platformdirs

from flashtune.core.problems.problem import ProblemKey
from flashtune.core.records.results import Bits, Finding, TuningRecord
from flashtune.core.system.errors import FlashtuneError
from flashtune.db.card import check_card
from flashtune.db.inspection import MissingDatabaseError, signature
from flashtune.db.preference import (
    Findings,
    Wrong,
    by_key,
    by_preference,
    foremost,
    key_order,
    latest,
    refuted,
    serve_all,
    worth_keeping,
    wrong_providers,
)
from flashtune.db.records import FileChanged, FileRecords

if TYPE_CHECKING:
    from flashtune.db.store import KeyFilter

T = TypeVar("T")

MOST_KEYS = 8192
"""Number of keys above which a call looks only at those near to its own; the shipped database has 1671."""


def shipped_path() -> Path:
    """Path of the database inside the package, which is only read."""
    return Path(__file__).with_name("tuned.sqlite")


def overlay_path() -> str:
    """Path or URL of the user's own database, which searches write: `FLASHTUNE_OWN_DB`, or a file in the data directory."""
    return os.environ.get("FLASHTUNE_OWN_DB") or str(Path(platformdirs.user_data_dir("flashtune")) / "tuned.sqlite")


def asked_path() -> str | None:
    """Path or URL of the database that `FLASHTUNE_DB` requests over the user's own for reading, or None."""
    return os.environ.get("FLASHTUNE_DB") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One database of a library; `origin` is the origin of its records (its name, if empty)."""

    location: str | Path
    origin: str = ""
    optional: bool = False
    """True where the database may be missing."""
    precedence: int = 0
    """Precedence of its records (TuningRecord.precedence)."""
    implied: bool = False
    """True where it wasn't requested by name, so that it is left out with a warning if it can't be read."""
    own: bool = False
    """True for the user's own results, whose findings refute records of every layer; those of another layer refute its own."""


class Library(Mapping[ProblemKey, list[TuningRecord]]):
    """Records of every key over some layers, the best first; the earlier layer wins a tie.

    Raises DatabaseError, now or when its records are read, for a layer that is broken and not `implied`, or missing and not optional.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self._rows = [_rows(layer) for layer in self.layers]
        self._known: dict[ProblemKey, list[TuningRecord]] = {}

    def __getitem__(self, key: ProblemKey) -> list[TuningRecord]:
        if key not in self._known:
            found: list[TuningRecord] = []
            for place, layer in enumerate(self.layers):
                found += _labelled(layer, self._of(place, lambda records: records.get(key, [])))
            if not found:
                raise KeyError(key)
            self._known[key] = by_preference(refuted(record, self.findings) for record in found)
        return self._known[key]

    def __iter__(self) -> Iterator[ProblemKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @functools.cached_property
    def _keys(self) -> dict[ProblemKey, None]:
        found = {key for place in range(len(self.layers)) for key in self._of(place, list)}
        return dict.fromkeys(sorted(found, key=key_order))

    @functools.cached_property
    def _found(self) -> list[Finding]:
        """Findings of all layers, with the origins of the records that they refute."""
        found: list[Finding] = []
        for place, layer in enumerate(self.layers):
            for one in self._of(place, lambda records: getattr(records, "findings", ())):
                found.append(replace(one, origin="" if layer.own else layer.origin or one.origin))
        return found

    @functools.cached_property
    def findings(self) -> Findings:
        """Kernels that failed when records of any layer were timed again."""
        return latest(self._found)

    @functools.cached_property
    def wrong(self) -> Wrong:
        """Providers that were wrong in a run of any layer."""
        return wrong_providers(self._found)

    @functools.cached_property
    def large(self) -> bool:
        """True if it has too many keys for a call to look at, so that only those `near` the call's may serve it."""
        return sum(self._of(place, len) for place in range(len(self.layers))) > MOST_KEYS

    def near(self, key: ProblemKey, gpus: Collection[str]) -> Mapping[ProblemKey, list[TuningRecord]]:
        """Records that may serve a call with this key on one of these GPUs; in a large library only the nearest of each layer."""
        if not self.large:
            return self
        found: set[ProblemKey] = set()
        for place in range(len(self.layers)):
            found |= self._of(place, lambda records: records.near(key, gpus) if isinstance(records, FileRecords) else set(records))
        return _Part(self, sorted(found, key=key_order))

    def _of(self, place: int, read: Callable[[Mapping[ProblemKey, list[TuningRecord]]], T]) -> T:
        """Result of `read` on a layer, which is opened again where its file changed.

        A layer that is `implied` is left out, with a warning, once it can't be read.
        """
        layer = self.layers[place]
        try:
            try:
                return read(self._rows[place])
            except FileChanged:
                self._rows[place] = _opened(layer)
                return read(self._rows[place])
        except FileChanged:
            self._rows[place] = _StoreRecords(layer)
        except FlashtuneError as error:
            self._rows[place] = _left_out(layer, error)
        return read(self._rows[place])

    @classmethod
    def default(cls) -> Self:
        """The database of `FLASHTUNE_DB` over the user's own over the shipped one; either of these two may be missing."""
        return cls.over(())

    @classmethod
    def over(cls, databases: Sequence[str | Path], *, alone: bool = False) -> Self:
        """Library of these databases, the topmost first, over those of `default`, or `alone`.

        Their measured records go before those of lower layers for the same key, whatever their speedups over PyTorch.
        """
        requested: list[str | Path] = list(databases)
        if not alone and (named := asked_path()) is not None and named != overlay_path():
            requested.append(named)
        layers = [Layer(location=location, precedence=len(requested) - place) for place, location in enumerate(requested)]
        if not alone:
            layers.append(Layer(location=overlay_path(), origin="overlay", optional=True, implied=True, own=True))
            layers.append(Layer(location=shipped_path(), origin="shipped", optional=True, implied=True))
        return cls(layers)

    @classmethod
    def of(cls, location: str | Path) -> Self:
        """Library of one database at a path or URL, which its records name as their origin."""
        return cls([Layer(location=location)])

    def best(self, key: ProblemKey) -> TuningRecord | None:
        """Best record of exactly this key, or None."""
        return next(iter(self.get(key, [])), None)

    def records(
        self,
        *,
        passed_over: Callable[[TuningRecord], object] = serve_all,
        bits: Bits | None = None,
        **where: Unpack["KeyFilter"],
    ) -> list[TuningRecord]:
        """Best record of every key that passes the filter, in order of keys; with `bits` all that are `worth_keeping`.

        A record that is `passed_over` loses to the next of its key that isn't, if there is one.
        """
        wanted = {name: value for name, value in where.items() if value is not None}
        if not wanted:
            self._read_whole()
        chosen = (self[key] for key in self if all(getattr(key, name) == value for name, value in wanted.items()))
        if bits is None:
            return [foremost(same, passed_over) for same in chosen if same]
        return [record for same in chosen if same for record in worth_keeping(same, passed_over, bits) or same[:1]]

    def winners(self) -> list[TuningRecord]:
        """Winners of all runs, in order of keys and of preference."""
        self._read_whole()
        return [record for same in self.values() for record in same]

    def _read_whole(self) -> None:
        for place in range(len(self.layers)):
            self._of(place, lambda records: records.read_whole() if isinstance(records, FileRecords) else None)


class _Part(Mapping[ProblemKey, list[TuningRecord]]):
    """View of a library with some of its keys."""

    def __init__(self, library: Library, keys: Sequence[ProblemKey]) -> None:
        self._library, self._keys = library, dict.fromkeys(keys)

    def __getitem__(self, key: ProblemKey) -> list[TuningRecord]:
        return self._library[key]

    def __iter__(self) -> Iterator[ProblemKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _rows(layer: Layer) -> Mapping[ProblemKey, list[TuningRecord]]:
    """Records of a layer by key; none, with a warning, where it is `implied` and can't be read."""
    try:
        return _opened(layer)
    except FlashtuneError as error:
        return _left_out(layer, error)


def _left_out(layer: Layer, error: FlashtuneError) -> Mapping[ProblemKey, list[TuningRecord]]:
    """Warn of an `implied` layer that can't be read, and return no records; raises the error for any other layer."""
    if not layer.implied:
        raise error
    warnings.warn(f"flashtune: the {layer.origin} database is left out: {error}", RuntimeWarning, stacklevel=2)
    return {}


def _opened(layer: Layer) -> Mapping[ProblemKey, list[TuningRecord]]:
    """Records of a layer by key: those of a sound and current file on request, without SQLAlchemy."""
    path = file_of(layer.location)
    if layer.precedence and path is not None and os.path.isfile(path):
        check_card(path)
    if layer.optional and path is not None and not os.path.lexists(path):
        return {}
    try:
        if path is None:
            return _StoreRecords(layer)
        try:
            return _shipped(path, signature(path)) if layer.location == shipped_path() else FileRecords(path)
        except FileChanged:
            return _recovered(layer, path)
    except MissingDatabaseError:
        if layer.optional:
            return {}
        raise


@functools.cache
def _shipped(path: Path, seen: tuple[object, ...]) -> FileRecords:
    """Records of the shipped database, of this signature, which libraries of a process share."""
    return FileRecords(path, shipped=True)


def _recovered(layer: Layer, path: Path) -> Mapping[ProblemKey, list[TuningRecord]]:
    """Records of a file with unfinished writes or an older schema, through a private copy of it."""
    from flashtune.db.sqlite_file import SqliteFile

    file = SqliteFile(path, writable=False)
    try:
        file.open()
        return FileRecords(path, copy=file.recovered())
    except FileChanged:
        # Another process keeps writing it.
        return _StoreRecords(layer)
    finally:
        file.close()


def file_of(location: str | Path) -> Path | None:
    """Path of the file of a path or URL; None for a server."""
    if "://" not in str(location):
        return Path(os.path.expanduser(location))
    from flashtune.db.store import sqlite_path

    return sqlite_path(location)


def state_of(location: str | Path) -> tuple[object, ...]:
    """State of the file of a path or URL, which changes with each write and when it is replaced; empty for a server."""
    path = file_of(location)
    return () if path is None else signature(path)


def _labelled(layer: Layer, records: list[TuningRecord]) -> list[TuningRecord]:
    """Records with the layer's origin and precedence."""
    if not layer.origin and not layer.precedence:
        return records
    return [replace(record, origin=layer.origin or record.origin, precedence=layer.precedence) for record in records]


class _StoreRecords(dict[ProblemKey, list[TuningRecord]]):
    """Records of a layer by key, read through the store, and its findings."""

    def __init__(self, layer: Layer) -> None:
        from flashtune.db.store import Store

        with Store.open(layer.location, writable=False) as store:
            super().__init__(by_key(store.winners()))
            self.findings = store.findings()
