"""Constants of the cost model that datasheets lack, and peak rates derived from a target."""

from typing import NamedTuple

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts


class Constants(NamedTuple):
    """Constants that the datasheets lack, fitted to the H200's sweeps."""

    matrix_efficiency: float = 0.9
    """Share of the peak that the matrix units reach at best within a block's products."""
    narrow_efficiency: float = 0.33
    """Share of the peak on Hopper in programs of fewer than four warps, which can't use its warpgroup instructions."""
    vector_ops_per_score: float = 5.5
    """FP32 instructions per score beside the exponential: scale and subtract, row max, row sum, conversion."""
    maxima_ops_per_score: float = 0.75
    """FP32 instructions per score that frozen row maxima save; fitted to pairs of the shipped trials, as `maxima_wait`."""
    asking_ops_per_score: float = 2.5
    """FP32 instructions per score of rescale=outgrown, which saves the wait for row maxima
    (benchmarks/results/2026-11-23-h200-scores/outgrown_first.txt)."""
    vector_lanes: int = 128
    """FP32 instructions that an SM starts per clock."""
    l2_bytes_per_clock: float = 46.0
    """Bytes per clock that one SM gets from L2."""
    load_latency: float = 1200.0
    """Clocks from a load to its data; each pipeline stage of a plain kernel hides more of them."""
    block_overhead: float = 340.0
    """Clocks of a key block in which no unit is busy: barriers and waits."""
    maxima_wait: float = 150.0
    """Clocks of these for the wait for a block's row maxima."""
    tile_overhead: float = 4750.0
    """Clocks to start a tile, load Q, and store the output."""
    persistent_share: float = 0.45
    """Share of a tile's overhead that stays in persistent kernels."""
    overlap_alone: float = 0.49
    """Share of the shorter of matrix and softmax work that a plain kernel hides with one warpgroup on the SM."""
    overlap_shared: float = 0.77
    """Share of the shorter work hidden with several warpgroups on the SM."""
    overlap_lookahead: float = 0.62
    """Share of the shorter work hidden where the kernel issues products beside the softmax, with one warpgroup."""
    overlap_lookahead_shared: float = 0.98
    """Share of the shorter work hidden where the kernel issues products beside the softmax, with several warpgroups."""
    fill: float = 0.5
    """Share of a block's products that a tile loses to begin and end such an overlap, for each step of it."""
    chained_fill: float = 0.7
    """Share of `fill` that stays with chained tiles."""
    edge_ops_per_score: float = 3.0
    """Extra FP32 instructions per score of a block at the edge of a band."""
    softcap_ops_per_score: float = 12.0
    """Extra FP32 instructions per score for a soft cap, beside its second special function."""
    dropout_ops_per_score: float = 20.0
    """Extra FP32 instructions per score for dropout: a quarter of a Philox call of ten rounds, and the comparison."""
    bias_ops_per_score: float = 3.0
    """Extra FP32 instructions per score for ALiBi, a mask or a bias."""
    tile_bytes_per_clock: float = 40.0
    """Bytes per clock at which an SM loads queries and stores outputs."""
    uneven_drawn: float = 0.39
    """Share of a wave that is idle at the end under dynamic scheduling."""
    draw_clocks: float = 300.0
    """Clocks to fetch a tile dynamically."""
    spill_clocks_per_byte: float = 0.019
    """Clocks per key block for each byte that all threads of a program spill together."""
    sum_bytes_per_clock: float = 17.0
    """Bytes of float32 sums per clock that one SM adds up in L2; flash-attention's pull request 2889 gives some 30 GB/s an SM."""
    launch_us: float = 4.7
    """Fixed cost of a launch on the GPU."""
    memory_latency: float = 1600.0
    """Clocks from a load to its data where all SMs read from memory at once; an estimate, as the two that follow."""
    memory_sharpness: float = 4.0
    """Exponent by which a decoding step's programs and its bytes from memory add up to its time (`overlapped`)."""
    second_launch_us: float = 2.5
    """Microseconds of a launch that waits for another one."""
    part_us: float = 0.5
    """Microseconds of the last program of a tile for each split that it adds up."""


CONSTANTS = Constants()


def programs_per_sm(facts: CompileFacts, target: Target) -> int:
    """The number of programs that fit on one SM by registers, shared memory and threads; 0 where none fits."""
    registers = max(1, facts.registers) * facts.threads
    by_registers = target.registers_per_sm // registers
    by_shared = target.shared_bytes_per_sm // (facts.shared_bytes + 1024) if facts.shared_bytes else 32
    return min(by_registers, by_shared, target.max_threads_per_sm // facts.threads, 32)


def kind_of(problem: Problem) -> str:
    """The element type that determines the peak rate of matrix products."""
    return "tf32" if problem.features.tf32 else problem.dtype


def peak_per_clock(kind: str, target: Target) -> float:
    """Peak operations per SM and clock of matrix products of this kind."""
    return target.peak_tflops.get(kind, target.peak_tflops["fp32"]) * 1e6 / target.sms / target.boost_mhz
