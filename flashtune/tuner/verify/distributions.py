"""Distributions of scores as models produce them, unlike normal queries and keys: sinks, needles, peaked rows, drifting keys, rows far from
zero; and of scores near the largest that float32 holds.

A distribution changes a problem's queries and keys in place, in their first dimensions alone: a query has a number there, some keys have
one too, and their product raises a score by so many nats (natural units of a score, after scaling). All other keys have zeros there, so
that no other score changes but by the former contents of those dimensions. Huge scores take all dimensions, with so few digits that any
order of their products' sum is exact: a softmax of them picks the keys that share the largest.
"""

import math
import re
from collections.abc import Callable

import torch

from flashtune.core.system.errors import InputError
from flashtune.tuner.verify.inputs import Inputs, run_forward

NEEDLES = 8
"""Keys of a head of which each row has one raised; each takes a dimension."""

MISLED_NATS = 100.0
"""Raise of a mispredicted row's first keys, in nats: more than float32 can hold relative to the others (88)."""


def _product(inputs: Inputs, nats: float) -> float:
    """Number, in a query and a key alike, whose square raises a score by `nats`."""
    return math.sqrt(abs(nats) / inputs.keywords["scale"])


def _lone(inputs: Inputs, count: int) -> None:
    """Zero the first `count` dimensions of queries and keys."""
    inputs.q[..., :count] = 0
    inputs.k[..., :count] = 0


def _random(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Keep standard normal queries and keys."""


def _sink(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Raise the first key's score by `amount` nats in every row."""
    _lone(inputs, 1)
    inputs.q[..., 0] = inputs.k[..., 0, 0] = _product(inputs, amount)


def _needle(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Raise, in each row, the score of one of NEEDLES randomly placed keys by `amount` nats."""
    # Each needle takes a dimension of its own.
    count = min(NEEDLES, inputs.problem.n_kv, inputs.problem.d)
    _lone(inputs, count)
    number = _product(inputs, amount)
    for dimension, key in enumerate(torch.randperm(inputs.problem.n_kv, generator=generator)[:count].tolist()):
        inputs.k[..., key, dimension] = number
    chosen = torch.randint(0, count, (inputs.problem.n_q,), generator=generator)
    inputs.q[..., torch.arange(inputs.problem.n_q), chosen] = number


def _deviation(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Scale scores to a standard deviation of `amount`: few keys take most of a row."""
    inputs.q.copy_((inputs.q.float() * amount).to(inputs.q.dtype))


def _drift(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Raise scores by `amount` nats from the first key to the last; a negative amount lowers them."""
    _lone(inputs, 1)
    number = _product(inputs, amount)
    inputs.q[..., 0] = math.copysign(number, amount)
    inputs.k[..., 0] = torch.linspace(0.0, number, inputs.problem.n_kv, device=inputs.k.device).to(inputs.k.dtype)


def _shifted(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Raise all scores of a row by `amount` nats, which doesn't change a softmax."""
    _lone(inputs, 1)
    inputs.k[..., 0] = _product(inputs, amount)
    inputs.q[..., 0] = math.copysign(_product(inputs, amount), amount)


def _misled(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Raise the first sixteenth of the keys by MISLED_NATS in `amount` percent of the rows, so that other keys predict nothing about
    them."""
    _lone(inputs, 1)
    number = _product(inputs, MISLED_NATS)
    inputs.k[..., : max(1, inputs.problem.n_kv // 16), 0] = number
    rows = torch.rand(inputs.problem.n_q, generator=generator) < amount / 100
    inputs.q[..., 0] = (rows * number).to(inputs.q.device, inputs.q.dtype)


def _enlarge(inputs: Inputs, amount: float, levels: torch.Tensor) -> None:
    """Give key j scores of levels[j] times 2^amount to 2^(amount + 2) in units of log 2, or 2^12 to 2^14 in every third row, or 0."""
    p, units = inputs.problem, inputs.keywords["scale"] / math.log(2) * inputs.problem.d
    raised = 2.0 ** round((amount - math.log2(units)) / 2)
    rows = torch.arange(p.n_q)
    # Of powers of two the product with a scale is exact in every kernel, and of a single number it may be near a float32.
    digits = (65 + 2 * (rows // 3 % 31)) / 64
    inputs.q.copy_((raised * digits * torch.tensor([1.0, 2.0 ** (12 - amount), 0.0])[rows % 3])[:, None].to(inputs.q.dtype))
    inputs.k.copy_((raised * levels)[:, None].to(inputs.k.dtype))


def _huge(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Raise keys to 1, 1.5 or 2 times 2^|amount|; lower them for a negative amount."""
    levels = 1 + torch.randint(0, 3, (inputs.problem.n_kv,), generator=generator) / 2
    _enlarge(inputs, abs(amount), math.copysign(1.0, amount) * levels)


def _steps(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Raise keys, first to last, in five equal steps from -2 to 2 times 2^|amount|; lower them for a negative amount."""
    steps = torch.arange(inputs.problem.n_kv) * 5 // inputs.problem.n_kv - 2
    _enlarge(inputs, abs(amount), math.copysign(1.0, amount) * steps)


_KINDS: dict[str, Callable[[Inputs, float, torch.Generator], None]] = {
    "random": _random,
    "sink": _sink,
    "needle": _needle,
    "deviation": _deviation,
    "drift": _drift,
    "shifted": _shifted,
    "misled": _misled,
    "huge": _huge,
    "steps": _steps,
}

PRESENT = (
    "random",
    *(f"{kind}+{nats}" for kind in ("sink", "needle") for nats in (2, 5, 8, 11, 14, 30, 40, 60)),
    *(f"deviation-{deviation}" for deviation in (3, 8, 10)),
    "drift+14",
    "drift-14",
    "drift+60",
    "drift-60",
    "shifted+120",
    "shifted-120",
    "misled-1%",
    "misled-10%",
    "misled-100%",
)
"""Distributions that kernels are checked and timed on."""

HUGE = ("huge+29", "huge-29", "steps+29", "steps-29")
"""Distributions of huge scores, for every type, that kernels are checked on beside them."""

HUGE_OF_BF16 = ("huge+40", "huge-40", "steps+40", "steps-40", "huge+118", "huge-118", "steps+118", "steps-118")
"""Distributions of scores that bf16 makes beside these: float16's range ends before."""


def redistribute(inputs: Inputs, name: str, *, seed: int = 0) -> None:
    """Change normal inputs to the distribution `name`: random, sink+X, needle+X (X nats), deviation-S, drift+X, drift-X, shifted+X,
    shifted-X, misled-P% (P percent of the rows), huge+X, huge-X, steps+X or steps-X (2^X); raises InputError for any other."""
    kind, sign, amount = (re.fullmatch(r"([a-z]+)(?:([+-])(\d+(?:\.\d+)?)%?)?", name) or re.fullmatch("()()()", "")).groups()  # type: ignore[union-attr]
    if kind not in _KINDS or (amount is None) != (kind == "random"):
        raise InputError(f"no distribution of scores is called {name!r}: take one of {', '.join(PRESENT)}, or another number in its place")
    signed = -1.0 if sign == "-" and kind in ("drift", "shifted", "huge", "steps") else 1.0
    _KINDS[kind](inputs, signed * float(amount or 0), torch.Generator().manual_seed(seed))
    run_forward(inputs)
