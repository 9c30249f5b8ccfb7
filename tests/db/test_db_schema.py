"""The models and the migrations describe one schema; a version that is released stays readable, and earlier ones are refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import db_samples as samples
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, inspect, make_url

from flashtune.core.problems.problem import ProblemKey
from flashtune.core.system.errors import DatabaseError, FlashtuneError
from flashtune.db import migrations, rows, values
from flashtune.db.library import Library
from flashtune.db.schema import METADATA, PROBLEM
from flashtune.db.server import Server
from flashtune.db.store import Store
from flashtune.db.values import APPLICATION_ID, OLDEST_VERSION, SCHEMA_VERSION, TABLES, VERSION_TABLE

FIXTURES = Path(__file__).parents[1] / "fixtures" / "db"


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    samples.write(tmp_path / "new.sqlite", ())
    engine = create_engine(f"sqlite:///{tmp_path}/new.sqlite")
    with engine.connect() as opened:
        yield opened


def revisions(connection: Connection) -> ScriptDirectory:
    return ScriptDirectory.from_config(migrations.alembic_config(connection))


def test_the_models_equal_the_migrated_schema(connection: Connection) -> None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
    assert compare_metadata(context, METADATA) == []


def test_a_difference_between_models_and_schema_would_be_noticed(connection: Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE trial ADD COLUMN extra INTEGER")
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
    assert compare_metadata(context, METADATA) != []


def test_the_newest_revision_is_the_one_that_the_store_knows(connection: Connection) -> None:
    assert revisions(connection).get_heads() == [SCHEMA_VERSION]
    assert connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalars().all() == [SCHEMA_VERSION]
    assert connection.exec_driver_sql("PRAGMA application_id").scalar() == APPLICATION_ID


def test_revisions_begin_at_the_oldest_that_is_read_and_each_follows_the_one_before(connection: Connection) -> None:
    known = [revision.revision for revision in revisions(connection).walk_revisions()][::-1]
    assert known == [f"{number:04}" for number in range(int(OLDEST_VERSION), int(SCHEMA_VERSION) + 1)]
    assert sorted(path.stem for path in FIXTURES.glob("*.sqlite")) == [f"v{revision}" for revision in known]


@pytest.mark.parametrize("version", samples.KEPT_SINCE)
def test_a_database_of_every_schema_is_read_as_it_was_written_and_written_on(tmp_path: Path, version: str) -> None:
    path, kept = FIXTURES / f"v{version}.sqlite", samples.KEPT_SINCE[version]
    content = path.read_bytes()
    with Store.open(path, writable=False) as store:
        assert tuple(store.results()) == kept
    assert path.read_bytes() == content
    (tmp_path / "old.sqlite").write_bytes(content)
    with Store.open(tmp_path / "old.sqlite", writable=True) as store:
        store.save(samples.numbered(1, 1))
        assert tuple(store.results()) == (*kept, samples.numbered(1, 1))


def test_records_of_an_older_schema_serve_without_an_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    path.write_bytes((FIXTURES / "v0005.sqlite").read_bytes())
    with create_engine(f"sqlite:///{path}").begin() as connection:
        # No GPU takes so little.
        connection.exec_driver_sql(
            "UPDATE trial SET " + ", ".join(f"{name}_us = 20 * {name}_us" for name in ("median", "q10", "q90", "min"))
        )
    content = path.read_bytes()
    with Store.open(path, writable=False) as store:
        wanted = {record.outcome.variant_id for record in store.winners()}
    assert {record.outcome.variant_id for record in Library.of(path).records()} == wanted and len(wanted) > 2
    assert path.read_bytes() == content


@pytest.mark.parametrize("version", [f"{number:04}" for number in range(int(OLDEST_VERSION))])
def test_a_schema_that_no_release_wrote_is_refused_with_its_revision_and_a_remedy(tmp_path: Path, version: str) -> None:
    path = samples.write(tmp_path / "old.sqlite")
    with create_engine(f"sqlite:///{path}").begin() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '{version}'")
    said = rf"old\.sqlite has the schema {version}, which no release wrote .*: search again into a new database"
    for writable in (False, True):
        content = path.read_bytes()
        with pytest.raises(DatabaseError, match=said):
            Store.open(path, writable=writable)
        with pytest.raises(DatabaseError, match=said):
            Server(make_url(f"sqlite:///{path}"), writable=writable).open()
        assert path.read_bytes() == content
    with pytest.raises(DatabaseError, match=said):
        Library.of(path)


def test_a_time_that_no_gpu_takes_is_kept_and_serves_nobody() -> None:
    with Store.open(FIXTURES / "v0005.sqlite", writable=False) as store:
        assert samples.ENDED_RESULTS[0] in store.results()
        for attempt in (store.winners, lambda: Library.of(FIXTURES / "v0005.sqlite")):
            with pytest.raises(DatabaseError, match=r"v0005\.sqlite: in row 8 of 'trial', median_us is 60, but on h200 no kernel computes"):
                attempt()


def test_the_columns_of_a_problem_are_those_of_its_key_in_order() -> None:
    assert tuple(PROBLEM.columns.keys()) == ("id", *ProblemKey.__slots__)


def test_columns_that_are_read_are_those_of_the_tables() -> None:
    ids = {"id", "problem_id", "provenance_id", "run_id", "candidate_id"}
    for table, columns in zip(TABLES, (rows.PROBLEM, rows.RUN, rows.TRIAL, rows.PROVENANCE, rows.CANDIDATE), strict=True):
        assert set(METADATA.tables[table].columns.keys()) - ids == set(columns)


def test_runs_share_provenances_and_trials_share_candidates(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "a.sqlite", tuple(samples.numbered(1, run) for run in range(4)))
    for _ in range(2):
        with Store.open(path, writable=True) as store:
            store.save(samples.numbered(2, 0))
    with create_engine(f"sqlite:///{path}").connect() as connection:
        counts = [connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar() for table in TABLES]
    assert counts == [3, 6, 30, 1, 1]


def test_look_ups_of_a_key_and_of_a_runs_best_use_an_index(connection: Connection) -> None:
    inspector = inspect(connection)
    unique = inspector.get_unique_constraints("problem")[0]
    assert tuple(unique["column_names"]) == ProblemKey.__slots__
    plan = connection.exec_driver_sql("EXPLAIN QUERY PLAN SELECT * FROM problem WHERE gpu = 'h200' AND n = 512 AND d = 64").all()
    assert "(gpu=? AND n=? AND d=?)" in str(plan)
    assert "(run_id=?)" in str(connection.exec_driver_sql("EXPLAIN QUERY PLAN SELECT * FROM trial WHERE run_id = 1").all())


# --- a later version --------------------------------------------------------------------------------------------------------------

NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "{version}", "{newest}", None, None


def upgrade() -> None:
    op.add_column("trial", sa.Column("extra", sa.Integer()))
    op.execute("UPDATE provenance SET command = 'migrated'")
    op.execute({last!r})
"""


