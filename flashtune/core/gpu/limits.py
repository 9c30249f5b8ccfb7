"""Bounds of plausible times, of kernels from below and of PyTorch from above, by the datasheets of flashtune.core.gpu.table."""

from functools import lru_cache
from typing import NamedTuple

from flashtune.core.gpu.target import targets
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Problem

OVER_PEAK = 1.1
"""Factor by which measured rates may exceed a datasheet's, as cards of other clocks share its name; shipped records reach 0.94."""
SHORTEST_US = 1.0
"""Microseconds of the shortest plausible launch; the shortest shipped takes 8."""
UNFUSED = 30.0
"""PyTorch's greatest time over that of its scores through memory; 7.4 is the greatest shipped."""
UNFUSED_CALL_US, UNFUSED_BYTES = 20.0, 32
"""Microseconds of PyTorch's smallest call, and bytes moved for each score in memory."""


class Rates(NamedTuple):
    """Peak rates: 10^12 operations a second, 10^9 bytes a second, and the bytes of L2."""

    tflops: float
    bandwidth_gbs: float
    l2_bytes: int


@lru_cache(maxsize=256)
def rates(gpu: str, dtype: DType) -> Rates:
    """The peak rates of this GPU; of one outside the table the greatest of any."""
    known = targets()
    found = [known[gpu]] if gpu in known else list(known.values())
    names = ("fp32", "tf32") if dtype == "fp32" else (dtype,)
    return Rates(
        # A GPU without a matrix unit for a type computes in a wider one.
        tflops=max(target.peak_tflops.get(name, 0.0) for target in found for name in names) or max(found[0].peak_tflops.values()),
        bandwidth_gbs=max(target.bandwidth_gbs for target in found),
        l2_bytes=max(target.l2_bytes for target in found),
    )


def least_us(problem: Problem, gpu: str) -> float:
    """The least plausible time of a kernel, in microseconds: of its products at the peak rate, or of its operands where all are read."""
    peak = rates(gpu, problem.dtype)
    # A function may hide any pair, of which only its process knows.
    computing = 0.0 if problem.features.mods else problem.flops() / (peak.tflops * 1e6)
    # A band may leave keys unread, and data in L2 isn't read from memory.
    moving = 0.0 if problem.spec().banded or problem.features.mods else (problem.io_bytes() - peak.l2_bytes) / (peak.bandwidth_gbs * 1e3)
    return max(SHORTEST_US, max(computing, moving) / OVER_PEAK)


def most_framework_us(problem: Problem, gpu: str) -> float:
    """PyTorch's greatest plausible time, in microseconds: all scores, whatever the band, each through memory several times."""
    peak = rates(gpu, problem.dtype)
    scores = problem.scores()
    computing = 2 * scores * sum(problem.contract.product_sizes(problem)) / (peak.tflops * 1e6)
    operands = sum(operand.nbytes(problem) for operand in problem.contract.operands)
    moving = (UNFUSED_BYTES * scores + operands) / (peak.bandwidth_gbs * 1e3)
    # Packed sequences may be a call each.
    calls = 1 if problem.lengths is None else problem.batch
    return UNFUSED * (UNFUSED_CALL_US * calls + computing + moving)
