"""How well tiles fit a problem: what of their work is padding, and what of the GPU has nothing to do in the last round. Pure functions."""

import math
from dataclasses import dataclass

from flashtune.core.band import blocks_of_tiles
from flashtune.core.config import Config
from flashtune.core.problem import DECODE_ROWS, Problem

MOST_TILES = 64
"""Of a head's query rows: of more of them what is cut off by a diagonal is too little to be counted tile by tile."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and keys that a program works through at once, and how many programs an SM holds."""

    rows: int
    keys: int
    residents: int

    @classmethod
    def of(cls, config: Config) -> "Tile | None":
        """A config's tile; None where its family names none."""
        if "BLOCK_M" not in config or "BLOCK_N" not in config:
            return None
        residents = config.number("ctas_per_sm") if "ctas_per_sm" in config else 1
        return cls(config.number("BLOCK_M"), config.number("BLOCK_N"), residents)


def excess(tile: Tile, problem: Problem, sms: int) -> float:
    """The time that the GPU takes for whole tiles over that for the pairs of rows and keys that the band lets through, were they spread
    evenly over its SMs: a logarithm, 0 where nothing is lost. Decoding steps, which split their keys until there are enough programs,
    have none."""
    if problem.n_q <= DECODE_ROWS:
        return 0.0
    heads, tiles = problem.batch * problem.heads, math.ceil(problem.n_q / tile.rows)
    band = problem.band.trimmed(problem.n_q, problem.n_kv)
    if band.bounded and tiles <= MOST_TILES:
        pairs = band.pairs(problem.n_q, problem.n_kv)
        work = [count * tile.keys * tile.rows for count in blocks_of_tiles(band, problem.n_q, problem.n_kv, tile.rows, tile.keys)]
        if not pairs:
            return 0.0
        # The longest begin first, so that little is left at the end, unless there are hardly more tiles than SMs.
        spent = max(heads * sum(work) / sms, max(work) * min(tile.residents, max(1.0, heads * tiles / sms)))
        return math.log(max(1.0, spent * sms / (heads * pairs)))
    keys = math.ceil(problem.n_kv / tile.keys) * tile.keys
    whole, fine = (math.ceil(heads * tiles / slots) * slots for slots in (sms * tile.residents, sms))
    # Of several programs on an SM the last run faster than they would beside others, but not as fast as all together.
    spent = (whole + fine) / 2 * tile.rows * keys
    return math.log(spent / (heads * problem.n_q * problem.n_kv))
