"""The storage of studies: made by several first searches at once, and told of in one sentence where it can't be used."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from db_faults import fork

from flashtune.cli import storage as storage_module
from flashtune.cli.storage import study_storage
from flashtune.core.system.errors import DatabaseError, EnvironmentProblem, FlashtuneError, InputError


def open_together(url: str, processes: int) -> list[str]:
    """Complaints of each of these processes, which open the storage at the same moment."""
    barrier, said = fork.Barrier(processes, timeout=600), fork.Queue()

    def work() -> None:
        try:
            barrier.wait()
            with study_storage(url) as storage:
                optuna.create_study(storage=storage, study_name="one", load_if_exists=True)
            said.put("")
        except BaseException as error:
            said.put(f"{type(error).__name__}: {error}")

    children = [fork.Process(target=work) for _ in range(processes)]
    for child in children:
        child.start()
    found = [said.get(timeout=900) for _ in children]
    for child in children:
        child.join()
    return found


def test_first_searches_that_start_at_once_share_one_storage(tmp_path: Path) -> None:
    # The first import of what Optuna imports lazily would keep the processes apart.
    with study_storage(f"sqlite:///{tmp_path}/warm.sqlite"):
        pass
    for attempt in range(2):
        assert open_together(f"sqlite:///{tmp_path}/{attempt}.sqlite", 6) == [""] * 6


def test_what_is_written_waits_for_no_disk_and_outlives_who_wrote_it(tmp_path: Path) -> None:
    """Of a handful of transactions a trial, each waited some milliseconds for a disk and kept every other GPU's from writing."""
    url = f"sqlite:///{tmp_path}/studies.sqlite"

    def work() -> None:
        with study_storage(url) as storage:
            optuna.create_study(storage=storage, study_name="one").add_trial(optuna.trial.create_trial(value=1.0))
            os.kill(os.getpid(), signal.SIGKILL)

    child = fork.Process(target=work)
    child.start()
    child.join()
    with study_storage(url) as storage, storage.engine.connect() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
        assert pragmas == ["wal", 1]
        assert [trial.value for trial in optuna.load_study(study_name="one", storage=storage).trials] == [1.0]


def test_after_an_orderly_end_the_file_alone_is_the_study(tmp_path: Path) -> None:
    path = tmp_path / "studies.sqlite"
    with study_storage(f"sqlite:///{path}") as storage:
        optuna.create_study(storage=storage, study_name="one")
        assert Path(f"{path}-wal").exists()
    assert not Path(f"{path}-wal").exists()
    shutil.copy(path, tmp_path / "copy.sqlite")
    with study_storage(f"sqlite:///{tmp_path}/copy.sqlite") as storage:
        assert optuna.study.get_all_study_names(storage) == ["one"]


def test_where_other_hosts_may_write_the_file_it_keeps_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write-ahead log has an index in memory that processes of one machine alone share."""
    monkeypatch.setattr(storage_module, "LOCAL", frozenset())
    with study_storage(f"sqlite:///{tmp_path}/studies.sqlite") as storage, storage.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == storage_module.LOCK_S * 1000


def test_a_storage_that_was_made_by_halves_is_completed(tmp_path: Path) -> None:
    """Its maker was killed after the first table."""
    path = tmp_path / "half.sqlite"
    with study_storage(f"sqlite:///{path}"):
        pass
    with sqlite3.connect(path) as connection:
        for table in ("alembic_version", "version_info", "trial_values"):
            connection.execute(f"DROP TABLE {table}")
    connection.close()
    with study_storage(f"sqlite:///{path}") as storage:
        optuna.create_study(storage=storage).optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)


FAULTS = {
    "no URL": ("study", InputError, "sqlite:///"),
    "an unknown kind": ("nothing://host/x", InputError, "nothing"),
    "no driver": ("postgresql+pg8000://u@host/x", EnvironmentProblem, "'pg8000'"),
    "a driver whose package has another name": ("mysql://u@host/x", EnvironmentProblem, "pip install mysqlclient$"),
    "one of two such drivers": ("mysql+mysqlconnector://u@host/x", EnvironmentProblem, "pip install mysql-connector-python$"),
    "a driver that the extra doesn't hold": ("postgresql+psycopg2://u@host/x", EnvironmentProblem, r"write postgresql\+psycopg://$"),
    "no such folder": ("sqlite:////nowhere/at/all/x.sqlite", EnvironmentProblem, "nowhere"),
    "no server": ("postgresql+psycopg://u@127.0.0.1:1/x", DatabaseError, "127.0.0.1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_storage_that_cant_be_opened_is_one_sentence(fault: str) -> None:
    url, kind, telling = FAULTS[fault]
    with pytest.raises(kind, match=telling) as caught, study_storage(url):
        pass
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(os.urandom(5000))
    before = path.read_bytes()
    with pytest.raises(FlashtuneError, match="not a database"), study_storage(f"sqlite:///{path}"):
        pass
    assert path.read_bytes() == before


def test_what_a_search_lacks_is_not_laid_to_the_storage(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="triton"), study_storage(f"sqlite:///{tmp_path}/studies.sqlite"):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")


@pytest.mark.parametrize("command", ["verify --gpu-name h100 --d 64"])
def test_a_triton_that_cannot_be_imported_is_told_in_one_line(command: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "triton"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtriton.so: cannot open shared object file')\n")
    path = os.pathsep.join([str(broken.parent), *filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])])])
    ran = subprocess.run(
        [sys.executable, "-m", "flashtune", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == EnvironmentProblem.exit_code, ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("flashtune: Triton can't be imported (libtriton.so") and "Traceback" not in ran.stderr
