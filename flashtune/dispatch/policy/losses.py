"""What differs between a problem and a record that stands in for it, what that is estimated to lose, and what it leaves of the gain over
the framework. Pure functions of keys and records."""

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
    """How much longer a stand-in's config took than the best of the left-out row's own trials: median and 90th percentile of `cases`."""

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
"""By what differs, from leaving out the rows of an H200 one at a time: benchmarks/results/2026-11-23-stand-in/losses.json."""

DECODE_DRIFT = 0.092
"""How much the GPU's time over the framework's changes with an octave of N, from the same file."""

CALL_TIE = 0.02
"""A kernel that gains more on the GPU serves although its whole calls took up to so much longer than the framework's: beside a host at work
one kernel's whole training steps took 702 us and the next one's, 2 % slower on the GPU, 639 (trials of the H200's row of D = 128, N = 1024,
causal)."""

SHORT_STEP = 1024
"""Up to so many keys torch's calls of a decoding step cost the host the least that they do, 15.0 to 16.4 us on an H200; from 2048 on some
cost 21 to 22 (benchmarks/results/2026-11-22-h200-steps/steps.json)."""

FAR = 2.0
"""From so many octaves of keys on, a row tells little of what torch takes for a decoding step: with 12 heads of D = 64 its calls took 31.0
us for a sequence of 8192 keys, and 15.9 for 16 of 1024, twice as much to read (an earlier run of `run.py calls --parts grid`)."""

FAR_IN_WORK = 3.0
"""From so many octaves of scores on, a row tells little of whether torch or a kernel is the faster where the features are the same: with a
bias and 16 heads of 2001 rows, which leave kernels waiting for it, torch takes 0.71 times as long as they do (a shipped row), and 1.86
times as long with 648 heads of 1342 rows (benchmarks/results/2026-11-23-h200-unprepared/seed47.json)."""

FAST_HEADS = 128
"""Torch has faster kernels for heads up to this size than for larger ones."""

SMALL_HEADS = 64
"""An SM has room for three programs of torch's decoding step of heads up to this size: with 300 key heads of D = 64 on 132 SMs it reads at
4.11 and 4.35 TB/s, as fast as with 224, and of D = 72 by a third slower."""

TWO_ON_AN_SM = 1.41
"""How much longer torch's decoding step takes where SMs have two of its programs, not one: 203 us and 144 of D = 72 and 140 key heads, and
72, in the same steps."""

FULL = 2.0
"""From so many tiles of 128 query rows to an SM on, a GPU counts as full: fewer leave SMs idle, for which other configs are good."""

OTHER_SIZE = 8.0
"""What another real head size counts beside `nearness.distance`, also where kernels pad both to the same: two octaves of N, or a feature.
Tiles that suit D = 64 took 1.1 to 1.5 times as long as the best in four of five calls of D = 40
(benchmarks/results/2026-11-22-h200-unprepared/unprepared.json)."""

OTHER_SCORES = 8.0
"""What a mask, dropout or a soft cap counts besides that only one of the two has: it changes what a block's scores cost, so that a row of
the feature with another head size tells more than one of the head size without it (benchmarks/results/2026-11-23-h200-covering)."""

RAGGED_BIAS = 8.0
"""What it counts that only one of two biases has rows of a multiple of 16 bytes, which the copy engine takes: one over N = 2713 keys was
read at less than a third of the rate of N = 4096 (the same file)."""

OTHER_GPU = 8.0
"""What another GPU of the architecture counts beside `nearness.distance`: two octaves of N."""

PER_SIZE_OF_GRADIENTS, OTHER_COLUMNS = 2.0, 16.0
"""What a factor of two in a head size counts of backwards, and that only one of two works through its columns in pieces, or has more of
them than a warpgroup has room for: at D = 40 the winners of D = 72 to 96, which do, took 3 to 5 % longer than the best, those of D = 64
and 128 11 to 12 %, at D = 72 and 80 0 % for 4 to 7 %, while those of four times the length took 0 % longer, all in the median
(benchmarks/run.py stand_in_gradients)."""

