"""Conditions of a GPU while final candidates race: read from the driver's tool, here a stand-in of it, and acted upon."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import optuna
import pytest

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Baseline, CompileFacts, Conditions, Fate, Measurement, Provenance, SearchResult
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.templates import family
from flashtune.tuner import searching
from flashtune.tuner.children import tasks
from flashtune.tuner.children.workers import Limits
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Compiled, Failed, Raced, Ready, Rounds, Timed
from flashtune.tuner.search import evaluation
from flashtune.tuner.search.plan import SearchPlan
from flashtune.tuner.timing.conditions import PAUSE_S, RACES, GpuWatch, conditions_of, race_undisturbed

QUIET = "1755, 3201, 640.50, 61, 0x0000000000000000"
CAPPED = "1410, 3201, 699.00, 71, 0x0000000000000004"
IDLE = "345, 2619, 75.10, 31, 0x0000000000000001"

TOOL = """#!{python}
import sys, time
lines = {processes!r} if any("compute-apps" in word for word in sys.argv) else {gpu!r}
assert "--id=GPU-1" in sys.argv
while True:
    for line in lines:
        print(line, flush=True)
    time.sleep(0.01)
"""


def stand_in(folder: Path, gpu: Sequence[str], processes: Sequence[str]) -> None:
    """A `nvidia-smi` in `folder` that answers with these lines over and over."""
    path = folder / "nvidia-smi"
    path.write_text(TOOL.format(python=sys.executable, gpu=list(gpu), processes=list(processes)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def watched(seconds: float = 0.3) -> Conditions | None:
    with GpuWatch("GPU-1") as watch:
        began = time.time()
        found = None
        # The second tool may start later than the first; a slow machine only waits longer.
        while found is None or found.other_processes is None or found.samples < 4:
            time.sleep(seconds)
            found = watch.between(began, time.time(), os.getpid())
        return found


def test_medians_of_what_the_tool_says_while_the_race_runs(tools: Path) -> None:
    stand_in(tools, [QUIET, QUIET, QUIET, "1700, 3201, 600.0, 60, 0x0"], [str(os.getpid())])
    found = watched()
    assert found is not None and found.samples >= 4
    assert (found.sm_clock_mhz, found.memory_clock_mhz, found.power_w, found.temperature_c) == (1755, 3201, 640.5, 61)
    assert (found.throttled_by, found.other_processes, found.doubts) == ("", 0, ())


def test_only_what_was_read_within_the_race_counts_its_ends_included() -> None:
    watch = GpuWatch("GPU-1")
    # Between these readings of clocks and of processes the race ran from 1 to 3.
    clocks = [(0.9, IDLE), (1.0, QUIET), (2.0, QUIET), (3.0, CAPPED), (3.1, IDLE)]
    processes = [(0.9, "8"), (1.0, "7"), (3.0, "9"), (3.1, "10")]
    watch._loops = [SimpleNamespace(readings=readings) for readings in (clocks, processes)]  # type: ignore[misc]
    assert watch.between(1.0, 3.0, own=7) == conditions_of([QUIET, QUIET, CAPPED], ["7", "9"], own=7)
    assert watch.between(1.1, 1.9, own=7) is None


def test_the_tool_is_stopped_with_the_race(tools: Path) -> None:
    stand_in(tools, [QUIET], [])
    with GpuWatch("GPU-1") as watch:
        processes = [loop._process for loop in watch._loops]
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() is not None for process in processes)


@pytest.mark.usefixtures("tools")
def test_a_tool_that_cant_be_started_twice_isnt_left_running(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tools, [QUIET], [])
    started: list[Any] = []

    def start(*words: Any, **settings: Any) -> Any:
        if started:
            raise OSError("no more processes")
        started.append(subprocess.Popen(*words, **settings))
        return started[0]

    monkeypatch.setattr("flashtune.tuner.timing.conditions.subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))
    with pytest.raises(OSError, match="no more"), GpuWatch("GPU-1"):
        pass
    assert started[0].poll() is not None


def test_a_machine_without_the_tool_races_unwatched() -> None:
    with GpuWatch("0") as watch:
        assert watch.between(0.0, time.time(), os.getpid()) is None


def test_a_tool_that_fails_at_once_is_no_obstacle(tools: Path) -> None:
    (tools / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tools / "nvidia-smi").chmod(0o755)
    with GpuWatch("0") as watch:
        assert watch.between(0.0, time.time(), os.getpid()) is None


CAPPED_ONCE = Conditions(
    samples=2, sm_clock_mhz=1582, memory_clock_mhz=3201, power_w=669.75, temperature_c=66, throttled_by="SwPowerCap", other_processes=0
)
IDLE_SHARED = Conditions(
    samples=1, sm_clock_mhz=345, memory_clock_mhz=2619, power_w=75.1, temperature_c=31, throttled_by="", other_processes=1
)


@pytest.mark.parametrize(
    ("gpu", "processes", "expected"),
    [
        ([QUIET, CAPPED], ["7"], CAPPED_ONCE),
        (["1755, [N/A], [Not Supported], 61, [N/A]"], [], Conditions(samples=1, sm_clock_mhz=1755, temperature_c=61)),
        ([IDLE], ["8", "9"], IDLE_SHARED),
        ([IDLE], ["7", "8", "9", "8"], replace(IDLE_SHARED, other_processes=2)),
        (["No devices were found"], [], None),
        ([], ["7"], None),
    ],
)
def test_lines_become_conditions(gpu: list[str], processes: list[str], expected: Conditions | None) -> None:
    """Our process is 7; where it isn't listed under its own number, it is one of those that are."""
    assert conditions_of(gpu, processes, own=7) == expected


