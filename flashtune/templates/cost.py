"""A cost model over the compiler's resource usage: a candidate's estimated time.

Per key block a program needs the matrix units, the exponential units, the vector units and the memory path. Programs that share an SM
overlap these; a program alone only as far as its warps and pipeline stages allow. Whole waves of programs then fill the GPU.
The constants are fitted to the sweeps in benchmarks/results/2026-11-22-h200-sweeps, which a test replays.
"""

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, asks_first, rescales_grown, settles
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import Problem, padded
from flashtune.core.records.results import CompileFacts
from flashtune.templates.columns import loaded_columns
from flashtune.templates.cost_constants import CONSTANTS, Constants, kind_of, peak_per_clock, programs_per_sm
from flashtune.templates.cost_of_gradients import backward_us
from flashtune.templates.decode.flash_decode import few_rows, row_splits
from flashtune.templates.family import blocks_of_problem, blocks_of_tiles
from flashtune.templates.hopper.layout import HopperLayout, packed_problem, tile_queries, tiles_of
from flashtune.templates.hopper.wide import WideLayout
from flashtune.templates.launches.pointers import split_count

if TYPE_CHECKING:
    from numpy.typing import NDArray


MANY_TILES = 1 << 20
"""Tiles beyond which work counts as even: a list of them takes seconds, and SMs differ by less than a thousandth."""

FEW_ROUNDS = 8
"""Tiles of a band per program up to which the last ones count; more fill all SMs evenly."""


@lru_cache(maxsize=4096)
def _unevenness(problem: Problem, block_m: int, block_n: int, section: int, sms: int, active: int, tile_blocks: float) -> float:
    """The busiest SM's work over the mean, where program p takes every (sms * active)-th tile from the p-th on.

    A tile costs its blocks and `tile_blocks` more. Programs that share an SM balance each other in part.
    """
    work = _work(problem, block_m, block_n, section) + tile_blocks
    slots = sms * active
    programs = np.pad(work, (0, -len(work) % slots)).reshape(-1, slots).sum(0)
    mean = float(work.sum()) / sms
    return 0.5 * (float(programs.max()) * active + float(programs.reshape(active, sms).sum(0).max())) / mean


