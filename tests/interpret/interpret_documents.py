"""Masks of documents through dispatch with kernels in Triton's interpreter: as packed sequences, and with lists of blocks."""

import gc
import itertools
import math
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interpreting import failures_of
from list_cases import visible_pairs
from mod_cases import oracle
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from flashtune import dispatch
from flashtune.dispatch.functions import documents as flex_documents

warnings.filterwarnings("ignore")

N, BATCH, HEADS, KV_HEADS = 41, 2, 4, 2
PACKED = "packed sequences of "


@contextmanager
def _short() -> Iterator[None]:
    """Documents of any length are packed sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_documents, "SHORTEST_MEAN", 0)
        yield


def runs(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)) * 7 - 3, torch.tensor(lengths))


SHARED = runs(9, 1, 20, 1, 1, 9)
EACH = torch.stack([SHARED, runs(30, 11)])
SLOPES = torch.tensor([0.5, -0.25, 0.03125, 1.75])
BY_BATCH = torch.arange(8.0).view(2, 4) / 8
OFFSETS = torch.tensor([0, 17, 41])


def same(q: Tensor, k: Tensor) -> Tensor:
    return SHARED[q] == SHARED[k]


def within(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return EACH[b, q] == EACH[b, k]


def capped(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 1.5 * torch.tanh(s / 1.5)


def sloping(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 0.5 * s - SLOPES[h] * (q - k).abs()


def computed(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + (k - q) * torch.exp2(-(h + 1.0))


def by_batch(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s - BY_BATCH[b, h] * (q - k).abs()


def relative(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + SLOPES[(q - k).clamp(0, 3)]


Mod = Callable[..., Tensor]
HEADS_OUTSIDE, ROWS_OUTSIDE = "(B, H, N, D)", "(B, N, H, D)"
BOTH = (HEADS_OUTSIDE, ROWS_OUTSIDE)

CASES: dict[str, tuple[Mod, Mod | None, tuple[int, ...], tuple[str, ...]]] = {
    "shared": (lambda b, h, q, k: same(q, k), None, (1,), BOTH),
    "shared causal": (lambda b, h, q, k: same(q, k) & (q >= k), None, (1, 2), BOTH),
    "own, causal": (lambda b, h, q, k: (q >= k) & within(b, k, q), None, (1, 2), (ROWS_OUTSIDE,)),
    "own, window": (lambda b, h, q, k: (q - k <= 5) & within(b, q, k) & (k - q <= 2), capped, (2,), (ROWS_OUTSIDE,)),
    "slopes": (lambda b, h, q, k: same(q, k) & ((q - k).abs() < 7), sloping, (2,), (ROWS_OUTSIDE,)),
    "computed slopes": (lambda b, h, q, k: same(q, k) & (q >= k), computed, (2,), (HEADS_OUTSIDE,)),
    "slopes of batches": (lambda b, h, q, k: same(q, k), by_batch, (2,), (HEADS_OUTSIDE,)),
}
"""Masks, scores, batches and layouts of calls that are packed sequences."""

OTHERS: dict[str, tuple[Mod, Mod | None, tuple[int, ...], tuple[str, ...]]] = {
    "own": (lambda b, h, q, k: within(b, q, k), None, (2,), (HEADS_OUTSIDE,)),
    "slopes of batches": (lambda b, h, q, k: same(q, k), by_batch, (2,), (ROWS_OUTSIDE,)),
    "score": (lambda b, h, q, k: same(q, k), relative, (1,), BOTH),
    "prefix": (lambda b, h, q, k: same(q, k) & ((q >= k) | (k < 3)), None, (1,), BOTH),
    "again": (lambda b, h, q, k: REPEATED[q] == REPEATED[k], None, (1,), BOTH),
}
"""Those that lists of blocks serve."""

REPEATED = runs(9, 1, 20, 1, 1, 9) % 2


def tensors(batch: int, layout: str = HEADS_OUTSIDE, n: int = N, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator, found = torch.Generator().manual_seed(5), []
    for heads, d in ((HEADS, 16), (KV_HEADS, 16), (KV_HEADS, 32)):
        shape = (batch, heads, n, d) if layout == HEADS_OUTSIDE else (batch, n, heads, d)
        x = torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        found.append(x if layout == HEADS_OUTSIDE else x.transpose(1, 2))
    return found


def agrees(given: list[Tensor], mask: Any, score: Mod | None, *, packed: bool, function: Any = None) -> None:
    """Raises where output, LSE or gradients aren't those of the functions in float64, or another path serves."""
    words: dict[str, Any] = {"score_mod": score, "block_mask": mask, "enable_gqa": True, "return_lse": True}
    said = dispatch.explain_flex(*given, **words).reason
    assert said.startswith(PACKED if packed else "flash_fwd"), said
    out, lse = dispatch.flex_attention(*given, **words)
    assert lse.shape == out.shape[:3] and lse.dtype is torch.float32
    outside = given[0].stride(1) > given[0].stride(2)
    assert (out if outside else out.transpose(1, 2)).is_contiguous(), out.stride()
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    gradients = torch.autograd.grad((out * weights).sum() + lse.sin().sum(), given)
    doubles = [x.detach().double().requires_grad_() for x in given]
    out64, lse64 = oracle(*doubles, score, function or mask)
    right = torch.autograd.grad((out64 * weights).sum() + lse64.sin().sum(), doubles)
    for ours, theirs in zip((out, lse, *gradients), (out64, lse64, *right), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


def of_case(name: str) -> None:
    kind, _, case = name.partition(": ")
    mask, score, batches, layouts = {"packed": CASES, "blocks": OTHERS}[kind][case]
    for batch, layout in itertools.product(batches, layouts):
        agrees(tensors(batch, layout), mask, score, packed=kind == "packed")


def of_block_masks() -> None:
    """A BlockMask is compared with its documents once, and one of other blocks shows what it lists."""
    mask = CASES["shared causal"][0]
    block_mask = create_block_mask(mask, None, None, N, N, device="cpu", BLOCK_SIZE=16)
    agrees(tensors(2), block_mask, capped, packed=True, function=mask)
    foreign = create_block_mask(lambda b, h, q, k: q >= k, None, None, N, N, device="cpu", BLOCK_SIZE=16)
    foreign.mask_mod = mask
    shown = visible_pairs(foreign, (2, HEADS, N, N))
    agrees(tensors(2), foreign, None, packed=False, function=lambda b, h, q, k: shown[b, h, q, k])


def of_lifetimes() -> None:
    """Numbers that nobody else holds are freed, with the bounds that were made of them."""
    document = SHARED.clone()

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor, document: Tensor = document) -> Tensor:
        return document[q] == document[k]

    block_mask = create_block_mask(mask, None, None, N, N, device="cpu", BLOCK_SIZE=16)
    with torch.no_grad():
        dispatch.flex_attention(*tensors(1), block_mask=block_mask, enable_gqa=True)
    left = weakref.ref(document)
    del document, mask, block_mask
    gc.collect()
    assert left() is None


