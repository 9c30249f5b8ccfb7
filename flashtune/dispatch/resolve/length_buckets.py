"""Length buckets of growing sequences: one choice serves all decode steps of a bucket.

Each number of keys is a signature of its own, and a choice takes longer than a call, so that it is made for `BUCKET` steps at once.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from flashtune.core.band import Sides
from flashtune.core.problem import DECODE_ROWS, Problem
from flashtune.dispatch.choose import Choice, Pool

BUCKET = 64
"""Numbers of keys in a length bucket."""


def bucket_of(signature: tuple[Any, ...] | None) -> Hashable | None:
    """Key of a call's length bucket, from its signature (flashtune.dispatch.api).

    None where it isn't a decode step that kernels may serve, without a mask and with aligned memory.
    """
    if signature is None:
        return None
    q, k, v, _, _, _, *rest = signature
    *_, memory, why_torch, _ = rest
    if not len(q) == len(k) == len(v) == 4 or q[2] > DECODE_ROWS or k[2] != v[2] or memory is not None or why_torch is not None:
        return None
    return (q, k[:2], v[:2], k[3], v[3], -(-k[2] // BUCKET), *rest)


def choice_of_bucket(problem: Problem, sides: Sides, pool: Pool, choose: Callable[[Problem], Choice]) -> Choice | None:
    """Choice for every step of the problem's length bucket; None where steps differ.

    It is made for both ends: between them only records of a length in the bucket could change it. A side that hides nothing at one length
    may hide something at a larger one: then there is no such choice.
    """
    last = -(-problem.n_kv // BUCKET) * BUCKET
    first = last - BUCKET + 1
    if sides.band(problem.n_q, last).bounded or any(first <= n <= last for n in pool.lengths):
        return None
    one, other = (choose(replace(problem, n_kv=n)) for n in (first, last))
    return other if (one.family, one.config, one.spec) == (other.family, other.config, other.spec) else None
