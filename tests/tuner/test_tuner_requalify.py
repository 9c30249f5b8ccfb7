"""Records are timed again: what is slower than said, slower than a runner-up or slower than PyTorch is found, and gives way."""

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import db_samples as samples
import pytest
from commands import flashtune
from pebble import ProcessExpired

from flashtune.cli import requalify as cli_requalify
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Baseline, Conditions, Fate, Measurement, SearchResult
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.db import library
from flashtune.db.library import Library
from flashtune.db.store import Store
from flashtune.dispatch.policy.choose import Pool, choose
from flashtune.templates import families, family
from flashtune.templates.family import Family
from flashtune.tuner import machine
from flashtune.tuner.children import tasks
from flashtune.tuner.children.workers import Pending, Workers
from flashtune.tuner.propose.space import Candidate, record_of
from flashtune.tuner.replies import Called, Failed, Raced, Timed
from flashtune.tuner.search import evaluation
from flashtune.tuner.search.evaluation import Evaluation
from flashtune.tuner.search.requalify import _contenders, elsewhere, worst_first

TARGET = find_target("h200")
KIND = family("flash_fwd")
FIRST, SECOND = KIND.starts(samples.PROBLEM.spec(), TARGET)[:2]
PYTORCH_US = 120.0
FULL = 0.0
"""Planted time of a kernel that finds no memory, because others use the GPU; negative ones are of wrong kernels."""


def variant(n: int, config: Config) -> str:
    """Id of a kernel of a sample's problem."""
    return Candidate(family=KIND, config=config).variant(samples.problem(n).spec()).id


def stored(n: int, first_us: float, second_us: float) -> SearchResult:
    """A result whose winner and runner-up were timed so, beside PyTorch's 120 us."""
    outcomes = [
        replace(samples.outcome(variant(n, config), us, finalist=True, rank=rank), config=config)
        for rank, (config, us) in enumerate(((FIRST, first_us), (SECOND, second_us)), start=1)
    ]
    return samples.result(*outcomes, framework_us=PYTORCH_US, of=samples.problem(n))


@dataclass
class Planted(Evaluation):
    """A GPU on which kernels take the times of a table."""

    problem: Problem
    times: dict[tuple[int, Config], float]
    raced: list[int] = field(default_factory=list)

    def evaluate(self, candidate: Candidate, facts: Any, incumbent: Any) -> Timed | Failed:
        us = self.times[self.problem.n_kv, candidate.config]
        if us == FULL:
            return Failed(fate=Fate.RUNTIME, reason="OutOfMemoryError: CUDA out of memory", inconclusive=True)
        return Failed(fate=Fate.CORRECTNESS, reason="off", error=3.0) if us < 0 else Timed(time=Measurement.of([us] * 20), error=0.5)

    def race(self, candidates: Sequence[Candidate], *, pytorch: bool) -> tuple[Raced | Failed | None, Conditions | None]:
        self.raced.append(self.problem.n_kv)
        times = [self.times[self.problem.n_kv, candidate.config] for candidate in candidates]
        behind = tuple(us / min(times) - 1 for us in times)
        return Raced(
            times=tuple(Measurement.of([us] * 20) for us in times),
            behind=behind,
            baseline=Baseline(backend="cudnn", measurement=Measurement.of([PYTORCH_US] * 20)),
            began=0.0,
            ended=1.0,
            pid=1,
        ), None

    def call(self, candidates: Sequence[Candidate], *, beside: bool = False) -> Called | None:
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
        assert len(records) == 5
        assert len(store.results()) == 6, "earlier runs are gone, but that of the failed kernel: it may be right again some day"
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


def requalify(monkeypatch: pytest.MonkeyPatch, times: dict[tuple[int, Config], float], *words: str) -> list[dict[str, Any]]:
    """Rows of `verify --requalify` on a GPU where kernels take these times."""
    monkeypatch.setattr(evaluation, "MeasuredEvaluation", lambda *, problem, **_: Planted(problem, times))
    done = flashtune("verify", "--requalify", "--json", *words)
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_h200: None) -> Path:
    """A shipped database with records at two lengths, over which the user's own is still missing."""
    path = samples.write(tmp_path / "shipped.sqlite", (stored(640, 50.0, 52.0), stored(1024, 60.0, 62.0)))
    monkeypatch.setattr(library, "shipped_path", lambda: path)
    monkeypatch.setenv("FLASHTUNE_OWN_DB", str(tmp_path / "own.sqlite"))
    return path


def served(n: int) -> tuple[str, Config | None]:
    """The policy's choice by the records of this machine, as dispatch makes it."""
    known, problem = Library.default(), samples.problem(n)
    pool = Pool(problem.key("h200"), TARGET, known, families(), known.findings)
    choice = choose(problem, TARGET, pool, families())
    return choice.kind, choice.config


