"""What follows from a spec and a config of the backward families for Hopper, stated once for templates, constraints and the cost model."""

from functools import lru_cache

from flashtune.core.band import UNBOUNDED
from flashtune.core.config import Config, KernelSpec, Value
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.family import Axis, padded
from flashtune.templates.hopper.layout import ROWS, HopperTiles


def refusal(name: str, widest: int, spec: KernelSpec, target: Target) -> str | None:
    """Why the family of this name, whose tiles take head sizes up to `widest`, can't serve `spec` on `target`, or None."""
    if spec.direction != "bwd":
        return f"{name} computes the backward pass, not {spec.direction!r}"
    if not target.is_hopper:
        return f"{name} needs compute capability 9.0, which {target.name} is not"
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
    why="whether programs share the queries of a tile of keys where tiles are few: all at work against sums that are added up",
    absent=False,
)
"""An axis of both families. `divided` sets it: no search asks for it."""

WORTH_DIVIDING = 0.85
"""The share of its time that dividing may leave a kernel at most: what is counted is rough, and another kernel must be compiled."""


def query_divisions(
    m_tiles: int, group: int, tiles: int, left: int, right: int, block_m: int, block_n: int, sms: int, worth: float = 1.0
) -> int:
    """Among how many programs the queries of each of so many tiles of keys are divided: as leaves the busiest multiprocessor the
    least, or 1 where that is more than `worth` of what it has undivided. A side of the window without a bound is -1."""
    seen = m_tiles if min(left, right) < 0 else min(m_tiles, (left + right + block_n) // block_m + 1)
    triangle = (left < 0) != (right < 0)

    def busiest(divisions: int) -> float:
        # In blocks of queries: a program takes four beside its own, and its part of dK and dV five (fitted, divided_queries.py).
        longest, programs = group * seen / divisions + 4, tiles * divisions
        adding = 5 * programs / sms if divisions > 1 else 0
        if not triangle:
            return adding + -(-programs // sms) * longest
        # The longest go first, and the mean has half as many.
        return adding + max(longest, programs * (longest / 2 + 2) / sms)

    if tiles >= 2 * sms:
        return 1
    best = min(range(1, min(group * seen, 16) + 1), key=busiest)
    return best if busiest(best) <= worth * busiest(1) else 1


def divided(config: Config, problem: Problem, target: Target, **where_divided: Value) -> Config:
    """With queries divided among programs where that leaves the busiest multiprocessor much less to do, and then with `where_divided`."""
    divides = _divisions(config.number("BLOCK_M"), config.number("BLOCK_N"), problem, target.sms, WORTH_DIVIDING) > 1
    if bool(config.get("divided_queries", False)) == divides:
        return config
    return config.replace(divided_queries=divides, **(where_divided if divides else {}))


def divisions_of(config: Config, problem: Problem, target: Target) -> int:
    """How many programs share a tile's queries in a launch, as the host will find."""
    divided = config.get("divided_queries", False)
    return _divisions(config.number("BLOCK_M"), config.number("BLOCK_N"), problem, target.sms, 1.0) if divided else 1


@lru_cache(maxsize=4096)
def _divisions(block_m: int, block_n: int, problem: Problem, sms: int, worth: float) -> int:
    m_tiles, tiles = -(-problem.n_q // block_m), -(-problem.n_kv // block_n) * problem.batch * problem.kv_heads
    left, right = (UNBOUNDED if side is None else side for side in (problem.band.left, problem.band.right))
    return query_divisions(m_tiles, problem.gqa_ratio, tiles, left, right, block_m, block_n, sms, worth)


class HopperBackward(HopperTiles):
    """What both families have in common: what their kernels take."""

    __slots__ = ()

    @property
    def block_d(self) -> int:
        """Columns of a tile of q and k: no fewer than of v, whose sums are the first to be divided, and no fewer than a swizzle has."""
        return max(padded(self.spec.d), self.block_dv)

    @property
    def block_dv(self) -> int:
        """The same of v and dO."""
        return max(padded(self.spec.d_v), 64)

    @property
    def columns_d(self) -> int:
        """Columns of q and k that products work through."""
        return sum(width for _, width in self.pieces)

    @property
    def columns_dv(self) -> int:
        """The same of v and dO."""
        return sum(width for _, width in self.v_pieces)

    @property
    def sizes(self) -> list[str]:
        """The kernel's parameters that are sizes, which travel through it as `Sizes`."""
        s = self.spec
        found = ["n_q", "n_kv", "kv_heads", "group", "m_tiles", "n_tiles"] + ["tiles"] * self.persistent + ["divisions"] * self.divides
        found += [f"bias_by_{part}" for part in ("batch", "head", "row", "column")] * (s.mask == "bias")
        return found + s.band_sizes

    @property
    def params(self) -> list[str]:
        """The kernel's parameters that are numbers for scores and gradients, and what each head has of its own in memory."""
        s = self.spec
        found = ["scale", "score_scale", *self.score_params] + ["slopes_ptr", "slopes_by_batch", "slopes_by_head"] * s.alibi
        if s.mask == "bool":
            found += ["mask_bits_ptr", "mask_by_batch", "mask_by_head"]
        found += [f"bias_{part}" for part in ("ptr", "stride_b", "stride_h", "stride_m", "stride_n")] * self.bias_by_pointer
        return found + [f"dq_{part}" for part in ("ptr", "step_b", "step_h", "step_m")] * (self.finishes or self.owns)

    @property
    def persistent(self) -> bool:
        """Whether a program takes one tile of keys after another, and copies the next one's keys and values ahead."""
        return bool(self.config.get("persistent", False))

    @property
    def drawn(self) -> bool:
        """Whether it draws them."""
        return self.config.get("persistent", False) in ("drawn", "taken")

    @property
    def finishes(self) -> bool:
        """Whether it finishes dQ of heads that are done."""
        return self.config.get("persistent", False) == "drawn"

    @property
    def owns(self) -> bool:
        """Whether sums of dQ are a program's own, or none are needed, where it has all keys of a head."""
        return self.config.get("dq_sums", "") == "own"

    @property
    def by_heads(self) -> bool:
        """Whether a program takes all tiles of a key head, one after another."""
        return self.owns and self.config.get("persistent", False) is True

    @property
    def divides(self) -> bool:
        """Whether several programs share the queries of a tile of keys, and dK and dV are added up from what each of them found."""
        return bool(self.config.get("divided_queries", False))

    @property
    def divided_columns(self) -> dict[str, int]:
        """Columns of what such a program leaves in memory of dK and dV."""
        return {"dk": self.columns_d, "dv": self.columns_dv}

    @property
    def bias_by_pointer(self) -> bool:
        """Whether a kernel reads a bias from where it is, not as tiles in shared memory."""
        return False

    @property
    def unspecialized(self) -> list[str]:
        """Those of `params` that are integers, of which each value would be compiled for."""
        return [name for name in self.params if "_by_" in name or "_stride_" in name or name in ("seed", "offset", "threshold")]

    @property
    def head_params(self) -> list[str]:
        """What the blocks of a head work with beside `params`, of which each head has its own."""
        s = self.spec
        found = ["index"] * s.dropout + ["slope"] * s.alibi
        return found + ["matrix"] * (s.mask == "bool") + ["bias_ptr"] * self.bias_by_pointer

    @property
    def consumer_registers(self) -> int:
        """What a thread of a warpgroup that computes may hold: the register file less the share of the copying warps."""
        return 240


class BackwardLayout(HopperBackward):
    """How a program of `flash_bwd_hopper` is divided among warpgroups, and where its tiles live."""

    __slots__ = ()

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, of ROWS keys each."""
        return self.config.number("BLOCK_N") // ROWS

    @property
    def by_columns(self) -> bool:
        """Whether warpgroups share a tile of dQ by columns: 64 rows can't be divided, matrix instructions have as many."""
        return self.config.number("BLOCK_M") < ROWS * self.consumers

    @property
    def part_m(self) -> int:
        """Rows of a warpgroup's part of a tile of dQ."""
        return self.config.number("BLOCK_M") // (1 if self.by_columns else self.consumers)

    @property
    def part_d(self) -> int:
        """Columns of a warpgroup's part of a tile of dQ."""
        return self.block_d // (self.consumers if self.by_columns else 1)

    @property
    def last_part_d(self) -> int:
        """The same of the last warpgroup's, which needn't have the columns that only fill a tile up to a power of two."""
        narrow = self.by_columns and not self.by_tma
        return padded(self.columns_d - self.part_d * (self.consumers - 1)) if narrow else self.part_d

    @property
    def summed_d(self) -> int:
        """Columns of dQ's sums in memory: what all parts have, beside each other."""
        return self.part_d * (self.consumers - 1) + self.last_part_d if self.by_columns else self.part_d

    @property
    def v_products(self) -> int:
        """In how many products the gradients of probabilities are made."""
        return 2 if len(self.v_pieces) == 1 and 0 < self.v_held < self.block_dv else len(self.v_pieces)

    @property
    def by_tma(self) -> bool:
        """Whether the copy engine adds parts of dQ to the sums, from memory of their own."""
        return self.config["dq_sums"] == "tma"

    @property
    def exp_early(self) -> bool:
        """Whether all exponentials of a block end before dP is waited for."""
        return bool(self.config.get("exp_early", False))

    @property
    def exp_poly(self) -> bool:
        """Whether a quarter of exponentials is made by a polynomial."""
        return bool(self.config.get("exp_poly", False))

    @property
    def wait_early(self) -> bool:
        """Whether a block is waited for before dQ of the block before is added up."""
        return bool(self.config.get("wait_early", False))

    @property
    def k_held(self) -> int:
        """The columns of its keys that a warpgroup has in registers, too, from which scores take them."""
        return min(64, self.pieces[0][1]) if self.config.get("held", "none") in ("k", "both") else 0

    @property
    def v_held(self) -> int:
        """The same of values, for the gradients of probabilities."""
        return min(64, self.v_pieces[0][1]) if self.config.get("held", "none") in ("v", "both") else 0

    @property
    def held_tiles(self) -> list[str]:
        """The names of what is held."""
        return ["k_held"] * (self.k_held > 0) + ["v_held"] * (self.v_held > 0)

    @property
    def live_registers(self) -> int:
        """Accumulators and operands that a consumer thread holds at once: both scores, one as an operand, dK and dV, what is held."""
        m, narrow = self.config.number("BLOCK_M"), len(self.pieces) > 1 and len(self.v_pieces) > 1
        # Beside a whole one a sum in pieces spares the compiler nothing.
        sums = self.columns_d + self.columns_dv if narrow else self.block_d + self.block_dv
        return m + m // 4 + sums // 2 + (self.k_held + self.v_held) // 4

    @property
    def shared_bytes(self) -> int:
        """Keys, values (persistent: twice), stages of queries, dO, numbers and a bias, dS twice, parts of dQ, random words, barriers."""
        size, block_m, block_n = self.size, self.config.number("BLOCK_M"), self.config.number("BLOCK_N")
        row = size * (self.block_d + self.block_dv)
        stages = self.config.number("num_stages") * block_m * (row + 8)
        parts = 4 * self.consumers * self.part_m * self.part_d if self.by_tma else 0
        keys = block_n * row * (2 if self.persistent else 1)
        bias = self.config.number("num_stages") * 2 * block_m * block_n if self.spec.mask == "bias" else 0
        words = 64 * block_m * self.consumers if self.spec.dropout else 0
        return keys + stages + 2 * size * block_n * block_m + parts + bias + words + 1024


class SplitLayout(HopperBackward):
    """The same of the two kernels of `flash_bwd_hopper_split`: that of dK and dV, then that of dQ."""

    __slots__ = ()

    @property
    def bias_by_pointer(self) -> bool:
        """That of dQ does, which has no room left for tiles of a bias at head size 256."""
        return self.spec.mask == "bias"

    @property
    def wide(self) -> bool:
        """Whether one warpgroup has dV of 64 keys and the other dK: both, as wide as tiles are, don't fit one's registers."""
        return self.block_d + self.block_dv > 256

    @property
    def chunked(self) -> bool:
        """Where that leaves out a chunk: at head sizes from 129 to 192."""
        return self.wide and (self.in_chunks(self.spec.d) < self.block_d or self.in_chunks(self.spec.d_v) < self.block_dv)

    @property
    def key_tiles(self) -> int:
        """Tiles of ROWS keys that a program holds."""
        return self.config.number("BLOCK_N") // ROWS

    @property
    def row_tiles(self) -> int:
        """Warpgroups of a program of dQ, of 64 queries each."""
        return self.config.number("DQ_BLOCK_M") // ROWS

    @property
    def query_consumer_registers(self) -> int:
        """What a thread of one of these warpgroups may hold."""
        return {2: 240, 3: 160}[self.row_tiles]

    @property
    def v_stages(self) -> int:
        """Blocks of values in flight: one fewer than of keys, which are read until the end of a block."""
        return max(1, self.config.number("DQ_num_stages") - 1)

    @property
    def k_held(self) -> int:
        """Columns of keys that their warpgroup has in registers; at head size 128 only those of values fit beside both sums."""
        return min(self.config.number("held_columns"), self.pieces[0][1]) if self.wide or self.block_d <= 64 else 0

    @property
    def v_held(self) -> int:
        """The same of values."""
        return min(self.config.number("held_columns"), self.v_pieces[0][1])

    @property
    def q_held(self) -> int:
        """The same of queries in the kernel of dQ."""
        return min(self.config.number("DQ_held_columns"), self.pieces[0][1])

    @property
    def dout_held(self) -> int:
        """The same of dO."""
        return min(self.config.number("DQ_held_columns"), self.v_pieces[0][1])

    @property
    def halved(self) -> bool:
        """Whether what is held is none, half or all of a tile, or none or all of the first of its pieces."""

        def holds(held: int, pieces: list[tuple[int, int]]) -> bool:
            width = pieces[0][1]
            return held in ((0, width) if len(pieces) > 1 else (0, width // 2, width))

        of_d, of_dv = (self.k_held, self.q_held), (self.v_held, self.dout_held)
        return all(holds(held, self.pieces) for held in of_d) and all(holds(held, self.v_pieces) for held in of_dv)

    @property
    def key_registers(self) -> int:
        """Accumulators and operands that a thread of the kernel of dK and dV holds at once."""
        m = self.config.number("BLOCK_M")
        if self.wide:
            # Scores or their gradients, again as an operand, beside one sum.
            return m // 2 + m // 4 + max(self.columns_d, self.columns_dv) // 2 + self.k_held // 4
        return m + m // 4 + (self.columns_d + self.columns_dv) // 2 + (self.k_held + self.v_held) // 4

    @property
    def query_registers(self) -> int:
        """The same of the kernel of dQ: both scores, one of them as an operand, and dQ."""
        n = self.config.number("DQ_BLOCK_N")
        return n + n // 4 + self.columns_d // 2 + (self.q_held + self.dout_held) // 4

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
