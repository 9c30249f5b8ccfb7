"""Masks and scores as code that tests of the interpreter and of a GPU share, and their float64 oracle: the function itself."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Functions = tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]


@dataclass(frozen=True)
class Case:
    """Functions over captured tensors, which `captured` makes from a generator, and sizes: two heads to a key head, a key head a batch."""

    functions: Callable[..., Functions]
    captured: Callable[[torch.Generator], list[Tensor]] = lambda generator: []
    n_q: int = 50
    n_kv: int = 70
    block_mask: bool = True
    heads: int = 4


def oracle(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask_mod: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE in the type of the inputs, by calling the functions on all pairs at once."""
    batch, heads, n_q, d = query.shape
    n_kv = key.shape[2]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    b, h, q, k = (torch.arange(size, device=query.device) for size in (batch, heads, n_q, n_kv))
    places = b[:, None, None, None], h[None, :, None, None], q[None, None, :, None], k[None, None, None, :]
    scores = query @ key.mT / math.sqrt(d)
    if score_mod is not None:
        scores = score_mod(scores, *places).to(query.dtype).expand(scores.shape)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*places), scores, -math.inf)
    lse = scores.logsumexp(-1)
    probs = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return probs @ value, lse


def _causal(*_: Tensor) -> Functions:
    return None, lambda b, h, q, k: q >= k


def _window(*_: Tensor) -> Functions:
    return None, lambda b, h, q, k: (q >= k) & (q - k <= 11)


def _document(document: Tensor) -> Functions:
    return None, lambda b, h, q, k: (document[b, q] == document[b, k]) & (q >= k)


def _padding(valid: Tensor, order: Tensor) -> Functions:
    """Keys by their place in an order, so that a load is of a loaded place."""
    return None, lambda b, h, q, k: valid[b, order[k]] & (q >= k)


def _prefix(prefix: Tensor) -> Functions:
    return None, lambda b, h, q, k: (k < prefix[b]) | (q >= k)


def _dilated(*_: Tensor) -> Functions:
    return None, lambda b, h, q, k: ((q - k).abs() <= 24) & ((q - k) % 3 == 0)


def _global_window(*_: Tensor) -> Functions:
    return None, lambda b, h, q, k: (k < 4) | (q < 3) | ((q - k).abs() <= 5)


def _heads(*_: Tensor) -> Functions:
    return None, lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, (q // 8) == (k // 8))


def _unseen(*_: Tensor) -> Functions:
    return None, lambda b, h, q, k: (q >= 20) & (k < 33) & (b + h + q > k)


def _softcap(*_: Tensor) -> Functions:
    return lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5), None


def _alibi(slopes: Tensor) -> Functions:
    return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), None


def _signed_alibi(slopes: Tensor) -> Functions:
    return lambda s, b, h, q, k: s + slopes[h] * (k - q), lambda b, h, q, k: q >= k


def _relative(table: Tensor) -> Functions:
    return lambda s, b, h, q, k: s + table[h, (q - k).clamp(-7, 7) + 7], None


def _buckets(table: Tensor) -> Functions:
    """T5's: exact for near keys, logarithmic for far ones, other numbers ahead of the query."""

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        far = (q - k).abs()
        bucket = torch.where(far < 4, far, (4 + (far.float().clamp(min=1) / 4).log() * 1.4).to(torch.int32).clamp(max=7))
        return s + table[bucket + torch.where(k > q, 8, 0), h]

    return score, None


def _shifted(table: Tensor, places: Tensor) -> Functions:
    return lambda s, b, h, q, k: s * table[b, places[2 * q + 140 - k - k]] + table[b, q - k] * table[b, -k + q], None


def _narrowed(table: Tensor) -> Functions:
    """Places that are negative in int8, and so count from the end."""
    return lambda s, b, h, q, k: s + table[(q + 100).to(torch.int8).int()], None


