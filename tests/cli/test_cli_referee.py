"""`flashtune referee` finds planted faults, continues its file, and shows what it found; providers run on a CPU in this process."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wrong_providers
from commands import flashtune
from wrong_providers import WRONG, Raising, gradient, plant

from flashtune.bench import providers, referee, rulings, whole_calls
from flashtune.bench.shapes import shapes
from flashtune.core.gpu.target import find_target
from flashtune.core.pytorch import devices
from flashtune.core.records.results import Fate, Measurement
from flashtune.tuner import machine
from flashtune.tuner.children import tasks, workers
from flashtune.tuner.children.workers import Limits
from flashtune.tuner.replies import Compared, Failed, Judged, Ready
from flashtune.tuner.verify.correctness import Verifier
from flashtune.tuner.verify.inputs import make_inputs

SHAPE = ("--d", "16", "--n", "96", "--dtype", "fp32", "--causal", "--heads", "4", "--kv-heads", "2", "--batch", "1")
PACKED = ("--d", "16", "--n", "40", "--dtype", "fp32", "--causal", "--heads", "2", "--batch", "3", "--packed", "uniform")


class InThisProcess:
    """Stands in for `Workers`: tasks run at once; `judged` are the names of providers, and those in `crashing` end the process."""

    limits = Limits()
    judged: list[str]
    crashing: dict[str, Failed]

    def __init__(self, **_: object) -> None:
        pass

    def __enter__(self) -> "InThisProcess":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, *_: object, device: int) -> Ready:
        return Ready()

    def dismiss(self, crew: str, device: int) -> None:
        pass

    def submit(self, crew: str, task: Callable[..., Any], name: Any, *arguments: Any, limit_s: float, device: int) -> Any:
        assert crew == "device" and limit_s > 0
        if task is referee.judge:
            self.judged.append(name)
            if name in self.crashing:
                return SimpleNamespace(reply=lambda: self.crashing[name])
        return SimpleNamespace(reply=lambda: task(name, *arguments))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of those that are judged; a GPU that is this CPU, where times are simulated."""
    found: list[str] = []

    def inputs(problem: Any, target: Any, seed: int) -> Any:
        made = make_inputs(problem, device="cpu", seed=seed)
        return made, Verifier(problem, device="cpu", seed=seed, full_size=made, thorough=False)

    def times(runs: list[Any], *, budget_s: float) -> list[list[float]]:
        for _, call in runs:
            call()
        return [[50.0 + place] * 9 for place in range(len(runs))]

    monkeypatch.setattr(machine, "local_gpu", lambda: machine.LocalGpu(name="NVIDIA H200", target=find_target("h200")))
    monkeypatch.setattr(workers, "Workers", type("Made", (InThisProcess,), {"judged": found, "crashing": {}}))
    monkeypatch.setattr(tasks, "inputs_on_device", inputs)
    monkeypatch.setattr(whole_calls, "interleaved", times)
    return found


def rows(*words: str, code: int = 0) -> list[dict[str, Any]]:
    done = flashtune("referee", *words, "--json")
    assert done.exit_code == code and isinstance(done.exception, SystemExit | None), done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("fault", ["right", "raises", "gradient", *WRONG])