def later_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str = "SELECT 1") -> None:
    """A flashtune that has one more schema version."""
    folder = tmp_path / "100% other: migrations"
    shutil.copytree(migrations.FOLDER, folder)
    version = f"{int(SCHEMA_VERSION) + 1:04}"
    (folder / "versions" / f"v{version}_later.py").write_text(NEXT.format(version=version, newest=SCHEMA_VERSION, last=last))
    monkeypatch.setattr(migrations, "FOLDER", folder)
    monkeypatch.setattr(values, "SCHEMA_VERSION", version)


def test_an_older_file_is_read_through_a_migrated_copy_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = samples.write(tmp_path / "db" / "old.sqlite")
    content = path.read_bytes()
    later_version(tmp_path, monkeypatch)
    with Store.open(path, writable=False) as store:
        assert {record.provenance.command for record in store.records()} == {"migrated"}
        assert len(store.results()) == 2
    assert path.read_bytes() == content and [entry.name for entry in path.parent.iterdir()] == ["old.sqlite"]


def test_an_older_file_is_upgraded_when_it_is_opened_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = samples.write(tmp_path / "db" / "old.sqlite")
    later_version(tmp_path, monkeypatch)
    with Store.open(path, writable=True) as store:
        store.save(samples.numbered(1, 1))
        assert [result.provenance.command for result in store.results()] == ["migrated", "migrated", samples.PROVENANCE.command]


def test_an_upgrade_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = samples.write(tmp_path / "db" / "old.sqlite")
    content = path.read_bytes()
    later_version(tmp_path, monkeypatch, last="INSERT INTO nowhere VALUES (1)")
    for writable in (True, False):
        with pytest.raises(FlashtuneError, match="nowhere"):
            Store.open(path, writable=writable)
    assert path.read_bytes() == content and [entry.name for entry in path.parent.iterdir()] == ["old.sqlite"]
