"""Files made to cost time, memory or a place among the winners: refused with one line, before anything of theirs is evaluated."""

import itertools
import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import db_samples as samples
import pytest
from commands import flashtune
from test_cli_hostile import readers
from test_db_hostile import plain, read_everything, refused, sql
from test_db_schema import later_version

from flashtune.core.system.errors import DatabaseError, InputError
from flashtune.db import card, connecting, inspection, library, records, sqlite_file
from flashtune.db.connecting import Allowance, bounded
from flashtune.db.library import Layer, Library
from flashtune.db.merging import merge
from flashtune.db.store import Store

SCHEMAS = int(os.environ.get("FLASHTUNE_TEST_SCHEMAS", "4"))
"""How many random schemas are fed to every command."""
CPU_SECONDS = 10.0

SLOW = "replace(hex(zeroblob(4000)), '0', 'a') NOT LIKE '%a%a%a%a%a%a%a%a%a%b'"
"""Takes hours within one instruction of SQLite's machine, so that no time limit ends it."""


@pytest.fixture(autouse=True)
def _nobody_else_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "QUIET_SECONDS", 0.0)


def rewritten(path: Path, kind: str, name: str, old: str, new: str) -> None:
    """Replace a part of the statement that a file says an object is made by."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        [(text,)] = connection.execute("SELECT sql FROM sqlite_schema WHERE type = ? AND name = ?", (kind, name))
        assert old in text
        connection.execute("UPDATE sqlite_schema SET sql = ? WHERE type = ? AND name = ?", (text.replace(old, new, 1), kind, name))


EDITS = {
    "a check of a column": ("table", "run", "batch INTEGER NOT NULL", f"batch INTEGER NOT NULL CHECK ({SLOW})"),
    "a check of a table": ("table", "trial", "CONSTRAINT pk_trial", f"CONSTRAINT slow CHECK ({SLOW}), CONSTRAINT pk_trial"),
    "a check of the version": ("table", "flashtune_schema", "NOT NULL", f"NOT NULL CHECK ({SLOW})"),
    "a default": ("table", "trial", "reason TEXT NOT NULL", f"reason TEXT NOT NULL DEFAULT ({SLOW})"),
    "a computed column": ("table", "provenance", "driver TEXT NOT NULL", f"driver TEXT GENERATED ALWAYS AS ({SLOW}) VIRTUAL"),
    "a collation": ("table", "problem", "gpu VARCHAR(64)", "gpu VARCHAR(64) COLLATE NOCASE"),
    "an index of some rows": ("index", "ix_run_problem_id", "(problem_id)", f"(problem_id) WHERE {SLOW}"),
    "an index of an expression": ("index", "ix_run_problem_id", "(problem_id)", f"(({SLOW}))"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("older", [False, True])
def test_what_sqlite_would_evaluate_is_refused_unevaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: str, older: bool) -> None:
    path = plain(tmp_path / "a.sqlite")
    if older:
        later_version(tmp_path, monkeypatch)
    rewritten(path, *EDITS[edit])
    refused(path, "more than plain columns")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW flashtune_schema AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS version_num FROM c",
        f"CREATE VIEW more AS SELECT {SLOW}",
        f"CREATE TRIGGER slow BEFORE UPDATE ON problem BEGIN SELECT {SLOW}; END",
    ],
)
def test_views_and_triggers_are_refused_beside_unfinished_writes_too(tmp_path: Path, statement: str) -> None:
    path = plain(tmp_path / "a.sqlite")
    if " flashtune_schema " in statement:
        sql(path, "DROP TABLE flashtune_schema")
    sql(path, statement)
    refused(path, "more than plain columns")
    (tmp_path / "a.sqlite-wal").write_bytes(b"x" * 5000)
    for attempt in (lambda: Store.open(path, writable=False), lambda: Library.of(path)):
        with pytest.raises(DatabaseError, match="more than plain columns"):
            attempt()


def random_table(rng: random.Random) -> list[str]:
    """Statements of a grammar of tables, indexes, views and triggers, some of which are plain."""
    name, other = rng.sample(["a", "b", '"c d"', "more", "runs2"], 2)
    terms = ["1", "x", f"({SLOW})", "x > 3", "abs(x)", "'t'", "NULL", "CURRENT_TIME"]
    wheres = ["", f" CHECK ({rng.choice(terms)})", f" DEFAULT ({rng.choice(terms[5:])})", " COLLATE NOCASE", " UNIQUE", " NOT NULL"]
    columns = ", ".join(f"x{i or ''} {rng.choice(['INTEGER', 'TEXT', 'BLOB', '', 'VARCHAR(9)'])}{rng.choice(wheres)}" for i in range(3))
    generated = rng.choice(["", "", f", g AS ({rng.choice(terms)})"])
    made = [f"CREATE TABLE {name} ({columns}{generated}){rng.choice(['', '', ' STRICT'])}"]
    made += rng.choice(
        [
            [],
            [f"CREATE INDEX i ON {name} ({rng.choice(['x', 'x DESC', 'abs(x)'])}){rng.choice(['', ' WHERE x > 1'])}"],
            [f"CREATE VIEW {other} AS SELECT {rng.choice(terms)} FROM {name}"],
            [f"CREATE TRIGGER t AFTER INSERT ON run BEGIN SELECT {rng.choice(terms[:1] + terms[2:])}; END"],
        ]
    )
    return made


def test_random_schemas_end_every_command_soon_with_a_line_or_what_it_is_for(tmp_path: Path) -> None:
    rng, fed = random.Random(20261127), 0
    while fed < SCHEMAS:
        path = plain(tmp_path / f"{fed}.sqlite")
        try:
            sql(path, *random_table(rng))
        except sqlite3.Error:
            path.unlink()
            continue
        if rng.random() < 0.3:
            sql(path, f"UPDATE flashtune_schema SET version_num = '000{rng.randint(1, 4)}'")
        fed += 1
        merging = ("merge", str(path), "--out", str(tmp_path / f"merged{fed}.sqlite"))
        for words in [*readers(path, tmp_path / str(fed)), merging]:
            began = time.process_time()
            result = flashtune(*words)
            assert time.process_time() - began < CPU_SECONDS, (words, path)
            assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)


# --- time and space ---------------------------------------------------------------------------------------------------------------

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


def test_no_statement_runs_without_end_and_several_share_an_allowance() -> None:
    allowance = Allowance(0.2)
    with closing(sqlite3.connect(":memory:")) as connection:
        with pytest.raises(DatabaseError, match=r"a\.sqlite takes more than 0\.2 s"), bounded(connection, "a.sqlite", allowance):
            connection.execute(ENDLESS).fetchall()
        assert connection.execute("SELECT 1").fetchone() == (1,)
        with pytest.raises(DatabaseError, match=r"more than 0\.2 s"), bounded(connection, "a.sqlite", allowance):
            connection.execute(ENDLESS.replace("FROM c", "FROM c LIMIT 100000", 1)).fetchall()


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("older", [False, True])
def test_a_file_that_takes_long_to_open_is_refused_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool, older: bool
) -> None:
    path = plain(tmp_path / "a.sqlite", *(samples.numbered(1, run, trials=200) for run in range(8)))
    if older:
        later_version(tmp_path, monkeypatch)
    monkeypatch.setattr(connecting, "_STEPS", 100)
    for module in (sqlite_file, records):
        monkeypatch.setattr(module, "OPENING_SECONDS", 1e-4)
    attempts = [lambda: Store.open(path, writable=writable), *([] if writable else [lambda: Library.of(path)])]
    for attempt in attempts:
        with pytest.raises(DatabaseError, match=r"a\.sqlite takes more than 0\.0001 s to read"):
            attempt()
    monkeypatch.undo()
    assert len(read_everything(path)[1]) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_handled_while_a_statement_runs(number: signal.Signals) -> None:
    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(number, handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), number))
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            timer.start()
            with pytest.raises(KeyboardInterrupt), bounded(connection, "a.sqlite", Allowance(600.0)):
                connection.execute(ENDLESS).fetchall()
    finally:
        timer.join()
        signal.signal(number, before)


@pytest.mark.parametrize("suffixes", [("-wal",), ("-journal",), ("-wal", "-journal")])
def test_unfinished_writes_of_any_size_are_not_copied(tmp_path: Path, suffixes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain(tmp_path / "a.sqlite")
    for suffix in suffixes:
        with (tmp_path / f"a.sqlite{suffix}").open("wb") as file:
            file.write(b"\x37\x7f\x06\x82")
            file.truncate(1 << 32)
    monkeypatch.setattr(sqlite_file.shutil, "copyfile", lambda *words: pytest.fail("nothing is copied"))
    for attempt in (lambda: Store.open(path, writable=False), lambda: Library.of(path)):
        with pytest.raises(DatabaseError, match="unfinished writes"):
            attempt()


def without_keys(path: Path, table: str, number: str) -> list[str]:
    """Statements that make a table anew without its indexes and keys but for a `number` in place of its id."""
    with closing(sqlite3.connect(path)) as connection:
        columns = [str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")]
    made = ", ".join([number, *columns[1:]])
    return [
        f"CREATE TABLE bare ({made})",
        f"INSERT INTO bare SELECT * FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE bare RENAME TO {table}",
    ]


@pytest.mark.parametrize("number", ["id INTEGER", "id TEXT PRIMARY KEY", "id"])
@pytest.mark.parametrize("older", [False, True])
def test_rows_of_one_id_are_refused_before_they_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, older: bool
) -> None:
    """They took 36 s and 900 MB in a file of 120 KB."""
    path = plain(tmp_path / "a.sqlite", samples.FIXTURE_RESULTS[0])
    for table in ("problem", "run"):
        sql(path, *without_keys(path, table, number))
        if "PRIMARY" not in number:
            sql(path, *[f"INSERT INTO {table} SELECT * FROM {table}"] * 6)
    if older:
        later_version(tmp_path, monkeypatch)
    refused(path, "lacks the key of its table 'problem'")


@pytest.mark.parametrize("table", ["problem", "run", "trial", "more"])
def test_columns_without_content_are_refused(tmp_path: Path, table: str) -> None:
    path = plain(tmp_path / "a.sqlite")
    if table == "more":
        sql(path, f"CREATE TABLE more ({', '.join(f'x{place}' for place in range(200))})")
    else:
        sql(path, *(f"ALTER TABLE {table} ADD COLUMN x{place} INTEGER" for place in range(120)))
    refused(path, "is damaged")


def test_a_file_with_holes_is_not_hashed_for_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain(tmp_path / "a.sqlite")
    with path.open("r+b") as file:
        file.truncate(1 << 42)
    (tmp_path / "a.sqlite.json").write_text('{"format": 1, "sha256": ""}')
    monkeypatch.setattr(card, "digest", lambda database: pytest.fail("it is hashed"))
    with pytest.raises(DatabaseError, match=r"a\.sqlite has 4194304 MiB, too many for a file with metadata"):
        Library([Layer(location=path, precedence=1)])


# --- forged gains -----------------------------------------------------------------------------------------------------------------

FORGED = {
    "a time below the roofline": ("trial", "median_us = 1.5, q10_us = 1.5, min_us = 1.5", "no kernel computes"),
    "a whole call below it": ("trial", "call_us = 2.0", "no kernel computes"),
    "an endless framework": ("run", "baseline_median_us = 1e11, baseline_q90_us = 1e11", "torch computes"),
    "endless calls of it": ("run", "baseline_call_us = 5e6", "torch computes"),
}


@pytest.mark.parametrize("case", FORGED)
def test_times_that_nothing_takes_are_refused_at_reading_and_merging(tmp_path: Path, case: str) -> None:
    table, values, said = FORGED[case]
    path, honest = plain(tmp_path / "a.sqlite", samples.FIXTURE_RESULTS[0]), samples.write(tmp_path / "b.sqlite")
    sql(path, f"UPDATE {table} SET {values} WHERE id = 1")
    for attempt in (
        lambda: Library.of(path).winners(),
        lambda: Store.open(path, writable=False).winners(),
        lambda: merge([honest, path], tmp_path / "out.sqlite"),
    ):
        with pytest.raises(DatabaseError, match=said):
            attempt()
    assert not (tmp_path / "out.sqlite").exists()


@pytest.mark.parametrize("gpu", ["h200", "a-card-of-next-year"])
def test_times_that_nothing_takes_are_not_kept(tmp_path: Path, gpu: str) -> None:
    with pytest.raises(InputError, match="no kernel computes"):
        samples.write(tmp_path / "a.sqlite", (samples.result(samples.outcome("aaaa000000000001", 1.2), gpu=gpu, of=samples.problem(4096)),))


def preferred(tmp_path: Path, *results: object) -> str:
    """The winner, in whatever order databases are merged."""
    paths = [samples.write(tmp_path / f"{number}.sqlite", (one,)) for number, one in enumerate(results)]
    found = set()
    for order in itertools.permutations(paths):
        library = Library([Layer(location=path) for path in order])
        found |= {record.outcome.variant_id for record in library.records()}
    merge(paths, tmp_path / "out.sqlite")
    [merged] = Library.of(tmp_path / "out.sqlite").records()
    assert found == {merged.outcome.variant_id}
    return merged.outcome.variant_id


def gained(variant: str, time_us: float, *, torch: str = "2.11.0", triton: str = "3.6.0", **changes: object) -> object:
    found = samples.result(samples.outcome(variant, time_us, **changes))
    return replace(found, provenance=replace(samples.PROVENANCE, torch=torch, triton=triton))


def test_evidence_goes_before_a_gain_of_few_samples_or_of_wide_spread(tmp_path: Path) -> None:
    few = replace(samples.times(20.0), samples=3)
    wide = replace(samples.times(20.0), q90_us=100.0)
    assert (
        preferred(tmp_path, gained("honest", 100.0), gained("few", 20.0, measurement=few), gained("wide", 20.0, measurement=wide))
        == "honest"
    )


@pytest.mark.parametrize(
    ("older", "newer"), [({"torch": "2.9.1"}, {"torch": "2.10.0+cu130"}), ({"triton": "3.6.0"}, {"triton": "3.7"}), ({"torch": ""}, {})]
)
def test_a_gain_over_an_older_torch_gives_way_to_the_newer_ones(tmp_path: Path, older: dict[str, str], newer: dict[str, str]) -> None:
    assert preferred(tmp_path, gained("older", 60.0, **older), gained("newer", 110.0, **newer)) == "newer"
    assert preferred(tmp_path / "same", gained("slower", 60.0, **newer), gained("faster", 50.0, **newer)) == "faster"


# --- many records -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = [
        samples.result(samples.outcome(f"{n:016x}", 10.0 * n), framework_us=12.0 * n, of=samples.problem(64 * n)) for n in range(1, 61)
    ]
    return plain(tmp_path_factory.mktemp("many") / "a.sqlite", *results)


@pytest.mark.parametrize("indexed", [True, False])
def test_of_many_records_those_near_a_key_are_read_alone(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
) -> None:
    for name, value in (("READ_WHOLE", 0), ("CHECKED_BYTES", 0), ("MOST_NEAR", 3)):
        monkeypatch.setattr(records, name, value)
    monkeypatch.setattr(library, "MOST_KEYS", 20)
    path = tmp_path / "a.sqlite"
    path.write_bytes(many.read_bytes())
    if not indexed:
        for table in ("problem", "run", "trial"):
            sql(path, *without_keys(path, table, "id INTEGER PRIMARY KEY"))
    before = path.read_bytes()
    found = Library.of(path)
    key = samples.problem(64 * 30).key("h200")
    near = found.near(key, ["h200"])
    assert found.large and len(found) == 60 and sorted(known.n // 64 for known in near) == [28, 29, 30, 31, 32, 33]
    assert near[key][0].outcome.variant_id == f"{30:016x}" and len(found._known) == 1
    assert [record.key.n for record in found.records()] == [64 * n for n in range(1, 61)]
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["a.sqlite"]


def test_a_file_that_changes_is_read_anew_and_one_that_is_gone_is_read_on(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "READ_WHOLE", 0)
    path, key = tmp_path / "a.sqlite", samples.problem(64 * 30).key("h200")
    path.write_bytes(many.read_bytes())
    changed = Library.of(path)
    sql(path, "UPDATE trial SET variant_id = 'later'")
    assert {record.outcome.variant_id for record in changed[key]} == {"later"}
    again = Library.of(path)
    path.unlink()
    assert {record.outcome.variant_id for record in again[key]} == {"later"}


@pytest.mark.parametrize("older", [True, False])
def test_what_is_read_through_a_copy_is_read_by_key_too(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool) -> None:
    monkeypatch.setattr(records, "READ_WHOLE", 0)
    monkeypatch.setattr(Store, "winners", lambda store: pytest.fail("all records are read"))
    path, key = tmp_path / "db" / "a.sqlite", samples.problem(64 * 30).key("h200")
    path.parent.mkdir()
    path.write_bytes(many.read_bytes())
    if older:
        later_version(tmp_path, monkeypatch)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        if not older:
            writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("UPDATE trial SET variant_id = 'later'")
        before = {entry.name: entry.read_bytes() for entry in path.parent.iterdir()}
        found = Library.of(path)
        assert before.keys() == ({"a.sqlite"} if older else {"a.sqlite", "a.sqlite-shm", "a.sqlite-wal"})
        assert {entry.name: entry.read_bytes() for entry in path.parent.iterdir()} == before
    path.unlink()
    assert {record.outcome.variant_id for record in found[key]} == {"later"} and len(found._known) == 1
    assert found[key][0].origin == str(path) and len(found) == 60


def test_a_page_that_is_damaged_is_an_error_when_its_record_is_read(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("READ_WHOLE", "CHECKED_BYTES"):
        monkeypatch.setattr(records, name, 0)
    path = tmp_path / "a.sqlite"
    content = bytearray(many.read_bytes())
    content[4096 * 3 :] = random.Random(1).randbytes(len(content) - 4096 * 3)
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match=str(path)):
        Library.of(path).records()
