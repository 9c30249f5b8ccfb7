"""Arguments of PyTorch's FlexAttention: functions for a band and a soft cap, and the blocks of a mask."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtune.core.problems.band import Band

Mod = Callable[..., Tensor]

PAIRS_AT_ONCE = 1 << 26
"""Pairs of queries and keys whose visibility is in memory at a time while a mask's blocks are counted: several tensors of 64-bit numbers,
0.5 GiB each at this size."""

BLOCK = 128
"""Queries and keys of a mask's block, as `create_block_mask` has them."""

FAR = 1 << 30
"""Distance that no two places have."""


def within(distance: Tensor, left: int | None, right: int | None) -> Tensor:
    """True for keys at most `left` places before the one on their query's diagonal and `right` behind it, None for any number; `distance`
    is from a key to the diagonal."""
    inside = distance >= -(FAR if right is None else min(right, FAR))
    return inside if left is None else inside & (distance <= min(left, FAR))


def band_mod(band: Band, shifts: Tensor | None = None) -> Mod:
    """Mask of the pairs within a band, as a function; `shifts` are the places of each query's own diagonal, int32 (N_q,)."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        diagonal = band.diagonal if shifts is None else shifts[i]
        # Distances of all pairs are in memory once, while blocks are counted.
        return within((i + diagonal).to(torch.int32) - j.to(torch.int32), band.left, band.right)

    return seen


def soft_cap_mod(cap: float) -> Mod | None:
    """Score of a soft cap, as a function; None for 0, which caps nothing."""

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped if cap else None


def flex_arguments(
    mask_mod: Mod | None, score_mod: Mod | None, sizes: tuple[int | None, int | None, int, int], device: torch.device
) -> dict[str, Any]:
    """Arguments of flex_attention for a mask and a score as functions; `sizes` are the batches, heads (None where the mask is equal in
    all), queries and keys."""
    return {"score_mod": score_mod, "block_mask": None if mask_mod is None else block_mask(mask_mod, sizes, device)}


def block_mask(mask_mod: Mod, sizes: tuple[int | None, int | None, int, int], device: torch.device) -> Any:
    """The BlockMask that `create_block_mask` makes, from strips of queries where all pairs would be too many to hold.

    PyTorch's remedy, `create_block_mask` compiled, may compile for longer than a search lasts.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

    batches, heads, n_q, n_kv = sizes
    row = (batches or 1) * (heads or 1) * n_kv
    if row * n_q <= PAIRS_AT_ONCE:
        return create_block_mask(mask_mod, *sizes, device=device)
    rows, found = max(1, PAIRS_AT_ONCE // row // BLOCK) * BLOCK, list[Tensor]()
    for first in range(0, n_q, rows):

        def strip(b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: int = first) -> Tensor:
            return mask_mod(b, h, i + first, j)

        seen = create_mask(strip, batches, heads, min(rows, n_q - first), n_kv, device)
        seen = torch.nn.functional.pad(seen, (0, -n_kv % BLOCK, 0, -seen.shape[2] % BLOCK))
        blocks = seen.shape[2] // BLOCK, BLOCK, seen.shape[3] // BLOCK, BLOCK
        found.append(seen.reshape(*seen.shape[:2], *blocks).sum((3, 5)))
    seen_pairs = torch.cat(found, 2)
    full = seen_pairs == BLOCK * BLOCK
    return BlockMask.from_kv_blocks(*ordered((seen_pairs > 0) & ~full), *ordered(full), mask_mod=mask_mod, seq_lengths=(n_q, n_kv))


def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the blocks of each row, and their places before those of the others."""
    numbers = blocks.int()
    return numbers.sum(3, dtype=torch.int32), torch.argsort(numbers, dim=3, descending=True, stable=True).int()
