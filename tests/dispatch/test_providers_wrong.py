"""Providers that were found wrong serve nothing on the versions that were, and explanations name the finding."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import wrong_providers
from pretended_gpu import PROBLEM, Machine, Q, assert_right, attend, machine, save
from test_providers import with_providers
from torch.nn.attention import SDPBackend
from wrong_providers import WRONG, plant

from flashtune import dispatch
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.pytorch import attention, devices
from flashtune.core.records import faults
from flashtune.core.records.faults import Fault, known_fault, wrong_everywhere
from flashtune.core.records.results import PROVIDERS, Fate, Measurement, Outcome
from flashtune.core.records.versions import PACKAGES, TITLES
from flashtune.db.library import Library
from flashtune.db.merging import merge
from flashtune.db.store import Store
from flashtune.dispatch.decisions import confirming, soundness
from flashtune.dispatch.providers import libraries

__all__ = ["machine"]

HERE = Config.of(torch="2.99", cudnn="9.12.0")
BEFORE = Config.of(torch="2.99", cudnn="9.10.2")


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has these versions of all, and all that races takes the same time."""
    monkeypatch.setattr(devices, "versions_of", lambda name: HERE)
    monkeypatch.setattr(confirming, "race", lambda runs, device: [[100.0] * 12 for run in runs if run() is not None])


def judge(path: Path, name: str, us: float | None, known: Config = HERE, *, problem: Problem = PROBLEM) -> None:
    """Add a run's outcome of a provider to a database: its time, or that it was wrong."""
    words: dict[str, Any] = {} if us is not None else {"fate": Fate.CORRECTNESS, "reason": "n1x77: output is off"}
    id = Variant(template=name, spec=problem.spec(), config=Config.of()).id
    found = Outcome.of_provider(name, id, None if us is None else Measurement.of([us] * 12), versions=known, **words)
    with Store.open(path, writable=True) as store:
        result = next((one for one in store.results() if one.problem == problem and one.outcomes), None)
        assert result is not None, "there is a run to add it to"
        kept = result.outcomes if us is None else tuple(one for one in result.outcomes if one.template != name)
        store.save(replace(result, outcomes=(*kept, found)), replacing=True)


