"""Study writer: a process that stores the records of one GPU's studies.

Each trial costs SQLAlchemy about 40 ms of an interpreter. One GPU has them to spare beside its trials; several would wait for each other's.
"""

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, cast

import optuna

from flashtune.core.errors import DatabaseError, EnvironmentProblem
from flashtune.tuner.children.child import withdraw
from flashtune.tuner.children.forkserver import serving
from flashtune.tuner.propose.record import Record

ENDING_S = 5.0
"""Seconds that the process may take to end."""


class StudyWriter:
    """Opens records of `storage` in a process of its own; any thread may use them. A context manager that leaves no process behind."""

    def __init__(self, storage: optuna.storages.RDBStorage) -> None:
        self._storage = storage
        self._lock, self._numbers = threading.Lock(), count()
        context = multiprocessing.get_context("forkserver")
        self._pipe, its = context.Pipe()
        self._process = context.Process(target=_serve, args=(its, pickle.dumps(storage), dict(os.environ)), daemon=True)
        self.ready = threading.Event()
        self._starting = threading.Thread(target=self._start, args=(its,), name="study writer", daemon=True)
        self._starting.start()

    def _start(self, its: Connection) -> None:
        # The process imports Optuna for a second, and its fork server may still be importing, too.
        with suppress(EOFError, OSError):
            with its, serving():
                self._process.start()
            self._pipe.recv()
            self.ready.set()

    def __enter__(self) -> "StudyWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self.ready.is_set() and self._process.pid is not None:
            # It is still importing Optuna, and has stored nothing.
            self._process.kill()
        self._starting.join()
        self._pipe.close()
        if self._process.pid is not None:
            self._process.join(ENDING_S)
            self._process.kill()
            self._process.join()

    def record(self, name: str) -> Record:
        """Record of that name, in this process until the other one has started, so that no GPU waits for it.

        Raises a `Record`'s errors, and EnvironmentProblem where the process is gone.
        """
        if not self.ready.is_set():
            return Record(self._storage, name)
        number = next(self._numbers)
        self.call(number, "", (name,))
        return cast(Record, _RemoteRecord(self, number))

    def call(self, number: int, what: str, arguments: tuple[Any, ...]) -> Any:
        """Call method `what` of record `number` and wait for its result; an empty `what` opens the record."""
        with self._lock:
            try:
                self._pipe.send((number, what, arguments))
                result = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise EnvironmentProblem("the process that writes the study has ended: start the same command again to resume") from error
        if isinstance(result, Exception):
            raise result
        return result


class _RemoteRecord:
    """Proxy of a record in the other process."""

    def __init__(self, writer: StudyWriter, number: int) -> None:
        self._writer, self._number = writer, number

    def __getattr__(self, what: str) -> Callable[..., Any]:
        return lambda *arguments: self._writer.call(self._number, what, arguments)


def _serve(pipe: Connection, pickled: bytes, environment: Mapping[str, str]) -> None:
    """Serve calls until the pipe closes."""
    withdraw(environment)
    # Unpickling connects to the storage, and Optuna's messages about that belong in no terminal.
    storage: optuna.storages.RDBStorage = pickle.loads(pickled)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    records: dict[int, Record] = {}
    with suppress(EOFError, OSError):
        pipe.send("ready")
        while True:
            number, what, arguments = pipe.recv()
            result: Any = None
            try:
                if what:
                    result = getattr(records[number], what)(*arguments)
                else:
                    records[number] = Record(storage, *arguments)
            except Exception as error:
                result = error
            try:
                pipe.send(result)
            except (TypeError, AttributeError, ValueError) as error:
                pipe.send(DatabaseError(f"the study can't be stored ({result!r}, {error}): check its storage"))
