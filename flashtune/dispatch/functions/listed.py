"""BlockMasks whose lists say what is visible, such as a router's: the kinds of their blocks, as a mask and for tiles of any size."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtune.core.pytorch.flex import Mod
from flashtune.core.system.errors import InputError
from flashtune.templates.launches.common import cdiv

PARTIAL, VISIBLE, HIDDEN = 0, 1, 2
"""Kinds of blocks and of tiles: the mask_mod says which pairs are visible, all are, none is."""


def by_lists(kinds: Tensor, size: tuple[int, int], mask_mod: Mod | None) -> Mod:
    """Mask of kinds (batches, heads, rows, columns) of blocks of a size: those that need it show what the mask_mod does (None: all)."""

    def listed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kind = kinds[b, h, q_idx // size[0], kv_idx // size[1]]
        return kind != HIDDEN if mask_mod is None else (kind == VISIBLE) | ((kind == PARTIAL) & mask_mod(b, h, q_idx, kv_idx))

    return listed


class Listed:
    """A mask of what a BlockMask lists: `kinds` of blocks of `size`, int8 (batches, heads, rows, columns), with batches and heads of 1
    where all have the same lists."""

    def __init__(self, kinds: Tensor, size: tuple[int, int], mask_mod: Mod | None, batches: int, heads: int) -> None:
        self.kinds, self.size = kinds, size
        # Held, since decided calls hold captured tensors weakly.
        self.visible = by_lists(kinds.expand(batches, heads, -1, -1), size, mask_mod)

    def __call__(self, *places: Tensor) -> Tensor:
        """True for the pairs that are visible, as of a mask_mod."""
        return self.visible(*places)


def own_lists(mask: Any, *, of_keys: bool = False) -> list[Tensor | None]:
    """A BlockMask's numbers and places of blocks, then those of full ones, for rows of queries or (`of_keys`) of keys."""
    of = "q" if of_keys else "kv"
    return [getattr(mask, f"{full}{of}_{name}", None) for full in ("", "full_") for name in ("num_blocks", "indices")]


def kinds_of_lists(mask: Any, lengths: Sequence[int], *, alone: bool = False, of_keys: bool = False) -> Tensor:
    """Kinds of a BlockMask's blocks for so many queries and keys, of which nothing waits for the device; `alone` lists need no mask_mod.

    A block that is listed twice counts once, and as visible where it is in both lists. What isn't a block's place is left out.
    """
    numbers = list(zip(lengths, mask.BLOCK_SIZE, strict=True))[:: -1 if of_keys else 1]
    rows, columns = (cdiv(n, size) for n, size in numbers)
    number, places, *full = own_lists(mask, of_keys=of_keys)
    lists = [(number, places, VISIBLE if alone else PARTIAL), (full[0], full[1], VISIBLE)]
    given = [(count[..., :rows, None], at[..., :rows, :], kind) for count, at, kind in lists if count is not None and at is not None]
    planes = torch.broadcast_shapes(*(count.shape[:-2] for count, _, _ in given))  # type: ignore[no-untyped-call]
    # One more column takes what is left out: a place beyond a row is a fault on a GPU.
    kinds = torch.full((*planes, rows, columns + 1), HIDDEN, dtype=torch.int8, device=given[0][1].device)
    for count, at, kind in given:
        used = torch.arange(at.shape[-1], device=at.device) < count
        inside = torch.where(used & (at >= 0) & (at < columns), at, columns).long()
        kinds.scatter_(-1, inside.expand(*planes, -1, -1), kind)
    return kinds[..., :columns]


def as_counted(mask: Any, kinds: Tensor, *, of_keys: bool = False) -> Tensor:
    """True if a BlockMask lists as many blocks in each row as there are of these kinds: none twice, none beyond the row."""
    number, _, full_number, _ = own_lists(mask, of_keys=of_keys)
    rows = kinds.shape[-2]
    found = [
        (count[..., :rows] == (kinds == kind).sum(-1)).all()
        for count, kind in ((number, PARTIAL), (full_number, VISIBLE))
        if count is not None
    ]
    return torch.stack(found).all()