class _Watch(GpuWatch):
    """Says what it is told to, race after race."""

    def __init__(self, found: Iterator[Conditions | None]) -> None:
        super().__init__("0")
        self._found = found

    def __enter__(self) -> Self:
        return self

    def between(self, start: float, end: float, own: int) -> Conditions | None:
        return next(self._found)


def conditions(throttled_by: str = "", others: int = 0) -> Conditions:
    return Conditions(samples=9, throttled_by=throttled_by, other_processes=others)


def told(*found: Conditions | None) -> GpuWatch:
    return _Watch(iter(found))


def races(*fates: Fate) -> Iterator[Raced | Failed]:
    for number, fate in enumerate(fates):
        times = (Measurement.of([float(number)]),)
        yield raced(times) if fate is Fate.CORRECT else Failed(fate=fate, reason=str(number))


def raced(times: tuple[Measurement, ...], baseline: Baseline | None = None) -> Raced:
    return Raced(times=times, behind=(0.0,) * len(times), baseline=baseline, began=1.0, ended=2.0, pid=7)


BOTH, THROTTLED, SHARED, FREE = conditions("HwSlowdown", 1), conditions("HwSlowdown"), conditions("", 2), conditions()
LIMITED = conditions("SwPowerCap")


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ((FREE,), 0),
        ((None,), 0),
        ((THROTTLED, FREE), 1),
        ((SHARED, SHARED, FREE), 2),
        ((BOTH, THROTTLED, THROTTLED), 1),
        ((SHARED,) * RACES, 0),
        ((THROTTLED,) * RACES, 0),
        ((LIMITED,), 0),
        ((SHARED, LIMITED), 1),
        ((THROTTLED, None), 0),
    ],
)
def test_a_disturbed_race_is_run_again_and_the_least_disturbed_counts(found: tuple[Conditions | None, ...], chosen: int) -> None:
    run = races(*[Fate.CORRECT] * len(found))
    reply, kept = race_undisturbed(lambda: next(run), told(*found), pause_s=0.0)
    assert isinstance(reply, Raced) and (reply.times[0].median_us, kept) == (chosen, found[chosen])
    assert next(run, None) is None, "no race beyond the first quiet one"


def test_the_gpu_rests_before_another_race(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("flashtune.tuner.timing.conditions.time.sleep", pauses.append)
    run = races(*[Fate.CORRECT] * 3)
    race_undisturbed(lambda: next(run), told(BOTH, SHARED, FREE))
    assert pauses == [PAUSE_S] * 2


def test_a_race_that_fails_ends_it_and_an_earlier_one_counts() -> None:
    reply, kept = race_undisturbed(lambda: next(races(Fate.RUNTIME)), told(), pause_s=0.0)
    assert isinstance(reply, Failed) and (reply.fate, kept) == (Fate.RUNTIME, None)
    run = races(Fate.CORRECT, Fate.TIMEOUT)
    reply, kept = race_undisturbed(lambda: next(run), told(SHARED), pause_s=0.0)
    assert isinstance(reply, Raced) and kept == SHARED


class _Staged:
    """Stands in for `Workers` on a GPU: compiles all, times the first candidate fastest in trials and the last fastest in the race."""

    limits = Limits()

    def __init__(self, **_: object) -> None:
        self._trials = count(1)

    def __enter__(self) -> "_Staged":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def free_compilers(self) -> int:
        return 0

    def preparing(self, *_: object, device: int) -> Any:
        return SimpleNamespace(reply=lambda: Ready(gpu="GPU-7"))

    def prepared(self, problem: Problem, pending: Any) -> Ready:
        ready: Ready = pending.reply()
        return ready

    def submit(self, crew: str, task: Callable[..., Any], *arguments: Any, limit_s: float, device: int = 0) -> Any:
        reply: Compiled | Timed | Rounds
        if task is tasks.compile_candidate:
            reply = Compiled(facts=CompileFacts(registers=64, spills=0, shared_bytes=1024, threads=128))
        elif task is tasks.evaluate_candidate:
            incumbent = None if arguments[1] is None else Measurement.of([101.0])
            reply = Timed(time=Measurement.of([100.0 + next(self._trials)]), error=0.5, incumbent=incumbent)
        else:
            assert task is tasks.race_finalists
            beside_pytorch = arguments[-1]
            times = [(90.0 - 5 * place,) * 9 for place in range(len(arguments[0]))] + [(120.0,) * 9] * beside_pytorch
            backend = "cudnn" if beside_pytorch else None
            reply = Rounds(times=tuple(times), backend=backend, began=1.0, ended=2.0, pid=7)
        return SimpleNamespace(reply=lambda: reply)


def test_a_measured_search_keeps_the_race_apart_from_the_trials_and_says_what_the_gpu_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "Workers", _Staged)
    watched: list[str] = []
    monkeypatch.setattr(evaluation, "GpuWatch", lambda gpu: (watched.append(gpu), told(FREE))[1])
    target = find_target("a100")
    plan = SearchPlan(
        target=target,
        problems=(Problem(batch=1, heads=2, kv_heads=2, n_q=256, n_kv=256, d=64, d_v=64, dtype="fp16"),),
        families={"flash_fwd": family("flash_fwd")},
        source="measured",
        trials=3,
        seed=1,
    )
    saved: list[SearchResult] = []
    deaf: Any = _Deaf()
    made_by = Provenance(flashtune="0", torch="0", triton="0")
    storage = optuna.storages.InMemoryStorage()
    searching.Search(plan, storage=storage, provenance=made_by, save=saved.append, listener=deaf).run()
    picked, result = saved
    assert picked.baseline is None and replace(result, baseline=None) == picked, "PyTorch builds plans for seconds, and changes no winner"
    assert result.baseline is not None and result.baseline.measurement.median_us == pytest.approx(120.0 * 80 / 90), "in the winner's scale"
    assert result.provenance == replace(made_by, conditions=FREE)
    assert watched == ["GPU-7"] * 2, "the one that its own process sees"
    raced = {o.measurement.median_us: o.trial.median_us for o in result.outcomes if o.measurement and o.trial and o.finalist}
    assert raced == {90.0: 101.0, 85.0: 102.0, 80.0: 103.0}
    assert result.best is not None and result.best.measurement == Measurement.of([80.0] * 9)


