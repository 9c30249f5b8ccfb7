"""`flashtune bench` says what a kernel is worth on the GPU alone and as a whole call; both with stand-ins for the GPU."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from commands import flashtune
from planted import PLANTED_PROBLEM

from flashtune.bench import bench_problem, time_calls
from flashtune.core.gpu.target import find_target
from flashtune.core.records.results import Fate, Measurement
from flashtune.tuner import machine
from flashtune.tuner.children import tasks, workers
from flashtune.tuner.children.workers import Limits
from flashtune.tuner.replies import Called, Compared, Failed, Ready

WORDS = ("bench", "--d", "128", "--n", "4096", "--dtype", "bf16", "--causal", "--heads", "16", "--batch", "4")
H200 = find_target("h200")


class OnTheGpu:
    """Stands in for `Workers` on an H200 where all is well but for whole calls, if they are to fail."""

    limits = Limits()
    called: Called | Failed = Called(times=(125.0,), pytorch=Measurement.of([150.0]))

    def __init__(self, **_: object) -> None:
        pass

    def __enter__(self) -> "OnTheGpu":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, *_: object) -> Ready:
        return Ready()

    def submit(self, crew: str, task: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
        times = {"tuned": Measurement.of([100.0]), "default": Measurement.of([160.0])}
        assert crew == "device" and task in (bench_problem, time_calls)
        reply = self.called if task is time_calls else Compared(times=times, left_out={"math": "too slow"})
        return SimpleNamespace(reply=lambda: reply)


def bench(monkeypatch: pytest.MonkeyPatch, called: Called | Failed, *more: str) -> Any:
    monkeypatch.setattr(machine, "local_gpu", lambda: machine.LocalGpu(name="NVIDIA H200", target=H200))
    monkeypatch.setattr(workers, "Workers", type("Made", (OnTheGpu,), {"called": called}))
    return flashtune(*WORDS, *more, COLUMNS="200")


def test_bench_shows_both_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = bench(monkeypatch, OnTheGpu.called)
    assert shown.exit_code == 0, shown.output
    [line] = [line for line in shown.stdout.splitlines() if "n4096-d128" in line]
    assert "1.60x" in line and "125.0" in line and "1.20x" in line
    [row] = json.loads(bench(monkeypatch, OnTheGpu.called, "--json").stdout)["rows"]
    assert row["call_us"] == {"tuned": 125.0, "default": 150.0} and row["median_us"] == {"tuned": 100.0, "default": 160.0}


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_bench_times_packed_sequences_in_both_directions(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = json.loads(bench(monkeypatch, OnTheGpu.called, "--packed", "one_long", "--direction", direction, "--json").stdout)["rows"]
    assert (row["direction"], row["law"], row["longest"], row["batch"]) == (direction, "one_long", 8192, 4)
    assert row["template"] == f"flash_{direction}_hopper" and row["problem"].startswith("n4096-4one_long")
    assert row["call_us"] == {"tuned": 125.0, "default": 150.0}


def test_without_whole_calls_bench_says_why_and_shows_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench(monkeypatch, Failed(fate=Fate.RUNTIME, reason="out of memory"), "--json")
    assert "no whole calls: out of memory" in found.stderr
    [row] = json.loads(found.stdout)["rows"]
    assert row["call_us"] == {} and row["median_us"]["tuned"] == 100.0


def test_what_goes_wrong_with_whole_calls_is_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(tasks, "inputs_on_device", full)
    failed = time_calls([], PLANTED_PROBLEM, H200, 0, 0.1)
    assert isinstance(failed, Failed) and "CUDA out of memory" in failed.reason
