"""What happens to a tuned database when processes race, die, or run out of disk or permissions: nothing is lost, nothing half-written."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import db_samples as samples
import pytest
from sqlalchemy import Connection

from flashtune.core.errors import DatabaseError, EnvironmentProblem, FlashtuneError
from flashtune.db import migrations, sqlite_file
from flashtune.db.library import Library
from flashtune.db.store import Store
from flashtune.db.writing import ResultRows

assert migrations  # imported before any test drops its privileges: a child may not be able to read the source

fork = multiprocessing.get_context("fork")


def writer(path: Path, number: int, runs: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, samples.__file__, str(path), str(number), str(runs)], stdout=subprocess.PIPE, text=True)


def folder_bytes(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of everything in a folder."""
    return {entry.name: (entry.read_bytes(), entry.stat().st_mtime_ns) for entry in folder.iterdir() if entry.is_file()}


def complete_runs(path: Path) -> list[str]:
    """The identities of all runs; fails where one of them is not whole."""
    with Store.open(path, writable=False) as store:
        results = store.results()
    assert all(len(result.outcomes) == 5 for result in results)
    return [samples.identity(result) for result in results]


# --- many processes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "runs"), [(2, 25), (4, 12)])
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


def complete_names(path: Path) -> list[str]:
    with Store.open(path, writable=False) as store:
        return [record.outcome.variant_id for record in store.records()]


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
        migrations.upgrade = lambda connection: os.kill(os.getpid(), signal.SIGKILL)
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


# --- reading changes nothing ------------------------------------------------------------------------------------------------------


def exported(folder: Path) -> Path:
    with Store.open(samples.write(folder.parent / "origin" / "a.sqlite"), writable=False) as store:
        store.export(folder / "a.sqlite", winners_only=False)
    return folder / "a.sqlite"


def in_use(folder: Path) -> Path:
    path = samples.write(folder / "a.sqlite")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    holder.execute("UPDATE trial SET reason = 'unfinished'")
    OPEN.append(holder)
    return path


OPEN: list[sqlite3.Connection] = []


@pytest.fixture(autouse=True)
def _close_holders() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.mark.parametrize("make", [lambda folder: samples.write(folder / "a.sqlite"), exported, in_use], ids=["saved", "exported", "in-use"])
def test_reading_changes_no_byte_of_the_file_or_its_folder(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path / "db")
    before = folder_bytes(path.parent)
    with Store.open(path, writable=False) as store:
        assert len(store.records()) == 2
        assert sorted(map(repr, store.results())) == sorted(map(repr, samples.FIXTURE_RESULTS))
        assert folder_bytes(path.parent) == before
    assert len(Library.of(path).records()) == 2
    assert folder_bytes(path.parent) == before


# --- full disks -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root; the test with RLIMIT_FSIZE covers the rest")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here; the test with RLIMIT_FSIZE covers the rest")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def save_until_full(store: Store) -> int:
    """How many runs of 200 trials were saved before an EnvironmentProblem came."""
    saved: list[int] = []

    def fill() -> None:
        for run in range(100):
            store.save(samples.numbered(1, run, trials=200))
            saved.append(run)

    with pytest.raises(EnvironmentProblem, match="free space") as caught:
        fill()
    assert store.name in str(caught.value) and "\n" not in str(caught.value)
    return len(saved)


def test_a_full_disk_keeps_what_was_saved(small_disk: Path) -> None:
    path = samples.write(small_disk / "a.sqlite")
    with Store.open(path, writable=True) as store:
        count = save_until_full(store)
        for _ in range(3):
            with pytest.raises(EnvironmentProblem):
                store.save(samples.numbered(2, 0, trials=2000))
        found = store.results()
        assert found == [*samples.FIXTURE_RESULTS, *(samples.numbered(1, run, trials=200) for run in range(count))]
    (small_disk / "ballast").write_bytes(b"")
    with Store.open(path, writable=False) as store:
        assert store.results() == found


def test_a_full_disk_holds_no_half_created_database(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * (240 << 10))
    for location in (small_disk / "a.sqlite", small_disk / "deep" / "b.sqlite"):
        with pytest.raises(EnvironmentProblem, match="free space"):
            Store.open(location, writable=True)
        assert not location.exists()
    assert not [entry for entry in small_disk.rglob("*") if entry.is_file() and entry.name != "ballast"]


