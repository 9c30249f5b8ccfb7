"""Distances between a problem and records of other keys, their estimated losses, and the remaining gain over PyTorch.

Pure functions of keys and records.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from flashtune.core.dtypes import ITEMSIZE, OTHER_16_BITS
from flashtune.core.nearness import PER_OCTAVE, PER_WORK_OCTAVE, distance, octaves, work_of
from flashtune.core.problem import DECODE_ROWS, Features, Problem, ProblemKey
from flashtune.core.results import TuningRecord
from flashtune.core.target import targets
from flashtune.templates.family import padded, wave_efficiency


class Loss(NamedTuple):
    """Extra time of a substitute record's config over the best trial of the left-out record: median and 90th percentile of `cases`."""

    median: float
    worst: float
    cases: int


LOSSES: Mapping[str, Loss] = {
    "head size": Loss(median=0.014, worst=0.118, cases=47),
    "shared heads": Loss(median=0.003, worst=0.1, cases=35),
    "features": Loss(median=0.004, worst=0.061, cases=33),
    "dtype": Loss(median=0.002, worst=0.075, cases=76),
    "a full GPU": Loss(median=0.089, worst=0.359, cases=20),
    "n, 1 octaves": Loss(median=0.0, worst=0.016, cases=86),
    "n, 2 octaves": Loss(median=0.004, worst=0.113, cases=86),
    "n, 3 octaves": Loss(median=0.023, worst=0.218, cases=85),
    "n, 4 octaves": Loss(median=0.039, worst=0.359, cases=61),
    "n, 5 octaves": Loss(median=0.086, worst=0.459, cases=32),
}
"""Losses by difference, from leaving out records of an H200 one at a time (benchmarks/results/2026-11-23-stand-in/losses.json)."""

DECODE_DRIFT = 0.092
"""Change of the GPU's time over PyTorch's per octave of N, from the same file."""

CALL_TIE = 0.02
"""Share of time by which whole calls may be slower than PyTorch's where the kernel gains more on the GPU: host noise of whole steps exceeds
it (trials of the H200's record of D = 128, N = 1024, causal)."""

SHORT_STEP = 1024
"""Most keys for which PyTorch's decode step takes its shortest path on the host: 15.0 to 16.4 us on an H200, 21 to 22 for some from 2048 on
(benchmarks/results/2026-11-22-h200-steps/steps.json)."""

FAR = 2.0
"""Octaves of keys from which on a record no longer informs about PyTorch's decode time (an earlier run of `run.py calls --parts grid`)."""

FAR_IN_WORK = 3.0
"""Octaves of scores from which on a record of the same features no longer informs about PyTorch's time over ours
(benchmarks/results/2026-11-23-h200-unprepared/seed47.json)."""

FAST_HEADS = 128
"""Largest head size for which PyTorch has its faster kernels."""

SMALL_HEADS = 64
"""Largest head size of PyTorch's decode kernel with three programs per SM, by read bandwidth (2026-11-24-h200-splits)."""

TWO_ON_AN_SM = 1.41
"""Time of PyTorch's decode step with two programs per SM over that with one (D = 72, the same steps)."""

FULL = 2.0
"""Tiles of 128 query rows per SM from which on a GPU counts as full: with fewer, SMs idle, and other configs are good."""

OTHER_SIZE = 8.0
"""Distance of another real head size beside `nearness.distance`, also where kernels pad both to the same: two octaves of N, or a feature
(benchmarks/results/2026-11-22-h200-unprepared/unprepared.json)."""

OTHER_SCORES = 8.0
"""Additional distance of a mask, dropout or soft cap that only one of the two has, since it changes the cost of a tile's scores
(benchmarks/results/2026-11-23-h200-covering)."""

UNALIGNED_BIAS = 8.0
"""Distance if only one of two biases has rows of a multiple of 16 bytes, which TMA requires: unaligned ones are read at less than a third
of the rate (the same file)."""

OTHER_GPU = 8.0
"""Distance of another GPU of the architecture beside `nearness.distance`: two octaves of N."""

PER_SIZE_OF_GRADIENTS, OTHER_COLUMNS = 2.0, 16.0
"""Distance per octave of head size (backward); added distance if only one of the two kernels splits its columns, or needs more of them than
a warpgroup's registers have room for (benchmarks/run.py stand_in_gradients)."""

