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
}  # fmt: skip
"""Operations whose operands have the result's type."""

LOGICAL = {
    aten.logical_and: "({0} & {1})", aten.logical_or: "({0} | {1})", aten.logical_xor: "({0} ^ {1})", aten.logical_not: "(~{0})",
}  # fmt: skip
"""Operations on truth values."""

OTHERS = (
    aten.where, aten.masked_fill, aten.div, aten.floor_divide, aten.remainder, aten.fmod, aten.pow, aten.clamp, aten.clamp_min,
    aten.clamp_max, aten._to_copy, aten.isnan, aten.isinf,
)  # fmt: skip
"""Operations with rules of their own (flashtune.templates.mods.writer)."""


def _overloads(*packets: Any) -> set[Any]:
    return {getattr(packet, name) for packet in packets for name in packet.overloads()}


POINTWISE: set[Any] = _overloads(*COMPARISONS, *ARITHMETIC, *LOGICAL, *OTHERS)
"""Every operation that kernels have, in all its overloads."""

DECOMPOSED = (
    aten.tanh_backward, aten.sigmoid_backward, aten.threshold_backward, aten.silu, aten.silu_backward, aten.gelu, aten.gelu_backward,
    aten.hardtanh, aten.hardtanh_backward, aten.softplus, aten.softplus_backward, aten.leaky_relu, aten.leaky_relu_backward,
    aten.hardsigmoid, aten.hardswish, aten.elu, aten.elu_backward, aten.lerp, aten.addcmul, aten.addcdiv,
)  # fmt: skip
"""Operations that are traced as others."""
