"""What is learned of the cost model's errors: near trials tell of them, far ones don't, and what ships is of the trials at hand."""

import itertools
import random
import sys
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

from flashtune import dispatch
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
    assert np.isfinite(residual.of_problem(replace(PLAIN, features=features))).all()


def test_what_is_expected_of_hopper_forwards_is_with_what_was_learned_and_nothing_else_is() -> None:
    candidates = [(HOPPER, config) for config in STARTS]
    plain = [log_us(family, config, PLAIN, H200) for family, config in candidates]
    known = residual.learned()
    assert known is not None
    more = known.of(PLAIN, STARTS)
    assert logs_us(candidates, PLAIN, H200) == pytest.approx([(log or 0) + wrong for log, wrong in zip(plain, more, strict=True)])
    step = replace(PLAIN, n_q=1)
    steps = [(DECODE, DECODE.default(step.spec(), H200)), (HOPPER, HOPPER.default(step.spec(), H200))]
    assert logs_us(steps, step, H200) == [log_us(family, config, step, H200) for family, config in steps]
    trained = replace(PLAIN, direction="bwd")
    backward = families()["flash_bwd_hopper"]
    config = backward.default(trained.spec(), H200)
    assert logs_us([(backward, config)], trained, H200) == [log_us(backward, config, trained, H200)] != [None]


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    with np.load(fit_residual.OUT) as kept:
        return dict(kept)


def test_what_ships_was_learned_from_the_trials_at_hand_by_the_model_of_today(shipped: dict[str, Any]) -> None:
    rows, runs = fit_residual.all_trials()
    anew = fit_residual.learn([*rows, *(one for _, one in runs)])
    advice = "run benchmarks/fit_residual.py --write"
    assert shipped.keys() == anew.keys() and shipped["trials"] == anew["trials"], advice
    for name in shipped.keys() - {"trials"}:
        np.testing.assert_allclose(shipped[name], anew[name], rtol=1e-3, atol=1e-4, err_msg=advice)
    assert len(shipped["weights"]) > 5000


def test_what_is_longer_than_all_trials_is_told_of_as_the_longest(shipped: dict[str, Any]) -> None:
    known = residual.Residual(shipped)
    longest = replace(PLAIN, batch=1, heads=128, kv_heads=128, n_q=1 << 20, n_kv=1 << 20)
    farther = replace(longest, n_q=1 << 23, n_kv=1 << 23)
    assert known.of(farther, STARTS) == pytest.approx(known.of(longest, STARTS), abs=1e-4)


@pytest.fixture
def read_anew() -> Iterator[None]:
    """What was learned is read in the test, and after it."""
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
    copy = tmp_path / fit_residual.OUT.name
    copy.write_bytes(fit_residual.OUT.read_bytes())
    damage(copy)
    monkeypatch.setattr(residual, "resources", SimpleNamespace(files=lambda _: tmp_path))
    candidates = [(HOPPER, config) for config in STARTS]
    with pytest.warns(RuntimeWarning, match="install flashtune again") as told:
        found = [logs_us(candidates, PLAIN, H200) for _ in range(2)]
    assert len([one for one in told if one.category is RuntimeWarning]) == 1
    assert found == [[log_us(family, config, PLAIN, H200) for family, config in candidates]] * 2


@pytest.mark.usefixtures("read_anew")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::ResourceWarning")
def test_no_byte_that_changed_ends_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, dice = fit_residual.OUT.read_bytes(), random.Random(0)
    monkeypatch.setattr(residual, "resources", SimpleNamespace(files=lambda _: tmp_path))
    for _ in range(60):
        content = bytearray(whole)
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        (tmp_path / fit_residual.OUT.name).write_bytes(content)
        residual.learned.cache_clear()
        known = residual.learned()
        assert known is None or np.isfinite(known.of(PLAIN, STARTS)).all()
