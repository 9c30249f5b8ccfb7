"""A study keeps each outcome in one transaction and goes on where it was; a problem is held by one process, until that is dead."""

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import event

from flashtune.cli.storage import study_storage
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts, Fate, Measurement, Outcome, Provenance, SearchResult
from flashtune.core.system.errors import DatabaseError
from flashtune.core.system.unbroken import unbroken
from flashtune.templates import family
from flashtune.tuner.propose import claims, storage
from flashtune.tuner.propose.claims import Claims
from flashtune.tuner.propose.space import Candidate, SearchSpace
from flashtune.tuner.propose.study import Study

optuna.logging.set_verbosity(optuna.logging.WARNING)

BIG = Problem(batch=4, heads=32, kv_heads=32, n_q=4096, n_kv=4096, d=64, d_v=64, dtype="fp16")
SPACE = SearchSpace({"flash_fwd": family("flash_fwd")}, BIG, find_target("a100"))
PROVENANCE = Provenance(flashtune="0", torch="0", triton="0", command="flashtune search", created_at="2026-11-22T10:00:00+00:00")
PROBLEMS = ["first", "second", "third"]


def storage_at(url: str, grace_s: int = 60) -> optuna.storages.RDBStorage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        engine = {"connect_args": {"timeout": 60}}
        return optuna.storages.RDBStorage(url, engine_kwargs=engine, heartbeat_interval=1, grace_period=grace_s)


@pytest.fixture
def stored(tmp_path: Path) -> optuna.storages.RDBStorage:
    return storage_at(f"sqlite:///{tmp_path}/study.sqlite")


def study(stored: optuna.storages.BaseStorage, sampler: Any = "random", seed: int | None = 0) -> Study:
    return Study(SPACE, BIG, sampler=sampler, seed=seed, source="measured", storage=stored)


def time_of(candidate: Candidate) -> float:
    return 1.0 + sum(len(str(value)) * place for place, (_, value) in enumerate(candidate.config.items))


def outcome(candidate: Candidate) -> Outcome:
    time_us = time_of(candidate)
    return Outcome(
        template="flash_fwd",
        template_hash="h",
        variant_id=candidate.variant(SPACE.spec).id,
        config=candidate.config,
        fate=Fate.CORRECT if time_us % 1 == 0 else Fate.COMPILE,
        source="measured",
        measurement=Measurement.of([time_us]),
    )


def rows(where: optuna.storages.BaseStorage) -> list[tuple[str, str | None]]:
    """State and problem of every claim of the plan "x"."""
    [name] = [name for name in optuna.get_all_study_names(where) if name.startswith("search-")]
    return [(trial.state.name, trial.user_attrs.get("problem")) for trial in optuna.load_study(study_name=name, storage=where).trials]


def work(url: str, folder: str, name: str) -> list[str | None]:
    """Claim a problem together with two others, decide it, and look for another one."""

    def together(step: str) -> None:
        (Path(folder) / f"{step} {name}").touch()
        while len(list(Path(folder).glob(f"{step} *"))) < 3:
            time.sleep(0.001)

    with Claims(storage_at(url), "x") as mine:
        together("begun")
        problem = mine.take(PROBLEMS)
        together("taken")
        if problem is not None:
            mine.decide(problem, 1.0)
        together("decided")
        return [problem, mine.take(PROBLEMS)]


def test_three_workers_on_three_problems_take_one_each_and_withdraw_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.sqlite"
    Claims(storage_at(url), "x")
    # A multiprocessing.Pool would wait for good for one that died.
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(work, [url] * 3, [str(tmp_path)] * 3, "abc"))
    assert sorted(taken for taken, _ in found if taken) == sorted(PROBLEMS) and {later for _, later in found} == {None}
    assert sorted(rows(storage_at(url))) == [("COMPLETE", problem) for problem in sorted(PROBLEMS)]


def test_a_problem_is_held_by_one_until_it_is_decided_or_given_back(stored: optuna.storages.RDBStorage) -> None:
    with Claims(stored, "x") as first, Claims(stored, "x") as second:
        assert first.suffix == second.suffix
        assert first.take(PROBLEMS) == "first" and second.take(PROBLEMS) == "second"
        assert second.take(["first", "second"]) is None
        first.release("first")
        assert second.take(["first"]) == "first" and not first.holds("first")
        second.decide("first", 2.0)
        assert first.decided() == {"first"} and first.take(["first"]) is None
    assert rows(stored) == [("FAIL", "first"), ("FAIL", "second"), ("COMPLETE", "first")]
    assert Claims(stored, "y").decided() == set(), "another plan"


