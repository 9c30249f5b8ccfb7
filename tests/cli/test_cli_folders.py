"""Files that commands write: into the folder that was named alone, through no link, and into none that isn't there."""

import hashlib
import json
import os
from functools import cache
from pathlib import Path

import db_samples as samples
import pytest
from commands import flashtune
from test_tuner_generated import decodes, generated, snapshot

from flashtune import dispatch
from flashtune.core.code.index import INDEX, digest
from flashtune.core.system.errors import DatabaseError, EnvironmentProblem
from flashtune.db.card import card_path
from flashtune.db.library import Library
from flashtune.tuner.publish import machine_code
from flashtune.tuner.publish.generated import differing, require_writable, write


@cache
def kernel_files() -> dict[str, bytes]:
    """Generated files of two kernels."""
    return generated(decodes()[:2])


def a_module() -> str:
    """Path of one that is a kernel's module."""
    return next(name for name in sorted(kernel_files()) if name.endswith(".py") and not name.endswith("__init__.py"))


FOLDER, DEEP, FILE = "its first folder", "its own folder", "itself"
"""Places of that module."""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that nobody named."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "victim.py").write_text("precious")
    return folder


def planted(folder: Path, path: Path, target: Path) -> None:
    """A folder with a link, whose index calls what lies behind it ours to remove."""
    folder.mkdir()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    victim = (path / "victim.py" if target.is_dir() else path).relative_to(folder).as_posix()
    fields = {"format": 2, "archives": {}, "kernels": [], "files": {victim: digest(b"precious")}}
    if victim != INDEX:
        (folder / INDEX).write_text(json.dumps(fields))


PLACES = {
    "a folder": (FOLDER, ""),
    "a deep folder": (DEEP, ""),
    "a file": (FILE, "victim.py"),
    "nothing": (FILE, "nowhere.py"),
    "what is stale": ("stale", ""),
    "an index": (INDEX, "victim.py"),
    "a list for people": ("README.md", "nowhere.md"),
}


@pytest.mark.parametrize(("name", "target"), PLACES.values(), ids=PLACES)
def test_kernels_are_neither_written_nor_removed_through_links(name: str, target: str, tmp_path: Path, outside: Path) -> None:
    folder, module = tmp_path / "kernels", a_module()
    name = {FOLDER: module.partition("/")[0], DEEP: str(Path(module).parent), FILE: module}.get(name, name)
    planted(folder, folder / name, outside / target)
    before = snapshot(folder)
    for act in (lambda: write(kernel_files(), folder), lambda: differing(kernel_files(), folder)):
        with pytest.raises(EnvironmentProblem, match="is a link") as caught:
            act()
        assert str(folder / name) in str(caught.value)
    assert snapshot(outside) == {"victim.py": b"precious"} and snapshot(folder) == before


@pytest.mark.parametrize("target", ["outside", "nowhere", "loop"])
def test_a_link_is_no_folder_for_kernels(target: str, tmp_path: Path, outside: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / target)
    with pytest.raises(EnvironmentProblem):
        require_writable(tmp_path / "loop")
    result = flashtune("generate", "--out", str(tmp_path / "loop"), "--gpu-name", "h200")
    assert result.exit_code in (2, 4) and result.stderr.strip().count("\n") == 0, result.output
    assert snapshot(outside) == {"victim.py": b"precious"}


def test_kernels_that_share_their_file_with_another_name_leave_that_one_as_it_is(tmp_path: Path, outside: Path) -> None:
    path = tmp_path / "kernels" / (module := a_module())
    path.parent.mkdir(parents=True)
    os.link(outside / "victim.py", path)
    write(kernel_files(), tmp_path / "kernels")
    assert path.read_bytes() == kernel_files()[module] and snapshot(outside) == {"victim.py": b"precious"}


@pytest.mark.parametrize("target", ["victim.py", "nowhere.json", ""], ids=["a file", "nothing", "a folder"])
def test_a_card_is_never_written_through_a_link(target: str, tmp_path: Path, database: Path, outside: Path) -> None:
    out = tmp_path / "out" / "b.sqlite"
    out.parent.mkdir()
    card_path(out).symlink_to(outside / target)
    words = ("export", str(out), "--db", str(database))
    plain, licensed = flashtune(*words), flashtune(*words, "--licence", "MIT")
    assert (plain.exit_code, licensed.exit_code) == (2, 2) and "b.sqlite.json" in plain.stderr and "--force" in licensed.stderr
    assert not out.exists()
    forced = flashtune(*words, "--licence", "MIT", "--force")
    assert forced.exit_code == 0, forced.output
    assert not card_path(out).is_symlink() and json.loads(card_path(out).read_text())["file"] == "b.sqlite"
    assert snapshot(outside) == {"victim.py": b"precious"}


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["plain", "forced"])
@pytest.mark.parametrize("command", ["export", "merge"])
def test_a_database_is_never_written_through_a_link(command: str, force: tuple[str, ...], tmp_path: Path, database: Path) -> None:
    other = samples.write(tmp_path / "outside" / "other.sqlite", samples.FIXTURE_RESULTS)
    before = {path.name: path.read_bytes() for path in other.parent.iterdir()}
    for place, target in enumerate((other, other.with_name("nowhere.sqlite"), Path("../outside/other.sqlite"))):
        out = tmp_path / f"out{place}" / "b.sqlite"
        out.parent.mkdir()
        out.symlink_to(target)
        words = ("export", str(out), "--db", str(database)) if command == "export" else ("merge", str(database), "--out", str(out))
        result = flashtune(*words, *force)
        assert result.exit_code == (0 if force else 3), result.output
        assert out.is_symlink() != bool(force)
        assert not force or len(Library.of(out).records()) == 1
        assert [path.name for path in out.parent.iterdir()] == ["b.sqlite"]
    assert {path.name: path.read_bytes() for path in other.parent.iterdir()} == before


