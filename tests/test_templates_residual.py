"""What is learned of the cost model's errors: near trials tell of them, far ones don't, and what ships is of the trials at hand."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashtune.core.config import Config
from flashtune.core.problem import Features, Problem
from flashtune.core.target import find_target
from flashtune.templates import families, residual
from flashtune.templates.expected import log_us, logs_us

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import fit_residual

H200 = find_target("h200")
HOPPER, DECODE = families()[residual.FAMILY], families()["flash_decode"]
PLAIN = Problem(batch=2, heads=16, kv_heads=16, n_q=3000, n_kv=3000, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
STARTS = HOPPER.starts(PLAIN.spec(), H200)[:6]


def learned(problem: Problem, wrong: dict[Config, float]) -> residual.Residual:
    """Of one problem's trials, which took so much longer than expected, a logarithm."""
    return residual.Residual(fit_residual.learn([fit_residual.Told(problem, {}, wrong)]))


def test_trials_tell_of_their_own_configs_at_like_problems_and_nothing_far_away() -> None:
    wrong = {config: 0.1 if number % 2 else -0.1 for number, config in enumerate(STARTS)}
    known = learned(PLAIN, wrong)
    for near in (PLAIN, replace(PLAIN, n_q=3100, n_kv=3100), replace(PLAIN, dtype="fp16")):
        found = known.of(near, STARTS)
        for (a, expected_a), (b, expected_b) in itertools.combinations(zip(found, wrong.values(), strict=True), 2):
            if expected_a != expected_b:
                assert 0.3 < (b - a) / (expected_b - expected_a) <= 1.1
    far = replace(PLAIN, d=64, d_v=64, n_q=150, n_kv=9000, features=Features(mask="bias", dropout=True))
    assert max(map(abs, known.of(far, STARTS))) < 0.06
    unlike = HOPPER.default(replace(PLAIN, d=64, d_v=64).spec(), H200).replace(BLOCK_M=64, BLOCK_N=64, intra_wg_overlap=0, tiles="one")
    assert abs(known.of(PLAIN, [unlike])[0]) < 0.06


@pytest.mark.parametrize("window", [(1024, 0), (None, 3), (0, 0), (5, None)])
def test_every_window_has_coordinates(window: tuple[int | None, int | None]) -> None:
    features = Features(window=window)
    assert all(map(torch.isfinite, torch.tensor(residual.of_problem(replace(PLAIN, features=features)))))


def test_what_is_expected_of_hopper_forwards_is_with_what_was_learned_and_nothing_else_is() -> None:
    candidates = [(HOPPER, config) for config in STARTS]
    plain = [log_us(family, config, PLAIN, H200) for family, config in candidates]
    more = residual.learned().of(PLAIN, STARTS)
    assert logs_us(candidates, PLAIN, H200) == pytest.approx([(log or 0) + wrong for log, wrong in zip(plain, more, strict=True)])
    step = replace(PLAIN, n_q=1)
    steps = [(DECODE, DECODE.default(step.spec(), H200)), (HOPPER, HOPPER.default(step.spec(), H200))]
    assert logs_us(steps, step, H200) == [log_us(family, config, step, H200) for family, config in steps]
    trained = replace(PLAIN, direction="bwd")
    backward = families()["flash_bwd_hopper"]
    config = backward.default(trained.spec(), H200)
    assert logs_us([(backward, config)], trained, H200) == [log_us(backward, config, trained, H200)] != [None]


def test_what_ships_was_learned_from_the_trials_at_hand() -> None:
    rows, runs = fit_residual.all_trials()
    kept = torch.load(fit_residual.OUT, weights_only=True)
    assert kept["trials"] == fit_residual.digest([*rows, *(one for _, one in runs)]), "run benchmarks/fit_residual.py --write"
    assert len(kept["weights"]) == len(kept["problem_of"]) == len(kept["config_of"]) > 5000
