"""Lengths of packed sequences: drawn from a named law, and measured by their mean and their spread."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from flashtune.core.system.errors import InputError

Law = Literal["equal", "uniform", "lognormal", "one_long"]
"""Law of lengths: all equal; uniform up to twice the mean; exp of standard normal numbers; one with half of all tokens, others uniform."""

LAWS: tuple[Law, ...] = get_args(Law)

SEED = 0
"""Seed of drawn lengths: fixed, since a problem's work, and with it the bounds of plausible times, follows from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of packed sequences: their law, and the longest sequence of keys, in tokens. Their number and mean are the problem's."""

    law: Law
    longest: int

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise InputError(f"unknown law of lengths {self.law!r}: use one of {', '.join(LAWS)}")
        if self.longest < 1:
            raise InputError(f"the longest sequence has {self.longest} tokens: give at least 1")

    @classmethod
    def of(cls, law: Law, sequences: int, tokens: int) -> "Lengths":
        """Lengths of so many sequences with `tokens` tokens in all, whose longest is the one that the law draws."""
        weights = _weights(law, sequences)
        longest = tokens // 2 if law == "one_long" and sequences > 1 else round(tokens * max(weights) / sum(weights))
        return cls(law=law, longest=max(1, longest))

    @classmethod
    def met(cls, longest: int, sequences: int, tokens: int) -> "Lengths":
        """Lengths of a call, of which the host knows only a bound, by the law whose spread is nearest."""
        ratio = spread(longest, sequences, tokens)
        law: Law = "one_long" if 2 * longest >= tokens and ratio > 1 else {1: "equal", 2: "uniform"}.get(ratio, "lognormal")  # type: ignore[assignment]
        return cls(law=law, longest=max(1, longest))

    def drawn(self, sequences: int, tokens: int) -> tuple[int, ...]:
        """Lengths of at least 1 that add up to `tokens`, in the order in which they lie: the same at every call."""
        return _drawn(self.law, self.longest, sequences, tokens)


def spread(longest: int, sequences: int, tokens: int) -> int:
    """The longest length over the mean, to the nearest power of two, at least 1: a measure of imbalance from what a host knows."""
    # Half the bit length of the ratio's square is its rounded logarithm, without the cost of floating point at every call.
    return 1 << ((longest * sequences) ** 2 // max(1, tokens) ** 2).bit_length() // 2


def shared(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers of at least 1, in proportion to the weights, whose sum is `total`, or the number of weights where that is more."""
    rest, whole = max(0, total - len(weights)), sum(weights)
    cuts = [round(rest * part / whole) for part in itertools.accumulate(weights)]
    return tuple(1 + stop - start for start, stop in itertools.pairwise((0, *cuts)))


@lru_cache(maxsize=256)
def _weights(law: Law, sequences: int) -> tuple[float, ...]:
    numbers = random.Random(SEED)
    if law == "equal":
        return (1.0,) * sequences
    # Never 0, so that a single sequence has a weight.
    return tuple(numbers.lognormvariate(0.0, 1.0) if law == "lognormal" else 1e-6 + numbers.random() for _ in range(sequences))


@lru_cache(maxsize=256)
def _drawn(law: Law, longest: int, sequences: int, tokens: int) -> tuple[int, ...]:
    weights = _weights(law, sequences)
    if sequences == 1 or law == "equal":
        return shared(tokens, weights)
    place = weights.index(max(weights))
    # At least the mean, and at least one token is left for each of the others.
    top = max(-(-tokens // sequences), min(longest, tokens - sequences + 1))
    found = list(shared(tokens - top, weights[:place] + weights[place + 1 :]))
    over = sum(max(0, length - top) for length in found)
    for at, length in enumerate(found):
        found[at] = min(top, length + over) if length < top else top
        over -= max(0, found[at] - length)
    return (*found[:place], top, *found[place:])
