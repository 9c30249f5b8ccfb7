"""Verdicts on other providers: a search and `verify --requalify` find planted faults, store them with versions, and doubt older ones."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import db_samples as samples
import pytest
import staged_searches
import wrong_providers
from commands import flashtune
from staged_searches import plan, run, staged
from test_tuner_requalify import FIRST, SECOND, TARGET, Planted, on_h200, stored
from wrong_providers import WRONG, Raising, Spoil, plant

from flashtune import dispatch
from flashtune.bench import providers as bench_providers
from flashtune.bench import time_calls, whole_calls
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.pytorch import devices
from flashtune.core.records.results import PROVIDERS, Baseline, Fate, Outcome, SearchResult
from flashtune.core.records.versions import differing, is_versions
from flashtune.core.system.errors import NoKernelFound
from flashtune.db.library import Library
from flashtune.db.store import Store
from flashtune.dispatch.providers.libraries import PROVIDERS as INSTALLABLE
from flashtune.tuner import machine
from flashtune.tuner.children import tasks
from flashtune.tuner.replies import Called, Failed
from flashtune.tuner.search import evaluation
from flashtune.tuner.verify.correctness import Verifier
from flashtune.tuner.verify.inputs import make_inputs

__all__ = ["on_h200"]

devices_folder = staged_searches.devices
SMALL = Problem(batch=1, heads=4, kv_heads=2, n_q=96, n_kv=96, d=16, d_v=16, dtype="fp32", features=Features(causal=True))
FAULTS = ("raises", *WRONG)


def fault_of(name: str) -> Spoil:
    """The function of a fault; of none by the name `right`."""
    return Raising() if name == "raises" else WRONG.get(name, wrong_providers.right)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole calls of a problem are those of SMALL on a CPU, with the library of `wrong_providers` and simulated times."""

    def inputs(problem: Problem, target: Any, seed: int) -> Any:
        made = make_inputs(replace(SMALL, direction=problem.direction), device="cpu", seed=seed)
        return made, Verifier(made.problem, device="cpu", seed=seed, full_size=made, thorough=False)

    def times(modules: list[Any], inputs: Any, *, budget_s: float, beside: list[Any], pytorch: bool) -> list[list[float]]:
        for call in beside:
            call()
        return [[50.0] * 12 for _ in (*modules, *beside)] + [[200.0] * 12] * pytorch

    monkeypatch.setattr(tasks, "inputs_on_device", inputs)
    monkeypatch.setattr(whole_calls, "call_times", times)
    monkeypatch.setattr("flashtune.templates.loading.load_kernel", lambda text, stem: None)
    # A run of PyTorch's own backends on a CPU says nothing here.
    monkeypatch.setattr(bench_providers, "PROVIDERS", ("fa4",))


def verdict_in(result: SearchResult) -> Outcome:
    """The verdict of a search on the library."""
    [found] = [one for one in result.outcomes if one.template == "fa4"]
    return found


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_new_version_of_any_providers_package_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = INSTALLABLE[name].package

    def found(version: str) -> Config:
        monkeypatch.setattr(devices, "_installed", lambda asked: version if asked == package else "1.0")
        return devices.versions_of.__wrapped__(name)

    # PyTorch's own version is that of the imported module.
    assert package == "torch" or (found("1.1") != found("1.2") and differing(found("1.1"), found("1.2")))
    assert is_versions({part: str(version) for part, version in found("1.1").items})