def kinds_of_tiles(listed: Listed, lengths: Sequence[int], tile: Sequence[int]) -> Tensor:
    """Kinds of tiles of any rows and columns: that of all blocks that a tile touches, or PARTIAL where they differ."""
    steps = list(zip((2, 3), lengths, listed.size, tile, strict=True))
    if all(size % step == 0 for _, _, size, step in steps):
        # Every tile lies in one block.
        kinds = listed.kinds
        for axis, n, size, step in steps:
            kinds = kinds if size == step else kinds.repeat_interleave(size // step, axis).narrow(axis, 0, cdiv(n, step))
    else:
        kinds = _kinds_of_several(listed.kinds, steps)
    if lengths[1] % tile[1]:
        # Keys beyond the end are hidden by the mask.
        last = kinds[..., -1:]
        kinds = torch.cat([kinds[..., :-1], torch.where(last == VISIBLE, PARTIAL, last)], -1)
    return kinds.contiguous()


def _kinds_of_several(kinds: Tensor, steps: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Kinds of tiles that several blocks may touch; `steps` are the axis, length, size of blocks and of tiles, of rows and columns."""
    least = most = kinds
    for axis, n, size, step in steps:
        first = torch.arange(0, n, step, device=kinds.device)
        last = (first + step - 1).clamp(max=n - 1) // size
        # Tiles that don't begin with a block touch one more.
        touched = cdiv(step, size) + (step % size > 0 and size % step > 0)
        places = [torch.minimum(first // size + i, last) for i in range(touched)]
        least = torch.stack([least.index_select(axis, place) for place in places]).amin(0)
        most = torch.stack([most.index_select(axis, place) for place in places]).amax(0)
    return torch.where(least == most, least, PARTIAL)


def check_lists(mask: Any, query: Tensor, key: Tensor) -> None:
    """Raise InputError for a BlockMask whose lists can't be a call's; what is in them is read on a CPU alone."""
    number, places, *full = own_lists(mask)
    if not isinstance(number, Tensor) or not isinstance(places, Tensor):
        return
    sizes = [cdiv(n, size) for n, size in zip((query.shape[2], key.shape[2]), mask.BLOCK_SIZE, strict=True)]
    for name, count, at in (("kv", number, places), ("full_kv", full[0], full[1])):
        if count is None or at is None:
            continue
        if count.dim() != 3 or at.dim() != 4:
            found = f"{count.dim()} and {at.dim()} dimensions"
            raise InputError(f"block_mask's {name}_num_blocks and {name}_indices have {found}: give (B, H, rows) and (B, H, rows, width)")
        if at.device != query.device or count.device != query.device:
            raise InputError(f"block_mask's {name}_indices are on {at.device}, and query is on {query.device}: move them by block_mask.to")
        if count.is_floating_point() or at.is_floating_point():
            raise InputError(f"block_mask's {name}_indices are {at.dtype}: give whole numbers, as from .int()")
        if min(count.shape[2], at.shape[2]) < sizes[0]:
            raise InputError(f"block_mask's {name}_indices have {at.shape[2]} rows of blocks, and the queries {sizes[0]}: list all rows")
        if at.device.type == "cpu" and at.numel():
            _check_contents(name, count[..., : sizes[0]], at[..., : sizes[0], :], sizes[1])


def _check_contents(name: str, count: Tensor, at: Tensor, columns: int) -> None:
    wrong = (count < 0) | (count > at.shape[-1])
    if wrong.any():
        found = int(count[wrong][0])
        raise InputError(f"block_mask's {name}_num_blocks has {found} for a row of {at.shape[-1]} places: give 0 to {at.shape[-1]}")
    wrong = (torch.arange(at.shape[-1]) < count[..., None]) & ((at < 0) | (at >= columns))
    if wrong.any():
        found = int(at.expand_as(wrong)[wrong][0])
        raise InputError(f"block_mask's {name}_indices have block {found}, and the keys have {columns} blocks: give 0 to {columns - 1}")
