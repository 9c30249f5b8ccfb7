"""Launches of flash_fwd_hopper: operands go through the copy engine, after masks are packed and fp8 values transposed."""

from typing import Any

from flashtune.core.code.launches import Descriptor, Launch, LaunchInputs, Operand, Scratch, copyable
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.parameters import dropout_threshold
from flashtune.templates.hopper.layout import ROWS, HopperLayout
from flashtune.templates.hopper.pages import PagedLayout
from flashtune.templates.hopper.wide import WideLayout
from flashtune.templates.launches.common import LOG2_E, LengthArguments, cdiv, magic_divisor, outer_strides, per_head
from flashtune.templates.launches.mods import FORWARD, captured_of, list_arguments
from flashtune.templates.mods.known import functions_of

PACKED_BITS_LIMIT = 2**32
"""Most elements of a mask with repeated rows that is packed to bits: half a GiB."""

BITS_TYPES = {64: "i16", 128: "i32", 256: "i64"}
"""Type of a packed mask word by the columns of a block."""


def swizzled(x: Operand, rows: int, columns: int) -> Descriptor:
    """A descriptor over (B, H, N, D) with tiles of `rows` rows of one head; the copy engine reads zeros outside."""
    return Descriptor(x, x.shape, (*outer_strides(x.shape[:3], x.strides[:3]), 1), (1, 1, rows, columns), "swizzled")


RAGGED, FARTHEST = 2**30, 0x7FFF0000
"""Rows of a descriptor over packed sequences, and sizes of its dimensions beside them."""


def ragged(x: Operand, rows: int, columns: int) -> Descriptor:
    """A descriptor over packed rows (1, H, T, D) that ends where a sequence does, for reading and for writing.

    At (RAGGED, end, head, RAGGED - n + row, column) is a row of the sequence of n rows that ends at `end`: the row's own coordinate is
    RAGGED where the sequence ends, and the first one takes what is too much off again, as addresses wrap at 2^64 (triton.tools.ragged_tma).
    """
    _, heads, _, d = x.shape
    _, step_h, step_n, _ = x.strides
    shape = (FARTHEST, FARTHEST, heads, RAGGED, d)
    return Descriptor(x, shape, (2**34 - step_n, step_n, step_h, step_n, 1), (1, 1, 1, rows, columns), "swizzled")


LEAST_PAGE = 16
"""Rows of the smallest page that is copied by itself, so that a tile's copies fill whole periods of its swizzle."""


def rows_of_block(x: Operand) -> int:
    """Rows of memory from a block of a cache (blocks, Hkv, page, D) to the next one."""
    return 0 if x.shape[0] == 1 else x.strides[0] // x.strides[2]


