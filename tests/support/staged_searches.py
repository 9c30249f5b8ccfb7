"""Searches of planted families on simulated devices, whose tasks end when a test lets them."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import simulated
from planted import PLANTED_PROBLEM, HereAndNow, Listener, planted_family, planted_plan
from simulated import NoWatch

from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Provenance, SearchResult
from flashtune.tuner import searching
from flashtune.tuner.children import tasks
from flashtune.tuner.replies import Failed, Ready
from flashtune.tuner.search import evaluation
from flashtune.tuner.search.plan import SearchPlan
from flashtune.tuner.searching import Search

PROVENANCE = Provenance(flashtune="0", torch="0", triton="0")
RIGHT = planted_family("right", 40)


def problems(count: int) -> tuple[Problem, ...]:
    return tuple(replace(PLANTED_PROBLEM, n_q=64 * n, n_kv=64 * n) for n in range(1, count + 1))


def plan(count: int, **changes: Any) -> SearchPlan:
    made = planted_plan(problems(count), trials=8)
    return replace(made, source="measured", families={RIGHT.name: RIGHT}, **changes)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulated devices in place of GPUs, in this process and in those that it starts; the folder of their clocks."""
    for name, stand_in in (
        ("prepare_device", simulated.ready),
        ("evaluate_candidate", simulated.timed),
        ("race_finalists", simulated.raced),
        ("compile_candidate", simulated.compiled),
    ):
        monkeypatch.setattr(tasks, name, stand_in)
    monkeypatch.setattr(evaluation, "GpuWatch", NoWatch)
    monkeypatch.setenv("FLASHTUNE_TEST_CLOCKS", str(tmp_path))
    monkeypatch.setenv("FLASHTUNE_TEST_DEVICES", "")
    return tmp_path


def run(what: SearchPlan, listener: Any = None, storage: optuna.storages.BaseStorage | None = None) -> list[SearchResult]:
    saved: dict[Problem, SearchResult] = {}
    storage = storage or optuna.storages.InMemoryStorage()

    def save(result: SearchResult) -> None:
        # A result with a winner comes before other providers are timed.
        saved[result.problem] = result

    Search(what, storage=storage, provenance=PROVENANCE, save=save, listener=listener or Listener()).run()
    return list(saved.values())


class Staged(HereAndNow):
    """Workers whose tasks end when the test lets them: `held` names those that nobody may wait for before `go` is set."""

    events: list[str]
    held: Callable[..., bool]
    go: threading.Event

    def submit(self, crew: str, task: Callable[..., Any], *arguments: Any, limit_s: float, device: int = 0) -> Any:
        problem = next(argument for argument in arguments if isinstance(argument, Problem))
        what = f"{task.__name__} {problem.n_kv}"
        self.events.append(what)
        reply = task(*arguments)

        def wait() -> Any:
            if self.held(task, problem):
                assert self.go.wait(600), f"{what} was waited for, and what should have gone on meanwhile did not"
            self.events.append(f"{what} is done")
            return reply

        return SimpleNamespace(reply=wait, forget=lambda: None)

    def preparing(self, problem: Problem, target: Any, seed: int, *, device: int) -> Any:
        return self.submit("device", tasks.prepare_device, problem, target, seed, limit_s=1.0, device=device)

    def prepared(self, problem: Problem, pending: Any) -> Ready | Failed:
        found: Ready | Failed = pending.reply()
        return found


def staged(monkeypatch: pytest.MonkeyPatch, held: Callable[..., bool] = lambda *_: False) -> tuple[list[str], threading.Event]:
    events: list[str] = []
    go = threading.Event()
    made = type("Made", (Staged,), {"events": events, "held": staticmethod(held), "go": go})
    monkeypatch.setattr(searching, "Workers", made)
    return events, go
