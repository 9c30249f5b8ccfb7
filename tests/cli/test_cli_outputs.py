"""Whatever a command is to write, it is told of in one sentence, and before anything is written, where a file would be lost for it."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import db_samples as samples
import optuna
import pytest
from commands import flashtune

from flashtune.cli.storage import study_storage
from flashtune.core.records.calls import add
from flashtune.core.system.errors import DatabaseError, InputError
from flashtune.core.system.files import head
from flashtune.tuner.publish.generated import refuse_foreign

SEARCH = ("search", "--gpu-name", "a100", "--trials", "1", "--predict")
PROBLEM = ("--d", "64", "--n", "512")


def other_sqlite(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE patients (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("INSERT INTO patients VALUES (1, 'one')")
        connection.commit()


def mlflow(path: Path) -> None:
    """Alembic's version, as Optuna has one, beside tables of its own."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE experiments (experiment_id INTEGER PRIMARY KEY)")
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        connection.execute("INSERT INTO alembic_version VALUES ('bd07f7e963c5')")
        connection.commit()


def trial_of_another_kind(path: Path) -> None:
    """Two tables with names of Optuna's."""
    with closing(sqlite3.connect(path)) as connection:
        for name in ("studies", "trials", "alembic_version"):
            connection.execute(f"CREATE TABLE {name} (version_num TEXT)")
        connection.commit()


def studies(path: Path) -> None:
    with study_storage(f"sqlite:///{path}") as storage:
        optuna.create_study(storage=storage, study_name="one")


