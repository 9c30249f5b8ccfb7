"""Layout of the forward for Hopper of heads beyond 256."""

from typing import Self

from flashtune.core.problems.config import Config, KernelSpec, Value
from flashtune.core.problems.problem import padded
from flashtune.templates.hopper.layout import CONSUMER_REGISTERS, ROWS, SHARED_BYTES, HopperLayout

MOST_BLOCKS = 2
"""Key blocks for which the ring has room, where memory allows."""

FIXED: dict[str, Value] = {
    "BLOCK_M": ROWS,
    "BLOCK_N": 64,
    "pingpong": False,
    "tiles": "one",
    "order": "fixed",
    "ctas_per_sm": 1,
    "maximum": "running",
    "v_columns": "padded",
    "packed_heads": 1,
}
"""Axes of Hopper's forward that this family never varies."""


class WideLayout(HopperLayout):
    """Layout of a program of `flash_fwd_hopper_wide`: two warpgroups have the same rows and different columns of the output."""

    __slots__ = ()

    @classmethod
    def of(cls, spec: KernelSpec, config: Config) -> Self:
        """The layout of any config of the declared space, valid or not."""
        return cls(spec, Config.of(FIXED, **dict(config.items)))

    @property
    def wide(self) -> bool:
        """True: a tile's rows are shared."""
        return True

    @property
    def chunked(self) -> bool:
        """False: parts of columns take the place of chunks."""
        return False

    @property
    def stored_d(self) -> int:
        """Columns of a tile of q and k in shared memory, a whole number of swizzle widths."""
        return self.in_chunks(self.spec.d)

    @property
    def part(self) -> int:
        """Columns of a part of q and k: as many as the config says, or fewer, by which they are divided evenly."""
        return min(self.config.number("K_COLUMNS"), self.stored_d & -self.stored_d)

    @property
    def parts(self) -> int:
        """Parts of a tile of q and k."""
        return self.stored_d // self.part

    @property
    def left(self) -> int:
        """Columns of the output of the warpgroup without scores: the first half of a padded tile."""
        return padded(self.spec.d_v) // 2

    @property
    def block_dv(self) -> int:
        """Columns of the output of the warpgroup with the scores: those that are left, padded."""
        return padded(self.spec.d_v - self.left)

    @property
    def v_pieces(self) -> list[tuple[int, int]]:
        """One accumulator of that warpgroup."""
        return [(0, self.block_dv)]

    @property
    def consumer_registers(self) -> int | None:
        """Registers of a thread of either warpgroup."""
        return CONSUMER_REGISTERS[2, 1]

    @property
    def entry_registers(self) -> int:
        """Registers of a thread at entry: 65536 shared by two warpgroups and the producer's."""
        return 65536 // (128 * 3) // 8 * 8

    @property
    def tiles_bytes(self) -> int:
        """Queries, stages of values, two slots of probs and factors of rows, with a KiB for barriers."""
        block_n = self.config.number("BLOCK_N")
        values = self.config.number("num_stages") * block_n * (self.left + self.block_dv)
        return 2 * (ROWS * self.stored_d + values + 2 * ROWS * block_n) + 2 * 4 * ROWS + 1024

    @property
    def ring(self) -> int:
        """Parts of keys for which there is room."""
        room = (SHARED_BYTES - self.tiles_bytes) // (2 * self.config.number("BLOCK_N") * self.part)
        return max(self.parts, min(room, MOST_BLOCKS * self.parts))

    @property
    def shared_bytes(self) -> int:
        """All that lies in shared memory."""
        return self.tiles_bytes + 2 * self.config.number("BLOCK_N") * self.part * self.ring
