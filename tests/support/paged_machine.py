"""Stand-in for a Hopper GPU with descriptors of paged caches, whose copies fill tiles piece by piece."""

from types import SimpleNamespace
from typing import Any

import torch
from hopper_emulator import Pointer, Tile, array
from hopper_machine import Number
from packed_machine import Ragged
from test_hopper_pieces import Masked

from flashtune.templates.launches.hopper_forward import RAGGED


class Pieces(Tile):
    """A view of whole tiles as the pieces that copies fill, in their order in memory: by tile, by columns, by rows."""

    def __init__(self, tiles: torch.Tensor, shape: list[int]) -> None:
        rows, columns = shape[-2:]
        self._tiles, self._rows, self._columns = tiles, rows, columns
        self._of_tile = tiles.shape[-2] // rows, tiles.shape[-1] // columns
        assert shape[0] == tiles.shape[0] * self._of_tile[0] * self._of_tile[1]

    def index(self, place: int) -> Tile:
        down, across = self._of_tile
        tile, chunk, part = place // (down * across), place // down % across, place % down
        rows, columns = slice(part * self._rows, (part + 1) * self._rows), slice(chunk * self._columns, (chunk + 1) * self._columns)
        return Tile(self._tiles[tile][..., rows, columns])


class Whole(Tile):
    """Tiles that the producer sees as pieces."""

    def _reinterpret(self, _dtype: Any, shape: list[int], _layout: Any) -> Any:
        return Pieces(self.values, shape)


class Paged(Ragged, Masked):
    """The forward's stand-in for paged caches; `read` are the rows of memory that copies of keys and values read."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        self.read: list[torch.Tensor] = []
        super().__init__(*arguments, **words)

    def _argument(self, value: Any) -> Any:
        if not hasattr(value, "block_shape") or value.base.shape[0] == 1:
            return super()._argument(value)
        (blocks, heads, page, columns), (step_b, step_h, step_n, _) = value.base.shape, value.base.stride()
        rows = (blocks - 1) * (step_b // step_n) + page
        nbytes = value.base.element_size() * torch.Size(value.block_shape).numel()
        kind = SimpleNamespace(nbytes=nbytes, shape=value.block_shape)
        memory = value.base.as_strided((1, 1, heads, rows, columns), (0, 0, step_h, step_n, 1))
        return SimpleNamespace(memory=memory, block=value.block_shape, layout=None, block_type=kind, dtype=value.base.dtype, paged=True)

    def _box(self, desc: Any, corner: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """Rows of a page: the first ones up to the last key, or the last ones from the first key on."""
        if not getattr(desc, "paged", False):
            return super()._box(desc, corner)
        wrap, row, head, place, column = (int(x) for x in corner)
        copied, width = desc.block[3], max(min(desc.block[4], desc.memory.shape[4] - column), 0)
        inside = slice(max(-place, 0), min(max(RAGGED - place, 0), copied))
        assert wrap in (0, RAGGED)
        first = row + place - wrap + inside.start
        count = max(inside.stop - inside.start, 0)
        assert count == 0 or 0 <= first <= first + count <= desc.memory.shape[3], "a row outside of the cache is read"
        rows = slice(first, first + count) if count else slice(0, 0)
        found = desc.memory[:, :, head : head + 1, rows, column : column + width]
        self.read.append(found)
        return found, (slice(0, 1), slice(0, 1), slice(0, 1), slice(inside.start, inside.start + count), slice(0, width))

    def _allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        found = super()._allocate(dtype, shape, layout)
        return Whole(found.values) if isinstance(found, Tile) and len(shape) == 6 else found

    def _stand_ins(self) -> dict[str, Any]:
        found = super()._stand_ins()
        gl, load = found["gl"], found["gl"].load

        def read(place: Pointer, mask: Any = None, other: int = 0) -> Any:
            if mask is None:
                return load(place)
            wanted, places = (x.as_subclass(torch.Tensor) for x in (mask, place.offset))
            values = place.memory[torch.where(wanted, places, 0)]
            return array(torch.where(wanted, values, other))

        gl.load, gl.to_tensor = read, Number
        columns = self._module.BLOCK_N.value
        shown = lambda end: array(torch.arange(columns) < end.as_subclass(torch.Tensor)[:, None])  # noqa: E731
        return found | {"ENTRIES_LAYOUT": None, "bits_before": shown}
