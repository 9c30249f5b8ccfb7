"""Scores as models make them, which normal queries and keys don't: sinks, needles, peaked rows, drifting keys, rows far from zero.

A distribution changes a problem's queries and keys in place, in their first dimensions alone: a query has a number there, some keys have
one too, and their product raises a score by so many nats (natural units of a score, after scaling). All other keys have zeros there, so
that no other score changes but by what those dimensions gave it.
"""

import math
import re
from collections.abc import Callable

import torch

from flashtune.core.errors import InputError
from flashtune.tuner.verify.inputs import Inputs, run_forward

NEEDLES = 8
"""Keys of a head of which each row has one raised; as many dimensions are taken for them."""

MISLED_NATS = 100.0
"""By how much a misled row's first keys are raised: more than float32 can hold relative to the others (88)."""


def _product(inputs: Inputs, nats: float) -> float:
    """The number, in a query and a key alike, whose square raises a score by `nats`."""
    return math.sqrt(abs(nats) / inputs.keywords["scale"])


def _lone(inputs: Inputs, count: int) -> None:
    """Empties the first `count` dimensions of queries and keys."""
    inputs.q[..., :count] = 0
    inputs.k[..., :count] = 0


def _random(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Standard normal queries and keys, as they are."""


def _sink(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """The first key's score is `amount` higher in every row."""
    _lone(inputs, 1)
    inputs.q[..., 0] = inputs.k[..., 0, 0] = _product(inputs, amount)


def _needle(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """In each row the score of one of NEEDLES keys, which lie anywhere, is `amount` higher."""
    # No more than there are dimensions.
    count = min(NEEDLES, inputs.problem.n_kv, inputs.problem.d)
    _lone(inputs, count)
    number = _product(inputs, amount)
    for dimension, key in enumerate(torch.randperm(inputs.problem.n_kv, generator=generator)[:count].tolist()):
        inputs.k[..., key, dimension] = number
    chosen = torch.randint(0, count, (inputs.problem.n_q,), generator=generator)
    inputs.q[..., torch.arange(inputs.problem.n_q), chosen] = number


def _deviation(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Scores with a standard deviation of `amount` in place of 1: few keys take most of a row."""
    inputs.q.copy_((inputs.q.float() * amount).to(inputs.q.dtype))


def _drift(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """Scores rise by `amount` from the first key to the last; a negative amount has them fall."""
    _lone(inputs, 1)
    number = _product(inputs, amount)
    inputs.q[..., 0] = math.copysign(number, amount)
    inputs.k[..., 0] = torch.linspace(0.0, number, inputs.problem.n_kv, device=inputs.k.device).to(inputs.k.dtype)


def _shifted(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """All scores of a row are `amount` higher, which a softmax doesn't see."""
    _lone(inputs, 1)
    inputs.k[..., 0] = _product(inputs, amount)
    inputs.q[..., 0] = math.copysign(_product(inputs, amount), amount)


def _misled(inputs: Inputs, amount: float, generator: torch.Generator) -> None:
    """In `amount` percent of the rows the first sixteenth of the keys is MISLED_NATS higher: what was seen of other keys says nothing."""
    _lone(inputs, 1)
    number = _product(inputs, MISLED_NATS)
    inputs.k[..., : max(1, inputs.problem.n_kv // 16), 0] = number
    rows = torch.rand(inputs.problem.n_q, generator=generator) < amount / 100
    inputs.q[..., 0] = (rows * number).to(inputs.q.device, inputs.q.dtype)


_KINDS: dict[str, Callable[[Inputs, float, torch.Generator], None]] = {
    "random": _random,
    "sink": _sink,
    "needle": _needle,
    "deviation": _deviation,
    "drift": _drift,
    "shifted": _shifted,
    "misled": _misled,
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
"""The distributions that kernels are checked and timed on."""


def redistribute(inputs: Inputs, name: str, *, seed: int = 0) -> None:
    """Give normal inputs the distribution `name`: random, sink+X, needle+X (X nats), deviation-S, drift+X, drift-X, shifted+X,
    shifted-X or misled-P% (P percent of the rows); raises InputError for any other."""
    kind, sign, amount = (re.fullmatch(r"([a-z]+)(?:([+-])(\d+(?:\.\d+)?)%?)?", name) or re.fullmatch("()()()", "")).groups()  # type: ignore[union-attr]
    if kind not in _KINDS or (amount is None) != (kind == "random"):
        raise InputError(f"no distribution of scores is called {name!r}: take one of {', '.join(PRESENT)}, or another number in its place")
    signed = -1.0 if sign == "-" and kind in ("drift", "shifted") else 1.0
    _KINDS[kind](inputs, signed * float(amount or 0), torch.Generator().manual_seed(seed))
    run_forward(inputs)
