"""Many processes share one study: none tries what another is trying, and what a dead one began is free again."""

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import event

from flashtune.core.config import Config
from flashtune.core.errors import DatabaseError
from flashtune.core.problem import Problem
from flashtune.core.results import CompileFacts, Fate, Measurement, Outcome, Provenance, SearchResult
from flashtune.core.target import find_target
from flashtune.core.unbroken import unbroken
from flashtune.templates import family
from flashtune.tuner.propose import record, worker_id
from flashtune.tuner.propose.record import newest_unfinished
from flashtune.tuner.propose.space import Candidate, SearchSpace
from flashtune.tuner.propose.study import Study

optuna.logging.set_verbosity(optuna.logging.WARNING)

BIG = Problem(batch=4, heads=32, kv_heads=32, n_q=4096, n_kv=4096, d=64, d_v=64, dtype="fp16")
SPACE = SearchSpace({"flash_fwd": family("flash_fwd")}, BIG, find_target("a100"))
PROVENANCE = Provenance(flashtune="0", torch="0", triton="0", command="flashtune search", created_at="2026-11-22T10:00:00+00:00")


def storage_at(url: str) -> optuna.storages.BaseStorage:
    return optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})


@pytest.fixture
def storage(tmp_path: Path) -> optuna.storages.BaseStorage:
    return storage_at(f"sqlite:///{tmp_path}/study.sqlite")


def study(storage: optuna.storages.BaseStorage, sampler: Any = "random", seed: int | None = 0) -> Study:
    return Study(SPACE, BIG, sampler=sampler, seed=seed, source="measured", storage=storage)


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


def work(url: str, limit: int, step: bool = False, ahead: int = 4) -> list[Config]:
    """Ask and tell until `limit` candidates were tried; run in several processes at once. With `step`, a line of input tells one."""
    mine, found = study(storage_at(url), seed=None), []
    waiting: list[Candidate] = []
    while True:
        waiting += mine.ask(ahead - len(waiting), limit=limit)
        if not waiting:
            return found
        candidate = waiting.pop(0)
        if step:
            print("asked", flush=True)
            sys.stdin.readline()
        mine.tell(candidate, outcome(candidate))
        found.append(candidate.config)


def test_processes_that_share_a_study_try_each_candidate_once_and_no_more_than_were_wanted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.sqlite"
    storage_at(url)
    # A multiprocessing.Pool would wait for good for one that died.
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(work, [url] * 3, [24] * 3))
    tried = [config for configs in found for config in configs]
    assert len(tried) == len(set(tried)) == 24
    assert {candidate.config for candidate in study(storage_at(url), seed=None).outcomes} == set(tried)


def test_what_another_is_trying_is_not_asked_and_counts(storage: optuna.storages.BaseStorage) -> None:
    first, second = study(storage), study(storage)
    a, b = first.ask(3), second.ask(3)
    assert len({*a, *b}) == 6
    second.refresh()
    assert second.elsewhere and second.claimed == 6
    assert len(second.ask(3, limit=7)) == 1
    first.leave()
    assert second.ask(3, limit=7) == a, "what was begun and left comes first"


def test_a_killed_process_gives_back_what_it_tried(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.sqlite"
    storage_at(url)
    code = f"import test_tuner_record as t; t.work({url!r}, 30, step=True)"
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-c", code]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=where)
    assert child.stdout is not None and child.stdin is not None
    for _ in range(3):
        child.stdout.readline()
        child.stdin.write("\n")
    child.stdout.readline()
    before = study(storage_at(url), seed=None)
    assert before.elsewhere, "a process that is only slow keeps what it tries"
    assert len(before.outcomes) == 3
    child.send_signal(signal.SIGKILL)
    child.wait()
    after = study(storage_at(url), seed=None)
    assert not after.elsewhere
    begun = [c for c in before._candidates.values() if c not in after.outcomes]
    assert len(begun) == 4 and after.ask(len(begun)) == begun


def test_a_process_of_another_machine_is_dead_once_it_falls_silent(
    storage: optuna.storages.BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_id, "lives_here", lambda who: None)
    monkeypatch.setattr(record.Record, "_beat", lambda self: None)
    monkeypatch.setattr(record, "GRACE_S", 0.0)
    far, near = study(storage), study(storage)
    taken = far.ask(2)
    for count in range(3):
        far._record._storage.set_study_system_attr(far._record._study_id, f"beat {far._record._me}", count)
        near.refresh()
        assert near.elsewhere, "its count went up since the last look"
    near.refresh()
    assert not near.elsewhere
    assert set(near.ask(4)) >= set(taken)
    # It wasn't dead after all: what it tells then is of no effect.
    far.tell(taken[0], outcome(taken[0]))
    near.refresh()
    assert near.claimed == 4


def test_a_process_says_that_it_is_alive_until_it_leaves(storage: optuna.storages.BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "BEAT_S", 0.01)
    one = study(storage)
    one.ask(1)
    deadline = time.monotonic() + 600
    while one._record._attributes().get(f"beat {one._record._me}", 0) < 3:
        assert time.monotonic() < deadline
    stop = one._record._stop_beating
    one.leave()
    assert stop is not None and stop.is_set()


def test_only_one_process_decides_and_a_decision_comes_back(storage: optuna.storages.BaseStorage) -> None:
    first, second = study(storage), study(storage)
    [candidate] = first.ask(1)
    told = outcome(candidate)
    first.tell(candidate, told)
    assert first.may_decide() and not second.may_decide()
    assert second.decided(BIG) is None
    raced = Outcome(**{name: getattr(told, name) for name in told.__slots__} | {"rank": 1, "finalist": True})
    result = SearchResult(gpu="a100", problem=BIG, outcomes=(raced,), provenance=PROVENANCE)
    first.decide(result)
    assert second.decided(BIG) == result == study(storage).decided(BIG)
    assert not second.may_decide()


@pytest.mark.parametrize(("sampler", "ends"), [("gp", (1, 14, 17)), ("tpe", (5, 15)), ("random", (7, 8)), ("exhaustive", (3, 9))])
def test_an_interrupted_study_asks_what_an_undisturbed_one_asks(
    storage: optuna.storages.BaseStorage, sampler: Any, ends: tuple[int, ...]
) -> None:
    def run(where: optuna.storages.BaseStorage, until: int) -> list[Candidate]:
        """One process's work; where it ends early, up to four candidates are begun and not told."""
        one = study(where, sampler, seed=5)
        one.enqueue(SPACE.starts()[:6])
        waiting: list[Candidate] = []
        while len(one.outcomes) < until:
            waiting += one.ask(4 - len(waiting), limit=20)
            one.tell(waiting[0], outcome(waiting[0]))
            del waiting[0]
        one.leave()
        return list(one.in_order())

    undisturbed = run(optuna.storages.InMemoryStorage(), 20)
    for end in ends:
        run(storage, end)
    assert run(storage, 20) == undisturbed
    assert len(undisturbed) == 20


def test_a_storage_that_stays_locked_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "PATIENCE_S", 0.5)
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