@pytest.mark.parametrize(
    ("timed", "found", "serves"),
    [
        (HERE, None, "math"),
        (HERE, HERE, "flash"),
        (HERE, BEFORE, "math"),
        (BEFORE, BEFORE, "flash"),
        (BEFORE, HERE, "flash"),
    ],
    ids=["nothing found", "wrong here", "wrong before, right now", "wrong then, and not looked at since", "right before, wrong here"],
)
def test_what_was_found_wrong_on_these_versions_does_not_serve(
    machine: Machine, own_database: Path, timed: Config, found: Config | None, serves: str
) -> None:
    with_providers(own_database, {"math": 50.0, "flash": 80.0})
    judge(own_database, "flash", 80.0)
    judge(own_database, "math", 50.0, timed)
    if found is not None:
        judge(own_database, "math", None, found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        explained = dispatch.explain(Q, Q, Q, is_causal=True)
        assert_right(attend())
    assert explained.provider == serves
    if serves == "flash" and found is not None:
        named = "math was found wrong with " + ", ".join(f"{TITLES[name]} {found[name]}" for name in found) + ": n1x77: output is off"
        assert named in explained.reason and named in explained.refused
        assert named in dispatch.explain_problem(PROBLEM, "h200").reason
    assert dispatch.explain_problem(PROBLEM, "h200").provider == serves


def test_a_finding_holds_for_other_lengths_and_its_record_is_not_needed(machine: Machine, own_database: Path) -> None:
    other = replace(PROBLEM, n_q=64, n_kv=64)
    with_providers(own_database, {"math": 50.0})
    variant = save(own_database, other)
    judge(own_database, "math", None, problem=other)
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "exact"
    assert_right(attend())
    assert machine.launched[-1].template == variant.template


def test_a_merge_loses_no_verdict(machine: Machine, own_database: Path, tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast.sqlite", tmp_path / "slow.sqlite"
    with_providers(fast, {"math": 50.0})
    judge(fast, "math", 50.0)
    with_providers(slow, {"flash": 180.0})
    judge(slow, "math", None)
    both = tmp_path / "both.sqlite"
    merge([fast, slow], both)
    with dispatch.use(fast):
        assert dispatch.explain(Q, Q, Q, is_causal=True).provider == "math"
    with dispatch.use(both):
        explained = dispatch.explain(Q, Q, Q, is_causal=True)
        assert explained.kind == "exact" and "math was found wrong" in explained.reason


def test_a_stranger_refutes_no_records_but_its_own(machine: Machine, own_database: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.sqlite"
    with_providers(own_database, {"math": 50.0})
    judge(own_database, "math", 50.0)
    other = replace(PROBLEM, n_q=64, n_kv=64)
    save(theirs, other)
    judge(theirs, "math", None, problem=other)
    with dispatch.use(theirs):
        assert dispatch.explain(Q, Q, Q, is_causal=True).provider == "math"


def test_a_verdict_on_another_version_is_warned_of_once(machine: Machine, own_database: Path) -> None:
    with_providers(own_database, {"math": 50.0})
    judge(own_database, "math", 50.0, BEFORE)
    with pytest.warns(RuntimeWarning, match=r"math was judged with cuDNN 9.10.2 \(here 9.12.0\); it runs unchecked.*verify --requalify"):
        assert_right(attend())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(dispatch.attention(Q.clone(), Q, Q, is_causal=True, scale=0.25))
    assert machine.launched == []


def test_who_names_a_wrong_provider_is_warned(machine: Machine, own_database: Path) -> None:
    with_providers(own_database, {"flash": 50.0})
    judge(own_database, "math", None)
    with pytest.warns(RuntimeWarning, match="math was found wrong .* it runs the call since the caller named it"):
        assert_right(attend(implementation="math"))


def test_versions_and_findings_are_looked_up_at_first_calls_alone(
    machine: Machine, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_providers(own_database, {"math": 50.0, "flash": 80.0})
    judge(own_database, "math", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attend()

    def forbidden(*_: object, **__: object) -> Any:
        raise AssertionError("looked up anew")

    for place, name in [(devices, "versions_of"), (soundness, "why_wrong"), (Store, "open"), (faults, "faults")]:
        monkeypatch.setattr(place, name, forbidden)
    assert_right(attend())


# --- PyTorch's own choice -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels_refuse(machine: Machine) -> Machine:
    """No kernel takes the calls, so that PyTorch would serve them."""
    machine.refuses = {"flash_fwd", "flash_decode", "flash_fwd_hopper"}
    return machine


@pytest.mark.parametrize("source", ["found", "shipped"])
def test_where_pytorchs_own_choice_is_wrong_another_backend_comes_first(
    kernels_refuse: Machine, own_database: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """On a CPU that choice is PyTorch's flash attention."""
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "framework"
    if source == "found":
        save(own_database, replace(PROBLEM, n_q=64, n_kv=64))
        judge(own_database, "flash", None, problem=replace(PROBLEM, n_q=64, n_kv=64))
    else:
        fault = Fault(provider="flash", torch=("2.0", ""), directions=("fwd",), wrong="n1x77: output is off", source="a report")
        monkeypatch.setattr(faults, "faults", lambda: (fault,))
    dispatch.reload()
    explained = dispatch.explain(Q, Q, Q, is_causal=True)
    assert (explained.kind, explained.provider) == ("provider", "math")
    assert "PyTorch's own choice is wrong for such calls, so PyTorch's math attention runs the call" in explained.reason
    assert "flash" in explained.refused[0] and "n1x77: output is off" in explained.reason
    ran: list[int] = []
    first = libraries.PROVIDERS["math"]._first  # type: ignore[attr-defined]
    monkeypatch.setattr(libraries.PROVIDERS["math"], "_first", lambda *given: (ran.append(1), first(*given))[1])
    assert_right(attend())
    assert ran
    # A training step needs a right forward, too.
    leaves = [Q.clone().requires_grad_() for _ in range(3)]
    assert dispatch.explain(*leaves, is_causal=True).provider == "math"
    out = dispatch.attention(*leaves, is_causal=True)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))
    # Where every backend is wrong, PyTorch keeps its choice.
    monkeypatch.setattr(soundness, "why_wrong", lambda *_: "all of them are")
    dispatch.reload()
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "framework"


def test_the_known_faults_say_where_they_hold_and_have_a_source() -> None:
    rows = json.loads(Path(faults.__file__).with_name("faults.json").read_text())
    assert len(rows) == len(faults.faults())
    for one in faults.faults():
        assert one.provider in PROVIDERS and one.directions and set(one.directions) <= {"fwd", "bwd"} and one.wrong and "#" in one.source
        assert len(one.torch) == 2 and set(one.masks) <= {"bool", "bias"} and all(hasattr(PROBLEM, name) for name in one.most)
    decode = Problem(batch=8, heads=28, kv_heads=4, n_q=1, n_kv=900, d=128, d_v=128, dtype="bf16")
    assert known_fault("cudnn", decode, "100", "2.13.0+cu130") is not None
    for other, arch, release in (
        (replace(decode, heads=32, kv_heads=8), "100", "2.13.0"),
        (replace(decode, n_q=900), "100", "2.13.0"),
        (decode, "90", "2.13.0"),
        (decode, "100", "2.10.0"),
    ):
        assert known_fault("cudnn", other, arch, release) is None
    assert known_fault("efficient", decode, "100", "2.13.0") is None
    masked = replace(decode, n_q=900, features=Features(mask="bool"))
    assert (
        known_fault("cudnn", replace(masked, direction="bwd"), "90", "2.13.0") is not None
        and known_fault("cudnn", masked, "90", "2.13.0") is None
    )


def test_the_backends_of_masked_gradients_are_those_without_a_known_fault() -> None:
    assert set(wrong_everywhere("2.13.0", "bwd", masked=True)) == {"cudnn"} and not wrong_everywhere("2.13.0", "bwd", masked=False)
    assert not wrong_everywhere("2.4.0", "bwd", masked=True) and not wrong_everywhere("2.13.0", "fwd", masked=True)
    assert attention.sound_backends(torch.ones(1)) == [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


# --- lazy measuring -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", WRONG)
def test_lazy_measuring_finds_a_wrong_library_and_keeps_the_verdict(
    machine: Machine, own_database: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, WRONG[fault])
    before = Q.clone()
    with dispatch.use(confirm=True), pytest.warns(RuntimeWarning, match="fa4 is wrong at a call, and isn't measured"):
        assert_right(attend())
    assert torch.equal(Q, before), "the caller's tensors are never a library's to spoil"
    library = Library.of(own_database)
    [found] = [one for same in library.wrong.values() for one in same]
    assert found.provider == "fa4" and found.versions == HERE
    [record] = library.records()
    assert "fa4" not in record.provider_times()


def test_lazy_measuring_races_a_library_that_is_right_and_again_after_an_update(
    machine: Machine, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = plant(monkeypatch, wrong_providers.right)
    with dispatch.use(confirm=True):
        assert_right(attend())
        ran = library.calls
        dispatch.reload()
        assert_right(attend())
        assert library.calls <= ran + 1, "it is measured once"
        monkeypatch.setattr(devices, "versions_of", lambda name: HERE.replace(cudnn="9.99"))
        dispatch.reload()
        library.spoil = wrong_providers.nan
        with pytest.warns(RuntimeWarning, match="fa4 is wrong at a call"):
            assert_right(attend())
    [found] = [one for same in Library.of(own_database).wrong.values() for one in same]
    assert found.versions == HERE.replace(cudnn="9.99")


@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_measuring_takes_no_offence_at_a_callers_sizes(
    machine: Machine, own_database: Path, size: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, wrong_providers.right)
    q, k, v = (torch.randn(2, 4, 200, 16, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3))
    with dispatch.use(confirm=True), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is wrong at a call")
        dispatch.attention(q, k, v * size)
    assert "fa4" in Library.of(own_database).winners()[0].provider_times() and not Library.of(own_database).wrong


def test_lazy_measuring_finds_pytorchs_own_choice_wrong(
    kernels_refuse: Machine, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashtune.dispatch.plans.pytorch import TorchPlan

    run = TorchPlan.run
    monkeypatch.setattr(TorchPlan, "run", lambda self, *given: (run(self, *given)[0] * 1.01, None))
    monkeypatch.setattr(libraries.PROVIDERS["math"], "devices", ())
    library = plant(monkeypatch, wrong_providers.right)
    with dispatch.use(confirm=True), pytest.warns(RuntimeWarning, match="PyTorch's own choice, flash, is wrong at a call"):
        assert_right(attend())
    assert library.calls
    [found] = [one for same in Library.of(own_database).wrong.values() for one in same]
    assert found.provider == "flash"


def test_every_library_names_the_package_whose_version_decides() -> None:
    for name, provider in libraries.PROVIDERS.items():
        packages = [TITLES[word] for word in PACKAGES.get(name, ())]
        assert provider.package == "torch" or provider.package in packages, name
