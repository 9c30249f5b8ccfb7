"""The operations that kernels have for a `score_mod` or `mask_mod`: each ATen operation as an expression of Triton."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

SAME = {
    aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.clone.default, aten.detach.default, aten.alias.default,
    aten.view.default, aten.expand.default,
}  # fmt: skip
"""Operations that leave a scalar as it is."""

FILLS: dict[Any, Callable[[list[Any]], Any]] = {
    aten.scalar_tensor.default: lambda given: given[0],
    aten.full.default: lambda given: given[1],
    aten.full_like.default: lambda given: given[1],
    aten.zeros.default: lambda given: 0,
    aten.ones.default: lambda given: 1,
    aten.zeros_like.default: lambda given: 0,
    aten.ones_like.default: lambda given: 1,
    aten.new_full.default: lambda given: given[2],
    aten.new_zeros.default: lambda given: 0,
    aten.new_ones.default: lambda given: 1,
    aten._efficientzerotensor.default: lambda given: 0,
    # What it holds is written before it is read.
    aten.empty_like.default: lambda given: 0,
    aten.fill.Scalar: lambda given: given[1],
}
"""Operations that make a number, with the number."""

COMPARISONS = {
    aten.eq: "({0} == {1})", aten.ne: "({0} != {1})", aten.lt: "({0} < {1})", aten.le: "({0} <= {1})", aten.gt: "({0} > {1})",
    aten.ge: "({0} >= {1})",
}  # fmt: skip
"""Comparisons, whose operands have their common type."""

_SIGN = "(({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype))"

ARITHMETIC = {
    aten.add: "({0} + {1})", aten.sub: "({0} - {1})", aten.rsub: "({1} - {0})", aten.mul: "({0} * {1})",
    aten.maximum: "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    aten.minimum: "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    aten.bitwise_and: "({0} & {1})", aten.bitwise_or: "({0} | {1})", aten.bitwise_xor: "({0} ^ {1})",
    aten.bitwise_left_shift: "({0} << {1})", aten.bitwise_right_shift: "({0} >> {1})", aten.__lshift__: "({0} << {1})",
    aten.__rshift__: "({0} >> {1})", aten.neg: "(-{0})", aten.abs: "tl.abs({0})",
    aten.exp: "tl.exp({0})", aten.exp2: "tl.exp2({0})", aten.log: "tl.log({0})", aten.log2: "tl.log2({0})", aten.sqrt: "tl.sqrt_rn({0})",
    aten.rsqrt: "tl.rsqrt({0})", aten.sin: "tl.sin({0})", aten.cos: "tl.cos({0})", aten.erf: "tl.erf({0})", aten.floor: "tl.floor({0})",
    aten.ceil: "tl.ceil({0})", aten.tanh: "mod_tanh({0})", aten.sigmoid: "(1.0 / (1.0 + tl.exp(-{0})))",
    aten.reciprocal: "(1.0 / {0})", aten.relu: "tl.where({0} < 0.0, 0.0, {0})", aten.square: "({0} * {0})",
    aten.bitwise_not: "(~{0})", aten.sign: _SIGN, aten.sgn: _SIGN,
    aten.log10: "(tl.log2({0}) * 0.30103)", aten.log1p: "mod_log1p({0})", aten.expm1: "mod_expm1({0})", aten.erfc: "mod_erfc({0})",
    aten.tan: "(tl.sin({0}) / tl.cos({0}))", aten.asin: "mod_atan({0} / tl.sqrt_rn((1.0 - {0}) * (1.0 + {0})))",
    aten.acos: "(2.0 * mod_atan(tl.sqrt_rn((1.0 - {0}) / (1.0 + {0}))))", aten.atan: "mod_atan({0})", aten.atan2: "mod_atan2({0}, {1})",
    aten.sinh: "mod_sinh({0})", aten.cosh: "mod_cosh({0})", aten.asinh: "mod_asinh({0})",
    aten.acosh: "mod_acosh({0})", aten.atanh: "mod_atanh({0})", aten.trunc: "mod_trunc({0})",
    aten.frac: "({0} - mod_trunc({0}))", aten.copysign: "mod_copysign({0}, {1})", aten.hypot: "mod_hypot({0}, {1})",
    aten.logaddexp: "mod_logaddexp({0}, {1})", aten.logaddexp2: "mod_logaddexp2({0}, {1})",
    aten.xlogy: "mod_xlogy({0}, {1})", aten.special_xlog1py: "mod_xlog1py({0}, {1})", aten.sinc: "mod_sinc({0})",
    aten.hardsigmoid: "mod_hardsigmoid({0})", aten.hardswish: "({0} * mod_hardsigmoid({0}))",
    aten.heaviside: "tl.where({0} == 0, {1}, ({0} > 0).to({0}.dtype))", aten.fmax: "mod_fmax({0}, {1})",
    aten.fmin: "mod_fmin({0}, {1})",
}  # fmt: skip
"""Operations whose operands have the result's type."""

LOGICAL = {
    aten.logical_and: "({0} & {1})", aten.logical_or: "({0} | {1})", aten.logical_xor: "({0} ^ {1})", aten.logical_not: "(~{0})",
}  # fmt: skip
"""Operations on truth values."""

OTHERS = (
    aten.where, aten.masked_fill, aten.div, aten.floor_divide, aten.remainder, aten.fmod, aten.pow, aten.clamp, aten.clamp_min,
    aten.clamp_max, aten._to_copy, aten.isnan, aten.isinf, aten.signbit, aten.round, aten.hardtanh,
)  # fmt: skip
"""Operations with rules of their own (flashtune.templates.mods.writer)."""


def _overloads(*packets: Any) -> set[Any]:
    return {getattr(packet, name) for packet in packets for name in packet.overloads()}


POINTWISE: set[Any] = _overloads(*COMPARISONS, *ARITHMETIC, *LOGICAL, *OTHERS)
"""Every operation that kernels have, in all its overloads."""

DECOMPOSED = (
    aten.tanh_backward, aten.sigmoid_backward, aten.threshold_backward, aten.silu, aten.silu_backward, aten.gelu, aten.gelu_backward,
    aten.hardtanh_backward, aten.softplus, aten.softplus_backward, aten.leaky_relu, aten.leaky_relu_backward,
    aten.elu, aten.elu_backward, aten.lerp, aten.addcmul, aten.addcdiv, aten.hardsigmoid_backward,
    aten.hardswish_backward, aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.mish, aten.mish_backward, aten.celu,
    aten.softshrink, aten.softshrink_backward, aten.hardshrink, aten.hardshrink_backward, aten.logit, aten.logit_backward,
    aten.deg2rad, aten.rad2deg, aten.special_entr, aten.special_log_ndtr, aten.threshold, aten.nan_to_num, aten.isposinf, aten.isneginf,
    aten.ldexp,
)  # fmt: skip
"""Operations that are traced as others."""
