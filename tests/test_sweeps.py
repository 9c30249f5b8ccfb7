"""The committed sweeps, replayed: what the cost model and the search are worth, without a GPU."""

import sys
from pathlib import Path

import pytest

from flashtune.core.results import Fate, SearchResult

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import replay

SWEEPS = replay.sweeps()


def test_four_problems_were_swept_in_full() -> None:
    assert len(SWEEPS) == 4
    for sweep in SWEEPS:
        assert len(sweep.outcomes) > 400
        assert len({outcome.variant_id for outcome in sweep.outcomes}) == len(sweep.outcomes)
        assert {outcome.fate for outcome in sweep.outcomes} <= set(Fate)
        assert sweep.baseline is not None


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.problem.label())
def test_the_cost_models_first_ten_hold_a_config_within_5_percent_of_the_best(sweep: SearchResult) -> None:
    assert replay.cost_ratio(sweep) <= 1.05


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.problem.label())
def test_sixty_trials_find_a_config_within_3_percent_of_the_best(sweep: SearchResult) -> None:
    assert replay.strategy_ratio(sweep, "tpe", 60, seed=0) <= 1.03


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.problem.label())
def test_the_space_is_not_flat(sweep: SearchResult) -> None:
    """The promises above mean something: half of the candidates are at least 20 % slower than the best."""
    times = sorted(outcome.measurement.median_us for outcome in sweep.outcomes if outcome.measurement is not None)
    assert times[len(times) // 2] > 1.2 * times[0]
