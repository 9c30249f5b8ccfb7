"""Torch's samples of F.scaled_dot_product_attention (OpInfo): outputs and gradients at most twice as far from float64 as torch's."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branches import BRANCHES, Branch, forced, served

from flashtune import dispatch

pytest.importorskip("expecttest")
DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")
NAME = "nn.functional.scaled_dot_product_attention"
BOUNDS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 1e-6, torch.float64: 1e-12}
"""Unit roundoffs; those of float32 and float64 with room for the sums' own."""


@functools.cache
def samples(dtype: torch.dtype) -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = (op for op in op_db if op.name == NAME)
    torch.manual_seed(0)
    return list(op.sample_inputs(DEVICE, dtype, requires_grad=True))


def results(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], words: dict[str, Any]) -> list[torch.Tensor]:
    """Output, then the gradients of all tensors; `words` with a mask among the tensors, after query, key and value."""
    names = ["attn_mask"] if len(tensors) > 3 else []
    out = function(*tensors[:3], **{**words, **dict(zip(names, tensors[3:], strict=True))})
    return [out.detach(), *torch.autograd.grad(out, tensors, weights_of(out))]


def weights_of(out: torch.Tensor) -> torch.Tensor:
    """The output's gradient."""
    return torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64, device=out.device).view(out.shape).to(out.dtype)


def rounding(tensors: list[torch.Tensor], words: dict[str, Any], out: torch.Tensor) -> list[torch.Tensor]:
    """How far each result may be off, in unit roundoffs, where weights, outputs and gradients of scores are rounded as in fused kernels.

    Of scores up to 80 little is left of a gradient, the difference of two numbers, one of which is a sum over the rounded output.
    """
    q, k, v, *mask = [x.detach().double().cpu() for x in tensors]
    dout, scale = weights_of(out.cpu()).double(), q.shape[-1] ** -0.5
    scores = scale * q @ k.mT + sum(mask)
    if words.get("is_causal"):
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    probs = torch.softmax(scores, -1)
    found, dprobs = probs @ v, dout @ v.mT
    dscores = probs * (dprobs - (dout * found).sum(-1, keepdim=True))
    off = probs * (dout * found).abs().sum(-1, keepdim=True) + dscores.abs()
    parts = [probs @ v.abs() + found.abs(), scale * off @ k.abs(), scale * off.mT @ q.abs(), probs.mT @ dout.abs()]
    parts += [off] * len(mask)
    # What is summed over broadcast dimensions is rounded before, too.
    exact = [found, scale * dscores @ k, scale * dscores.mT @ q, probs.mT @ dout, *[dscores] * len(mask)]
    return [(part + right.abs()).sum_to_size(x.shape) for part, right, x in zip(parts, exact, [out, *tensors], strict=True)]


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("index", range(25))
def test_a_sample_is_as_right_as_torchs_own(
    index: int, dtype: torch.dtype, branch: Branch, record_property: Callable[[str, str], None]
) -> None:
    found = samples(dtype)
    assert len(found) <= 25, "each sample has a test"
    if index >= len(found):
        pytest.skip("this torch has fewer samples")
    sample = found[index]
    words = dict(sample.kwargs)
    mask = words.pop("attn_mask", None)
    tensors = [x.detach().requires_grad_() for x in (sample.input, *sample.args, *([] if mask is None else [mask]))]
    with forced(branch):
        if words.get("dropout_p"):
            torch.manual_seed(3)
            ours = results(dispatch.attention, tensors, words)
            torch.manual_seed(3)
            again = results(dispatch.attention, tensors, words)
            record_property("served", served())
            assert all(torch.isfinite(x).all() for x in ours) and torch.equal(ours[0], again[0]), "the generator decides what is dropped"
            return
        ours = results(dispatch.attention, tensors, words)
        record_property("served", by := served())
    assert (by == "torch") == (branch == "torch" or dtype == torch.float64), f"{by} served"
    wanted = results(F.scaled_dot_product_attention, [x.detach().double().cpu().requires_grad_() for x in tensors], words)
    theirs = results(F.scaled_dot_product_attention, tensors, words)
    roundings = rounding(tensors, words, ours[0])
    for place, (mine, right, other, rounded) in enumerate(zip(ours, wanted, theirs, roundings, strict=True)):
        off, torchs = ((x.double().cpu() - right).abs() for x in (mine, other))
        allowed = 2 * float(torchs.max()) + BOUNDS[dtype] * (rounded + right.abs().max())
        assert (off <= allowed).all(), f"result {place} is off by {float((off / allowed).max()):.3g} of what is allowed"
