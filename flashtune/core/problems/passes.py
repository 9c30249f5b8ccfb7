"""A contract per pass: the tensors it reads and writes, its tolerances, and its cost.

The forward is the value `FORWARD`, the gradients of its inputs are `BACKWARD`. Inputs, checks, times and the cost
model look a pass up by a problem's direction (decision 0001). Importing this needs no PyTorch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from flashtune.core.problems.config import Direction, KernelSpec
from flashtune.core.problems.dtypes import ITEMSIZE, DType, output_dtype

if TYPE_CHECKING:
    from flashtune.core.problems.tolerances import Bound

Element = Literal["input", "output", "fp32"]
"""The element type of an operand: that of the problem's inputs, of its output, or float32 for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Rows of one head: some of its queries, and some of its keys for tensors with a row per key."""

    batch: int
    head: int
    queries: slice = field(default_factory=lambda: slice(None))
    keys: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes and the element type of one attention call: all of a problem that the shapes of its operands depend on."""

    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    d: int
    d_v: int
    dtype: DType

    @property
    def gqa_ratio(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


class Operand(NamedTuple):
    """A tensor that every launch of a pass takes. `axes` are the fields of `Sizes` that hold its sizes; `title` is for messages.

    `from_forward` marks the forward's results for the problem, inputs of its backward. `repeats` are axes over which it may be
    an expanded view, so that they don't count in the fewest bytes.
    """

    name: str
    title: str
    axes: tuple[str, ...]
    element: Element
    written: bool = False
    from_forward: bool = False
    repeats: tuple[str, ...] = ()

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(getattr(sizes, axis) for axis in self.axes)

    def dtype(self, sizes: Sizes) -> DType:
        """Its element type."""
        types: dict[Element, DType] = {"input": sizes.dtype, "output": output_dtype(sizes.dtype), "fp32": "fp32"}
        return types[self.element]

    def nbytes(self, sizes: Sizes) -> int:
        """Bytes of reading or writing all of it once."""
        count = ITEMSIZE[self.dtype(sizes)]
        for axis, extent in zip(self.axes, self.shape(sizes), strict=True):
            count *= 1 if axis in self.repeats else extent
        return count

    def at(self, place: Place, sizes: Sizes) -> tuple[int | slice, ...]:
        """The index of this place's rows in the tensor; rows of queries span all keys."""
        index: dict[str, int | slice] = {
            "batch": place.batch,
            "heads": place.head,
            "kv_heads": place.head // sizes.gqa_ratio,
            "n_q": place.queries,
            "n_kv": slice(None) if "n_q" in self.axes else place.keys,
        }
        return tuple(index.get(axis, slice(None)) for axis in self.axes)


class Pass(NamedTuple):
    """One direction of attention. `operands` are in the order of a launch's positional arguments.

    `products` names, for each matrix product over the visible pairs, the head size that it runs along or spans.
    `bounds` are the tolerances of each written operand of a kernel.
    """

    operands: tuple[Operand, ...]
    products: tuple[Literal["d", "d_v"], ...]
    bounds: "Callable[[KernelSpec], Mapping[str, Bound]]"

    @property
    def written(self) -> tuple[Operand, ...]:
        """The operands that a launch writes."""
        return tuple(operand for operand in self.operands if operand.written)

    def product_sizes(self, sizes: Sizes) -> list[int]:
        """The head size of each of `products`."""
        return [sizes.d if size == "d" else sizes.d_v for size in self.products]

    def flops(self, sizes: Sizes, visible_pairs: int) -> int:
        """Floating-point operations of the matrix products over the visible pairs of each head, two for each pair and place in it.

        The convention of the FlashAttention papers; an exactly causal square counts N (N + 1) / 2 pairs.
        """
        return 2 * sizes.batch * sizes.heads * visible_pairs * sum(self.product_sizes(sizes))

    def io_bytes(self, sizes: Sizes, keys_read: int) -> int:
        """The fewest bytes a fused kernel moves: every operand once, of keys and values the rows that some query sees."""
        found = 0
        for operand in self.operands:
            hides = "n_kv" in operand.axes and not operand.written
            found += operand.nbytes(sizes) * keys_read // sizes.n_kv if hides else operand.nbytes(sizes)
        return found


