"""The samplers: every valid candidate is within reach, none is proposed twice, and what is left to gain shrinks as more is known."""

import itertools
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from flashtune.cli.search import search
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.errors import InputError
from flashtune.templates import families, family
from flashtune.tuner.propose.sampling import OWN, sampler_of
from flashtune.tuner.propose.space import Candidate, Candidates, SearchSpace
from flashtune.tuner.propose.surrogate import NOISE, Surrogate

PROBLEM = Problem(batch=4, heads=16, kv_heads=16, n_q=1024, n_kv=1024, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
TARGET = find_target("h200")
WIDEST = 512
"""Head size of families that take no smaller ones."""
FEWER = {"BLOCK_M": (64, 128, 256), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "LOAD_V_EARLY": (False,)}


def space(**values: tuple[int | str | bool, ...]) -> SearchSpace:
    """A space of `flash_fwd` with these values of axes, and the starts that have them."""
    chosen = family("flash_fwd")
    axes = tuple(axis._replace(values=(FEWER | values).get(axis.name, axis.values)) for axis in chosen.axes)

    def starts(spec: KernelSpec, target: Target) -> list[Config]:
        return [config for config in chosen.tried_first(spec, target) if all(config[axis.name] in axis.values for axis in axes)]

    return SearchSpace({chosen.name: replace(chosen, axes=axes, tried_first=starts)}, PROBLEM, TARGET)


SPACE = space()


def times(pool: Candidates) -> dict[Candidate, float]:
    """Times that are the cost model's, off by some that nearby candidates share."""
    off = 0.1 * np.sin(pool.features.sum(axis=1)) + 0.3
    return {candidate: float(math.exp(log + error)) for candidate, log, error in zip(pool.candidates, pool.log_times, off, strict=True)}


@pytest.mark.parametrize("name", [name for name in families() if name != "flash_fwd_hopper"])
def test_a_space_is_what_its_constraints_leave_of_all_combinations(name: str) -> None:
    """Constraints are asked of the axes that they say they read, and of nothing else."""
    chosen = families()[name]
    # Combinations of a few values of each axis, so that all of them can be tried one by one.
    few = replace(chosen, axes=tuple(axis._replace(values=axis.values[:3]) for axis in chosen.axes))
    sizes = {"d": WIDEST, "d_v": WIDEST} if chosen.supports(replace(PROBLEM, direction=chosen.direction).spec(), TARGET) else {}
    spec = replace(PROBLEM, direction=chosen.direction, **sizes).spec()
    assert chosen.supports(spec, TARGET) is None
    names = [axis.name for axis in few.axes]
    every = [Config.of(dict(zip(names, values, strict=True))) for values in itertools.product(*(axis.values for axis in few.axes))]
    assert list(few.configs(spec, TARGET)) == [config for config in every if few.violated(config, spec, TARGET) is None]


def test_the_hopper_space_is_what_its_constraints_leave_of_drawn_combinations() -> None:
    chosen, spec, rng = family("flash_fwd_hopper"), PROBLEM.spec(), np.random.default_rng(0)
    found = set(chosen.configs(spec, TARGET))
    near = [config.replace(**{axis.name: axis.values[rng.integers(len(axis.values))]}) for config in found for axis in chosen.axes[:4]]
    assert all((config in found) == (chosen.violated(config, spec, TARGET) is None) for config in near)
    tried = {candidate.config for candidate in SearchSpace({chosen.name: chosen}, PROBLEM, TARGET).every()}
    assert 900 < len(tried) < 1100 and tried == {config for config in found if config["packed_heads"] == 1}


@pytest.mark.parametrize("kind", [*OWN])
def test_a_sampler_proposes_each_valid_candidate_once_and_then_nothing(kind: str) -> None:
    # A process of Optuna's takes longer the more it has been told.
    fewer = {"num_stages": (2, 3, 4)} if "GP" in kind or "Cma" in kind else {}
    small = space(maxnreg=(0,), ORDER=("longest_first",), **fewer)
    if "Cma" in kind:
        pytest.importorskip("cmaes")
    sampler = sampler_of(kind, small, PROBLEM, seed=3)
    answers = times(sampler.pool)
    told: dict[Candidate, float | None] = {}
    while batch := sampler.propose(7, told, ()):
        assert not told.keys() & set(batch)
        told |= {candidate: answers[candidate] if len(told) % 5 else None for candidate in batch}
    assert set(told) == set(small.every())
    assert sampler.left_to_gain(told) in (0.0, math.inf)


def test_random_draws_are_even() -> None:
    sampler = sampler_of("random", SPACE, PROBLEM, seed=None, starts=())
    drawn = Counter(sampler.propose(1, {}, ())[0] for _ in range(20 * len(sampler.pool)))
    # With 124 candidates and a mean of 20, a fair draw leaves none below 2 in a million runs.
    assert len(drawn) == len(sampler.pool) and min(drawn.values()) >= 2


def test_what_is_left_to_gain_is_unknown_at_first_and_shrinks() -> None:
    sampler = sampler_of("gp", SPACE, PROBLEM, seed=0, starts=())
    answers = times(sampler.pool)
    assert sampler.left_to_gain({}) == math.inf and sampler.regrets({}) is None
    told: dict[Candidate, float | None] = {}
    gains, regrets = [], []
    for _ in range(4):
        for candidate in sampler.propose(12, told, ()):
            told[candidate] = answers[candidate]
        gains.append(sampler.left_to_gain(told))
        sampled = sampler.regrets(told)
        assert sampled is not None and sampled.min() >= 0.0
        regrets.append(float(sampled.mean()))
    assert gains[0] > 2 * gains[-1] and regrets[0] > 2 * regrets[-1]
    # One candidate gains no more than the best of all; the latter is a mean of draws.
    assert all(0 <= gain <= 1.2 * regret + 1e-3 for gain, regret in zip(gains, regrets, strict=True))
    assert min(time for time in told.values() if time) == min(answers.values())


def test_a_start_that_the_cost_model_holds_for_far_slower_than_its_first_is_no_reason_to_try_it() -> None:
    pool = Candidates(SPACE, PROBLEM)
    behind = pool.log_times - pool.log_times.min()
    near, far = (pool.candidates[int(np.argmax(np.where(behind < most, behind, 0)))] for most in (0.1, math.inf))
    opening = sampler_of("gp", SPACE, PROBLEM, seed=0, starts=[near, far]).initial_candidates
    assert near in opening and far not in opening
    assert near not in sampler_of("gp", SPACE, PROBLEM, seed=0, starts=[]).initial_candidates


def test_an_error_that_all_candidates_share_changes_no_proposal() -> None:
    """The GPU is twice as slow as predicted."""
    sampler, slower = (sampler_of("gp", SPACE, PROBLEM, seed=0) for _ in range(2))
    answers = times(sampler.pool)
    first = sampler.propose(14, {}, ())
    assert sampler.propose(3, {c: answers[c] for c in first}, ()) == slower.propose(3, {c: 2 * answers[c] for c in first}, ())


def test_draws_are_spread_as_the_surrogate_says_and_hang_together_as_their_places_do() -> None:
    pool = Candidates(SPACE, PROBLEM)
    surrogate = Surrogate(pool)
    surrogate.learn({place: pool.log_times[place] + 0.1 * math.sin(place) for place in range(0, 60, 5)})
    # One that was tried, neighbours, and some that lie apart.
    places = [5, 6, 7, 8, *range(70, 124, 6)]
    drawn = surrogate.samples(places, 4000)
    mean, deviation = surrogate.expected(places)
    assert drawn.shape == (len(places), 4000)
    assert np.allclose(drawn.mean(axis=1), mean, atol=0.01) and np.allclose(drawn.std(axis=1), deviation, rtol=0.1, atol=1e-3)
    assert deviation[0] < 0.02 < deviation.max()
    # Neighbours of one that was tried hang together more than places that lie apart.
    together = np.corrcoef(drawn[1:])
    assert together[0, 1] > 0.3 and abs(together[0, 3:]).mean() < together[0, 1]


def test_the_surrogate_is_the_posterior_of_its_covariances() -> None:
    """Against the textbook's inverse of the whole matrix."""
    pool = Candidates(SPACE, PROBLEM)
    surrogate = Surrogate(pool)
    tried = {place: pool.log_times[place] + 0.1 * math.sin(place) for place in range(0, 60, 5)}
    surrogate.learn(tried)
    places = [5, 6, 40, 100]
    among, known = surrogate.among([*tried, *places]), len(tried)
    inverse = np.linalg.inv(among[:known, :known] + NOISE**2 * np.eye(known))
    errors = np.array(list(tried.values())) - pool.log_times[list(tried)]
    shift = np.median(errors)
    mean = pool.log_times[places] + shift + among[known:, :known] @ inverse @ (errors - shift)
    variance = np.diag(among[known:, known:] - among[known:, :known] @ inverse @ among[:known, known:])
    found = surrogate.expected(places)
    assert np.allclose(found[0], mean, atol=1e-9) and np.allclose(found[1] ** 2, variance, atol=1e-9)


def test_times_that_refute_the_learned_residual_make_the_rest_of_it_count_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of other problems hold half of the candidates for 20 % slower; a few are timed, and are as fast as the others."""
    pool = Candidates(SPACE, PROBLEM)
    slower = np.arange(len(pool)) % 2 * 0.2
    monkeypatch.setattr(pool, "learned", slower)
    monkeypatch.setattr(pool, "log_times", pool.log_times + slower)
    refuted, confirmed = Surrogate(pool), Surrogate(pool)
    tried = range(0, 40, 5)
    confirmed.learn({place: pool.log_times[place] for place in tried})
    refuted.learn({place: pool.log_times[place] - slower[place] for place in tried})
    far = [place for place in range(len(pool) - 20, len(pool)) if slower[place]]
    others = [place - 1 for place in far]
    extra = [
        float((one.expected(far)[0] - pool.log_times[far] + 0.2).mean() - (one.expected(others)[0] - pool.log_times[others]).mean())
        for one in (confirmed, refuted)
    ]
    assert extra[0] == pytest.approx(0.2, abs=0.01) and extra[1] < 0.1


def test_a_lucky_time_is_not_what_improvement_is_measured_against() -> None:
    """Of two equal kernels one was timed 3 % too fast: the posterior's best mean is nearer to the truth."""
    sampler = sampler_of("gp", SPACE, PROBLEM, seed=0)
    answers = times(sampler.pool)
    told: dict[Candidate, float | None] = {c: answers[c] for c in sampler.propose(20, {}, ())}
    best = min((c for c in told), key=answers.__getitem__)
    lucky = {**told, best: answers[best] * 0.97}
    found = sampler._learn(lucky, ())  # type: ignore[attr-defined]
    assert math.log(answers[best] * 0.97) < found


def test_optunas_sampler_learns_from_the_times_of_candidates() -> None:
    """In what it proposes after its random ones, and from trials that an earlier process made."""
    answers = times(sampler_of("random", SPACE, PROBLEM, seed=0).pool)
    first, resumed, fresh = (sampler_of("tpe", SPACE, PROBLEM, seed=0, starts=()) for _ in range(3))
    told: dict[Candidate, float | None] = {}
    for _ in range(30):
        [candidate] = first.propose(1, told, ())
        told[candidate] = answers[candidate]
    median = sorted(answers.values())[len(answers) // 2]
    assert sum(answers[candidate] < median for candidate in list(told)[12:]) > 12
    assert resumed.propose(8, told, ()) != fresh.propose(8, {}, told)


def test_an_unknown_sampler_is_one_sentence_and_the_command_knows_all() -> None:
    with pytest.raises(InputError, match=r"^unknown sampler 'gpp': use one of gp, tpe, random, exhaustive$"):
        sampler_of("gpp", SPACE, PROBLEM, seed=0)
    [option] = [one for one in search.params if one.name == "sampler"]
    assert list(option.type.choices) == list(OWN)  # type: ignore[attr-defined]


def test_a_large_space_is_drawn_from_evenly_and_its_starts_are_kept() -> None:
    starts = SPACE.starts()
    pool = Candidates(SPACE, PROBLEM, starts, most=20)
    assert 20 <= len(pool) <= 20 + len(starts) and set(starts) <= set(pool.candidates)


def test_only_searches_that_ask_the_surrogate_import_it() -> None:
    code = "import sys; import flashtune.tuner.searching; sys.exit('flashtune.tuner.propose.surrogate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