def test_each_planted_fault_is_found_and_not_timed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoils = {"right": wrong_providers.right, "raises": Raising(), "gradient": gradient, **WRONG}
    plant(monkeypatch, spoils[fault])
    wrong = fault not in ("right", "raises")
    way = ("--direction", "bwd") if fault == "gradient" else ()
    [row] = rows(*SHAPE, *way, "--providers", "fa4,torch,flashtune", code=int(wrong))
    found = row["providers"]["fa4"]
    assert found["verdict"] == {"right": "right", "raises": "failed"}.get(fault, "wrong")
    assert (found["time"] is not None) is (fault == "right") and bool(found["reason"]) is (fault != "right")
    assert found["versions"]["torch"] == devices.torch_release()
    for name in ("torch", "flashtune"):
        assert row["providers"][name]["verdict"] == "right" and row["providers"][name]["error"] <= 1 and row["providers"][name]["time"]


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("fault", ["", "a neighbour", "a row"])
def test_packed_sequences_are_judged_each_by_itself(direction: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(inputs: Any) -> Any:
        call = whole_calls.attention_of(inputs)
        bounds = inputs.parameters.lengths[0]

        def attention(q: Any, k: Any, v: Any, **words: Any) -> Any:
            out = call(q, k, v, **words)
            if fault == "a neighbour":
                # Keys of the sequence before it have a weight.
                return out + 0.01 * v[0].sum()
            if fault == "a row":
                return torch.cat((out[: bounds[1]], 1.01 * out[bounds[1] : bounds[1] + 1], out[bounds[1] + 1 :]))
            return out

        return attention

    monkeypatch.setattr(providers, "attention_call", lambda x, **words: spoilt_call(spoilt(x), x, words))
    made = whole_calls.training_step

    def step(inputs: Any, **words: Any) -> Any:
        with monkeypatch.context() as patched:
            attention = spoilt(inputs)
            patched.setattr(whole_calls, "attention_of", lambda _: attention)
            return made(inputs, **words)

    def spoilt_call(call: Any, inputs: Any, words: Any) -> Any:
        kwargs = whole_calls.call_kwargs(inputs) | words
        return lambda: call(*whole_calls.operands(inputs), **kwargs)

    monkeypatch.setattr(providers, "training_step", step)
    [row] = rows(*PACKED, "--direction", direction, "--providers", "torch", code=int(bool(fault)))
    assert row["providers"]["torch"]["verdict"] == ("wrong" if fault else "right")
    assert row["problem"]["lengths"]["law"] == "uniform"


@pytest.mark.usefixtures("judged")
def test_a_call_with_functions_is_judged_and_libraries_without_them_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, wrong_providers.right)
    path = Path(__file__).resolve().parents[2] / "flashtune/bench/shape_functions.py"
    words = ("--d", "16", "--n", "64", "--dtype", "fp32", "--heads", "2", "--batch", "1", "--mask-mod", f"{path}:dilated")
    [row] = rows(*words, "--providers", "flashtune,fa4")
    assert {name: one["verdict"] for name, one in row["providers"].items()} == {"flashtune": "right", "fa4": "refused"}
    assert row["shape"].startswith("n64-d16-fp32-dilated")


def test_a_crash_costs_one_verdict(judged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, wrong_providers.right)
    died = Failed(fate=Fate.RUNTIME, reason="its process died in stage 'device' (exit code -11)")
    monkeypatch.setattr(workers.Workers, "crashing", {"torch": died, "flashtune": replace(died, reason="killed", inconclusive=True)})
    [row] = rows(*SHAPE, "--providers", "flashtune,torch,fa4")
    assert {name: one["verdict"] for name, one in row["providers"].items()} == {"flashtune": "undecided", "torch": "failed", "fa4": "right"}
    assert row["fastest"] == "fa4" and judged == ["flashtune", "torch", "fa4"]


