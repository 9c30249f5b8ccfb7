"""Layout of the backward for Hopper of heads beyond 256, and the chunks of its scores that lie in memory at a time."""

from collections.abc import Iterator
from typing import NamedTuple

from flashtune.templates.backward.hopper.layout import HopperBackward
from flashtune.templates.hopper.layout import SHARED_BYTES

MOST_SCRATCH = 2**29
"""Bytes of probabilities and gradients of scores that lie in memory at a time, where a tile of queries of one head has no more.

Half of it takes 1 % more time full and 24 % causal (D = 512, N = 8192, 8 heads, H200); double saves 0 and 5 %.
"""


RUN = 16
"""Most blocks of keys of a program of scores."""


class Chunk(NamedTuple):
    """Scores that lie in memory at a time: key heads (counted over batches), query heads of each, tiles of queries of each of these.

    `starts` and `ends` are True for the first and the last chunk of a key head.
    """

    place: int
    places: int
    member: int
    members: int
    m_tile: int
    m_tiles: int
    starts: bool
    ends: bool

    @property
    def arguments(self) -> tuple[int, int, int, int, int]:
        """Arguments of kernels, in the order of `WideBackwardLayout.chunk_names`."""
        return self.place, self.member, self.members, self.m_tile, self.m_tiles


def chunks(places: int, group: int, m_tiles: int, tile_bytes: int, most: int) -> Iterator[Chunk]:
    """Chunks of at most `most` bytes, of whole key heads where these fit, else of whole query heads, else of tiles of queries.

    `tile_bytes` are those of a tile of queries, of which a chunk has at least one.
    """
    head = m_tiles * tile_bytes
    if group * head <= most:
        step = most // (group * head)
        for place in range(0, places, step):
            yield Chunk(place, min(step, places - place), 0, group, 0, m_tiles, True, True)
        return
    members, tiles = max(1, most // head), min(m_tiles, max(1, most // tile_bytes))
    for place in range(places):
        for member in range(0, group, members):
            for tile in range(0, m_tiles, tiles):
                some, rows = min(members, group - member), min(tiles, m_tiles - tile)
                ends = member + some == group and tile + rows == m_tiles
                yield Chunk(place, 1, member, some, tile, rows, member + tile == 0, ends)


class WideBackwardLayout(HopperBackward):
    """Layout of the kernels of `flash_bwd_hopper_wide`."""

    __slots__ = ()

    @property
    def chunk_names(self) -> list[str]:
        """Parameters of kernels: where a chunk begins and what it has."""
        return ["place", "member", "members", "m_tile", "chunk_m_tiles"]

    @property
    def part(self) -> int:
        """Columns of Q, K, V and dO that come together. Parts of 128 columns take gradients of D = 512 3 % longer (N = 8192, H200)."""
        return 64

    @property
    def parts(self) -> int:
        """Parts of Q and K."""
        return -(-self.spec.d // self.part)

    @property
    def v_parts(self) -> int:
        """Parts of V and dO."""
        return -(-self.spec.d_v // self.part)

    @property
    def scores_bytes(self) -> int:
        """Shared memory of the kernel of scores beside its stages: tiles that leave, and a KiB for barriers."""
        return 2 * self.config.number("BLOCK_M") * self.config.number("BLOCK_N") + 1024

    @property
    def stage_bytes(self) -> int:
        """Bytes of a part of queries and keys."""
        return 2 * self.part * (self.config.number("BLOCK_M") + self.config.number("BLOCK_N"))

    @property
    def stages(self) -> int:
        """Parts in flight: as many as fit."""
        return (SHARED_BYTES - self.scores_bytes) // self.stage_bytes

    @property
    def run(self) -> int:
        """Blocks of keys of a program of scores."""
        return RUN

    @property
    def band(self) -> int:
        """Tiles of queries whose programs run side by side."""
        return 16

    @property
    def columns(self) -> int:
        """Columns of a tile of gradients."""
        return self.config.number("COLUMNS")

    @property
    def d_tiles(self) -> int:
        """Tiles of dQ's and dK's columns."""
        return -(-self.spec.d // self.columns)

    @property
    def dv_tiles(self) -> int:
        """Tiles of dV's columns."""
        return -(-self.spec.d_v // self.columns)

    @property
    def product_stage_bytes(self) -> int:
        """Bytes of a step of 64 queries or keys of a product."""
        return 2 * 64 * (self.config.number("BLOCK_M") + self.columns)

    @property
    def product_stages(self) -> int:
        """Steps in flight: as many as fit."""
        return (SHARED_BYTES - 1024) // self.product_stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the kernel of scores."""
        return self.scores_bytes + self.stages * self.stage_bytes
