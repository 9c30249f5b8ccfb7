"""A tuned database on disks that are full or may not be written: reading changes no byte, and what was saved stays."""

import os
import resource
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import db_samples as samples
import pytest
from db_faults import complete_names, folder_bytes, fork, killed_inside_a_transaction

from flashtune.cli import doctor
from flashtune.core.system.errors import EnvironmentProblem, FlashtuneError
from flashtune.db import migrations
from flashtune.db.library import Library
from flashtune.db.sqlite_file import unwritable
from flashtune.db.store import Store

assert migrations  # imported before any test drops its privileges: a child may not be able to read the source


# --- reading changes nothing ------------------------------------------------------------------------------------------------------


def exported(folder: Path) -> Path:
    folder.mkdir()
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


@pytest.mark.parametrize("state", ["full", "read-only"])
def test_a_database_that_cannot_be_written_is_found_by_writing(small_disk: Path, state: str) -> None:
    path = samples.write(small_disk / "a.sqlite")
    if state == "full":
        with suppress(OSError), open(small_disk / "ballast", "wb", buffering=0) as ballast:
            while ballast.write(bytes(1 << 10)):
                pass
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    before = path.read_bytes()
    for place in (path, small_disk / "new" / "b.sqlite"):
        assert "can't be written" in (unwritable(place) or ""), place
    assert path.read_bytes() == before
    told = {check["name"]: check for check in _databases(own=path)}["overlay database"]
    assert not told["ok"] and str(small_disk) in told["found"] and "FLASHTUNE_OWN_DB" in told["remedy"]


def _databases(own: Path) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FLASHTUNE_OWN_DB", str(own))
        return doctor._databases()


def test_a_database_that_can_be_written_stays_as_it_was(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "db" / "a.sqlite")
    before = folder_bytes(path.parent)
    assert unwritable(path) is None and folder_bytes(path.parent) == before
    assert unwritable(tmp_path / "new" / "deep" / "b.sqlite") is None and not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    assert "Not a directory" in (unwritable(tmp_path / "file" / "b.sqlite") or "")
    with sqlite3.connect(path, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        assert unwritable(path) is None, "who waits for another writer may write"
        holder.execute("ROLLBACK")


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
    """Message that `work` sends, from a process of its own."""
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=work, args=(sender,))
    child.start()
    sender.close()
    try:
        assert receiver.poll(900), "it says nothing"
        return receiver.recv()
    finally:
        child.join()


def unprivileged(work: Callable[[], object]) -> object:
    """Value that `work` returns (or the flashtune error it raises) for a user who is not root."""

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


@pytest.mark.parametrize(("file", "folder"), [(0o444, 0o777), (0o666, 0o555)])
def test_an_export_that_may_not_be_written_is_refused_before_a_search(locked_folder: Path, file: int, folder: int) -> None:
    """Its file has no log beside it (no WAL), in whose folder SQLite would miss the permission at once."""
    locked_folder.chmod(0o755)
    with Store.open(locked_folder / "a.sqlite", writable=False) as store:
        store.export(locked_folder / "out.sqlite", winners_only=True)
    (locked_folder / "out.sqlite").chmod(file)
    locked_folder.chmod(folder)
    before = folder_bytes(locked_folder)
    found = unprivileged(lambda: Store.open(locked_folder / "out.sqlite", writable=True).name)
    assert isinstance(found, tuple) and found[0] == "EnvironmentProblem"
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
