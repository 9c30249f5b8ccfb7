"""Calls with a mask and a score as code, and their lists of blocks: which tiles need the mask, and which are skipped."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.dispatch.functions.kept import kept, known_at, stream_of
from flashtune.dispatch.functions.kernels import Launched, Sequences, lists_of_kinds, lists_of_mask, tile_kinds
from flashtune.dispatch.functions.listed import HIDDEN, PARTIAL, VISIBLE, Listed, as_counted, kinds_of_lists, kinds_of_tiles, own_lists
from flashtune.dispatch.rows.kernel import Kernel
from flashtune.templates.launches.common import cdiv
from flashtune.templates.mods.documents import Documents
from flashtune.templates.mods.emit import Mods
from flashtune.templates.mods.graph import Node
from flashtune.templates.mods.scores import Score
from flashtune.templates.mods.structure import Band


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """Traced functions: graphs over one list of captured tensors, with the place of each among all that the functions close over."""

    score: Node | None
    mask: Node | None
    names: tuple[str, str]
    places: tuple[int, ...]
    fresh: tuple[Tensor, ...] = ()
    known: tuple[Band, Score] | None = None
    """Band and score where `attention` has both built in (flashtune.templates.mods.structure and scores)."""
    reads: bool = False
    """True if the mask reads captured tensors, whose values may change between calls unseen."""
    documents: Documents | None = None
    """Documents, a band and a score where `attention_varlen` has both built in."""
    alone: bool = False
    """True if the mask hides nothing, so that only a BlockMask's lists can."""
    blocks: tuple[int, int] | None = None
    """Rows and columns of the blocks of a mask by lists; None of others."""


class Passes(NamedTuple):
    """Kernels of a call's passes, with the functions that are compiled into each; no backward where nothing gets a gradient."""

    forward: Kernel
    mods: Mods
    backward: Kernel | None = None
    trained: Mods | None = None

    @property
    def failed(self) -> bool:
        """True if one of them couldn't be built at an earlier call."""
        return bool(self.forward.failed or (self.backward is not None and self.backward.failed))


class FlexCall(NamedTuple):
    """A call that kernels serve; a named tuple, which is made at every call."""

    functions: Functions
    captured: tuple[Tensor, ...]
    kernels: Passes
    scale: float
    mask_of: Any
    """The BlockMask, mask_mod or Listed, for its lists of blocks; None of packed sequences, which have none."""
    sequences: Sequences | None = None
    launched: Launched | None = None
    """Launches that are kept for calls like it; None for a call that was just decided."""
    found: Sequence[int] = ()
    """Addresses of its tensors, in the order of flashtune.dispatch.functions.kernels.distinct, where `launched` is given."""

    def of(self, bounds: Sequence[Any], captured: tuple[Tensor, ...]) -> "FlexCall":
        """The call with these tensors in place of its own."""
        sequences = None if self.sequences is None else self.sequences._replace(bounds=bounds)  # type: ignore[arg-type]
        return self._replace(captured=captured, sequences=sequences)

    @property
    def kernel(self) -> Kernel:
        """The forward's kernel."""
        return self.kernels.forward

    @property
    def mods(self) -> Mods:
        """The functions that are compiled into the forward's kernel."""
        return self.kernels.mods


FOREIGN = "the BlockMask's blocks aren't those of its mask_mod"
"""The reason why a BlockMask that was made by hand has its lists walked, whatever could serve its mask_mod."""

MOST_FOREIGN = 1024
"""Most functions that are known to be beside lists of another's making."""

_FOREIGN: set[Hashable] = set()
"""Functions, lengths and sizes of blocks of which some BlockMask had other blocks: a router's new lists aren't read at every call."""


