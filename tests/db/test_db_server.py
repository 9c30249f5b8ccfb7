"""A database on a server behaves like a file. SQLite stands in for the server here: the code path is that of any SQLAlchemy URL."""

import threading
from collections.abc import Callable
from pathlib import Path

import db_samples as samples
import pytest
from sqlalchemy import make_url, text

from flashtune.core.system.errors import DatabaseError, EnvironmentProblem, FlashtuneError
from flashtune.db import server
from flashtune.db.inspection import MissingDatabaseError
from flashtune.db.server import Server
from flashtune.db.store import Store
from flashtune.db.values import SCHEMA_VERSION

Connect = Callable[[bool], Store]


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    """Opens a store on this test's server, for writing or not."""

    def opened(writable: bool) -> Store:
        access = Server(make_url(f"sqlite:///{tmp_path}/server.db"), writable=writable)
        access.open()
        return Store(access, writable=writable)

    return opened


def run(connect: Connect, statement: str) -> None:
    Server.write(connect(True)._access, lambda connection: connection.execute(text(statement)))  # type: ignore[arg-type]


def test_results_come_back_equal(connect: Connect) -> None:
    with connect(True) as store:
        for result in samples.FIXTURE_RESULTS:
            store.save(result)
    with connect(False) as store:
        assert tuple(store.results()) == samples.FIXTURE_RESULTS
        assert [record.key.gpu for record in store.records()] == ["a100", "h200"]


def test_a_server_without_a_database_is_missing_not_broken(connect: Connect) -> None:
    with pytest.raises(MissingDatabaseError, match="run a search"):
        connect(False)


def test_another_applications_tables_are_left_alone(connect: Connect, tmp_path: Path) -> None:
    Server(make_url(f"sqlite:///{tmp_path}/server.db"), writable=True).write(lambda c: c.execute(text("CREATE TABLE run (id INTEGER)")))
    before = (tmp_path / "server.db").read_bytes()
    for writable in (False, True):
        with pytest.raises(DatabaseError, match="another application"):
            connect(writable)
    assert (tmp_path / "server.db").read_bytes() == before


@pytest.mark.parametrize("writable", [False, True])
def test_a_newer_schema_is_refused(connect: Connect, writable: bool) -> None:
    run(connect, f"UPDATE flashtune_schema SET version_num = '{int(SCHEMA_VERSION) + 1:04}'")
    with pytest.raises(DatabaseError, match="newer flashtune"):
        connect(writable)


def test_an_older_schema_asks_for_one_writer(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(True)
    monkeypatch.setattr(server, "SCHEMA_VERSION", f"{int(SCHEMA_VERSION) + 1:04}")
    with pytest.raises(DatabaseError, match=f"older schema {SCHEMA_VERSION}"):
        connect(False)


def test_a_writer_that_came_second_tries_again(connect: Connect) -> None:
    """Two writers of a new key: the second insert of the key fails, and its whole transaction runs again."""
    barrier = threading.Barrier(3, timeout=600)
    stores = [connect(True) for _ in range(3)]

    def save(store: Store, number: int) -> None:
        barrier.wait()
        store.save(samples.numbered(number, 0))

    threads = [threading.Thread(target=save, args=(store, number)) for number, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores[0].results()) == 3 and len(stores[0].records()) == 1


def test_a_missing_driver_and_a_password_in_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'psycopg2'", name="psycopg2")

    monkeypatch.setattr(server, "create_engine", no_driver)
    with pytest.raises(EnvironmentProblem, match="psycopg2") as caught:
        Store.open("postgresql://user:secret@host/db", writable=True)
    assert "secret" not in str(caught.value) and str(caught.value).endswith("and write postgresql+psycopg://")
    assert server.driver_remedy("MySQLdb") == "pip install mysqlclient", "a package called as the module is there is none"


def test_an_error_of_the_server_is_one_line(connect: Connect) -> None:
    store = connect(True)
    run(connect, "DROP TABLE trial")
    for work in (store.records, lambda: store.save(samples.FIXTURE_RESULTS[0])):
        with pytest.raises(FlashtuneError, match="no such table: trial") as caught:
            work()
        assert "\n" not in str(caught.value)