def of_documents_within_offsets() -> None:
    """Positions that count from a document's first token differ by as much as rows do."""
    document = runs(17, 24) // 7 + 1

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        i, j = q - OFFSETS[document[q]], k - OFFSETS[document[k]]
        return (document[q] == document[k]) & (i >= j) & (i - j < 9)

    agrees(tensors(1), mask, None, packed=True)


def of_random_runs() -> None:
    generator = random.Random(3)
    for _ in range(4):
        lengths = [generator.choice((1, 1, 2, 5, 17, 30)) for _ in range(generator.randint(1, 7))]
        document, n = runs(*lengths), sum(lengths)
        left = generator.choice((0, 4, n))

        def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor, document: Tensor = document, left: int = left) -> Tensor:
            return (document[k] == document[q]) & (q - k <= left)

        block_mask = create_block_mask(mask, None, None, n, n, device="cpu", BLOCK_SIZE=16)
        agrees(tensors(generator.choice((1, 2)), generator.choice(BOTH), n), block_mask, None, packed=True, function=mask)


def of_changes_in_place() -> None:
    """Numbers are read once while they stay the same, and again where they changed, whoever wrote them."""
    document, read = SHARED.clone(), []
    given, memory = tensors(1), document.numpy()

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return document[q] == document[k]

    runs_of = flex_documents._runs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_documents, "_runs", lambda *words: read.append(words) or runs_of(*words))
        agrees(given, mask, None, packed=True)
        agrees(given, lambda b, h, q, k: document[q] == document[k], None, packed=True)
        assert len(read) == 1
        document[20:30] = 99
        agrees(given, mask, None, packed=True)
        assert len(read) == 2
        version = document._version
        memory[9:15] = -5
        agrees(given, mask, None, packed=True)
        assert len(read) == 3
        memory[30] = memory[0]
        assert document._version == version, "written unseen"
        agrees(given, mask, None, packed=False)
        assert len(read) == 4


def of_block_masks_of_numbers_that_change_unseen() -> None:
    """Under a BlockMask made anew, and under the same one: where its blocks are those of the numbers no longer, these say
    what is visible."""
    document, given, visible = SHARED.clone(), tensors(1), torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    memory = document.numpy()

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & (q >= k)

    def made() -> Any:
        return create_block_mask(mask, None, None, N, N, device="cpu", BLOCK_SIZE=16)

    # All blocks of this one need the mask, whatever the numbers are.
    places = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3)
    lasting = BlockMask.from_kv_blocks(visible.sum(-1, dtype=torch.int32), places, BLOCK_SIZE=16, mask_mod=mask, seq_lengths=(N, N))
    before = made()
    for lengths in ((9, 32), (20, 21), (3, 10, 28)):
        memory[:] = runs(*lengths).numpy()
        for block_mask in (made(), lasting):
            agrees(given, block_mask, None, packed=True, function=mask)
        shown = visible_pairs(before, (1, HEADS, N, N))
        agrees(given, before, None, packed=False, function=lambda b, h, q, k, shown=shown: shown[b, h, q, k])


