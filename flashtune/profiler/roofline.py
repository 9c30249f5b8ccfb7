"""Roofline of a target: the floor time of a step, the unit that sets it, and the target's crossover.

The roofline of Williams, Waterman and Patterson (CACM 2009), with a third unit beside memory and arithmetic: softmax needs one
exponential per score, and GPUs do only 16 of those per clock and SM (FlashAttention-3, Shah et al. 2024, section 3.1).
"""

from dataclasses import dataclass
from typing import Literal

from flashtune.core.dtypes import DType
from flashtune.core.errors import InputError
from flashtune.core.target import Target
from flashtune.profiler.accounting import Step

Bound = Literal["compute", "memory", "exp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Lower bound of a step's time, in microseconds per unit, if each unit ran at its peak and all overlapped."""

    compute_us: float
    memory_us: float
    exp_us: float

    @property
    def time_us(self) -> float:
        """Time of the slowest unit."""
        return max(self.compute_us, self.memory_us, self.exp_us)

    @property
    def bound(self) -> Bound:
        """The slowest unit."""
        times: dict[Bound, float] = {"compute": self.compute_us, "memory": self.memory_us, "exp": self.exp_us}
        return max(times, key=lambda unit: times[unit])


def peak_tflops(target: Target, dtype: DType) -> float:
    """Dense peak of the target's matrix products in `dtype`, in TFLOP/s; raises InputError where it has none."""
    if dtype not in target.peak_tflops:
        known = [name for name in ("fp16", "bf16", "fp32") if name in target.peak_tflops]
        raise InputError(f"{target.slug} has no {dtype} matrix products: use --dtype {' or '.join(known)}")
    return target.peak_tflops[dtype]


def crossover(target: Target, dtype: DType) -> float:
    """Operations per byte at which memory and matrix units take the same time: below it, memory is the bound."""
    return peak_tflops(target, dtype) * 1e3 / target.bandwidth_gbs


def floor(step: Step, target: Target, dtype: DType) -> Floor:
    """Floor of one step; matrix products and elementwise work use different units and overlap."""
    matrix = step.matmul_flops / (peak_tflops(target, dtype) * 1e6)
    vector = step.vector_flops / (target.peak_tflops["fp32"] * 1e6)
    return Floor(
        compute_us=max(matrix, vector),
        memory_us=step.bytes / (target.bandwidth_gbs * 1e3),
        exp_us=step.exps / target.exp_per_second * 1e6,
    )


def serial(floors: tuple[Floor, ...]) -> tuple[float, Bound]:
    """Floor of consecutive steps, in microseconds, and the unit that sets most of it."""
    by_unit: dict[Bound, float] = {}
    for one in floors:
        by_unit[one.bound] = by_unit.get(one.bound, 0.0) + one.time_us
    return sum(by_unit.values()), max(by_unit, key=lambda unit: by_unit[unit])
