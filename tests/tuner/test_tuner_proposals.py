"""Who is compiled, tried and proposed next, and which GPU takes which problem."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import simulated
import staged_searches
from planted import PLANTED_PROBLEM, HereAndNow, Listener
from staged_searches import PROVENANCE, plan, problems

from flashtune.core.problems.problem import Features
from flashtune.core.records.results import Fate
from flashtune.tuner.children.workers import Pending, Workers
from flashtune.tuner.replies import Failed, Ready
from flashtune.tuner.search import trials
from flashtune.tuner.search.plan import Schedule
from flashtune.tuner.search.problem import ProblemSearch
from flashtune.tuner.search.trials import OVERTAKEN, Proposals
from flashtune.tuner.searching import Search

devices = staged_searches.devices

pytestmark = pytest.mark.usefixtures("planted")


class Asked:
    """Stands in for `Study`: any number of candidates, which are numbers."""

    def __init__(self) -> None:
        self.outcomes: dict[Any, Any] = {}
        self.pending: list[int] = []
        self.claimed = 0
        self.sampler = SimpleNamespace(warm_up=lambda: None, initial_candidates=[])

    def ask(self, count: int, *, limit: int | None, known: int | None = None) -> list[Any]:
        found = list(range(self.claimed, self.claimed + max(0, count)))
        self.claimed += len(found)
        self.pending += found
        return found

    def tell(self, candidate: Any, outcome: Any) -> None:
        self.pending.remove(candidate)
        self.outcomes[candidate] = outcome

    def left_to_gain(self) -> float:
        return 0.1 + len(self.outcomes)

    def regrets(self) -> np.ndarray[Any, Any]:
        return np.full(3, 0.2 + len(self.outcomes))


def test_who_is_compiled_goes_before_who_is_not_and_nobody_is_overtaken_for_ever() -> None:
    """Only the first candidate's compiler doesn't end, until somebody waits for it."""
    slow: Future[Any] = Future()
    workers: Any = None

    def compiling(candidate: Any) -> Any:
        done: Future[Any] = Future()
        done.set_result(Failed(fate=Fate.COMPILE, reason=str(candidate)))
        future: Any = slow if candidate == 0 else done
        return Pending(workers, "compile", 0, future, 1.0)

    study: Any = Asked()
    proposals = Proposals(study, compiling, ahead=4, limit=None, beside=True)
    taken: list[Any] = []
    while 0 not in taken:
        found = proposals.next(lambda: slow.set_result("compiled") if len(taken) == OVERTAKEN and not slow.done() else None)
        assert found is not None
        taken.append(found.candidate)
        outcome: Any = "timed"
        proposals.tell(found.candidate, outcome)
    proposals.close()
    assert taken == [*range(1, OVERTAKEN + 1), 0]
    assert proposals.left > 1, "what is left is what was expected when the sampler was last asked"
    assert proposals.left_in_all == pytest.approx(proposals.left + 0.1)


def test_the_first_candidates_are_made_before_a_compiler_is_asked_for_also_under_python_o() -> None:
    """The first compiler waits for the fork server's imports, during which they are made."""
    without_asserts = ModuleType(trials.__name__)
    exec(compile(Path(trials.__file__).read_bytes(), trials.__file__, "exec", optimize=1), vars(without_asserts))
    begun: list[str] = []

    class Made(SimpleNamespace):
        """Stands in for a sampler."""

        @property
        def initial_candidates(self) -> list[Any]:
            begun.append("candidates")
            return []

    def compiling(candidate: Any) -> Any:
        begun.append("compiler")
        return Failed(fate=Fate.COMPILE, reason="no")

    study: Any = Asked()
    study.sampler, study.predicted_next = Made(warm_up=lambda: None), lambda count: []
    proposals = without_asserts.Proposals(study, compiling, ahead=1, limit=None, beside=True, compile_ahead=True)
    assert proposals.next() is not None
    proposals.close()
    assert begun[:2] == ["candidates", "compiler"]


def test_nobody_waits_for_a_compiler_once_enough_is_tried() -> None:
    """Only the first candidate's compilation ends. What is expected then may be told while the next one is waited for."""
    workers: Any = None

    def compiling(candidate: Any) -> Any:
        future: Any = Future()
        if candidate == 0:
            future.set_result(Failed(fate=Fate.COMPILE, reason="no"))
        return Pending(workers, "compile", 0, future, 1.0)

    study: Any = Asked()
    proposals = Proposals(study, compiling, ahead=1, limit=None, beside=True)
    found: Any = proposals.next()
    proposals.tell(found.candidate, found)
    assert proposals.next(enough=lambda: proposals.left > 1) is None
    proposals.close()


def test_of_several_gpus_each_keeps_to_its_spec_and_then_takes_what_nobody_has_begun() -> None:
    """Three specs of 3, 2 and 1 problems; letters are lanes."""
    planned = [*problems(3), *(replace(one, d=32, d_v=32) for one in problems(2)), replace(PLANTED_PROBLEM, d=64, d_v=64)]
    specs = [problem.spec() for problem in planned]

    def order(devices: tuple[str, ...], lanes: str) -> list[int | None]:
        what = replace(plan(1, devices=devices), problems=tuple(planned))
        turns = Schedule(what)
        had: dict[str, Any] = {}
        taken = []
        for lane in lanes:
            taken.append(index := next(iter(turns.order(had.get(lane))), None))
            had[lane] = None if index is None else specs[index]
            if index is not None:
                turns.begin(index)
        return taken

    assert order((), "aaaaaaa") == [0, 1, 2, 3, 4, 5, None]
    assert order(("0", "1"), "ababba") == [0, 3, 1, 4, 5, 2]
    # Where nothing is new to all, it helps where most is left.
    assert order(("0", "1", "2", "3"), "abcdda") == [0, 3, 5, 1, 2, 4]


