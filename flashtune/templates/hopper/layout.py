"""Layout facts derived from a spec and a config of Hopper's families, for templates, constraints and the cost model.

Those of the backward pass are in flashtune.templates.backward.hopper.layout.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from flashtune.core.problems.config import Config, KernelSpec, asks_first, rescales_grown, settles
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import Problem, padded
from flashtune.core.system.versions import minor
from flashtune.templates.mods.known import functions_of

SHARED_BYTES = 227 * 1024
"""Shared memory of a program on Hopper."""

ROWS = 64
"""Rows of a warpgroup, those of its matrix instructions: queries, or keys in the backward pass."""

CHUNK_BYTES = 128
"""Bytes of a row of a swizzle-width tile: the widest swizzle of the copy engine and of matrix instructions."""

NARROW_UNIT = frozenset({40, 48, 72, 80, 104, 112})
"""Head sizes of two-byte types whose products work through multiples of 16 columns, which end nearer to the head size than those of 32
(decision 0008). Of larger ones nothing was measured."""

CONSUMER_REGISTERS = {(1, 1): 248, (2, 1): 240, (3, 1): 160, (4, 1): 120, (1, 2): 232, (2, 2): 104, (1, 3): 136, (1, 4): 104}
"""Registers of a consumer thread, by (warpgroups, programs on an SM): the register file less the producer's share."""


