"""A cost model over what the real compiler says: an estimate of a candidate's time where it can't be run.

Per key block a program needs the matrix units, the exponential units, the vector units and the memory path. Programs that share an SM
overlap these; a program alone does so only as far as its own warps and pipeline stages let it. Whole waves of programs then fill the GPU.
The constants are fitted to the committed sweeps (benchmarks/sweeps), which a test replays.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashtune.core.config import Config, asks_first, rescales_grown, settles
from flashtune.core.dtypes import ITEMSIZE
from flashtune.core.problem import Problem
from flashtune.core.results import CompileFacts
from flashtune.core.target import Target
from flashtune.templates.backward import flash_bwd
from flashtune.templates.backward.hopper.layout import divisions_of
from flashtune.templates.decode.flash_decode import few_rows, row_splits, split_count
from flashtune.templates.family import blocks_of_head, blocks_of_tiles, padded
from flashtune.templates.hopper.layout import HopperLayout, packed_problem, tile_queries, tiles_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Constants(NamedTuple):
    """What the datasheets don't say; fitted to the H200's sweeps."""

    matrix_efficiency: float = 0.9
    """Share of the peak that the matrix units reach at best within a block's products."""
    narrow_efficiency: float = 0.33
    """The same on Hopper for programs of fewer than four warps, which can't use its warpgroup instructions."""
    vector_ops_per_score: float = 5.5
    """FP32 instructions per score beside the exponential: scale and subtract, row max, row sum, conversion."""
    maxima_ops_per_score: float = 0.75
    """What of these is spared where row maxima settle; fitted to pairs of trials of the shipped rows, as `maxima_wait`."""
    asking_ops_per_score: float = 2.5
    """What comes to them where blocks ask whether a score outweighs all before it, which spares the wait for row maxima; by twelve pairs of
    times at N = 4096 (benchmarks/results/2026-11-23-h200-scores/outgrown_first.txt)."""
    vector_lanes: int = 128
    """FP32 instructions that an SM starts per clock."""
    l2_bytes_per_clock: float = 46.0
    """Bytes per clock that one SM gets from L2."""
    load_latency: float = 1200.0
    """Clocks from a load to its data; each pipeline stage of a plain kernel hides more of them."""
    block_overhead: float = 340.0
    """Clocks of a key block that no unit is busy in: barriers and waits."""
    maxima_wait: float = 150.0
    """What of these is the wait for a block's row maxima."""
    tile_overhead: float = 4750.0
    """Clocks to start a tile, load Q, and store the output."""
    persistent_share: float = 0.45
    """What of a tile's overhead stays where a program goes from tile to tile."""
    overlap_alone: float = 0.49
    """Share of the shorter of matrix and softmax work that a plain kernel hides with one warpgroup on the SM."""
    overlap_shared: float = 0.77
    """The same with several warpgroups on the SM."""
    overlap_lookahead: float = 0.62
    """The same where the kernel itself puts products beside the softmax, with one warpgroup."""
    overlap_lookahead_shared: float = 0.98
    """The same with several."""
    overlap_twice: float = 0.8
    """The same where scores of the next block are under way, too, with several."""
    fill: float = 0.5
    """What a tile pays to begin and end such an overlap, for each step of it: a share of a block's products."""
    chained_fill: float = 0.7
    """What of this is left where tiles are chained."""
    edge_ops_per_score: float = 3.0
    """FP32 instructions more per score of a block at the edge of a band."""
    softcap_ops_per_score: float = 12.0
    """The same for a soft cap, beside its second special function."""
    dropout_ops_per_score: float = 20.0
    """The same for dropout: a quarter of a Philox call of ten rounds, and the comparison."""
    bias_ops_per_score: float = 3.0
    """The same for ALiBi, a mask or a bias."""
    tile_bytes_per_clock: float = 40.0
    """At what rate an SM loads queries and stores outputs."""
    uneven_drawn: float = 0.39
    """The share of a wave that is lost in the end where programs draw their tiles."""
    draw_clocks: float = 300.0
    """Clocks to draw a tile."""
    spill_clocks_per_byte: float = 0.019
    """Clocks per key block for each byte that all threads of a program spill together."""
    sum_bytes_per_clock: float = 17.0
    """Bytes of float32 sums per clock that one SM adds up in L2; flash-attention's pull request 2889 gives some 30 GB/s an SM."""
    launch_us: float = 4.7
    """Fixed cost of a launch on the GPU."""
    memory_latency: float = 1600.0
    """Clocks from a load to its data where all SMs read from memory at once; an estimate, as the two that follow."""
    second_launch_us: float = 2.5
    """What a launch that waits for another one adds."""
    part_us: float = 0.5
    """What the last program of a tile takes for each split that it adds up."""


