"""A plan goes on where the whole of it was; what was found reaches the database, once, whatever stood in the way."""

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import optuna
import pytest
from planted import PLANTED_PROBLEM, Listener, planted_family, planted_plan

from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Fate, Outcome, Provenance, SearchResult
from flashtune.core.system.errors import DatabaseError, FlashtuneError
from flashtune.db import sqlite_file
from flashtune.db.store import Store
from flashtune.tuner.children import tasks
from flashtune.tuner.propose import claims, storage
from flashtune.tuner.replies import Checked, Failed
from flashtune.tuner.search.plan import SearchPlan
from flashtune.tuner.searching import Search

PROVENANCE = Provenance(flashtune="0", torch="0", triton="0", created_at="2026-11-22T10:00:00+00:00")
GRID = tuple(replace(PLANTED_PROBLEM, n_q=n, n_kv=n) for n in (64, 96, 128))

PLAN = planted_plan(GRID)

pytestmark = pytest.mark.usefixtures("quick")


def plan(**changes: object) -> SearchPlan:
    return replace(PLAN, **changes)  # type: ignore[arg-type]


def run(
    folder: Path,
    listener: Listener,
    *,
    plan: SearchPlan = PLAN,
    save: Callable[[SearchResult], None] | None = None,
    lock_s: float = 60.0,
) -> None:
    folder.mkdir(exist_ok=True)
    engine = {"connect_args": {"timeout": lock_s}}
    studies = optuna.storages.RDBStorage(f"sqlite:///{folder}/study.sqlite", engine_kwargs=engine, heartbeat_interval=1, grace_period=1)
    with Store.open(folder / "tuned.sqlite", writable=True) as store:
        Search(plan, storage=studies, provenance=PROVENANCE, save=save or partial(store.save, once=True), listener=listener).run()


def saved(folder: Path) -> list[SearchResult]:
    with Store.open(folder / "tuned.sqlite", writable=False) as store:
        return store.results()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, quick: None) -> tuple[Listener, list[SearchResult]]:
    folder, heard = tmp_path_factory.mktemp("undisturbed"), Listener()
    run(folder, heard)
    return heard, saved(folder)


@pytest.fixture(scope="module")
def undisturbed(calm: tuple[Listener, list[SearchResult]]) -> list[SearchResult]:
    return calm[1]


def test_a_search_tells_every_stage_of_every_trial(calm: tuple[Listener, list[SearchResult]]) -> None:
    heard, found = calm
    expected: list[tuple[Problem, str, int]] = []
    for result in found:
        for known, outcome in enumerate(result.outcomes):
            expected.append((result.problem, "compiling", known))
            if outcome.fate is not Fate.COMPILE:
                expected.append((result.problem, "checking", known))
        expected.append((result.problem, "racing", len(result.outcomes)))
    assert [stage for stage in heard.stages if stage[1] != "preparing"] == expected
    assert {outcome.fate for outcome in heard.trials} == {Fate.COMPILE, Fate.CORRECT}


def test_an_interrupted_plan_goes_on_where_it_was_and_a_finished_one_starts_anew(tmp_path: Path, undisturbed: list[SearchResult]) -> None:
    first = Listener(stop_after=len(undisturbed[0].outcomes) + 2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first)
    second = Listener()
    run(tmp_path, second)
    assert second.known == [GRID[0]], "the first problem isn't searched again"
    assert second.resumed == [2, 0]
    assert len(first.trials) + len(second.trials) == sum(len(result.outcomes) for result in undisturbed)
    *_, partial, again, last = results = saved(tmp_path)
    assert len(results) == 4 and len(partial.outcomes) == 2
    assert [results[0], again, last] == undisturbed
    third = Listener()
    run(tmp_path, third)
    assert third.resumed == [0, 0, 0] and third.known == [], "the plan had come to its end: the same command is a new search"


class Dies(BaseException):
    """In place of a process's end: nothing of what is under way is saved."""


class Mortal(Listener):
    """Dies as the second problem begins, or so many trials later."""

    def __init__(self, trials: int) -> None:
        super().__init__()
        self.left = trials

    def problem_started(self, problem: Problem, index: int, total: int, resumed: int) -> None:
        super().problem_started(problem, index, total, resumed)
        if index == 1 and self.left == 0:
            raise Dies

    def trial_finished(self, problem: Problem, outcome: Outcome, incumbent: Outcome | None) -> None:
        super().trial_finished(problem, outcome, incumbent)
        self.left -= len(self.resumed) == 2
        if len(self.resumed) == 2 and self.left == 0:
            raise Dies


