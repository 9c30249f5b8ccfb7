"""The library serves the best record of each key over the user's overlay and the shipped database."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import db_samples as samples
import pytest

from flashtune.core.problems.config import Config
from flashtune.core.records.results import Outcome, SearchResult
from flashtune.core.system.errors import DatabaseError
from flashtune.db import library
from flashtune.db.library import Library, shipped_path
from flashtune.db.records import FileRecords
from flashtune.db.store import Store

KEY = samples.PROBLEM.key("h200")


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's shipped database is; it doesn't exist yet."""
    path = tmp_path / "package" / "tuned.sqlite"
    monkeypatch.setattr(library, "shipped_path", lambda: path)
    return path


def one(variant: str, time: float = 100.0, framework_us: float | None = 120.0, **changes: object) -> SearchResult:
    return samples.result(samples.outcome(variant, time, **changes), framework_us=framework_us)


def served() -> tuple[str, str]:
    record = Library.default().best(KEY)
    assert record is not None
    return record.outcome.variant_id, record.origin


def test_a_machine_without_any_database_has_an_empty_library(own_database: Path, shipped: Path) -> None:
    found = Library.default()
    assert found.records() == [] and found.best(KEY) is None
    assert not own_database.exists() and not shipped.parent.exists()


def test_either_layer_serves_alone(own_database: Path, shipped: Path) -> None:
    samples.write(shipped, (one("there"),))
    assert served() == ("there", "shipped")
    shipped.unlink()
    samples.write(own_database, (one("mine"),))
    assert served() == ("mine", "overlay")


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (one("mine", 90.0), one("theirs", 80.0), "theirs"),
        (one("mine", 80.0), one("theirs", 90.0), "mine"),
        (one("mine", 90.0), one("theirs", 80.0, framework_us=80.0), "mine"),
        (one("mine", 1.0, None, source="predicted"), one("theirs", 500.0), "theirs"),
        (one("mine", 500.0, None), one("theirs", 1.0, None, source="predicted"), "mine"),
        (one("b"), one("a"), "a"),
        (one("same"), one("same"), "same"),
    ],
)
def test_one_rule_chooses_between_the_layers(
    own_database: Path, shipped: Path, mine: SearchResult, theirs: SearchResult, expected: str
) -> None:
    samples.write(own_database, (mine,))
    samples.write(shipped, (theirs,))
    variant, origin = served()
    assert variant == expected
    assert origin == ("overlay" if variant == mine.outcomes[0].variant_id else "shipped")


def test_a_record_that_is_passed_over_gives_way_to_the_next_of_its_key(own_database: Path, shipped: Path) -> None:
    samples.write(own_database, (one("old", 50.0), one("kept", 90.0)))
    samples.write(shipped, (one("shipped", 80.0),))
    found = Library.default()
    assert [record.outcome.variant_id for record in found.winners()] == ["old", "shipped", "kept"]
    assert [r.outcome.variant_id for r in found.records()] == ["old"]
    assert [r.outcome.variant_id for r in found.records(passed_over=lambda r: r.outcome.variant_id == "old")] == ["shipped"]
    assert [r.outcome.variant_id for r in found.records(passed_over=lambda r: True)] == ["old"]


def settling(variant: str, time: float, maximum: str, **changes: object) -> Outcome:
    return samples.outcome(variant, time, config=Config.of(BLOCK_M=128, maximum=maximum), **changes)


