"""Processes and threads that race for a tuned database, or die while they write: nothing is lost, nothing half-written."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import db_samples as samples
import pytest
from db_faults import complete_names, folder_bytes, fork, killed_inside_a_transaction

from flashtune.core.system.errors import DatabaseError
from flashtune.db import sqlite_file
from flashtune.db.store import Store


def writer(path: Path, number: int, runs: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, samples.__file__, str(path), str(number), str(runs)], stdout=subprocess.PIPE, text=True)


def complete_runs(path: Path) -> list[str]:
    """The identities of all runs; fails where one of them is not whole."""
    with Store.open(path, writable=False) as store:
        results = store.results()
    assert all(len(result.outcomes) == 5 for result in results)
    return [samples.identity(result) for result in results]


# --- many processes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "runs"), [(4, 8)])
def test_processes_that_write_at_once_lose_nothing_while_readers_see_only_whole_runs(tmp_path: Path, processes: int, runs: int) -> None:
    path = tmp_path / "new" / "shared.sqlite"
    writers = [writer(path, number, runs) for number in range(processes)]
    seen = 0
    while any(process.poll() is None for process in writers):
        if path.exists():
            now = len(complete_runs(path))
            assert now >= seen
            seen = now
    assert [process.wait() for process in writers] == [0] * processes
    expected = {f"{number:04x}{run:04x}" for number in range(processes) for run in range(runs)}
    found = complete_runs(path)
    assert len(found) == len(expected) and set(found) == expected
    assert [entry.name for entry in path.parent.iterdir()] == ["shared.sqlite"]
    with Store.open(path, writable=False) as store:
        assert len(store.records()) == 3


def test_threads_share_one_store(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.sqlite", writable=True) as store:
        threads = [threading.Thread(target=lambda n=n: [store.save(samples.numbered(n, run)) for run in range(5)]) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.results()) == 20


def test_a_store_opened_before_a_fork_serves_parent_and_child(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.sqlite", writable=True) as store:
        children = [fork.Process(target=lambda n=n: [store.save(samples.numbered(n, run)) for run in range(5)]) for n in range(2)]
        for child in children:
            child.start()
        for run in range(5):
            store.save(samples.numbered(9, run))
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0, 0]
        assert len(store.results()) == 15


def test_a_lock_that_is_never_released_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = samples.write(tmp_path / "a.sqlite")
    monkeypatch.setattr(sqlite_file, "BUSY_SECONDS", 0.3)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(DatabaseError, match="locked by another process") as caught:
            Store.open(path, writable=True)
        assert str(path) in str(caught.value)
        assert len(complete_names(path)) == 2
    finally:
        other.close()


def test_a_short_lock_is_waited_for(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "a.sqlite")
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    with Store.open(path, writable=True) as store:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.5, lambda: other.execute("COMMIT"))
        timer.start()
        store.save(samples.FIXTURE_RESULTS[0])
        timer.join()
        assert len(store.results()) == 3
    other.close()


# --- killed -----------------------------------------------------------------------------------------------------------------------


def test_a_killed_writer_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    rng = random.Random(3)
    path = tmp_path / "a.sqlite"
    kept: set[str] = set()
    for number in range(4):
        process = writer(path, number, 10_000)
        assert process.stdout is not None
        for _ in range(rng.randint(1, 12)):
            kept.add(f"{number:04x}{int(process.stdout.readline()):04x}")
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept |= {f"{number:04x}{int(line):04x}" for line in process.stdout.read().splitlines() if line}
        found = complete_runs(path)
        assert kept <= set(found) and len(found) == len(set(found))
    with Store.open(path, writable=True) as store:
        store.save(samples.numbered(99, 0))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.sqlite"]


def test_a_writer_killed_inside_its_transaction_leaves_what_was_there(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "a.sqlite")
    before = path.read_bytes()
    killed_inside_a_transaction(path)
    assert (tmp_path / "a.sqlite-wal").stat().st_size > 0
    left = folder_bytes(tmp_path)
    with Store.open(path, writable=False) as store:
        assert tuple(store.results()) == samples.FIXTURE_RESULTS
    # Reading changed nothing, not even the leftovers.
    assert folder_bytes(tmp_path) == left and path.read_bytes() == before
    with Store.open(path, writable=True) as store:
        store.save(samples.numbered(1, 1))
        assert store.results() == [*samples.FIXTURE_RESULTS, samples.numbered(1, 1)]


def test_saved_rows_that_are_still_in_the_write_ahead_log_are_read(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "source" / "a.sqlite")
    holder = sqlite3.connect(path)
    holder.execute("SELECT count(*) FROM trial").fetchone()
    holder.execute("PRAGMA wal_autocheckpoint = 0")
    holder.execute("BEGIN")
    holder.execute("SELECT count(*) FROM trial").fetchone()
    with Store.open(path, writable=True) as store:
        store.save(samples.numbered(1, 1))
    # As after a power failure, or copied while in use: the new run is in the log only.
    shutil.copytree(path.parent, tmp_path / "copied")
    holder.close()
    (tmp_path / "copied" / "a.sqlite-shm").unlink()
    left = folder_bytes(tmp_path / "copied")
    assert left["a.sqlite-wal"][0]
    with Store.open(tmp_path / "copied" / "a.sqlite", writable=False) as store:
        assert store.results()[-1] == samples.numbered(1, 1)
        assert len(store.records()) == 3
    assert folder_bytes(tmp_path / "copied") == left


def test_a_killed_creation_leaves_no_database(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"

    def work() -> None:
        sqlite_file._alone = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        Store.open(path, writable=True)

    child = fork.Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not path.exists()
    assert len(complete_names(samples.write(path))) == 2


def test_private_copies_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = samples.write(tmp_path / "db" / "a.sqlite")
    killed_inside_a_transaction(path)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    with Store.open(path, writable=False) as store:
        store.records()
        assert len(list((tmp_path / "scratch").iterdir())) == 1
    assert not list((tmp_path / "scratch").iterdir())
