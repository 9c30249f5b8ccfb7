"""The case `record_sweeps`: a run with simulated devices leaves sweeps that the case `sweeps` replays."""

from pathlib import Path

import pytest
import simulated
from simulated import NoWatch

from benchmarks.cases import record_sweeps, sweeps
from flashtune.core.results import Fate
from flashtune.core.target import find_target
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.tuner.children import tasks
from flashtune.tuner.propose.space import SearchSpace
from flashtune.tuner.search import evaluation

H100 = find_target("h100")
TRIALS = 24


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of two problems' sweeps."""
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
    path = tmp_path / "sweeps-h100.sqlite"
    problems = tuple(record_sweeps.PROBLEMS[name] for name in ("step-shared", "backward-mask"))
    record_sweeps.record(problems, H100, path, trials=TRIALS, budget_s=3600.0, jobs=1)
    return path


def test_recorded_sweeps_are_replayed(recorded: Path) -> None:
    with Store.open(recorded, writable=False) as store:
        results = store.results()
    assert {result.problem.label() for result in results} == {record_sweeps.PROBLEMS[n].label() for n in ("step-shared", "backward-mask")}
    for result in results:
        assert len(result.outcomes) == TRIALS and {outcome.fate for outcome in result.outcomes} == {Fate.CORRECT}
        assert all(outcome.facts is not None and outcome.measurement is not None for outcome in result.outcomes)
        place = sweeps.Swept(result)
        run = sweeps.replayed(place, "random", "none", TRIALS, 0)
        assert place.size == TRIALS and run.regrets[-1] == 0.0 < run.regrets[0]


@pytest.mark.parametrize("name", record_sweeps.PROBLEMS)
def test_every_problem_has_hundreds_of_valid_candidates(name: str) -> None:
    assert sum(1 for _ in SearchSpace(families(), record_sweeps.PROBLEMS[name], H100).every()) > 450
