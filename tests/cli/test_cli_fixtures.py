"""Databases of every released schema in the commands that read one: what they hold is shown and explained, or refused in a sentence."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from commands import flashtune

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "db").glob("v*.sqlite"))

READS = (
    ("show",),
    ("explain", "--gpu-name", "h200", "--n", "1024", "--d", "64", "--heads", "16", "--kv-heads", "4", "--batch", "2", "--causal"),
    ("explain", "--gpu-name", "h200", "--n", "1000", "--d", "64", "--heads", "16", "--batch", "16", "--causal", "--packed", "lognormal"),
    ("explain", "--gpu-name", "h200", "--n", "1024", "--d", "64", "--direction", "bwd"),
)


def impossible(path: Path) -> list[int]:
    """Runs of a fixture whose made-up time no GPU reaches, which are deleted from the file."""
    with closing(sqlite3.connect(path)) as connection:
        runs = [row[0] for row in connection.execute("SELECT run_id FROM trial WHERE median_us = 60")]
        for table, column in (("trial", "run_id"), ("run", "id")):
            connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(run,) for run in runs])
        connection.commit()
    return runs


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_the_records_of_every_schema_are_shown_and_explained(fixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copy(fixture, tmp_path / "tuned.sqlite"))
    runs = impossible(path)
    # The records' configs have axes that no kernel has today, so that none serves.
    for words in READS:
        done = flashtune(*words, "--db", str(path))
        assert done.exit_code == 0, (words, done.output)
    assert "n1024-d64-bf16-causal-gqa4" in flashtune("show", "--db", str(path)).stdout
    monkeypatch.setenv("FLASHTUNE_DB", str(path))
    assert "missing  FLASHTUNE_DB" not in flashtune("doctor").stdout
    assert runs


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_a_time_that_no_gpu_reaches_is_refused_with_its_row_and_bound(fixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in READS[:2]:
        done = flashtune(*words, "--db", str(fixture))
        assert done.exit_code == 3
        assert (
            "in row 8 of 'trial', median_us is 60, but on h200 no kernel computes n16384-d64-bf16-causal-gqa4 in less than" in done.stderr
        )
