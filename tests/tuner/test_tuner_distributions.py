"""Distributions of scores are what their names promise, on the CPU."""

import math
from dataclasses import replace

import pytest
import torch

from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.errors import InputError
from flashtune.tuner.verify.distributions import HUGE, HUGE_OF_BF16, MISLED_NATS, NEEDLES, PRESENT, redistribute
from flashtune.tuner.verify.inputs import Inputs, make_inputs

PLAIN = Problem(batch=2, heads=4, kv_heads=2, n_q=96, n_kv=160, d=64, d_v=64, dtype="bf16", features=Features())


def made(name: str, seed: int = 0) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """Inputs of a distribution, their scores in nats, and what of each score the first NEEDLES dimensions give."""
    inputs = make_inputs(PLAIN, device="cpu", seed=seed)
    redistribute(inputs, name, seed=seed)
    q, k = inputs.q.double(), inputs.k.double().repeat_interleave(2, 1)
    scale = inputs.keywords["scale"]
    raised = q[..., :NEEDLES] @ k[..., :NEEDLES].mT * scale
    return inputs, q @ k.mT * scale, raised


@pytest.mark.parametrize("name", PRESENT)
def test_every_distribution_is_finite_and_the_same_for_the_same_seed(name: str) -> None:
    one, other, plain = made(name)[0], made(name)[0], make_inputs(PLAIN, device="cpu", seed=0)
    assert torch.equal(one.q, other.q)
    assert torch.equal(one.k, other.k)
    assert one.q.isfinite().all()
    assert one.k.isfinite().all()
    assert torch.equal(one.v, plain.v)
    assert (torch.equal(one.q, plain.q) and torch.equal(one.k, plain.k)) == (name == "random")


@pytest.mark.parametrize("nats", [2, 8, 30, 60])
def test_a_sink_raises_the_first_key_of_every_row(nats: int) -> None:
    _, scores, _ = made(f"sink+{nats}")
    others = scores[..., 1:]
    assert torch.allclose((scores[..., 0] - others.mean(-1)).mean(), torch.tensor(float(nats)).double(), atol=0.3, rtol=0.02)
    assert abs(float(others.std()) - 1) < 0.1


@pytest.mark.parametrize("nats", [5, 60])
def test_a_needle_raises_one_key_of_a_row_and_not_the_same_in_all(nats: int) -> None:
    _, _, raised = made(f"needle+{nats}")
    found = raised > nats / 2
    # A row has numbers of its own in the other dimensions where needles lie; they are small beside the needle's.
    assert (found.sum(-1) == 1).all()
    assert torch.allclose(raised[found], torch.tensor(float(nats)).double(), rtol=0.02)
    assert len(found.double().argmax(-1).unique()) == NEEDLES


def test_a_deviation_is_that_of_all_scores() -> None:
    for deviation in (3, 8):
        _, scores, _ = made(f"deviation-{deviation}")
        assert abs(float(scores.std()) / deviation - 1) < 0.1


@pytest.mark.parametrize("sign", ["+", "-"])
def test_a_drift_goes_from_the_first_key_to_the_last(sign: str) -> None:
    _, scores, _ = made(f"drift{sign}60")
    means = scores.mean((0, 1, 2))
    rise = float(means[-16:].mean() - means[:16].mean())
    assert abs(rise - (54 if sign == "+" else -54)) < 2


@pytest.mark.parametrize("sign", ["+", "-"])
def test_a_shift_leaves_the_softmax_as_it_is(sign: str) -> None:
    _, scores, _ = made(f"shifted{sign}120")
    assert abs(float(scores.mean()) - (120 if sign == "+" else -120)) < 2
    assert abs(float((scores - scores.mean(-1, keepdim=True)).std()) - 1) < 0.1


def test_so_many_rows_are_misled_by_their_last_keys() -> None:
    for percent in (1, 10, 100):
        counts = [(made(f"misled-{percent}%", seed)[2][0, 0].amax(-1) > MISLED_NATS / 2).double().mean() for seed in range(8)]
        assert abs(float(sum(counts)) / 8 * 100 - percent) <= 0.5 + percent / 5
        _, _, raised = made(f"misled-{percent}%")
        assert (raised[..., PLAIN.n_kv // 16 :] < MISLED_NATS / 2).all()


@pytest.mark.parametrize(("dtype", "names"), [("fp16", HUGE), ("bf16", HUGE + HUGE_OF_BF16)])
@pytest.mark.parametrize("d", [1, 80, 256])
def test_huge_scores_are_as_large_as_their_name_says_and_exact_in_float32(dtype: DType, names: tuple[str, ...], d: int) -> None:
    for name in names:
        inputs = make_inputs(replace(PLAIN, d=d, dtype=dtype), device="cpu", seed=0)
        redistribute(inputs, name)
        q, k = inputs.q[0, 0], inputs.k[0, 0]
        scores = q.double() @ k.double().mT
        assert torch.equal(scores, (q.float() @ k.float().mT).double()) and scores.float().isfinite().all()
        scaled = scores * inputs.keywords["scale"] / math.log(2)
        amount = int(name[-3:].strip("+-"))
        assert amount <= math.log2(scaled.abs().max()) < amount + 3
        assert (scaled[2::3] == 0).all() and 12 <= math.log2(scaled[1::3].abs().max()) < 15
        others, sign = scaled[::3], -1 if "-" in name else 1
        assert (others * sign > 0).all() if "huge" in name else (others.diff() * sign >= 0).all() and others.unique(dim=1).shape[1] == 5


@pytest.mark.parametrize("name", ["", "sink", "sink8", "random+3", "sink+", "flood+8", "misled-"])
def test_a_name_that_says_nothing_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(InputError, match=r"no distribution of scores is called .*sink\+2"):
        redistribute(make_inputs(PLAIN, device="cpu", seed=0), name)


@pytest.mark.parametrize("d", [1, 4])
def test_needles_are_no_more_than_the_dimensions_of_a_head(d: int) -> None:
    problem = Problem(batch=1, heads=1, kv_heads=1, n_q=9, n_kv=33, d=d, d_v=d, dtype="bf16", features=Features())
    inputs = make_inputs(problem, device="cpu", seed=0)
    redistribute(inputs, "needle+8")
    assert torch.isfinite(inputs.q).all() and ((inputs.q != 0).sum(-1) == 1).all()
