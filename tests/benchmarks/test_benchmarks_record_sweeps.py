"""The case `record_sweeps`: a run with simulated devices leaves sweeps that the case `sweeps` replays."""

from pathlib import Path

import pytest
import staged_searches

from benchmarks.cases import record_sweeps, sweeps
from flashtune.core.gpu.target import find_target
from flashtune.core.records.results import Fate
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.tuner.propose.space import SearchSpace

devices = staged_searches.devices

H100 = find_target("h100")
TRIALS = 24


@pytest.fixture
def recorded(devices: Path) -> Path:
    """A database of two problems' sweeps."""
    path = devices / "sweeps-h100.sqlite"
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