def test_a_file_is_continued_until_a_version_changes(judged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, out = plant(monkeypatch, wrong_providers.right), tmp_path / "referee.json"
    words = (*SHAPE, "--providers", "torch,fa4", "--out", str(out))
    [first] = rows(*words)
    assert judged == ["torch", "fa4"] and json.loads(out.read_text())["rows"] == [first]
    # Nothing has changed; then there is one shape more.
    assert rows(*words) == [first] and len(judged) == 2
    assert len(rows(*words, "--n", "64")) == 2 and len(judged) == 4
    versions = referee.versions_here

    def upgraded(names: Any) -> dict[str, dict[str, str]]:
        return {name: found | ({"flash_attn_4": "4.0.2"} if name == "fa4" else {}) for name, found in versions(names).items()}

    monkeypatch.setattr("flashtune.cli.referee.versions_here", upgraded)
    library.spoil = wrong_providers.head
    [now] = rows(*words, code=1)
    assert judged[4:] == ["torch", "fa4"] and now["providers"]["fa4"]["verdict"] == "wrong"
    assert now["providers"]["fa4"]["versions"]["flash_attn_4"] == "4.0.2"
    # The other shape is kept, and one that is wrong stays so.
    assert len(json.loads(out.read_text())["rows"]) == 2 and rows(*words, code=1) == [now]


def test_what_the_machine_left_undecided_is_judged_again(judged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*SHAPE, "--providers", "torch", "--out", str(tmp_path / "a.json"))
    full = Failed(fate=Fate.RUNTIME, reason="CUDA out of memory", inconclusive=True)
    monkeypatch.setattr(workers.Workers, "crashing", {"torch": full})
    assert rows(*words, code=4)[0]["providers"]["torch"]["verdict"] == "undecided"
    monkeypatch.setattr(workers.Workers, "crashing", {})
    assert rows(*words)[0]["providers"]["torch"]["verdict"] == "right" and judged == ["torch", "torch"]


def damaged(document: dict[str, Any], how: str) -> str:
    row = document["rows"][0]
    if how == "half":
        return json.dumps(document)[:-40]
    if how == "verdict":
        row["providers"]["torch"]["verdict"] = "splendid"
    if how == "time":
        row["providers"]["torch"]["time"]["median_us"] = -1.0
    if how == "problem":
        row["problem"]["heads"] = "many"
    if how == "provider":
        row["providers"]["else"] = row["providers"]["torch"]
    if how == "control":
        row["providers"]["torch"]["reason"] = "\x1b[2J"
    return json.dumps({"half": None, "format": document | {"format": 9}, "gpu": document | {"gpu": "a100"}, "list": [1]}.get(how, document))


@pytest.mark.parametrize("how", ["half", "verdict", "time", "problem", "provider", "control", "format", "gpu", "list"])
def test_a_damaged_file_is_refused_and_left_as_it_is(how: str, judged: list[str], tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    words = (*SHAPE, "--providers", "torch", "--out", str(out))
    rows(*words)
    out.write_text(text := damaged(json.loads(out.read_text()), how))
    done = flashtune("referee", *words)
    assert done.exit_code == 2 and str(out) in done.stderr and "name another file" in done.stderr
    assert out.read_text() == text and judged == ["torch"]


@pytest.mark.usefixtures("judged")
def test_the_page_loads_nothing_and_says_where_and_by_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, wrong_providers.nan)
    page = tmp_path / "a.html"
    done = flashtune("referee", *SHAPE, "--providers", "torch,fa4", "--html", str(page))
    assert done.exit_code == 1 and "fa4 wrong: n96-d16-fp32-causal-gqa2 b1h4: " in done.stdout and "50.0" in done.stdout
    text = page.read_text()
    assert not re.search(r"(src|href)\s*=|url\(|@import|<script|<link|https?:", text)
    assert "prefers-color-scheme: dark" in text and "max-width: 700px" in text and 'name="viewport"' in text
    for word in ("flashtune ", "h200", devices.torch_release(), "NaN", 'data-name="fa4" class="loud"', 'data-name="torch" class="best"'):
        assert word in text, word


def test_no_shape_is_begun_after_the_budget(judged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 61.0, 61.0])
    monkeypatch.setattr("flashtune.cli.referee.time.monotonic", lambda: next(clock))
    done = flashtune("referee", *SHAPE, "--n", "64", "--n", "32", "--providers", "torch", "--budget", "1m", "--json")
    found = json.loads(done.stdout)
    assert len(found["rows"]) == 1 and found["left"] == 2 and judged == ["torch"] and done.exit_code == 0


