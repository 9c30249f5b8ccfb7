"""A real PostgreSQL server: studies and tuned databases on it, first searches at once, a killed host, a restart in the middle."""

import os
from collections.abc import Iterator
from pathlib import Path

import db_samples as samples
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from postgres import PostgresServer, binaries
from sqlalchemy import create_engine
from storms import hosts, kills
from test_cli_storage import open_together
from test_core_secrets import SECRET

from flashtune.cli.storage import study_storage
from flashtune.core.system.errors import DatabaseError
from flashtune.db.schema import METADATA
from flashtune.db.store import Store
from flashtune.db.values import VERSION_TABLE


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    folder = binaries()
    if folder is None:
        if os.environ.get("CI"):
            pytest.fail("CI needs a PostgreSQL server, which .ci/run installs")
        pytest.skip("no PostgreSQL server on this machine: install the Debian package postgresql")
    pytest.importorskip("psycopg")
    with PostgresServer(folder) as started:
        yield started


def test_results_come_back_equal_and_are_kept_once(server: PostgresServer) -> None:
    url = server.create("results")
    with Store.open(url, writable=True) as store:
        for result in (*samples.FIXTURE_RESULTS, *samples.FIXTURE_RESULTS):
            store.save(result, once=True)
        assert tuple(store.results()) == samples.FIXTURE_RESULTS
        assert "hunter2" not in store.name
    with Store.open(url, writable=False) as store:
        assert [record.key.gpu for record in store.records()] == ["a100", "h200"]


def test_the_models_equal_the_migrated_schema(server: PostgresServer) -> None:
    url = server.create("schema")
    Store.open(url, writable=True).close()
    with create_engine(url).connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_first_searches_that_start_at_once_share_one_storage(server: PostgresServer) -> None:
    for attempt in range(2):
        assert open_together(server.create(f"first{attempt}"), 4) == [""] * 4


def test_processes_share_the_work_through_a_kill_and_a_restart(server: PostgresServer) -> None:
    found = hosts(server, 2, problems=2, trials=8, seconds=0.1)
    assert found["trials_lost"] == found["trials_done_twice"] == 0


def test_a_search_that_is_killed_again_and_again_ends_as_an_undisturbed_one() -> None:
    assert kills(2, problems=2, trials=6, seconds=0.1, seed=1)["same_rows_as_undisturbed"]


def test_a_server_that_refuses_is_one_sentence_without_the_password(server: PostgresServer, tmp_path: Path) -> None:
    url = server.url("nowhere").replace("hunter2", SECRET)
    for work in (lambda: Store.open(url, writable=True), lambda: study_storage(url).__enter__()):
        with pytest.raises(DatabaseError, match="nowhere") as caught:
            work()
        assert SECRET not in str(caught.value) and "\n" not in str(caught.value)