KINDS = {
    "tuned": samples.write,
    "sqlite": other_sqlite,
    "mlflow": mlflow,
    "alike": trial_of_another_kind,
    "studies": studies,
    "calls": lambda path: add(path, [samples.PROBLEM]),
    "log": lambda path: path.write_text("2026-11-22T10:00:00Z begun\n"),
    "text": lambda path: path.write_text("thesis\n"),
    "script": lambda path: path.write_text("def score(a, b): ...\n"),
    "bytes": lambda path: path.write_bytes(os.urandom(5000)),
    "png": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100)),
    "html": lambda path: path.write_text("<!DOCTYPE html>\n<html></html>"),
    "svg": lambda path: path.write_text('<?xml version="1.0"?>\n<svg/>'),
}
OPTIONS: dict[str, tuple[tuple[str, ...], str, set[str]]] = {
    "a search's log": ((*SEARCH, *PROBLEM, "--log", "{}"), "x", {"log"}),
    "a copy": (("export", "{}", "--db", "{own}", "--force"), "x", {"tuned"}),
    "a copy's card": (("export", "{base}", "--db", "{own}", "--licence", "MIT", "--force"), "x.json", set()),
    "merged databases": (("merge", "{own}", "--out", "{}", "--force"), "x", {"tuned"}),
    "their card": (("merge", "{own}", "--out", "{base}", "--licence", "MIT", "--force"), "x.json", set()),
    "a search's page": ((*SEARCH, *PROBLEM, "--plot", "{}"), "x.html", {"html"}),
    "a page": (("profile", "--plot", "{}"), "x.html", {"html"}),
    "a chart": (("profile", "--plot", "{}"), "x.png", {"png"}),
    "a drawing": (("profile", "--plot", "{}"), "x.SVG", {"svg"}),
}
"""Commands that replace a file or add to it, with the file's name, and the kinds of files that they may have."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("kinds")
    for kind, write in KINDS.items():
        write(folder / kind)
    return {kind: (folder / kind).read_bytes() for kind in KINDS}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_file_of_another_kind_is_refused_and_stays(option: str, tmp_path: Path, kinds: dict[str, bytes], database: Path) -> None:
    words, name, taken = OPTIONS[option]
    for kind in kinds.keys() - taken:
        folder = tmp_path / kind
        folder.mkdir()
        (folder / name).write_bytes(kinds[kind])
        before = contents(folder)
        # A link to it is the file itself.
        (folder / "link").mkdir()
        (folder / "link" / name).symlink_to(folder / name)
        for path in (folder / name, *([folder / "link" / name] if option in ("a search's log", "a page") else [])):
            result = flashtune(*(word.format(path, own=database, base=path.with_suffix("")) for word in words))
            assert result.exit_code in (2, 3), (kind, result.output)
            assert len(result.stderr.strip().splitlines()) == 1, (kind, result.stderr)
        assert {name: content for name, content in contents(folder).items() if not name.startswith("link")} == before, kind


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"studies"}))
def test_a_storage_that_is_no_study_is_refused_and_stays(kind: str, tmp_path: Path, kinds: dict[str, bytes]) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(kinds[kind])
    for url in (f"sqlite:///{path}", f"sqlite+pysqlite:///{path}?timeout=5", f"sqlite:///file:{path}?mode=rw&uri=true"):
        with pytest.raises(DatabaseError) as caught, study_storage(url):
            pass
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        assert contents(tmp_path) == {"x.sqlite": kinds[kind]}


def test_a_search_leaves_the_tuned_database_that_its_storage_names(tmp_path: Path, database: Path) -> None:
    before = contents(database.parent)
    result = flashtune(*SEARCH, *PROBLEM, "--db", str(tmp_path / "new.sqlite"), "--storage", f"sqlite:///{database}")
    assert result.exit_code == 3 and "another --storage" in result.stderr
    assert contents(database.parent) == before and not (tmp_path / "new.sqlite").exists()


@pytest.mark.parametrize(("version", "remedy"), [("v6.0.0.a", "pip install -U optuna"), ("v2.4.0.a", "optuna storage upgrade")])
def test_a_storage_of_another_optuna_is_told_of_with_the_remedy(version: str, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    studies(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("UPDATE alembic_version SET version_num = ?", (version,))
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="schema") as caught, study_storage(f"sqlite:///{path}"):
        pass
    assert remedy in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == before


SPELLINGS = {
    "its path": "{}",
    "a path with detours": "{folder}/./sub/../x",
    "a symbolic link": "{folder}/soft",
    "a hard link": "{folder}/hard",
    "a link to its folder": "{folder}/again/x",
    "a URL": "sqlite:///{}",
    "a URL of a link": "sqlite:///{folder}/soft",
}
STORAGES = {
    "a URL": "sqlite:///{}",
    "a URL with options": "sqlite+pysqlite:///{folder}/./x?timeout=5",
    "a URI": "sqlite:///file:{folder}/soft?mode=rwc&uri=true",
    "a URL of a hard link": "sqlite:///{folder}/hard",
}


PAIRS = ("--db --storage", "--db --log", "--log --storage")


@pytest.mark.parametrize(("pair", "there"), [*((pair, there) for pair in PAIRS for there in (True, False)), ("--calls --log", True)])
def test_two_options_never_name_one_file(pair: str, there: bool, tmp_path: Path, kinds: dict[str, bytes]) -> None:
    path, first, second = tmp_path / "x", *pair.split()
    (tmp_path / "sub").mkdir()
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "soft").symlink_to(path)
    if there:
        path.write_bytes(kinds[{"--db": "tuned", "--log": "log", "--calls": "calls"}[first]])
        (tmp_path / "hard").hardlink_to(path)
    before = contents(tmp_path)
    for one in SPELLINGS.values() if first == "--db" else list(SPELLINGS.values())[:5]:
        for other in STORAGES.values() if second == "--storage" else list(SPELLINGS.values())[:5]:
            if there or "hard" not in one + other:
                names = [text.format(path, folder=tmp_path) for text in (one, other)]
                result = flashtune(*SEARCH, *(() if first == "--calls" else PROBLEM), first, names[0], second, names[1])
                assert result.exit_code == 2 and "both name" in result.stderr, (one, other, result.output)
                assert contents(tmp_path) == before


def test_the_places_that_a_search_has_by_itself_count_too(tmp_path: Path) -> None:
    where = {"FLASHTUNE_CACHE": str(tmp_path), "FLASHTUNE_OWN_DB": str(tmp_path / "own.sqlite")}
    for words in (("--db", str(tmp_path / "studies.sqlite")), ("--log", str(tmp_path / "own.sqlite"))):
        assert "both name" in flashtune(*SEARCH, *PROBLEM, *words, **where).stderr
    assert not contents(tmp_path)


def test_kernels_replace_no_file_that_another_wrote(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# My project\n")
    with pytest.raises(InputError, match=r"README\.md"):
        refuse_foreign({"README.md": b"# Kernels\n"}, tmp_path)
    refuse_foreign({"README.md": b"# My project\n", "other.py": b""}, tmp_path)


def test_a_folder_of_another_kind_is_refused_by_an_export(tmp_path: Path, database: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "thesis.tex").write_text("x")
    assert flashtune("export", "--hub", str(tmp_path / "hub"), "--db", str(database)).exit_code in (3, 5)
    assert contents(tmp_path / "hub") == {"thesis.tex": b"x"}


def test_recorded_calls_are_added_to_no_other_file(tmp_path: Path, kinds: dict[str, bytes]) -> None:
    path = tmp_path / "x"
    for kind in kinds.keys() - {"calls"}:
        path.write_bytes(kinds[kind])
        with pytest.raises(InputError):
            add(path, [samples.PROBLEM])
        assert path.read_bytes() == kinds[kind], kind


def test_a_log_may_be_a_device_or_empty_and_grows(tmp_path: Path) -> None:
    assert head(Path(os.devnull), 10) == head(tmp_path / "none", 10) == b""
    log = tmp_path / "log"
    for lines in (1, 2):
        flashtune(*SEARCH, "--d", "64", "--n", "512", "--log", str(log), "--template", "flash_fwd_hopper")
        assert len(log.read_text().splitlines()) == lines, json.dumps(log.read_text())
