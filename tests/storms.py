"""The proof that a search loses nothing and does nothing twice, through kills, a killed host and a server that is restarted.

    python tests/storms.py kills [--kills 24]     a grid of six problems, killed at random moments, ends with the rows of an undisturbed run
    python tests/storms.py hosts [--hosts 4]      processes on one PostgreSQL; one is killed, and the server restarted once

Families are the planted ones, with stand-ins for the compiler and the interpreter (tests/quick_search.py).
"""

import argparse
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from postgres import PostgresServer, binaries

from flashtune.core.results import Provenance, SearchResult
from flashtune.db.store import Store

HERE = Path(__file__).resolve().parent
LENGTHS = (64, 96, 128, 160, 192, 224)
NOWHERE = Provenance(flashtune="", torch="", triton="")


def start(folder: Path, *, trials: int, seconds: float, problems: int, more: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A search of the grid, in a process of its own."""
    grid = ",".join(str(length) for length in LENGTHS[:problems])
    words = [
        "search",
        "--gpu-name",
        "a100",
        "--d",
        "16",
        "--n",
        grid,
        "--full",
        "--dtype",
        "fp32",
        "--heads",
        "2",
        "--predict",
        "--jobs",
        "1",
    ]
    words += ["--trials", str(trials), "--seed", "7", "--json", *(more or ("--db", str(folder / "tuned.sqlite")))]
    where = {**os.environ, "FLASHTUNE_CACHE": str(folder / "cache"), "FLASHTUNE_TEST_SECONDS": str(seconds)}
    return subprocess.Popen(
        [sys.executable, str(HERE / "quick_search.py"), *words], env=where, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> None:
    """Wait for a search that is to end well."""
    said = process.communicate()[1]
    assert process.returncode == 0, said


def rows(location: str | Path) -> list[SearchResult]:
    """All that a database holds, but for when and by which command it was found."""
    with Store.open(location, writable=False) as store:
        found = [replace(result, provenance=NOWHERE) for result in store.results()]
    return sorted(found, key=lambda result: result.problem.n_kv)


def kills(count: int, *, problems: int, trials: int, seconds: float, seed: int) -> dict[str, Any]:
    """Kill a search `count` times at random moments, then let it end; its rows must be those of an undisturbed one."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as undisturbed_home, tempfile.TemporaryDirectory() as home:
        ended(start(Path(undisturbed_home), trials=trials, seconds=seconds, problems=problems))
        undisturbed = rows(Path(undisturbed_home) / "tuned.sqlite")
        studies = Path(home) / "cache" / "studies.sqlite"
        landed, kept = 0, []
        while landed < count:
            process = start(Path(home), trials=trials, seconds=seconds, problems=problems)
            # At any moment of the imports, or of one of the next trials; so few of them that all the kills find something to kill.
            if rng.random() < 0.4:
                time.sleep(rng.uniform(0.0, 4.0))
            else:
                wanted = quick_count(studies) + rng.randint(0, problems * trials // (2 * count))
                while quick_count(studies) < wanted and process.poll() is None:
                    time.sleep(0.02)
                time.sleep(rng.uniform(0.0, 2 * seconds))
            assert process.poll() is None, f"it ended after {landed} of {count} kills: {process.communicate()[1]}"
            process.kill()
            process.communicate()
            landed += 1
            kept.append(quick_count(studies))
        ended(start(Path(home), trials=trials, seconds=0.0, problems=problems))
        found = rows(Path(home) / "tuned.sqlite")
        told = study_outcomes(f"sqlite:///{studies}")
    assert found == undisturbed
    assert set(told.values()) == {1}
    return {
        "kills": landed,
        "trials_known_at_each": kept,
        "trials": len(told),
        "runs": len(found),
        "same_rows_as_undisturbed": found == undisturbed,
        "trials_done_twice": sum(count > 1 for count in told.values()),
    }


def quick_count(path: Path) -> int:
    """How many trials a study's file holds; 0 where it isn't there yet."""
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as studies:
            return int(studies.execute("SELECT count(*) FROM trial_user_attributes WHERE key = 'outcome'").fetchone()[0])
    except sqlite3.Error:
        return 0


def study_outcomes(url: str) -> Counter[tuple[str, str]]:
    """How often each candidate of each study was told."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    told: Counter[tuple[str, str]] = Counter()
    storage = optuna.storages.RDBStorage(url)
    for study in storage.get_all_studies():
        for trial in storage.get_all_trials(study._study_id, deepcopy=False):
            if "outcome" in trial.user_attrs:
                told[study.study_name, repr(sorted(trial.params.items()))] += 1
    storage.engine.dispose()
    return told


def hosts(server: PostgresServer, count: int, *, problems: int, trials: int, seconds: float) -> dict[str, Any]:
    """Several searches on one server, started at once; one is killed and the server restarted; no trial may be lost or done twice."""
    storage, tuned = server.create("studies"), server.create("tuned")
    with tempfile.TemporaryDirectory() as home:
        words = ("--storage", storage, "--db", tuned)
        searches = [start(Path(home), trials=trials, seconds=seconds, problems=problems, more=words) for _ in range(count)]
        until(storage, trials)
        victim = searches.pop()
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        at_kill = until(storage, trials + trials // 3)
        server.stop()
        time.sleep(1.0)
        server.start()
        at_restart = len(study_outcomes(storage))
        for process in searches:
            ended(process)
    told, found = study_outcomes(storage), rows(tuned)
    assert len(told) == problems * trials, len(told)
    assert set(told.values()) == {1}
    assert [len(result.outcomes) for result in found] == [trials] * problems
    assert all(len({outcome.variant_id for outcome in result.outcomes}) == trials for result in found)
    return {
        "hosts": count,
        "told_by_the_restart": max(at_kill, at_restart),
        "trials": len(told),
        "trials_lost": problems * trials - len(told),
        "trials_done_twice": sum(number > 1 for number in told.values()),
        "runs": len(found),
    }


def until(storage: str, trials: int) -> int:
    """Wait until so many trials were told; returns how many."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            if (told := len(study_outcomes(storage))) >= trials:
                return told
        except Exception:
            # Its tables are being made.
            pass
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
    parser.add_argument("--seconds", type=float, default=0.3, help="that a candidate takes to compile")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    if options.storm == "kills":
        print(kills(options.kills, problems=options.problems, trials=options.trials, seconds=options.seconds, seed=options.seed))
        return
    folder = binaries()
    if folder is None:
        parser.error("no PostgreSQL server here: install the Debian package postgresql")
    with PostgresServer(folder) as server:
        print(hosts(server, options.hosts, problems=options.problems, trials=options.trials, seconds=options.seconds))


if __name__ == "__main__":
    main()
