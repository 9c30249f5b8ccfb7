"""A whole search on this machine: planted faults cost one trial each, and a right candidate wins."""

import multiprocessing
from dataclasses import replace

import optuna
import pytest
from planted import PATIENT, PLANTED_PROBLEM, Listener, planted_family

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features
from flashtune.core.records.results import Fate, Provenance, SearchResult
from flashtune.core.system.errors import NoKernelFound
from flashtune.templates import families
from flashtune.tuner.children.workers import Limits
from flashtune.tuner.search.plan import SearchPlan
from flashtune.tuner.searching import Search

PROVENANCE = Provenance(flashtune="0", torch="0", triton="0")


def run(
    kinds: list[str], listener: Listener, *, storage: optuna.storages.BaseStorage | None = None, limits: Limits = PATIENT
) -> list[SearchResult]:
    plan = SearchPlan(
        target=find_target("a100"),
        problems=(PLANTED_PROBLEM,),
        families={f"planted_{kind}": planted_family(kind) for kind in kinds},
        source="predicted",
        trials=20,
        seed=1,
        jobs=2,
        limits=limits,
    )
    saved: list[SearchResult] = []
    Search(plan, storage=storage or optuna.storages.InMemoryStorage(), provenance=PROVENANCE, save=saved.append, listener=listener).run()
    return saved


@pytest.mark.usefixtures("planted")
def test_a_crash_and_wrong_numbers_each_cost_one_trial_and_a_right_candidate_wins() -> None:
    kinds = ["crash", "wrong", "unwritten", "raises", "broken", "unrendered", "compiler_crash", "right"]
    [result] = run(kinds, Listener())
    fates = {outcome.template.removeprefix("planted_"): outcome.fate for outcome in result.outcomes}
    assert fates == {
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
def test_a_hang_costs_one_trial_and_a_search_without_a_right_candidate_says_so_and_keeps_the_outcomes() -> None:
    """A machine that is slow to start the interpreter reaches the limit before the hang does, to the same end."""
    listener = Listener()
    with pytest.raises(NoKernelFound, match=r"no correct kernel found for .*: killed after 1 s"):
        run(["hang"], listener, limits=replace(PATIENT, interpret_s=1.0))
    assert [outcome.fate for outcome in listener.trials] == [Fate.TIMEOUT]
    assert "killed after 1 s" in listener.trials[0].reason


def test_no_process_is_left_behind() -> None:
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


@pytest.fixture(scope="module")
def seeded() -> list[list[SearchResult]]:
    """The same predicted search of the real families, twice."""
    problems = (replace(PLANTED_PROBLEM, n_q=512, n_kv=512, d=64, d_v=64, dtype="fp16", features=Features(causal=True)),)
    plan = SearchPlan(
        target=find_target("a100"), problems=problems, families=families(), source="predicted", trials=3, seed=7, jobs=2, limits=PATIENT
    )
    found: list[list[SearchResult]] = []
    for _ in range(2):
        saved: list[SearchResult] = []
        Search(plan, storage=optuna.storages.InMemoryStorage(), provenance=PROVENANCE, save=saved.append, listener=Listener()).run()
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
        assert len(result.outcomes) == 3