def test_a_shipped_kernel_that_is_wrong_here_serves_nothing_until_it_is_measured_again(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served(640) == ("exact", FIRST) and served(700) == ("near_n", FIRST)
    before = shipped.read_bytes()
    rows = requalify(monkeypatch, {(n, config): -1.0 for n in (640, 1024) for config in (FIRST, SECOND)}, "--sample", "1")
    assert [row["verdict"] for row in rows] == ["failed"] and rows[0]["reason"] == "correctness: off"
    assert shipped.read_bytes() == before
    # Its machine code is that of the other lengths, too.
    assert [served(n)[0] for n in (640, 700, 1024)] == ["framework"] * 3
    shown = json.loads(flashtune("show", "--json").stdout)
    assert all("fails on h200: correctness: off" in row["unservable"] for row in shown)
    # Timed again and found right, as after another upgrade, it serves at that length.
    later = replace(samples.PROVENANCE, created_at="2026-11-28T10:00:00+00:00")
    monkeypatch.setattr(machine, "provenance", lambda **_: later)
    rows = requalify(monkeypatch, {(n, config): us for n in (640, 1024) for config, us in ((FIRST, 50.0), (SECOND, 52.0))})
    assert [row["verdict"] for row in rows] == ["confirmed", "updated"]
    assert served(640) == ("exact", FIRST)


def test_doctor_counts_the_records_from_elsewhere_and_names_the_command(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> str:
        checks = json.loads(flashtune("doctor", "--json").stdout)["checks"]
        return next(str(check["found"]) for check in checks if check["name"] == "records")

    monkeypatch.setattr(machine, "local_gpus", lambda: (SimpleNamespace(name="NVIDIA H200", target=TARGET),))
    assert said() == "2 measured records of h200"
    upgraded = replace(samples.PROVENANCE, torch="2.12.0", driver="580.1", created_at="2026-11-27T10:00:00+00:00")
    monkeypatch.setattr(machine, "provenance", lambda **_: upgraded)
    assert "; 2 made with another torch (2; here 2.12.0), driver (2; here 580.1): they are used" in said()
    assert "`flashtune verify --requalify` times them again" in said()
    requalify(monkeypatch, {(n, config): -1.0 for n in (640, 1024) for config in (FIRST, SECOND)}, "--sample", "1")
    assert "the kernels of 2 fail here and aren't used" in said()


def test_a_strangers_candidates_race_before_one_of_them_serves(tmp_path: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is slower than its word, one serves a length that nobody else has, one is wrong."""
    mine = samples.write(tmp_path / "mine.sqlite", (stored(640, 50.0, 90.0),))

    def says(n: int, config: Config) -> SearchResult:
        claim = replace(samples.outcome(variant(n, config), 5.0, finalist=True, rank=1), config=config)
        return samples.result(claim, framework_us=PYTORCH_US, of=samples.problem(n))

    other = samples.write(tmp_path / "other.sqlite", (says(640, SECOND), says(256, FIRST), says(320, SECOND)))
    own = tmp_path / "own.sqlite"
    assert flashtune("merge", str(mine), str(other), "--out", str(own), "--trust", str(mine)).exit_code == 0
    monkeypatch.setattr(machine, "local_gpus", lambda: (SimpleNamespace(name="NVIDIA H200", target=TARGET),))
    assert "2 candidates of strangers wait until" in flashtune("doctor", "--json").stdout
    assert served(640) == ("exact", FIRST) and served(256)[0] != "exact" and served(320)[0] != "exact"
    times = {(640, FIRST): 50.0, (640, SECOND): 60.0, (256, FIRST): 70.0, (320, SECOND): -1.0, (1024, FIRST): 60.0, (1024, SECOND): 62.0}
    rows = requalify(monkeypatch, times)
    assert {row["problem"].split("-")[0][1:] for row in rows[:2]} == {"256", "320"}, "the worst suspects come first"
    assert {row["problem"].split("-")[0][1:]: row["verdict"] for row in rows} == {
        "640": "confirmed",
        "1024": "confirmed",
        "256": "updated",
        "320": "failed",
    }
    assert served(640) == ("exact", FIRST) and served(256) == ("exact", FIRST) and served(320)[0] != "exact"


def test_of_a_wrong_winner_the_runner_up_takes_the_place(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = requalify(monkeypatch, {(n, config): us for n in (640, 1024) for config, us in ((FIRST, -1.0), (SECOND, 63.0))})
    assert [(row["verdict"], row["reason"]) for row in rows] == [("updated", "correctness: off")] * 2
    assert served(640) == ("exact", SECOND) and served(700) == ("near_n", SECOND)


@pytest.mark.parametrize("stage", ["compile", "constraint"])
def test_a_kernel_that_no_longer_compiles_or_fits_does_not_serve(shipped: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    if stage == "compile":
        compiled = Failed(fate=Fate.COMPILE, reason="CompilationError: no such layout")
        monkeypatch.setattr(Planted, "compiled", lambda self, candidate: compiled if candidate.config == FIRST else None)
    else:
        kept = Family.unfit
        monkeypatch.setattr(Family, "unfit", lambda self, config, *given: "too wide" if config == FIRST else kept(self, config, *given))
    rows = requalify(monkeypatch, {(n, SECOND): 63.0 for n in (640, 1024)})
    assert {row["verdict"] for row in rows} == {"updated"} and all(row["reason"].startswith(stage) for row in rows)
    assert served(640) == ("exact", SECOND)


@pytest.mark.parametrize("cause", ["memory", "race", "inputs"])
def test_a_fault_of_the_machine_is_no_verdict_and_the_record_stays(shipped: Path, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    times = {(n, config): us for n in (640, 1024) for config, us in ((FIRST, 50.0), (SECOND, 52.0))}
    if cause == "memory":
        times |= {(n, FIRST): FULL for n in (640, 1024)}
    elif cause == "race":
        monkeypatch.setattr(
            Planted, "race", lambda *_, **__: (Failed(fate=Fate.TIMEOUT, reason="killed after 16 s", inconclusive=True), None)
        )
    else:

        def full(*_: Any) -> None:
            raise EnvironmentProblem("the GPU can't take it: free its memory")

        monkeypatch.setattr(Planted, "evaluate", full)
    rows = requalify(monkeypatch, times)
    assert {row["verdict"] for row in rows} == {"undecided"}
    said = {"memory": "out of memory", "race": "killed after 16 s", "inputs": "free its memory"}
    assert all(said[cause] in row["reason"] and row["best_variant"] is None for row in rows)
    assert served(640) == ("exact", FIRST) and Library.default().findings == {}


def test_a_kernel_that_pytorch_cannot_be_timed_beside_keeps_its_record(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raced = Planted.race

    def alone(self: Planted, racers: Sequence[Candidate], *, pytorch: bool) -> tuple[Raced, None]:
        found, _ = raced(self, racers, pytorch=pytorch)
        assert isinstance(found, Raced)
        return replace(found, baseline=None), None

    monkeypatch.setattr(Planted, "race", alone)
    rows = requalify(monkeypatch, {(n, config): us for n in (640, 1024) for config, us in ((FIRST, 50.0), (SECOND, -1.0))})
    assert {row["verdict"] for row in rows} == {"undecided"} and "PyTorch could not be timed" in rows[0]["reason"]
    assert served(640) == ("exact", FIRST)
    assert {one.variant_id for one in Library.default().findings.values()} == {variant(640, SECOND)}


def test_a_budget_bounds_the_records_and_kernels_are_compiled_ahead(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []
    monkeypatch.setattr(Planted, "compile", lambda self, facts: order.append((f"compile {len(facts)}", self.problem.n_kv)))
    timed = Planted.race

    def race(self: Planted, racers: Sequence[Candidate], *, pytorch: bool) -> Any:
        order.append(("race", self.problem.n_kv))
        return timed(self, racers, pytorch=pytorch)

    monkeypatch.setattr(Planted, "race", race)
    times = {(n, config): us for n in (640, 1024) for config, us in ((FIRST, 50.0), (SECOND, 52.0))}
    requalify(monkeypatch, times)
    assert [what for what, _ in order] == ["compile 2", "compile 2", "race", "race"]
    clock = iter([0.0, 1.0, 100.0])
    monkeypatch.setattr(cli_requalify, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(evaluation, "MeasuredEvaluation", lambda *, problem, **_: Planted(problem, times))
    done = json.loads(flashtune("verify", "--requalify", "--json", "--budget", "1m").stdout)
    assert len(done["rows"]) == 1 and done["left"] == 1
    assert flashtune("verify", "--budget", "1m").exit_code == 2


def test_only_runners_up_near_the_fastest_of_their_run_race(shipped: Path) -> None:
    result = stored(512, 50.0, 54.0)
    far = stored(512, 50.0, 56.0)
    record = record_of(result)
    assert record is not None
    assert [one.config for one, _ in _contenders(record, [result])][1:] == [FIRST, SECOND]
    assert [one.config for one, _ in _contenders(record, [far])][1:] == [FIRST]


@pytest.mark.parametrize(
    ("error", "inconclusive"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (OSError(28, "No space left on device"), True),
        (ValueError("the kernel doesn't accept these inputs"), False),
        (EnvironmentProblem("no cuobjdump"), True),
    ],
)
def test_errors_of_the_machine_are_told_from_the_kernels(error: Exception, inconclusive: bool) -> None:
    assert tasks.failed_on_device(error).inconclusive is inconclusive


@pytest.mark.parametrize(
    ("crew", "ended", "inconclusive"),
    [("compile", -signal.SIGKILL, True), ("compile", -signal.SIGSEGV, False), ("device", -signal.SIGSEGV, True), ("device", 1, True)],
)
def test_a_killed_process_says_nothing_of_the_kernel_and_a_crashed_compiler_does(crew: Any, ended: int, inconclusive: bool) -> None:
    def result() -> None:
        raise ProcessExpired("abnormal termination", code=ended)

    future: Any = SimpleNamespace(result=result)
    reply = Pending(Workers(jobs=1), crew, 0, future, 60.0).reply()
    assert isinstance(reply, Failed) and reply.inconclusive is inconclusive and "died" in reply.reason