VIEWS_END_WITH_THEIR_MEMORY = (3, 8)
"""First version of Triton that takes no view of shared memory with more columns than are there, though products read no more than these."""


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """Base of both passes' layouts: tiles' columns, and parameters of a spec's features."""

    spec: KernelSpec
    config: Config

    @classmethod
    def of(cls, spec: KernelSpec, config: Config) -> Self:
        """The layout of any config of the declared space, valid or not."""
        return cls(spec, config)

    @property
    def size(self) -> int:
        """Bytes of an element of q, k and v."""
        return ITEMSIZE[self.spec.dtype]

    @property
    def block_d(self) -> int:
        """Columns of a tile of q and k."""
        return padded(self.spec.d)

    @property
    def block_dv(self) -> int:
        """Columns of a tile of v and of the output."""
        return padded(self.spec.d_v)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First column and width of each part of D that products work through."""
        return self._pieces(self.spec.d, self.block_d)

    @property
    def v_pieces(self) -> list[tuple[int, int]]:
        """First column and width of each part of D_v, which has an accumulator each."""
        return self._pieces(self.spec.d_v, self.block_dv)

    def unit(self, head_dim: int) -> int:
        """MMA N granularity of a head size, in columns."""
        return 16 if self.size == 2 and head_dim in NARROW_UNIT else 64 // self.size

    @property
    def narrow_unit(self) -> bool:
        """True if products work through multiples of 16 columns of q and k or of v."""
        return 16 in (self.unit(self.spec.d), self.unit(self.spec.d_v))

    def _pieces(self, head_dim: int, block: int) -> list[tuple[int, int]]:
        """First columns and widths: powers of two, one per bit of the head size rounded up to the unit; a single one is the whole tile."""
        unit = self.unit(head_dim)
        reach = -(-head_dim // unit) * unit
        found: list[tuple[int, int]] = []
        for width in (256, 128, 64, 32, 16):
            if width >= unit and reach < block and reach // width % 2:
                found.append((sum(width for _, width in found), width))
        return found if len(found) > 1 else [(0, block)]

    @property
    def chunked(self) -> bool:
        """True if tiles are swizzle-width in shared memory, as many as the head size needs, in place of a power of two of columns."""
        return False

    @property
    def uncompilable(self) -> str | None:
        """The reason why the installed Triton can't compile these tiles, or None where it can."""
        import triton

        if not self.chunked or minor(triton.__version__) < VIEWS_END_WITH_THEIR_MEMORY:
            return None
        return (
            f"Triton {triton.__version__} takes no views that end behind their memory, which tiles of head sizes {self.spec.d} and "
            f"{self.spec.d_v} need: use a version before {'.'.join(map(str, VIEWS_END_WITH_THEIR_MEMORY))}"
        )

    @property
    def chunk(self) -> int:
        """Columns of a swizzle-width tile."""
        return CHUNK_BYTES // self.size

    def in_chunks(self, head_dim: int) -> int:
        """A head size rounded up to whole swizzle-width tiles."""
        return -(-head_dim // self.chunk) * self.chunk

    @property
    def stored_d(self) -> int:
        """Columns of a tile of q and k in shared memory."""
        return self.in_chunks(self.spec.d) if self.chunked else self.block_d

    @property
    def stored_dv(self) -> int:
        """Columns of a tile of v, of the output and of its gradient in shared memory."""
        return self.in_chunks(self.spec.d_v) if self.chunked else self.block_dv

    @property
    def mod_params(self) -> list[str]:
        """Parameters of a mask and a score as code: captured tensors."""
        mods = functions_of(self.spec.mods)
        return [] if mods is None else mods.parameters

    @property
    def lists(self) -> list[str]:
        """Parameters of the lists of blocks that a mask as code has."""
        mods = functions_of(self.spec.mods)
        return ["blocks_ptr", "stride_lb", "stride_lh", "stride_lt"] if mods is not None and mods.listed(self.spec) else []

    @property
    def score_params(self) -> list[str]:
        """Parameters of a soft cap and of dropout."""
        return ["inner_scale"] * self.spec.softcap + ["seed", "offset", "threshold", "keep_scale"] * self.spec.dropout


def packed_heads(config: Config) -> int:
    """The number of heads of a key head whose queries share a tile of the forward (pack_gqa)."""
    return int(config.get("packed_heads", 1))


def packed_problem(config: Config, problem: Problem) -> Problem:
    """The problem with packed sets of heads as heads; its queries are still each head's."""
    packed = packed_heads(config)
    return problem if packed == 1 else replace(problem, heads=problem.kv_heads * math.ceil(problem.gqa_ratio / packed))


def tile_queries(config: Config) -> int:
    """Queries of each head in a tile of the forward."""
    return config.number("BLOCK_M") // packed_heads(config)


def tiles_of(config: Config, problem: Problem) -> int:
    """Tiles of queries of a whole forward; each packed sequence ends in a tile of its own."""
    rows = tile_queries(config)
    return packed_problem(config, problem).heads * sum(count * math.ceil(one.n_q / rows) for one, count in problem.shapes())


class HopperLayout(HopperTiles):
    """Layout of a program of `flash_fwd_hopper`: its warpgroups, tiles and memory."""

    __slots__ = ()

    @property
    def fp8(self) -> bool:
        """True if q, k and v are e4m3: products take the keys innermost, and have their own accumulators."""
        return self.size == 1

    @property
    def paged(self) -> bool:
        """True if keys lie in pages of a cache, which only the producer knows."""
        return False

    @property
    def wide(self) -> bool:
        """True if two warpgroups share a tile's rows, by columns of the output."""
        return False

    @property
    def copied_d(self) -> int:
        """Columns of a copy of keys from a page: those of the widest swizzle, or the tile's."""
        return min(self.chunk, self.block_d)

    @property
    def copied_dv(self) -> int:
        """Columns of a copy of values from a page."""
        return min(self.chunk, self.block_dv)

    @property
    def pages(self) -> list[str]:
        """The kernel's parameters about pages: strides of the table, and rows of memory from a block of the cache to the next."""
        return ["by_sequence", "by_page", "k_rows", "v_rows"] * self.paged

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, of ROWS rows each."""
        return self.config.number("BLOCK_M") // ROWS

    @property
    def packed(self) -> int:
        """The number of heads of a key head whose queries share a tile."""
        return packed_heads(self.config)

    @property
    def packs(self) -> bool:
        """True with pack_gqa: a tile has queries of several heads."""
        return self.packed > 1

    @property
    def tile_queries(self) -> int:
        """Queries of each head in a tile."""
        return tile_queries(self.config)

    @property
    def overlap(self) -> int:
        """Products in flight beside a softmax: none, or the values before it."""
        return self.config.number("intra_wg_overlap")

    @property
    def persistent(self) -> bool:
        """True if a program works through many tiles."""
        return self.config["tiles"] != "one"

    @property
    def chained(self) -> bool:
        """True if the last values of a tile overlap the first scores of the next."""
        return self.config["tiles"] == "chained"

    @property
    def drawn(self) -> bool:
        """True under dynamic scheduling: tiles of a band have unequal lengths."""
        return self.config["order"] == "drawn"

    @property
    def own_blocks(self) -> bool:
        """True if a warpgroup visits only blocks that its own rows see; with chained tiles it would wait for values too early."""
        return self.spec.banded and not self.chained and self.consumers > 1

    @property
    def settles(self) -> bool:
        """True if row maxima are frozen after a tile's first blocks, and raised only where a block exceeds them."""
        return settles(self.config)

    @property
    def lazy_rescale(self) -> bool:
        """True for thresholded rescale: blocks rescale the accumulator only where a running maximum grew far."""
        return rescales_grown(self.config)

    @property
    def asks_first(self) -> bool:
        """True if such blocks look for maxima only where a score exceeds all before it."""
        return asks_first(self.config)

    @property
    def parted(self) -> bool:
        """True if blocks after a tile's edge have a loop of their own: with frozen maxima, and where checks for unseen rows and hidden keys
        would cost most."""
        # Functions may hide any key.
        edge = self.spec.mask == "none" and not self.spec.mods and (self.spec.banded or self.overlap == 0)
        return self.settles or (self.asks_first and edge)

    @property
    def own_out(self) -> bool:
        """True if the output has its own shared memory, so that a program's next queries needn't wait for it."""
        return self.persistent or self.stored_d != self.stored_dv or self.fp8

    @property
    def out_halves(self) -> int:
        """The number of copies of the output: it has memory for half a tile beside tiles that fill the rest."""
        return 2 if self.config["tiles"] == "loop" and self.block_dv > 64 else 1

    @property
    def chunked(self) -> bool:
        """True where swizzle-width tiles spare memory, of which products of values read no more: at two-byte head sizes of 136 to 192."""
        stored, stored_v = self.in_chunks(self.spec.d), self.in_chunks(self.spec.d_v)
        spared = self.block_d + self.block_dv - stored - stored_v
        return self.size == 2 and spared > 0 and min(self.block_d, self.block_dv) >= self.chunk and self.v_columns <= stored_v

    @property
    def out_columns(self) -> int:
        """Columns of the memory that the output is copied from: the queries', or its own, padded in the first of two halves."""
        if not self.own_out:
            return self.stored_d
        return self.stored_dv if self.out_halves == 1 else self.block_dv // 2

    @property
    def product_depth(self) -> int:
        """Columns that a matrix instruction multiplies."""
        return 32 // self.size

    @property
    def v_pieces(self) -> list[tuple[int, int]]:
        """The split accumulator's parts of D_v by the config's axis, the first half of a padded tile, or one part of the whole tile."""
        in_pieces = self.config.get("v_columns", "padded") == "pieces" and not self.fp8
        return self._pieces(self.spec.d_v, self.block_dv) if in_pieces else [(0, self.block_dv)]

    @property
    def v_columns(self) -> int:
        """Columns of the output in products and accumulators."""
        return sum(width for _, width in self.v_pieces)

    @property
    def sizes(self) -> list[str]:
        """The kernel's size parameters, which it passes on as `Sizes`."""
        s = self.spec
        found = ["n_q", "n_kv", "batches", "heads", "kv_group", "m_tiles"] + ["kv_heads", "group"] * self.packs
        found += (["rows", "sequences"] + ["some_used"] * (not self.paged)) * s.packed
        return found + s.band_sizes + ["mask_per_batch", "mask_per_head"] * (s.mask != "none")

    @property
    def sequence(self) -> list[str]:
        """Fields of a tile of packed rows about its sequence; `present` is 0 in rows after the last one."""
        return ["q_start", "n_q", *["k_start"] * (not self.paged), "n_kv"] + ["present"] * self.spec.sinks

    @property
    def divisors(self) -> list[str]:
        """Divisors of work indices: a section of heads, its batches or heads, and the heads of an incomplete last section."""
        return ["section", "inner"] + ["last"] * (self.config.number("section") > 1)

    @property
    def params(self) -> list[str]:
        """The kernel's parameters for scores, and the pointer to the packed mask."""
        s = self.spec
        found = ["scale"] + ["bias_scale"] * (s.mask == "bias" or s.alibi) + self.score_params + ["mask_bits_ptr"] * (s.mask == "bool")
        return found + ["natural_scale"] * bool(s.mods) + self.mod_params

    @property
    def per_head(self) -> list[str]:
        """Parameters with a number per head in memory, each with two strides."""
        return self.spec.per_head

    @property
    def head_params(self) -> list[str]:
        """The values of `per_head` that the tiles of a head use beside `params`."""
        return ["slope"] * self.spec.alibi + ["out_scale"] * self.fp8 + ["sink"] * self.spec.sinks

    @property
    def softmax_state(self) -> list[str]:
        """The state of a warpgroup from block to block beside the output's accumulator.

        A block with products in flight leaves its probs, and with e4m3 the factor that rescales the older sums.
        """
        return ["p_tile"] * (self.overlap > 0) + ["rescale"] * (self.overlap > 0 and self.fp8) + ["row_max", "row_sum"]

    @property
    def consumer_registers(self) -> int | None:
        """Registers of a consumer thread; None where so many warpgroups don't fit the register file."""
        return CONSUMER_REGISTERS.get((self.consumers, self.config.number("ctas_per_sm")))

    @property
    def producer_registers(self) -> int:
        """Registers that a thread of the producer keeps."""
        return 32 if self.consumers == 3 else 24

    @property
    def entry_registers(self) -> int:
        """Registers of a thread at entry: 65536 shared by the warpgroups of all programs on the SM."""
        return 65536 // (128 * (self.consumers + 1) * self.config.number("ctas_per_sm")) // 8 * 8

    @property
    def product_registers(self) -> int:
        """Registers that ptxas 12.8 wants for a thread's largest matrix instruction: its accumulator, probs beside values, and 26."""
        values = max(width for _, width in self.v_pieces)
        return 26 + max(self.config.number("BLOCK_N") // 2, values // 2 + 4)

    @property
    def live_registers(self) -> int:
        """Registers of a consumer thread's accumulators and probs (scores and output fp32, probs as wide as the inputs)."""
        scores, out = self.config.number("BLOCK_N") // 2, self.v_columns // 2
        probs, product = scores * self.size // 4, out if self.fp8 else 0
        loaded = {"none": 0, "bool": 4, "bias": 24}[self.spec.mask]
        if self.overlap == 0:
            return max(scores + loaded, probs + product) + out
        return scores + probs + product + out + loaded

    @property
    def shared_bytes(self) -> int:
        """Queries, stages of keys and values, the output and the bias's tiles, with a KiB for barriers."""
        block_m, block_n = self.config.number("BLOCK_M"), self.config.number("BLOCK_N")
        q = self.size * block_m * self.stored_d * (2 if self.chained else 1)
        kv = self.size * self.config.number("num_stages") * block_n * (self.stored_d + self.stored_dv)
        out = 2 * block_m * self.out_columns if self.own_out else 0
        bias = 4 * block_m * block_n if self.spec.mask == "bias" else 0
        return q + kv + out + bias + 1024
