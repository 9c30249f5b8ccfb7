"""Memory around a call that others compute: copies of its inputs with guard bands, and poisoned memory for what it allocates.

A library allocates its outputs itself. The memory that PyTorch's allocator gives it next was filled with NaN, so that elements which
nothing writes are NaN, and lies between blocks whose contents are known, as far as the allocator has such places.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

GUARD = 256
"""Poisoned elements before and after a tensor, a multiple of 16 bytes so that TMA's alignment holds."""

HOLES = 3
"""Freed blocks of an output's size, each between two that stay."""

_LARGE = 2**24
"""Bytes of an output from which one block alone is freed, and none stays: such blocks have no neighbours in the allocator."""


def guarded_copy(x: Tensor) -> Tensor:
    """Copy of a tensor with its strides, detached, with NaN on both sides of it in memory (the largest number for other types)."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    buffer = torch.empty(extent + 2 * GUARD, dtype=x.dtype, device=x.device)
    buffer.fill_(math.nan if x.dtype.is_floating_point else True)
    copy = buffer.as_strided(x.shape, x.stride(), GUARD)
    distinct = tuple(slice(None if stride else 1) for stride in x.stride())
    copy[distinct].copy_(x.detach()[distinct])
    return copy


def _bytes(x: Tensor) -> Tensor:
    """All bytes of a tensor's memory, what lies around it included."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


class Kept:
    """Contents of tensors, with all of their memory, as they were when this was made; `titles` name them in messages."""

    def __init__(self, titles: Mapping[str, Tensor]) -> None:
        self._kept = [(title, memory := _bytes(x), memory.clone()) for title, x in titles.items()]

    def changed(self) -> str:
        """The first of them that was written to since, or ""; all are put back."""
        found = ""
        for title, memory, before in self._kept:
            if not torch.equal(memory, before):
                found = found or title
                memory.copy_(before)
        return found


class Poisoned:
    """Freed memory of these sizes, in elements of a type, which is NaN, between blocks that are NaN and stay while this is kept."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        stay: dict[str, Tensor] = {}
        for place, size in enumerate(sizes):
            few = size * dtype.itemsize > _LARGE
            # One more is freed on a GPU: it takes what is left of a segment, where that is exactly of this size.
            count = 1 if few else 2 * HOLES + 1 + (device.type == "cuda")
            blocks = [torch.full((size,), math.nan, dtype=dtype, device=device) for _ in range(count)]
            staying = () if few else blocks[: 2 * HOLES + 1 : 2]
            stay |= {f"memory beside its outputs ({place}, {number})": one for number, one in enumerate(staying)}
            del blocks
        self._stay = Kept(stay)

    def changed(self) -> str:
        """The memory beside outputs, where that was written to, or ""."""
        return "memory beside its outputs" if self._stay.changed() else ""
