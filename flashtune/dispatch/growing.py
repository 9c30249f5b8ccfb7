"""Sequences that grow by a token at a time: where torch serves a decoding step, it serves the steps around it undecided.

Each number of keys is a signature of its own, and to decide takes longer than a call. So steps are taken together, `SPAN` of them.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from flashtune.core.band import Alignment, Band, Window, diagonal_of
from flashtune.core.problem import DECODE_ROWS, Problem
from flashtune.core.target import Target
from flashtune.dispatch.policy import Pool, choose
from flashtune.templates import families

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


def torch_serves(problem: Problem, window: Window, alignment: Alignment, target: Target, pool: Pool, *, unmeasured: bool) -> bool:
    """Whether the policy leaves every step of the span of this one to torch, which takes them all as they are.

    It is asked at both ends: between them nothing changes but where a row is of a length. `window` (its right side 0 where the call is
    causal) and `alignment` are the call's own: a side that hides nothing at one length may hide something at a larger one.
    """
    last = -(-problem.n_kv // SPAN) * SPAN
    first = last - SPAN + 1
    left, right = window
    if Band(left=left, right=right, diagonal=diagonal_of(alignment, problem.n_q, last)).trimmed(problem.n_q, last).bounded:
        return False
    if any(first <= n <= last for n in pool.lengths):
        return False
    ends, known = [replace(problem, n_kv=n) for n in (first, last)], families()
    return all(choose(end, target, pool, known, framework_serves=True, unmeasured=unmeasured).kind == "framework" for end in ends)