def sizes_of(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    """Batches, heads, queries and keys."""
    return query.shape[0], query.shape[1], query.shape[2], key.shape[2]


def blocks(
    call: FlexCall, kernel: Kernel, query: Tensor, key: Tensor, tile: tuple[int, int], *, of_keys: bool = False
) -> tuple[Tensor, bool]:
    """Lists of blocks for each tile of queries or (`of_keys`) of keys, and True where they are kept with the mask.

    `tile` are rows and columns. Batches and heads come first in the lists; their sizes may be 1, where all share them.
    """
    sizes, listed = sizes_of(query, key), isinstance(call.mask_of, Listed)

    mask = None if listed else _lists_in(call.mask_of, tile, of_keys=of_keys)

    def make() -> Tensor:
        if listed:
            return lists_of_kinds(kernel, kinds_of_tiles(call.mask_of, sizes[2:], tile), of_keys=of_keys)
        turn = -1 if of_keys else 1
        rows, columns = (cdiv(n, step) for n, step in list(zip(sizes[2:], tile, strict=True))[::turn])
        if mask is not None:
            first, second = (size // step for size, step in list(zip(call.mask_of.BLOCK_SIZE, tile, strict=True))[::turn])
            # One block may be longer than all queries or keys.
            return lists_of_mask(kernel, mask, (min(first, rows), min(second, columns)), rows, columns)
        return lists_of_kinds(kernel, tile_kinds(kernel, call.mods, call.captured, sizes, tile), of_keys=of_keys)

    place = call.mods.hash, sizes, tile, of_keys, query.device
    if mask is None and call.functions.reads and not listed:
        return make(), False
    return kept(call.mask_of, place, make), not stream_of()[1]


def _lists_in(mask: Any, tile: tuple[int, int], *, of_keys: bool) -> list[Tensor] | None:
    """A BlockMask's own numbers and places of blocks, where its blocks are made of whole tiles."""
    if any(size % step for size, step in zip(getattr(mask, "BLOCK_SIZE", (1, 1)), tile, strict=True)):
        return None
    found = own_lists(mask, of_keys=of_keys)
    return None if found[0] is None else [x for x in found if x is not None]


def listed_by(mask: Any, query: Tensor, key: Tensor, *, alone: bool) -> Listed:
    """The mask of what a BlockMask lists, from an earlier call where nothing was written to its lists; `alone` without its mask_mod."""
    batches, heads, *lengths = sizes_of(query, key)

    def make() -> Listed:
        # Kept for calls with gradients, which refuse tensors of inference mode.
        with torch.inference_mode(False):
            kinds = kinds_of_lists(mask, lengths, alone=alone)
            return Listed(kinds, tuple(mask.BLOCK_SIZE), None if alone else mask.mask_mod, batches, heads)

    found: Listed = kept(mask, ("listed", batches, heads, *lengths, alone, id(mask.mask_mod)), make)
    return found


def agrees(call: FlexCall, query: Tensor, key: Tensor) -> bool:
    """True if the blocks of a BlockMask are those that its mask_mod has: one could be made of any blocks.

    Where the mask reads tensors, kernels that walk the BlockMask's own blocks mean what PyTorch's mean, whatever is in these later.
    """
    sizes, tile = sizes_of(query, key), tuple(call.mask_of.BLOCK_SIZE)

    def kinds() -> Tensor:
        return tile_kinds(call.kernel, call.mods, call.captured, sizes, tile)

    return _agrees(call.mask_of, (call.mods.hash, sizes), query, sizes[2:], kinds, again=varies(call))


def varies(call: FlexCall) -> bool:
    """True if a BlockMask has to be compared with its mask_mod at every call: tensors that this reads may have changed, and PyTorch, on a
    CPU, or a pass of ours, by its tiles or for gradients of captured tensors, takes the mask where the BlockMask has other blocks."""
    if not call.functions.reads or not hasattr(call.mask_of, "BLOCK_SIZE"):
        return False
    forward, _, backward, trained = call.kernels
    tiles = [tile for kernel in (forward, backward) if kernel is not None for tile in kernel.tiles]
    whole = all(_lists_in(call.mask_of, tile, of_keys=False) is not None for tile in tiles)
    return forward.device.type == "cpu" or not whole or bool(trained is not None and trained.trained)


def agrees_with_band(mask: Any, band: Band, query: Tensor, key: Tensor, documents: Tensor | None = None) -> bool:
    """The same for a mask_mod that is a band, within documents whose tokens lie together where their numbers (N,) or (B, N) are given."""
    n_q, n_kv = query.shape[2], key.shape[2]

    def kinds() -> Tensor:
        found = _kinds_of_band(band, n_q, n_kv, tuple(mask.BLOCK_SIZE), query.device)
        return found if documents is None else _kinds_of_documents(found, documents, n_q, tuple(mask.BLOCK_SIZE))

    # Numbers of documents are read at every call, and so may lists be.
    place = (band, n_q, n_kv) if documents is None else None
    return _agrees(mask, place, query, (n_q, n_kv), kinds, again=documents is not None)


def _agrees(mask: Any, key: Hashable, query: Tensor, lengths: tuple[int, int], kinds_of: Callable[[], Tensor], *, again: bool) -> bool:
    def make() -> bool:
        kinds, found = kinds_of(), kinds_of_lists(mask, lengths)
        # A full block sees all, a block that is in neither list nothing.
        right = [((found != VISIBLE) | (kinds == VISIBLE)).all(), ((found != HIDDEN) | (kinds == HIDDEN)).all(), as_counted(mask, found)]
        if mask.q_num_blocks is not None:
            # Gradients walk the lists of keys.
            turned = kinds_of_lists(mask, lengths, of_keys=True)
            right += [(turned.mT == found).all(), as_counted(mask, turned, of_keys=True)]
        return bool(torch.stack(right).all())

    key = None if key is None else (key, tuple(mask.BLOCK_SIZE))
    place = "agrees", key
    known = None if again else known_at(mask, place)
    # The answer waits for the GPU, which a capture can't: a mask is met before that, in a warm-up.
    waits = query.is_cuda and torch.cuda.is_current_stream_capturing()
    if known is None and (waits or key in _FOREIGN):
        return again and key not in _FOREIGN
    found = (make() if again else bool(kept(mask, place, make))) if known is None else known
    if not found and key is not None:
        if len(_FOREIGN) >= MOST_FOREIGN:
            _FOREIGN.clear()
        _FOREIGN.add(key)
    return found


def _kinds_of_band(band: Band, n_q: int, n_kv: int, tile: tuple[int, ...], device: torch.device) -> Tensor:
    """Result of `tile_kinds` for a band; keys past the end count as visible, of which a BlockMask knows nothing."""
    left, right = (n_q + n_kv if side is None else side for side in band)
    rows, columns = (torch.arange(0, n, step, device=device) for n, step in zip((n_q, n_kv), tile, strict=True))
    # The least and greatest distance of a key from its query in a tile.
    least = columns[None, :] - (rows + tile[0] - 1).clamp(max=n_q - 1)[:, None]
    most = (columns + tile[1] - 1).clamp(max=n_kv - 1)[None, :] - rows[:, None]
    kinds = torch.where((least >= -left) & (most <= right), VISIBLE, torch.where((least > right) | (most < -left), HIDDEN, PARTIAL))
    return kinds[None, None].to(torch.int8)


def _kinds_of_documents(kinds: Tensor, documents: Tensor, n: int, tile: tuple[int, ...]) -> Tensor:
    """The kinds of a band's tiles, of n queries and keys, where each document sees itself alone."""
    top, left = (torch.arange(0, n, step, device=kinds.device) for step in tile)
    bottom, right = ((start + step - 1).clamp(max=n - 1) for start, step in zip((top, left), tile, strict=True))
    top, bottom = top[:, None], bottom[:, None]
    numbers = documents[None] if documents.dim() == 1 else documents
    # Of all pairs these are the farthest apart, and the closest together, unless the tile is on the diagonal.
    first, last, before, behind = top.minimum(left), bottom.maximum(right), bottom.minimum(right), top.maximum(left)
    alone = (numbers[:, first] == numbers[:, last])[:, None]
    apart = ((before < behind) & (numbers[:, before] != numbers[:, behind]))[:, None]
    return torch.where((kinds == HIDDEN) | apart, HIDDEN, torch.where((kinds == VISIBLE) & alone, VISIBLE, PARTIAL)).to(torch.int8)