def test_who_takes_a_number_waits_for_those_before_it(stored: optuna.storages.RDBStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never chooses is not waited for beyond its time."""
    monkeypatch.setattr(claims, "GRACE_S", 0.2)
    with Claims(stored, "x") as mine:
        undecided = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING, user_attrs={"worker": "elsewhere/1/2/3"})
        mine._stored.add(undecided)
        assert mine.take(PROBLEMS) == "first"
    assert rows(stored) == [("FAIL", None), ("FAIL", "first")]


def test_a_killed_process_gives_back_what_it_held(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.sqlite"
    with Claims(storage_at(url), "x") as mine:
        code = "import sys, test_tuner_record as t; held = t.Claims(t.storage_at(sys.argv[1]), 'x')"
        code += "; print(held.take(t.PROBLEMS), flush=True); sys.stdin.read()"
        where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
        child = subprocess.Popen([sys.executable, "-c", code, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=where)
        assert child.stdout is not None and child.stdout.readline().strip() == "first"
        assert mine.take(["first"]) is None, "a process that is only slow keeps its problem"
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert mine.take(["first"]) == "first"


def test_a_process_of_another_machine_has_ended_once_it_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "lives_here", lambda who: None)
    monkeypatch.setattr(claims, "BEAT_S", 0.3)
    url = f"sqlite:///{tmp_path}/study.sqlite"
    with Claims(storage_at(url), "x") as far:
        assert far.take(PROBLEMS) == "first"
        time.sleep(3.5)
        with Claims(storage_at(url, grace_s=2), "x") as near:
            assert near.take(["first"]) is None, "its heartbeat is heard"
            far._stop.set()
            far._beating.join()
            while near.take(["first"]) is None:
                time.sleep(0.2)
            # It wasn't dead after all, and learns that it has lost its problem at its next heartbeat.
            far._stop.clear()
            turns = iter([False, True])
            far._stop.wait = lambda _: next(turns)  # type: ignore[method-assign,assignment,misc]
            far._beat_on()
            assert not far.holds("first") and near.holds("first")
            far.decide("first", 1.0)
            assert near.decided() == set()


def test_a_decision_comes_back(stored: optuna.storages.RDBStorage) -> None:
    first = study(stored)
    [candidate] = first.ask(1)
    told = outcome(candidate)
    first.tell(candidate, told)
    assert study(stored).decided(BIG) is None
    raced = replace(told, rank=1, finalist=True)
    result = SearchResult(gpu="a100", problem=BIG, outcomes=(raced,), provenance=PROVENANCE)
    first.decide(result)
    assert first.decided(BIG) == result == study(stored).decided(BIG)


@pytest.mark.parametrize(("sampler", "ends"), [("gp", (1, 14, 17)), ("random", (7, 8)), ("exhaustive", (3, 9))])
def test_an_interrupted_study_asks_what_an_undisturbed_one_asks(
    stored: optuna.storages.RDBStorage, sampler: Any, ends: tuple[int, ...]
) -> None:
    def run(where: optuna.storages.BaseStorage, until: int) -> list[Candidate]:
        """One process's work; where it ends early, up to four candidates are begun and not told."""
        one = study(where, sampler, seed=5)
        # What is known of other problems changes; the first queue holds.
        one.enqueue(SPACE.starts()[:6] if not one.outcomes else [])
        waiting: list[Candidate] = []
        while len(one.outcomes) < until:
            while not waiting or (len(waiting) < 4 and one.claimed < 20):
                waiting += (found := one.ask(1, limit=20, known=max(0, one.claimed - 3)))
                assert found
            one.tell(waiting[0], outcome(waiting[0]))
            del waiting[0]
        return list(one.outcomes)

    undisturbed = run(optuna.storages.InMemoryStorage(), 20)
    for end in ends:
        run(stored, end)
    assert run(stored, 20) == undisturbed
    assert len(undisturbed) == len(set(undisturbed)) == 20


def test_a_trial_is_one_transaction_of_few_queries(tmp_path: Path) -> None:
    """However many trials there are, and hosts that share the plan."""
    with study_storage(f"sqlite:///{tmp_path}/study.sqlite") as where:
        one, statements, commits = study(where), list[str](), list[int]()
        event.listen(where.engine, "before_cursor_execute", lambda *words: statements.append(words[2]))
        event.listen(where.engine, "commit", lambda *words: commits.append(1))
        counts = []
        for number, candidate in enumerate(one.ask(20)):
            if number % 5 == 4:
                assert Claims(where, ["plan"]).take(["another", *map(str, range(number))]) is not None
            statements.clear()
            commits.clear()
            one.begin(candidate)
            one.tell(candidate, outcome(candidate))
            counts.append((len(statements), len(commits)))
        assert set(counts) == {counts[0]} and counts[0][0] <= 12 and counts[0][1] == 1


def test_a_storage_that_stays_locked_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PATIENCE_S", 0.5)
    path = tmp_path / "study.sqlite"
    shared = study(optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 0.1}}))
    [candidate] = shared.ask(1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(DatabaseError, match="locked") as caught:
        shared.tell(candidate, outcome(candidate))
    assert "\n" not in str(caught.value) and "study.sqlite" in str(caught.value)
    other.execute("ROLLBACK")
    other.close()


def test_the_newest_run_of_a_plan_goes_on_until_it_is_finished(stored: optuna.storages.RDBStorage) -> None:
    suffixes = [Claims(stored, "x").suffix, Claims(stored, "x").suffix]
    assert suffixes[0] == suffixes[1] and suffixes[0].endswith("-1")
    for number in range(2, 12):
        Claims(stored, "x").finish()
        assert Claims(stored, "x").suffix.endswith(f"-{number}")
    assert Claims(stored, "y").suffix.endswith("-1")


def test_worker_ids_are_distinct() -> None:
    me, again = claims.worker_id(), claims.worker_id()
    assert me != again
    assert claims.lives_here(me) is None, "another search of this process"
    machine, pid, started, token = me.split("/")
    assert claims.lives_here("/".join((machine, pid, str(int(started) - 1), token))) is False
    assert claims.lives_here("/".join(("elsewhere", pid, started, token))) is None
    assert claims.lives_here("nonsense") is None
    child = subprocess.Popen(
        [sys.executable, "-c", "from flashtune.tuner.propose import claims; print(claims.worker_id())"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    name = child.stdout.readline().decode().strip()
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert claims.lives_here(name) is False, "it has ended, though nobody has collected it"
    child.wait()


def test_a_dashboard_reads_names_durations_and_what_became_of_each_trial(stored: optuna.storages.RDBStorage) -> None:
    one = study(stored)
    first, second = one.ask(2)
    one.begin(first)
    one.tell(first, replace(outcome(first), fate=Fate.CORRECT, facts=CompileFacts(registers=168, spills=8, shared_bytes=1, threads=128)))
    one.begin(second)
    failed = replace(outcome(second), fate=Fate.COMPILE, measurement=None, reason="ptxas: out of registers")
    one.tell(second, failed)
    [summary] = optuna.get_all_study_summaries(stored)
    assert summary.study_name.startswith(f"a100-{BIG.label()}-b4h32-measured-random-0-")
    timed, broken = optuna.load_study(study_name=summary.study_name, storage=stored).trials
    assert timed.value == time_of(first)
    seen = timed.user_attrs["outcome"]
    assert (seen["fate"], seen["config"], seen["facts"]["registers"]) == ("correct", first.config.as_dict(), 168)
    assert broken.value is None and broken.user_attrs["outcome"]["reason"] == "ptxas: out of registers"
    assert all(trial.duration is not None and trial.duration.total_seconds() > 0 for trial in (timed, broken))
    assert timed.datetime_complete is not None and broken.datetime_start is not None
    assert broken.datetime_start >= timed.datetime_complete, "the time in which it waited for its turn is not part of it"


def test_an_interruption_in_the_middle_of_a_write_is_heard_when_the_write_is_done(stored: optuna.storages.RDBStorage) -> None:
    mine, written = study(stored), []
    [candidate] = mine.ask(1)

    def interrupt(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "INSERT" in statement and not written:
            written.append(statement)
            signal.raise_signal(signal.SIGTERM)

    event.listen(stored.engine, "before_cursor_execute", interrupt)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            mine.tell(candidate, outcome(candidate))
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert written
    [trial] = storage_at(stored.url).get_all_trials(stored.get_all_studies()[0]._study_id)
    assert trial.user_attrs


def test_what_must_be_whole_is_broken_into_by_an_interruption_that_follows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 3.0, 4.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    heard: list[str] = []

    def work() -> None:
        with unbroken():
            for name in ("first", "at once", "later"):
                signal.raise_signal(signal.SIGTERM)
                heard.append(name)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["first", "at once"]
