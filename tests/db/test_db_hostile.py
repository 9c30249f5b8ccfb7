"""Files that are damaged, foreign, newer, edited by hand or made to do harm: one clear error, and they are left as they were."""

import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import db_samples as samples
import pytest

from flashtune.core.system.errors import DatabaseError, FlashtuneError
from flashtune.db import inspection
from flashtune.db.library import Layer, Library
from flashtune.db.schema import METADATA
from flashtune.db.store import Store
from flashtune.db.values import SCHEMA_VERSION, TABLES

MEASURED = samples.FIXTURE_RESULTS[0]


@pytest.fixture(autouse=True)
def _nobody_else_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read at once, however young they are."""
    monkeypatch.setattr(inspection, "QUIET_SECONDS", 0.0)


def plain(path: Path, *results: object) -> Path:
    """A database in one file that plain SQL can change: exported, so that it has no write-ahead log."""
    samples.write(path.with_name("source.sqlite"), results or samples.FIXTURE_RESULTS)
    with Store.open(path.with_name("source.sqlite"), writable=False) as store:
        store.export(path, winners_only=False)
    path.with_name("source.sqlite").unlink()
    return path


def sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def read_everything(path: Path) -> tuple[object, ...]:
    with Store.open(path, writable=False) as store:
        return store.records(), store.results()


def refused(path: Path, said: str) -> None:
    """Every way to open or read it gives one line that names the file, and leaves it as it was."""
    before = {entry.name: entry.read_bytes() for entry in path.parent.iterdir() if entry.is_file()}
    tries: list[Callable[[], object]] = [
        lambda: read_everything(path),
        lambda: Store.open(path, writable=True),
        lambda: Library.of(path),
        lambda: Library([Layer(location=path, origin="overlay", optional=True)]),
    ]
    for attempt in tries:
        with pytest.raises(DatabaseError, match=said) as caught:
            attempt()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    assert {entry.name: entry.read_bytes() for entry in path.parent.iterdir() if entry.is_file()} == before


# --- not one of ours --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"# Notes\n" * 100, b"SQLite format 3\0"], ids=["text", "short"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    refused(tmp_path / "file", "not a SQLite database")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(folder, "is a folder")
    assert not list(folder.iterdir())


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for writable in (False, True):
        with pytest.raises(DatabaseError, match="below a file"):
            Store.open(tmp_path / "file" / "db.sqlite", writable=writable)
    assert (tmp_path / "file").read_text() == "x"


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "no ordinary file")


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_another_applications_database_is_refused(tmp_path: Path, journal: str) -> None:
    path = tmp_path / "theirs.sqlite"
    sql(path, f"PRAGMA journal_mode={journal}", "CREATE TABLE alembic_version (version_num)", "INSERT INTO alembic_version VALUES ('0001')")
    sql(path, "CREATE TABLE trial (id)")
    refused(path, "another application")


@pytest.mark.parametrize("version", ["'head'", "NULL", "1", "'٠٠٠١'", "x'30303031'", "'0001'), ('0001'"])
def test_an_impossible_schema_version_is_refused(tmp_path: Path, version: str) -> None:
    path = plain(tmp_path / "odd.sqlite")
    sql(
        path,
        "DROP TABLE flashtune_schema",
        "CREATE TABLE flashtune_schema (version_num)",
        f"INSERT INTO flashtune_schema VALUES ({version})",
    )
    refused(path, "impossible schema version")


# --- damaged ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A sound database of 20 runs."""
    return plain(tmp_path_factory.mktemp("whole") / "a.sqlite", *(samples.numbered(1, run) for run in range(20))).read_bytes()


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, whole: bytes, fraction: float) -> None:
    path = tmp_path / "cut.sqlite"
    path.write_bytes(whole[: max(100, int(len(whole) * fraction))])
    refused(path, "damaged")


def what_is_said(attempt: Callable[[], object]) -> str:
    """The message of the flashtune error that `attempt` raises; empty where it raises none."""
    try:
        attempt()
    except FlashtuneError as error:
        return str(error)
    return ""


def append(path: Path) -> None:
    with Store.open(path, writable=True) as store:
        store.save(samples.numbered(2, 2))


def test_damaged_bytes_are_refused_or_harmless_but_never_anything_else(tmp_path: Path, whole: bytes) -> None:
    rng = random.Random(20261121)
    path = tmp_path / "damaged" / "a.sqlite"
    path.parent.mkdir()
    detected = 0
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            start, length = rng.randrange(len(content)), rng.choice((1, 2, 16, 600, 5000))
            content[start : start + length] = rng.choice((rng.randbytes(length), b"\0" * length, b"\xff" * length))
        path.write_bytes(content)
        said = what_is_said(lambda: read_everything(path))
        assert path.read_bytes() == content
        if said:
            detected += 1
            assert str(path) in said and "\n" not in said
        if what_is_said(lambda: append(path)):
            assert path.read_bytes() == content
        assert [entry.name for entry in path.parent.iterdir()] == ["a.sqlite"]
    assert detected > 20


