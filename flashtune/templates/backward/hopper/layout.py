"""Layout facts derived from a spec and a config of Hopper's backward families, for templates, constraints and the cost model."""

from functools import lru_cache

from flashtune.core.gpu.target import Target
from flashtune.core.problems.band import UNBOUNDED
from flashtune.core.problems.config import Config, KernelSpec, Value
from flashtune.core.problems.problem import Problem, padded
from flashtune.templates.family import Axis
from flashtune.templates.hopper.layout import ROWS, HopperTiles


def refusal(name: str, widest: int, spec: KernelSpec, target: Target) -> str | None:
    """The reason why a family, whose tiles take head sizes up to `widest`, can't serve `spec` on `target`, or None."""
    if not target.is_hopper:
        return f"{name} needs compute capability 9.0, which {target.name} is not"
    if spec.packed and (spec.mask != "none" or spec.dslopes):
        return f"{name} takes no mask and no gradient of slopes beside packed sequences"
    if spec.dtype not in ("fp16", "bf16"):
        return f"{name} takes fp16 and bf16, not {spec.dtype}"
    if spec.d % 8 or spec.d_v % 8:
        return f"{name} needs head sizes that are multiples of 8 (TMA), not {spec.d} and {spec.d_v}"
    largest = max(spec.d, spec.d_v)
    if largest > widest or (largest > 128 and padded(spec.d_v) > padded(spec.d)):
        return f"{name} has tiles for head sizes up to {widest}, those of v above 128 no larger, not {spec.d} and {spec.d_v}"
    return None


DIVIDED_QUERIES = Axis(
    name="divided_queries",
    values=(False, True),
    why="whether programs share the queries of a tile of keys (split-Q) where tiles are few: a full GPU against partial sums",
)
"""The axis of split-Q in both families, set by `divided` and never searched."""

WORTH_DIVIDING = 0.85
"""Greatest share of a kernel's time that split-Q may leave: the estimate is rough, and another kernel must be compiled."""


