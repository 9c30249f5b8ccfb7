"""How near the problems of two keys are: what was found for one is worth trying, or standing in, for the other.

One distance for the search, which begins with the winners of the nearest rows, and for dispatch, which serves from them.
"""

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from flashtune.core.dtypes import OTHER_16_BITS
from flashtune.core.problem import DECODE_ROWS, ProblemKey
from flashtune.core.results import TuningRecord
from flashtune.core.target import targets

PER_OCTAVE = {"n": 2.0, "n_q": 1.0, "bh_bucket": 1.0, "gqa_ratio": 1.0, "d": 16.0, "d_v": 16.0}
"""What a factor of two in a size of the key counts."""
PER_WORK_OCTAVE = 2.0
"""What a factor of two in the number of all query rows (batch * heads * N_q) counts, which says how full the GPU is."""

MUCH_WORK = 1 << 17
"""Query rows in all heads, from which on more of them make no difference: every SM of the largest GPUs has several tiles."""

TWIN = 1.0
"""What the other 16-bit type counts: winners are nearly the same."""
OTHER_DTYPE = 32.0
FEATURE = 8.0
"""What a feature counts that only one of the two has; a causal band against none is one, too."""
ALIGNMENT = 0.25
"""What the corner of the diagonal counts, which moves the band but compiles to the same code."""
PER_WINDOW_OCTAVE = 1.0
OTHER_GPU = 0.5
"""What another GPU of the same architecture counts."""
PER_SM_OCTAVE = 1.0
"""What a factor of two in their numbers of SMs counts, too."""
DECODING = 64.0
"""What it counts that only one of the two has at most `DECODE_ROWS` query rows: other families are made for it."""


def distance(a: ProblemKey, b: ProblemKey) -> float:
    """How far the problems of two keys are apart: 0 for the same key, symmetric; infinite between passes and between architectures."""
    if a.direction != b.direction:
        return math.inf
    apart = _gpus(a.gpu, b.gpu) + _dtypes(a.dtype, b.dtype) + _features(a.features, b.features)
    apart += DECODING * ((a.n_q <= DECODE_ROWS) != (b.n_q <= DECODE_ROWS))
    apart += PER_WORK_OCTAVE * octaves(work_of(a), work_of(b))
    return apart + sum(weight * octaves(getattr(a, name), getattr(b, name)) for name, weight in PER_OCTAVE.items())


def nearest(key: ProblemKey, records: Iterable[TuningRecord]) -> list[tuple[float, TuningRecord]]:
    """Records by their distance from `key`, which comes with each; those infinitely far are left out, and equals stay in their order."""
    found = [(distance(key, record.key), record) for record in records]
    return sorted((pair for pair in found if pair[0] < math.inf), key=lambda pair: pair[0])


def work_of(key: ProblemKey) -> int:
    """How many query rows all heads have, as far as that tells how full a GPU is."""
    return min(key.n_q * key.bh_bucket, MUCH_WORK)


def octaves(a: int, b: int) -> float:
    """How often one size must be doubled to be the other."""
    return abs(math.log2(max(1, a) / max(1, b)))


def _gpus(a: str, b: str) -> float:
    if a == b:
        return 0.0
    known = targets()
    if a not in known or b not in known or known[a].arch != known[b].arch:
        return math.inf
    return OTHER_GPU + PER_SM_OCTAVE * octaves(known[a].sms, known[b].sms)


def _dtypes(a: str, b: str) -> float:
    if a == b:
        return 0.0
    return TWIN if OTHER_16_BITS.get(a) == b else OTHER_DTYPE


@lru_cache(maxsize=4096)
def _features(one: str, other: str) -> float:
    apart = 0.0
    a: dict[str, Any] = json.loads(one)
    b: dict[str, Any] = json.loads(other)
    for name in a.keys() | b.keys():
        if a.get(name) == b.get(name):
            continue
        if name == "alignment":
            apart += ALIGNMENT
        elif name == "window" and type(a.get(name)) is type(b.get(name)) is int:
            apart += PER_WINDOW_OCTAVE * octaves(a[name], b[name])
        else:
            apart += FEATURE
    return apart
