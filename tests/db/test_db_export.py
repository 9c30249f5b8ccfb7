"""An export holds what passes, in the same bytes each time, and replaces nothing unasked."""

from dataclasses import replace
from pathlib import Path

import db_samples as samples
import pytest

from flashtune.core.system.errors import DatabaseError, NoKernelFound
from flashtune.db.store import Store


def filled(path: Path) -> Path:
    results = [samples.numbered(writer, run) for writer in range(2) for run in range(6)]
    return samples.write(path, (*results, *samples.FIXTURE_RESULTS))


def test_an_export_of_everything_holds_everything(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with Store.open(filled(tmp_path / "a.sqlite"), writable=False) as store:
        assert store.export(tmp_path / "out" / "b.sqlite", winners_only=False) == 14
        with Store.open(tmp_path / "out" / "b.sqlite", writable=False) as exported:
            assert sorted(map(repr, exported.results())) == sorted(map(repr, store.results()))
            assert [r.outcome for r in exported.records()] == [r.outcome for r in store.records()]
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["b.sqlite"]


def test_an_export_of_winners_holds_the_best_row_of_each_key_that_passes(tmp_path: Path) -> None:
    with Store.open(filled(tmp_path / "a.sqlite"), writable=False) as store:
        assert store.export(tmp_path / "b.sqlite", winners_only=True, gpu="h200") == 3
        with Store.open(tmp_path / "b.sqlite", writable=False) as exported:
            assert len(exported.results()[0].outcomes) == 1
            own = [replace(record, origin="") for record in exported.records()]
            assert own == [replace(record, origin="") for record in store.records(gpu="h200")]


@pytest.mark.parametrize("winners_only", [True, False])
def test_an_export_of_nothing_is_refused(winners_only: bool, tmp_path: Path) -> None:
    with (
        Store.open(filled(tmp_path / "a.sqlite"), writable=False) as store,
        pytest.raises(NoKernelFound, match="holds nothing of d 250 to export"),
    ):
        store.export(tmp_path / "b.sqlite", winners_only=winners_only, d=250)
    assert not (tmp_path / "b.sqlite").exists()


def test_equal_contents_export_to_equal_bytes_without_a_write_ahead_log(tmp_path: Path) -> None:
    with Store.open(filled(tmp_path / "a.sqlite"), writable=True) as store:
        for winners_only in (True, False):
            store.export(tmp_path / "b.sqlite", winners_only=winners_only)
            store.export(tmp_path / "c.sqlite", winners_only=winners_only)
            content = (tmp_path / "b.sqlite").read_bytes()
            assert content == (tmp_path / "c.sqlite").read_bytes()
            # Bytes 18 and 19 are 1 for a rollback journal, 2 for a write-ahead log.
            assert content[18:20] == b"\1\1"
            (tmp_path / "b.sqlite").unlink()
            (tmp_path / "c.sqlite").unlink()


def test_an_export_replaces_another_database_only_when_asked(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "b.sqlite", samples.FIXTURE_RESULTS[:1])
    before = path.read_bytes()
    with Store.open(filled(tmp_path / "a.sqlite"), writable=False) as store:
        with pytest.raises(DatabaseError, match="exists already"):
            store.export(path, winners_only=True)
        assert path.read_bytes() == before
        store.export(path, winners_only=True, replace=True)
        with Store.open(path, writable=False) as exported:
            assert len(exported.records()) == len(store.records())


def test_an_export_never_replaces_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a hundred words " * 20)
    with Store.open(filled(tmp_path / "a.sqlite"), writable=False) as store:
        for target in (tmp_path / "notes.txt", tmp_path, "postgresql://host/x"):
            with pytest.raises(DatabaseError):
                store.export(target, winners_only=True, replace=True)
    assert (tmp_path / "notes.txt").read_text() == "a hundred words " * 20
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.sqlite", "notes.txt"]


def test_a_database_is_never_replaced_by_its_own_export(tmp_path: Path) -> None:
    path = filled(tmp_path / "a.sqlite")
    (tmp_path / "link").symlink_to(path)
    before = path.read_bytes()
    with Store.open(path, writable=False) as store, pytest.raises(DatabaseError, match="itself"):
        store.export(tmp_path / "link", winners_only=True, replace=True)
    assert path.read_bytes() == before