OTHER_GPU_OF_GRADIENTS = 1.0
"""`OTHER_GPU` of backwards, among which no cost model chooses: an H200's winners lose 0.3 % on an H100 in the median (benchmarks/run.py
stand_in_gradients)."""


class Estimate(NamedTuple):
    """Share of time that a substitute record may lose against a search of its own, median and 90th percentile.

    Orders choices, and isn't shown, since it isn't calibrated (benchmarks/run.py calibration).
    """

    median: float
    worst: float


def kind_of(key: ProblemKey) -> ProblemKey:
    """Key without sizes and GPU, but for the distinction of decode steps."""
    # Spelled out, which is faster than `replace`: a first call computes it for every record.
    return ProblemKey(
        gpu="",
        n=1,
        n_q=1 if key.n_q <= DECODE_ROWS else DECODE_ROWS + 1,
        bh_bucket=1,
        d=key.d,
        d_v=key.d_v,
        dtype=key.dtype,
        direction=key.direction,
        features=key.features,
        gqa_ratio=key.gqa_ratio,
    )


def comparable(theirs: ProblemKey, ours: ProblemKey) -> bool:
    """True where a record of one may serve the other: one pass, both decode steps or neither, element types of one size."""
    types = theirs.dtype == ours.dtype or OTHER_16_BITS.get(theirs.dtype) == ours.dtype
    return theirs.direction == ours.direction and types and (theirs.n_q <= DECODE_ROWS) == (ours.n_q <= DECODE_ROWS)


@lru_cache(maxsize=65536)
def kinds_apart(theirs: ProblemKey, ours: ProblemKey) -> float:
    """`nearness.distance` of two kinds (`kind_of`), with head sizes as kernels pad them; ties go to the nearer real size.

    Adds OTHER_SIZE where the real sizes differ, and OTHER_SCORES where the treatment of scores does. Backwards compare real sizes, and
    whether products have split columns.
    """
    other = OTHER_SIZE if (theirs.d, theirs.d_v) != (ours.d, ours.d_v) else 0.0
    other += OTHER_SCORES * (_of_scores(theirs.features) != _of_scores(ours.features))
    sizes = octaves(theirs.d, ours.d) + octaves(theirs.d_v, ours.d_v)
    if ours.direction == "bwd":
        other += PER_SIZE_OF_GRADIENTS * sizes
        other += OTHER_COLUMNS * sum(a != b for a, b in zip(_columns(theirs), _columns(ours), strict=True))
        return distance(replace(theirs, d=ours.d, d_v=ours.d_v), ours) + other
    rounded = [replace(key, d=padded(key.d), d_v=padded(key.d_v)) for key in (theirs, ours)]
    return distance(*rounded) + other + sizes


