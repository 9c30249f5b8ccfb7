"""BlockMasks whose lists say what is visible, through dispatch with kernels in Triton's interpreter."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from interpreting import failures_of
from list_cases import Lists, causal, drawn, errors, visible_pairs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flashtune import dispatch
from flashtune.dispatch.functions import blocks as flex_blocks
from flashtune.dispatch.functions import kernels as flex_kernels
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.dispatch.functions.listed import Listed, kinds_of_tiles

warnings.filterwarnings("ignore")

BOUND = 5e-6


def agrees(given: Lists) -> None:
    """Raises where kernels don't serve, or results aren't those of the lists' dense form in float64."""
    said = given.call(dispatch.explain_flex)
    assert said.template == "flash_fwd" and said.backward is not None and said.backward.template == "flash_bwd", said.reason
    assert "by the lists of its BlockMask" in said.reason, said.reason
    assert max(errors(given, dispatch.flex_attention)) <= BOUND


def made(count: Any, places: Any, n: int = 96, size: int = 32, **words: Any) -> Lists:
    """A call of two heads under lists, (1, 1, rows) and (1, 1, rows, width), of three blocks each way."""
    given = drawn(0, d=16).tensors
    tensors = [torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(len(given))]
    lists = [x if isinstance(x, torch.Tensor) else torch.tensor([[x]], dtype=torch.int32) for x in (count, places)]
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, seq_lengths=(n, n), **({"compute_q_blocks": False} | words))
    return Lists(tensors, mask, visible_pairs(mask, (1, 2, n, n)))


def of_case(name: str) -> None:
    given = drawn(int(name), most=130)
    # Lists that are those of their mask_mod are no mask of their own.
    assert given.call(dispatch.explain_flex).template is not None
    assert max(errors(given, dispatch.flex_attention)) <= BOUND


def of_lists_twice() -> None:
    """A block that is listed twice counts once, in any order, and as visible where a list of full ones has it, too."""
    agrees(made([3, 2, 3], [[0, 0, 2], [1, 1, 0], [2, 1, 2]]))
    full = {"full_kv_num_blocks": torch.tensor([[[1, 0, 2]]]), "full_kv_indices": torch.tensor([[[[0, 0, 0], [0, 0, 0], [2, 0, 0]]]])}
    agrees(made([1, 2, 3], [[0, 1, 2], [1, 0, 2], [2, 1, 0]], mask_mod=causal, **full))


def of_wrong_lists_of_queries() -> None:
    """Gradients are those of the lists of keys for queries, whatever the others are."""
    for mask_mod in (None, causal):
        given = made([1, 2, 2], [[0, 1, 2], [1, 0, 2], [0, 2, 1]], mask_mod=mask_mod)
        given.mask.q_num_blocks, given.mask.q_indices = torch.zeros_like(given.mask.kv_num_blocks), given.mask.kv_indices
        agrees(given)
    whole = create_block_mask(lambda b, h, q, k: (q + k) % 3 > 0, None, None, 96, 96, device="cpu", BLOCK_SIZE=32)
    whole.q_num_blocks = torch.zeros_like(whole.q_num_blocks)
    assert max(errors(Lists(given.tensors, whole, visible_pairs(whole, (1, 2, 96, 96))), dispatch.flex_attention)) <= BOUND


def of_new_lists() -> None:
    """Lists that are made anew, or written, are those of the call; they compile nothing, trace nothing, and none but the first is read."""
    for mask_mod in (None, causal):
        lasting = made([1, 1, 1], [[0], [0], [0]], mask_mod=mask_mod)
        agrees(lasting)
        before = len(flex_kernels.kernels_here()), len(flex_functions._TRACES)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flex_blocks, "as_counted", lambda *words, **more: pytest.fail("lists are read"))
            for places in ([1, 2, 0], [2, 2, 1]):
                agrees(made([1, 1, 1], [[place] for place in places], mask_mod=mask_mod))
                lasting.mask.kv_indices[0, 0, :, 0] = torch.tensor(places)
                agrees(Lists(lasting.tensors, lasting.mask, visible_pairs(lasting.mask, (1, 2, 96, 96))))
        assert (len(flex_kernels.kernels_here()), len(flex_functions._TRACES)) == before


def of_tiles() -> None:
    """Kinds of tiles of any size are those of the pairs in them."""
    for seed in range(200):
        given = drawn(seed)
        (batch, heads, n_q, n_kv), size = given.visible.shape, given.mask.BLOCK_SIZE
        listed = flex_blocks.listed_by(given.mask, given.tensors[0], given.tensors[1], alone=True)
        assert isinstance(listed, Listed)
        alone = BlockMask.from_kv_blocks(*given.mask.as_tuple()[2:4], *given.mask.as_tuple()[4:6], BLOCK_SIZE=size, compute_q_blocks=False)
        pairs = visible_pairs(alone, (batch, heads, n_q, n_kv)).float()
        for tile in ((32, 64), (64, 16), (128, 128), (96, 80)):
            kinds = kinds_of_tiles(listed, (n_q, n_kv), tile)
            # Keys beyond the end are hidden, and rows beyond it aren't there.
            past = torch.nn.functional.pad(torch.nn.functional.pad(pairs, (0, -n_kv % tile[1])), (0, 0, 0, -n_q % tile[0]), value=-1.0)
            shown = past.unflatten(3, (-1, tile[1])).unflatten(2, (-1, tile[0])).transpose(3, 4).flatten(4)
            there = shown >= 0
            right = torch.where((shown * there).amax(-1) == 0, 2, torch.where(((shown > 0) | ~there).all(-1), 1, 0))
            assert torch.equal(kinds.expand_as(right).long(), right), (seed, tile)


def of_inference_mode() -> None:
    """Lists that were kept in inference mode serve gradients later, and lists that were made there serve."""
    given = made([1, 2, 2], [[0, 1, 2], [1, 0, 2], [0, 2, 1]])
    with torch.inference_mode():
        first = given.call(dispatch.flex_attention)
        count, places = torch.tensor([[[1, 2, 2]]]), given.mask.kv_indices.clone()
        here = BlockMask.from_kv_blocks(count, places, BLOCK_SIZE=32, compute_q_blocks=False)
        torch.testing.assert_close(Lists(given.tensors, here, given.visible).call(dispatch.flex_attention), first)
    agrees(given)
    agrees(Lists(given.tensors, here, given.visible))


def main(*names: str) -> dict[str, str]:
    """Failures of the numbered draws, or without numbers of everything else."""
    return failures_of(globals(), of_case, names, nullcontext)
