"""The committed sweeps, replayed: what the cost model and the search are worth, without a GPU."""

import math
from functools import cache
from statistics import geometric_mean, median

import numpy as np
import pytest

from benchmarks.cases import stops, sweeps
from benchmarks.fit import ranges
from benchmarks.shared.earlier import EARLIER, completed
from benchmarks.shared.trials import todays
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Fate, SearchResult
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates import family
from flashtune.templates.cost import predict_us
from flashtune.templates.expected import RANGES, left_out, likely


@pytest.fixture
def sweep(request: pytest.FixtureRequest) -> SearchResult:
    """The sweep whose place is the parameter; not read before a test needs it, since every worker collects this file."""
    return sweeps.sweeps()[request.param]


IN_FULL, SAMPLED = 4, 7
"""Sweeps of all candidates of earlier kernels, and of random ones of today's."""

of_every_sweep = pytest.mark.parametrize("sweep", range(IN_FULL + SAMPLED), indirect=True)
of_every_full_sweep = pytest.mark.parametrize("sweep", range(IN_FULL), indirect=True)


def test_problems_of_several_kinds_were_swept() -> None:
    assert len(sweeps.sweeps()) == IN_FULL + SAMPLED
    labels = {sweep.problem.label() for sweep in sweeps.sweeps()[IN_FULL:]}
    assert {
        "n3000-d128-bf16-causal-bwd",
        "n6000-d128-bf16-causal+window500",
        "n3000-d96-fp16-causal",
        "n1500-d64-bf16-full+mask-bwd",
    } < labels
    assert sum(label.startswith("n1x") for label in labels) == 2
    for sweep in sweeps.sweeps():
        assert len(sweep.outcomes) > 200
        assert len({outcome.variant_id for outcome in sweep.outcomes}) == len(sweep.outcomes)
        assert {outcome.fate for outcome in sweep.outcomes} <= set(Fate)
        assert sweep.baseline is not None


@of_every_full_sweep
def test_the_cost_models_first_ten_hold_a_config_within_5_percent_of_the_best(sweep: SearchResult) -> None:
    assert sweeps.cost_ratio(sweep) <= 1.05


SLOW = "n1500-d64-bf16-full+mask-bwd"
"""A problem of which trials of others tell the least: it takes 40 trials."""


TO_FORTY = [3, 4, 7, 9]
"""A full forward, the slow backward, a decoding step and a causal one; the benchmark looks at all."""


@cache
def replayed(place: int, seed: int) -> sweeps.Run:
    """A search of a sweep without any start: of TO_FORTY 40 trials, of others until its rule ends it, which it does in 40 as well."""
    swept = sweeps.swept(sweeps.sweeps()[place])
    return sweeps.replayed(swept, "gp", "none", 40, seed) if place in TO_FORTY else stops.stopped(swept, "none", seed)


@pytest.mark.parametrize("place", TO_FORTY)
def test_twenty_trials_without_any_start_or_near_trial_find_a_config_within_half_a_percent(place: int) -> None:
    """In the median of seeds: noise in the times differs, and so do the proposals, nothing learned of the problem or its neighbours."""
    slow = sweeps.sweeps()[place].problem.label() == SLOW
    regrets = [replayed(place, seed).regrets for seed in range(5 if slow else 3)]
    at_20, at_40 = (median(found[count - 1] for found in regrets) for count in (20, 40))
    assert at_40 <= (0.007 if slow else 0.002) and (slow or at_20 <= 0.005)


def test_kernel_tuners_strategies_try_a_sweeps_candidates() -> None:
    pytest.importorskip("kernel_tuner")
    place = sweeps.swept(sweeps.sweeps()[1])
    runs = [sweeps.replayed(place, "kernel_tuner:random_sample", "none", 20, seed) for seed in range(3)]
    for run in runs:
        assert len(run.regrets) == 20 and list(run.regrets) == sorted(run.regrets, reverse=True) and 0 <= run.regrets[-1] < run.regrets[0]
    [row] = sweeps.summary(runs)
    assert (row["sampler"], row["sweep"], row["seeds"]) == ("kernel_tuner:random_sample", place.label, 3)
    assert row["median at 20"] == f"{sorted(run.regrets[-1] for run in runs)[1]:.2%}"


def test_searches_stop_close_to_the_best_and_know_of_a_regret() -> None:
    """Among the stops with a regret, since for the others nothing is left to be known."""
    ends = [replayed(place, seed).stop for place in range(len(sweeps.sweeps())) for seed in range(2)]
    regrets = sorted(stop.regret for stop in ends)
    assert regrets[-2] <= 0.02 and regrets[-1] <= 0.025 and all(stop.trials <= 40 for stop in ends)
    assert stops.share(ends) >= 0.8


def test_a_percentile_is_judged_by_stops_with_a_regret_alone_and_its_factor_needs_enough_of_them() -> None:
    sampled = np.linspace(0.0, 0.01, 101)
    ends = [sweeps.Stop(trials=9, regret=regret, sampled=sampled) for regret in (0.0, 0.0, 0.004, 0.018)]
    assert stops.share(ends) == 0.5 and math.isnan(stops.share(ends[:2])) and stops.factor_of(ends) == math.inf
    many = [sweeps.Stop(trials=9, regret=number / 1000, sampled=sampled) for number in range(1, 20)]
    assert stops.factor_of(many) == pytest.approx(2.0) and stops.share(many, 2.0) >= 0.9


