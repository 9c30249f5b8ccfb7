"""Caches of pages with the keys and values of packed sequences: in shuffled blocks, with NaN wherever a kernel mustn't read."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from flashtune.core.pytorch.surroundings import GUARD

SPARE = 2
"""Blocks that no page is in, and columns of the table behind those of the longest sequence."""

GARBAGE = -1, 2**31 - 1
"""Entries of the table behind a sequence's pages, where no block is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Keys and values in pages as launches take them, (blocks, Hkv, page, D) views of (blocks, page, Hkv, D), with the table
    (sequences, columns) of blocks and the lengths (sequences,), int32. `slots` is the row of the cache of each packed row, int64. Values
    that are `latent` are columns of keys."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    used: torch.Tensor
    slots: torch.Tensor
    latent: bool = False

    def store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy packed keys and values (1, Hkv, T, D) to their places."""
        for cache, rows in self._beside(k, v):
            if not cache.is_meta:
                _rows(cache).index_copy_(0, self.slots, rows[0].transpose(0, 1))

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy the pages' contents to packed keys and values, which hold the same."""
        for cache, rows in self._beside(k, v):
            torch.index_select(_rows(cache), 0, self.slots, out=rows[0].transpose(0, 1))

    def _beside(self, k: torch.Tensor, v: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each cache with the rows that it holds."""
        return [(self.k, k), (self.v, v)][: 2 - self.latent]


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """All slots of a cache, (blocks * page, Hkv, D)."""
    return cache.transpose(1, 2).flatten(0, 1)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """Uninitialised tensor, contiguous unless `strides` are given, with NaN on both sides of it in memory and in gaps between its rows."""
    size = prod(shape) if strides is None else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    buffer = torch.full((size + 2 * GUARD,), float("nan"), dtype=dtype, device=device)
    return buffer[GUARD : GUARD + size].view(shape) if strides is None else buffer.as_strided(shape, strides, GUARD)


def pages_of(
    page: int,
    sequences: Sequence[tuple[int, int]],
    rows: tuple[torch.Tensor, torch.Tensor],
    generator: torch.Generator | None,
    *,
    latent: bool = False,
) -> Pages:
    """Caches for the keys of these sequences, all NaN until they are stored, with `page` keys to a block in an order of the generator
    (None for meta tensors); `rows` are packed keys and values (1, Hkv, T, D)."""
    device, counts = rows[0].device, [-(-n_kv // page) for _, n_kv in sequences]
    blocks, columns = sum(counts) + SPARE, max(counts) + SPARE
    caches = []
    for x in rows[: 2 - latent]:
        shape = blocks, page, x.shape[1], x.shape[3]
        cache = torch.empty(shape, dtype=x.dtype, device=device) if generator is None else guarded(shape, x.dtype, device).fill_(torch.nan)
        caches.append(cache.transpose(1, 2))
    if latent:
        caches.append(caches[0][..., : rows[1].shape[3]])
    order = torch.arange(blocks) if generator is None else torch.randperm(blocks, generator=generator, device=device).cpu()
    table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(counts), columns)[:, :columns].contiguous()
    slots, first = [], 0
    for b, (count, (_, n_kv)) in enumerate(zip(counts, sequences, strict=True)):
        own = order[first : first + count]
        table[b, :count] = own
        slots.append((own[:, None] * page + torch.arange(page)).flatten()[:n_kv])
        first += count
    used = torch.tensor([n_kv for _, n_kv in sequences], dtype=torch.int32)
    return Pages(
        k=caches[0],
        v=caches[1],
        latent=latent,
        table=table.to(device),
        used=used.to(device),
        slots=torch.cat(slots).to(device, torch.int64),
    )
