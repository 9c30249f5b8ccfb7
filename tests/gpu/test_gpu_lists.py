"""BlockMasks whose lists say what is visible, on a GPU: random lists against float64, new lists at each call, bad ones, and CUDA graphs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from list_cases import Lists, causal, drawn, errors, visible_pairs
from torch.nn.attention.flex_attention import BlockMask

from flashtune import dispatch
from flashtune.dispatch.state.context import current

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = {"bf16": 3e-2, "fp16": 5e-3}
"""Of the largest error over the largest number, of gradients too."""


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    with dispatch.use(unmeasured=True):
        yield


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_kernels_show_what_is_listed(seed: int, dtype: str, d: int) -> None:
    for number in range(seed, seed + 6):
        given = drawn(
            number, dtype=DTYPES[dtype], device="cuda", most=700, d=d, sizes=((64, 64), (128, 128), (64, 128), (128, 64), (96, 80))
        )
        said = given.call(dispatch.explain_flex)
        assert said.template is not None and said.backward is not None, said.reason
        assert max(errors(given, dispatch.flex_attention)) <= BOUNDS[dtype], number


def routed(places: torch.Tensor, mask_mod: Any = None, *, count: torch.Tensor | None = None, block: int = 64) -> Any:
    """A BlockMask of a router's places (1, heads, rows, blocks)."""
    number = torch.full(places.shape[:3], places.shape[3], dtype=torch.int32, device="cuda") if count is None else count
    words = {"BLOCK_SIZE": block, "mask_mod": mask_mod, "seq_lengths": (block * places.shape[2],) * 2}
    return BlockMask.from_kv_blocks(number, places.int(), compute_q_blocks=False, **words)


def call(mask: Any, seed: int = 0) -> Lists:
    """A call under a mask."""
    generator, n = torch.Generator("cuda").manual_seed(seed), mask.seq_lengths[0]
    tensors = [
        torch.randn(1, heads, n, 64, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_() for heads in (4, 2, 2)
    ]
    return Lists(tensors, mask, visible_pairs(mask, (1, 4, n, n)).cuda())


@pytest.mark.parametrize("mask_mod", [None, causal])
def test_a_routers_lists_are_not_read_and_compile_nothing(mask_mod: Any) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    masks = [routed(torch.rand(1, 4, 16, 16, device="cuda", generator=generator).argsort(-1)[..., :4], mask_mod) for _ in range(4)]
    given = [call(mask) for mask in masks]
    assert max(errors(given[0], dispatch.flex_attention)) <= BOUNDS["bf16"]
    kernels = len(current().packed["kernels of functions"])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [torch.autograd.grad(one.call(dispatch.flex_attention).sum(), one.tensors) for one in given[1:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(found) == 3 and len(current().packed["kernels of functions"]) == kernels
    assert all(max(errors(one, dispatch.flex_attention)) <= BOUNDS["bf16"] for one in given[1:])


@pytest.mark.parametrize("implementation", [None, "torch"])
@pytest.mark.parametrize("mask_mod", [None, causal])
def test_bad_lists_are_no_fault(mask_mod: Any, implementation: str | None) -> None:
    """Places of no block are left out, and a block that is listed twice counts once."""
    # PyTorch's kernels take no blocks of 64 there.
    block = 64 if implementation is None else 128
    places = torch.tensor([0, 0, 10**6, -3, 5, 2**31 - 1], device="cuda").expand(1, 1, 16, -1)
    count = torch.full((1, 1, 16), 99, dtype=torch.int32, device="cuda")
    count[..., 3] = -7
    good = torch.tensor([[0, 5]], device="cuda").expand(1, 1, 16, -1)
    right = torch.full((1, 1, 16), 2, dtype=torch.int32, device="cuda")
    right[..., 3] = 0
    wanted = call(routed(good, mask_mod, count=right, block=block))
    given = Lists(wanted.tensors, routed(places, mask_mod, count=count, block=block), wanted.visible)
    attend = lambda *words, **more: dispatch.flex_attention(*words, **more, implementation=implementation)  # noqa: E731
    assert max(errors(given, attend)) <= BOUNDS["bf16"]
    torch.cuda.synchronize()


def test_a_graph_replays_with_other_lists() -> None:
    places = torch.arange(4, device="cuda", dtype=torch.int32).repeat(1, 4, 16, 1)
    given, moved = call(routed(places)), places + 7
    with torch.no_grad():
        given.call(dispatch.flex_attention)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = given.call(dispatch.flex_attention)
        given.mask.kv_indices.copy_(moved)
        graph.replay()
        torch.testing.assert_close(out, call(routed(moved)).call(dispatch.flex_attention))


@pytest.mark.parametrize("trained", [False, True])
def test_a_compiler_keeps_what_is_listed(trained: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    places = torch.rand(1, 4, 16, 16, device="cuda", generator=generator).argsort(-1)[..., :4].int()
    kinds = torch.zeros(1, 4, 16, 17, dtype=torch.int32, device="cuda").scatter_(-1, places.long(), 1)[..., :16]
    number, order = kinds.sum(-1, dtype=torch.int32), kinds.argsort(dim=-1, descending=True, stable=True).int()
    # PyTorch's kernels, which a compiler traces, take no blocks of 64 there.
    given = call(BlockMask.from_kv_blocks(number, order, BLOCK_SIZE=128, seq_lengths=(2048, 2048)))
    attend = torch.compile(dispatch.flex_attention, fullgraph=True)
    if trained:
        assert max(errors(given, attend)) <= BOUNDS["bf16"]
    else:
        with torch.no_grad():
            torch.testing.assert_close(given.call(attend), given.call(dispatch.flex_attention), atol=3e-2, rtol=3e-2)
