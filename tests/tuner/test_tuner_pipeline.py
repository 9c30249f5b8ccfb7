"""Preparing, compiling, timing and racing overlap, and several GPUs share a plan; shown by the order of events and by logical clocks."""

import itertools
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import simulated
import staged_searches
from planted import PATIENT, PLANTED_PROBLEM, HereAndNow, Listener, planted_family
from simulated import NoWatch
from staged_searches import PROVENANCE, Staged, plan, problems, run, staged

from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import PROVIDERS, Fate, Measurement, Outcome, TuningRecord
from flashtune.core.system.errors import EnvironmentProblem, NoKernelFound
from flashtune.db.library import Library, shipped_path
from flashtune.tuner import searching
from flashtune.tuner.children import tasks
from flashtune.tuner.children.workers import Pending
from flashtune.tuner.propose.space import Candidate, record_of
from flashtune.tuner.propose.study import Study
from flashtune.tuner.publish import winners
from flashtune.tuner.publish.winners import Winners
from flashtune.tuner.replies import Called, Failed, Judged, MachineCode, Spent
from flashtune.tuner.search import evaluation, problem
from flashtune.tuner.search import plan as planning
from flashtune.tuner.search.stopping import PATIENCE
from flashtune.tuner.searching import Search

devices = staged_searches.devices

pytestmark = pytest.mark.usefixtures("planted")


def test_compilers_begin_before_the_gpu_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's inputs and oracles aren't ready until something was handed to the compilers."""
    events, go = staged(monkeypatch, held=lambda task, problem: task is simulated.ready)

    def compiling(source: Any, problem: Problem, target: Any) -> Any:
        go.set()
        return simulated.compiled(source, problem, target)

    compiling.__name__ = "compiled"
    monkeypatch.setattr(tasks, "compile_candidate", compiling)
    run(plan(1))
    assert events.index("compiled 64") < events.index("ready 64 is done") < events.index("timed 64")


def test_the_next_problem_is_compiled_while_finalists_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first problem's race doesn't end until the second one's candidates are being compiled."""
    first, second = problems(1)[0], replace(PLANTED_PROBLEM, n_q=128, n_kv=128, d=32, d_v=32)
    events, go = staged(monkeypatch, held=lambda task, problem: task is simulated.raced and problem == first)

    def compiling(source: Any, problem: Problem, target: Any) -> Any:
        if problem == second:
            go.set()
        return simulated.compiled(source, problem, target)

    compiling.__name__ = "compiled"
    monkeypatch.setattr(tasks, "compile_candidate", compiling)
    results = run(replace(plan(1), problems=(first, second)))
    assert [result.problem for result in results] == [first, second]
    assert events.index("compiled 128") < events.index("raced 64 is done")
    assert events.index("raced 64 is done") < events.index("ready 128"), "the GPU keeps the inputs of what it races"


def test_the_gpu_is_fed_while_the_sampler_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler, asked for more than those ahead, doesn't answer before the GPU has had another trial."""
    staged(monkeypatch)
    asked, fed = 0, threading.Event()
    ask = Study.ask

    def slow(self: Study, count: int, *, limit: int | None = None, known: int | None = None) -> list[Candidate]:
        nonlocal asked
        asked += 1
        if asked == 5:
            assert fed.wait(600), "the GPU waits for the sampler"
        return ask(self, count, limit=limit, known=known)

    class Feeding(Listener):
        def trial_finished(self, problem: Problem, outcome: Outcome, incumbent: Outcome | None) -> None:
            super().trial_finished(problem, outcome, incumbent)
            if len(self.trials) == 2:
                fed.set()

    monkeypatch.setattr(Study, "ask", slow)
    [result] = run(plan(1), Feeding())
    assert len(result.outcomes) == 8 and fed.is_set()
    assert all(outcome.fate is Fate.CORRECT for outcome in result.outcomes)


def test_an_error_of_the_sampler_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    staged(monkeypatch)

    def broken(self: Study, candidate: Candidate, outcome: Outcome) -> None:
        raise EnvironmentProblem("the disk is full")

    monkeypatch.setattr(Study, "tell", broken)
    with pytest.raises(EnvironmentProblem, match="disk is full"):
        run(plan(1))
    assert not [thread for thread in threading.enumerate() if thread.name == "proposals"]


def test_ctrl_c_keeps_what_the_thread_was_told() -> None:
    storage = optuna.storages.InMemoryStorage()
    with pytest.MonkeyPatch.context() as patch:
        staged(patch)
        with pytest.raises(KeyboardInterrupt):
            run(plan(1), Listener(stop_after=3), storage)
        second = Listener()
        run(plan(1), second, storage)
    assert second.resumed == [3]
    assert len(second.trials) == 5