@pytest.mark.usefixtures("planted", "on_cpu")
@pytest.mark.parametrize("fault", ["right", *FAULTS])
def test_a_search_keeps_the_verdict_with_the_versions_and_no_time_of_what_is_wrong(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged(monkeypatch)
    rounds = staged_searches.simulated.raced

    def raced(sources: list[Any], *rest: Any) -> Any:
        found = rounds(sources, *rest)
        return replace(found, times=(*found.times, (300.0,) * 9), backend="cudnn") if rest[-1] else found

    monkeypatch.setattr(tasks, "race_finalists", raced)
    plant(monkeypatch, fault_of(fault))
    [result] = run(plan(1, calls=time_calls))
    found = verdict_in(result)
    fate = {"right": Fate.CORRECT, "raises": Fate.RUNTIME}.get(fault, Fate.CORRECTNESS)
    assert found.fate is fate and (found.call_us == 50.0) is (fault == "right") and bool(found.reason) is (fault != "right")
    assert found.config == devices.versions_of("fa4") and "torch" in found.config
    path = samples.write(tmp_path / "a.sqlite", (result,))
    with Store.open(path, writable=False) as store:
        assert verdict_in(store.results()[0]) == found
        assert store.records()[0].provider_times() == ({"fa4": 50.0} if fault == "right" else {})
    assert [one.provider for same in Library.of(path).wrong.values() for one in same] == ["fa4"] * (fate is Fate.CORRECTNESS)


class PlantedCalls(Planted):
    """A GPU on which whole calls are those of `on_cpu`."""

    def call(self, candidates: Any, *, beside: bool = False) -> Called | None:
        """As the base class."""
        found = time_calls([], self.problem, TARGET, 0, 0.1, "all" if beside else "none")
        assert not isinstance(found, Failed)
        return replace(found, times=(60.0,) * len(candidates))


def requalify(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[dict[str, Any]]:
    """Rows of `verify --requalify`, where kernels are as fast as stored."""
    times = {(512, FIRST): 60.0, (512, SECOND): 70.0}
    monkeypatch.setattr(evaluation, "MeasuredEvaluation", lambda *, problem, **_: PlantedCalls(problem, times))
    done = flashtune("verify", "--requalify", "--db", str(path), "--json")
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def judged_before(us: float | None, **versions: str) -> Outcome:
    """The library's outcome in an earlier run, right where it has a time."""
    id = Variant(template="fa4", spec=samples.problem(512).spec(), config=Config.of()).id
    words: dict[str, Any] = {} if us is not None else {"fate": Fate.CORRECTNESS, "reason": "output is off"}
    return Outcome.of_provider("fa4", id, None if us is None else samples.times(us), versions=Config.of(versions), **words)


def with_library(*outcomes: Outcome) -> SearchResult:
    """A result with kernels and these outcomes of the library."""
    result = stored(512, 60.0, 70.0)
    return replace(result, outcomes=(*result.outcomes, *outcomes))


@pytest.mark.usefixtures("on_h200", "on_cpu")
@pytest.mark.parametrize("fault", FAULTS)
def test_requalifying_finds_a_library_that_is_wrong_by_now(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = samples.write(tmp_path / "a.sqlite", (with_library(judged_before(20.0, flash_attn_4="4.0")),))
    assert Library.of(path).records()[0].fastest(lambda name: True) == "fa4"
    plant(monkeypatch, fault_of(fault))
    requalify(monkeypatch, path)
    library = Library.of(path)
    assert library.records()[0].fastest(lambda name: True) is None
    assert len(library.wrong) == (fault != "raises")


@pytest.mark.usefixtures("on_h200", "on_cpu")
def test_a_verdict_on_another_version_is_kept_beside_a_new_one_and_one_on_this_version_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {name: str(version) for name, version in devices.versions_of("fa4").items}
    before = (judged_before(None, **{**here, "torch": "1.0"}), judged_before(None, **here))
    path = samples.write(tmp_path / "a.sqlite", (with_library(*before),))
    plant(monkeypatch, wrong_providers.right)
    requalify(monkeypatch, path)
    library = Library.of(path)
    assert library.records()[0].provider_times() == {"fa4": 50.0}
    assert [one.versions for same in library.wrong.values() for one in same] == [before[0].config]


@pytest.mark.usefixtures("on_h200", "on_cpu")
@pytest.mark.parametrize("fault", ["right", "nan"])
def test_a_record_without_a_kernel_is_judged_again(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = samples.result(judged_before(20.0, flash_attn_4="4.0"), of=samples.problem(512))
    baseline = Baseline(backend="flash", measurement=samples.times(100.0), call_us=100.0)
    path = samples.write(tmp_path / "a.sqlite", (replace(alone, baseline=baseline),))
    plant(monkeypatch, fault_of(fault))
    [row] = requalify(monkeypatch, path)
    assert row["verdict"] == ("updated" if fault == "right" else "failed")
    [record] = Library.of(path).records()
    assert record.provider_times() == {"fa4": 50.0 if fault == "right" else 20.0} and bool(Library.of(path).wrong) is (fault == "nan")


@pytest.mark.usefixtures("on_h200", "on_cpu")
def test_a_new_version_makes_verdicts_suspects_for_doctor_and_requalification(
    tmp_path: Path, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples.write(own_database, (with_library(judged_before(20.0, cudnn="9.10.2", flash_attn_4="4.0.1")),))
    monkeypatch.setattr("flashtune.db.library.shipped_path", lambda: tmp_path / "none.sqlite")
    monkeypatch.setattr(machine, "local_gpus", lambda: (SimpleNamespace(name="NVIDIA H200", target=TARGET),))

    def said(**versions: str) -> str:
        monkeypatch.setattr(devices, "versions_of", lambda name: Config.of(versions))
        checks = json.loads(flashtune("doctor", "--json").stdout)["checks"]
        return next(str(check["found"]) for check in checks if check["name"] == "records")

    assert "suspects" not in said(flash_attn_4="4.0.1", torch="2.99")
    upgraded = said(flash_attn_4="4.0.2")
    assert (
        "fa4 was judged with flash-attn-4 4.0.1 (here 4.0.2) (1 record): doubtful results" in upgraded
        and "--requalify` has checked them" in upgraded
    )
    samples.write(own_database, (with_library(judged_before(None, flash_attn_4="4.0.2")),))
    assert "fa4 is wrong here and doesn't run such calls (output is off)" in said(flash_attn_4="4.0.2")
    assert "is wrong here" not in said(flash_attn_4="4.0.3")


def large_heads(monkeypatch: pytest.MonkeyPatch, fault: str) -> SearchResult:
    """A search of heads of 512 with a library that has a fault."""
    staged(monkeypatch)
    plant(monkeypatch, fault_of(fault))
    one = plan(1, calls=time_calls)
    [result] = run(replace(one, problems=(replace(one.problems[0], d=512, d_v=512),)))
    return result


@pytest.mark.usefixtures("planted", "on_cpu")
def test_heads_larger_than_kernels_take_are_searched_among_other_providers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = large_heads(monkeypatch, "right")
    assert verdict_in(result).fate is Fate.CORRECT and result.baseline is not None and result.baseline.call_us == 200.0
    large, path = result.problem, samples.write(tmp_path / "a.sqlite", (result,))
    [record] = Library.of(path).winners()
    assert (record.outcome.template, record.fastest(lambda name: True)) == ("fa4", "fa4")
    with dispatch.use(path, alone=True):
        assert dispatch.explain_problem(large, result.gpu).provider == "fa4"
        smaller = replace(large, d=256, d_v=256)
        assert dispatch.explain_problem(smaller, result.gpu).provider is None, "kernels may be faster there"
        monkeypatch.setattr(type(INSTALLABLE["fa4"]), "missing", lambda self: "it is gone")
        assert dispatch.explain_problem(large, result.gpu).kind == "framework"
        longer = dispatch.explain_problem(replace(large, n_kv=large.n_kv * 64, n_q=1), result.gpu)
        assert longer.kind == "framework" and "so PyTorch" in longer.reason


@pytest.mark.usefixtures("planted", "on_cpu")
def test_a_search_of_larger_heads_keeps_no_provider_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoKernelFound, match=r"first reason: .* tolerances"):
        large_heads(monkeypatch, "head")


def test_heads_larger_than_kernels_take_are_predicted_by_nobody() -> None:
    done = flashtune("search", "--gpu-name", "h200", "--d", "600", "--trials", "1")
    assert done.exit_code == 2 and "with head sizes of 600 and 600" in done.output and "other providers can't be predicted" in done.output
