"""Lazy measuring of a key's first call, with simulated times on a pretended GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import by_the_book
from pretended_gpu import PROBLEM, Machine, Q, assert_right, attend, machine, save
from test_providers import close, drawn, expected

from flashtune import dispatch
from flashtune.core.records.results import PROVIDERS as NAMES
from flashtune.core.records.results import SearchResult
from flashtune.core.system.errors import InputError
from flashtune.db.library import Library
from flashtune.dispatch.decisions import confirming
from flashtune.dispatch.state import context

__all__ = ["machine"]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Simulated times by implementation, in place of a race on a GPU; every run is made once, and `races` counts."""
    times: dict[str, float] = {"torch": 100.0, "math": 100.0, "kernel": 100.0, "races": 0.0}
    real = confirming._plans
    held: list[list[str]] = []

    def plans(*given: Any) -> Any:
        found = real(*given)
        held.append(["torch" if one is None else one.template if one.template in NAMES else "kernel" for one in found])
        return found

    def race(runs: list[Callable[[], object]], device: torch.device) -> list[list[float]]:
        times["races"] += 1
        for run in runs:
            run()
        return [[times[name]] * 12 for name in held[-1]]

    monkeypatch.setattr(confirming, "_plans", plans)
    monkeypatch.setattr(confirming, "race", race)
    return times


@pytest.mark.parametrize("winner", ["kernel", "torch", "math"])
def test_a_predicted_record_is_measured_once_and_the_winner_serves(
    machine: Machine, own_database: Path, timed: dict[str, float], winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_UNMEASURED", "0")
    variant = save(own_database, source="predicted")
    timed[winner] = 50.0
    kind = {"kernel": "exact", "torch": "framework", "math": "provider"}[winner]
    with dispatch.use(confirm=True):
        assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "predicted", "nothing is measured by asking"
        assert_right(attend())
        assert timed["races"] == 1
        launched = len(machine.launched)
        assert variant in machine.launched
        assert_right(attend())
        assert (len(machine.launched) > launched) is (winner == "kernel")
        explained = dispatch.explain(Q, Q, Q, is_causal=True)
        assert (explained.kind, explained.source) == (kind, "measured")
        # Another signature of the key, and another process.
        assert_right(dispatch.attention(Q.transpose(1, 2).contiguous().transpose(1, 2), Q, Q, is_causal=True))
        dispatch.reload()
        assert_right(attend())
        assert timed["races"] == 1
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == kind
    record = Library.of(own_database).best(PROBLEM.key("h200"))
    assert record is not None and record.outcome.source == "measured" and record.provenance.command == "dispatch.use(confirm=True)"
    assert {one.template for one in record.providers} == {"math"} and record.framework_call_us == timed["torch"]


def test_without_a_kernel_the_fastest_provider_is_kept(machine: Machine, own_database: Path, timed: dict[str, float]) -> None:
    machine.refuses = {"flash_fwd", "flash_decode", "flash_fwd_hopper"}
    timed["math"] = 60.0
    with dispatch.use(confirm=True):
        assert_right(attend())
    assert dispatch.explain(Q, Q, Q, is_causal=True).provider == "math"
    timed["math"], timed["torch"] = 100.0, 60.0
    other = drawn(2, 4, 24, 16)
    with dispatch.use(confirm=True):
        dispatch.attention(other, other, other)
    assert dispatch.explain(other, other, other).kind == "framework"


def test_what_is_wrong_is_not_measured(
    machine: Machine, own_database: Path, timed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(own_database, source="predicted")

    def spoilt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, **words: Any) -> None:
        by_the_book(q, k, v, out, lse, **words)
        out[0, 0, 0, 0] += 1.0

    monkeypatch.setattr("pretended_gpu.by_the_book", spoilt)
    timed["kernel"] = 1.0
    with dispatch.use(confirm=True), pytest.warns(RuntimeWarning, match="flash_fwd is wrong at a call, and isn't measured"):
        assert_right(attend())
    record = Library.of(own_database).best(PROBLEM.key("h200"))
    assert record is not None and record.outcome.template == "math"


def test_lazy_measuring_leaves_other_calls_as_they_are(
    machine: Machine, own_database: Path, timed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(own_database, source="predicted")
    assert_right(attend())
    assert timed["races"] == 0, "it is off unless asked for"
    with dispatch.use(confirm=True):
        dispatch.attention(Q.clone().requires_grad_(), Q, Q, is_causal=True)
        dispatch.attention(Q, Q, Q, is_causal=True, return_lse=True)
        dispatch.attention(Q, Q, Q, dropout_p=0.5, seed=1)
        attend(implementation="math")
        torch.func.vmap(lambda q: dispatch.attention(q, Q[0], Q[0], is_causal=True))(Q)
        monkeypatch.setattr(confirming, "capturing", lambda device: True)
        attend()
        assert timed["races"] == 0
        monkeypatch.setattr(confirming, "capturing", lambda device: False)
        dispatch.attention(Q[:1], Q[:1], Q[:1])
        assert timed["races"] == 1


def test_a_growing_sequence_is_measured_once_an_octave(machine: Machine, own_database: Path, timed: dict[str, float]) -> None:
    timed["math"] = 20.0
    with dispatch.use(confirm=True):
        for n in (100, 101, 130, 200, 201, 400):
            q, k = drawn(2, 4, 1, 16), drawn(2, 4, n, 16)
            close(dispatch.attention(q, k, k), expected(*(x.double() for x in (q, k, k))))
            assert dispatch.explain(q, k, k).provider == "math"
    assert timed["races"] == 2, "of 100, and of 201"


def test_memory_that_measuring_lacks_costs_a_warning(
    machine: Machine, own_database: Path, timed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(confirming, "race", full)
    with dispatch.use(confirm=True), pytest.warns(RuntimeWarning, match="too small to measure"):
        assert_right(attend())


def test_a_database_that_cannot_be_written_costs_a_warning(
    machine: Machine, own_database: Path, timed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(own_database, source="predicted")

    def full(result: SearchResult) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(confirming, "_save", full)
    timed["math"] = 10.0
    with dispatch.use(confirm=True):
        with pytest.warns(RuntimeWarning, match="isn't kept.*No space left"):
            assert_right(attend())
        dispatch.attention(Q.transpose(1, 2).contiguous().transpose(1, 2), Q, Q, is_causal=True)
    assert timed["races"] == 1


def test_a_race_is_of_whole_calls_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated clock: short calls are repeated, long ones run once."""
    now = [0.0]
    runs = {"short": 1e-5, "long": 0.08}
    counts = dict.fromkeys(runs, 0)

    def run(name: str) -> Callable[[], None]:
        def one() -> None:
            counts[name] += 1
            now[0] += runs[name]

        return one

    monkeypatch.setattr(confirming, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = confirming.race([run("short")], torch.device("cpu"))
    assert len(found[0]) == confirming.ROUNDS - 1 and found[0] == pytest.approx([10.0] * len(found[0]))
    assert counts["short"] == 1 + 20 * (confirming.ROUNDS - 1)
    assert confirming.race([run("long")], torch.device("cpu"))[0] == pytest.approx([8e4])


def test_use_needs_something_to_use_and_confirm_is_something() -> None:
    with dispatch.use(confirm=True):
        assert context.current().settings.confirm
    assert not context.current().settings.confirm
    with pytest.raises(InputError, match="nothing to use"):
        dispatch.use()