def test_without_a_gpu_or_with_a_wrong_word_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "local_gpu", lambda: None)
    assert flashtune("referee", *SHAPE).exit_code == 4
    for words, said in ((("--providers", "fa5"), "'fa5'"), (("--dropout", "0.1"), "--dropout"), (("--html", "/nowhere/a.html"), "--html")):
        done = flashtune("referee", *SHAPE, *words)
        assert done.exit_code == 2 and said in done.stderr


def test_the_default_shapes_are_some_200_of_every_kind() -> None:
    found = shapes()
    assert 180 <= len(found) <= 220 and len(set(found)) == len(found)
    titles = [rulings.Ruled(problem=one, seed=0, rulings={}).title for one in found]
    assert len(set(titles)) == len(titles) and sum("dilated" in title for title in titles) == 4
    assert {one.direction for one in found} == {"fwd", "bwd"} and {one.d for one in found} == {64, 96, 128, 192, 256, 512}
    kinds = Counter(name for one in found for name in one.features.as_json())
    kinds += Counter("decoding" for one in found if one.n_q <= 4)
    for kind in ("causal", "window", "softcap", "mask", "dbias", "alibi", "sinks", "alignment", "packed", "mods", "decoding"):
        assert kinds[kind] >= 2, kind
    assert all(one.direction == "fwd" for one in found if one.n_q <= 4) and any(one.gqa_ratio == 16 for one in found)


def bench(times: dict[int, list[str]], replies: dict[str, list[Any]]) -> referee.Bench:
    """A bench whose processes, by number, note what they do, and reply to a provider by `replies` in turn, else that it is right."""
    right = Judged(fate=Fate.CORRECT, versions=devices.versions_of("fa4"), error=0.5)
    checking = threading.Semaphore(100)

    class Noting(InThisProcess):
        def dismiss(self, crew: str, device: int) -> None:
            times.setdefault(device, []).append("ended")

        def submit(self, crew: str, task: Callable[..., Any], name: Any, *arguments: Any, limit_s: float, device: int) -> Any:
            problem = arguments[0]
            if task is referee.judge:
                with checking:
                    time.sleep(0.01)
                    times.setdefault(device, []).append(f"judged {problem.n_q}")
                    return SimpleNamespace(reply=lambda: replies.get(name, []).pop(0) if replies.get(name) else right)
            # Nobody is being checked, or all would not be free.
            assert all(checking.acquire(blocking=False) for _ in range(100))
            checking.release(100)
            assert f"judged {problem.n_q}" in times[device] or "ended" in times[device]
            times[device].append(f"timed {problem.n_q}")
            return SimpleNamespace(reply=lambda: Compared(times={one: Measurement.of([1.0]) for one in name}, left_out={}))

    made: Any = Noting()
    target = find_target("h200")
    return referee.Bench(workers=made, target=target, versions=referee.versions_here(("torch", "fa4")), seed=0, seconds=0.1)


def test_shapes_are_checked_at_the_same_time_and_timed_alone_by_who_checked_them() -> None:
    asked = [(replace(shapes()[0], n_q=100 + place, n_kv=100 + place), ["torch", "fa4"]) for place in range(9)]
    told: dict[int, list[str]] = {}
    found = list(bench(told, {}).ruled(asked, jobs=2, enough=lambda: False))
    assert [one.problem for one in found] == [problem for problem, _ in asked]
    assert set(told) == {0, 1} and all(one.time is not None for row in found for one in row.rulings.values())


def test_what_others_left_no_memory_for_is_checked_again_alone() -> None:
    asked = [(replace(shapes()[0], n_q=100 + place, n_kv=100 + place), ["torch", "fa4"]) for place in range(3)]
    told: dict[int, list[str]] = {}
    full = Failed(fate=Fate.RUNTIME, reason="CUDA out of memory", inconclusive=True)
    found = list(bench(told, {"torch": [full]}).ruled(asked, jobs=3, enough=lambda: False))
    assert {one.problem for one in found} == {problem for problem, _ in asked} and [one.undecided for one in found] == [[], [], []]
    assert all("ended" in did for did in told.values()) and told[0][-1] == f"timed {found[-1].problem.n_q}"
