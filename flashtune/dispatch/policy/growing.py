"""Sequences that grow by a token at a time: what serves a decoding step serves the steps around it undecided.

Each number of keys is a signature of its own, and to decide takes longer than a call. So steps are taken together, `SPAN` of them.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from flashtune.core.band import Sides
from flashtune.core.problem import DECODE_ROWS, Problem
from flashtune.dispatch.policy.choices import Choice
from flashtune.dispatch.policy.pool import Pool

SPAN = 64
"""Numbers of keys that are decided on at once."""


def span_of(signature: tuple[Any, ...] | None) -> Hashable | None:
    """What the calls of a span have in common, of a call's signature (flashtune.dispatch.api); None where it isn't a decoding step that
    kernels may serve, without a mask and in memory that anything reads."""
    if signature is None:
        return None
    q, k, v, _, _, _, *rest = signature
    *_, memory, why_torch, _ = rest
    if not len(q) == len(k) == len(v) == 4 or q[2] > DECODE_ROWS or k[2] != v[2] or memory is not None or why_torch is not None:
        return None
    return (q, k[:2], v[:2], k[3], v[3], -(-k[2] // SPAN), *rest)


def choice_of_span(problem: Problem, sides: Sides, pool: Pool, choose: Callable[[Problem], Choice]) -> Choice | None:
    """What is chosen for every step of the span of this one; None where that isn't one and the same.

    It is asked at both ends: between them nothing changes but where a row is of a length. A side that hides nothing at one length may
    hide something at a larger one: then there is no such choice.
    """
    last = -(-problem.n_kv // SPAN) * SPAN
    first = last - SPAN + 1
    if sides.band(problem.n_q, last).bounded or any(first <= n <= last for n in pool.lengths):
        return None
    one, other = (choose(replace(problem, n_kv=n)) for n in (first, last))
    return other if (one.family, one.config, one.spec) == (other.family, other.config, other.spec) else None
