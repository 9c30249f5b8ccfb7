"""Kernels of CUDA graphs, which don't wait for the host: where whole calls decided, a record keeps the kernel that is faster on the GPU."""

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import db_samples as samples
import pytest
import torch

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Outcome, TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.db.store import Store
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.plans import forward
from flashtune.dispatch.plans.forward import Fallback, KernelPlan
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.policy.choose import choose
from flashtune.templates import families
from flashtune.tuner.propose.space import record_of

STEP = Problem(batch=1, heads=14, kv_heads=2, n_q=1, n_kv=4096, d=64, d_v=64, dtype="bf16")
"""A decoding step whose shipped winner is 1.56 times slower on the GPU than another kernel of its race, and faster as whole calls."""
CONFIG = Config.of(combine="kernel")


@pytest.fixture(scope="module")
def shipped() -> list[TuningRecord]:
    return Library.of(shipped_path()).records()


def test_shipped_steps_keep_the_kernel_that_is_faster_on_the_gpu(shipped: list[TuningRecord]) -> None:
    found = [record for record in shipped if record.in_graphs is not None]
    assert STEP.key("h200") in [record.key for record in found] and all(record.key.n_q <= 16 for record in found)
    for record in found:
        other = record.in_graphs
        assert other is not None and other.measurement is not None
        assert other.measurement.median_us < record.median_us / 1.02 and (other.call_us or 0.0) > (record.outcome.call_us or 0.0)


@pytest.mark.parametrize("n", [4096, 4000])
def test_calls_run_the_winner_and_graphs_the_other(shipped: list[TuningRecord], n: int) -> None:
    choice = choose(replace(STEP, n_kv=n), find_target("h200"), shipped, families())
    assert choice.config is not None and choice.in_graphs is not None
    assert (choice.config["combine"], choice.in_graphs["combine"]) == ("last", "kernel")
    assert f"CUDA graphs run {choice.in_graphs.label()}" in choice.note


def test_a_record_of_winners_alone_keeps_it(tmp_path: Path, shipped: list[TuningRecord]) -> None:
    with Store.open(shipped_path(), writable=False) as store:
        store.export(tmp_path / "a.sqlite", winners_only=True, gpu="h200", n_q=1, n=4096, d=64)
    again = {record.key: record.in_graphs for record in Library.of(tmp_path / "a.sqlite").records()}
    assert again and again == {record.key: record.in_graphs for record in shipped if record.key in again}
    assert again[STEP.key("h200")] is not None


def raced(name: str, us: float, call_us: float | None, rank: int, **axes: Any) -> Outcome:
    return replace(samples.outcome(name, us, finalist=True, rank=rank), call_us=call_us, config=Config.of(**axes))


@pytest.mark.parametrize(
    ("us", "call_us", "axes", "kept"),
    [
        (10.0, 30.0, {"maximum": "running"}, True),
        (10.0, 19.0, {}, False),
        (14.8, 30.0, {}, False),
        (10.0, None, {}, False),
        (10.0, 30.0, {"maximum": "first"}, False),
    ],
    ids=["faster on the GPU", "faster in both", "a tie", "its calls unknown", "may need a fallback"],
)
def test_only_what_calls_passed_over_is_kept(us: float, call_us: float | None, axes: dict[str, Any], kept: bool) -> None:
    other = raced("other", us, call_us, 2, **axes)
    record = record_of(samples.result(raced("won", 15.0, 20.0, 1), other))
    assert record is not None and record.in_graphs == (other if kept else None)


class Plan(KernelPlan):
    """A plan whose launches say that they were made."""

    def _through_triton(self, *_: object) -> Any:
        return "winner", None


class Other:
    """The plan of graphs."""

    def __init__(self, *, program: object = True) -> None:
        self.program, self.built = program, 0

    def build(self, *_: object) -> None:
        self.built += 1

    def run(self, *_: object) -> Any:
        return "other", None


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """True if the current stream is captured into a graph."""
    found = [False]
    monkeypatch.setattr(forward, "capturing", lambda device: found[0])
    monkeypatch.setattr(forward.driver, "relaxed_capture", contextlib.nullcontext)
    return found


@pytest.mark.parametrize(("program", "captured"), [(True, "other"), (None, "winner")], ids=["built", "unprepared"])
def test_a_plan_runs_it_under_capture_alone(capturing: list[bool], program: object, captured: str) -> None:
    q, other, warned = torch.zeros(1, 1, 64, 64), Other(program=program), list[str]()
    call, module = parse(Arguments(q, q, q), Options()), SimpleNamespace()
    in_graphs = Fallback(config=CONFIG, plan=lambda: other)  # type: ignore[arg-type,return-value]
    plan = Plan(call, Code(module, warn=warned.append), q.stride(), in_graphs=in_graphs)  # type: ignore[arg-type]

    def served() -> Any:
        return plan.run(q, q, q, None, None, None)[0]

    assert served() == "winner" and not other.built
    capturing[0] = True
    assert [served(), served()] == [captured] * 2 and other.built == 1
    assert len(warned) == (captured == "winner")
    # As torch.use_deterministic_algorithms does: both kernels repeat their bits, but not each other's.
    torch._C._set_deterministic_algorithms(True)
    try:
        assert served() == "winner"
    finally:
        torch._C._set_deterministic_algorithms(False)
    capturing[0] = False
    assert served() == "winner"