@pytest.mark.parametrize(
    ("others", "fallback"),
    [
        ((settling("slow", 140.0, "running"), settling("fast", 130.0, "running"), settling("settles", 110.0, "first")), "fast"),
        ((settling("fast", 130.0, "running", rank=3), settling("raced", 131.0, "running", rank=2)), "raced"),
        ((settling("other", 130.0, "running", template="flash_decode"),), None),
        ((settling("predicted", 130.0, "running", source="predicted"),), None),
        ((samples.outcome("silent", 130.0),), None),
        ((), None),
    ],
    ids=["the fastest", "by the race", "of another family", "not measured", "without the axis", "nothing"],
)
def test_a_row_that_settles_has_the_best_measured_trial_that_does_not_as_its_fallback(
    tmp_path: Path, others: tuple[Outcome, ...], fallback: str | None
) -> None:
    winner = settling("winner", 100.0, "first", rank=1)
    samples.write(tmp_path / "a.sqlite", (samples.result(*others, winner),))
    with Store.open(tmp_path / "a.sqlite", writable=False) as store:
        [record] = store.winners()
        store.export(tmp_path / "b.sqlite", winners_only=True)
    assert record.outcome.variant_id == "winner"
    # A search knows it before its result is read again.
    assert record.fallback == samples.result(*others, winner).fallback
    assert (record.fallback.variant_id if record.fallback else None) == fallback
    # Where only the best is exported, its fallback comes along.
    assert Library.of(tmp_path / "b.sqlite").best(record.key) == replace(record, origin=str(tmp_path / "b.sqlite"))
    assert [replace(r, origin="") for r in FileRecords(tmp_path / "a.sqlite").winners()] == [replace(record, origin="")]


def test_the_packages_database_is_read_by_threads_and_by_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = FileRecords(shipped_path(), shipped=True)
    keys = list(shipped)[:3]
    wanted = [shipped[key] for key in keys]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(shipped.__getitem__, keys)) == wanted
    connection = shipped._connection
    assert shipped[keys[0]] == wanted[0] and shipped._connection is connection
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert shipped[keys[0]] == wanted[0] and shipped._connection is not connection


def test_libraries_read_the_packages_database_once_for_all_and_as_key_by_key() -> None:
    first, second = Library.default(), Library.default()
    [[shipped], [same]] = ([rows for rows in one._rows if isinstance(rows, FileRecords)] for one in (first, second))
    assert shipped is same
    alone = FileRecords(shipped_path(), shipped=True)
    first.winners()
    assert {key: alone[key] for key in alone} == dict(shipped)


def test_a_row_with_running_maxima_needs_no_fallback(tmp_path: Path) -> None:
    samples.write(tmp_path / "a.sqlite", (samples.result(settling("a", 10.0, "running", rank=1), settling("b", 20.0, "running", rank=2)),))
    assert [record.fallback for record in Library.of(tmp_path / "a.sqlite").winners()] == [None]


def test_records_of_both_layers_are_merged_filtered_and_in_order(own_database: Path, shipped: Path) -> None:
    samples.write(own_database, (samples.result(samples.outcome("v"), of=samples.problem(4096)), one("mine", 10.0)))
    samples.write(shipped, (samples.result(samples.outcome("v"), of=samples.problem(512)), one("theirs", 20.0)))
    found = Library.default()
    assert [(r.key.n, r.origin) for r in found.records()] == [(512, "shipped"), (1024, "overlay"), (4096, "overlay")]
    assert [r.key.n for r in found.records(gpu="h200", n=4096, dtype=None)] == [4096]
    assert found.records(gpu="a100") == []


def test_the_hot_path_reads_no_database(own_database: Path, shipped: Path) -> None:
    samples.write(own_database, (one("mine"),))
    found = Library.default()
    own_database.write_bytes(b"gone")
    assert found.best(KEY) is not None and len(found.records()) == 1


@pytest.mark.parametrize("which", ["overlay", "shipped"])
@pytest.mark.parametrize("damage", [lambda path: path.write_text("no database " * 20), lambda path: path.mkdir()], ids=["text", "folder"])
def test_a_broken_layer_that_nobody_named_is_left_out_with_a_warning_and_an_error_by_name(
    own_database: Path, shipped: Path, which: str, damage: Callable[[Path], object]
) -> None:
    samples.write(own_database, (one("mine"),))
    samples.write(shipped, (one("theirs"),))
    path = own_database if which == "overlay" else shipped
    path.unlink()
    damage(path)
    with pytest.warns(RuntimeWarning, match=f"the {which} database is left out: {path}"):
        assert served() == (("theirs", "shipped") if which == "overlay" else ("mine", "overlay"))
    with pytest.raises(DatabaseError, match=str(path)):
        Library.of(path)