def _forward_bounds(spec: KernelSpec) -> "dict[str, Bound]":
    from flashtune.core.problems.tolerances import LSE_RTOL, Bound, tolerance

    found = tolerance(spec)
    return {
        "out": Bound(atol=found.atol, rtol=found.rtol, relative_norm=found.relative_norm),
        "lse": Bound(atol=found.lse_atol, rtol=LSE_RTOL),
    }


FORWARD = Pass(
    operands=(
        Operand(name="q", title="query", axes=("batch", "heads", "n_q", "d"), element="input"),
        Operand(name="k", title="key", axes=("batch", "kv_heads", "n_kv", "d"), element="input"),
        Operand(name="v", title="value", axes=("batch", "kv_heads", "n_kv", "d_v"), element="input"),
        Operand(name="out", title="output", axes=("batch", "heads", "n_q", "d_v"), element="output", written=True),
        Operand(name="lse", title="LSE", axes=("batch", "heads", "n_q"), element="fp32", written=True),
    ),
    products=("d", "d_v"),
    bounds=_forward_bounds,
)


def _backward_bounds(spec: KernelSpec) -> "dict[str, Bound]":
    from flashtune.core.problems.tolerances import Bound, tolerance

    found = tolerance(spec)
    bound = Bound(atol=found.atol, rtol=found.rtol, relative_norm=found.gradient_norm)
    # Distances weigh the slopes' gradient, so that no absolute bound fits.
    return dict.fromkeys(("dq", "dk", "dv", "dbias"), bound) | {"dslopes": Bound(atol=math.inf, relative_norm=found.gradient_norm)}


def _read(operand: Operand) -> Operand:
    """An output of the forward as an input of the backward."""
    return operand._replace(written=False, from_forward=True)


BACKWARD = Pass(
    operands=(
        *FORWARD.operands[:3],
        *map(_read, FORWARD.operands[3:]),
        Operand(name="dout", title="output's gradient", axes=("batch", "heads", "n_q", "d_v"), element="output"),
        Operand(name="dlse", title="LSE's gradient", axes=("batch", "heads", "n_q"), element="fp32"),
        Operand(name="dq", title="query's gradient", axes=("batch", "heads", "n_q", "d"), element="input", written=True),
        Operand(name="dk", title="key's gradient", axes=("batch", "kv_heads", "n_kv", "d"), element="input", written=True),
        Operand(name="dv", title="value's gradient", axes=("batch", "kv_heads", "n_kv", "d_v"), element="input", written=True),
    ),
    # S and dP again, then dV, dK and dQ.
    products=("d", "d_v", "d_v", "d", "d"),
    bounds=_backward_bounds,
)

MORE_GRADIENTS = (
    Operand(
        name="dbias", title="bias's gradient", axes=("batch", "heads", "n_q", "n_kv"), element="output", written=True, repeats=("batch",)
    ),
    Operand(name="dslopes", title="rows' parts of the slopes' gradient", axes=("batch", "heads", "n_q"), element="fp32", written=True),
)
"""Gradients that a backward writes on request, by the requesting feature (`flashtune.core.problems.problem.ASKED`).

`dbias` is a view expanded to its sizes, as masks are: with stride 0 where the bias repeats, over which it is the sum. A slope's gradient is
the sum of its rows' parts, which the caller adds up.
"""


@lru_cache
def backward_with(requested: tuple[str, ...]) -> Pass:
    """`BACKWARD` with the requested ones of `MORE_GRADIENTS`."""
    return BACKWARD._replace(operands=(*BACKWARD.operands, *(operand for operand in MORE_GRADIENTS if operand.name in requested)))


PASSES: dict[Direction, Pass] = {"fwd": FORWARD, "bwd": BACKWARD}
"""Every pass by its direction in problems and keys."""