def accepts_tiles(spec: KernelSpec, tensors: tuple[Operand, ...], mask: Operand | None) -> bool:
    """True if the copy engine takes these tensors and, where it repeats rows, a mask is small enough to be packed."""
    if not all(copyable(x) and x.shape[3] % (16 // x.item_bytes) == 0 for x in tensors):
        return False
    # Nothing has no address, which a descriptor needs.
    if spec.packed and not all(x.shape[2] for x in tensors):
        return False
    if spec.mask == "bool":
        assert mask is not None, "a kernel with a mask needs one"
        matrices = (mask.shape[0] if mask.strides[0] else 1) * (mask.shape[1] if mask.strides[1] else 1)
        return mask.strides[2] > 0 or matrices * mask.shape[2] * mask.shape[3] <= PACKED_BITS_LIMIT
    return spec.mask != "bias" or (mask is not None and mask.item_bytes <= 2)


class HopperForwardHost:
    """Host side of flash_fwd_hopper."""

    positive_scale = True
    layout_of: type[HopperLayout] = HopperLayout

    def __init__(self, spec: KernelSpec, config: Config) -> None:
        self.spec, self.layout = spec, self.layout_of.of(spec, config)
        # With the axes that a family never varies.
        self.config = self.layout.config
        self.counts_misses = self.layout.settles

    def accepts(self, q: Operand, k: Operand, v: Operand, mask: Operand | None, *, interpreted: bool = False) -> bool:
        """True if the copy engine takes these tensors."""
        # The kernel that transposes fp8 values takes any strides.
        if not accepts_tiles(self.spec, (q, k) if self.layout.fp8 else (q, k, v), mask):
            return False
        # The copy engine can't repeat a row of a bias.
        return self.spec.mask != "bias" or (mask is not None and (mask.strides[2] > 0 or mask.shape[2] == 1))

    def counts_needed(self, q: Operand, k: Operand) -> int:
        """1 under dynamic scheduling, where programs take tiles from a common count, else 0."""
        return 1 if self.layout.drawn else 0

    def narrowed_bias(self, mask: Operand) -> Operand | None:
        """One matrix of each batch and head that the bias repeats."""
        return mask.narrowed((1, 1, None, None)) if self.spec.mask == "bias" else None

    def launches(self, inputs: LaunchInputs, scratch: Scratch) -> list[Launch]:
        """Launches of preparations (packed masks, transposed values), then of the kernel."""
        layout = self.layout
        found: list[Launch] = []
        heads = inputs.heads
        if layout.packs:
            heads = inputs.kv_heads * cdiv(inputs.heads // inputs.kv_heads, layout.packed)
        lengths = LengthArguments.of(self.spec, inputs)
        m_tiles = lengths.tiles(inputs, inputs.n_q, layout.tile_queries) // inputs.batch
        tiles = m_tiles * inputs.batch * heads
        values, mask_numbers, mask_bits = inputs.v, list[int](), list[Operand]()
        if layout.fp8:
            values = _transpose_values(inputs.v, scratch, found)
        if self.spec.mask == "bool":
            assert inputs.mask is not None, "a kernel with a mask needs one"
            matrices = inputs.mask.narrowed((1, 1, None, None)).viewed("u8")
            bits = pack_mask(matrices, inputs.n_q, m_tiles * self.config.number("BLOCK_M"), self.config.number("BLOCK_N"), scratch, found)
            mask_bits, mask_numbers = [bits], matrix_steps(matrices)
        elif self.spec.mask == "bias":
            assert inputs.bias is not None, "a kernel with a bias needs one"
            mask_numbers = [int(inputs.bias.shape[0] > 1), int(inputs.bias.shape[1] > 1)]
        arguments = [
            *self._descriptors(inputs, values),
            inputs.lse,
            *lengths.pointers,
            *([inputs.counts] if layout.drawn else []),
            *((inputs.misses or ()) if layout.settles else ()),
            *(inputs.n_q, self._keys(inputs), inputs.batch, heads, heads // inputs.kv_heads, m_tiles),
            *((inputs.kv_heads, inputs.heads // inputs.kv_heads) if layout.packs else ()),
            *((inputs.n_q, *lengths.sizes, *map(int, lengths.flags)) if self.spec.packed else ()),
            *(getattr(inputs, name) for name in self.spec.band_sizes),
            *mask_numbers,
            *self._pages(inputs),
            *self._divisors(inputs, m_tiles, heads),
            *list_arguments(self.spec, inputs, FORWARD),
            *self._score_numbers(inputs),
            *mask_bits,
            *([inputs.scale, *captured_of(self.spec, inputs)] if self.spec.mods else ()),
            *per_head(self.spec, inputs),
            *([inputs.k.shape[2]] if layout.paged else ()),
        ]
        residents = self.config.number("ctas_per_sm")
        programs = min(tiles, residents * inputs.sms) if layout.persistent else tiles
        options = {"num_warps": 4} | ({"maxnreg": layout.entry_registers} if residents > 1 else {})
        return [*found, Launch("flash_fwd_hopper", (programs,), tuple(arguments), options)]

    def _descriptors(self, inputs: LaunchInputs, values: Operand) -> list[Descriptor]:
        layout, block_n = self.layout, self.config.number("BLOCK_N")
        d = layout.chunk if layout.chunked else layout.block_d
        d_v = layout.chunk if layout.chunked else layout.block_dv
        d_out = layout.chunk if layout.chunked else layout.block_dv // layout.out_halves
        tiled = ragged if self.spec.packed else swizzled
        rows, of_k, of_v = (min(block_n, inputs.n_kv), layout.copied_d, layout.copied_dv) if layout.paged else (block_n, d, d_v)
        found = [
            self._queries(inputs.q, inputs.kv_heads, d),
            tiled(inputs.k, rows, of_k),
            swizzled(values, layout.block_dv, block_n) if layout.fp8 else tiled(values, rows, of_v),
            self._queries(inputs.out, inputs.kv_heads, d_out),
        ]
        if self.spec.mask == "bias":
            assert inputs.bias is not None, "a kernel with a bias needs one"
            found.append(swizzled(inputs.bias, 64, block_n))
        return found

    def _queries(self, x: Operand, kv_heads: int, columns: int) -> Descriptor:
        """A descriptor of queries or outputs; with pack_gqa over (B, Hkv, Hq / Hkv, N, D), with rows of each head in a warpgroup's tile."""
        if not self.layout.packs:
            return (ragged if self.spec.packed else swizzled)(x, 64, columns)
        packed = self.layout.packed
        (b, h, n, d), (step_b, step_h, step_n, _) = x.shape, x.strides
        shape = (b, kv_heads, h // kv_heads, n, d)
        steps = (step_b, step_h * (h // kv_heads), step_h, step_n)
        return Descriptor(x, shape, (*outer_strides(shape[:4], steps), 1), (1, 1, packed, 64 // packed, columns), "swizzled")

    def _keys(self, inputs: LaunchInputs) -> int:
        """Keys of a dense call, of all packed sequences, or in a row of a table."""
        return inputs.n_kv if inputs.pages is None else inputs.pages.table.shape[1] * inputs.n_kv

    def _pages(self, inputs: LaunchInputs) -> list[int]:
        return [] if inputs.pages is None else [*inputs.pages.table.strides, *(rows_of_block(x) for x in (inputs.k, inputs.v))]

    def _divisors(self, inputs: LaunchInputs, m_tiles: int, heads: int) -> list[int]:
        section = self.config.number("section")
        by = [m_tiles * section, inputs.batch if self.spec.mask != "none" else heads]
        # The last section may have fewer heads.
        by += [inputs.batch * heads % section or 1] if section > 1 else []
        return [number for divisor in by for number in magic_divisor(divisor)]

    def _score_numbers(self, inputs: LaunchInputs) -> list[Any]:
        spec, softcap, scale = self.spec, inputs.softcap, inputs.scale
        mods = functions_of(spec.mods)
        found: list[Any] = [LOG2_E * (1 if mods is not None and mods.score else softcap if spec.softcap else scale)]
        found += [1 / (softcap if spec.softcap else scale)] if "bias_scale" in self.layout.params else []
        found += [2 * LOG2_E * scale / softcap] if spec.softcap else []
        if spec.dropout:
            kept = 1 / (1 - inputs.dropout_p) if inputs.dropout_p < 1 else 0.0
            found += [inputs.seed, inputs.offset, dropout_threshold(inputs.dropout_p), kept]
        return found


class PagedForwardHost(HopperForwardHost):
    """Host side of flash_fwd_hopper_paged. Its k and v are (blocks, Hkv, page, D)."""

    layout_of = PagedLayout

    def accepts(self, q: Operand, k: Operand, v: Operand, mask: Operand | None, *, interpreted: bool = False) -> bool:
        """True if the copy engine takes these tensors: pages of a power of two of keys, which a tile or its swizzle divides into whole
        copies, in blocks that are whole rows of memory apart."""
        page = k.shape[2]
        if page < LEAST_PAGE or page & (page - 1) or (k.dtype, v.dtype) != (q.dtype, q.dtype):
            return False
        apart = all(x.shape[0] == 1 or (x.strides[0] % x.strides[2] == 0 and x.shape[0] * rows_of_block(x) < FARTHEST) for x in (k, v))
        return apart and super().accepts(q, k, v, mask, interpreted=interpreted)


class WideForwardHost(HopperForwardHost):
    """Host side of flash_fwd_hopper_wide."""

    layout: WideLayout
    layout_of = WideLayout

    def _descriptors(self, inputs: LaunchInputs, values: Operand) -> list[Descriptor]:
        """Queries and keys by parts, and values and outputs of either warpgroup."""
        layout, block_n = self.layout, self.config.number("BLOCK_N")
        keys = [swizzled(inputs.q, ROWS, layout.part), swizzled(inputs.k, block_n, layout.part)]
        columns = layout.block_dv, layout.left
        return [*keys, *(swizzled(values, block_n, one) for one in columns), *(swizzled(inputs.out, ROWS, one) for one in columns)]


def pack_mask(
    matrices: Operand, n_rows: int, rows: int, block: int, scratch: Scratch, found: list[Launch], *, fusion: bool = False
) -> Operand:
    """Launch the kernel that packs a boolean mask's columns into words of a block; returns the words (batches, heads, blocks, rows, 4).

    `matrices` (batches, heads, n_rows, columns) are bytes; backwards pass them transposed.
    """
    columns = matrices.shape[3]
    blocks = cdiv(columns, block)
    bits = scratch.empty((*matrices.shape[:2], blocks, rows, 4), BITS_TYPES[block])
    arguments = (matrices, bits, *matrices.strides, matrices.shape[1], n_rows, columns, rows, block)
    words = matrices.shape[0] * matrices.shape[1] * blocks * rows * 4
    found.append(Launch("pack_mask", (words // 256,), arguments, {"enable_fp_fusion": True} if fusion else {}))
    return bits


def matrix_steps(matrices: Operand) -> list[int]:
    """Matrices to the next batch and to the next head of a mask that may repeat."""
    return [matrices.shape[1] if matrices.shape[0] > 1 else 0, int(matrices.shape[1] > 1)]


def _transpose_values(v: Operand, scratch: Scratch, found: list[Launch]) -> Operand:
    """Launch the kernel that transposes fp8 values to keys innermost, in rows of whole swizzle units; returns the result."""
    batch, heads, n_kv, d_v = v.shape
    n_padded = cdiv(n_kv, 16) * 16
    transposed = scratch.empty((batch, heads, d_v, n_padded), "u8")
    arguments = (v.viewed("u8"), transposed, *v.strides, heads, n_kv, n_padded, d_v, 128)
    found.append(Launch("transpose_v", (batch * heads * cdiv(n_padded, 128),), arguments, {}))
    return transposed.viewed(v.dtype)
