"""The cost model of the backward pass (`cost.py` has the forward's): its kernels one after another, with preparation and finish."""

import math
from dataclasses import replace

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import Problem, padded
from flashtune.core.records.results import CompileFacts
from flashtune.templates.backward import flash_bwd
from flashtune.templates.backward.hopper.layout import divisions_of
from flashtune.templates.backward.hopper.wide import MOST_SCRATCH, RUN
from flashtune.templates.cost_constants import Constants, kind_of, peak_per_clock, programs_per_sm
from flashtune.templates.family import blocks_of_problem


def backward_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, c: Constants) -> float:
    """Microseconds of a whole backward; infinite where a program doesn't fit on an SM. `facts` are of the kernel of dK and dV."""
    kinds = {"COLUMNS": _wide_backward_us, "dq_sums": _fused_backward_us, "ORDER": _plain_backward_us}
    found = next((kind for axis, kind in kinds.items() if axis in config), _split_backward_us)
    return found(config, facts, problem, target, c) + len(problem.features.asked) * _score_gradients_us(config, problem, target, c)


def _plain_backward_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, c: Constants) -> float:
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
    """Microseconds of a whole backward of one kernel, with row preparation and conversion of dQ's sums."""
    if programs_per_sm(facts, target) == 0:
        return math.inf
    size, d, d_v = ITEMSIZE[problem.dtype], padded(problem.d), padded(problem.d_v)
    latency, balanced = c.load_latency if config.number("num_stages") == 1 else 0.0, config["section"] != 1
    # Traffic: O and dO are read; sums are zeroed, then read; dQ is written.
    sums = config["dq_sums"] != "own"
    total = _rows_us(problem, target, 2 * d_v * size + sums * 8 * d + d * size, c)
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
        of_queries=True,
        sums=sums,
        divisions=divisions,
    )


def _split_backward_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, c: Constants) -> float:
    """Microseconds of a whole backward of Hopper's two kernels, with row preparation. `facts` are of the kernel of dK and dV."""
    if programs_per_sm(facts, target) == 0:
        return math.inf
    total = _rows_us(problem, target, 2 * padded(problem.d_v) * ITEMSIZE[problem.dtype] + 12, c)
    for prefix, seen in (("", facts), ("DQ_", replace(facts, spills=0))):
        tile = Config.of({name: config[f"{prefix}{name}"] for name in ("BLOCK_M", "BLOCK_N", "num_stages")})
        latency = c.load_latency if tile["num_stages"] == 1 else 0.0
        total += _gradients_us(
            tile,
            not prefix,
            seen,
            problem,
            target,
            c,
            latency=latency,
            overlap=c.overlap_shared,
            balanced=True,
            divisions=1 if prefix else divisions_of(config, problem, target),
        )
    return total


def _wide_backward_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, c: Constants) -> float:
    """Microseconds of a whole backward whose scores' gradients go through memory, chunk by chunk: scores, then the products with them.

    `facts` are of the kernel of scores. Tiles of products are padded to whole tiles of columns.
    """
    if programs_per_sm(facts, target) == 0:
        return math.inf
    p, m, n, columns = problem, config.number("BLOCK_M"), config.number("BLOCK_N"), config.number("COLUMNS")
    size, scores, tiles = ITEMSIZE[p.dtype], m * n, p.batch * p.heads * blocks_of_problem(p, m, n)
    clocks_per_column = 2 * scores / peak_per_clock(kind_of(p), target) / c.matrix_efficiency
    softmax = scores / target.exp_per_clock + c.vector_ops_per_score * scores / c.vector_lanes
    matrix = clocks_per_column * (p.d + p.d_v)
    loads = (m + n) * (p.d + p.d_v) * size / c.l2_bytes_per_clock
    busy = max(matrix + softmax - c.overlap_alone * min(matrix, softmax), loads)
    busy += c.block_overhead + c.spill_clocks_per_byte * facts.spills * facts.threads
    # dQ and dK, then dV; each tile of theirs reads the scores anew.
    gradients = 2 * math.ceil(p.d / columns) + math.ceil(p.d_v / columns)
    busy += gradients * max(clocks_per_column * columns, (scores + n * columns) * size / c.l2_bytes_per_clock)
    bytes_of_scores = 2 * size * p.batch * p.heads * math.ceil(p.n_q / m) * m * math.ceil(p.n_kv / n) * n
    launches = 3 * math.ceil(bytes_of_scores / MOST_SCRATCH)
    rows_us = _rows_us(p, target, 2 * p.d_v * size + 12, c)
    of_queries, of_keys = (p.batch * _tiles_of_gradients(p, config, one) for one in (False, True))
    programs = of_queries * (math.ceil(p.n_kv / n / RUN) + math.ceil(p.d / columns)) + of_keys * (gradients - math.ceil(p.d / columns))
    clocks = (tiles * busy + programs * c.tile_overhead) / target.sms
    return rows_us + launches * c.second_launch_us + clocks / target.boost_mhz


