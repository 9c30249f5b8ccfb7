"""What follows from a spec and a config of `flash_bwd_hopper`, stated once for its template, its constraints and the cost model."""

from dataclasses import dataclass

from flashtune.core.config import Config, KernelSpec
from flashtune.core.dtypes import ITEMSIZE
from flashtune.templates.family import padded

KEYS = 64
"""Keys of a warpgroup: the rows of its matrix instructions."""


@dataclass(frozen=True, slots=True)
class BackwardLayout:
    """How a program of this config is divided among warpgroups, and where its tiles live."""

    spec: KernelSpec
    config: Config

    @classmethod
    def of(cls, spec: KernelSpec, config: Config) -> "BackwardLayout":
        """The layout of any config of the declared space, whether or not it keeps the constraints."""
        return cls(spec, config)

    @property
    def block_d(self) -> int:
        """Columns of a tile of q, k and their gradients."""
        return padded(self.spec.d)

    @property
    def block_dv(self) -> int:
        """Columns of a tile of v and dO."""
        return padded(self.spec.d_v)

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, of KEYS keys each."""
        return self.config.number("BLOCK_N") // KEYS

    @property
    def by_columns(self) -> bool:
        """Whether warpgroups share a tile of dQ by columns: 64 rows can't be divided, matrix instructions have as many."""
        return self.config.number("BLOCK_M") < KEYS * self.consumers

    @property
    def part_m(self) -> int:
        """Rows of a warpgroup's part of a tile of dQ."""
        return self.config.number("BLOCK_M") // (1 if self.by_columns else self.consumers)

    @property
    def part_d(self) -> int:
        """Columns of a warpgroup's part of a tile of dQ."""
        return self.block_d // (self.consumers if self.by_columns else 1)

    @property
    def by_tma(self) -> bool:
        """Whether the copy engine adds parts of dQ to the sums, from memory of their own."""
        return self.config["dq_sums"] == "tma"

    @property
    def sizes(self) -> list[str]:
        """The kernel's parameters that are sizes, which travel through it as `Sizes`."""
        s = self.spec
        found = ["n_q", "n_kv", "kv_heads", "group", "m_tiles", "n_tiles"]
        return found + ["diagonal"] * (s.banded or s.alibi) + ["window_left"] * s.window + ["window_right"] * (s.window and not s.causal)

    @property
    def params(self) -> list[str]:
        """The kernel's parameters that are numbers for scores and gradients, and what each head has of its own in memory."""
        s = self.spec
        found = ["scale", "score_scale"] + ["inner_scale"] * s.softcap
        found += ["seed", "offset", "threshold", "keep_scale"] * s.dropout + ["slopes_ptr", "slopes_by_batch", "slopes_by_head"] * s.alibi
        if s.mask == "bool":
            return [*found, "mask_bits_ptr", "mask_by_batch", "mask_by_head"]
        return found + [f"bias_{part}" for part in ("ptr", "by_batch", "by_head", "by_row", "by_column")] * (s.mask == "bias")

    @property
    def unspecialized(self) -> list[str]:
        """Those of `params` that are integers, of which each value would be compiled for."""
        return [name for name in self.params if "_by_" in name or name in ("seed", "offset", "threshold")]

    @property
    def head_params(self) -> list[str]:
        """What the blocks of a head work with beside `params`, of which each head has its own."""
        s = self.spec
        found = ["index"] * s.dropout + ["slope"] * s.alibi
        return found + {"none": [], "bool": ["matrix"], "bias": ["bias_ptr"]}[s.mask]

    @property
    def consumer_registers(self) -> int:
        """What a thread of a warpgroup that computes may hold: the register file less the share of the copying warps."""
        return 240

    @property
    def live_registers(self) -> int:
        """Accumulators and operands that a consumer thread holds at once: both scores, one of them as an operand, and dK and dV."""
        m = self.config.number("BLOCK_M")
        return m + m // 4 + (self.block_d + self.block_dv) // 2

    @property
    def shared_bytes(self) -> int:
        """Keys and values, stages of queries and dO with their numbers, dS twice, parts of dQ, and a KiB for barriers."""
        size, block_m, block_n = ITEMSIZE[self.spec.dtype], self.config.number("BLOCK_M"), self.config.number("BLOCK_N")
        row = size * (self.block_d + self.block_dv)
        stages = self.config.number("num_stages") * block_m * (row + 8)
        parts = 4 * self.consumers * self.part_m * self.part_d if self.by_tma else 0
        return block_n * row + stages + 2 * size * block_n * block_m + parts + 1024
