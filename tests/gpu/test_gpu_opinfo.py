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
from flashtune.core.tolerances import TOLERANCES

pytest.importorskip("expecttest")
DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")
NAME = "nn.functional.scaled_dot_product_attention"
BOUNDS = {torch.float16: TOLERANCES["fp16"], torch.bfloat16: TOLERANCES["bf16"], torch.float32: TOLERANCES["fp32"]}

FUSED = 4
"""Samples of three dimensions torch computes by its math backend, which widens 16 bits to 32. Fused kernels, torch's and ours, round
weights and outputs, and scores up to 80 leave of a gradient only what two numbers differ by that are so rounded: of these samples up to so
many times the bound of gradients (docs/differences-from-torch.md)."""


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
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64, device=out.device).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights.to(out.dtype))]


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=lambda d: str(d).removeprefix("torch.")
)
@pytest.mark.parametrize("index", range(25))
def test_a_sample_is_as_right_as_torchs_own(
    index: int, dtype: torch.dtype, branch: Branch, record_property: Callable[[str, str], None]
) -> None:
    found = samples(dtype)
    assert len(found) <= 25 or DEVICE == "cpu", "each sample has a test"
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
    for place, (mine, right, other) in enumerate(zip(ours, wanted, theirs, strict=True)):
        largest = float(right.abs().max())
        unit = 1e-12 if dtype == torch.float64 else FUSED * BOUNDS[dtype].gradient_norm
        off, torchs = (float((x.double().cpu() - right).abs().max()) for x in (mine, other))
        assert off <= 2 * torchs + unit * largest, f"result {place} is off by {off:.3g}, torch's by {torchs:.3g}, of {largest:.3g}"