def test_a_replayed_search_begins_with_todays_starts_but_for_those_that_are_struck() -> None:
    place = sweeps.swept(sweeps.sweeps()[0])
    times = {(c.family.name, c.config): place.regret([place.answers[c.family.name, c.config]]) for c in place.space.every()}
    fifth = sorted(times.values())[4]
    kept = place.starts(5)
    assert set(kept) < set(place.starts())
    assert all(times[c.family.name, c.config] > fifth for c in kept)
    assert place.starts(10**6) == []


@of_every_sweep
def test_the_space_is_not_flat(sweep: SearchResult) -> None:
    """The promises above mean something: half of the candidates are at least 20 % slower than the best, of decoding steps, whose limit is
    memory, 5 %."""
    times = sorted(outcome.measurement.median_us for outcome in sweep.outcomes if outcome.measurement is not None)
    assert times[len(times) // 2] > (1.05 if sweep.problem.n_q == 1 or sweep.problem.features.mask == "bool" else 1.2) * times[0]


def test_settled_maxima_are_predicted_to_gain_what_they_were_measured_to_gain() -> None:
    """Every pair of trials of the shipped rows that differs in nothing else."""
    target = find_target("h200")
    measured, predicted = [], []
    with Store.open(shipped_path(), writable=False) as store:
        results = store.results()
    for result in results:
        known = {o.config: (o.measurement.median_us, o.facts) for o in result.outcomes if o.measurement is not None and o.facts is not None}
        for config, (time, facts) in known.items():
            if config.get("maximum", "") == "running" and (first := config.replace(maximum="first")) in known:
                measured.append(time / known[first][0])
                gain = predict_us(config, facts, result.problem, target) / predict_us(first, known[first][1], result.problem, target)
                # To settle costs what it is for tiles of a few blocks, as many rows' are.
                predicted.append(gain * math.exp(left_out(config, result.problem) - left_out(first, result.problem)))
    assert len(measured) > 90
    assert geometric_mean(predicted) == pytest.approx(geometric_mean(measured), rel=0.03)


@pytest.mark.parametrize(("d", "block_m", "block_n", "measured"), [(64, 192, 128, 1.10), (128, 128, 128, 0.95), (256, 128, 64, 0.99)])
def test_asking_for_maxima_first_is_predicted_to_gain_where_products_hide_it(d: int, block_m: int, block_n: int, measured: float) -> None:
    """Running maxima, full, N = 4096, against `grown`, as measured (benchmarks/results/2026-11-23-h200-scores/outgrown_first.txt)."""
    target, hopper = find_target("h200"), family("flash_fwd_hopper")
    problem = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=d, d_v=d, dtype="bf16")
    config = hopper.default(problem.spec(), target).replace(
        BLOCK_M=block_m, BLOCK_N=block_n, num_stages=2, ctas_per_sm=1, maximum="running", pingpong=True, rescale="grown"
    )
    facts = hopper.expected(config, problem.spec(), target)
    assert facts is not None
    times = [predict_us(config.replace(rescale=how), facts, problem, target) for how in ("outgrown", "grown")]
    assert times[0] / times[1] == pytest.approx(measured, abs=0.05)


SIZES = dict(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16")


def test_archived_configs_have_former_names_and_are_read_under_todays() -> None:
    kind = family("flash_fwd_hopper")
    with Store.open(sweeps.SWEEPS[0] / "h200-n4096-d128-bf16-causal.sqlite", writable=False) as store:
        configs = [o.config for result in store.results() for o in result.outcomes if o.template == kind.name]
    assert any("lookahead" in config for config in configs)
    for config in configs:
        tried = todays(kind.name, config)
        assert (tried is None) == (config.get("lookahead", 0) == 2)
        if tried is not None:
            kind.validate(tried[1])


@pytest.mark.parametrize("name", EARLIER)
def test_a_config_of_an_archived_run_becomes_todays(name: str) -> None:
    kind, earlier = family(name), EARLIER[name]
    default = kind.default(Problem(**SIZES, direction="bwd" if "_bwd" in name else "fwd").spec(), find_target("h200"))
    assert completed(name, default) is default
    for axis, value in earlier.added.items():
        before = Config.of({one: kept for one, kept in default.items if one != axis})
        assert completed(name, before) == completed(name, default.replace(**{axis: value}))
    for axis, values in earlier.retired.items():
        assert all(completed(name, default.replace(**{axis: value})) == default for value in values)
        assert todays(name, default.replace(**{axis: "other"})) is None
    for axis, (value, other, where) in earlier.merged.items():
        assert completed(name, default.replace(**{axis: value, **where})) == default.replace(**{axis: other, **where})


def test_measured_times_lie_in_the_ranges_that_predictions_are_shown_with() -> None:
    """Eight of ten of each generic family with enough problems, and what is said in words."""
    for name, found in ranges.ratios().items():
        low, about, high = RANGES[name]
        if len(found) > 30:
            assert 0.75 <= np.mean([low <= ratio <= high for ratio in found]) <= 0.85
            assert about == pytest.approx(median(found), rel=0.05)
    assert str(likely("flash_fwd", "fwd", 50.0)) == "about 70 us, likely 52 to 108"
    assert likely("flash_bwd_hopper", "bwd", 50.0) == likely("flash_bwd", "bwd", 50.0)
