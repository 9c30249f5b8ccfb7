"""A whole search on this machine: planted faults cost one trial each, a right candidate wins, and interrupted searches resume."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from jinja2 import ChoiceLoader
from planted import planted_family, planted_templates

from flashtune.core.errors import NoKernelFound
from flashtune.core.problem import Features, Problem
from flashtune.core.results import Fate, Outcome, Provenance, SearchResult
from flashtune.core.target import find_target
from flashtune.templates import families, rendering
from flashtune.tuner.search import Search, SearchPlan
from flashtune.tuner.workers import Limits

PROBLEM = Problem(batch=1, heads=2, kv_heads=2, n_q=64, n_kv=64, d=16, d_v=16, dtype="fp32")
PROVENANCE = Provenance(flashtune="0", torch="0", triton="0")
SHORT = Limits(interpret_s=25.0, compile_s=60.0)


class Quiet:
    """A listener that keeps what it hears; `stop_after` trials it interrupts the search as Ctrl-C does."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.trials: list[Outcome] = []
        self.resumed: list[int] = []
        self.stop_after = stop_after

    def problem_started(self, problem: Problem, index: int, total: int, resumed: int) -> None:
        self.resumed.append(resumed)

    def trial_finished(self, outcome: Outcome, incumbent: Outcome | None) -> None:
        self.trials.append(outcome)
        if self.stop_after is not None and len(self.trials) == self.stop_after:
            raise KeyboardInterrupt

    def problem_finished(self, result: SearchResult) -> None:
        pass


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    environment = rendering.environment()
    monkeypatch.setattr(environment, "loader", ChoiceLoader([planted_templates(), environment.loader]))
    yield
    rendering.sources_hash.cache_clear()
    rendering._text_hash.cache_clear()


def run(kinds: list[str], listener: Quiet, *, trials: int = 20, storage: optuna.storages.BaseStorage | None = None) -> list[SearchResult]:
    plan = SearchPlan(
        target=find_target("a100"),
        problems=(PROBLEM,),
        families={f"planted_{kind}": planted_family(kind) for kind in kinds},
        source="predicted",
        trials=trials,
        seed=1,
        jobs=2,
        limits=SHORT,
    )
    saved: list[SearchResult] = []
    Search(plan, storage=storage or optuna.storages.InMemoryStorage(), provenance=PROVENANCE, save=saved.append, listener=listener).run()
    return saved


@pytest.mark.usefixtures("planted")
def test_a_hang_a_crash_and_wrong_numbers_each_cost_one_trial_and_a_right_candidate_wins() -> None:
    kinds = ["hang", "crash", "wrong", "unwritten", "raises", "broken", "unrendered", "compiler_crash", "right"]
    [result] = run(kinds, Quiet())
    fates = {outcome.template.removeprefix("planted_"): outcome.fate for outcome in result.outcomes}
    assert fates == {
        "hang": Fate.TIMEOUT,
        "crash": Fate.RUNTIME,
        "wrong": Fate.CORRECTNESS,
        "unwritten": Fate.CORRECTNESS,
        "raises": Fate.RUNTIME,
        "broken": Fate.COMPILE,
        "unrendered": Fate.COMPILE,
        "compiler_crash": Fate.COMPILE,
        "right": Fate.CORRECT,
    }
    assert len(result.outcomes) == len(kinds)
    assert result.best is not None
    assert result.best.template == "planted_right"
    assert all(outcome.reason for outcome in result.outcomes if outcome.fate is not Fate.CORRECT)


@pytest.mark.usefixtures("planted")
def test_a_search_without_a_right_candidate_says_so_and_keeps_the_outcomes() -> None:
    with pytest.raises(NoKernelFound, match="planted"):
        run(["raises"], Quiet())


@pytest.mark.usefixtures("planted")
def test_ctrl_c_keeps_the_trials_and_the_same_search_goes_on(tmp_path: Path) -> None:
    def storage() -> optuna.storages.BaseStorage:
        return optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.sqlite")

    kinds = ["raises", "right", "wrong", "broken"]
    first = Quiet(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        run(kinds, first, storage=storage())
    second = Quiet()
    [result] = run(kinds, second, storage=storage())
    assert second.resumed == [2]
    assert len(second.trials) == 2
    assert len({outcome.variant_id for outcome in result.outcomes}) == 4
    third = Quiet()
    run(kinds, third, storage=storage())
    assert third.resumed == [0], "a finished search starts anew"


def test_no_process_is_left_behind() -> None:
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


@pytest.fixture(scope="module")
def seeded() -> list[list[SearchResult]]:
    """The same predicted search of the real families, twice."""
    problems = tuple(replace(PROBLEM, n_q=n, n_kv=n, d=64, d_v=64, dtype="fp16", features=Features(causal=True)) for n in (512, 2048))
    plan = SearchPlan(target=find_target("a100"), problems=problems, families=families(), source="predicted", trials=6, seed=7, jobs=2)
    found: list[list[SearchResult]] = []
    for _ in range(2):
        saved: list[SearchResult] = []
        Search(plan, storage=optuna.storages.InMemoryStorage(), provenance=PROVENANCE, save=saved.append, listener=Quiet()).run()
        found.append(saved)
    return found


def test_a_seed_makes_a_predicted_search_repeatable(seeded: list[list[SearchResult]]) -> None:
    first, second = seeded
    assert first == second


def test_predicted_winners_are_compiled_checked_and_ranked(seeded: list[list[SearchResult]]) -> None:
    for result in seeded[0]:
        best = result.best
        assert best is not None
        assert best.rank == 1
        assert best.source == "predicted"
        assert best.facts is not None
        assert best.facts.tensor_core_ops > 0
        assert best.max_error is not None
        assert 0 < best.max_error <= 1
        assert result.baseline is None, "nothing of the framework was timed"
        assert len(result.outcomes) == 6
