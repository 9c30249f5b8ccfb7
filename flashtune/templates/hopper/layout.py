"""What follows from a spec and a config of the families for Hopper, stated once for templates, constraints and the cost model.

Those of the backward pass add theirs in flashtune.templates.backward.hopper.layout.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from flashtune.core.config import Config, KernelSpec, asks_first, rescales_grown, settles
from flashtune.core.dtypes import ITEMSIZE
from flashtune.core.problem import Problem
from flashtune.templates.family import Axis, padded

ROWS = 64
"""Rows of a warpgroup, those of its matrix instructions: queries, or keys in the backward pass."""

CHUNK_BYTES = 128
"""Bytes of a row in a chunk of shared memory: the widest swizzle of the copy engine and of matrix instructions."""

COLUMN_UNIT = Axis(
    name="column_unit",
    values=(32, 16),
    absent=32,
    refits=False,
    why="what products round head sizes up to: D = 40 to 64 columns or to 48, D = 80 to 96 or not at all, against narrower products",
)
"""An axis of `flash_fwd_hopper` and `flash_bwd_hopper`: a matrix instruction takes 16 columns of depth. No stand-in is moved to 16, which
is worth more or less by head size and features: only rows that were measured with it have it."""

CONSUMER_REGISTERS = {(1, 1): 248, (2, 1): 240, (3, 1): 160, (4, 1): 120, (1, 2): 232, (2, 2): 104, (1, 3): 136, (1, 4): 104}
"""What a consumer thread may hold, by (warpgroups, programs on an SM): the register file less the producer's share."""


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """What kernels of both passes have in common: tiles' columns, and what they take for a spec's features."""

    spec: KernelSpec
    config: Config

    @classmethod
    def of(cls, spec: KernelSpec, config: Config) -> Self:
        """The layout of any config of the declared space, whether or not it keeps the constraints."""
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
        """First column and width of the parts of D that products work through."""
        return self._pieces(self.spec.d, self.block_d)

    @property
    def v_pieces(self) -> list[tuple[int, int]]:
        """The same of D_v, with an accumulator each."""
        return self._pieces(self.spec.d_v, self.block_dv)

    @property
    def column_unit(self) -> int:
        """What pieces round a head size up to, of elements of two bytes."""
        return int(self.config.get("column_unit", 32))

    def _pieces(self, head_dim: int, block: int) -> list[tuple[int, int]]:
        """Widths are powers of two, as few as there are bits in the head size, rounded up to the unit; a single one is the whole tile."""
        unit = self.column_unit * 2 // self.size
        reach = -(-head_dim // unit) * unit
        found: list[tuple[int, int]] = []
        for width in (256, 128, 64, 32, 16):
            if width >= unit and reach < block and reach // width % 2:
                found.append((sum(width for _, width in found), width))
        return found if len(found) > 1 else [(0, block)]

    @property
    def chunked(self) -> bool:
        """Whether tiles lie in shared memory as chunks of columns, as many as the head size has, in place of a power of two of columns."""
        return False

    @property
    def chunk(self) -> int:
        """Columns of a chunk of shared memory."""
        return CHUNK_BYTES // self.size

    def in_chunks(self, head_dim: int) -> int:
        """A head size rounded up to whole chunks."""
        return -(-head_dim // self.chunk) * self.chunk

    @property
    def stored_d(self) -> int:
        """Columns of a tile of q and k in shared memory."""
        return self.in_chunks(self.spec.d) if self.chunked else self.block_d

    @property
    def stored_dv(self) -> int:
        """The same of v, of the output and of its gradient."""
        return self.in_chunks(self.spec.d_v) if self.chunked else self.block_dv

    @property
    def unit_fits(self) -> bool:
        """Whether the unit is the usual one, or leaves products other columns than that."""
        usual = replace(self, config=self.config.replace(column_unit=32))
        return self.column_unit == 32 or (self.size == 2 and (self.pieces, self.v_pieces) != (usual.pieces, usual.v_pieces))

    @property
    def score_params(self) -> list[str]:
        """The numbers that a soft cap and dropout take."""
        return ["inner_scale"] * self.spec.softcap + ["seed", "offset", "threshold", "keep_scale"] * self.spec.dropout


def packed_heads(config: Config) -> int:
    """Of how many heads that share keys a tile of the forward holds queries."""
    return int(config.get("packed_heads", 1))


def packed_problem(config: Config, problem: Problem) -> Problem:
    """A problem whose heads are as many as sets of heads that the forward's tiles hold together; its queries are still each head's."""
    packed = packed_heads(config)
    return problem if packed == 1 else replace(problem, heads=problem.kv_heads * math.ceil(problem.gqa_ratio / packed))


def tile_queries(config: Config) -> int:
    """How many queries of each head a tile of the forward has."""
    return config.number("BLOCK_M") // packed_heads(config)


def tiles_of(config: Config, problem: Problem) -> int:
    """Tiles of queries of a whole forward."""
    return problem.batch * packed_problem(config, problem).heads * math.ceil(problem.n_q / tile_queries(config))


class HopperLayout(HopperTiles):
    """How a program of `flash_fwd_hopper` is divided among warpgroups, and where its tiles live."""

    __slots__ = ()

    @property
    def fp8(self) -> bool:
        """Whether q, k and v are e4m3: products take the keys innermost, and have accumulators of their own."""
        return self.size == 1

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, of ROWS rows each."""
        return self.config.number("BLOCK_M") // ROWS

    @property
    def packed(self) -> int:
        """Of how many heads that share keys a tile holds queries."""
        return packed_heads(self.config)

    @property
    def packs(self) -> bool:
        """Whether a tile holds queries of several heads."""
        return self.packed > 1

    @property
    def tile_queries(self) -> int:
        """Queries of each head in a tile."""
        return tile_queries(self.config)

    @property
    def overlap(self) -> int:
        """Products under way beside a softmax: none, the values before it, also the scores after it."""
        return self.config.number("intra_wg_overlap")

    @property
    def persistent(self) -> bool:
        """Whether a program works through many tiles."""
        return self.config["tiles"] != "one"

    @property
    def chained(self) -> bool:
        """Whether the last values of a tile go beside the first scores of the next."""
        return self.config["tiles"] == "chained"

    @property
    def drawn(self) -> bool:
        """Whether a program draws its next tile when it is done with the last: tiles of a band are not equally long."""
        return self.config["order"] == "drawn"

    @property
    def own_blocks(self) -> bool:
        """Whether a warpgroup looks at the blocks that its own rows see alone; chained tiles would have to wait for values too early."""
        return self.spec.banded and not self.chained and self.consumers > 1

    @property
    def settles(self) -> bool:
        """Whether row maxima settle on those of a tile's first blocks, and are raised where a block outgrows them."""
        return settles(self.config)

    @property
    def lazy_rescale(self) -> bool:
        """Whether blocks that look for new maxima rescale what came before only where one grew far."""
        return rescales_grown(self.config)

    @property
    def asks_first(self) -> bool:
        """Whether such blocks ask first whether a score outweighs all before it, and only then look for maxima."""
        return asks_first(self.config)

    @property
    def parted(self) -> bool:
        """Whether the blocks of which every row has seen a key have a loop of their own, after those of a tile's edge: where maxima settle,
        and where what is asked of unseen rows and what hides keys would cost most."""
        edge = self.spec.mask == "none" and (self.spec.banded or self.overlap == 0)
        return self.settles or (self.asks_first and edge)

    @property
    def own_out(self) -> bool:
        """Whether the output has memory of its own, so that a program's next queries needn't wait for it."""
        return self.persistent or self.stored_d != self.stored_dv or self.fp8

    @property
    def out_halves(self) -> int:
        """In how many goes the output leaves: beside tiles that fill the memory it has but half a tile."""
        return 2 if self.config["tiles"] == "loop" and self.block_dv > 64 else 1

    @property
    def chunked(self) -> bool:
        """Whether the config says so."""
        return self.config.get("smem_columns", "padded") == "chunks"

    @property
    def out_columns(self) -> int:
        """Columns of the memory from which the output leaves: the queries', or its own, of which the first half of two is a padded one."""
        if not self.own_out:
            return self.stored_d
        return self.stored_dv if self.out_halves == 1 else self.block_dv // 2

    @property
    def product_depth(self) -> int:
        """Columns that a matrix instruction multiplies."""
        return 32 // self.size

    @property
    def v_pieces(self) -> list[tuple[int, int]]:
        """The parts of D_v where the config says so, the first of which is half of a padded tile, or all of a tile."""
        in_pieces = self.config.get("v_columns", "padded") == "pieces" and not self.fp8
        return self._pieces(self.spec.d_v, self.block_dv) if in_pieces else [(0, self.block_dv)]

    @property
    def v_columns(self) -> int:
        """Columns of the output that products compute and accumulators hold."""
        return sum(width for _, width in self.v_pieces)

    @property
    def sizes(self) -> list[str]:
        """The kernel's parameters that are sizes, which travel through it as `Sizes`."""
        s = self.spec
        found = ["n_q", "n_kv", "batches", "heads", "kv_group", "m_tiles"] + ["kv_heads", "group"] * self.packs
        return found + s.band_sizes + ["mask_per_batch", "mask_per_head"] * (s.mask != "none")

    @property
    def divisors(self) -> list[str]:
        """What work indices are divided by: a section of heads, its batches or heads, and the heads of a last section that isn't whole."""
        return ["section", "inner"] + ["last"] * (self.config.number("section") > 1)

    @property
    def params(self) -> list[str]:
        """The kernel's parameters that are numbers for the scores, and where the packed mask is."""
        s = self.spec
        return ["scale"] + ["bias_scale"] * (s.mask == "bias" or s.alibi) + self.score_params + ["mask_bits_ptr"] * (s.mask == "bool")

    @property
    def per_head(self) -> list[str]:
        """Parameters of which each head has its own, in memory; they come with two strides."""
        return self.spec.per_head

    @property
    def head_params(self) -> list[str]:
        """What becomes of them: numbers that the tiles of a head work with beside `params`."""
        return ["slope"] * self.spec.alibi + ["out_scale"] * self.fp8 + ["sink"] * self.spec.sinks

    @property
    def softmax_state(self) -> list[str]:
        """What a warpgroup carries from block to block beside the output's accumulator.

        A block whose products are under way leaves its scores or probs, and e4m3's what the older sums are rescaled by when they meet.
        """
        under_way = ["scores"] * (self.overlap == 2) + ["p_tile"] * (self.overlap > 0) + ["rescale"] * (self.overlap == 1 and self.fp8)
        return [*under_way, "row_max", "row_sum"]

    @property
    def consumer_registers(self) -> int | None:
        """What a consumer thread may hold; None where the register file doesn't hold so many warpgroups."""
        return CONSUMER_REGISTERS.get((self.consumers, self.config.number("ctas_per_sm")))

    @property
    def producer_registers(self) -> int:
        """What a thread of the copying warp keeps."""
        return 32 if self.consumers == 3 else 24

    @property
    def entry_registers(self) -> int:
        """What a thread has before the producer gives its own up: a share of 65536 for the warpgroups of each program on the SM."""
        return 65536 // (128 * (self.consumers + 1) * self.config.number("ctas_per_sm")) // 8 * 8

    @property
    def live_registers(self) -> int:
        """Accumulators and probs that a consumer thread holds at once (scores and output fp32, probs as wide as the inputs)."""
        scores, out = self.config.number("BLOCK_N") // 2, self.v_columns // 2
        probs, product = scores * self.size // 4, out if self.fp8 else 0
        loaded = {"none": 0, "bool": 4, "bias": 24}[self.spec.mask]
        if self.overlap == 0:
            return max(scores + loaded, probs + product) + out
        return scores * self.overlap + probs + product + out + loaded

    @property
    def shared_bytes(self) -> int:
        """Queries, stages of keys and values, the output and the bias's tiles, with a KiB for barriers."""
        block_m, block_n = self.config.number("BLOCK_M"), self.config.number("BLOCK_N")
        q = self.size * block_m * self.stored_d * (2 if self.chained else 1)
        kv = self.size * self.config.number("num_stages") * block_n * (self.stored_d + self.stored_dv)
        out = 2 * block_m * self.out_columns if self.own_out else 0
        bias = 4 * block_m * block_n if self.spec.mask == "bias" else 0
        return q + kv + out + bias + 1024
