"""Where a database may be (any file name, URLs, links, files that are empty or gone), what is no place, and opening one for reading."""

import os
from pathlib import Path

import db_samples as samples
import pytest

from flashtune.core.system.errors import DatabaseError, FlashtuneError
from flashtune.db.store import Store

STRANGE_NAMES = [
    "plain.sqlite",
    "a b.sqlite",
    "what?.sqlite",
    "a#b.sqlite",
    "100%41.sqlite",
    "Grüße-数据🚀.sqlite",
    "x&mode=memory",
    "-wal",
    "n" * 200,
]


@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_any_file_name_works(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / "odd ?#% ü" / name
    samples.write(path)
    assert [entry.name for entry in path.parent.iterdir()] == [name]
    with Store.open(str(path), writable=False) as store:
        assert tuple(store.results()) == samples.FIXTURE_RESULTS
        assert store.records()[0].origin == str(path)


def test_a_name_that_is_not_unicode_works(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.sqlite"))
    samples.write(path)
    with Store.open(path, writable=False) as store:
        assert tuple(store.results()) == samples.FIXTURE_RESULTS


def test_sqlite_urls_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    samples.write(tmp_path / "absolute.sqlite")
    for location in (
        f"sqlite:///{tmp_path}/absolute.sqlite",
        "sqlite:///absolute.sqlite",
        "sqlite+pysqlite:///absolute.sqlite",
        "absolute.sqlite",
    ):
        with Store.open(location, writable=False) as store:
            assert len(store.records()) == 2
    with Store.open("sqlite:///sub/new.sqlite", writable=True) as store:
        store.save(samples.FIXTURE_RESULTS[0])
    assert (tmp_path / "sub" / "new.sqlite").is_file()


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    samples.write(Path("~/mine.sqlite"))
    assert (tmp_path / "mine.sqlite").is_file()


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("", "empty path"),
        (":memory:", "lost"),
        ("sqlite://", "lost"),
        ("sqlite:///:memory:", "lost"),
        ("sqlite:///x.sqlite?mode=rwc", "plain path"),
        ("sqlite+aiosqlite:///x.sqlite", "driver"),
        ("nosuchdatabase://u:secret@host/x", "SQLAlchemy"),
        ("://", "URL"),
        ("post gres://u:secret@x", "URL"),
        ("a\0b", "NUL"),
    ],
)
@pytest.mark.parametrize("writable", [False, True])
def test_a_location_that_is_no_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str, said: str, writable: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlashtuneError, match=said) as caught:
        Store.open(location, writable=writable)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_links_lead_to_the_real_file(tmp_path: Path) -> None:
    real = samples.write(tmp_path / "real" / "a.sqlite")
    link = tmp_path / "links" / "b.sqlite"
    link.parent.mkdir()
    link.symlink_to("../real/a.sqlite")
    with Store.open(link, writable=True) as store:
        store.save(samples.FIXTURE_RESULTS[0])
    assert link.is_symlink() and [entry.name for entry in link.parent.iterdir()] == ["b.sqlite"]
    with Store.open(real, writable=False) as store:
        assert len(store.results()) == 3


def test_a_link_to_nothing_is_filled_where_it_points(tmp_path: Path) -> None:
    link = tmp_path / "link.sqlite"
    link.symlink_to(tmp_path / "elsewhere" / "a.sqlite")
    with pytest.raises(DatabaseError, match="no database"):
        Store.open(link, writable=False)
    samples.write(link)
    assert link.is_symlink() and (tmp_path / "elsewhere" / "a.sqlite").is_file()


def test_an_empty_file_counts_as_a_missing_database(tmp_path: Path) -> None:
    path = tmp_path / "mktemp"
    path.touch()
    with pytest.raises(DatabaseError, match="empty"):
        Store.open(path, writable=False)
    samples.write(path)
    with Store.open(path, writable=False) as store:
        assert tuple(store.results()) == samples.FIXTURE_RESULTS


def test_a_database_removed_during_a_search_is_written_again(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.sqlite", writable=True) as store:
        (tmp_path / "a.sqlite").unlink()
        store.save(samples.FIXTURE_RESULTS[0])
        assert len(store.results()) == 1


def test_a_store_for_reading_does_not_save(tmp_path: Path) -> None:
    with Store.open(samples.write(tmp_path / "a.sqlite"), writable=False) as store, pytest.raises(DatabaseError, match="reading only"):
        store.save(samples.FIXTURE_RESULTS[0])


def test_a_store_for_reading_sees_what_others_save(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "a.sqlite")
    with Store.open(path, writable=False) as reader, Store.open(path, writable=True) as writer:
        for count in range(3, 6):
            writer.save(samples.FIXTURE_RESULTS[0])
            assert len(reader.results()) == count
