"""BlockMasks of random lists for tests on a CPU, in the interpreter and on a GPU; the oracle is the lists' dense form in float64."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from mod_cases import oracle
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flashtune.templates.launches.common import cdiv

SIZES = ((16, 16), (64, 64), (128, 128), (32, 64), (64, 16), (48, 80))
EMPTY = (0.0, 0.5, 0.9)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Each token sees itself and those before it."""
    return q >= k


def strided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """No band: every third key, from another one on in each head."""
    return (q + k + h) % 3 > 0


MASKS: tuple[Callable[..., Tensor] | None, ...] = (None, causal, strided)


@dataclass(frozen=True)
class Lists:
    """A call under a BlockMask, and which pairs are visible (batches, heads, queries, keys)."""

    tensors: list[Tensor]
    mask: Any
    visible: Tensor
    score: Callable[..., Tensor] | None = None

    def call(self, function: Callable[..., Any], **words: Any) -> Any:
        """Result of a function of FlexAttention's arguments."""
        return function(*self.tensors, self.score, self.mask, enable_gqa=True, **words)


def lists_of(kinds: Tensor, kind: int, generator: torch.Generator, width: int) -> tuple[Tensor, Tensor]:
    """Numbers and places, in random order, of the blocks of a kind; what follows in a row is no block's place."""
    chosen = kinds == kind
    order = (torch.rand(kinds.shape, generator=generator) - chosen.float()).argsort(-1)
    number = chosen.sum(-1, dtype=torch.int32)
    places = order[..., :width].int()
    return number, torch.where(torch.arange(places.shape[-1]) < number[..., None], places, 10**6)


def visible_pairs(mask: Any, sizes: tuple[int, int, int, int]) -> Tensor:
    """Pairs that a BlockMask shows: those of its full blocks, and of others what its mask_mod shows."""
    kinds = torch.full((*mask.kv_indices.shape[:3], cdiv(sizes[3], mask.BLOCK_SIZE[1])), 2)
    for count, places, kind in ((mask.kv_num_blocks, mask.kv_indices, 0), (mask.full_kv_num_blocks, mask.full_kv_indices, 1)):
        for *row, place in [] if count is None else (torch.arange(places.shape[-1]) < count[..., None].cpu()).nonzero().tolist():
            kinds[(*row, int(places[(*row, place)]))] = kind
    by_pair = kinds.repeat_interleave(mask.BLOCK_SIZE[0], -2).repeat_interleave(mask.BLOCK_SIZE[1], -1)[..., : sizes[2], : sizes[3]]
    shown = mask.mask_mod(*torch.meshgrid(*map(torch.arange, sizes), indexing="ij"))
    return ((by_pair == 1) | ((by_pair == 0) & shown)).expand(sizes)


def drawn(seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu", most: int = 150, d: int = 16, sizes: Any = SIZES) -> Lists:
    """A random call: lists of each head or of all, partial and full ones, ragged lengths, with a score or without."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads, group = draw.choice((1, 2)), draw.choice((1, 2)), draw.choice((1, 2, 3))
    n_q, n_kv, size, empty = draw.randint(1, most), draw.randint(1, most), draw.choice(sizes), draw.choice(EMPTY)
    heads = kv_heads * group
    planes = draw.choice((1, batch)), draw.choice((1, heads))
    rows, columns = cdiv(n_q, size[0]), cdiv(n_kv, size[1])
    kinds = (torch.rand((*planes, rows, columns), generator=generator) < draw.choice((0.0, 0.5))).int()
    kinds = torch.where(torch.rand(kinds.shape, generator=generator) < empty, 2, kinds)
    mask_mod, partial = draw.choice(MASKS), draw.random() < 0.8
    if not partial:
        kinds = torch.where(kinds == 1, 0, kinds)
    # As wide as the longest row, as a router's are.
    width = max(1, int((kinds < 2).sum(-1).max())) if draw.random() < 0.5 else columns
    lists = [*lists_of(kinds, 0, generator, width), *(lists_of(kinds, 1, generator, width) if partial else ())]
    mask = BlockMask.from_kv_blocks(
        *[x.to(device) for x in lists], BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(n_q, n_kv), compute_q_blocks=False
    )
    shapes = (batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, draw.choice((d, 2 * d)))
    tensors = [_amid_nans(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]
    score = draw.choice((None, None, lambda s, b, h, q, k: s + torch.sin(q - k + 0.5)))
    return Lists(tensors, mask, visible_pairs(mask, (batch, heads, n_q, n_kv)).to(device), score)


def _amid_nans(x: Tensor) -> Tensor:
    """The same numbers with NaN behind each head's rows, as far as a block reaches."""
    memory = x.new_full((*x.shape[:2], x.shape[2] + 128, x.shape[3]), torch.nan)
    memory[:, :, : x.shape[2]] = x
    return memory[:, :, : x.shape[2]].requires_grad_()


def errors(given: Lists, attend: Callable[..., Any]) -> list[float]:
    """Largest errors of output, LSE and gradients over the largest numbers, by a function of FlexAttention's arguments."""
    out, lse = given.call(attend, return_lse=True)
    twins = [x.detach().double().requires_grad_() for x in given.tensors]
    right, right_lse = oracle(*twins, given.score, lambda *_: given.visible)
    finite = right_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite), "infinite where the oracle isn't"
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    found = torch.autograd.grad((out * weights).sum() + lse[finite].sin().sum(), given.tensors)
    wanted = torch.autograd.grad((right * weights.double()).sum() + right_lse[finite].sin().sum(), twins)
    pairs = [(out, right), (lse[finite], right_lse[finite]), *zip(found, wanted, strict=True)]
    return [_gap(x.detach().double(), y.detach()) for x, y in pairs]


def _gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)) if theirs.numel() else 0.0
