"""Launches of a mask and a score as code: arguments for captured tensors and lists of blocks, and the launches that make these."""

from typing import Any

from flashtune.core.code.launches import Launch, LaunchInputs, Operand
from flashtune.core.problems.config import KernelSpec
from flashtune.templates.launches.common import cdiv
from flashtune.templates.mods.known import functions_of

FORWARD, KEYS, QUERIES = 0, 0, 1
"""Places of lists among a call's: of a tile of queries in the forward, of one of keys and one of queries in the backward."""


def captured_arguments(tensors: tuple[Operand, ...]) -> list[Any]:
    """A pointer, strides and sizes of each captured tensor."""
    return [value for x in tensors for value in (x, *x.strides, *x.shape)]


def mod_arguments(spec: KernelSpec, inputs: LaunchInputs, which: int) -> list[Any]:
    """Kernel arguments for captured tensors, and for the list of blocks at this place; empty for specs without functions."""
    return captured_of(spec, inputs) + list_arguments(spec, inputs, which)


def captured_of(spec: KernelSpec, inputs: LaunchInputs) -> list[Any]:
    """Kernel arguments for captured tensors."""
    mods = functions_of(spec.mods)
    return [] if mods is None else captured_arguments(inputs.mods[: len(mods.captured)])


def list_arguments(spec: KernelSpec, inputs: LaunchInputs, which: int) -> list[Any]:
    """Kernel arguments for the list of blocks at this place; empty for specs whose kernels walk none."""
    mods = functions_of(spec.mods)
    if mods is None or not mods.listed(spec):
        return []
    blocks = inputs.mods[len(mods.captured) + which]
    return [blocks, *blocks.strides[:3]]


def gradient_arguments(spec: KernelSpec, inputs: LaunchInputs) -> list[Any]:
    """Kernel arguments for the gradients of captured tensors, which come last among a call's."""
    mods = functions_of(spec.mods)
    count = len(mods.trained) if mods is not None else 0
    return [value for x in inputs.mods[len(inputs.mods) - count :] for value in (x, *x.strides)]


def kinds_launch(kinds: Operand, captured: tuple[Operand, ...], n_q: int, n_kv: int, tile: tuple[int, int]) -> Launch:
    """The launch that fills `kinds`, (batches, heads, tiles of queries, tiles of keys), for tiles of these rows and columns."""
    batches, heads, tiles_m, tiles_n = kinds.shape
    assert (tiles_m, tiles_n) == (cdiv(n_q, tile[0]), cdiv(n_kv, tile[1])), "one kind for each tile"
    arguments = (kinds, *captured_arguments(captured), n_q, n_kv, tiles_m, tiles_n, heads, *tile)
    return Launch("tile_kinds", (batches * heads * tiles_m * tiles_n,), arguments, {"num_warps": 4})


def sorting_launch(kinds: Operand, lists: Operand, *, of_keys: bool) -> Launch:
    """The launch that makes lists, (planes, rows, 2 + columns), of kinds: of tiles of queries, or (`of_keys`) of tiles of keys."""
    _, _, tiles_m, tiles_n = kinds.shape
    sizes = (tiles_n, tiles_m, 1, tiles_n) if of_keys else (tiles_m, tiles_n, tiles_n, 1)
    planes, rows, _ = lists.shape
    return Launch("lists_of_kinds", (planes * rows,), (kinds, lists, *sizes, WIDTH), {"num_warps": 1})


def mask_launch(mask: tuple[Operand, ...], lists: Operand, blocks: tuple[int, int]) -> Launch:
    """The launch that makes the same of a BlockMask: numbers and places of its blocks, then those of full blocks, if it has any, and how
    many tiles of rows and of columns a block has."""
    planes, rows, width = lists.shape
    full = mask[2:] or mask
    arguments = (*mask[:2], *full, lists, rows, width - 2, *mask[1].shape[2:], *blocks, len(mask) > 2, WIDTH)
    return Launch("lists_of_mask", (planes * rows,), arguments, {"num_warps": 1})


WIDTH = 128
"""Blocks that a program sorts at a time."""