def test_a_full_disk_holds_no_half_exported_database(small_disk: Path, tmp_path: Path) -> None:
    samples.write(tmp_path / "a.sqlite", (samples.numbered(1, 1, trials=3000),))
    before = exported_bytes(small_disk / "out.sqlite", tmp_path)
    with Store.open(tmp_path / "a.sqlite", writable=False) as store, pytest.raises(EnvironmentProblem, match="free space"):
        store.export(small_disk / "out.sqlite", winners_only=False, replace=True)
    assert {entry.name: entry.read_bytes() for entry in small_disk.iterdir()} == before


def exported_bytes(path: Path, scratch: Path) -> dict[str, bytes]:
    with Store.open(samples.write(scratch / "small.sqlite"), writable=False) as store:
        store.export(path, winners_only=True)
    return {path.name: path.read_bytes()}


def test_a_file_that_may_not_grow_keeps_what_was_saved(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "a.sqlite")

    def limited(pipe: Pipe) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 10, 200 << 10))
        with Store.open(path, writable=True) as store:
            pipe.send(save_until_full(store))

    count = in_child(limited)
    with Store.open(path, writable=False) as store:
        assert store.results() == [*samples.FIXTURE_RESULTS, *(samples.numbered(1, run, trials=200) for run in range(count))]


# --- permissions ------------------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[Pipe], None]) -> object:
    """What `work` sends, from a process of its own."""
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=work, args=(sender,))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        child.join()


def unprivileged(work: Callable[[], object]) -> object:
    """What `work` returns (or the flashtune error it raises) for a user who is not root."""

    def run(pipe: Pipe) -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            pipe.send(work())
        except FlashtuneError as error:
            pipe.send((type(error).__name__, str(error)))

    return in_child(run)


@pytest.fixture
def locked_folder() -> Iterator[Path]:
    """A folder that others may read but nobody but root may write, holding a database (pytest's own folders are private)."""
    folder = Path(tempfile.mkdtemp(prefix="flashtune-readonly-"))
    samples.write(folder / "a.sqlite")
    (folder / "a.sqlite").chmod(0o444)
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_folder_is_read(locked_folder: Path) -> None:
    before = folder_bytes(locked_folder)
    found = unprivileged(lambda: complete_names(locked_folder / "a.sqlite"))
    assert isinstance(found, list) and len(found) == 2
    assert folder_bytes(locked_folder) == before


def test_leftovers_in_a_read_only_folder_are_read(locked_folder: Path) -> None:
    locked_folder.chmod(0o755)
    (locked_folder / "a.sqlite").chmod(0o644)
    killed_inside_a_transaction(locked_folder / "a.sqlite")
    (locked_folder / "a.sqlite").chmod(0o444)
    locked_folder.chmod(0o555)
    before = folder_bytes(locked_folder)
    found = unprivileged(lambda: complete_names(locked_folder / "a.sqlite"))
    assert isinstance(found, list) and len(found) == 2
    assert folder_bytes(locked_folder) == before


@pytest.mark.parametrize("name", ["a.sqlite", "new.sqlite", "deep/new.sqlite"])
def test_a_read_only_folder_refuses_writers_at_once_in_one_line(locked_folder: Path, name: str) -> None:
    before = folder_bytes(locked_folder)
    found = unprivileged(lambda: Store.open(locked_folder / name, writable=True).name)
    assert isinstance(found, tuple) and found[0] == "EnvironmentProblem"
    assert str(locked_folder / name) in found[1] and "\n" not in found[1]
    assert folder_bytes(locked_folder) == before


def test_an_export_into_a_read_only_folder_is_refused(locked_folder: Path) -> None:
    def work() -> object:
        with Store.open(locked_folder / "a.sqlite", writable=False) as store:
            return store.export(locked_folder / "out.sqlite", winners_only=True)

    found = unprivileged(work)
    assert isinstance(found, tuple) and found[0] == "EnvironmentProblem"
    assert [entry.name for entry in locked_folder.iterdir()] == ["a.sqlite"]


def test_a_file_that_may_not_be_read_is_named(locked_folder: Path) -> None:
    (locked_folder / "a.sqlite").chmod(0o000)
    for writable in (False, True):
        found = unprivileged(lambda writable=writable: Store.open(locked_folder / "a.sqlite", writable=writable).name)
        assert isinstance(found, tuple) and found[0] == "EnvironmentProblem" and "permission" in found[1]