def test_the_newest_run_of_a_plan_goes_on_until_it_is_finished(storage: optuna.storages.BaseStorage) -> None:
    first, number = newest_unfinished(storage, "plan-x")
    assert number == 1 and newest_unfinished(storage, "plan-x")[1] == 1
    for expected in range(2, 12):
        newest_unfinished(storage, "plan-x")[0].finish()
        assert newest_unfinished(storage, "plan-x")[1] == expected
    assert newest_unfinished(storage, "plan")[1] == 1
    assert first.finished


def test_worker_ids_are_distinct() -> None:
    me, again = worker_id.name(), worker_id.name()
    assert me != again
    assert worker_id.lives_here(me) is None, "another search of this process"
    machine, pid, started, token = me.split("/")
    assert worker_id.lives_here("/".join((machine, pid, str(int(started) - 1), token))) is False
    assert worker_id.lives_here("/".join(("elsewhere", pid, started, token))) is None
    assert worker_id.lives_here("nonsense") is None
    child = subprocess.Popen(
        [sys.executable, "-c", "from flashtune.tuner.propose import worker_id; print(worker_id.name())"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    name = child.stdout.readline().decode().strip()
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert worker_id.lives_here(name) is False, "it has ended, though nobody has collected it"
    child.wait()


def test_a_dashboard_reads_names_durations_and_what_became_of_each_trial(storage: optuna.storages.BaseStorage) -> None:
    one = study(storage)
    first, second = one.ask(2)
    one.begin(first)
    one.tell(first, replace(outcome(first), fate=Fate.CORRECT, facts=CompileFacts(registers=168, spills=8, shared_bytes=1, threads=128)))
    one.begin(second)
    failed = replace(outcome(second), fate=Fate.COMPILE, measurement=None, reason="ptxas: out of registers")
    one.tell(second, failed)
    [summary] = optuna.get_all_study_summaries(storage)
    # Nothing of what processes tell each other is among them.
    assert summary.user_attrs == {
        "gpu": "a100",
        "n": 4096,
        "n_q": 4096,
        "d": 64,
        "d_v": 64,
        "dtype": "fp16",
        "batch": 4,
        "heads": 32,
        "kv_heads": 32,
        "direction": "fwd",
        "features": "full",
        "seed": 0,
        "source": "measured",
        "sampler": "random",
    }
    seen = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert seen.metric_names == ["median_us"]
    timed, broken = seen.trials
    assert timed.value == time_of(first)
    assert timed.user_attrs == {"fate": "correct", "registers": 168, "spills": 8, "shared_bytes": 1}
    assert broken.user_attrs == {"fate": "compile", "reason": "ptxas: out of registers"}
    assert all(trial.duration is not None and trial.duration.total_seconds() > 0 for trial in (timed, broken))
    assert timed.datetime_complete is not None and broken.datetime_start is not None
    assert broken.datetime_start >= timed.datetime_complete, "the time in which it waited for its turn is not part of it"


def test_an_interruption_in_the_middle_of_a_write_is_heard_when_the_write_is_done(storage: optuna.storages.RDBStorage) -> None:
    mine, written = study(storage), []
    [candidate] = mine.ask(1)

    def interrupt(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "INSERT" in statement and not written:
            written.append(statement)
            signal.raise_signal(signal.SIGTERM)

    event.listen(storage.engine, "before_cursor_execute", interrupt)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            mine.tell(candidate, outcome(candidate))
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert written
    [trial] = storage_at(storage.url).get_all_trials(storage.get_all_studies()[0]._study_id)
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