def test_of_several_gpus_the_second_begins_with_what_has_the_fewest_features() -> None:
    """Of what the first one learns of plain problems those with features know something, if they come later."""
    causal = Features(causal=True)
    planned = [*problems(2), *(replace(one, features=causal) for one in problems(2)), *(replace(one, dtype="bf16") for one in problems(2))]
    turns = Schedule(replace(plan(1, devices=("0", "1")), problems=tuple(planned)))
    taken = []
    for spec in (None, None, None, planned[0].spec()):
        taken.append(turns.order(spec)[0])
        turns.begin(taken[-1])
    assert taken == [0, 4, 2, 1]


def test_a_candidate_is_compiled_before_the_next_is_thought_of() -> None:
    """The first ones, winners of near records, don't wait for the sampler's look at the whole space."""
    compiled: list[Any] = []

    class Thinking(Asked):
        def ask(self, count: int, *, limit: int | None, known: int | None = None) -> list[Any]:
            assert len(compiled) == self.claimed
            return super().ask(count, limit=limit)

    def compiling(candidate: Any) -> Failed:
        compiled.append(candidate)
        return Failed(fate=Fate.COMPILE, reason="it can't")

    study: Any = Thinking()
    proposals = Proposals(study, compiling, ahead=6, limit=None, beside=True)
    assert proposals.next() is not None
    proposals.close()
    assert compiled == list(range(6))


def test_what_would_be_proposed_next_is_compiled_and_given_up_with_the_rest() -> None:
    """Nothing is compiled to the end, so that no more than a quarter of those ahead is foreseen."""
    futures: dict[int, Future[Any]] = {}
    workers: Any = None

    def compiling(candidate: Any) -> Any:
        future: Any = futures.setdefault(candidate, Future())
        return Pending(workers, "compile", 0, future, 1.0)

    study: Any = Asked()
    study.predicted_next = lambda count: list(range(study.claimed, study.claimed + count))
    proposals = Proposals(study, compiling, ahead=8, limit=None, beside=True, compile_ahead=True)
    proposals.close()
    assert sorted(futures) == list(range(8 + 2)) and all(future.cancelled() for future in futures.values())


def test_nothing_is_asked_for_in_the_end() -> None:
    """Results observed so far are kept before `close` returns; that it would be time to ask for more changes nothing any more."""
    study: Any = Asked()
    closing = threading.Event()
    tell = study.tell
    study.tell = lambda *words: (closing.wait(600), tell(*words))

    class Closed(Proposals):
        def close(self) -> None:
            threading.Timer(0.02, closing.set).start()
            super().close()

    nothing: Any = None
    proposals = Closed(study, lambda candidate: nothing, ahead=4, limit=None, beside=True)
    for _ in range(3):
        found: Any = proposals.next()
        proposals.tell(found.candidate, found)
    proposals.close()
    assert len(study.outcomes) == 3 and study.claimed == 4


def test_what_was_foreseen_and_nobody_took_is_given_up() -> None:
    """Compilations that begin before their candidates are claimed, too."""
    futures: list[Future[Any]] = []

    class Slow(HereAndNow):
        def submit(self, *_: Any, **__: Any) -> Any:
            futures.append(Future())
            future: Any = futures[-1]
            return Pending(self, "compile", 0, future, 1.0)  # type: ignore[arg-type]

    quiet: dict[str, Any] = {"save": lambda _: None, "listener": Listener()}
    search = Search(plan(1), storage=optuna.storages.InMemoryStorage(), provenance=PROVENANCE, **quiet)
    slow: Any = Slow(jobs=1)
    one = ProblemSearch(search, 0, slow, 0, "suffix")
    one.begin()
    one.abandon()
    assert futures and all(future.cancelled() for future in futures)


def test_free_compilers_take_more_of_what_would_be_proposed_next() -> None:
    """As many as are free beside those that the next ones take, and no more than are ahead; what is under way counts."""
    for free, most in ((0, 4), (6, 4), (11, 7), (99, 16)):
        futures: dict[int, Future[Any]] = {}
        workers: Any = None

        def compiling(candidate: Any, futures: dict[int, Future[Any]] = futures, workers: Any = workers) -> Any:
            return Pending(workers, "compile", 0, futures.setdefault(candidate, Future()), 1.0)

        study: Any = Asked()
        study.predicted_next = lambda count, study=study: list(range(study.claimed, study.claimed + count))
        Proposals(study, compiling, ahead=16, limit=None, beside=True, compile_ahead=True, free=lambda free=free: free).close()
        assert sorted(futures) == list(range(16 + most))


def test_compilers_are_free_when_their_tasks_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    futures: list[Future[Any]] = []

    class Pool:
        active = True

        def schedule(self, *_: Any, **__: Any) -> Future[Any]:
            futures.append(Future())
            return futures[-1]

    monkeypatch.setattr(Workers, "_pool", lambda *_: Pool())
    workers = Workers(jobs=2)
    for crew, free in (("compile", 1), ("device", 1), ("compile", 0), ("compile", 0)):
        workers.submit(crew, simulated.ready, limit_s=1.0)  # type: ignore[arg-type]
        assert workers.free_compilers() == free
    for future, free in zip(futures, (0, 0, 1, 2), strict=True):
        future.set_result(Ready())
        assert workers.free_compilers() == free
