"""Functions of Triton that expressions of traced functions call: operations that Triton has no function of its own for.

Each is accurate to some 1e-6 of its result; series take over where a difference of two close numbers would lose digits.
"""

import re
from collections.abc import Iterable

ALWAYS = """@triton.jit
def mod_tanh(x):
    square = x * x
    series = x * (1.0 + square * (-0.33333334 + square * (0.13333334 - square * 0.05396825)))
    rational = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.25, series, rational)


@triton.jit
def mod_floor_divide(x, y):
    whole = x // y
    return tl.where((whole * y != x) & ((x < 0) != (y < 0)), whole - 1, whole)


@triton.jit
def mod_remainder(x, y):
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)"""
"""Those of every kernel with functions: machine code is kept by a kernel's text."""

_LATER = """@triton.jit
def mod_log1p(x):
    ratio = x / (2.0 + x)
    square = ratio * ratio
    series = 2.0 * ratio * (1.0 + square * (0.33333334 + square * (0.2 + square * (0.14285715 + square * 0.11111111))))
    return tl.where(tl.abs(x) < 0.25, series, tl.log(1.0 + x))


@triton.jit
def mod_expm1(x):
    series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.008333334 + x * (0.0013888889 + x * 0.0001984127))))))
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)


@triton.jit
def mod_sinh(x):
    square = x * x
    series = x * (1.0 + square * (0.16666667 + square * (0.008333334 + square * 0.0001984127)))
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(0.5 * x) * (0.5 * tl.exp(0.5 * x)) - tl.exp(-0.5 * x) * (0.5 * tl.exp(-0.5 * x)))


@triton.jit
def mod_cosh(x):
    # By halves, since e^x overflows before cosh does.
    return tl.exp(0.5 * x) * (0.5 * tl.exp(0.5 * x)) + tl.exp(-0.5 * x) * (0.5 * tl.exp(-0.5 * x))


@triton.jit
def mod_asinh(x):
    size = tl.abs(x)
    near = mod_log1p(size + size * size / (1.0 + tl.sqrt_rn(1.0 + size * size)))
    found = tl.where(size < 1e8, near, tl.log(size) + 0.6931472)
    return tl.where(x < 0, -found, found)


@triton.jit
def mod_acosh(x):
    more = x - 1.0
    found = tl.where(x < 1e8, mod_log1p(more + tl.sqrt_rn(more * (2.0 + more))), tl.log(x) + 0.6931472)
    return tl.where(x < 1.0, float("nan"), found)


@triton.jit
def mod_atanh(x):
    size = tl.abs(x)
    found = 0.5 * mod_log1p(2.0 * size / (1.0 - size))
    return tl.where(x < 0, -found, found)


@triton.jit
def mod_atan(x):
    size = tl.abs(x)
    inverse = tl.where(size > 1.0, 1.0 / size, size)
    turned = tl.where(inverse > 0.41421357, (inverse - 1.0) / (inverse + 1.0), inverse)
    square = turned * turned
    series = 0.11111111 + square * (-0.09090909 + square * (0.07692308 - square * 0.06666667))
    series = turned * (1.0 + square * (-0.33333334 + square * (0.2 + square * (-0.14285715 + square * series))))
    found = tl.where(inverse > 0.41421357, series + 0.7853982, series)
    found = tl.where(size > 1.0, 1.5707964 - found, found)
    return tl.where(x < 0, -found, found)


@triton.jit
def mod_signbit(x):
    return tl.where(x == 0.0, 1.0 / x, x) < 0.0


@triton.jit
def mod_copysign(x, y):
    return tl.where(mod_signbit(y), -tl.abs(x), tl.abs(x))


@triton.jit
def mod_atan2(y, x):
    above, beside = tl.abs(y), tl.abs(x)
    ratio = tl.where(above == beside, tl.where(above == 0.0, 0.0, 1.0), above / beside)
    found = mod_atan(tl.where(above + beside != above + beside, above + beside, ratio))
    return mod_copysign(tl.where(mod_signbit(x), 3.1415927 - found, found), y)


@triton.jit
def mod_round(x):
    down = tl.floor(x)
    rest = x - down
    even = tl.where(down - 2.0 * tl.floor(down * 0.5) == 0.0, down, down + 1.0)
    return tl.where(rest > 0.5, down + 1.0, tl.where(rest == 0.5, even, down))


@triton.jit
def mod_trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def mod_erfc(x):
    # The rational Chebyshev approximation of Numerical Recipes (erfcc), with a relative error of 1.2e-7.
    part = 1.0 / (1.0 + 0.5 * tl.abs(x))
    series = -1.13520398 + part * (1.48851587 + part * (-0.82215223 + part * 0.17087277))
    series = 0.37409196 + part * (0.09678418 + part * (-0.18628806 + part * (0.27886807 + part * series)))
    found = part * tl.exp(-x * x - 1.26551223 + part * (1.00002368 + part * series))
    return tl.where(x < 0, 2.0 - found, found)


@triton.jit
def mod_hypot(x, y):
    large, small = tl.maximum(tl.abs(x), tl.abs(y)), tl.minimum(tl.abs(x), tl.abs(y))
    ratio = small / large
    found = tl.where(large == 0.0, large, large * tl.sqrt_rn(1.0 + ratio * ratio))
    found = tl.where(x + y != x + y, x + y, found)
    return tl.where(tl.abs(x) == float("inf"), float("inf"), tl.where(tl.abs(y) == float("inf"), float("inf"), found))


@triton.jit
def mod_fmax(x, y):
    return tl.where(x != x, y, tl.where(y != y, x, tl.where(x > y, x, y)))


@triton.jit
def mod_fmin(x, y):
    return tl.where(x != x, y, tl.where(y != y, x, tl.where(x < y, x, y)))


@triton.jit
def mod_xlogy(x, y):
    return tl.where(y != y, y, tl.where(x == 0.0, 0.0, x * tl.log(y)))


@triton.jit
def mod_xlog1py(x, y):
    return tl.where(y != y, y, tl.where(x == 0.0, 0.0, x * mod_log1p(y)))


@triton.jit
def mod_sinc(x):
    angle = 3.1415927 * x
    return tl.where(x == 0.0, 1.0, tl.sin(angle) / angle)


@triton.jit
def mod_hardsigmoid(x):
    below = tl.where(x > -3.0, (x + 3.0) * 0.16666667, 0.0)
    return tl.where(x != x, x, tl.where(x < 3.0, below, 1.0))


@triton.jit
def mod_logaddexp(x, y):
    most = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(x == y, most + 0.6931472, most + mod_log1p(tl.exp(-tl.abs(x - y))))


@triton.jit
def mod_logaddexp2(x, y):
    most = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(x == y, most + 1.0, most + 1.442695 * mod_log1p(tl.exp2(-tl.abs(x - y))))


@triton.jit
def mod_pow(x, y):
    far = tl.abs(x)
    size = tl.where(far == 1.0, tl.where(y == y, 1.0, y), tl.exp2(y * tl.log2(far)))
    # Numbers of 2^24 and more are even, infinite ones, too.
    even = tl.where(tl.abs(y) < 16777216.0, y - 2.0 * tl.floor(y * 0.5), 0.0) == 0.0
    between = tl.where(far == 0.0, size, tl.where(far == float("inf"), size, float("nan")))
    below = tl.where(tl.floor(y) == y, tl.where(even, size, -size), between)
    found = tl.where(mod_signbit(x), below, size)
    return tl.where(y == 0.0, 1.0, tl.where(x == 1.0, 1.0, found))"""

_TEXTS = {re.findall(r"def (\w+)", text)[0]: text for text in _LATER.split("\n\n\n")}


def helpers_of(functions: Iterable[str]) -> str:
    """Definitions of all functions that some expressions call, in order."""
    waiting, found = [*functions], set[str]()
    while waiting:
        called = {name for name in re.findall(r"\bmod_\w+", waiting.pop()) if name in _TEXTS} - found
        found |= called
        waiting += [_TEXTS[name] for name in called]
    return "\n\n\n".join([ALWAYS, *(text for name, text in _TEXTS.items() if name in found)])
