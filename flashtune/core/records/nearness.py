"""Distance between the problems of two keys: the nearer, the more a result for one is worth for the other.

The search begins with the winners of the nearest records, and dispatch serves from them.
"""

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashtune.core.gpu.target import targets
from flashtune.core.problems.dtypes import OTHER_16_BITS
from flashtune.core.problems.problem import DECODE_ROWS, ProblemKey

if TYPE_CHECKING:
    from flashtune.core.records.results import TuningRecord

PER_OCTAVE = {"n": 2.0, "n_q": 1.0, "bh_bucket": 1.0, "gqa_ratio": 1.0, "d": 16.0, "d_v": 16.0, "spread": 1.0}
"""Distance of a factor of two in a size of the key."""
PER_WORK_OCTAVE = 2.0
"""Distance of a factor of two in the number of all query rows (batch * heads * N_q), which fill the GPU."""

MUCH_WORK = 1 << 17
"""Query rows in all heads beyond which more make no difference: every SM of the largest GPUs has several tiles."""

OTHER_16_BIT_DTYPE = 1.0
"""Distance of the other 16-bit type: winners are nearly equal."""
OTHER_DTYPE = 32.0
FEATURE = 8.0
"""Distance of a feature that only one of the two has, a causal band included."""
ALIGNMENT = 0.25
"""Distance of the diagonal's corner, which moves the band but compiles to equal code."""
PER_WINDOW_OCTAVE, PER_PAGE_OCTAVE = 1.0, 0.5
OTHER_GPU = 0.5
"""Distance of another GPU of the same architecture."""
PER_SM_OCTAVE = 1.0
"""Distance of a factor of two in their numbers of SMs, on top of `OTHER_GPU`."""
OTHER_COLUMNS = 16.0
"""Distance of backwards of which only one splits its columns: D = 64's lose 12 % at D = 40, and D = 80's 2.5 % (H200)."""
DECODING = 64.0
"""Distance where only one of the two has at most `DECODE_ROWS` query rows, for which other families are made."""


def distance(a: ProblemKey, b: ProblemKey) -> float:
    """The symmetric distance of two keys: 0 for equal keys, infinite between passes, between architectures, and between pages and rows."""
    if a.direction != b.direction:
        return math.inf
    apart = _gpus(a.gpu, b.gpu) + _dtypes(a.dtype, b.dtype) + features_apart(a.features, b.features)
    apart += DECODING * ((a.n_q <= DECODE_ROWS) != (b.n_q <= DECODE_ROWS))
    return apart + sum(abs(mine - theirs) for mine, theirs in zip(coordinates(a), coordinates(b), strict=True))


def coordinates(key: ProblemKey) -> tuple[float, ...]:
    """A key's sizes in units of distance: differences of two keys' add up to the distance of their sizes."""
    sizes = [weight * math.log2(max(1, getattr(key, name))) for name, weight in PER_OCTAVE.items()]
    work = PER_WORK_OCTAVE * math.log2(max(1, min(key.n_q * key.bh_bucket, MUCH_WORK)))
    if key.direction == "fwd":
        return *sizes, work
    columns = [(size, 1 << max(4, (size - 1).bit_length())) for size in (key.d, key.d_v)]
    # Of each head size, padding from a fourth on, which products omit; and tiles too wide for the registers of a warpgroup.
    split = [OTHER_COLUMNS * (4 * -(-size // 16) * 16 <= 3 * padded) for size, padded in columns]
    return *sizes, work, *split, OTHER_COLUMNS * (max(padded for _, padded in columns) > 128)


def nearest(key: ProblemKey, records: "Iterable[TuningRecord]") -> "list[tuple[float, TuningRecord]]":
    """Records with their distances from `key`, nearest first and stable; those infinitely far are left out."""
    found = [(distance(key, record.key), record) for record in records]
    return sorted((pair for pair in found if pair[0] < math.inf), key=lambda pair: pair[0])


def octaves(a: int, b: int) -> float:
    """The number of doublings between two sizes."""
    return abs(math.log2(max(1, a) / max(1, b)))


def sms_apart(a: int, b: int) -> float:
    """Distance of two GPUs of one architecture by their numbers of SMs."""
    return OTHER_GPU + PER_SM_OCTAVE * octaves(a, b)


def _gpus(a: str, b: str) -> float:
    if a == b:
        return 0.0
    known = targets()
    if a not in known or b not in known or known[a].arch != known[b].arch:
        return math.inf
    return sms_apart(known[a].sms, known[b].sms)


def _dtypes(a: str, b: str) -> float:
    if a == b:
        return 0.0
    return OTHER_16_BIT_DTYPE if OTHER_16_BITS.get(a) == b else OTHER_DTYPE


@lru_cache(maxsize=4096)
def mods_in(features: str) -> str:
    """The hash of the mask and the score as code in a key's features (Features.mods), empty without."""
    return str(json.loads(features).get("mods", ""))


@lru_cache(maxsize=4096)
def page_in(features: str) -> int:
    """The page in a key's features (Features.page), 0 without."""
    return int(json.loads(features).get("page", 0))


@lru_cache(maxsize=4096)
def features_apart(one: str, other: str) -> float:
    """Distance of the features of two keys."""
    apart = 0.0
    a: dict[str, Any] = json.loads(one)
    b: dict[str, Any] = json.loads(other)
    for name in a.keys() | b.keys():
        if a.get(name) == b.get(name):
            continue
        if name == "alignment":
            apart += ALIGNMENT
        elif name == "page":
            apart += PER_PAGE_OCTAVE * octaves(a[name], b[name]) if name in a and name in b else math.inf
        elif name == "window" and type(a.get(name)) is type(b.get(name)) is int:
            apart += PER_WINDOW_OCTAVE * octaves(a[name], b[name])
        else:
            apart += FEATURE
    return apart
