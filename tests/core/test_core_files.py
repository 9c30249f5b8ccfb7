"""Files that strangers hand over are read within bounds, and files for people are written whole or not at all."""

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flashtune.core.code import binaries
from flashtune.core.code import index as kernel_index
from flashtune.core.records import calls
from flashtune.core.system.errors import DatabaseError, EnvironmentProblem, FlashtuneError, InputError
from flashtune.core.system.files import DEEPEST, parse_json, read_bounded, read_json, write_whole
from flashtune.db.card import card_path, check_card
from flashtune.db.values import Row, RowError

DEEP = {
    "lists": "[" * 100_000 + "]" * 100_000,
    "objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "unclosed": "[" * 1_000_000,
    "just too deep for us": "[" * (DEEPEST + 2) + "]" * (DEEPEST + 2),
    "behind brackets in strings": '["]",' * 900 + "0" + "]" * 900,
    "behind a good beginning": '{"format": 2, "archives": {}, "kernels": [], "files": {}, "calls": [], "x": ' + "[" * 980 + "]" * 980 + "}",
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_json_that_is_nested_too_deeply_is_one_sentence_wherever_it_comes_from(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    database = tmp_path / "tuned.sqlite"
    database.touch()
    card_path(database).write_text(text)
    readers: list[tuple[Callable[[], Any], type[FlashtuneError]]] = [
        (lambda: kernel_index.read_index(tmp_path), EnvironmentProblem),
        (lambda: binaries.parse_manifest((tmp_path / "index.json").read_bytes(), tmp_path / "index.json"), EnvironmentProblem),
        (lambda: calls.read(tmp_path / "index.json"), InputError),
        (lambda: check_card(database), DatabaseError),
    ]
    for read, kind in readers:
        with pytest.raises(kind) as caught:
            read()
        assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    with pytest.raises(RowError):
        Row({"features": text}).json("features", 1 << 30)
    with pytest.raises(ValueError, match=r"nested|Expecting|delimiter"):
        parse_json(text)


def test_what_is_as_deep_as_may_be_is_read() -> None:
    for text in ("[" * DEEPEST + "]" * DEEPEST, '{"a":' * DEEPEST + "1" + "}" * DEEPEST, '"' + "[" * 10_000 + '"', "7"):
        assert parse_json(text) == json.loads(text)


def test_what_is_no_file_or_too_large_is_refused_before_it_is_waited_for_or_held(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b" " * 101)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name, said in (("large", "more than 100 bytes"), ("pipe", "no regular file"), ("zeros", "no regular file")):
        with pytest.raises(ValueError, match=said):
            read_json(tmp_path / name, 100)
    assert len(read_bounded(tmp_path / "large", 101)) == 101
    database = tmp_path / "tuned.sqlite"
    database.touch()
    for target in ("pipe", "zeros", "nowhere"):
        card_path(database).symlink_to(tmp_path / target)
        with pytest.raises(DatabaseError, match="no metadata file"):
            check_card(database)
        card_path(database).unlink()


def test_a_file_is_written_whole_with_the_permissions_of_new_ones_or_those_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", b"one")
        write_whole(tmp_path / "a", b"two")
        write_whole(tmp_path / ("b" * 255), b"", mode=0o604)
    finally:
        os.umask(before)
    assert (tmp_path / "a").read_bytes() == b"two"
    modes = {path.name[0]: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"a": 0o640, "b": 0o604}


@pytest.mark.parametrize("leads_to", ["victim", "nowhere", "folder"])
def test_a_link_is_replaced_and_never_followed(leads_to: str, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / leads_to)
    write_whole(tmp_path / "link", b"new")
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_bytes() == b"new"
    assert (tmp_path / "victim").read_bytes() == b"precious" and not (tmp_path / "nowhere").exists()
    assert list((tmp_path / "folder").iterdir()) == []


class Failure(OSError):
    """The system's error message."""


class Failing:
    """A file system on which the call of that number fails, of those that write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self.calls, self._number, self._code = 0, number, code
        for name in ("open", "replace", "fchmod", "mkdir", "unlink"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **words: Any) -> Any:
            self.calls += 1
            if self.calls == self._number:
                raise Failure(self._code, os.strerror(self._code))
            return call(*arguments, **words)

        return counted


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=["full", "read-only", "broken"])
def test_a_write_that_fails_at_any_step_leaves_the_folder_as_it_was(code: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    number, calls = 0, 1
    while number <= calls:
        number, done = number + 1, False
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, number, code)
            with suppress(Failure):
                write_whole(tmp_path / "a", b"new", mode=0o644)
                done = True
            patch.undo()
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new" if done else b"old"}
        (tmp_path / "a").write_bytes(b"old")
        calls = failing.calls
    assert done and calls >= 4


def test_an_interruption_amid_a_write_leaves_nothing_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a", b"new")
    assert list(tmp_path.iterdir()) == []
