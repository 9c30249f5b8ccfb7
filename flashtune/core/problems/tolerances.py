"""Table of tolerances: a kernel's greatest error against the float64 oracle, and its derivation.

A kernel with fp16/bf16 inputs rounds P to the input type before PV and O once at the end. With P <= 1 and the row's sum
applied in float32, the error of an output is a weighted mean of |v| times one unit roundoff, plus one rounding of O; for
inputs ~ N(0, 1) a few unit roundoffs cover it. TF32 rounds each operand to 10 bits of mantissa (like fp16).

fp8 inputs are compared with the oracle on their exact values, so that only the kernel's own rounding counts: of P to e4m3,
unit roundoff u = 2^-4, where a kernel multiplies PV as fp8. Weights p_j (1 + e_j) with |e_j| <= u turn o = sum p_j v_j into o + sum p_j
e_j v_j. For independent v_j, which are all but orthogonal, that is at most u |o|: the norm's bound. An element is off by u max|v| at
worst; signs of e_j that don't agree make it a quarter of that. A simulation with N of 77 to 8192, D of 16 to 128, causal and full,
scores of up to 2.25 standard deviations and |v| ~ N(0, 1) found at most 0.04 |o|, and 0.03 (1 + |o|) an element
(benchmarks/results/2026-11-22-fp8-weights). The bounds leave room for descales and dropout. The products of e4m3 are exact, but Hopper
keeps only some 14 bits of their sums (DeepSeek-V3 technical report, section 3.5.2), which the LSE's bound allows for.
"""

from dataclasses import dataclass

from flashtune.core.problems.config import KernelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """|x - oracle| <= atol + rtol |oracle| for the output; the LSE and relative norm have bounds of their own."""

    atol: float
    rtol: float
    lse_atol: float
    relative_norm: float
    """Bound on ||x - oracle|| / ||oracle||, which catches errors of small values."""
    gradient_norm: float
    """The relative norm for gradients of q, k and v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One tensor's tolerance: |x - oracle| <= atol + rtol |oracle|, and ||x - oracle|| <= relative_norm ||oracle|| unless that is None."""

    atol: float
    rtol: float = 0.0
    relative_norm: float | None = None


TOLERANCES: dict[str, Tolerance] = {
    # bf16: unit roundoff 2^-8 = 0.0039
    "bf16": Tolerance(atol=2e-2, rtol=2e-2, lse_atol=2e-3, relative_norm=1e-2, gradient_norm=1e-2),
    # fp16: unit roundoff 2^-11 = 0.00049
    "fp16": Tolerance(atol=4e-3, rtol=4e-3, lse_atol=2e-3, relative_norm=2e-3, gradient_norm=2e-3),
    # IEEE fp32: sums of up to N terms in another order, and exp2 at 2 ulp
    "fp32": Tolerance(atol=2e-5, rtol=2e-5, lse_atol=2e-5, relative_norm=1e-5, gradient_norm=1e-5),
    # e4m3: unit roundoff 2^-4 = 0.0625, of the weights alone
    "fp8": Tolerance(atol=1e-1, rtol=1e-1, lse_atol=5e-3, relative_norm=6e-2, gradient_norm=6e-2),
    # TF32 products: unit roundoff 2^-11, both operands
    "tf32": Tolerance(atol=1e-2, rtol=1e-2, lse_atol=5e-3, relative_norm=3e-3, gradient_norm=3e-3),
}

LSE_RTOL = 5e-7
"""Relative tolerance of the LSE: eight roundings of float32 (unit roundoff 2^-24 = 6e-8), of the scale, its products and log 2."""


def tolerance(spec: KernelSpec) -> Tolerance:
    """The tolerance that holds for kernels of this spec."""
    return TOLERANCES["tf32" if spec.tf32 else spec.dtype]