@lru_cache(maxsize=4096)
def _last_ends(problem: Problem, block_m: int, block_n: int, section: int, sms: int, active: int, tile_blocks: float) -> float:
    """The busiest SM's work over the mean under dynamic scheduling, bounded below by the longest tile.

    Halfway between the order of the indices and the best order, which programs alone on an SM come near.
    """
    work = _work(problem, block_m, block_n, section) + tile_blocks
    ends = 0.0
    for slots in (sms, sms * active):
        busy = np.zeros(slots)
        # A quarter of a round of tiles at a time, to the programs that are free first.
        for found in np.split(work, range(slots // 4, len(work), slots // 4)):
            busy.sort()
            busy[: len(found)] += found
        ends += slots * (float(busy.max()) + max(float(work.max()), float(work.sum()) / slots)) / 2
    return 0.5 * ends / float(work.sum())


def _work(problem: Problem, block_m: int, block_n: int, section: int) -> "NDArray[np.float64]":
    """Blocks of each tile in the Hopper family's work order: by sections of heads, in each the row tiles of all its heads, longest
    first."""
    tiles = [blocks_of_tiles(one.band, one.n_q, one.n_kv, block_m, block_n) for one in _in_order(problem)]
    blocks = np.concatenate(tiles)[::-1].astype(float)
    heads = problem.heads if problem.lengths is not None else problem.batch * problem.heads
    return np.concatenate([np.tile(np.repeat(blocks, section), heads // section), np.repeat(blocks, heads % section)])


def _in_order(problem: Problem) -> list[Problem]:
    """Dense problems whose tiles follow one another within a head: the packed sequences, or the problem itself."""
    if problem.lengths is None:
        return [problem]
    shapes = {(one.n_q, one.n_kv): one for one, _ in problem.shapes()}
    return [shapes[lengths] for lengths in problem.sequences()]


def predict_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, constants: Constants = CONSTANTS) -> float:
    """The estimated run time in microseconds; infinite where the program doesn't fit on an SM."""
    c = constants
    if problem.direction == "bwd":
        return backward_us(config, facts, problem, target, c)
    resident = programs_per_sm(facts, target)
    if resident == 0:
        return math.inf
    if "programs" in config:
        return c.launch_us + _split_us(config, facts, problem, target, resident, c)
    block_m, block_n, rows = config.number("BLOCK_M"), config.number("BLOCK_N"), tile_queries(config)
    of_tiles = packed_problem(config, problem)
    tiles = tiles_of(config, problem)
    active = max(1, min(resident, math.ceil(tiles / target.sms)))
    blocks = blocks_of_problem(of_tiles, rows, block_n) * of_tiles.batch * of_tiles.heads

    block = _Block.of(config, facts, problem, target, active, c)
    tiling = config.get("tiles", "one")
    persistent = tiling != "one"
    unequal = problem.features.banded or problem.features.packed
    dynamic = config.get("order", "fixed") == "drawn"
    moved = block_m * (padded(problem.d) + padded(problem.d_v)) * ITEMSIZE[problem.dtype] / c.tile_bytes_per_clock
    slots = target.sms * active
    # A program's first tile has no predecessor to overlap with.
    first = min(1.0, slots / tiles)
    fill = block.matrix * c.fill * block.ahead * (c.chained_fill + (1 - c.chained_fill) * first if tiling == "chained" else 1.0)
    edges = _edge_blocks(problem, rows, block_n) * c.edge_ops_per_score * block_m * block_n / c.vector_lanes
    per_tile = c.tile_overhead / active * (c.persistent_share + (1 - c.persistent_share) * first if persistent else 1.0)
    per_tile += moved + fill + edges + dynamic * c.draw_clocks / active
    place = (of_tiles, rows, block_n, int(config.get("section", 1)), target.sms, active, round(per_tile / block.clocks, 2))
    if unequal and (dynamic or not persistent) and tiles <= FEW_ROUNDS * slots:
        uneven = _last_ends(*place)
    elif persistent and not dynamic:
        uneven = _unevenness(*place) if tiles <= MANY_TILES else 1.0
    elif persistent:
        uneven = 1.0 + c.uneven_drawn * slots / tiles
    else:
        # The SM with a tile more than others ends last; tiles of a band, longest first, fill all SMs evenly.
        uneven = 1.0 if unequal else math.ceil(tiles / target.sms) * target.sms / tiles
    clocks = (blocks * block.clocks + tiles * per_tile) / target.sms * uneven
    memory_us = problem.io_bytes() / (target.bandwidth_gbs * 1e3)
    return c.launch_us + max(clocks / target.boost_mhz, memory_us)


class Sharing(NamedTuple):
    """Split of a tile's keys among programs: tiles, splits of each, and blocks of keys of a split."""

    tiles: int
    splits: int
    share: int


def sharing(config: Config, problem: Problem, target: Target) -> Sharing:
    """The split that the kernel's host code will choose, but for bands, which it knows less of."""
    block_m, block_n, heads = config.number("BLOCK_M"), config.number("BLOCK_N"), problem.batch * problem.kv_heads
    tiles = heads * math.ceil(problem.n_q * problem.gqa_ratio / block_m)
    blocks = max(1, math.ceil(blocks_of_problem(problem, max(1, block_m // problem.gqa_ratio), block_n) * heads / tiles))
    splits = split_count(blocks, tiles, config.number("programs") * target.sms)
    return Sharing(tiles, splits, math.ceil(blocks / splits))


def _split_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, resident: int, c: Constants) -> float:
    """Microseconds, launch excluded, of a kernel with split keys and heads packed into its rows.

    A block takes as long as its arithmetic or its load, which is slower the fewer bytes are in flight on an SM.
    """
    block_m, block_n, size = config.number("BLOCK_M"), config.number("BLOCK_N"), ITEMSIZE[problem.dtype]
    tiles, splits, share = sharing(config, problem, target)
    programs = math.ceil(tiles * splits / target.sms)
    active = min(resident, programs)

    block_bytes = block_n * sum(loaded_columns(problem.d, problem.d_v, latent=problem.features.latent)) * size
    # Without a pipeline a program waits for K, then for V.
    in_flight = active * block_bytes * max(0.5, config.number("num_stages") - 1)
    bytes_per_clock = min(in_flight / c.memory_latency, target.bandwidth_gbs * 1e3 / target.boost_mhz / target.sms)
    per_block = max(_Block.of(config, facts, problem, target, active, c).clocks, block_bytes / bytes_per_clock)
    # The SM with the most programs ends last.
    clocks = programs * (share * per_block + c.tile_overhead / active)
    parts_bytes = 8 * splits * problem.batch * problem.heads * problem.n_q * padded(problem.d_v) if splits > 1 else 0
    combine_us = 0.0 if splits == 1 else c.second_launch_us
    if splits > 1 and config.get("combine", "kernel") == "last":
        combine_us = c.part_us * splits
    elif splits > 1 and config.get("combine", "kernel") == "rows":
        rows = min(block_m, problem.n_q * problem.gqa_ratio)
        combine_us = 2 * c.part_us * math.ceil(rows / few_rows(config)) * math.ceil(splits / row_splits(config, problem.d_v))
    memory_us = (problem.io_bytes() + parts_bytes) / (target.bandwidth_gbs * 1e3)
    return overlapped(clocks / target.boost_mhz, memory_us, c.memory_sharpness) + combine_us


def overlapped(one: float, other: float, sharpness: float) -> float:
    """The time of two works side by side: a smooth maximum, since a kernel near a limit doesn't reach it."""
    longer = max(one, other)
    found: float = longer * (1.0 + (min(one, other) / longer) ** sharpness) ** (1.0 / sharpness)
    return found


def _edge_blocks(problem: Problem, block_m: int, block_n: int) -> int:
    """Key blocks of a query tile with both visible and hidden keys."""
    edges = (problem.band.right is not None) + (problem.band.left is not None)
    return edges * math.ceil(block_m / block_n)


def _score_ops(problem: Problem, c: Constants) -> tuple[float, float]:
    """FP32 instructions and special functions per score of a problem's features."""
    f = problem.features
    ops = c.softcap_ops_per_score * f.softcap + c.dropout_ops_per_score * f.dropout
    ops += c.bias_ops_per_score * (f.alibi + (f.mask != "none") + bool(f.mods))
    return ops, 1.0 * f.softcap


class _Block(NamedTuple):
    """Cost of one key block of one program, in clocks of its SM."""

    clocks: float
    matrix: float
    """Clocks of the products alone."""
    ahead: int
    """Products that the kernel issues beside a softmax."""

    @classmethod
    def of(cls, config: Config, facts: CompileFacts, problem: Problem, target: Target, active: int, c: Constants) -> "_Block":
        """The cost with `active` programs on the SM."""
        block_m, block_n = config.number("BLOCK_M"), config.number("BLOCK_N")
        d_v, size = padded(problem.d_v), ITEMSIZE[problem.dtype]
        of_keys, of_values = loaded_columns(problem.d, problem.d_v, latent=problem.features.latent)
        scores = block_m * block_n
        kind = kind_of(problem)
        wide = "K_COLUMNS" in config
        hopper = (WideLayout if wide else HopperLayout).of(problem.spec(), config) if "intra_wg_overlap" in config else None
        if kind == "fp8" and hopper is None:
            # Plain kernels multiply fp8 as fp16.
            kind = "fp16"
        narrow = target.is_hopper and facts.threads < 4 * target.warp_size
        products = of_keys + d_v
        if hopper and not wide:
            # Hopper kernels leave columns of padding out of products.
            products, d_v = sum(width for _, width in hopper.pieces) + hopper.v_columns, hopper.v_columns
        efficiency = c.narrow_efficiency if narrow else c.matrix_efficiency
        matrix = 2 * scores * products / peak_per_clock(kind, target) / efficiency
        checks_first = asks_first(config) and not settles(config)
        ops_per_score = c.vector_ops_per_score - c.maxima_ops_per_score * settles(config) + c.asking_ops_per_score * checks_first
        # Without a maximum that grew far the accumulator isn't rescaled.
        rescaling = 0 if settles(config) or rescales_grown(config) else 2
        more_ops, more_functions = _score_ops(problem, c)
        ops_per_score += more_ops
        softmax = (1 + more_functions) * scores / target.exp_per_clock + (
            ops_per_score * scores + rescaling * block_m * d_v
        ) / c.vector_lanes
        memory = block_n * (of_keys + of_values) * size / c.l2_bytes_per_clock

        shared = active * (hopper.consumers if hopper else max(1, facts.threads // 128)) > 1
        if hopper and hopper.overlap:
            overlap = c.overlap_lookahead_shared if shared else c.overlap_lookahead
        else:
            overlap = c.overlap_shared if shared else c.overlap_alone
        busy = max(matrix + softmax - overlap * min(matrix, softmax), memory) + c.spill_clocks_per_byte * facts.spills * facts.threads
        # Kernels with a copying warp don't wait for loads.
        latency = 0.0 if hopper else c.load_latency / max(1, int(config.get("num_stages", 1))) ** 2
        clocks = busy + (c.block_overhead - c.maxima_wait * (checks_first or settles(config)) + latency) / active
        return cls(clocks, matrix, hopper.overlap if hopper else 0)
