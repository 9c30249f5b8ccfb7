"""The archive of earlier runs: unpacked once, whole, and what its tables say is in it."""

import csv
import shutil
from pathlib import Path

import pytest

from benchmarks.cases import archive


def test_tables_name_runs_that_are_in_the_archive() -> None:
    for script in archive.TABLED:
        with (archive.HERE / f"{script}.csv").open() as table:
            rows = list(csv.DictReader(table))
        assert rows and all((archive.folder() / row["run"] / row["file"]).is_file() for row in rows)


def test_an_archive_is_unpacked_anew_where_it_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "archive.tar.xz").write_bytes(archive.ARCHIVE.read_bytes())
    for name, value in (("HERE", tmp_path), ("ARCHIVE", tmp_path / "archive.tar.xz"), ("MARK", tmp_path / ".unpacked")):
        monkeypatch.setattr(archive, name, value)
    unpack = archive.folder.__wrapped__
    assert unpack() == tmp_path
    runs = [path for path in tmp_path.iterdir() if archive.RUN.fullmatch(path.name)]
    assert len(runs) > 30 and {path.name for path in tmp_path.iterdir()} == {run.name for run in runs} | {"archive.tar.xz", ".unpacked"}
    kept = next(path for path in sorted(runs[0].iterdir()) if path.is_file())
    content = kept.read_bytes()
    kept.unlink()
    unpack()
    assert not kept.exists(), "nothing is unpacked twice"
    archive.MARK.write_text("another")
    unpack()
    assert kept.read_bytes() == content
    shutil.rmtree(kept.parent)
    unpack()
    assert kept.read_bytes() == content