def test_a_stopped_search_says_why_and_gives_back_what_it_did_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    staged(monkeypatch)
    monkeypatch.setattr(simulated, "time_us", lambda source: 100.0)
    [result] = run(plan(1, trials=40, until=0.005))
    assert result.ending is not None and result.ending.reason == "patience"
    assert len(result.outcomes) == 1 + PATIENCE
    [whole] = run(plan(1, trials=40, until=0.0))
    assert whole.ending is not None and whole.ending.reason in ("space", "trials") and len(whole.outcomes) == 40
    [few] = run(plan(1, trials=5, until=0.005))
    assert few.ending is not None and few.ending.reason == "trials" and len(few.outcomes) == 5


def test_whole_calls_of_the_first_are_kept_with_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    staged(monkeypatch)

    def with_pytorch(sources: list[Any], *rest: Any) -> Any:
        rounds = simulated.raced(sources, *rest)
        return replace(rounds, times=(*rounds.times, (300.0,) * 9), backend="cudnn") if rest[-1] else rounds

    def calls(sources: list[Any], problem: Problem, target: Any, seed: int, budget_s: float, beside: str) -> Called | Failed:
        flash = Judged(fate=Fate.CORRECT, versions=Config.of(torch="2.11.0"), error=0.5, time=Measurement.of([500.0] * 5))
        # The clocks are half as fast by then.
        if beside == "all":
            times = tuple(2 * (simulated.time_us(source) + 7) for source in sources)
            return Called(times=times, pytorch=Measurement.of([620.0]), providers={"flash": flash})
        return Called(times=tuple(simulated.time_us(source) + 7 for source in sources), pytorch=None)

    def none(*_: Any) -> Called | Failed:
        return Failed(fate=Fate.RUNTIME, reason="no memory")

    with_pytorch.__name__ = "raced"
    monkeypatch.setattr(tasks, "race_finalists", with_pytorch)
    [result] = run(plan(1, calls=calls))
    called = {outcome.rank: outcome for outcome in result.outcomes if outcome.call_us is not None and outcome.rank is not None}
    assert sorted(called) == [1, 2, 3][: len(called)] and result.baseline is not None and result.baseline.call_us == 310.0
    for outcome in called.values():
        assert outcome.measurement is not None and outcome.call_us == pytest.approx(outcome.measurement.median_us + 7)
    assert {outcome.template: outcome.call_us for outcome in result.outcomes if outcome.template in PROVIDERS} == {"flash": 250.0}
    record = record_of(result)
    assert record is not None and record.fastest(lambda name: True) is None and record.providers[0].rank is None
    slowest = max(called.values(), key=lambda outcome: outcome.call_us or 0.0).variant_id
    [by_calls] = run(
        plan(1, calls=lambda sources, *_: Called(times=tuple(9.0 if slowest in s.stem else 99.0 for s in sources), pytorch=None))
    )
    assert by_calls.best is not None and by_calls.best.variant_id == slowest and by_calls.best.call_us == 9.0
    assert sorted(outcome.rank for outcome in by_calls.outcomes if outcome.rank) == [1, 2, 3][: len(called)]
    [without] = run(plan(1, calls=none))
    assert without.best is not None and without.best.call_us is None and without.baseline is not None and without.baseline.call_us is None


