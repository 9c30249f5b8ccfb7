"""Masks of documents: recognised by their graphs, compared with a BlockMask's blocks, and served as packed sequences."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpret_documents import CASES, OTHERS
from interpreting import interpreted
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flashtune import dispatch
from flashtune.dispatch.functions import blocks as flex_blocks
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.templates.mods.structure import Band

CPU = torch.device("cpu")
DOCUMENT = torch.repeat_interleave(torch.tensor([5, -1, 2]), torch.tensor([9, 1, 14]))
EACH = torch.stack([DOCUMENT, DOCUMENT.flip(0)])
BYTES, TRUTHS, HALVES = DOCUMENT.to(torch.int8), DOCUMENT > 0, DOCUMENT.half()
NUMBERS = torch.repeat_interleave(torch.arange(3), torch.tensor([9, 1, 14]))
OFFSETS = torch.tensor([0, 9, 10, 24])

Mod = Callable[..., Any]


def test_calls_of_documents_are_packed_sequences_and_agree_with_the_functions() -> None:
    report = interpreted("interpret_documents", *(f"packed: {name}" for name in CASES), *(f"blocks: {name}" for name in OTHERS))
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) == len(CASES) + len(OTHERS)


def test_packed_documents_keep_the_promises_of_flex_attention() -> None:
    report = interpreted("interpret_documents")
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) > 6


def of_logical(inner: Mod) -> Mod:
    """A mask on positions within documents."""

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (NUMBERS[q] == NUMBERS[k]) & inner(b, h, q - OFFSETS[NUMBERS[q]], k - OFFSETS[NUMBERS[k]])

    return mask


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def anything(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return b.new_ones(size=(), dtype=torch.bool)


KNOWN: list[tuple[Mod, Band]] = [
    (lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k], (None, None)),
    (lambda b, h, q, k: (DOCUMENT[k] == DOCUMENT[q]) & (q >= k), (None, 0)),
    (lambda b, h, q, k: torch.logical_and(q >= k, DOCUMENT[q] == DOCUMENT[k]), (None, 0)),
    (lambda b, h, q, k: (q - k <= 4) & ((EACH[b, q] == EACH[b, k]) & (k - q < 3)), (4, 2)),
    (lambda b, h, q, k: (DOCUMENT[q.to(int)] == DOCUMENT[k.long()]) & (q.long() - k.long() < 4) & (q >= k), (3, 0)),
    (lambda b, h, q, k: BYTES[q].int() == BYTES[k], (None, None)),
    (lambda b, h, q, k: TRUTHS[q] == TRUTHS[k], (None, None)),
    (of_logical(causal), (None, 0)),
    (of_logical(anything), (None, None)),
    (of_logical(lambda b, h, q, k: (q - k).abs() <= 6), (6, 6)),
    (of_logical(lambda b, h, q, k: (q >= k) & (q - k <= 6)), (6, 0)),
]

UNKNOWN: list[Mod] = [
    lambda b, h, q, k: HALVES[q] == HALVES[k],
    lambda b, h, q, k: DOCUMENT[q].to(torch.int8) == DOCUMENT[k],
    lambda b, h, q, k: DOCUMENT[q].float() == DOCUMENT[k].float(),
    lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[q],
    lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k // 2],
    lambda b, h, q, k: DOCUMENT[q] == NUMBERS[k],
    lambda b, h, q, k: DOCUMENT[q] >= DOCUMENT[k],
    lambda b, h, q, k: EACH[h, q] == EACH[h, k],
    lambda b, h, q, k: EACH[b, q] == EACH[0, k],
    lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (NUMBERS[q] == NUMBERS[k]),
    lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) | (q >= k),
    lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q > k),
    lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (k < 3),
    lambda b, h, q, k: (NUMBERS[q] == NUMBERS[k]) & (q - OFFSETS[NUMBERS[q]] >= k),
    lambda b, h, q, k: q - OFFSETS[NUMBERS[q]] >= k - OFFSETS[NUMBERS[k]],
]


@pytest.mark.parametrize("place", range(len(KNOWN)))
def test_documents_are_recognised_and_equal(place: int) -> None:
    mask, band = KNOWN[place]
    functions, captured = flex_functions._traced(None, mask, CPU)
    documents = functions.documents
    assert documents is not None and documents.band == band and functions.known is None
    assert documents.by_batch is (captured[documents.captured] is EACH)
    b, h, q, k = torch.arange(2)[:, None, None], torch.zeros((), dtype=torch.int64), torch.arange(24)[:, None], torch.arange(24)
    ids = captured[documents.captured].expand(2, 24)
    left, right = (99 if side is None else side for side in band)
    right_mask = (ids[:, :, None] == ids[:, None]) & (k >= q - left) & (k <= q + right)
    assert torch.equal(torch.as_tensor(mask(b, h, q, k)).expand(2, 24, 24), right_mask)


@pytest.mark.parametrize("place", range(len(UNKNOWN)))
def test_other_masks_are_no_documents(place: int) -> None:
    assert flex_functions._traced(None, UNKNOWN[place], CPU)[0].documents is None


def test_a_mask_of_all_pairs_is_an_open_band() -> None:
    known = flex_functions._traced(None, anything, CPU)[0].known
    assert known is not None and known[0] == (None, None)


def test_values_that_are_used_many_times_are_compared_once() -> None:
    """Each step doubles the paths to the first value."""
    slopes = torch.ones(4)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        x = slopes[h]
        for _ in range(60):
            x = x + x * x
        return s - x * (q - k).abs()

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found, place = q >= k, q
        for _ in range(60):
            found, place = found & found, torch.maximum(place, place)
        return found & (place + k >= k + place)

    assert flex_functions._traced(score, None, CPU)[0].known is not None
    assert flex_functions._traced(None, mask, CPU)[0].known is None


@pytest.mark.parametrize("block", [16, (32, 16), 128])
@pytest.mark.parametrize("band", [(None, None), (None, 0), (9, 0), (40, 3)], ids=str)
def test_blocks_of_documents_are_those_of_their_mask(band: Band, block: Any) -> None:
    generator = random.Random(str((band, block)))
    left, right = (999 if side is None else side for side in band)
    for batch in (1, 2):
        lengths = [[generator.choice((1, 3, 16, 40)) for _ in range(60)] for _ in range(batch)]
        ids = torch.stack([torch.repeat_interleave(torch.arange(60), torch.tensor(one))[:190] for one in lengths])

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor, ids: Tensor = ids) -> Tensor:
            return (ids[b, q] == ids[b, k]) & (k >= q - left) & (k <= q + right)

        x = torch.empty(batch, 1, 190, 8)
        mask = create_block_mask(mask_mod, batch, None, 190, 190, device="cpu", BLOCK_SIZE=block)
        assert flex_blocks.agrees_with_band(mask, band, x, x, ids)
        kinds = flex_blocks._kinds_of_band(band, 190, 190, mask.BLOCK_SIZE, CPU)
        kinds = flex_blocks._kinds_of_documents(kinds, ids, 190, mask.BLOCK_SIZE)
        seen = mask_mod(*torch.meshgrid(*map(torch.arange, (batch, 1, 190, 190)), indexing="ij"))
        for b, _, i, j in itertools.product(*map(range, kinds.shape)):
            tile = seen[b, 0, i * mask.BLOCK_SIZE[0] :, j * mask.BLOCK_SIZE[1] :][: mask.BLOCK_SIZE[0], : mask.BLOCK_SIZE[1]]
            assert kinds[b, 0, i, j] == (1 if tile.all() else 0 if tile.any() else 2)


def test_torch_serves_documents_on_the_cpu() -> None:
    x = torch.randn(1, 2, 24, 16)
    assert dispatch.explain_flex(x, x, x, None, KNOWN[0][0]).reason.startswith("PyTorch's flex_attention: no kernel runs on cpu")
