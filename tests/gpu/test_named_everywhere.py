"""Implementations that are named for packed sequences, paged caches and functions, on a GPU: each is right, or refused in a sentence."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from test_providers import bound
from test_torch_serves import normal
from torch import Tensor

from flashtune import dispatch
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.core.records.results import IMPLEMENTATIONS
from flashtune.core.system.errors import InputError

LENGTHS = (256, 0, 100, 511)
ALLOWED = TOLERANCES["bf16"]


def packed(requires_grad: bool = True) -> tuple[list[Tensor], list[Any]]:
    """Query, key and value of sequences of these lengths, with rows of none behind them, and the other positional arguments."""
    leaves = [normal(sum(LENGTHS) + 5, heads, 64, seed=heads).requires_grad_(requires_grad) for heads in (8, 2, 2)]
    bounds = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device="cuda")
    return leaves, [bounds, bounds, max(LENGTHS), max(LENGTHS)]


def answered(name: str, call: Callable[..., Any]) -> Any:
    """Result of a call; None where it refuses the name, in a sentence."""
    try:
        return call(implementation=name)
    except InputError as error:
        said = str(error)
    assert said.startswith(f"implementation={name!r}"), said
    return None


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"window_size": (31, 0)}, {"window_size": (31, 64)}], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_packed_sequences(name: str, words: dict[str, Any], compiled: bool) -> None:
    leaves, others = packed()

    def call(*tensors: Tensor, **more: Any) -> Any:
        return dispatch.attention_varlen(*tensors, *others, enable_gqa=True, **words, **more)

    attend = torch.compile(call, fullgraph=True) if compiled else call
    found = answered(name, lambda **more: attend(*leaves, **more))
    if found is None:
        assert name not in ("flashtune", "torch", "flash"), "they take these calls on every GPU since Ampere"
        return
    wide = [x.detach().double().requires_grad_() for x in leaves]
    wanted = call(*wide)
    bound(found.detach(), wanted.detach(), ALLOWED.relative_norm)
    assert not found[sum(LENGTHS) :].any()
    dout = normal(*found.shape, seed=9)
    theirs = torch.autograd.grad(wanted, wide, dout.double())
    for one, other in zip(torch.autograd.grad(found, leaves, dout), theirs, strict=True):
        bound(one, other, ALLOWED.gradient_norm)
        assert not one[sum(LENGTHS) :].any()


@pytest.mark.parametrize("name", ["flashtune", "torch"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_paged_caches(name: str, compiled: bool) -> None:
    query = normal(4, 8, 64, seed=1)
    key, value = (normal(40, 16, 2, 64, seed=seed) for seed in (2, 3))
    table = torch.randperm(40, device="cuda", dtype=torch.int32).view(4, 10)
    used = torch.tensor([160, 3, 0, 99], dtype=torch.int32, device="cuda")
    bounds = torch.arange(5, dtype=torch.int32, device="cuda")

    def call(*tensors: Tensor, **more: Any) -> Any:
        words = {"block_table": table, "seqused_k": used, "enable_gqa": True, **more}
        return dispatch.attention_varlen(*tensors, bounds, None, 1, 160, **words)

    with torch.no_grad():
        attend = torch.compile(call, fullgraph=True) if compiled else call
        bound(attend(query, key, value, implementation=name), call(*(x.double() for x in (query, key, value))), ALLOWED.relative_norm)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("way", ["functions", "attention", "packed"])
def test_masks_and_scores_as_functions(name: str, way: str) -> None:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * torch.cos(0.01 * (i - j))

    if way == "packed":
        leaves, others = packed()
    else:
        leaves, others = [normal(2, heads, 384, 64, seed=heads).requires_grad_() for heads in (8, 2, 2)], []
    attend = {"functions": dispatch.flex_attention, "attention": dispatch.attention, "packed": dispatch.attention_varlen}[way]
    found = answered(name, lambda **more: attend(*leaves, *others, score_mod=score, enable_gqa=True, **more))
    if found is None:
        assert name not in ("flashtune", "torch", "flex")
        return
    wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
    others = [x.cpu() if isinstance(x, Tensor) else x for x in others]
    wanted: Any = attend(*wide, *others, score_mod=score, enable_gqa=True)
    dout = normal(*found.shape, seed=9)
    bound(found.detach().cpu(), wanted.detach(), ALLOWED.relative_norm)
    theirs = torch.autograd.grad(wanted, wide, dout.cpu().double())
    for one, other in zip(torch.autograd.grad(found, leaves, dout), theirs, strict=True):
        bound(one.cpu(), other, ALLOWED.gradient_norm)
