"""Learned errors of the cost model: near trials inform them, and far ones don't."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fit import residual as fit
from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import families
from flashtune.templates.cost import sharing
from flashtune.templates.expected import log_us, logs_us
from flashtune.templates.family import Family
from flashtune.templates.learned import residual
from flashtune.templates.learned.forwards import FORWARDS
from flashtune.templates.learned.gradients import FUSED, GRADIENTS
from flashtune.templates.learned.residual import Likeness, Residual, Tried
from flashtune.templates.learned.steps import STEPS

H200 = find_target("h200")
HOPPER, DECODE = families()["flash_fwd_hopper"], families()["flash_decode"]
PLAIN = Problem(batch=2, heads=16, kv_heads=16, n_q=3000, n_kv=3000, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
STARTS = [(HOPPER.name, config) for config in HOPPER.starts(PLAIN.spec(), H200)[:6]]
STEP = Problem(batch=4, heads=32, kv_heads=8, n_q=1, n_kv=8192, d=128, d_v=128, dtype="bf16")
OUT = fit.FOLDER / FORWARDS.file
BACKWARD = replace(PLAIN, direction="bwd")


def learned(likeness: Likeness, problem: Problem, wrong: dict[Tried, float]) -> Residual:
    """Of one problem's trials, which took so much longer than expected, a logarithm."""
    return Residual(likeness, fit.learn(likeness, [fit.Observed(problem, {}, wrong, {})]))


def test_trials_tell_of_their_own_configs_at_like_problems_and_nothing_far_away() -> None:
    wrong = {tried: 0.1 if number % 2 else -0.1 for number, tried in enumerate(STARTS)}
    known = learned(FORWARDS, PLAIN, wrong)
    for near in (PLAIN, replace(PLAIN, n_q=3100, n_kv=3100), replace(PLAIN, dtype="fp16")):
        found = known.of(near, STARTS, H200)
        for (a, expected_a), (b, expected_b) in itertools.combinations(zip(found, wrong.values(), strict=True), 2):
            if expected_a != expected_b:
                assert 0.3 < (b - a) / (expected_b - expected_a) <= 1.1
    far = replace(PLAIN, d=64, d_v=64, n_q=150, n_kv=9000, features=Features(mask="bias", dropout=True))
    assert max(map(abs, known.of(far, STARTS, H200))) < 0.06
    unlike = HOPPER.default(replace(PLAIN, d=64, d_v=64).spec(), H200).replace(BLOCK_M=64, BLOCK_N=64, intra_wg_overlap=0, tiles="one")
    assert abs(known.of(PLAIN, [(HOPPER.name, unlike)], H200)[0]) < 0.06


def test_caution_adds_what_the_most_alike_trial_leaves_open() -> None:
    known = learned(FORWARDS, PLAIN, dict.fromkeys(STARTS, 0.0))
    unlike = HOPPER.name, HOPPER.default(replace(PLAIN, d=64, d_v=64).spec(), H200).replace(BLOCK_M=64, BLOCK_N=64, intra_wg_overlap=0)

    def added(problem: Problem, tried: Tried) -> float:
        [without], [with_it] = (known.of(problem, [tried], H200, caution=caution) for caution in (0.0, 2.0))
        return (with_it - without) / 2

    at_all = math.hypot(FORWARDS.together, FORWARDS.alone)
    assert added(PLAIN, STARTS[0]) == pytest.approx(0.0, abs=1e-3)
    assert 0.0 < added(replace(PLAIN, n_q=5000, n_kv=5000), STARTS[0]) < 0.3 * at_all < 0.6 * at_all < added(PLAIN, unlike) < at_all


@pytest.mark.parametrize("window", [(1024, 0), (None, 3), (0, 0), (5, None)])
def test_every_window_has_coordinates(window: tuple[int | None, int | None]) -> None:
    features = Features(window=window)
    for likeness, problem in ((FORWARDS, PLAIN), (STEPS, STEP), (GRADIENTS, BACKWARD)):
        assert np.isfinite(likeness.problem(replace(problem, features=features))).all()