def of_inference_mode() -> None:
    """Numbers that were made in inference mode are read likewise; bounds from there serve gradients later."""
    document = SHARED.clone()
    given = tensors(1)
    words: dict[str, Any] = {"enable_gqa": True}
    with torch.inference_mode():
        made_here = SHARED.clone()
        here = lambda b, h, q, k: made_here[q] == made_here[k]  # noqa: E731
        for start in (3, 22):
            made_here[start:] = document[start:] = start
            out = dispatch.flex_attention(*given, block_mask=lambda b, h, q, k: document[q] == document[k], **words)
            assert dispatch.explain_flex(*given, block_mask=here, **words).reason.startswith(PACKED)
            torch.testing.assert_close(dispatch.flex_attention(*given, block_mask=here, **words), out, atol=2e-5, rtol=2e-5)
    agrees(given, lambda b, h, q, k: document[q] == document[k], None, packed=True)


def of_lists_of_blocks_instead() -> None:
    """Captured CUDA graphs, slopes that get gradients, short documents and keys of other lengths take lists of blocks."""
    given, mask = tensors(1), CASES["shared causal"][0]
    slopes = SLOPES.clone().requires_grad_()

    def said(given: list[Tensor], score: Mod | None = None) -> str:
        return dispatch.explain_flex(*given, score_mod=score, block_mask=mask, enable_gqa=True).reason

    def learned(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - slopes[h] * (q - k)

    assert said(given).startswith(PACKED + "6 documents: flash_fwd, packed sequences take")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_documents, "capturing", lambda device: True)
        assert said(given).startswith("flash_fwd")
    with pytest.MonkeyPatch.context() as patch:
        flex_documents.DECISIONS.clear()
        patch.setattr(flex_documents, "SHORTEST_MEAN", 7)
        assert said(given).startswith("flash_fwd")
    assert said(given, learned).startswith("flash_fwd")
    with torch.no_grad():
        assert said(given, learned).startswith(PACKED)
    assert said([given[0][:, :, :30], *given[1:]]).startswith("flash_fwd")
    # Neither heads nor rows of batches lie together.
    assert said([x.repeat(2, 2, 1, 1)[:, : x.shape[1]] for x in given]).startswith("flash_fwd")
    torch.use_deterministic_algorithms(True)
    try:
        assert said(given).startswith("PyTorch by matrices of all scores: deterministic")
    finally:
        torch.use_deterministic_algorithms(False)


def of_layouts_of_a_projection() -> None:
    """Parts of one tensor, an LSE in an AuxOutput, and a batch of keys for all."""
    mask = CASES["shared causal"][0]
    q, k, v = torch.randn(2, N, 3, HEADS, 16, generator=torch.Generator().manual_seed(1)).transpose(1, 3).unbind(2)
    out, aux = dispatch.flex_attention(q, k, v, None, mask, return_aux=AuxRequest(lse=True))
    assert dispatch.explain_flex(q, k, v, None, mask).reason.startswith(PACKED)
    out64, lse64 = oracle(q.double(), k.double(), v.double(), None, mask)
    torch.testing.assert_close(out.double(), out64, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(aux.lse.double(), lse64, atol=2e-5, rtol=2e-5)
    assert out.transpose(1, 2).is_contiguous()
    one = [x[:1] for x in (k, v)]
    assert dispatch.explain_flex(q, *one, block_mask=mask).reason.startswith("flash_fwd")
    torch.testing.assert_close(
        dispatch.flex_attention(q, *one, block_mask=mask).double(),
        oracle(q.double(), *(x.double() for x in one), None, mask)[0],
        atol=2e-5,
        rtol=2e-5,
    )


def of_neighbours() -> None:
    """NaN in one document reaches no other."""
    mask = CASES["shared"][0]
    q, k, v = (x.detach() for x in tensors(1))
    right = dispatch.flex_attention(q, k, v, None, mask, enable_gqa=True)
    k[:, :, 9:10], v[:, :, 9:10] = math.nan, math.nan
    found = dispatch.flex_attention(q, k, v, None, mask, enable_gqa=True)
    assert (
        found[:, :, 9].isnan().all() and torch.equal(found[:, :, 10:], right[:, :, 10:]) and torch.equal(found[:, :, :9], right[:, :, :9])
    )


def main(*names: str) -> dict[str, str]:
    """Failures of the named cases, or without names of everything else."""
    return failures_of(globals(), of_case, names, _short)