def test_garbage_beside_the_file_is_ignored_and_left(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "a.sqlite")
    for suffix in ("-wal", "-journal"):
        beside = tmp_path / f"a.sqlite{suffix}"
        beside.write_bytes(random.Random(5).randbytes(5000))
        assert all(read_everything(path))
        assert beside.stat().st_size == 5000
        beside.unlink()


def test_a_missing_column_is_refused(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.sqlite")
    sql(path, "ALTER TABLE trial DROP COLUMN reason")
    with pytest.raises(DatabaseError, match="reason"):
        read_everything(path)


EDITS = {
    "a newer schema": ("newer flashtune", [f"UPDATE flashtune_schema SET version_num = '{int(SCHEMA_VERSION) + 1:04}'"]),
    "rows that point at nothing": ("points at no 'problem'", ["UPDATE run SET problem_id = 77 WHERE id = 1"]),
    **{f"no table {table}": (table, [f"DROP TABLE {table}"]) for table in (*TABLES, "flashtune_schema")},
    "a view for a table": ("view", ["ALTER TABLE trial RENAME TO hidden", "CREATE VIEW trial AS SELECT * FROM hidden"]),
    "a virtual table": ("table 'v'", ["CREATE VIRTUAL TABLE v USING fts5(x)"]),
}
"""Statements, and what is said of a database that they were run on."""


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_schema_is_refused(tmp_path: Path, edit: str) -> None:
    said, statements = EDITS[edit]
    path = plain(tmp_path / "a.sqlite")
    sql(path, *statements)
    refused(path, said)


def test_other_plain_tables_are_left_alone(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.sqlite")
    sql(path, "CREATE TABLE studies (id INTEGER PRIMARY KEY)", "ANALYZE")
    assert all(read_everything(path))


# --- edited by hand ---------------------------------------------------------------------------------------------------------------

TEXT_COLUMNS = [
    "NULL",
    "x'6162'",
    "7",
    "'bell' || char(7)",
    "'reversed' || char(8238)",
    "printf('%.*c', 5000, 'x')",
    "CAST(x'ff80' AS TEXT)",
]
WORD_COLUMNS = [*TEXT_COLUMNS, "''", "'../../etc/passwd'", "'a b'", "'{{ 7 }}'"]
COUNT_COLUMNS = ["NULL", "'many'", "x'01'", "1.5", "-1", "1 << 40", "'9'", "9e999"]
SIZE_COLUMNS = [*COUNT_COLUMNS, "0"]
TIME_COLUMNS = ["NULL", "'fast'", "x'01'", "-1.0", "0.0", "9e999", "-9e999", "1e300", "1e-300"]
JSON_COLUMNS = [
    *TEXT_COLUMNS,
    "'not json'",
    "'[]'",
    "'1'",
    "'null'",
    "'{\"causal\": true}'",
    '\'{"causal":true,"causal":true}\'',
    "'{\"x\":NaN}'",
    "'{\"x\":1e5}'",
    "'{\"x\":null}'",
    "'{\"x\":[1]}'",
    "'{\"x\":{}}'",
    "printf('%.*c', 3000, '[')",
    "'{\"x\":' || printf('%.*c', 3000, '9') || '}'",
    "printf('%.*c', 2000000, 'x')",
]
BAD_VALUES: dict[str, dict[str, list[str]]] = {
    "problem": {
        "gpu": WORD_COLUMNS,
        "n": SIZE_COLUMNS,
        "d": [*SIZE_COLUMNS, "1025"],
        "dtype": [*WORD_COLUMNS, "'fp64'", "'float16'", "'e4m3'"],
        "direction": [*WORD_COLUMNS, "'sideways'"],
        "d_v": [*SIZE_COLUMNS, "1025"],
        "n_q": SIZE_COLUMNS,
        "features": [*JSON_COLUMNS, "'{}'", "'{\"causal\":1}'", '\'{"causal":true,"magic":true}\''],
        "gqa_ratio": [*SIZE_COLUMNS, "3"],
        "bh_bucket": [*SIZE_COLUMNS, "33"],
        "spread": [*(value for value in SIZE_COLUMNS if value != "0"), "1"],
    },
    "run": {
        "batch": [*SIZE_COLUMNS, "200"],
        "heads": [*SIZE_COLUMNS, "3"],
        "kv_heads": [*SIZE_COLUMNS, "5"],
        "features": [
            *JSON_COLUMNS,
            "'{}'",
            '\'{"causal":"yes"}\'',
            '\'{"causal":true,"window":-5}\'',
            '\'{"causal":true,"tf32":true}\'',
            '\'{"alibi":1,"causal":true}\'',
        ],
        "law": [*WORD_COLUMNS[1:], "'gauss'"],
        "longest": [value for value in SIZE_COLUMNS if value != "NULL"] + ["1024"],
        "created_at": [*TEXT_COLUMNS, "'yesterday'", "'2026-13-45'"],
        "baseline_backend": [*TEXT_COLUMNS, "''"],
        **{f"baseline_{name}_us": TIME_COLUMNS for name in ("median", "q10", "q90", "min")},
        "baseline_samples": COUNT_COLUMNS,
        "baseline_call_us": TIME_COLUMNS[1:],
        "race_samples": [*COUNT_COLUMNS, "0"],
        **{f"race_{name}": COUNT_COLUMNS[1:] for name in ("sm_clock_mhz", "memory_clock_mhz", "other_processes")},
        "race_power_w": ["'hot'", "x'01'", "-1.0", "9e999", "1e300"],
        "race_temperature_c": ["'hot'", "x'01'", "1.5", "-300", "1 << 40"],
        "race_throttled_by": TEXT_COLUMNS[1:],
        "ended_by": WORD_COLUMNS[1:],
        "expected_regret": ["'none'", "-1.0", "9e999", "x'01'"],
        "candidates": COUNT_COLUMNS[1:],
    },
    "provenance": {
        **{name: TEXT_COLUMNS for name in ("flashtune", "torch", "triton", "driver", "gpu_name", "clocks", "command")},
        "seed": ["'seven'", "1.5", "x'01'"],
    },
    "candidate": {
        "template": [*WORD_COLUMNS, "'os.system'", "'a-b'", "'fa4'"],
        "config": [*JSON_COLUMNS, "'{\"a b\":1}'", "'{\"BLOCK_M\":99999999999}'", '\'{"x":"\\u0007"}\'', "'{\"__import__(1)\":1}'"],
    },
    "trial": {
        "template_hash": WORD_COLUMNS,
        "variant_id": WORD_COLUMNS,
        "fate": [*WORD_COLUMNS, "'compile'", "'unchecked'", "'corect'"],
        "source": [*WORD_COLUMNS, "'predicted'", "'guessed'"],
        "reason": TEXT_COLUMNS,
        **{f"{name}_us": TIME_COLUMNS for name in ("median", "q10", "q90", "min")},
        "samples": [*COUNT_COLUMNS, "0"],
        **{name: COUNT_COLUMNS for name in ("registers", "spills", "shared_bytes", "threads", "tensor_core_ops")},
        "max_error": ["'none'", "-1.0", "9e999", "x'01'"],
        "finalist": [*COUNT_COLUMNS, "2"],
        "rank": [*COUNT_COLUMNS[1:], "0"],
        **{f"trial_{name}_us": TIME_COLUMNS for name in ("median", "q10", "q90", "min")},
        "trial_samples": [*COUNT_COLUMNS, "0"],
        "call_us": TIME_COLUMNS[1:],
    },
}
POINTERS = {"run": ["problem_id", "provenance_id"], "trial": ["run_id", "candidate_id", "number"]}
COLUMNS = [(table, column) for table, columns in BAD_VALUES.items() for column in columns]


@pytest.fixture(scope="module")
def loose(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One measured run in tables without types and constraints, as a stranger could make them: they take any value."""
    whole = samples.RACED_RESULTS[0]
    path = plain(
        tmp_path_factory.mktemp("loose") / "a.sqlite",
        replace(whole, outcomes=whole.outcomes[:1], ending=samples.ENDED_RESULTS[0].ending),
    )
    for table in BAD_VALUES:
        names = ["id", *POINTERS.get(table, ()), *BAD_VALUES[table]]
        columns = ", ".join(f'"{name}"' for name in names[1:])
        sql(
            path,
            "PRAGMA legacy_alter_table = ON",
            f"ALTER TABLE {table} RENAME TO typed",
            f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {columns})",
            f"INSERT INTO {table} SELECT id, {columns} FROM typed",
            "DROP TABLE typed",
        )
    assert all(read_everything(path))
    return path.read_bytes()


@pytest.mark.parametrize(("table", "column"), COLUMNS, ids=[f"{table}-{column}" for table, column in COLUMNS])
def test_an_impossible_value_names_the_file_the_row_and_the_column(tmp_path: Path, loose: bytes, table: str, column: str) -> None:
    path = tmp_path / "edited.sqlite"
    for value in BAD_VALUES[table][column]:
        path.write_bytes(loose)
        sql(path, f'UPDATE {table} SET "{column}" = {value}')
        edited = path.read_bytes()
        with Store.open(path, writable=False) as store:
            for read in (store.results, store.records):
                with pytest.raises(DatabaseError) as caught:
                    read()
                said = str(caught.value)
                assert str(path) in said and "\n" not in said and said.isprintable() and len(said) < 600, value
                # SQLite itself refuses what is too long or not UTF-8, and then it can't name the row.
                if "2000000" not in value and "ff80" not in value:
                    assert (column in said or "the run's sizes and features give" in said) and " row 1 of " in said, value
        assert path.read_bytes() == edited


def test_every_column_is_covered() -> None:
    for name, table in METADATA.tables.items():
        assert {column.name for column in table.columns} - {"id", *POINTERS.get(name, ())} == set(BAD_VALUES[name])


def test_a_hand_edit_within_the_rules_is_taken(tmp_path: Path) -> None:
    path = plain(tmp_path / "a.sqlite", MEASURED)
    sql(path, "UPDATE trial SET reason = 'noted by hand' WHERE number = 2", "UPDATE provenance SET command = ''")
    with Store.open(path, writable=False) as store:
        assert store.results()[0].outcomes[2].reason == "noted by hand"
