"""Records are timed again: what is slower than said, slower than a runner-up or slower than PyTorch is found, and gives way."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import db_samples as samples
import pytest
from commands import flashtune

from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.results import Baseline, Conditions, Fate, Measurement, SearchResult
from flashtune.core.target import find_target
from flashtune.db import library
from flashtune.db.library import Library
from flashtune.db.store import Store
from flashtune.dispatch.choose import choose
from flashtune.templates import families, family
from flashtune.tuner import machine
from flashtune.tuner.propose.space import Candidate, record_of
from flashtune.tuner.replies import Called, Failed, Raced, Standing, Timed
from flashtune.tuner.search import evaluation
from flashtune.tuner.search.evaluation import Evaluation
from flashtune.tuner.search.requalify import elsewhere, worst_first

TARGET = find_target("h200")
KIND = family("flash_fwd")
FIRST, SECOND = KIND.starts(samples.PROBLEM.spec(), TARGET)[:2]
PYTORCH_US = 120.0


def stored(n: int, first_us: float, second_us: float) -> SearchResult:
    """A result whose winner and runner-up were timed so, beside PyTorch's 120 us."""
    outcomes = [
        replace(samples.outcome(f"{n:08x}{rank:08x}", us, finalist=True, rank=rank), config=config)
        for rank, (config, us) in enumerate(((FIRST, first_us), (SECOND, second_us)), start=1)
    ]
    return samples.result(*outcomes, framework_us=PYTORCH_US, of=samples.problem(n))