def test_steps_are_told_by_how_keys_are_shared_out_and_not_by_what_that_is_called() -> None:
    config = DECODE.default(STEP.spec(), H200).replace(BLOCK_M=16, BLOCK_N=128, programs=1)
    full = replace(STEP, batch=32)
    one, two = ((DECODE.name, config.replace(programs=programs)) for programs in (1, 2))
    assert [sharing(each[1], full, H200).splits for each in (one, two)] == [1, 1]
    assert STEPS.config(full, one, H200) == STEPS.config(full, two, H200), "256 heads leave no parts to either"
    assert STEPS.config(STEP, one, H200) != STEPS.config(STEP, two, H200)
    known = learned(STEPS, STEP, {one: 0.2, two: -0.2})
    found = known.of(replace(STEP, n_kv=7000), [one, two], H200)
    assert found[0] - found[1] > 0.1
    both_of = known.of(replace(full, n_kv=7000), [one, two], H200)
    assert both_of[0] == both_of[1]


@pytest.mark.parametrize("d", [64, 128])
def test_backwards_that_differ_in_any_axis_are_told_apart(d: int) -> None:
    """By the cost model alone a handful of times stood for a thousand configs."""
    problem, fused = replace(BACKWARD, d=d, d_v=d), families()[FUSED]
    configs = [c for c in fused.configs(problem.spec(), H200) if fused.resized(c, problem, H200) == c]
    assert len(configs) > 300
    found = logs_us([(fused, config) for config in configs], problem, H200)
    assert len({round(log, 6) for log in found if log is not None}) > 0.9 * len(configs)


def test_whole_families_are_told_apart_by_the_steps_that_tried_both() -> None:
    """Kernels for many rows read the keys that heads share once for each of them: eight heads, 80 key heads and D = 192 took 445 us where
    flash_decode took 86 (seed83.json)."""
    shared = Problem(batch=20, heads=32, kv_heads=4, n_q=1, n_kv=5000, d=192, d_v=192, dtype="bf16")
    alone = replace(shared, batch=64, heads=8, kv_heads=8, n_kv=2000, d=112, d_v=112)

    def best(name: str, problem: Problem) -> float:
        kind, spec = families()[name], problem.spec()
        logs = logs_us([(kind, config) for config in kind.starts(spec, H200) if kind.violated(config, spec, H200) is None], problem, H200)
        return min(log for log in logs if log is not None)

    assert best("flash_fwd_hopper", shared) - best("flash_decode", shared) > 0.6
    assert abs(best("flash_fwd_hopper", alone) - best("flash_decode", alone)) < 0.25


def test_what_is_expected_of_hoppers_kernels_and_decoding_steps_is_with_what_was_learned_and_nothing_else_is() -> None:
    known = families()
    backwards = [(name, config) for name in GRADIENTS.families for config in known[name].starts(BACKWARD.spec(), H200)[:3]]
    steps = [(name, config) for name in STEPS.families if name in known for config in known[name].starts(STEP.spec(), H200)[:3]]
    for likeness, problem, tried in ((FORWARDS, PLAIN, STARTS), (STEPS, STEP, steps), (GRADIENTS, BACKWARD, backwards)):
        plain = [log_us(known[name], config, problem, H200) for name, config in tried]
        learnt = residual.learned(likeness)
        assert learnt is not None and None not in plain
        expected = [(log or 0) + wrong for log, wrong in zip(plain, learnt.of(problem, tried, H200), strict=True)]
        assert logs_us([(known[name], config) for name, config in tried], problem, H200) == pytest.approx(expected)
    # Decoding kernels aren't told of where there are more rows, nor backwards of plain pointers.
    others: list[tuple[Family, Problem]] = [(DECODE, replace(STEP, n_q=17)), (families()["flash_bwd"], BACKWARD)]
    for family, problem in others:
        config = family.default(problem.spec(), H200)
        assert logs_us([(family, config)], problem, H200) == [log_us(family, config, problem, H200)] != [None]