def _rows_us(problem: Problem, target: Target, row_bytes: int, c: Constants) -> float:
    """Microseconds of a backward's launches and of its row preparation, which moves `row_bytes` for each."""
    rows = problem.batch * problem.heads * problem.n_q
    return c.launch_us + 2 * c.second_launch_us + rows * row_bytes / (target.bandwidth_gbs * 1e3)


def _tiles_of_gradients(problem: Problem, tile: Config, of_keys: bool) -> float:
    """Programs per batch of a backward's kernel whose tiles are of keys (`of_keys`) or of queries; of packed sequences the mean of all."""
    p, rows = problem, tile.number("BLOCK_N" if of_keys else "BLOCK_M")
    tiles = sum(count * math.ceil((one.n_kv if of_keys else one.n_q) / rows) for one, count in p.shapes())
    return (p.kv_heads if of_keys else p.heads) * tiles / p.batch


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
    of_queries: bool = False,
    sums: bool = False,
    divisions: int = 1,
) -> float:
    """Microseconds of a backward's kernel whose tiles are of keys (`of_keys`), with dQ (`of_queries`) and its `sums` in memory or
    without, or of queries.

    `latency` are clocks that a block waits for its loads; with `balanced` a band's long tiles come first; with split-Q `divisions` programs
    share a tile, and their partial dK and dV are written and read once more. The constants are the forward's; none is fitted to
    backward kernels.
    """
    p, m, n, d, d_v = problem, tile.number("BLOCK_M"), tile.number("BLOCK_N"), padded(problem.d), padded(problem.d_v)
    blocks = p.heads * blocks_of_problem(p, m, n, of_keys=of_keys)
    # dV and dK beside S and dP, or dQ beside them.
    products = 2 * (d + d_v) + of_queries * d if of_keys else 2 * d + d_v
    scores = m * n
    matrix = 2 * scores * products / peak_per_clock(kind_of(p), target) / c.matrix_efficiency
    softmax = scores / target.exp_per_clock + c.vector_ops_per_score * scores / c.vector_lanes
    memory = (m if of_keys else n) * (d + d_v) * ITEMSIZE[p.dtype] / c.l2_bytes_per_clock
    memory += sums * 4 * m * d / c.sum_bytes_per_clock
    busy = max(matrix + softmax - overlap * min(matrix, softmax), memory) + c.spill_clocks_per_byte * facts.spills * facts.threads
    per_block = busy + (c.block_overhead + latency) / active
    slots, programs = target.sms * active, p.batch * _tiles_of_gradients(p, tile, of_keys) * divisions
    added_us = programs * 8 * n * (d + d_v) / (target.bandwidth_gbs * 1e3) if divisions > 1 else 0.0
    uneven = 1.0 if p.features.banded and balanced else math.ceil(programs / slots) * slots / programs
    return added_us + (p.batch * blocks * per_block + programs * c.tile_overhead / active) / target.sms * uneven / target.boost_mhz


def _score_gradients_us(config: Config, problem: Problem, target: Target, c: Constants) -> float:
    """Microseconds of the kernel of a bias's or of slopes' gradient, which loads tiles and computes S and dP again."""
    p, size = problem, ITEMSIZE[problem.dtype]
    d, d_v = padded(p.d), padded(p.d_v)
    block_m, block_n = (64, 64) if d + d_v > 256 else (128, 64)
    if "ORDER" in config:
        block_m, block_n = config.number("DQ_BLOCK_M"), config.number("DQ_BLOCK_N")
    blocks = blocks_of_problem(p, block_m, block_n) * p.batch * p.heads
    matrix = 2 * block_m * block_n * (d + d_v) / peak_per_clock(kind_of(p), target) / c.matrix_efficiency
    memory = (block_m + block_n) * (d + d_v) * size / c.l2_bytes_per_clock
    clocks = blocks * (max(matrix, memory) + c.block_overhead) / target.sms
    return c.second_launch_us + clocks / target.boost_mhz