def _pairs(table: Tensor, kind: Tensor) -> Functions:
    """Tables by the kinds of query and key, and by the distance of their rows and columns on a canvas."""

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + table[kind[q], kind[k]] + table[q // 12 - k // 12, (q % 12 - k % 12).abs()]

    return score, lambda b, h, q, k: q + 30 >= k


def _by_score(table: Tensor) -> Functions:
    return lambda s, b, h, q, k: s + table[(s * 3.4 + 3.5).to(torch.int32).clamp(0, 7)] * table[(q - k + h) % 8], None


def _masked_by(edge: Tensor, table: Tensor) -> Functions:
    """A captured tensor that asks for a gradient, which a mask alone reads."""
    return lambda s, b, h, q, k: s * table[h], lambda b, h, q, k: q + edge[h] * 9 >= k


def _bias(bias: Tensor) -> Functions:
    return lambda s, b, h, q, k: s + bias[h, q, k], lambda b, h, q, k: q + 20 >= k


def _gated(gate: Tensor, rows: Tensor, columns: Tensor, temperature: Tensor) -> Functions:
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(q >= k, s * torch.sigmoid(gate[h]) + rows[b, q] * columns[k], s / temperature)

    return score, None


def _hidden_by_score(*_: Tensor) -> Functions:
    return lambda s, b, h, q, k: torch.where((q + k) % 2 == 0, s, -math.inf), lambda b, h, q, k: q >= k


def _constants(table: Tensor) -> Functions:
    # Each learned value without the gradient of one of its two uses, and steps as their inputs' gradients.
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            amplitude = torch.sin(s) + table[h, 1]
        stepped = s + (torch.floor(s) - s).detach()
        return stepped + amplitude * s + table.detach()[h, 0] * table[h, 1] - table[h, 2].detach() * table[h, 0] * s

    return score, None


def _root(*_: Tensor) -> Functions:
    # Its derivative is NaN at 0, the score of what lies past the ends.
    return lambda s, b, h, q, k: 2 * (s * s).sqrt(), None


def _far_below(*_: Tensor) -> Functions:
    # So far below 0, the score of keys past the end, that the exponential of 0 less the LSE is infinite; the mask sees those keys.
    return lambda s, b, h, q, k: torch.where(s == 0, s, s - 100.0), lambda b, h, q, k: q + 30 >= k


def _numbers(*sizes: int, trained: bool = True, scale: float = 1.0) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: (torch.randn(sizes, generator=generator) * scale).requires_grad_(trained)


def _of(*makers: Callable[[torch.Generator], Tensor]) -> Callable[[torch.Generator], list[Tensor]]:
    return lambda generator: [make(generator) for make in makers]


def _documents(generator: torch.Generator) -> list[Tensor]:
    return [torch.randint(0, 4, (2, 70), generator=generator, dtype=torch.int32).sort(-1).values]


class Straight(torch.autograd.Function):
    """Rounded, with the derivative of what isn't, and more of it for large scores."""

    generate_vmap_rule = True

    @staticmethod
    def forward(s: Tensor) -> Tensor:  # pyright: ignore
        return torch.round(s * 8) / 8

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # pyright: ignore
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        [s] = ctx.saved_tensors
        return grad * torch.where(s.abs() > 0.5, 3.0, 1.0)


def _straight(table: Tensor) -> Functions:
    return lambda s, b, h, q, k: Straight.apply(s * table[h]) - 0.01 * k, None


CASES: dict[str, Case] = {
    "causal": Case(_causal),
    "window": Case(_window, n_q=70, heads=2),
    "document": Case(_document, _documents),
    "padding": Case(_padding, lambda generator: [torch.rand(2, 70, generator=generator) < 0.7, torch.randperm(70, generator=generator)]),
    "prefix": Case(_prefix, lambda generator: [torch.tensor([9, 31])]),
    "dilated": Case(_dilated, heads=2),
    "global_window": Case(_global_window, block_mask=False, heads=2),
    "heads": Case(_heads, heads=2),
    "unseen": Case(_unseen),
    "softcap": Case(_softcap, heads=2),
    "alibi": Case(_alibi, _of(_numbers(4, trained=False, scale=0.1)), heads=2),
    "signed_alibi": Case(_signed_alibi, _of(_numbers(4, scale=0.1)), heads=2),
    "relative": Case(_relative, _of(_numbers(4, 15)), heads=2),
    "buckets": Case(_buckets, _of(_numbers(16, 4)), heads=2),
    "shifted": Case(_shifted, lambda generator: [*_of(_numbers(2, 140))(generator), torch.randint(-140, 140, (300,), generator=generator)]),
    "narrowed": Case(_narrowed, _of(_numbers(160)), heads=2),
    "pairs": Case(_pairs, lambda generator: [*_of(_numbers(13, 13))(generator), torch.randint(0, 12, (70,), generator=generator)], heads=2),
    "by_score": Case(_by_score, _of(_numbers(8)), heads=2),
    "masked_by": Case(_masked_by, _of(_numbers(4), _numbers(4)), heads=2),
    "bias": Case(_bias, _of(_numbers(4, 50, 70)), heads=2),
    "gated": Case(_gated, _of(_numbers(4), _numbers(2, 50), _numbers(70), lambda generator: torch.tensor(1.7).requires_grad_())),
    "hidden_by_score": Case(_hidden_by_score, heads=2),
    "constants": Case(_constants, _of(_numbers(4, 3, scale=0.3)), heads=2),
    "root": Case(_root, heads=2),
    "far_below": Case(_far_below, heads=2),
    "straight": Case(_straight, _of(_numbers(4, trained=False)), heads=2),
}


def _scores(**functions: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    return functions


OPERATIONS = _scores(
    arithmetic=lambda s, b, h, q, k: (s * 2 - 1) / 3 + 1 / (s * s + 1) - (-s).abs() + (2 - s) + 0.5 * torch.sub(s, q, alpha=2),
    divisions=lambda s, b, h, q, k: (
        s + (q - k) // 3 + (q - k) % 5 + (q - k) // -4 + (q - k) % -3 + torch.div(q - k, 3, rounding_mode="trunc")
    ),
    quotients=lambda s, b, h, q, k: s + (q - k) / 7 + q / (k + 1) + torch.div(s, 0.3, rounding_mode="floor") + torch.fmod(q - k, 4),
    halves=lambda s, b, h, q, k: torch.where(q // 4 == k // 4, s, s - 1.25) * torch.where(h > b, 1.5, 0.5),
    compared=lambda s, b, h, q, k: torch.where((s > q - k) & ~(s == 0) | (s <= -1.5) ^ (k != 3), s, 2 * s - h),
    logical=lambda s, b, h, q, k: torch.where(torch.logical_and(q > 3, torch.logical_not(k == 2)) | torch.logical_or(q < b, h), s, -s),
    functions=lambda s, b, h, q, k: torch.exp(-s.abs()) + torch.log(s.abs() + 1) + torch.sqrt(s * s + 1) + torch.rsqrt(s * s + 1),
    waves=lambda s, b, h, q, k: torch.sin(s) + torch.cos(s * k) + torch.erf(s) + torch.exp2(-s * s) + torch.log2(s.abs() + 2),
    squashed=lambda s, b, h, q, k: torch.tanh(s) + torch.sigmoid(s) + torch.relu(s) + torch.nn.functional.silu(s),
    clamped=lambda s, b, h, q, k: s.clamp(-1, 0.5) + s.clamp(min=0) + s.clamp(max=1) + (q - k).clamp(-3, 4) + torch.maximum(s, s * s),
    powers=lambda s, b, h, q, k: s**2 + s**3 + (s * s + 1) ** 0.5 + (s * s + 1) ** -2 + 2.0 ** (-h - 1) + torch.pow(q - k, 2) / 9,
    bits=lambda s, b, h, q, k: s + ((q & 3) | (k << 1)) + ((q ^ k) >> 1) + (~q).abs(),
    converted=lambda s, b, h, q, k: s + q.float() * (q > k) + (s > 0).int() + (k * 1.5).to(torch.int64) + s.to(torch.float16).float() * 0,
    rounded=lambda s, b, h, q, k: s + torch.floor(s * 3) + torch.ceil(s * 2) + torch.sign(s) + torch.minimum(q, k) + torch.square(s),
    hidden=lambda s, b, h, q, k: torch.where(torch.isinf(s) | torch.isnan(s) | (q < k), -float("inf"), s),
    constant=lambda s, b, h, q, k: torch.zeros_like(s) + h,
    whole=lambda s, b, h, q, k: (q - k) % 7,
    reversed=lambda s, b, h, q, k: torch.rsub(s, 1.5) + torch.sub(s, 0.5, alpha=3) + torch.add(s, q, alpha=2),
    logarithms=lambda s, b, h, q, k: (
        torch.log1p(0.1 * s * s)
        + torch.log1p(1e-4 * (k + 1))
        + torch.expm1(-s.abs())
        + torch.log10(s.abs() + 1)
        + torch.special.entr(k + 1.0)
    ),
    hyperbolic=lambda s, b, h, q, k: (
        torch.sinh(s / 3) + torch.cosh(s / 3) + torch.asinh(s * k) + torch.acosh(2 + s * s) + torch.atanh(s / 99)
    ),
    angles=lambda s, b, h, q, k: (
        torch.atan(s) + torch.atan(s * 40) + torch.asin(s / 99) + torch.acos(s / 99) + torch.atan2(s, q - 4.0) + torch.tan(s / 99)
    ),
    parts=lambda s, b, h, q, k: (
        torch.trunc(s * 3) + torch.frac(s) + torch.round(s * 2) + torch.round(s, decimals=1) + torch.where(torch.signbit(s), s, 2 * s)
    ),
    of_two=lambda s, b, h, q, k: (
        torch.hypot(s, k + 1.0) + torch.copysign(s, k - 7.5) + torch.fmax(s, s / 2) + torch.fmin(s, s * h) + torch.ldexp(s, h)
    ),
    added_logarithms=lambda s, b, h, q, k: torch.logaddexp(s, 0.1 * k) + torch.logaddexp2(s, s / 2) + torch.xlogy(k / 9, s.abs() + 1),
    any_powers=lambda s, b, h, q, k: (s.abs() + 1) ** 1.7 + (s.abs() + 0.5) ** (0.1 * k) + torch.pow(k + 1.0, -0.5),
    activations=lambda s, b, h, q, k: (
        functional.logsigmoid(s) + functional.mish(s) + functional.elu(s) + functional.selu(s) + functional.celu(s) + functional.softplus(s)
    ),
    shrunk=lambda s, b, h, q, k: (
        functional.softshrink(s)
        + functional.hardshrink(s)
        + functional.softsign(s)
        + functional.tanhshrink(s)
        + functional.threshold(s, 0.1, 2.0)
    ),
    probabilities=lambda s, b, h, q, k: torch.erfc(s) + torch.logit(torch.sigmoid(s), eps=1e-3) + torch.special.ndtr(s) + torch.sinc(s / 9),
    special=lambda s, b, h, q, k: (
        s * torch.sinc(0.25 * (q - k))
        + torch.sinc(s)
        + functional.relu6(s + q - k)
        + functional.hardtanh(1.0 * (k - q)) * s
        + functional.hardsigmoid(s + (q - k))
        + functional.hardswish(s)
        + (0.1 * s.abs() + 1) ** 9
        + torch.xlogy(s.abs(), 2.0)
        + torch.atan2(s, 2.0 + 0 * s)
        + (s.abs() + 0.1) ** 0
        + torch.floor(q - k)
        + torch.hypot(s, torch.zeros_like(s) + 3.0)
    ),
    finite=lambda s, b, h, q, k: torch.nan_to_num(s / (q - 3), posinf=2.0, neginf=-2.0) + torch.where(torch.isposinf(1.0 / k), s, 0.0),
)
"""Scores that together use every operation that kernels have."""

_PLACES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda q, k: q - k, lambda q, k: (k - q).clamp(-7, 7), lambda q, k: (q - k).abs(), lambda q, k: (q - k) // 3, lambda q, k: (q - k) % 5,
    lambda q, k: torch.where(q >= k, q - k, 0), lambda q, k: 2 * q - k - k, lambda q, k: torch.where(q * 2 + 3 >= k * 2, k - q, 4),
    lambda q, k: q // 4 - k // 4, lambda q, k: q, lambda q, k: k, lambda q, k: torch.minimum(q, k), lambda q, k: (q ^ k) & 15,
]  # fmt: skip
_TERMS: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda s, x, y: s + x,
    lambda s, x, y: s * (1 + 0.3 * torch.tanh(x)) + 0.1 * x * y,
    lambda s, x, y: torch.where(y > 0, s * torch.sigmoid(x), s + x),
    lambda s, x, y: s + x * y,
]
_MASKS: list[Any] = [None, lambda b, h, q, k: q >= k, lambda b, h, q, k: (q >= k) | (k < 5), lambda b, h, q, k: (q + k) % 3 > 0]


def random_case(seed: int) -> Case:
    """Some terms of learned tables, read at places of many kinds or at places from a table, under one of some masks."""
    drawn = random.Random(seed)
    count = drawn.randrange(1, 4)
    terms = [(drawn.choice(_TERMS), *drawn.choices(range(count), k=2), *drawn.choices(_PLACES, k=2)) for _ in range(drawn.randrange(1, 5))]
    nested, mask = drawn.random() < 0.3, drawn.choice(_MASKS)

    def functions(*captured: Tensor) -> Functions:
        *tables, places = captured

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            for term, first, second, here, there in terms:
                place = places[here(q, k)] if nested else here(q, k)
                s = term(s, tables[first][h, place + 90], tables[second][h, there(q, k) + 80])
            return s

        return score, mask

    def captured(generator: torch.Generator) -> list[Tensor]:
        tables = [_numbers(4, 250, trained=drawn.random() < 0.8, scale=0.5)(generator) for _ in range(count)]
        return [*tables, torch.randint(-80, 80, (250,), generator=generator)]

    return Case(functions, captured, n_q=drawn.randrange(1, 50), n_kv=drawn.randrange(1, 50))
