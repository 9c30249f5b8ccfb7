"""The proof that a search loses nothing and does nothing twice, through kills, a killed host and a server that is restarted.

    python tests/support/storms.py kills [--kills 24]
        a grid of six problems, killed at random moments all over it, ends with the rows of an undisturbed run; with --server study and rows
        are on a PostgreSQL
    python tests/support/storms.py hosts [--hosts 4]
        searches on one PostgreSQL, each with a space of process ids of its own, as hosts have; one is killed, and the server restarted once

Families are the planted ones, with stand-ins for the compiler and the interpreter (tests/support/quick_search.py).
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial
from postgres import PostgresServer, binaries
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from flashtune.core.records.results import Provenance, SearchResult
from flashtune.db.store import Store

HERE = Path(__file__).resolve().parent
LENGTHS = (64, 96, 128, 160, 192, 224)
NOWHERE = Provenance(flashtune="", torch="", triton="")
END_S = 900.0
"""How long one search may take for its end, on whichever machine."""
EARLY = 0.25
"""Share of the kills that come while a search starts."""


class Searching:
    """A search of the grid in a process of its own, which makes no more trials than it is told to."""

    def __init__(
        self,
        home: Path,
        *,
        trials: int,
        seconds: float,
        problems: int,
        more: tuple[str, ...] = (),
        name: str = "",
        apart: bool = False,
    ) -> None:
        self._limit, self._tried = home / f"limit{name}", home / f"tried{name}"
        grid = ",".join(str(length) for length in LENGTHS[:problems])
        words = ["search", "--gpu-name", "a100", "--d", "16", "--n", grid, "--full", "--dtype", "fp32", "--heads", "2", "--predict"]
        words += [
            "--jobs",
            "1",
            "--trials",
            str(trials),
            "--until",
            "0",
            "--seed",
            "7",
            "--json",
            *(more or ("--db", str(home / "tuned.sqlite"))),
        ]
        where = {"FLASHTUNE_CACHE": str(home / "cache"), "FLASHTUNE_TEST_SECONDS": str(seconds)}
        where |= {"FLASHTUNE_TEST_LIMIT": str(self._limit), "FLASHTUNE_TEST_TRIALS": str(self._tried)}
        ids = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if apart else []
        self._command, self._where = [*ids, sys.executable, str(HERE / "quick_search.py"), *words], {**os.environ, **where}
        self._errors = home / f"errors{name}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, limit: int | None = None) -> None:
        self.limit(limit)
        # A file: whoever it leaves behind would hold a pipe open.
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(self._command, env=self._where, stdout=subprocess.DEVNULL, stderr=errors)

    def limit(self, number: int | None) -> None:
        """Let it make so many trials in all, and not end; None lets it make all and end."""
        if number is None:
            self._limit.unlink(missing_ok=True)
        else:
            written = self._limit.with_suffix(".new")
            written.write_text(str(number))
            written.replace(self._limit)

    def kill(self) -> None:
        """SIGKILL; it must have been running."""
        assert self.process is not None
        self.process.kill()
        assert self.process.wait(END_S) == -9, self._errors.read_text()

    def ended(self) -> None:
        """Wait for its good end."""
        assert self.process is not None
        assert self.process.wait(END_S) == 0, self._errors.read_text()

    def timed(self) -> list[str]:
        """Every trial of a candidate that compiled which it made."""
        return self._tried.read_text().splitlines() if self._tried.exists() else []


def rows(location: str | Path) -> list[SearchResult]:
    """All that a database holds, but for when and by which command it was found."""
    with Store.open(location, writable=False) as store:
        found = [replace(result, provenance=NOWHERE) for result in store.results()]
    return sorted(found, key=lambda result: result.problem.n_kv)


def kills(count: int, *, problems: int, trials: int, seconds: float, seed: int, server: PostgresServer | None = None) -> dict[str, Any]:
    """Kill a search `count` times, each at a random moment of its own share of the grid; its rows must be those of an undisturbed one.

    Study and rows are on the `server` where there is one, else in files.
    """
    rng = random.Random(seed)
    total = problems * trials
    with tempfile.TemporaryDirectory() as undisturbed_home, tempfile.TemporaryDirectory() as home:
        calm = Searching(Path(undisturbed_home), trials=trials, seconds=0.0, problems=problems)
        calm.start()
        calm.ended()
        undisturbed = rows(Path(undisturbed_home) / "tuned.sqlite")
        storage, tuned = f"sqlite:///{home}/cache/studies.sqlite", f"{home}/tuned.sqlite"
        more: tuple[str, ...] = ()
        if server is not None:
            storage, tuned = server.create("killed_studies"), server.create("killed_tuned")
            more = ("--storage", storage, "--db", tuned)
        search = Searching(Path(home), trials=trials, seconds=seconds, problems=problems, more=more)
        kept = []
        for number in range(count):
            known, wanted = quick_count(storage), round(rng.uniform(number, number + 1) * total / count)
            search.start(max(1, wanted - known + trials // 4))
            if rng.random() < EARLY:
                time.sleep(rng.uniform(0.0, 4.0))
            else:
                while quick_count(storage) < min(wanted, total) and search.process is not None and search.process.poll() is None:
                    time.sleep(0.02)
                time.sleep(rng.uniform(0.0, 2 * seconds))
            search.kill()
            kept.append(quick_count(storage))
        search.start()
        search.ended()
        found = rows(tuned)
        told, done = study_outcomes(storage), Counter(search.timed())
    assert found == undisturbed
    assert len(told) == total and set(told.values()) == {1}
    # A trial that was under way at a kill is the only one that may be made again.
    assert sum(done.values()) - len(done) <= count
    return {
        "kills": len(kept),
        "trials_known_at_each": kept,
        "kills_by_problem": [sum(min(known // trials, problems - 1) == place for known in kept) for place in range(problems)],
        "trials": len(told),
        "runs": len(found),
        "same_rows_as_undisturbed": found == undisturbed,
        "trials_told_twice": sum(number > 1 for number in told.values()),
        "trials_under_way_at_a_kill_made_again": sum(done.values()) - len(done),
    }


def quick_count(storage: str) -> int:
    """How many trials a study holds; 0 where it isn't there yet. A file is opened for writing: a kill leaves a journal to roll back."""
    if (path := storage.removeprefix("sqlite:///")) != storage:
        storage = f"sqlite:///file:{path}?mode=rw&uri=true&timeout=60"
    engine = create_engine(storage, poolclass=NullPool)
    try:
        with engine.connect() as studies:
            return int(studies.execute(text("SELECT count(*) FROM trial_user_attributes WHERE key = 'outcome'")).scalar_one())
    except DBAPIError:
        return 0


