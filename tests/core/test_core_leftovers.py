"""Writers that are killed leave nothing for good: the next one in the folder removes it, and never what another is writing."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from halted import halted
from sqlalchemy import Connection, text

from flashtune.core.system import files
from flashtune.core.system.files import write_whole
from flashtune.db.sqlite_file import export_file
from flashtune.tuner.publish import hub

Pause = Callable[..., Any]


def a_file(folder: Path, pause: Pause) -> None:
    write_whole(folder / "a", b"new")


def a_database(folder: Path, pause: Pause) -> None:
    def work(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE more (id INTEGER)"))
        pause()

    export_file(folder / "a", work, replace=True)


def a_hub_folder(folder: Path, pause: Pause) -> None:
    hub._write(folder, {"kernels/one.py": "ONE = 1\n"}, {"README.md": "one"})


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("write", [a_file, a_database, a_hub_folder])
def test_what_a_killed_writer_left_goes_with_the_next_write_in_the_folder(write: Callable[..., None], tmp_path: Path) -> None:
    with halted(write, tmp_path):
        left = names(tmp_path) - {"build", "README.md"}
        assert len(left) == (2 if write is a_database else 1), "a journal is beside the database"
    assert left <= names(tmp_path)
    write_whole(tmp_path / "b", b"")
    assert names(tmp_path) - {"build", "README.md"} == {"b"}


@pytest.mark.parametrize("write", [a_file, a_database])
def test_what_is_being_written_stays_and_is_finished(write: Callable[..., None], tmp_path: Path) -> None:
    with halted(write, tmp_path) as ended:
        write_whole(tmp_path / "b", b"")
        assert len(names(tmp_path)) > 1, "the other's is left to it"
        ended()
    assert names(tmp_path) == {"a", "b"}


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    for name in (".flashtune-mine.new", f".flashtune-{'0' * 16}.newer", f"a.flashtune-{'0' * 16}.new", f".flashtune-{'0' * 16}.new.db"):
        (tmp_path / name).touch()
    (tmp_path / f".flashtune-{'1' * 16}.new").symlink_to(tmp_path)
    os.mkfifo(tmp_path / f".flashtune-{'2' * 16}.new")
    before = names(tmp_path)
    write_whole(tmp_path / "b", b"")
    assert names(tmp_path) - {"b"} == {name for name in before if not name.endswith("1.new") and not name.endswith("2.new")}
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_folder_that_another_locked_is_written_in_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PAUSES", 2)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    write_whole(tmp_path / "a", b"new")
    os.close(held)
    assert names(tmp_path) == {"a"}
