"""Arguments of PyTorch's FlexAttention: functions for a band and a soft cap, and the blocks of a mask."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtune.core.band import Band

Mod = Callable[..., Tensor]

COMPILED_PAIRS = 1 << 26
"""Pairs of queries and keys above which a mask's blocks are found by a compiled function. Plain operations take seconds less, but hold
several tensors of all pairs at a time: 0.5 GiB each at this size, of numbers of 64 bits."""

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
    from torch.nn.attention.flex_attention import create_block_mask

    many = math.prod(size or 1 for size in sizes) > COMPILED_PAIRS
    make: Any = torch.compile(create_block_mask) if many and mask_mod is not None else create_block_mask
    return {"score_mod": score_mod, "block_mask": None if mask_mod is None else make(mask_mod, *sizes, device=device)}
