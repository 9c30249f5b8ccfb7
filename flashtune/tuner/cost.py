"""A cost model over what the real compiler says: an estimate of a candidate's time where it can't be run.

Per key block a program needs the matrix units, the exponential units, the vector units and the memory path. Programs that share an SM
overlap these; a program alone does so only as far as its own warps and pipeline stages let it. Whole waves of programs then fill the GPU.
The constants are fitted to the committed sweeps (benchmarks/sweeps), which a test replays.
"""

import math
from dataclasses import dataclass

from flashtune.core.config import Config
from flashtune.core.dtypes import ITEMSIZE
from flashtune.core.problem import Problem
from flashtune.core.results import CompileFacts
from flashtune.core.target import Target
from flashtune.templates.family import padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What the datasheets don't say."""

    matrix_efficiency: float = 0.80
    """Share of the peak that the matrix units reach at best within a block's products."""
    vector_ops_per_score: float = 6.0
    """FP32 instructions per score beside the exponential: scale and subtract, row max, row sum, conversion."""
    vector_lanes: int = 128
    """FP32 instructions that an SM starts per clock."""
    l2_bytes_per_clock: float = 48.0
    """Bytes per clock that one SM gets from L2."""
    load_latency: float = 900.0
    """Clocks from a load to its data, exposed where there is no pipeline stage to hide it."""
    program_overhead: float = 3000.0
    """Clocks to start a program, load Q and store the output."""
    spill_clocks_per_byte: float = 0.6
    """Clocks per spilled byte of a thread and key block."""
    launch_us: float = 3.0
    """Fixed cost of a launch on the GPU."""


CONSTANTS = Constants()


def key_blocks(problem: Problem, block_m: int, block_n: int) -> int:
    """Key blocks that the query tiles of one head visit in all, given the causal and window bands."""
    f = problem.features
    left, right = f.window if f.window is not None else (None, 0 if f.causal else None)
    total = 0
    for start in range(0, problem.n_q, block_m):
        low, high = start + problem.diagonal, min(start + block_m, problem.n_q) - 1 + problem.diagonal
        first = 0 if left is None else max(0, low - left)
        last = problem.n_kv - 1 if right is None else min(problem.n_kv - 1, high + right)
        total += last // block_n - first // block_n + 1 if first <= last else 0
    return total


def programs_per_sm(facts: CompileFacts, target: Target) -> int:
    """How many programs fit on one SM by registers, shared memory and threads; 0 where not even one fits."""
    registers = max(1, facts.registers) * facts.threads
    by_registers = target.registers_per_sm // registers
    by_shared = target.shared_bytes_per_sm // (facts.shared_bytes + 1024) if facts.shared_bytes else 32
    return min(by_registers, by_shared, target.max_threads_per_sm // facts.threads, 32)


def predict_us(config: Config, facts: CompileFacts, problem: Problem, target: Target, constants: Constants = CONSTANTS) -> float:
    """The estimated run time in microseconds; infinite where the program doesn't fit on an SM."""
    c = constants
    resident = programs_per_sm(facts, target)
    if resident == 0:
        return math.inf
    block_m, block_n = config.number("BLOCK_M"), config.number("BLOCK_N")
    stages = int(config.get("num_stages", config.get("STAGES", 2)))
    d, d_v, size = padded(problem.d), padded(problem.d_v), ITEMSIZE[problem.dtype]
    clock = target.boost_mhz * 1e6

    kind = "tf32" if problem.features.tf32 else problem.dtype
    peak_per_clock = target.peak_tflops.get(kind, target.peak_tflops["fp32"]) * 1e12 / target.sms / clock
    scores = block_m * block_n
    matrix = 2 * scores * (d + d_v) / (peak_per_clock * c.matrix_efficiency)
    exponential = scores / target.exp_per_clock
    vector = (c.vector_ops_per_score * scores + 2 * block_m * d_v) / c.vector_lanes
    memory = block_n * (d + d_v) * size / c.l2_bytes_per_clock
    softmax = exponential + vector
    exposed = c.load_latency / max(1, stages - 1) if stages > 1 else c.load_latency

    tiles = problem.batch * problem.heads * math.ceil(problem.n_q / block_m)
    blocks = key_blocks(problem, block_m, block_n) * problem.batch * problem.heads / tiles
    busy = max(matrix, softmax, memory)
    alone = matrix + softmax + max(0.0, memory - matrix) + 0.1 * exposed + c.spill_clocks_per_byte * facts.spills
    active = min(resident, max(1, math.ceil(tiles / target.sms)))
    # `active` programs share the units: no faster than the busiest unit, no slower than one after another.
    per_block = max(busy, alone / active) if active > 1 else alone
    overhead = c.program_overhead / active
    per_tile = blocks * per_block + overhead
    rounds = tiles / target.sms
    waves = math.ceil(rounds / active) * active
    # Uneven tiles (causal) fill the last wave better than equal ones.
    effective = 0.5 * (waves + rounds) if problem.features.banded else waves
    compute_us = effective * per_tile / clock * 1e6
    memory_us = problem.io_bytes() / (target.bandwidth_gbs * 1e3)
    return c.launch_us + max(compute_us, memory_us)
