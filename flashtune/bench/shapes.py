"""The shapes that `flashtune referee` judges by default: some 200 problems, those of one kernel spec one after the other.

Sizes are those of models and of reports about libraries that were wrong: few key heads, lengths that no tile divides, one query.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from flashtune.core.problems.lengths import Law, Lengths
from flashtune.core.problems.problem import DIRECTIONS, Features, Problem

WIDTH, TOKENS = 2048, 16384
"""H * D and B * N of a shape."""

CAUSAL = Features(causal=True)
BOTH = (Features(), CAUSAL)

FEATURES: tuple[Features, ...] = (
    Features(causal=True, window=(1024, 0)),
    Features(window=(256, 256)),
    Features(causal=True, softcap=True),
    Features(mask="bool"),
    Features(mask="bias"),
    Features(causal=True, alibi=True),
    Features(causal=True, sinks=True),
    Features(causal=True, window=(128, 0), sinks=True),
)
"""Features of a call beyond plain and causal attention."""

FUNCTIONS = (("mask", "prefix"), ("mask", "dilated"), ("score", "falling"))
"""Kinds and names of functions of flashtune.bench.shape_functions."""


def shapes() -> list[Problem]:
    """All of them; functions are traced, and known to this process from then on."""
    return [*_dense(), *_featured(), *_decoding(), *_packed(), *_with_functions()]


def _shape(n: int, d: int, features: Features, direction: Any = "fwd", **others: Any) -> Problem:
    """A problem of these sizes, with as many heads and batches as `WIDTH` and `TOKENS` say unless `others` do."""
    heads = others.pop("heads", max(1, WIDTH // d))
    sizes = {"batch": max(1, TOKENS // n), "heads": heads, "kv_heads": heads, "n_q": n, "n_kv": n, "d": d, "d_v": d, "dtype": "bf16"}
    return Problem(**sizes | others, features=features, direction=direction)


def _dense() -> Iterator[Problem]:
    """Plain and causal attention of all head sizes, with shared key heads, in fp16, and with values of another size."""
    for d, direction, features, n in product((64, 96, 128, 192, 256, 512), DIRECTIONS, BOTH, (1000, 1536, 4096)):
        yield _shape(n, d, features, direction)
    for d, direction, kv_heads, n in product((64, 128, 256), DIRECTIONS, (1, 4), (1000, 4096)):
        yield _shape(n, d, CAUSAL, direction, heads=16, kv_heads=kv_heads)
    for d, direction, features in product((64, 128), DIRECTIONS, BOTH):
        yield _shape(4096, d, features, direction, dtype="fp16")
    for direction, n in product(DIRECTIONS, (1000, 4096)):
        yield _shape(n, 192, CAUSAL, direction, d_v=128, heads=16)


def _featured() -> Iterator[Problem]:
    """Windows, soft caps, masks, biases and their gradients, ALiBi, sinks, and numbers of queries and keys that differ."""
    for features, d, direction in product(FEATURES, (64, 128), DIRECTIONS):
        yield _shape(1024 if features.mask != "none" else 4096, d, features, direction, batch=4)
    for d in (64, 128):
        yield _shape(1024, d, Features(mask="bias", dbias=True), "bwd", batch=4)
    later = Features(causal=True, alignment="bottom_right")
    for d, direction in product((64, 128), DIRECTIONS):
        yield _shape(4096, d, later, direction, n_q=512)
        yield _shape(77, d, Features(), direction, n_q=4096, batch=4)


def _decoding() -> Iterator[Problem]:
    """One query, or a few, and many keys."""
    for d, kv_heads, n in product((64, 128, 256), (1, 8), (2048, 16384)):
        yield _shape(n, d, Features(), batch=8, heads=32, kv_heads=kv_heads, n_q=1)
    for n in (2048, 16384):
        yield _shape(n, 128, Features(causal=True, alignment="bottom_right"), batch=8, heads=32, kv_heads=8, n_q=4)


def _packed() -> Iterator[Problem]:
    """Packed sequences of different lengths."""
    laws: tuple[Law, ...] = "lognormal", "one_long"
    for d, direction, causal, law in product((64, 128, 256), DIRECTIONS, (False, True), laws):
        lengths = Lengths.of(law, 16, 16 * 1024)
        yield _shape(1024, d, Features(causal=causal, packed=True), direction, lengths=lengths, kv_heads=max(1, WIDTH // d // 4))


def _with_functions() -> Iterator[Problem]:
    """Masks and scores as code."""
    # Imports torch.
    from flashtune.templates.mods.known import Named
    from flashtune.tuner.functions import with_functions

    path = Path(__file__).with_name("shape_functions.py")
    for (kind, name), d, direction in product(FUNCTIONS, (64, 128), DIRECTIONS):
        problem = _shape(4096, d, Features(), direction)
        yield with_functions(problem, Named(**{kind: f"{path}:{name}"}))