def trials_of(url: str) -> list[tuple[str, FrozenTrial]]:
    """Every trial with its study's name."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Without the comparison of versions, which every look would make anew.
    storage = optuna.storages.RDBStorage(url, skip_compatibility_check=True, skip_table_creation=True)
    studies = storage.get_all_studies()
    found = [(study.study_name, trial) for study in studies for trial in storage.get_all_trials(study._study_id, deepcopy=False)]
    storage.engine.dispose()
    return found


def study_outcomes(url: str) -> Counter[tuple[str, str]]:
    """How often each candidate of each study was told."""
    return Counter((name, trial.user_attrs["outcome"]["variant_id"]) for name, trial in trials_of(url) if "outcome" in trial.user_attrs)


def hosts(server: PostgresServer, count: int, *, problems: int, trials: int, seconds: float, apart: bool = False) -> dict[str, Any]:
    """Several searches of at least as many problems on one server, started at once; one is killed and the server restarted; no trial may
    be lost or done twice.

    With `apart` none sees the others' processes, so that only a silence of a minute tells of the one that was killed; it needs root.
    """
    storage, tuned = server.create("studies"), server.create("tuned")
    more = ("--storage", storage, "--db", tuned)
    with tempfile.TemporaryDirectory() as home:
        searches = [
            Searching(Path(home), trials=trials, seconds=seconds, problems=problems, more=more, name=str(number), apart=apart)
            for number in range(count)
        ]
        for one in searches:
            one.start(2)
        # Each has made a trial, and is in the middle of others.
        while not all(one.timed() for one in searches):
            assert all(one.process is not None and one.process.poll() is None for one in searches), "one of them ended"
            time.sleep(0.1)
        victim, rest = searches[0], searches[1:]
        victim.kill()
        for one in rest:
            one.limit(trials // 2)
        at_restart = until(storage, count * 2)
        for one in rest:
            one.limit(None)
        server.stop()
        time.sleep(1.0)
        server.start()
        for one in rest:
            one.ended()
        done = Counter(line for one in searches for line in one.timed())
        by_host = [len(one.timed()) for one in searches]
    told, found = study_outcomes(storage), rows(tuned)
    assert len(told) == problems * trials, len(told)
    assert set(told.values()) == {1}
    # The one that the killed host was at is the only one that may be made again.
    assert sum(done.values()) - len(done) <= 1, [line for line, number in done.items() if number > 1]
    assert [len(result.outcomes) for result in found] == [trials] * problems
    assert all(len({outcome.variant_id for outcome in result.outcomes}) == trials for result in found)
    return {
        "hosts": count,
        "told_before_the_restart": at_restart,
        "timed_trials_by_host": by_host,
        "trials": len(told),
        "trials_lost": problems * trials - len(told),
        "trials_done_twice": sum(number > 1 for number in told.values()),
        "trials_under_way_at_the_kill_made_again": sum(done.values()) - len(done),
        "runs": len(found),
    }


def until(storage: str, trials: int) -> int:
    """Wait until so many trials were told; returns how many."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if (told := len(study_outcomes(storage))) >= trials:
            return told
        time.sleep(0.2)
    raise AssertionError("the searches don't get on")


def main() -> None:
    """Run one proof and print what it saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("storm", choices=["kills", "hosts"])
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--problems", type=int, default=6)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.2, help="that a trial takes")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--server", action="store_true", help="kill a search whose study and rows are on a PostgreSQL")
    options = parser.parse_args()
    sizes = {"problems": options.problems, "trials": options.trials, "seconds": options.seconds}
    if options.storm == "kills" and not options.server:
        print(json.dumps(kills(options.kills, seed=options.seed, **sizes), indent=1))
        return
    folder = binaries()
    if folder is None:
        parser.error("no PostgreSQL server here: install the Debian package postgresql")
    apart = os.getuid() == 0 and shutil.which("unshare") is not None
    with PostgresServer(folder) as server:
        if options.storm == "kills":
            print(json.dumps(kills(options.kills, seed=options.seed, server=server, **sizes), indent=1))
            return
        print(json.dumps({"apart": apart, **hosts(server, options.hosts, apart=apart, **sizes)}, indent=1))


if __name__ == "__main__":
    main()