CONSTANTS = Constants()

MANY_TILES = 1 << 20
"""More are even: a list of them takes seconds, and no SM has a thousandth more to do than another."""

FEW_ROUNDS = 8
"""Up to so many tiles of a band to a program it counts which of them end last; more fill all SMs evenly."""


def key_blocks(problem: Problem, block_m: int, block_n: int) -> int:
    """Key blocks that the query tiles of one head visit in all, given the causal and window bands."""
    return blocks_of_head(problem.band, problem.n_q, problem.n_kv, block_m, block_n)


@lru_cache(maxsize=4096)
def _unevenness(problem: Problem, block_m: int, block_n: int, section: int, sms: int, active: int, tile_blocks: float) -> float:
    """How much longer the busiest SM works than the mean, where program p takes every (sms * active)-th tile from the p-th on.

    A tile costs its blocks and `tile_blocks` more. Programs that share an SM make up for each other in part.
    """
    work = _work(problem, block_m, block_n, section) + tile_blocks
    slots = sms * active
    programs = np.pad(work, (0, -len(work) % slots)).reshape(-1, slots).sum(0)
    mean = float(work.sum()) / sms
    return 0.5 * (float(programs.max()) * active + float(programs.reshape(active, sms).sum(0).max())) / mean


@lru_cache(maxsize=4096)
def _last_ends(problem: Problem, block_m: int, block_n: int, section: int, sms: int, active: int, tile_blocks: float) -> float:
    """The same where a program takes the next tile as soon as it is free: a GPU of few tiles is done no sooner than the longest of them.

    Halfway between the order of the indices and the best one, by which programs that have an SM's units to themselves come nearer.
    """
    work = _work(problem, block_m, block_n, section) + tile_blocks
    ends = 0.0
    for slots in (sms, sms * active):
        busy = np.zeros(slots)
        # A quarter of a round of tiles at a time, to those that are free first.
        for found in np.split(work, range(slots // 4, len(work), slots // 4)):
            busy.sort()
            busy[: len(found)] += found
        ends += slots * (float(busy.max()) + max(float(work.max()), float(work.sum()) / slots)) / 2
    return 0.5 * ends / float(work.sum())


def _work(problem: Problem, block_m: int, block_n: int, section: int) -> "NDArray[np.float64]":
    """Blocks of each tile by the work indices of the Hopper family: sections of heads, in each the row tiles of all its heads, the longest
    first."""
    blocks = blocks_of_tiles(problem.band, problem.n_q, problem.n_kv, block_m, block_n)[::-1].astype(float)
    heads = problem.batch * problem.heads
    return np.concatenate([np.tile(np.repeat(blocks, section), heads // section), np.repeat(blocks, heads % section)])


def programs_per_sm(facts: CompileFacts, target: Target) -> int:
    """How many programs fit on one SM by registers, shared memory and threads; 0 where not even one fits."""
    registers = max(1, facts.registers) * facts.threads
    by_registers = target.registers_per_sm // registers
    by_shared = target.shared_bytes_per_sm // (facts.shared_bytes + 1024) if facts.shared_bytes else 32
    return min(by_registers, by_shared, target.max_threads_per_sm // facts.threads, 32)


def predict_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, constants: Constants = CONSTANTS) -> float:
    """The estimated run time in microseconds; infinite where the program doesn't fit on an SM."""
    c = constants
    if problem.direction == "bwd":
        found = _fused_backward_us if "dq_sums" in config else _backward_us if "ORDER" in config else _split_backward_us
        return found(config, facts, problem, target, c) + len(problem.features.asked) * _score_gradients_us(config, problem, target, c)
    resident = programs_per_sm(facts, target)
    if resident == 0:
        return math.inf
    if "programs" in config:
        return c.launch_us + _split_us(config, facts, problem, target, resident, c)
    block_m, block_n, rows = config.number("BLOCK_M"), config.number("BLOCK_N"), tile_queries(config)
    of_tiles = packed_problem(config, problem)
    tiles = tiles_of(config, problem)
    active = max(1, min(resident, math.ceil(tiles / target.sms)))
    blocks = key_blocks(of_tiles, rows, block_n) * of_tiles.batch * of_tiles.heads

    block = _Block.of(config, facts, problem, target, active, c)
    tiling = config.get("tiles", "one")
    persistent = tiling != "one"
    drawn = config.get("order", "fixed") == "drawn"
    moved = block_m * (padded(problem.d) + padded(problem.d_v)) * ITEMSIZE[problem.dtype] / c.tile_bytes_per_clock
    slots = target.sms * active
    # A program's first tile follows none.
    first = min(1.0, slots / tiles)
    fill = block.matrix * c.fill * block.ahead * (c.chained_fill + (1 - c.chained_fill) * first if tiling == "chained" else 1.0)
    edges = _edge_blocks(problem, rows, block_n) * c.edge_ops_per_score * block_m * block_n / c.vector_lanes
    per_tile = c.tile_overhead / active * (c.persistent_share + (1 - c.persistent_share) * first if persistent else 1.0)
    per_tile += moved + fill + edges + drawn * c.draw_clocks / active
    place = (of_tiles, rows, block_n, int(config.get("section", 1)), target.sms, active, round(per_tile / block.clocks, 2))
    if problem.features.banded and (drawn or not persistent) and tiles <= FEW_ROUNDS * slots:
        uneven = _last_ends(*place)
    elif persistent and not drawn:
        uneven = _unevenness(*place) if tiles <= MANY_TILES else 1.0
    elif persistent:
        uneven = 1.0 + c.uneven_drawn * slots / tiles
    else:
        # An SM that has a tile more than others ends last, whichever share it; tiles of a band, long ones first, fill all evenly.
        uneven = 1.0 if problem.features.banded else math.ceil(tiles / target.sms) * target.sms / tiles
    clocks = (blocks * block.clocks + tiles * per_tile) / target.sms * uneven
    memory_us = problem.io_bytes() / (target.bandwidth_gbs * 1e3)
    return c.launch_us + max(clocks / target.boost_mhz, memory_us)


def _score_gradients_us(config: Config, problem: Problem, target: Target, c: Constants) -> float:
    """Microseconds of the kernel of a bias's or of slopes' gradient: S and dP anew, from tiles that come anew, too."""
    p, size = problem, ITEMSIZE[problem.dtype]
    d, d_v = padded(p.d), padded(p.d_v)
    block_m, block_n = (64, 64) if d + d_v > 256 else (128, 64)
    if "ORDER" in config:
        block_m, block_n = config.number("DQ_BLOCK_M"), config.number("DQ_BLOCK_N")
    blocks = blocks_of_head(p.band, p.n_q, p.n_kv, block_m, block_n) * p.batch * p.heads
    matrix = 2 * block_m * block_n * (d + d_v) / _peak_per_clock(_kind(p), target) / c.matrix_efficiency
    memory = (block_m + block_n) * (d + d_v) * size / c.l2_bytes_per_clock
    clocks = blocks * (max(matrix, memory) + c.block_overhead) / target.sms
    return c.second_launch_us + clocks / target.boost_mhz


def _backward_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, c: Constants) -> float:
    """Microseconds of a whole backward of two kernels: delta, dK with dV, dQ. `facts` are of the second; the third's are estimated."""
    p = problem
    kernels = (
        (flash_bwd.key_config(config), facts),
        (flash_bwd.query_config(config), flash_bwd.expected_of_queries(config, p.spec(), target)),
    )
    total = _rows_us(p, target, 2 * p.d_v * ITEMSIZE[p.dtype] + 12, c)
    for (tile, seen), of_keys in zip(kernels, (True, False), strict=True):
        resident = programs_per_sm(seen, target)
        if resident == 0:
            return math.inf
        programs = p.batch * _tiles_of_gradients(p, tile, of_keys)
        active = max(1, min(resident, math.ceil(programs / target.sms)))
        overlap = c.overlap_shared if active * max(1, seen.threads // 128) > 1 else c.overlap_alone
        latency, balanced = c.load_latency / tile.number("num_stages") ** 2, config["ORDER"] == "longest_first"
        total += _gradients_us(tile, of_keys, seen, p, target, c, latency=latency, overlap=overlap, balanced=balanced, active=active)
    return total


def _fused_backward_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, c: Constants) -> float:
    """Microseconds of a whole backward of one kernel, with what prepares its rows and what converts the sums of dQ."""
    if programs_per_sm(facts, target) == 0:
        return math.inf
    size, d, d_v = ITEMSIZE[problem.dtype], padded(problem.d), padded(problem.d_v)
    latency, balanced = c.load_latency if config.number("num_stages") == 1 else 0.0, config["section"] != 1
    # O and dO are read and sums zeroed, then these are read and dQ is written.
    total = _rows_us(problem, target, 2 * d_v * size + 8 * d + d * size, c)
    divisions = divisions_of(config, problem, target)
    return total + _gradients_us(
        config,
        True,
        facts,
        problem,
        target,
        c,
        latency=latency,
        overlap=c.overlap_shared,
        balanced=balanced,
        adds_queries=True,
        divisions=divisions,
    )


def _split_backward_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, c: Constants) -> float:
    """Microseconds of a whole backward of Hopper's two kernels, with what prepares their rows. `facts` are of that of dK and dV."""
    if programs_per_sm(facts, target) == 0:
        return math.inf
    total = _rows_us(problem, target, 2 * padded(problem.d_v) * ITEMSIZE[problem.dtype] + 12, c)
    for prefix, seen in (("", facts), ("DQ_", replace(facts, spills=0))):
        tile = Config.of({name: config[f"{prefix}{name}"] for name in ("BLOCK_M", "BLOCK_N", "num_stages")})
        latency, balanced = c.load_latency if tile["num_stages"] == 1 else 0.0, config["section"] != 1
        total += _gradients_us(
            tile,
            not prefix,
            seen,
            problem,
            target,
            c,
            latency=latency,
            overlap=c.overlap_shared,
            balanced=balanced,
            divisions=1 if prefix else divisions_of(config, problem, target),
        )
    return total


def _rows_us(problem: Problem, target: Target, row_bytes: int, c: Constants) -> float:
    """Microseconds of a backward's launches, and of what prepares its rows and moves so many bytes for each."""
    rows = problem.batch * problem.heads * problem.n_q
    return c.launch_us + 2 * c.second_launch_us + rows * row_bytes / (target.bandwidth_gbs * 1e3)


def _tiles_of_gradients(problem: Problem, tile: Config, of_keys: bool) -> int:
    """Programs to a batch of a backward's kernel that holds the keys of a tile, or its queries."""
    p = problem
    return p.kv_heads * math.ceil(p.n_kv / tile.number("BLOCK_N")) if of_keys else p.heads * math.ceil(p.n_q / tile.number("BLOCK_M"))


def _gradients_us(
    tile: Config,
    of_keys: bool,
    facts: CompileFacts,
    problem: Problem,
    target: Target,
    c: Constants,
    *,
    latency: float,
    overlap: float,
    balanced: bool,
    active: int = 1,
    adds_queries: bool = False,
    divisions: int = 1,
) -> float:
    """Microseconds of a backward's kernel that holds the keys of a tile, and adds up dQ in memory or not, or that holds its queries.

    `latency` are clocks that a block waits for its loads; `balanced` says that a band's long tiles come first; `divisions` programs share a
    tile, whose parts of dK and dV are then read and written once more. The forward's constants, at
    other products; nothing of it was fitted to measured backward kernels yet.
    """
    p, m, n, d, d_v = problem, tile.number("BLOCK_M"), tile.number("BLOCK_N"), padded(problem.d), padded(problem.d_v)
    blocks = p.heads * (blocks_of_head(p.band.turned, p.n_kv, p.n_q, n, m) if of_keys else blocks_of_head(p.band, p.n_q, p.n_kv, m, n))
    # dV and dK beside S and dP, or dQ beside them.
    products = 2 * (d + d_v) + adds_queries * d if of_keys else 2 * d + d_v
    scores = m * n
    matrix = 2 * scores * products / _peak_per_clock(_kind(p), target) / c.matrix_efficiency
    softmax = scores / target.exp_per_clock + c.vector_ops_per_score * scores / c.vector_lanes
    memory = (m if of_keys else n) * (d + d_v) * ITEMSIZE[p.dtype] / c.l2_bytes_per_clock
    memory += adds_queries * 4 * m * d / c.sum_bytes_per_clock
    busy = max(matrix + softmax - overlap * min(matrix, softmax), memory) + c.spill_clocks_per_byte * facts.spills * facts.threads
    per_block = busy + (c.block_overhead + latency) / active
    slots, programs = target.sms * active, p.batch * _tiles_of_gradients(p, tile, of_keys) * divisions
    added_us = programs * 8 * n * (d + d_v) / (target.bandwidth_gbs * 1e3) if divisions > 1 else 0.0
    uneven = 1.0 if p.features.banded and balanced else math.ceil(programs / slots) * slots / programs
    return added_us + (p.batch * blocks * per_block + programs * c.tile_overhead / active) / target.sms * uneven / target.boost_mhz


def _kind(problem: Problem) -> str:
    return "tf32" if problem.features.tf32 else problem.dtype


def _peak_per_clock(kind: str, target: Target) -> float:
    """Operations of matrix products of this kind that an SM does in a clock at its peak."""
    return target.peak_tflops.get(kind, target.peak_tflops["fp32"]) * 1e6 / target.sms / target.boost_mhz


class Sharing(NamedTuple):
    """How a launch of a kernel whose programs share the keys of a tile does that: tiles, parts of each, and blocks of keys of a part."""

    tiles: int
    splits: int
    share: int


def sharing(config: Config, problem: Problem, target: Target) -> Sharing:
    """What the kernel's host code will find, but for bands, of which it knows less."""
    block_m, block_n, heads = config.number("BLOCK_M"), config.number("BLOCK_N"), problem.batch * problem.kv_heads
    tiles = heads * math.ceil(problem.n_q * problem.gqa_ratio / block_m)
    blocks = max(1, math.ceil(key_blocks(problem, max(1, block_m // problem.gqa_ratio), block_n) * heads / tiles))
    splits = split_count(blocks, tiles, config.number("programs") * target.sms)
    return Sharing(tiles, splits, math.ceil(blocks / splits))


def _split_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, resident: int, c: Constants) -> float:
    """Microseconds of a kernel whose programs share the keys of a tile, with heads packed into its rows, beyond its launch.

    A block takes as long as its arithmetic or its way from memory, which is the longer the fewer bytes are in flight on an SM.
    """
    block_m, block_n, size = config.number("BLOCK_M"), config.number("BLOCK_N"), ITEMSIZE[problem.dtype]
    tiles, splits, share = sharing(config, problem, target)
    programs = math.ceil(tiles * splits / target.sms)
    active = min(resident, programs)

    block_bytes = block_n * (padded(problem.d) + padded(problem.d_v)) * size
    # Without a pipeline a program waits for K, then for V.
    in_flight = active * block_bytes * max(0.5, config.number("num_stages") - 1)
    bytes_per_clock = min(in_flight / c.memory_latency, target.bandwidth_gbs * 1e3 / target.boost_mhz / target.sms)
    per_block = max(_Block.of(config, facts, problem, target, active, c).clocks, block_bytes / bytes_per_clock)
    # The SM with the most programs ends last.
    clocks = programs * (share * per_block + c.tile_overhead / active)
    parts_bytes = 8 * splits * problem.batch * problem.heads * problem.n_q * padded(problem.d_v) if splits > 1 else 0
    combine_us = 0.0 if splits == 1 else c.second_launch_us
    if splits > 1 and config["combine"] == "last":
        combine_us = c.part_us * splits
    elif splits > 1 and config["combine"] == "rows":
        rows = min(block_m, problem.n_q * problem.gqa_ratio)
        combine_us = 2 * c.part_us * math.ceil(rows / few_rows(config)) * math.ceil(splits / row_splits(config, problem.d_v))
    memory_us = (problem.io_bytes() + parts_bytes) / (target.bandwidth_gbs * 1e3)
    return max(clocks / target.boost_mhz, memory_us) + combine_us


def _edge_blocks(problem: Problem, block_m: int, block_n: int) -> int:
    """Key blocks of a query tile that hold both keys that a row sees and keys that it doesn't."""
    edges = (problem.band.right is not None) + (problem.band.left is not None)
    return edges * math.ceil(block_m / block_n)


def _score_ops(problem: Problem, c: Constants) -> tuple[float, float]:
    """FP32 instructions and special functions that a problem's features take for each score."""
    f = problem.features
    ops = c.softcap_ops_per_score * f.softcap + c.dropout_ops_per_score * f.dropout
    ops += c.bias_ops_per_score * (f.alibi + (f.mask != "none"))
    return ops, 1.0 * f.softcap


class _Block(NamedTuple):
    """What one key block of one program takes, in clocks of its SM."""

    clocks: float
    matrix: float
    """The products alone."""
    ahead: int
    """How many products the kernel itself puts beside a softmax."""

    @classmethod
    def of(cls, config: Config, facts: CompileFacts, problem: Problem, target: Target, active: int, c: Constants) -> "_Block":
        """With `active` programs on the SM."""
        block_m, block_n = config.number("BLOCK_M"), config.number("BLOCK_N")
        d, d_v, size = padded(problem.d), padded(problem.d_v), ITEMSIZE[problem.dtype]
        scores = block_m * block_n
        kind = _kind(problem)
        hopper = HopperLayout.of(problem.spec(), config) if "intra_wg_overlap" in config else None
        if kind == "fp8" and hopper is None:
            # Plain kernels multiply it as fp16.
            kind = "fp16"
        narrow = target.is_hopper and facts.threads < 4 * target.warp_size
        products = sum(padded(size) for size in problem.contract.product_sizes(problem))
        if hopper:
            # Its products leave out columns of padding.
            products, d_v = sum(width for _, width in hopper.pieces) + hopper.v_columns, hopper.v_columns
        efficiency = c.narrow_efficiency if narrow else c.matrix_efficiency
        matrix = 2 * scores * products / _peak_per_clock(kind, target) / efficiency
        asks = asks_first(config) and not settles(config)
        ops_per_score = c.vector_ops_per_score - c.maxima_ops_per_score * settles(config) + c.asking_ops_per_score * asks
        # Where no maximum changes, or not by much, nothing is rescaled.
        rescaling = 0 if settles(config) or rescales_grown(config) else 2
        more_ops, more_functions = _score_ops(problem, c)
        ops_per_score += more_ops
        softmax = (1 + more_functions) * scores / target.exp_per_clock + (
            ops_per_score * scores + rescaling * block_m * d_v
        ) / c.vector_lanes
        memory = block_n * (d + padded(problem.d_v)) * size / c.l2_bytes_per_clock

        shared = active * (hopper.consumers if hopper else max(1, facts.threads // 128)) > 1
        if hopper and hopper.overlap:
            overlap = c.overlap_lookahead if not shared else c.overlap_twice if hopper.overlap == 2 else c.overlap_lookahead_shared
        else:
            overlap = c.overlap_shared if shared else c.overlap_alone
        busy = max(matrix + softmax - overlap * min(matrix, softmax), memory) + c.spill_clocks_per_byte * facts.spills * facts.threads
        # Kernels with a copying warp have no loads of their own to wait for.
        latency = 0.0 if hopper else c.load_latency / max(1, int(config.get("num_stages", 1))) ** 2
        clocks = busy + (c.block_overhead - c.maxima_wait * (asks or settles(config)) + latency) / active
        return cls(clocks, matrix, hopper.overlap if hopper else 0)