def kept(likeness: Likeness) -> dict[str, Any]:
    """The shipped regression."""
    with np.load(fit.FOLDER / likeness.file) as found:
        return dict(found)


def test_what_is_longer_than_all_trials_is_told_of_as_the_longest() -> None:
    known = Residual(FORWARDS, kept(FORWARDS))
    longest = replace(PLAIN, batch=1, heads=128, kv_heads=128, n_q=1 << 20, n_kv=1 << 20)
    farther = replace(longest, n_q=1 << 23, n_kv=1 << 23)
    assert known.of(farther, STARTS, H200) == pytest.approx(known.of(longest, STARTS, H200), abs=1e-4)


@pytest.fixture
def read_anew() -> Iterator[None]:
    """A learned file is read in the test, and after it."""
    residual.learned.cache_clear()
    yield
    residual.learned.cache_clear()


@pytest.mark.usefixtures("read_anew")
@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_modes_that_replace_tensors_change_nothing(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    calls = [replace(PLAIN, n_q=n, n_kv=n) for n in (1003, 1507)]
    with mode():
        found = dispatch.explain_problem(calls[0], "h200").variant_id
    dispatch.explain_problem(calls[1], "h200")
    residual.learned.cache_clear()
    dispatch.reload(alone=True)
    assert dispatch.explain_problem(calls[0], "h200").variant_id == found


def missing(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def overwritten(path: Path) -> None:
    content = path.read_bytes()
    begin = content.index(b"weights.npy") + 400
    path.write_bytes(content[:begin] + bytes(200) + content[begin + 200 :])


def an_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def another_way(**changes: Callable[[Any], Any]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with np.load(path) as kept:
            np.savez(path, **{name: changes.get(name, lambda same: same)(kept[name]) for name in kept})

    return change


@pytest.mark.usefixtures("read_anew")
@pytest.mark.parametrize(
    "damage",
    [
        missing,
        truncated,
        overwritten,
        an_array,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("no arrays"),
        another_way(weights=lambda weights: weights[1:]),
        another_way(weights=lambda weights: weights * np.nan),
        another_way(problems=lambda problems: problems[:, 1:]),
        another_way(problem_of=lambda places: places + 20000),
        another_way(config_of=lambda places: -1 - places),
        another_way(configs=lambda configs: configs.astype(object)),
    ],
    ids=[
        "missing",
        "truncated",
        "overwritten",
        "array",
        "empty",
        "text",
        "too few",
        "nan",
        "a coordinate fewer",
        "places",
        "negative",
        "objects",
    ],
)
def test_a_damaged_file_is_warned_of_once_and_the_model_stands_alone(
    damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / OUT.name
    copy.write_bytes(OUT.read_bytes())
    damage(copy)
    monkeypatch.setattr(residual, "resources", SimpleNamespace(files=lambda _: tmp_path))
    candidates = [(HOPPER, config) for _, config in STARTS]
    with pytest.warns(RuntimeWarning, match="install flashtune again") as told:
        found = [logs_us(candidates, PLAIN, H200) for _ in range(2)]
    assert len([one for one in told if one.category is RuntimeWarning]) == 1
    assert found == [[log_us(family, config, PLAIN, H200) for family, config in candidates]] * 2


@pytest.mark.usefixtures("read_anew")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::ResourceWarning")
def test_no_byte_that_changed_ends_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, dice = OUT.read_bytes(), random.Random(0)
    monkeypatch.setattr(residual, "resources", SimpleNamespace(files=lambda _: tmp_path))
    for _ in range(60):
        content = bytearray(whole)
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        (tmp_path / OUT.name).write_bytes(content)
        residual.learned.cache_clear()
        known = residual.learned(FORWARDS)
        assert known is None or np.isfinite(known.of(PLAIN, STARTS, H200)).all()
