"""Kernel arguments that several families share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashtune.core.code.launches import LaunchInputs, Operand
from flashtune.core.problems.config import KernelSpec
from flashtune.core.problems.parameters import DROPOUT_STEPS, dropout_threshold

LOG2_E = 1.4426950408889634
FAR = 2**30
"""Window side beyond any sequence's length."""


def band_sizes(spec: KernelSpec, inputs: LaunchInputs) -> list[int]:
    """Values of `KernelSpec.band_sizes`."""
    values = {name: getattr(inputs, name) for name in ("diagonal", "window_left", "window_right")}
    return [values[name] if name == "diagonal" else min(values[name], FAR) if values[name] >= 0 else FAR for name in spec.band_sizes]


def per_head(spec: KernelSpec, inputs: LaunchInputs) -> list[Any]:
    """Tensors with a number per head, each followed by its strides."""
    tensors = dict(zip(("q_descale", "k_descale", "v_descale"), inputs.descale or (None,) * 3, strict=True))
    tensors |= {"slopes": inputs.slopes, "sinks": inputs.sinks}
    found: list[Any] = []
    for name in spec.per_head:
        tensor = tensors[name]
        assert tensor is not None, f"a kernel with {name} needs them"
        found += [tensor, *tensor.strides]
    return found


def score_numbers(spec: KernelSpec, inputs: LaunchInputs) -> list[Any]:
    """Scale, soft cap, band and dropout for kernels with plain pointers."""
    found: list[Any] = [inputs.softcap * LOG2_E, inputs.scale / inputs.softcap] if spec.softcap else [inputs.scale * LOG2_E]
    found += band_sizes(spec, inputs)
    if spec.dropout:
        steps = dropout_threshold(inputs.dropout_p)
        # At a rate of 1 the kernel's threshold wraps to 0; a factor of 0 then drops every pair.
        kept = 1.0 / (1.0 - inputs.dropout_p) if steps < DROPOUT_STEPS else 0.0
        found += [kept, steps, inputs.seed & (2**64 - 1), inputs.offset & (2**32 - 1)]
    return found


def wide(tensors: Sequence[Operand]) -> bool:
    """True if offsets within a tile may reach 2^31: a tile has up to 2^8 rows and 2^10 columns."""
    return any(x.strides[2] >= 2**22 or x.strides[3] >= 2**20 for x in tensors)


def outer_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of a descriptor's outer dimensions, with 16 for dimensions of size 1, whose strides have no meaning."""
    return tuple(stride if size > 1 else 16 for size, stride in zip(shape, strides, strict=True))


def strides_divide(spec: KernelSpec, tensors: Sequence[Operand | None]) -> list[bool]:
    """One flag, True if `KernelSpec.stride_unit` divides all strides but the last; empty for specs without a unit."""
    if not spec.stride_unit:
        return []
    steps = [(size, stride) for x in tensors if x is not None for size, stride in zip(x.shape[:3], x.strides[:3], strict=True)]
    return [all(size == 1 or stride % spec.stride_unit == 0 for size, stride in steps)]


class LengthArguments(NamedTuple):
    """Kernel arguments for packed sequences, empty where they aren't packed: pointers, their number, and, without pages, True if not all
    keys are used."""

    pointers: tuple[Operand, ...] = ()
    sizes: tuple[int, ...] = ()
    flags: tuple[bool, ...] = ()

    @classmethod
    def of(cls, spec: KernelSpec, inputs: LaunchInputs) -> "LengthArguments":
        """The arguments of a call; where all keys are used, any pointer stands for the numbers of used ones."""
        if not spec.packed:
            return cls()
        assert inputs.lengths is not None, "a kernel for packed sequences needs their lengths"
        of_q, of_k, used = inputs.lengths
        if inputs.pages is not None:
            assert used is not None, "pages have lengths"
            return cls((of_q, inputs.pages.table, used), (of_q.shape[0] - 1,))
        return cls((of_q, of_k, used or of_k), (of_q.shape[0] - 1,), (used is not None,))

    def tiles(self, inputs: LaunchInputs, rows: int, block: int) -> int:
        """Tiles of `block` rows of a head: in all batches, or of packed rows as templates/shared/_lengths.jinja numbers them."""
        return rows // block + self.sizes[0] + 1 if self.sizes else cdiv(rows, block) * inputs.batch


def magic_divisor(divisor: int) -> tuple[int, int]:
    """The factor and the shift of a kernel's integer division (Granlund and Montgomery, 1994, "Division by invariant integers")."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)
