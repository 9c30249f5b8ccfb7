"""The one table of tolerances: how far a kernel may stray from the float64 oracle, and why.

A kernel with fp16/bf16 inputs rounds P to the input type before PV and O once at the end. With P <= 1 and the row's sum
applied in float32, the error of an output is a weighted mean of |v| times one unit roundoff, plus one rounding of O; for
inputs ~ N(0, 1) a few unit roundoffs cover it. TF32 rounds each operand to 10 bits of mantissa (like fp16).
"""

from dataclasses import dataclass

from flashtune.core.config import KernelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """|x - oracle| <= atol + rtol |oracle| for the output; the LSE and relative norm have bounds of their own."""

    atol: float
    rtol: float
    lse_atol: float
    relative_norm: float
    """Bound on ||x - oracle|| / ||oracle||, which a wrong but small value can't hide from."""


TOLERANCES: dict[str, Tolerance] = {
    # bf16: unit roundoff 2^-9 = 0.002
    "bf16": Tolerance(atol=2e-2, rtol=2e-2, lse_atol=2e-3, relative_norm=1e-2),
    # fp16: unit roundoff 2^-12 = 0.00024
    "fp16": Tolerance(atol=4e-3, rtol=4e-3, lse_atol=2e-3, relative_norm=2e-3),
    # IEEE fp32: sums of up to N terms in another order, and exp2 at 2 ulp
    "fp32": Tolerance(atol=2e-5, rtol=2e-5, lse_atol=2e-5, relative_norm=1e-5),
    # TF32 products: unit roundoff 2^-11, both operands
    "tf32": Tolerance(atol=1e-2, rtol=1e-2, lse_atol=5e-3, relative_norm=3e-3),
}


def tolerance(spec: KernelSpec) -> Tolerance:
    """The tolerance that holds for kernels of this spec."""
    return TOLERANCES["tf32" if spec.tf32 else spec.dtype]