@dataclass
class Planted(Evaluation):
    """A GPU on which kernels take the times of a table."""

    problem: Problem
    times: dict[tuple[int, Config], float]
    raced: list[int] = field(default_factory=list)

    def evaluate(self, candidate: Candidate, *_: Any) -> Timed | Failed:
        us = self.times[self.problem.n_kv, candidate.config]
        return Failed(fate=Fate.CORRECTNESS, reason="off", error=3.0) if us < 0 else Timed(time=Measurement.of([us] * 20), error=0.5)

    def race(self, candidates: Sequence[Candidate]) -> tuple[Raced | Failed | None, Conditions | None]:
        self.raced.append(self.problem.n_kv)
        times = [self.times[self.problem.n_kv, candidate.config] for candidate in candidates]
        behind = tuple(us / min(times) - 1 for us in times)
        return Raced(
            times=tuple(Measurement.of([us] * 20) for us in times),
            standing=Standing(behind=behind, tied=tuple(b < 0.0075 for b in behind), races=1, settled=True),
            baseline=Baseline(backend="cudnn", measurement=Measurement.of([PYTORCH_US] * 20)),
            began=0.0,
            ended=1.0,
            pid=1,
        ), None

    def call(self, candidates: Sequence[Candidate]) -> Called | None:
        return None


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an H200, and a PyTorch of the records' release."""
    monkeypatch.setattr(machine, "local_gpu", lambda: SimpleNamespace(name="NVIDIA H200", target=TARGET))
    here = replace(samples.PROVENANCE, created_at="2026-11-27T10:00:00+00:00")
    monkeypatch.setattr(machine, "provenance", lambda **_: here)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A database of five records and what a requalification says of each: as said, twice as slow, overtaken, behind PyTorch, wrong."""
    says = {256: (60.0, 70.0), 512: (50.0, 80.0), 1024: (60.0, 66.0), 640: (100.0, 110.0), 320: (60.0, 70.0)}
    takes = {256: (61.0, 71.0), 512: (100.0, 105.0), 1024: (80.0, 62.0), 640: (150.0, 140.0), 320: (-1.0, -1.0)}
    path = samples.write(tmp_path / "a.sqlite", tuple(stored(n, *us) for n, us in says.items()))
    times = {(n, config): us for n, both in takes.items() for config, us in zip((FIRST, SECOND), both, strict=True)}
    monkeypatch.setattr(machine, "local_gpu", lambda: SimpleNamespace(name="NVIDIA H200", target=TARGET))
    monkeypatch.setattr(
        machine, "provenance", lambda **_: replace(samples.PROVENANCE, torch="2.12.0", created_at="2026-11-27T10:00:00+00:00")
    )
    monkeypatch.setattr(evaluation, "MeasuredEvaluation", lambda *, problem, **_: Planted(problem, times))
    done = flashtune("verify", "--requalify", "--db", str(path), "--json")
    assert done.exit_code == 0, done.output
    return path, {row["problem"]: row for row in json.loads(done.stdout)["rows"]}


def test_records_that_do_not_hold_are_found(planted: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    found = {int(label.split("-")[0][1:]): row for label, row in planted[1].items()}
    assert {n: row["verdict"] for n, row in found.items()} == {
        256: "confirmed",
        512: "updated",
        1024: "updated",
        640: "demoted",
        320: "failed",
    }
    assert found[512]["found_ratio"] == pytest.approx(2 * found[512]["stored_ratio"]), "twice as slow as said"
    assert found[320]["reason"] == "correctness: off"


def test_what_is_found_takes_the_place_of_what_was_said(planted: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    with Store.open(planted[0], writable=False) as store:
        records = {record.problem.n_kv: record for record in store.records()}
        assert len(store.results()) == len(records) == 5, "earlier runs are gone"
    assert [records[n].outcome.config for n in (256, 512, 1024, 640)] == [FIRST, FIRST, SECOND, SECOND]
    assert [records[n].median_us for n in (256, 512, 1024, 640, 320)] == [61.0, 100.0, 62.0, 140.0, 60.0]
    ratio = records[640].relative_time
    assert ratio is not None and ratio > 1.0, "PyTorch serves it"
    assert {record.provenance.torch for n, record in records.items() if n != 320} == {"2.12.0"}


def test_the_worst_suspects_come_first() -> None:
    here = samples.PROVENANCE
    base = record_of(stored(512, 50.0, 60.0))
    assert base is not None
    away = replace(base, provenance=replace(here, torch="2.6.0", gpu_name="NVIDIA H100"))
    hot = replace(base, provenance=replace(here, conditions=Conditions(samples=9, throttled_by="SwThermalSlowdown", other_processes=0)))
    limited = replace(base, provenance=replace(here, conditions=Conditions(samples=9, throttled_by="SwPowerCap", other_processes=0)))
    assert worst_first([limited, hot, away], here) == [away, hot, limited]
    assert elsewhere(away, here) == ("torch", "card") and elsewhere(limited, here) == ()


def test_without_a_gpu_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "local_gpu", lambda: None)
    path = samples.write(tmp_path / "a.sqlite", (stored(512, 50.0, 60.0),))
    done = flashtune("verify", "--requalify", "--db", str(path))
    assert done.exit_code == 4 and "run it on the records' own GPU" in done.stderr


def test_a_shipped_record_that_was_demoted_stays_so_until_a_newer_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_h200: None
) -> None:
    shipped = samples.write(tmp_path / "shipped.sqlite", (stored(640, 100.0, 110.0),))
    own = tmp_path / "own.sqlite"
    monkeypatch.setattr(library, "shipped_path", lambda: shipped)
    monkeypatch.setenv("FLASHTUNE_OWN_DB", str(own))
    times = {(640, FIRST): 150.0, (640, SECOND): 140.0}
    monkeypatch.setattr(evaluation, "MeasuredEvaluation", lambda *, problem, **_: Planted(problem, times))
    before = shipped.read_bytes()
    done = flashtune("verify", "--requalify", "--json")
    assert done.exit_code == 0, done.output
    assert [row["verdict"] for row in json.loads(done.stdout)["rows"]] == ["demoted"]
    assert shipped.read_bytes() == before
    key = samples.problem(640).key("h200")

    def serves() -> tuple[str, float | None]:
        best = Library.default().best(key)
        assert best is not None
        return choose(samples.problem(640), TARGET, Library.default().records(), families()).kind, best.relative_time

    assert serves() == ("framework", pytest.approx(140.0 / PYTORCH_US))
    # An earlier one, merged in later, changes nothing; a newer measurement counts.
    with Store.open(own, writable=True) as store:
        store.save(replace(stored(640, 90.0, 95.0), provenance=replace(samples.PROVENANCE, created_at="2026-11-26T10:00:00+00:00")))
    assert serves()[0] == "framework"
    with Store.open(own, writable=True) as store:
        store.save(replace(stored(640, 110.0, 115.0), provenance=replace(samples.PROVENANCE, created_at="2026-11-28T10:00:00+00:00")))
    assert serves() == ("exact", pytest.approx(110.0 / PYTORCH_US))
