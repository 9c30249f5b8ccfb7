"""Helpers of the database's tests of races, kills and full disks."""

import os
import signal
import threading
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path

import db_samples as samples
from sqlalchemy import Connection

from flashtune.db import sqlite_file
from flashtune.db.store import Store
from flashtune.db.writing import ResultRows


class CalmProcess(ForkProcess):
    """A process that is forked while no thread of an earlier search imports: locks that one holds would be held in the child for good."""

    def start(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "surrogate":
                thread.join()
        self.daemon = True
        super().start()

    def join(self, timeout: float | None = 900.0) -> None:
        super().join(timeout)
        if self.is_alive():
            self.kill()
            raise AssertionError(f"a forked process was still there after {timeout:g} s")


class CalmContext(ForkContext):
    Process = CalmProcess


fork = CalmContext()


def folder_bytes(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of everything in a folder."""
    return {entry.name: (entry.read_bytes(), entry.stat().st_mtime_ns) for entry in folder.iterdir() if entry.is_file()}


def complete_names(path: Path) -> list[str]:
    with Store.open(path, writable=False) as store:
        return [record.outcome.variant_id for record in store.records()]


def killed_inside_a_transaction(path: Path) -> None:
    """Another process inserts 3000 trials, more than its cache holds, and is killed before it commits."""

    def work() -> None:
        rows = ResultRows.of(samples.numbered(7, 7, trials=3000))

        def insert_and_die(connection: Connection) -> None:
            connection.exec_driver_sql("PRAGMA cache_size = 10")
            rows.insert(connection)
            os.kill(os.getpid(), signal.SIGKILL)

        sqlite_file.SqliteFile(path, writable=True).write(insert_and_die)

    child = fork.Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
