"""Stand-ins for a Hopper GPU with descriptors of packed sequences, which end where a sequence does."""

from types import SimpleNamespace
from typing import Any

import torch
from hopper_emulator import Machine, Pointer, array
from hopper_machine import Number
from varlen_cases import Inputs

from flashtune.core.problems.band import Sides
from flashtune.dispatch.call.sequences import Numbers
from flashtune.templates.launches.hopper_forward import RAGGED


class Ragged(Machine):
    """Part of a stand-in for packed sequences: their descriptors, and scalars that are read."""

    def _argument(self, value: Any) -> Any:
        if not hasattr(value, "block_shape") or len(value.shape) < 5:
            return super()._argument(value)
        _, heads, rows, columns = value.base.shape
        assert value.shape[2:] == [heads, RAGGED, columns] and value.strides[0] + value.strides[1] == 2**34
        nbytes = value.base.element_size() * torch.Size(value.block_shape).numel()
        return SimpleNamespace(
            memory=value.base[0].reshape(1, 1, heads, rows, columns) if value.base.is_contiguous() else value.base[None],
            block=value.block_shape,
            layout=None,
            block_type=SimpleNamespace(nbytes=nbytes),
            dtype=value.base.dtype,
        )

    def _box(self, desc: Any, corner: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """Rows of a sequence from the corner on, as addresses that wrap make them, and none past its end."""
        if len(corner) != 5:
            return super()._box(desc, corner)
        wrap, end, head, place, column = (int(x) for x in corner)
        assert wrap == RAGGED
        first, left = end + place - RAGGED, max(min(desc.block[3], RAGGED - place), 0)
        assert left == 0 or 0 <= first <= first + left <= end <= desc.memory.shape[3]
        width = min(desc.block[4], desc.memory.shape[4] - column)
        found = desc.memory[:, :, head : head + 1, first : first + left, column : column + width]
        return found, (slice(0, 1), slice(0, 1), slice(0, 1), slice(0, left), slice(0, width))

    def _stand_ins(self) -> dict[str, Any]:
        found = super()._stand_ins()
        gl, load = found["gl"], found["gl"].load

        def total(values: torch.Tensor, axis: int) -> Any:
            summed = values.sum(axis)
            return Number(int(summed)) if summed.dim() == 0 else array(summed)

        def read(place: Pointer) -> Any:
            values = load(place)
            return Number(int(values)) if values.dim() == 0 and not values.is_floating_point() else values

        def write(place: Pointer, values: Any, mask: Any = None) -> None:
            if mask is None:
                place.memory[place.offset] = values
            else:
                store(place, values, mask)

        store = gl.store
        gl.sum, gl.load, gl.store = total, read, write
        return found


def numbers_of(given: Inputs) -> Numbers:
    words = given.words
    left, right = Sides.of(words.get("window_size", (-1, -1)), words.get("is_causal", False), "top_left").window
    left, right = (-1 if side is None else side for side in (left, right))
    aligned = words.get("causal_alignment", "bottom_right") == "bottom_right"
    scale = given.tensors[0].shape[2] ** -0.5
    return Numbers(*given.longest, scale, left, right, aligned, 0.0, words.get("dropout_p", 0.0), False, False)
