"""Launches of a mask and a score as code: arguments for captured tensors and lists of blocks, and the launch that finds kinds of tiles."""

from typing import Any

from flashtune.core.config import KernelSpec
from flashtune.core.launches import Launch, LaunchInputs, Operand
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
    """Kernel arguments for the list of blocks at this place; empty for specs without a mask as code."""
    mods = functions_of(spec.mods)
    if mods is None or not mods.mask:
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