def _columns(key: ProblemKey) -> tuple[object, ...]:
    """Properties of a backward's columns: for each head size, True if a fourth or more of the padded width is past its 16 columns'
    multiple, so that products omit it; and True if tiles are too wide for the accumulators of a warpgroup."""
    sizes = key.d, key.d_v
    return [4 * -(-d // 16) * 16 <= 3 * padded(d) for d in sizes], max(map(padded, sizes)) > 128


@lru_cache(maxsize=4096)
def _of_scores(features: str) -> tuple[object, ...]:
    found = json.loads(features)
    return found.get("mask"), found.get("dropout"), found.get("softcap")


def unaligned(key: ProblemKey) -> bool:
    """True where a bias has unaligned rows, which TMA doesn't accept."""
    return '"mask":"bias"' in key.features and key.n * ITEMSIZE[key.dtype] % 16 != 0


def places(key: ProblemKey) -> tuple[float, float, float, float]:
    """Coordinates of a key by N, rows, heads and rows of all heads: differences of two add to the distance of their kinds."""
    n, n_q, heads = (PER_OCTAVE[name] * math.log2(getattr(key, name)) for name in ("n", "n_q", "bh_bucket"))
    return n, n_q, heads, PER_WORK_OCTAVE * math.log2(work_of(key))


def differences(record: TuningRecord, ours: ProblemKey) -> tuple[str, ...]:
    """Differences, theirs for ours: `d=128 for 80`."""
    theirs = record.key
    words = [("n", theirs.n, ours.n), ("n_q", theirs.n_q, ours.n_q), ("batch*heads bucket", theirs.bh_bucket, ours.bh_bucket)]
    words = [("d", theirs.d, ours.d), ("d_v", theirs.d_v, ours.d_v), ("heads to a key head", theirs.gqa_ratio, ours.gqa_ratio), *words]
    found = [f"{name}={mine} for {wanted}" for name, mine, wanted in words if mine != wanted]
    if theirs.dtype != ours.dtype:
        found.insert(0, f"{theirs.dtype} for {ours.dtype}")
    if theirs.features != ours.features:
        mine, wanted = (Features.from_json(json.loads(key.features)).label() for key in (theirs, ours))
        found.insert(0, f"{mine} for {wanted}")
    return tuple(found)


def same_features(theirs: ProblemKey, ours: ProblemKey) -> bool:
    """True where features are equal but for the diagonal's alignment, which moves the band but compiles to the same code."""
    return theirs.features == ours.features or _but_for_alignment(theirs.features) == _but_for_alignment(ours.features)


@lru_cache(maxsize=4096)
def _but_for_alignment(features: str) -> dict[str, object]:
    return {name: value for name, value in json.loads(features).items() if name != "alignment"}


def mismatches(theirs: ProblemKey, nearest: ProblemKey, ours: ProblemKey) -> int:
    """Number of features and head sizes (0 to 2) that the nearest record matches and another one doesn't."""
    features = same_features(nearest, ours) and not same_features(theirs, ours)
    sizes = (nearest.d, nearest.d_v) == (ours.d, ours.d_v) != (theirs.d, theirs.d_v)
    return features + sizes


def full(key: ProblemKey) -> bool:
    """True where the key's problems have enough tiles for its GPU; decode steps split their keys until they have."""
    known = targets().get(key.gpu)
    return known is None or key.n_q <= DECODE_ROWS or key.bh_bucket * math.ceil(key.n_q / 128) >= FULL * known.sms


def estimate(theirs: ProblemKey, ours: ProblemKey) -> Estimate:
    """Estimated loss of a record of one key that serves the other: the losses by each difference, compounded."""
    kinds: list[str] = []
    if (theirs.d, theirs.d_v) != (ours.d, ours.d_v):
        kinds.append("head size")
    if theirs.gqa_ratio != ours.gqa_ratio:
        kinds.append("shared heads")
    if not same_features(theirs, ours):
        kinds.append("features")
    if theirs.dtype != ours.dtype:
        kinds.append("dtype")
    if (far := round(octaves(theirs.n, ours.n))) > 0:
        kinds.append(f"n, {min(far, 5)} octaves")
    elif full(theirs) != full(ours):
        kinds.append("a full GPU")
    median = worst = 1.0
    for kind in kinds:
        median, worst = median * (1 + LOSSES[kind].median), worst * (1 + LOSSES[kind].worst)
    return Estimate(median=median - 1, worst=worst - 1)


def expected_ratio(record: TuningRecord, ours: ProblemKey, loss: Estimate) -> float | None:
    """Expected time of ours over PyTorch's by a substitute record: the worse of its ratios on the GPU alone and as whole calls.

    What was gained on one side only may be lost at other sizes. The estimated `loss` is included. None without PyTorch's time.

    A decode step may take a second launch, which shorter sequences don't hide, so towards fewer keys the ratio is assumed to drift. Where
    the GPU waits for the host (`waits`), whole calls alone count, in which a second launch is never hidden.
    """
    if record.framework_us is None:
        return None
    ratios, waiting = [record.median_us / record.framework_us], False
    if record.outcome.call_us is not None and record.framework_call_us is not None:
        calls, waiting = record.outcome.call_us / record.framework_call_us, waits(record, ours)
        ratios = [calls] if waiting else ratios if calls_tie(record) else [*ratios, calls]
    found = max(ratios) * (1 + loss.median)
    if ours.n_q <= DECODE_ROWS and ours.n < record.key.n and not waiting:
        found *= (1 + DECODE_DRIFT) ** octaves(record.key.n, ours.n)
    return found


def calls_tie(record: TuningRecord) -> bool:
    """True where a kernel that gains more than CALL_TIE on the GPU loses no more than that as whole calls, as host noise may explain.

    False for a decode step, whose time is the host's.
    """
    ours, theirs, framework_us = record.outcome.call_us, record.framework_call_us, record.framework_us
    if ours is None or theirs is None or framework_us is None or record.key.n_q <= DECODE_ROWS:
        return False
    return (1 + CALL_TIE) * record.median_us < framework_us and theirs < ours <= (1 + CALL_TIE) * theirs


def torch_distance(theirs: ProblemKey, ours: ProblemKey) -> float:
    """Distance of two problems in PyTorch's time over ours; infinite where one doesn't inform about the other.

    For decode steps: octaves of keys and of bytes, below FAR; for more rows: octaves of scores, below FAR_IN_WORK, and of head sizes, where
    the features are the same.
    """
    if theirs.direction != ours.direction or (theirs.n_q <= DECODE_ROWS) != (ours.n_q <= DECODE_ROWS):
        return math.inf
    apart = octaves(theirs.d, ours.d)
    if ours.n_q > DECODE_ROWS:
        work = abs(math.log2(_scores(theirs) / _scores(ours)))
        return work + apart if work < FAR_IN_WORK and same_features(theirs, ours) else math.inf
    others = (max(theirs.d, theirs.d_v) > FAST_HEADS) != (max(ours.d, ours.d_v) > FAST_HEADS) or odd_rows(theirs) != odd_rows(ours)
    keys = octaves(theirs.n, ours.n)
    return math.inf if theirs.n_q != ours.n_q or others or keys >= FAR else keys + abs(math.log2(_read(theirs) / _read(ours))) + apart / 2


def torch_fills(problem: Problem, sms: int) -> float:
    """Share of the read bandwidth of a GPU with `sms` SMs that PyTorch's single-query decode reaches.

    It starts a program for each key head in all batches, or as many splits of its keys as fill the GPU once. An SM with one program of most
    head sizes reads at a share of its rate, and with two at TWO_ON_AN_SM times that, or more; it has room for two, of heads up to
    SMALL_HEADS for three, of heads above FAST_HEADS for one, and with D = 128 one is enough. From 98 steps of 40 to 300 key heads on an
    H200 (benchmarks/results/2026-11-24-h200-splits).
    """
    heads = problem.batch * problem.kv_heads
    programs = heads * max(1, sms // heads)
    if max(problem.d, problem.d_v) > FAST_HEADS:
        return wave_efficiency(programs, sms)
    if programs <= 2 * sms and problem.d == problem.d_v == FAST_HEADS:
        return 1.0
    if programs <= sms:
        return programs / sms
    room = 3 if max(problem.d, problem.d_v) <= SMALL_HEADS else 2
    return min(1.0, programs / (TWO_ON_AN_SM * math.ceil(programs / (room * sms)) * sms))


def odd_rows(key: ProblemKey) -> bool:
    """True where a row of K is an odd multiple of 16 bytes (D = 40 and 72): every other one begins amid a 32-byte sector."""
    return key.d * ITEMSIZE[key.dtype] % 32 != 0


def _scores(key: ProblemKey) -> float:
    return float(key.bh_bucket * key.n_q * key.n)


def _read(key: ProblemKey) -> float:
    """Elements of K and V in all heads."""
    return key.n * key.bh_bucket / key.gqa_ratio * (key.d + key.d_v)


def waits(record: TuningRecord, ours: ProblemKey) -> bool:
    """True where in calls of a decode step like `ours` the GPU waits for the host, with our kernel and with PyTorch's.

    It did in the record's own, and the call has no more work than leaves it so. Far fewer keys may take another path through PyTorch, but
    for those on its shortest (SHORT_STEP).
    """
    key, call_us, framework_call_us = record.key, record.outcome.call_us, record.framework_call_us
    if ours.n_q > DECODE_ROWS or ours.n_q != key.n_q or (2 * ours.n < key.n and key.n > SHORT_STEP):
        return False
    if call_us is None or framework_call_us is None or record.framework_us is None:
        return False
    grown = max(1.0, _read(ours) / _read(key))
    return grown * record.median_us < call_us and grown * record.framework_us < framework_call_us


def torch_has(problem: Problem) -> bool:
    """True where one call of PyTorch's attention has the features of a problem."""
    f = problem.features
    if f.as_json().keys() - {"causal", "alignment", "mask", "dropout", "tf32"} or problem.dtype == "fp8":
        return False
    return not f.causal or (problem.band.diagonal == 0 and f.mask == "none")


def torch_runs_alike(theirs: Problem, ours: Problem) -> bool:
    """True where PyTorch's time for one problem informs about the other: no mask in place of a feature, and the same kind of kernel.

    With a mask or dropout its kernel is another one, about half as fast. A decode step is bound by launches and by reading K and V anyway.
    """
    if not torch_has(theirs):
        return False
    alike = theirs.features.mask == ours.features.mask and theirs.features.dropout == ours.features.dropout
    return alike or ours.n_q <= DECODE_ROWS