def query_divisions(
    m_tiles: int, group: int, tiles: int, left: int, right: int, block_m: int, block_n: int, sms: int, worth: float = 1.0
) -> int:
    """The number of split-Q programs for each tile of keys that minimises the busiest multiprocessor's work, or 1 where that exceeds
    `worth` of the work without. A side of the window without a bound is -1."""
    seen = m_tiles if min(left, right) < 0 else min(m_tiles, (left + right + block_n) // block_m + 1)
    triangle = (left < 0) != (right < 0)

    def busiest(divisions: int) -> float:
        # In blocks of queries: a program's overhead is four, its partial dK and dV cost five (fitted, divided_queries.py).
        longest, programs = group * seen / divisions + 4, tiles * divisions
        adding = 5 * programs / sms if divisions > 1 else 0
        if not triangle:
            return adding + -(-programs // sms) * longest
        # The longest tiles go first, and the mean has half as many blocks.
        return adding + max(longest, programs * (longest / 2 + 2) / sms)

    if tiles >= 2 * sms:
        return 1
    best = min(range(1, min(group * seen, 16) + 1), key=busiest)
    return best if busiest(best) <= worth * busiest(1) else 1


def divided(config: Config, problem: Problem, target: Target, **where_divided: Value) -> Config:
    """The config with split-Q where that leaves the busiest multiprocessor much less work, and then with `where_divided`."""
    # Programs of packed sequences don't know how many tiles a sequence has.
    divides = (
        not problem.features.packed
        and _divisions(config.number("BLOCK_M"), config.number("BLOCK_N"), problem, target.sms, WORTH_DIVIDING) > 1
    )
    if bool(config.get("divided_queries", False)) == divides:
        return config
    return config.replace(divided_queries=divides, **(where_divided if divides else {}))


def divisions_of(config: Config, problem: Problem, target: Target) -> int:
    """The number of split-Q programs for each tile of a launch, as the host computes it."""
    divided = config.get("divided_queries", False)
    return _divisions(config.number("BLOCK_M"), config.number("BLOCK_N"), problem, target.sms, 1.0) if divided else 1


@lru_cache(maxsize=4096)
def _divisions(block_m: int, block_n: int, problem: Problem, sms: int, worth: float) -> int:
    m_tiles, tiles = -(-problem.n_q // block_m), -(-problem.n_kv // block_n) * problem.batch * problem.kv_heads
    left, right = (UNBOUNDED if side is None else side for side in (problem.band.left, problem.band.right))
    return query_divisions(m_tiles, problem.gqa_ratio, tiles, left, right, block_m, block_n, sms, worth)


class HopperBackward(HopperTiles):
    """Base of both families' layouts: tiles and parameters of their kernels."""

    __slots__ = ()

    @property
    def block_d(self) -> int:
        """Columns of a tile of q and k: no fewer than of v, whose sums are divided first, and no fewer than a swizzle."""
        return max(padded(self.spec.d), self.block_dv)

    @property
    def block_dv(self) -> int:
        """Columns of a tile of v and dO."""
        return max(padded(self.spec.d_v), 64)

    @property
    def columns_d(self) -> int:
        """Columns of q and k that products work through."""
        return sum(width for _, width in self.pieces)

    @property
    def columns_dv(self) -> int:
        """Columns of v and dO that products work through."""
        return sum(width for _, width in self.v_pieces)

    @property
    def sizes(self) -> list[str]:
        """The kernel's size parameters, which it passes on as `Sizes`."""
        s = self.spec
        found = ["n_q", "n_kv", "kv_heads", "group", "m_tiles", "n_tiles"] + ["tiles"] * self.persistent + ["divisions"] * self.divides
        found += [f"bias_by_{part}" for part in ("batch", "head", "row", "column")] * (s.mask == "bias")
        return found + ["sequences", "some_used"] * s.packed + s.band_sizes

    @property
    def sequence(self) -> list[str]:
        """Fields of a tile about its packed sequence: `first_block` counts blocks of queries before it, and of its `k_rows` keys `n_kv` are
        used."""
        return ["q_start", "n_q", "k_start", "k_rows", "n_kv", "first_block"]

    @property
    def params(self) -> list[str]:
        """The kernel's parameters for scores and gradients, with pointers to tensors per head."""
        s = self.spec
        found = ["scale", "score_scale", *self.score_params] + ["slopes_ptr", "slopes_by_batch", "slopes_by_head"] * s.alibi
        if s.mask == "bool":
            found += ["mask_bits_ptr", "mask_by_batch", "mask_by_head"]
        found += [f"bias_{part}" for part in ("ptr", "stride_b", "stride_h", "stride_m", "stride_n")] * self.bias_by_pointer
        return found + [f"dq_{part}" for part in ("ptr", "step_b", "step_h", "step_m")] * self.owns + self.mod_params

    @property
    def persistent(self) -> bool:
        """True if a program takes several tiles of keys, and prefetches the next one's keys and values."""
        return bool(self.config.get("persistent", False))

    @property
    def dynamic(self) -> bool:
        """True under dynamic scheduling of tiles."""
        return self.config.get("persistent", False) == "dynamic"

    @property
    def owns(self) -> bool:
        """True for exclusive dQ: a program with all keys of a head needs no sums in memory."""
        return self.config.get("dq_sums", "") == "own"

    @property
    def divides(self) -> bool:
        """True for split-Q: several programs share the queries of a tile of keys, and their partial dK and dV are added up."""
        return bool(self.config.get("divided_queries", False))

    @property
    def divided_columns(self) -> dict[str, int]:
        """Columns of a split-Q program's partial dK and dV."""
        return {"dk": self.columns_d, "dv": self.columns_dv}

    @property
    def bias_by_pointer(self) -> bool:
        """True if a kernel reads a bias by pointer, not as tiles in shared memory."""
        return False

    @property
    def unspecialized(self) -> list[str]:
        """Integers of `params`, for whose values Triton mustn't specialise the code."""
        found = [name for name in self.params if "_by_" in name or "_stride_" in name or name in ("seed", "offset", "threshold")]
        return found + [name for name in self.lists + self.mod_params if not name.endswith("_ptr")]

    @property
    def head_params(self) -> list[str]:
        """Values per head that its blocks use beside `params`."""
        s = self.spec
        found = ["index"] * s.dropout + ["slope"] * s.alibi + ["batch", "head"] * bool(s.mods)
        return found + ["matrix"] * (s.mask == "bool") + ["bias_ptr"] * self.bias_by_pointer

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread: the register file less the producer's share."""
        return 240


class BackwardLayout(HopperBackward):
    """Layout of a program of `flash_bwd_hopper`: its warpgroups, tiles and memory."""

    __slots__ = ()

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, of ROWS keys each."""
        return self.config.number("BLOCK_N") // ROWS

    @property
    def part_d(self) -> int:
        """Columns of a warpgroup's part of a tile of dQ, whose 64 rows matrix instructions don't divide."""
        return self.block_d // self.consumers

    @property
    def last_part_d(self) -> int:
        """Columns of the last warpgroup's part, which may leave out padding."""
        return padded(self.columns_d - self.part_d * (self.consumers - 1))

    @property
    def summed_d(self) -> int:
        """Columns of dQ's sums in memory, those of all parts side by side."""
        return self.part_d * (self.consumers - 1) + self.last_part_d

    @property
    def v_products(self) -> int:
        """The number of products of the gradients of probabilities."""
        return 2 if len(self.v_pieces) == 1 and 0 < self.v_held < self.block_dv else len(self.v_pieces)

    @property
    def exp_poly(self) -> bool:
        """True if a polynomial computes a quarter of the exponentials."""
        return bool(self.config.get("exp_poly", False))

    @property
    def wait_early(self) -> bool:
        """True if the wait for a block precedes the addition of the previous block's dQ."""
        return bool(self.config.get("wait_early", False))

    @property
    def k_held(self) -> int:
        """Columns of its keys that a warpgroup keeps in registers for scores."""
        return min(64, self.pieces[0][1]) if self.config.get("held", "none") in ("k", "both") else 0

    @property
    def v_held(self) -> int:
        """Columns of its values that a warpgroup keeps in registers for gradients of probabilities."""
        return min(64, self.v_pieces[0][1]) if self.config.get("held", "none") in ("v", "both") else 0

    @property
    def held_tiles(self) -> list[str]:
        """Names of the tiles kept in registers."""
        return ["k_held"] * (self.k_held > 0) + ["v_held"] * (self.v_held > 0)

    @property
    def live_registers(self) -> int:
        """Registers of a consumer thread's accumulators and operands: both scores, one as an operand, dK, dV, tiles kept in registers."""
        m, narrow = self.config.number("BLOCK_M"), len(self.pieces) > 1 and len(self.v_pieces) > 1
        # Beside a whole sum a split accumulator saves no registers.
        sums = self.columns_d + self.columns_dv if narrow else self.block_d + self.block_dv
        return m + m // 4 + sums // 2 + (self.k_held + self.v_held) // 4

    @property
    def shared_bytes(self) -> int:
        """Keys, values (persistent: twice), stages of queries, dO, numbers and a bias, dS twice, random words, barriers."""
        size, block_m, block_n = self.size, self.config.number("BLOCK_M"), self.config.number("BLOCK_N")
        row = size * (self.block_d + self.block_dv)
        stages = self.config.number("num_stages") * block_m * (row + 8)
        keys = block_n * row * (2 if self.persistent else 1)
        bias = self.config.number("num_stages") * 2 * block_m * block_n if self.spec.mask == "bias" else 0
        words = 64 * block_m * self.consumers if self.spec.dropout else 0
        return keys + stages + 2 * size * block_n * block_m + bias + words + 1024


class SplitLayout(HopperBackward):
    """Layout of the two kernels of `flash_bwd_hopper_split`: that of dK and dV, then that of dQ."""

    __slots__ = ()

    @property
    def bias_by_pointer(self) -> bool:
        """True with a bias: the kernel of dQ has no shared memory for its tiles at head size 256."""
        return self.spec.mask == "bias"

    @property
    def section(self) -> int:
        """Heads that run side by side: a triangle's balance against what stays in L2."""
        return 4 if self.spec.causal else 2

    def unit(self, head_dim: int) -> int:
        """MMA N granularity of a head size: 16 columns were measured for the other family alone."""
        return 32

    @property
    def wide(self) -> bool:
        """True if one warpgroup has dV of 64 keys and the other dK, since one's registers don't fit both."""
        return self.block_d + self.block_dv > 256

    @property
    def chunked(self) -> bool:
        """True where swizzle-width tiles leave out padding: at head sizes from 129 to 192."""
        return self.wide and (self.in_chunks(self.spec.d) < self.block_d or self.in_chunks(self.spec.d_v) < self.block_dv)

    @property
    def key_tiles(self) -> int:
        """Tiles of ROWS keys of a program."""
        return self.config.number("BLOCK_N") // ROWS

    @property
    def row_tiles(self) -> int:
        """Warpgroups of a program of dQ, of 64 queries each."""
        return self.config.number("DQ_BLOCK_M") // ROWS

    @property
    def query_consumer_registers(self) -> int:
        """Registers of a thread of these warpgroups."""
        return {2: 240, 3: 160}[self.row_tiles]

    @property
    def v_stages(self) -> int:
        """Blocks of values in flight: one fewer than of keys, which are read until the end of a block."""
        return max(1, self.config.number("DQ_num_stages") - 1)

    @property
    def k_held(self) -> int:
        """Columns of keys that their warpgroup keeps in registers; at head size 128 only values fit beside both sums."""
        return min(self.config.number("held_columns"), self.pieces[0][1]) if self.wide or self.block_d <= 64 else 0

    @property
    def v_held(self) -> int:
        """Columns of values that their warpgroup keeps in registers."""
        return min(self.config.number("held_columns"), self.v_pieces[0][1])

    @property
    def halved(self) -> bool:
        """True if the columns kept in registers are none, half or all of a tile, or none or all of a split accumulator's first part."""

        def holds(held: int, pieces: list[tuple[int, int]]) -> bool:
            width = pieces[0][1]
            return held in ((0, width) if len(pieces) > 1 else (0, width // 2, width))

        return holds(self.k_held, self.pieces) and holds(self.v_held, self.v_pieces)

    @property
    def key_registers(self) -> int:
        """Registers of accumulators and operands in a thread of the kernel of dK and dV."""
        m = self.config.number("BLOCK_M")
        if self.wide:
            # Scores or their gradients, once more as an operand, and one sum.
            return m // 2 + m // 4 + max(self.columns_d, self.columns_dv) // 2 + self.k_held // 4
        return m + m // 4 + (self.columns_d + self.columns_dv) // 2 + (self.k_held + self.v_held) // 4

    @property
    def query_registers(self) -> int:
        """Registers of accumulators and operands in a thread of the kernel of dQ: both scores, one as an operand, and dQ."""
        n = self.config.number("DQ_BLOCK_N")
        return n + n // 4 + self.columns_d // 2

    @property
    def key_shared_bytes(self) -> int:
        """Keys, values, stages of queries, dO, their numbers, a bias and probabilities that cross, random words, a KiB for barriers."""
        size, block_m, block_n = self.size, self.config.number("BLOCK_M"), self.config.number("BLOCK_N")
        row = size * (self.stored_d + self.stored_dv)
        crossing = size * block_n if self.wide else 0
        bias = 2 * block_n if self.spec.mask == "bias" else 0
        words = 64 * block_m * (1 if self.wide else self.key_tiles) if self.spec.dropout else 0
        return block_n * row + self.config.number("num_stages") * block_m * (row + 8 + crossing + bias) + words + 1024

    @property
    def query_shared_bytes(self) -> int:
        """Queries and dO, stages of keys and of values, and a KiB for barriers."""
        size, block_m, block_n = self.size, self.config.number("DQ_BLOCK_M"), self.config.number("DQ_BLOCK_N")
        stages = self.config.number("DQ_num_stages") * self.stored_d + self.v_stages * self.stored_dv
        return size * (block_m * (self.stored_d + self.stored_dv) + block_n * stages) + 1024