class _Deaf:
    """Hears nothing, whatever a search tells its listener."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.mark.parametrize("fate", [Fate.TIMEOUT, Fate.RUNTIME])
def test_after_a_process_that_ended_inputs_are_made_anew_before_the_next_candidate(fate: Fate) -> None:
    """Else they are made within the next candidate's seconds, and where these don't suffice within those of every one after it."""
    asked: list[str] = []

    class Ends(_Staged):
        def preparing(self, *_: object, device: int) -> Any:
            asked.append("inputs")
            return super().preparing(device=device)

        def submit(self, crew: str, task: Callable[..., Any], *arguments: Any, limit_s: float, device: int = 0) -> Any:
            asked.append("trial")
            return SimpleNamespace(reply=lambda: Failed(fate=fate, reason="its process died"))

    measured, candidate, facts = _measured(Ends())
    for _ in range(2):
        assert isinstance(measured.evaluate(candidate, facts, None), Failed)
    assert asked == ["inputs", "trial"] * 2


def _measured(workers: Any) -> tuple[evaluation.MeasuredEvaluation, Candidate, CompileFacts]:
    """An evaluation by these workers, with a candidate that compiled."""
    problem, target, kind = (
        Problem(batch=1, heads=2, kv_heads=2, n_q=256, n_kv=256, d=64, d_v=64, dtype="fp16"),
        find_target("a100"),
        family("flash_fwd"),
    )
    measured = evaluation.MeasuredEvaluation(problem=problem, target=target, workers=workers, seed=1, measure_s=0.1, race_s=0.1)
    candidate = Candidate(family=kind, config=kind.default(problem.spec(), target))
    return measured, candidate, CompileFacts(registers=64, spills=0, shared_bytes=1024, threads=128)


def test_kernels_are_compiled_side_by_side_and_failures_of_rendering_are_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[tuple[str, int]] = []

    class Compiles(_Staged):
        def submit(self, crew: str, task: Callable[..., Any], *arguments: Any, limit_s: float, device: int = 0) -> Any:
            assert task is tasks.compile_candidate
            submitted.append((crew, len(arguments)))
            return SimpleNamespace(reply=lambda: Compiled(facts=facts))

    measured, candidate, facts = _measured(Compiles())
    other = replace(candidate, config=candidate.config.replace(BLOCK_M=64))
    assert measured.compiled(candidate) is None
    measured.compile({candidate: facts, other: None})
    # Known facts go along, so that cached machine code may do.
    assert submitted == [("compile", 4), ("compile", 3)] and measured.compiled(other) == Compiled(facts=facts)

    def unrendered(*_: object) -> None:
        raise ValueError("no such axis")

    monkeypatch.setattr(tasks.Source, "of", unrendered)
    measured.compile({candidate: None})
    found = measured.compiled(candidate)
    assert isinstance(found, Failed) and found.fate is Fate.COMPILE and not found.inconclusive


def test_inputs_that_cant_be_made_end_the_search_in_a_sentence() -> None:
    class Breaks(_Staged):
        def preparing(self, *_: object, device: int) -> Any:
            return SimpleNamespace(reply=lambda: Failed(fate=Fate.RUNTIME, reason="CUDA error", poisoned=True))

    measured, candidate, facts = _measured(Breaks())
    with pytest.raises(EnvironmentProblem, match="CUDA error"):
        measured.evaluate(candidate, facts, None)