def test_each_gpu_takes_its_share(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real worker processes; the makespan of several devices, in trials, against that of one."""
    names, count = ("7", "9"), 4
    monkeypatch.setenv("FLASHTUNE_TEST_DEVICES", ",".join(names))
    results = run(plan(count, trials=12, sampler="random", devices=names, limits=PATIENT))
    made = [simulated.trials(devices / name) for name in names]
    assert sum(made) == count * 12
    assert sum(made) / max(made) >= 1.8, made
    found = {result.problem: result for result in results}
    assert list(found) and set(found) == set(problems(count))
    for result in found.values():
        assert len({outcome.variant_id for outcome in result.outcomes}) == len(result.outcomes) == 12
        assert result.best is not None and result.best.rank == 1


@pytest.mark.parametrize("where", ["memory", "file"])
def test_an_interruption_ends_all_lanes_and_keeps_their_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str) -> None:
    staged(monkeypatch)
    storage = optuna.storages.InMemoryStorage() if where == "memory" else optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'studies'}")
    with pytest.raises(KeyboardInterrupt):
        run(plan(4, devices=("0", "1")), Listener(stop_after=11), storage)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("gpu", "proposals"))]
    again = Listener()
    results = run(plan(4, devices=("0", "1")), again, storage)
    assert {result.problem for result in results} == set(problems(4))
    assert len(again.trials) <= 4 * 8 - 11


def test_what_follows_the_trials_is_taken_from_each_problems_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that trials advance by a second and races by four: those who come last have as many trials as others."""
    staged(monkeypatch)
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time_ns=lambda: 7, sleep=lambda seconds: None)
    for module in (searching, planning, problem):
        monkeypatch.setattr(module, "time", clock)

    def taking(seconds: float, task: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            now[0] += seconds
            return task(*arguments)

        run.__name__ = task.__name__
        return run

    monkeypatch.setattr(tasks, "evaluate_candidate", taking(1.0, simulated.timed))
    monkeypatch.setattr(tasks, "race_finalists", taking(4.0, simulated.raced))
    results = run(plan(4, trials=30, budget_s=60.0, sampler="random"))
    first, *others = [len(result.outcomes) for result in results]
    assert first > max(others) and max(others) - min(others) <= 1
    assert now[0] - 1000.0 <= 60.0 + 4.0


@pytest.mark.parametrize(("budget_s", "finished"), [(0.5, 1), (6.0, 2)])
def test_no_problem_is_begun_once_the_time_of_all_is_up(budget_s: float, finished: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that every trial advances by five seconds; the same plan goes on with the others."""
    staged(monkeypatch)
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time_ns=lambda: 7, sleep=lambda seconds: None)
    for module in (searching, planning, problem):
        monkeypatch.setattr(module, "time", clock)

    def slow(*arguments: Any) -> Any:
        now[0] += 5.0
        return simulated.timed(*arguments)

    monkeypatch.setattr(tasks, "evaluate_candidate", slow)
    storage, searched = optuna.storages.InMemoryStorage(), plan(4, trials=30, sampler="random")
    results = run(replace(searched, budget_s=budget_s), storage=storage)
    assert len(results) == finished and all(result.best is not None for result in results)
    assert len(run(replace(searched, trials=30), storage=storage)) == 4


def test_a_lane_that_finds_nothing_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    staged(monkeypatch)
    broken = planted_family("broken", 6)
    with pytest.raises(NoKernelFound, match="no correct kernel"):
        run(replace(plan(2, devices=("0", "1")), families={broken.name: broken}))


def test_winners_are_compiled_for_later_while_others_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once: whoever is the fastest so far, and during the last race what may win; what won alone is kept. One that can't be compiled
    ends nothing."""
    first, second = problems(2)
    for fails in (False, True):
        asked: list[tuple[int, str]] = []
        put: list[str] = []
        _, go = staged(monkeypatch, held=lambda task, problem: task is simulated.raced and problem == second)

        def compiling(
            row: TuningRecord, target: Any, asked: list[tuple[int, str]] = asked, go: threading.Event = go, fails: bool = fails
        ) -> MachineCode | Failed:
            asked.append((row.problem.n_kv, row.outcome.variant_id))
            if row.problem == second:
                go.set()
            return Failed(fate=Fate.COMPILE, reason="no") if fails else MachineCode(text=row.outcome.variant_id)

        made = vars(searching)["Workers"]
        submit = made.submit

        def submitted(self: Any, crew: str, task: Any, *words: Any, _tasks: Any = (compiling, submit), **others: Any) -> Any:
            reply = task(*words) if task is _tasks[0] else None
            return SimpleNamespace(reply=lambda: reply, forget=lambda: None) if reply else _tasks[1](self, crew, task, *words, **others)

        monkeypatch.setattr(made, "submit", submitted)
        monkeypatch.setattr(made, "free_compilers", lambda self: 3)
        monkeypatch.setattr(winners, "compile_winner", compiling)
        monkeypatch.setattr(winners, "keep", lambda code, put=put: put.append(code.text))
        results = run(plan(2, keep=True))
        best = [result.best.variant_id for result in results if result.best is not None]
        fastest = sorted(results[1].outcomes, key=lambda o: o.trial.median_us if o.trial else 0.0)[:3]
        assert len({variant_id for _, variant_id in asked}) == len(asked)
        assert [place for place, _ in asked] == sorted(place for place, _ in asked)
        assert (first.n_kv, best[0]) in asked
        assert {o.variant_id for o in fastest} <= {variant_id for _, variant_id in asked}
        assert put == ([] if fails else list(dict.fromkeys(best)))


def test_a_winners_fallback_is_compiled_and_kept_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(record for record in Library.of(shipped_path()).records() if record.fallback is not None)
    put: list[str] = []
    monkeypatch.setattr(winners, "compile_winner", lambda one, target: MachineCode(text=f"{one.outcome.variant_id} {one.fallback}"))
    monkeypatch.setattr(winners, "keep", lambda code: put.append(code.text))
    found, workers = Winners(plan(1).target, 1.0, kept=True), HereAndNow(jobs=1)
    found.won(row, workers)  # type: ignore[arg-type]
    found.put()
    assert row.fallback is not None and put == [f"{row.outcome.variant_id} None", f"{row.fallback.variant_id} None"]


def test_searches_may_share_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are given go on running when a search ends."""
    ended: list[object] = []
    made = type("Kept", (HereAndNow,), {"__exit__": lambda self, *_: ended.append(self), "preparing": Staged.preparing})
    made.prepared = Staged.prepared  # type: ignore[attr-defined]
    workers: Any = made(jobs=1)
    for _ in range(2):
        Search(
            plan(1),
            storage=optuna.storages.InMemoryStorage(),
            provenance=PROVENANCE,
            save=lambda _: None,
            listener=Listener(),
        ).run(workers)
    assert not ended
    monkeypatch.setattr(searching, "Workers", made)
    run(plan(1))
    assert len(ended) == 1 and ended != [workers]


def test_a_task_that_two_wait_for_is_given_up_by_both_or_not_at_all() -> None:
    future: Any = Future()
    workers: Any = None
    pending: Pending[Any] = Pending(workers, "compile", 0, future, 1.0)
    assert pending.shared()
    pending.forget()
    assert not future.cancelled() and not pending.done
    pending.forget()
    assert future.cancelled() and not pending.shared()


def test_the_gpu_is_watched_by_the_time_that_a_search_may_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The last trials don't begin before something opened the watch; and a line says what the seconds went into."""
    staged(monkeypatch)
    opened, trials = threading.Event(), 0

    class Opened(NoWatch):
        def __enter__(self) -> "Opened":
            opened.set()
            return self

    def timed(*given: Any) -> Any:
        nonlocal trials
        trials += 1
        assert trials < 1 + PATIENCE or opened.wait(600), "nobody has begun to watch"
        return simulated.timed(*given)

    monkeypatch.setattr(evaluation, "GpuWatch", Opened)
    monkeypatch.setattr(tasks, "evaluate_candidate", timed)
    monkeypatch.setattr(simulated, "time_us", lambda source: 100.0)
    with caplog.at_level("DEBUG", "flashtune.search"):
        run(plan(1, trials=40, until=0.005))
    assert trials == 1 + PATIENCE
    line = [record.getMessage() for record in caplog.records if record.name == "flashtune.search"][-1]
    assert line.startswith(f"{problems(1)[0].label()}: {1 + PATIENCE} trials, ")


def test_the_parts_of_a_trace_add_up_to_the_wall_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a clock that goes on by a second at each look; a part within another counts once."""
    staged(monkeypatch)
    clock = itertools.count()
    monkeypatch.setattr(problem, "Spent", lambda: Spent(lambda: next(clock)))
    with caplog.at_level("DEBUG", "flashtune.search"):
        run(plan(1))
    line = [record.getMessage() for record in caplog.records if record.name == "flashtune.search"][-1]
    total = float(re.search(r" trials, ([0-9.]+) s; here: ", line)[1])  # type: ignore[index]
    parts = {what: float(number) for what, number in re.findall(r"([a-z ]+) ([0-9.]+)", line.partition("; here: ")[2].partition(";")[0])}
    assert {"begin", "wait for compilers", "wait for inputs", "trials", "race", "keep", "rest"} <= {what.strip() for what in parts}
    assert sum(parts.values()) == pytest.approx(total) and total == next(clock) - 1


def test_a_search_that_loses_its_claim_stops_and_takes_over_what_the_other_process_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was suspended for longer than others wait for its heartbeat."""
    staged(monkeypatch)
    monkeypatch.setattr(searching, "POLL_S", 0.0)
    storage, heard = optuna.storages.InMemoryStorage(), Listener()
    quiet: dict[str, Any] = {"provenance": PROVENANCE, "save": lambda _: None, "listener": heard}
    search = Search(plan(1), storage=storage, **quiet)

    class Suspended(Listener):
        def trial_finished(self, problem: Problem, outcome: Outcome, incumbent: Outcome | None) -> None:
            super().trial_finished(problem, outcome, incumbent)
            if len(self.trials) == 2:
                search.claims.release(search.names[0])
                run(plan(1), storage=storage)

    search.listener = listener = Suspended()
    [result] = search.run()
    assert len(listener.trials) == 2 and listener.known == list(problems(1))
    assert len(result.outcomes) == 8 and result.best is not None


def test_processes_wait_for_each_others_problems_and_all_have_every_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads in place of three processes, on four problems."""
    staged(monkeypatch)
    monkeypatch.setattr(searching, "POLL_S", 0.01)
    storage, heard = optuna.storages.InMemoryStorage(), [Listener() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda listener: run(plan(4), listener, storage), heard))
    assert [{result.problem for result in results} for results in found] == [set(problems(4))] * 3
    assert sum(len(listener.trials) for listener in heard) == 4 * 8
    assert sum(len(listener.known) for listener in heard) == 2 * 4