@pytest.mark.parametrize("place", ["missing/x.sqlite", "missing/deep/er/x.sqlite", "in/a.sqlite/x.sqlite"])
@pytest.mark.parametrize("scheme", ["", "sqlite:///"])
def test_a_folder_that_is_missing_is_named_and_not_made(place: str, scheme: str, tmp_path: Path, database: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    out = f"{scheme}{tmp_path}/{place}"
    for words in (("export", out, "--db", str(database)), ("merge", str(database), "--out", out, "--licence", "MIT", "--force")):
        result = flashtune(*words)
        assert result.exit_code == 3 and result.stderr.count("\n") == 1, result.output
        assert place in result.stderr and "folder" in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["x" * 300, "x" * 249 + ".sqlite", "é" * 128, "x/" * 3000 + "y"], ids=["plain", "with an ending", "of two bytes each", "a path"]
)
def test_a_name_that_is_too_long_is_one_sentence_in_every_command(name: str, tmp_path: Path, database: Path) -> None:
    path = str(tmp_path / name)
    commands = [
        ("export", path, "--db", str(database)),
        ("export", path, "--db", str(database), "--licence", "MIT"),
        ("merge", str(database), "--out", path),
        ("merge", path, "--out", str(tmp_path / "b.sqlite")),
        ("show", "--db", path),
        ("verify", "--db", path),
        ("explain", "--gpu-name", "h200", "--d", "64", "--n", "512", "--db", path),
        ("generate", "--db", path, "--out", str(tmp_path / "g")),
        ("generate", "--out", path),
        ("search", "--calls", path, "--gpu-name", "h200", "--predict"),
        ("search", "--gpu-name", "a100", "--d", "64", "--n", "512", "--trials", "1", "--predict", "--db", path),
        ("profile", "--gpu-name", "h200", "--d", "64", "--n", "512", "--plot", f"{path}.html"),
    ]
    for words in commands:
        result = flashtune(*words)
        assert result.exit_code in (2, 3, 4), (words[0], result.output, result.exception)
        assert result.stderr.count("\n") == 1, (words[0], result.stderr)
    with pytest.raises((DatabaseError, EnvironmentProblem)):
        dispatch.use(path)


def test_a_name_with_room_for_no_card_is_refused_only_where_one_is_asked_for(tmp_path: Path, database: Path) -> None:
    out = tmp_path / ("x" * 251)
    words = ("export", str(out), "--db", str(database))
    refused = flashtune(*words, "--licence", "MIT")
    assert refused.exit_code == 2 and "metadata file" in refused.stderr and not out.exists()
    assert flashtune(*words).exit_code == 0
    dispatch.use(out).remove()


@pytest.mark.parametrize("write_url", ["sqlite:///{}", "sqlite+pysqlite:///{}", "sqlite:////{}"])
def test_a_card_is_checked_however_its_database_is_named(
    write_url: str, tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "b.sqlite"
    assert flashtune("export", str(out), "--db", str(database), "--licence", "MIT").exit_code == 0
    url = write_url.format(out)
    dispatch.use(url).remove()
    fields = json.loads(card_path(out).read_text())
    card_path(out).write_text(json.dumps({**fields, "sha256": hashlib.sha256(b"another").hexdigest()}))
    dispatch.reload()
    monkeypatch.setenv("FLASHTUNE_DB", url)
    for read in (lambda: dispatch.use(url), Library.default):
        with pytest.raises(DatabaseError, match=r"isn't the file that .* beside it names"):
            read()


def test_a_folder_that_is_none_is_said_before_kernels_are_compiled(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / INDEX).write_text("{}")
    monkeypatch.setattr(machine_code, "_attempt", lambda *words, **more: pytest.fail("it is compiled"))
    found = flashtune("generate", "--check", "--db", str(database), "--out", str(tmp_path), "--jobs", "1")
    assert found.exit_code == 4 and "is no index of generated kernels" in found.stderr, found.output
    assert "compiled" not in found.stderr
