"""Regressions over trials: what ships is of those at hand, and first choices lose little without those of the same sizes and features."""

import math
import random
import statistics
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks.fit import residual as fit
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates.learned.forwards import FORWARDS
from flashtune.templates.learned.gradients import GRADIENTS
from flashtune.templates.learned.residual import Likeness
from flashtune.templates.learned.steps import STEPS

DRAWN = 60
"""Forwards with features whose choices are looked at, since each takes a regression of its own."""


@cache
def trials(likeness: Likeness) -> list[fit.Observed]:
    rows, runs = fit.all_trials(likeness)
    return [*rows, *(one for _, one in runs)]


@pytest.mark.parametrize("likeness", [FORWARDS, STEPS, GRADIENTS], ids=["forwards", "steps", "gradients"])
def test_what_ships_was_learned_from_the_trials_at_hand_by_the_model_of_today(likeness: Likeness) -> None:
    with np.load(fit.FOLDER / likeness.file) as kept:
        shipped = dict(kept)
    anew, covariance, sample = fit.prepared(likeness, trials(likeness), sample=200)
    advice = "run benchmarks/run.py fit_residual --write"
    assert shipped.keys() == {*anew, "trials", "weights"} and shipped["trials"] == fit.digest(trials(likeness)), advice
    for name, values in anew.items():
        np.testing.assert_allclose(shipped[name], values, rtol=1e-3, atol=1e-4, err_msg=advice)
    # The weights solve covariance @ weights = wrong: a sample of its rows says so without solving anew.
    np.testing.assert_allclose(covariance @ shipped["weights"], anew["wrong"][sample], atol=1e-4, err_msg=advice)
    assert len(shipped["weights"]) > {FORWARDS: 5000, STEPS: 3000, GRADIENTS: 1500}[likeness]


@pytest.mark.parametrize(
    ("likeness", "bounds"),
    [(STEPS, {"plain": 0.08, "with features": 0.08}), (GRADIENTS, {"plain": 0.05, "with features": 0.05, "packed": 0.10})],
)
def test_first_choices_lose_little_without_a_record_of_the_same_sizes_and_features(likeness: Likeness, bounds: dict[str, float]) -> None:
    """By the cost model alone a tenth loses over 20 % of decoding steps and over 75 % of backwards."""
    every = trials(likeness)
    others = fit.LeftOut(likeness, every)
    assert fit.kinds(every).keys() == bounds.keys()
    for kind, places in fit.kinds(every).items():
        by_trials = [rate for place in places for rate in fit.chosen(likeness, every[place], others.without(every[place].problem))]
        by_model = fit.rates([every[place] for place in places], fit.unlearned, fit.LEAST[likeness])
        assert len(by_trials) == len(by_model) > (6 if kind == "packed" else 30)
        assert fit.percentile(by_trials) <= bounds[kind] < fit.percentile(by_model)


def test_first_choices_of_forwards_with_features_lose_little_without_their_neighbours() -> None:
    every = trials(FORWARDS)
    places = [place for place in fit.kinds(every)["with features"] if len(every[place].wrong) >= fit.LEAST[FORWARDS]]
    drawn = [every[place] for place in random.Random(0).sample(places, DRAWN)]
    shares = [rate for one in drawn for rate in fit.chosen(FORWARDS, one, fit.without_neighbours(FORWARDS, every, one.problem, 600))]
    assert len(shares) > 0.8 * DRAWN and fit.percentile(shares) <= 0.08
    assert fit.percentile(shares) < fit.percentile(fit.rates(drawn, fit.unlearned))


def test_first_choices_of_packed_forwards_lose_little_without_their_neighbours_dense_or_packed() -> None:
    """Learned from dense trials alone, and with tiles counted by the mean length, a tenth lost 9 %."""
    every = trials(FORWARDS)
    packed = [every[place] for place in fit.kinds(every)["packed"] if len(every[place].wrong) >= fit.RANKED_OF]
    shares = [rate for one in packed for rate in fit.chosen(FORWARDS, one, fit.without_neighbours(FORWARDS, every, one.problem, 600))]
    assert len(shares) == len(packed) > 15 and fit.percentile(shares) <= 0.05
    assert fit.percentile(shares) < fit.percentile(fit.rates(packed, fit.unlearned))


def test_rankings_are_of_problems_with_enough_trials_and_equal_predictions_choose_their_mean() -> None:
    one = next(one for one in trials(GRADIENTS) if len(one.logs) >= fit.RANKED_OF)
    perfect = [math.log(one.times[tried]) - log for tried, log in one.logs.items()]
    assert "1 problems" in (best := fit.ranked([one], [perfect])) and "mean 0.0%" in best and best.endswith("Spearman 1.00")
    told_nothing = fit.ranked([one], [[-log for log in one.logs.values()]])
    loss = statistics.fmean(one.times[tried] for tried in one.logs) / min(one.times[tried] for tried in one.logs) - 1
    assert f"mean {loss:.1%}" in told_nothing and told_nothing.endswith("Spearman 0.00")
    few = one._replace(logs=dict(list(one.logs.items())[: fit.RANKED_OF - 1]))
    assert fit.ranked([few], [[0.0] * len(few.logs)]) == f"no problem has {fit.RANKED_OF} trials"


def test_regressions_are_without_the_problem_and_its_neighbours() -> None:
    one = Problem(batch=2, heads=8, kv_heads=8, n_q=1000, n_kv=1000, d=64, d_v=64, dtype="bf16", features=Features(causal=True))
    packed = replace(one, features=Features(causal=True, packed=True))
    near = [replace(one, n_q=1900, n_kv=1900), replace(one, dtype="fp16"), replace(one, heads=32), packed]
    far = [replace(one, n_q=2000, n_kv=2000), replace(one, features=Features()), replace(one, d=128), replace(one, direction="bwd")]
    assert all(fit.neighbours(one, problem) for problem in [one, *near])
    assert not any(fit.neighbours(one, problem) for problem in far)
    every = trials(STEPS)
    mine = every[0].problem
    known = fit.without_neighbours(STEPS, every, mine, 300)
    gone = [one for one in every if fit.neighbours(one.problem, mine)]
    left = {tuple(np.array(STEPS.problem(one.problem), dtype=np.float32).tolist()) for one in gone}
    assert gone and not left & {tuple(row) for row in known._problems.tolist()}
