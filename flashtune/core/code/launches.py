"""Launches of a call as data: kernels by name, each with its grid and arguments, made from shapes, strides and numbers alone.

Nothing here holds or reads memory: a launch can be planned without Triton, compiled without a GPU, and replayed with other addresses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from flashtune.core.problems.config import Config, KernelSpec

ITEM_BYTES: Mapping[str, int] = {
    "fp64": 8, "i64": 8, "fp32": 4, "i32": 4, "fp16": 2, "bf16": 2, "i16": 2, "fp8e4nv": 1, "fp8e5": 1, "u8": 1, "u1": 1, "i8": 1,
}  # fmt: skip
"""Bytes of an element, by Triton's names of element types."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a launch: its index among the call's tensors, its layout, and `aligned`, True if it starts at a multiple of 16 bytes.

    `dtype` is Triton's name of the element type; strides are in elements.
    """

    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    aligned: bool = True

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    def viewed(self, dtype: str) -> "Operand":
        """The memory read as another type of the same width."""
        return Operand(self.source, self.shape, self.strides, dtype, self.aligned)

    def narrowed(self, most: Sequence[int | None]) -> "Operand":
        """The operand with at most `most` elements of dimensions that repeat one element (stride 0); None is no limit."""
        shape = tuple(
            size if stride or limit is None else min(size, limit)
            for size, stride, limit in zip(self.shape, self.strides, most, strict=True)
        )
        return Operand(self.source, shape, self.strides, self.dtype, self.aligned)


class Descriptor(NamedTuple):
    """A descriptor of the copy engine (TMA) over an operand: tiles of `block`, strides in elements.

    `layout` names the tile's layout in shared memory: `swizzled` and `plain` are Gluon's, `triton` leaves it to Triton.
    """

    base: Operand
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Literal["swizzled", "plain", "triton"]


class Resident(NamedTuple):
    """Memory at the same address at every call."""

    address: int
    dtype: str

    @property
    def aligned(self) -> bool:
        """True if it starts at a multiple of 16 bytes."""
        return self.address % 16 == 0


class Varying(int):
    """A number that changes from call to call; `source` is its index among the call's numbers."""

    source: int

    @classmethod
    def of(cls, source: int, value: int) -> "Varying":
        """The number of this index, with a value until it is replaced."""
        varying = cls(value)
        varying.source = source
        return varying

    def __and__(self, mask: int) -> "Varying":
        """The number itself: its parameter's width cuts it anyway."""
        return self


class Launch(NamedTuple):
    """One kernel's launch: the function's name, its grid, its arguments in order, and the compiler's options.

    Arguments are operands, descriptors, numbers and constants.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


@dataclass(slots=True)
class Scratch:
    """Memory that is made for one call alone; its operands follow the call's own tensors, of which there are `first`."""

    first: int
    operands: list[Operand] = field(default_factory=list)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Operand:
        """Contiguous memory of this shape that a launch of the call writes before another reads it."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(1, size)
        made = Operand(self.first + len(self.operands), shape, tuple(reversed(strides)), dtype)
        self.operands.append(made)
        return made


class Pages(NamedTuple):
    """The pages of a call: the table (sequences, pages) of blocks, bounds of the numbers of queries and keys of a sequence, and the
    number of splits, None for as many as fill the device."""

    table: Operand
    max_q: int
    max_k: int
    splits: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInputs:
    """Operands and numbers of one call.

    q (B, Hq, N_q, D), k (B, Hkv, N_kv, D), v (B, Hkv, N_kv, D_v), out (B, Hq, N_q, D_v), with any strides; lse (B, Hq, N_q) float32,
    contiguous. `mask` is expanded to (B, Hq, N_q, N_kv); `bias` is an additive mask as the copy engine takes it (`Host.narrowed_bias`).
    slopes and sinks (B, Hq), descale (q (B, Hq), k and v (B, Hkv)). Backwards also have dout like out, dlse like lse, and gradients; those
    without a request are None. Window sides are -1 for unbounded; `diagonal` shifts the band (0 top-left, N_kv - N_q bottom-right).
    `mods` are the tensors of a mask and a score as code (flashtune.templates.launches.mods).
    `sms` is the device's number of multiprocessors, `counts` are int32 that are zero before and after every launch, and in
    `misses` a kernel with a frozen row maximum counts its launches and mispredicting programs: one int64 on the device, and nine where the
    host reads them.

    Of packed sequences tensors have one batch, whose stride is 0, with all rows; `lengths` are the places where each sequence's queries and
    keys begin, (sequences + 1,), and the numbers of keys that are used of each, (sequences,), or None for all. `diagonal` is then 1 for the
    last query on the last key of each, and 0 for the first on the first. With `pages` k and v are (blocks, Hkv, page, D), and of `descale`
    that of q is any operand.
    """

    q: Operand
    k: Operand
    v: Operand
    out: Operand
    lse: Operand
    dout: Operand | None = None
    dlse: Operand | None = None
    dq: Operand | None = None
    dk: Operand | None = None
    dv: Operand | None = None
    dbias: Operand | None = None
    dslopes: Operand | None = None
    mask: Operand | None = None
    bias: Operand | None = None
    slopes: Operand | None = None
    descale: tuple[Operand, Operand, Operand] | None = None
    sinks: Operand | None = None
    lengths: tuple[Operand, Operand, Operand | None] | None = None
    pages: Pages | None = None
    mods: tuple[Operand, ...] = ()
    counts: Operand | None = None
    misses: tuple[Any, Any] | None = None
    scale: float
    diagonal: int = 0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    sms: int

    @property
    def batch(self) -> int:
        """Batches."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        """Key heads."""
        return self.k.shape[1]

    @property
    def n_q(self) -> int:
        """Queries."""
        return self.q.shape[2]

    @property
    def n_kv(self) -> int:
        """Keys."""
        return self.k.shape[2]


class Host(Protocol):
    """The host side of one kernel: the tensors it takes, and its launches as a pure function of shapes, strides and numbers.

    With `positive_scale` the scale must be above 0 (the caller moves its sign into q); with `counts_misses` launches take `misses`.
    """

    @property
    def spec(self) -> KernelSpec:
        """The spec that the kernel is compiled for."""
        ...

    @property
    def config(self) -> Config:
        """The kernel's config."""
        ...

    @property
    def positive_scale(self) -> bool:
        """True if the scale must be above 0."""
        ...

    @property
    def counts_misses(self) -> bool:
        """True if launches take `misses`."""
        ...

    def accepts(self, q: Operand, k: Operand, v: Operand, mask: Operand | None, *, interpreted: bool = False) -> bool:
        """True if the kernel, compiled or in Triton's interpreter, takes tensors of these layouts."""
        ...

    def counts_needed(self, q: Operand, k: Operand) -> int:
        """Elements of `counts` that a launch takes; where it is 0, `counts` may be None."""
        ...

    def narrowed_bias(self, mask: Operand) -> Operand | None:
        """The part of an additive mask that the copy engine reads, once where it repeats; None for kernels that read masks by pointer."""
        ...

    def launches(self, inputs: LaunchInputs, scratch: Scratch) -> list[Launch]:
        """The launches of one call in order, with the scratch memory they take from `scratch`."""
        ...


def copyable(x: Operand) -> bool:
    """True if the copy engine can read `x` (B, H, N, D): aligned, contiguous rows, other strides positive multiples of 16 bytes."""
    unit = 16 // x.item_bytes
    steps = zip(x.shape[:3], x.strides[:3], strict=True)
    return x.aligned and x.strides[3] == 1 and all(size == 1 or (step > 0 and step % unit == 0) for size, step in steps)