OTHER_GPU_OF_GRADIENTS = 1.0
"""The same of backwards, among which no cost model chooses: winners of an H200 took 0.3 % longer than the best there is on an H100 in the
median and 4.6 % at most, those of another head size 7.5 % at the 90th percentile and 14 % at most (run.py stand_in_gradients)."""


class Estimate(NamedTuple):
    """Share of time that a stand-in may lose against a search of its own, median and 90th percentile: orders choices, and isn't shown,
    since it isn't calibrated (benchmarks/run.py calibration)."""

    median: float
    worst: float


def kind_of(key: ProblemKey) -> ProblemKey:
    """All of a key but its sizes, save whether it is a decoding step, and its GPU."""
    # Spelled out, which is faster than `replace`: a first call asks it of every row.
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
    """Whether a record of one may stand in for the other: one pass, both decoding steps or neither, element types of one size."""
    types = theirs.dtype == ours.dtype or OTHER_16_BITS.get(theirs.dtype) == ours.dtype
    return theirs.direction == ours.direction and types and (theirs.n_q <= DECODE_ROWS) == (ours.n_q <= DECODE_ROWS)


@lru_cache(maxsize=65536)
def kinds_apart(theirs: ProblemKey, ours: ProblemKey) -> float:
    """`nearness.distance` of two kinds (`kind_of`), with head sizes as kernels pad them, OTHER_SIZE where the real ones differ, and
    OTHER_SCORES where what becomes of scores does; among equals the nearer real size. Of backwards real sizes count by themselves, and
    whether products are in pieces."""
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
    """Whether a fourth or more of what tiles are padded to is past 16 columns of the head sizes, so that products leave it out; and
    whether tiles are too wide for the sums of a warpgroup."""
    sizes = key.d, key.d_v
    return [4 * -(-d // 16) * 16 <= 3 * padded(d) for d in sizes], max(map(padded, sizes)) > 128


@lru_cache(maxsize=4096)
def _of_scores(features: str) -> tuple[object, ...]:
    found = json.loads(features)
    return found.get("mask"), found.get("dropout"), found.get("softcap")


def ragged(key: ProblemKey) -> bool:
    """Whether a bias has rows that the copy engine doesn't take."""
    return '"mask":"bias"' in key.features and key.n * ITEMSIZE[key.dtype] % 16 != 0


def places(key: ProblemKey) -> tuple[float, float, float, float]:
    """Where a key lies by N, rows, heads and rows of all heads: the differences of two add to the distance of their kinds."""
    n, n_q, heads = (PER_OCTAVE[name] * math.log2(getattr(key, name)) for name in ("n", "n_q", "bh_bucket"))
    return n, n_q, heads, PER_WORK_OCTAVE * math.log2(work_of(key))


def differences(record: TuningRecord, ours: ProblemKey) -> tuple[str, ...]:
    """What differs, theirs for ours: `d=128 for 80`."""
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
    """Whether they are the same but for the corner of the diagonal, which moves the band but compiles to the same code."""
    return theirs.features == ours.features or _but_for_alignment(theirs.features) == _but_for_alignment(ours.features)


@lru_cache(maxsize=4096)
def _but_for_alignment(features: str) -> dict[str, object]:
    return {name: value for name, value in json.loads(features).items() if name != "alignment"}


def strayed(theirs: ProblemKey, nearest: ProblemKey, ours: ProblemKey) -> int:
    """In how many of features and head sizes the nearest record is as asked and another isn't."""
    features = same_features(nearest, ours) and not same_features(theirs, ours)
    sizes = (nearest.d, nearest.d_v) == (ours.d, ours.d_v) != (theirs.d, theirs.d_v)
    return features + sizes


def full(key: ProblemKey) -> bool:
    """Whether the key's problems have tiles enough for its GPU; decoding steps split their keys until they have."""
    known = targets().get(key.gpu)
    return known is None or key.n_q <= DECODE_ROWS or key.bh_bucket * math.ceil(key.n_q / 128) >= FULL * known.sms


def estimate(theirs: ProblemKey, ours: ProblemKey) -> Estimate:
    """What a record of one is estimated to lose in the other's place: the losses by each difference, one on top of the other."""
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
    """Our time over the framework's, as far as a stand-in's own tells: the worse of its ratios on the GPU alone and as whole calls, since
    what was gained on one side only may be lost at other sizes, times the estimated `loss`. None without the framework's time.

    A decoding step may take a second launch, which shorter sequences don't hide, so towards fewer keys the ratio is assumed to drift. Where
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
    """Whether a kernel that gains more than CALL_TIE on the GPU loses no more as whole calls, which a host at work may have cost it. Not so
    a decoding step, whose calls are the host's."""
    ours, theirs, framework_us = record.outcome.call_us, record.framework_call_us, record.framework_us
    if ours is None or theirs is None or framework_us is None or record.key.n_q <= DECODE_ROWS:
        return False
    return (1 + CALL_TIE) * record.median_us < framework_us and theirs < ours <= (1 + CALL_TIE) * theirs


def torch_distance(theirs: ProblemKey, ours: ProblemKey) -> float:
    """How far what torch gains or loses against kernels is apart in two problems; infinite where it tells nothing of the other.

    Of a decoding step that is octaves of keys and of bytes, short of FAR; of more rows octaves of scores, short of FAR_IN_WORK, and of head
    sizes, where the features are the same.
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
    """The share of a GPU's rate of reading, of so many SMs, that torch's decoding step of one row reaches.

    It starts a program to each key head in all batches, or as many parts of its keys as fill the GPU once. An SM reads with one program of
    most head sizes at a share of its rate, and with two at TWO_ON_AN_SM times that, or more; it has room for two, of heads up to
    SMALL_HEADS for three, of heads above FAST_HEADS for one, and of D = 128 one is enough. By 98 steps of 40 to 300 key heads on an H200
    (benchmarks/results/2026-11-24-h200-splits).
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
    """Whether a row of K is an odd number of 16 bytes (D = 40 and 72): every other one begins amid the 32 that are read at once."""
    return key.d * ITEMSIZE[key.dtype] % 32 != 0


def _scores(key: ProblemKey) -> float:
    return float(key.bh_bucket * key.n_q * key.n)


def _read(key: ProblemKey) -> float:
    """Elements of K and V in all heads."""
    return key.n * key.bh_bucket / key.gqa_ratio * (key.d + key.d_v)


def waits(record: TuningRecord, ours: ProblemKey) -> bool:
    """Whether in calls of a decoding step like `ours` the GPU waits for the host, with our kernel and with the framework's: it did in the
    record's own, and there is no more for it to do than leaves it so. Far fewer keys may take another path through the framework, but for
    those that take its shortest (SHORT_STEP)."""
    key, call_us, framework_call_us = record.key, record.outcome.call_us, record.framework_call_us
    if ours.n_q > DECODE_ROWS or ours.n_q != key.n_q or (2 * ours.n < key.n and key.n > SHORT_STEP):
        return False
    if call_us is None or framework_call_us is None or record.framework_us is None:
        return False
    grown = max(1.0, _read(ours) / _read(key))
    return grown * record.median_us < call_us and grown * record.framework_us < framework_call_us


def torch_has(problem: Problem) -> bool:
    """Whether one call of torch's attention serves the features of a problem."""
    f = problem.features
    if f.as_json().keys() - {"causal", "alignment", "mask", "dropout", "tf32"} or problem.dtype == "fp8":
        return False
    return not f.causal or (problem.band.diagonal == 0 and f.mask == "none")


def torch_runs_alike(theirs: Problem, ours: Problem) -> bool:
    """Whether what torch took for one problem tells of the other: it was given no mask for what it lacks, and runs the same kind of kernel.

    With a mask or dropout that is another one, about half as fast. A decoding step is bound by launches and by reading K and V anyway.
    """
    if not torch_has(theirs):
        return False
    alike = theirs.features.mask == ours.features.mask and theirs.features.dropout == ours.features.dropout
    return alike or ours.n_q <= DECODE_ROWS