def test_a_damaged_shipped_row_leaves_the_shipped_rows_out_of_calls_that_read_it(own_database: Path, shipped: Path) -> None:
    samples.write(shipped, (one("theirs"), samples.result(samples.outcome("other"), of=samples.problem(512))))
    with closing(sqlite3.connect(shipped)) as connection, connection:
        connection.execute("UPDATE trial SET fate = 'lucky' WHERE variant_id = 'theirs'")
    found = Library.default()
    assert [record.outcome.variant_id for record in found[samples.problem(512).key("h200")]] == ["other"]
    with pytest.warns(RuntimeWarning, match=f"{shipped}.*lucky"):
        assert found.best(KEY) is None


def test_a_named_database_stands_alone_and_must_exist(own_database: Path, shipped: Path, tmp_path: Path) -> None:
    samples.write(own_database, (one("mine"),))
    path = samples.write(tmp_path / "model.sqlite", (one("model"),))
    for location in (path, str(path), f"sqlite:///{path}"):
        record = Library.of(location).best(KEY)
        assert record is not None and (record.outcome.variant_id, record.origin) == ("model", str(path))
    with pytest.raises(DatabaseError, match="no database at"):
        Library.of(tmp_path / "missing.sqlite")


def test_the_overlay_is_where_the_environment_says(own_database: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert library.overlay_path() == str(own_database)
    samples.write(tmp_path / "elsewhere.sqlite", (one("elsewhere"),))
    monkeypatch.setenv("FLASHTUNE_OWN_DB", f"sqlite:///{tmp_path}/elsewhere.sqlite")
    assert served() == ("elsewhere", "overlay")
    monkeypatch.setenv("FLASHTUNE_OWN_DB", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert library.overlay_path() == str(tmp_path / "data" / "flashtune" / "tuned.sqlite")


def test_what_the_environment_names_lies_over_the_users_own_for_reading_alone(
    own_database: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    samples.write(own_database, (one("mine", 10.0),))
    named = samples.write(tmp_path / "model.sqlite", (one("model", 110.0),))
    monkeypatch.setenv("FLASHTUNE_DB", str(named))
    assert served() == ("model", str(named)), "though mine gained more"
    assert library.overlay_path() == str(own_database)
    monkeypatch.setenv("FLASHTUNE_DB", str(own_database))
    assert served() == ("mine", "overlay")
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "mistyped.sqlite"))
    with pytest.raises(DatabaseError, match="mistyped"):
        Library.default()


def test_the_topmost_layer_goes_first_and_measured_rows_before_predicted_ones(own_database: Path, shipped: Path, tmp_path: Path) -> None:
    samples.write(own_database, (one("mine", 10.0),))
    low = samples.write(tmp_path / "low.sqlite", (one("low", 50.0), samples.result(samples.outcome("other"), of=samples.problem(512))))
    top = samples.write(tmp_path / "top.sqlite", (one("top", 90.0),))
    guess = samples.write(tmp_path / "guess.sqlite", (one("guess", 1.0, None, source="predicted"),))
    found = Library.over([guess, top, low])
    assert [record.outcome.variant_id for record in found.winners() if record.key == KEY] == ["top", "low", "mine", "guess"]
    assert [record.key.n for record in found.records()] == [512, 1024]
    assert [record.outcome.variant_id for record in Library.over([low], alone=True).winners()] == ["other", "low"]


def test_importing_the_library_loads_neither_torch_nor_sql() -> None:
    code = "import sys, flashtune.db.library; print([name for name in ('torch', 'sqlalchemy', 'alembic', 'triton') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_reading_a_database_loads_neither_torch_nor_alembic(own_database: Path) -> None:
    samples.write(own_database, (one("mine"),))
    code = (
        "import sys; from flashtune.db.library import Library; assert Library.default().records();"
        "print([name for name in ('torch', 'alembic', 'triton') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_shipped_winners_are_the_stores_own_and_need_no_sqlalchemy() -> None:
    with Store.open(shipped_path(), writable=False) as store:
        wanted = [replace(record, origin="") for record in store.winners()]
    assert [replace(record, origin="") for record in FileRecords(shipped_path(), shipped=True).winners()] == wanted and wanted
    assert any(record.fallback is not None for record in wanted)
    code = """
import sys
from flashtune.db.library import Library
print(len(Library.default().winners()), "sqlalchemy" in sys.modules)
"""
    environment = {**os.environ, "FLASHTUNE_OWN_DB": "/nowhere/tuned.sqlite"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.split() == [str(len(wanted)), "False"]