def test_verdicts_of_a_process_that_died_serve_the_problems_that_others_go_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter judges a code path once for all problems of a spec, be it right, wrong or impossible to run."""

    def judged(source: tasks.Source, problem: Problem, seed: int) -> Checked | Failed:
        told = f"of {source.variant_id} at {problem.n_kv}"
        if "planted_right" in source.stem:
            return Checked(error=problem.n_kv / 1e3)
        if "planted_wrong" in source.stem:
            return Failed(fate=Fate.CORRECTNESS, reason=f"wrong {told}", error=problem.n_kv)
        return Failed(fate=Fate.RUNTIME, reason=f"no run {told}")

    monkeypatch.setattr(tasks, "interpret_candidate", judged)
    families = {one.name: one for one in (planted_family(kind, 2, paths=False) for kind in ("right", "wrong", "raises"))}
    two = plan(families=families, problems=GRID[:2], trials=6)
    run(tmp_path / "calm", Listener(), plan=two)
    expected = saved(tmp_path / "calm")
    assert all({outcome.template for outcome in result.outcomes} == set(families) for result in expected)
    for trials in range(3):
        with pytest.raises(Dies):
            run(tmp_path / str(trials), Mortal(trials), plan=two)
        run(tmp_path / str(trials), Listener(), plan=two)
        assert saved(tmp_path / str(trials)) == expected, trials


def test_an_interrupted_plan_goes_on_in_another_order(tmp_path: Path, undisturbed: list[SearchResult]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Listener(stop_after=len(undisturbed[0].outcomes) + 2))
    # What has a row by now comes last (`search --calls`).
    second = Listener()
    run(tmp_path, second, plan=plan(problems=(GRID[2], GRID[1], GRID[0])))
    assert second.known == [GRID[0]] and second.resumed == [0, 2]


def test_another_plan_starts_for_itself(tmp_path: Path, undisturbed: list[SearchResult]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Listener(stop_after=len(undisturbed[0].outcomes) + 1))
    for other in (plan(trials=3), plan(seed=2), plan(problems=GRID[:1])):
        listener = Listener()
        run(tmp_path, listener, plan=other)
        assert listener.known == [] and set(listener.resumed) == {0}
    unfinished = Listener()
    run(tmp_path, unfinished, plan=plan(jobs=1, budget_s=3600.0))
    assert unfinished.known == [GRID[0]], "how fast it is to go is no part of a plan"


def test_a_result_that_cant_be_saved_is_saved_at_the_end(
    tmp_path: Path, undisturbed: list[SearchResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is locked for longer than a write waits, while the first problem ends."""
    monkeypatch.setattr(sqlite_file, "BUSY_SECONDS", 0.3)
    path = tmp_path / "tuned.sqlite"
    locked: list[sqlite3.Connection] = []

    class Locker(Listener):
        def trial_finished(self, problem: object, outcome: object, incumbent: object) -> None:
            if not locked:
                locked.append(sqlite3.connect(path, isolation_level=None))
                locked[0].execute("BEGIN IMMEDIATE")

        def save_failed(self, problem: object, error: FlashtuneError) -> None:
            super().save_failed(problem, error)  # type: ignore[arg-type]
            assert "locked by another process" in str(error)
            locked[0].close()

    listener = Locker()
    run(tmp_path, listener)
    assert listener.unsaved == [GRID[0]]
    assert sorted(saved(tmp_path), key=lambda result: result.problem.n_kv) == undisturbed


def test_a_finished_but_unsaved_search_is_saved_by_the_same_command(
    tmp_path: Path, undisturbed: list[SearchResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_SECONDS", 0.3)
    Store.open(tmp_path / "tuned.sqlite", writable=True).close()
    holder = sqlite3.connect(tmp_path / "tuned.sqlite", isolation_level=None)
    first = Listener()

    class Locker(Listener):
        def trial_finished(self, problem: object, outcome: object, incumbent: object) -> None:
            first.trials.append(outcome)  # type: ignore[arg-type]
            if len(first.trials) == 1:
                holder.execute("BEGIN IMMEDIATE")

    with pytest.raises(DatabaseError, match="locked by another process"):
        run(tmp_path, Locker())
    assert len(first.trials) == sum(len(result.outcomes) for result in undisturbed), "the other problems were searched all the same"
    holder.close()
    assert saved(tmp_path) == []
    second = Listener()
    run(tmp_path, second)
    assert second.trials == [] and second.known == list(GRID)
    assert saved(tmp_path) == undisturbed


def test_a_storage_that_goes_away_leaves_what_is_known_in_the_database_and_the_plan_goes_on_when_it_is_back(
    tmp_path: Path, undisturbed: list[SearchResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PATIENCE_S", 0.3)
    # The search that lost its storage can't give back its claim, and its process, this one, lives on: only its silence tells.
    monkeypatch.setattr(claims, "LEAVING_S", 0.1)
    path, aside = tmp_path / "study.sqlite", tmp_path / "aside.sqlite"

    class Remover(Listener):
        def trial_finished(self, problem: object, outcome: object, incumbent: object) -> None:
            self.trials.append(outcome)  # type: ignore[arg-type]
            if len(self.trials) == len(undisturbed[0].outcomes) + 2:
                path.rename(aside)

    lost = Remover()
    with pytest.raises(FlashtuneError, match="study storage") as caught:
        run(tmp_path, lost, lock_s=0.1)
    assert "\n" not in str(caught.value)
    assert [len(result.outcomes) for result in saved(tmp_path)] == [len(undisturbed[0].outcomes), 2]
    path.unlink(missing_ok=True)
    aside.rename(path)
    second = Listener()
    run(tmp_path, second)
    # While the claim isn't silent for long enough yet, the problem after it comes first.
    assert second.known == [GRID[0]] and sorted(second.resumed) == [0, 2]
    whole = [result for result in saved(tmp_path) if len(result.outcomes) != 2]
    assert sorted(whole, key=lambda result: GRID.index(result.problem)) == undisturbed


def test_a_run_that_was_saved_just_before_its_writer_died_is_there_once(tmp_path: Path, undisturbed: list[SearchResult]) -> None:
    class Dies(Exception):
        pass

    def save_and_die(result: SearchResult) -> None:
        with Store.open(tmp_path / "tuned.sqlite", writable=True) as store:
            store.save(result, once=True)
        raise Dies

    for _ in range(3):
        with pytest.raises(Dies):
            run(tmp_path, Listener(), save=save_and_die)
    run(tmp_path, Listener())
    assert saved(tmp_path) == undisturbed


def test_a_family_without_a_right_candidate_is_searched_anew_like_any_other(tmp_path: Path) -> None:
    wrong = plan(families={"planted_broken": planted_family("broken")}, problems=GRID[:1])
    for _ in range(2):
        listener = Listener()
        with pytest.raises(FlashtuneError, match="no correct kernel"):
            run(tmp_path, listener, plan=wrong)
        assert listener.resumed == [0]
