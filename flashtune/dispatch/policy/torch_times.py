"""Time of PyTorch's attention beside a kernel's, predicted from records of both. Pure functions of problems and records."""

import itertools
import math
from collections.abc import Sequence

from flashtune.core.gpu.target import Target, targets
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import DECODE_ROWS, FLAGS, Problem, ProblemKey
from flashtune.core.records.nearness import octaves
from flashtune.core.records.results import TuningRecord
from flashtune.dispatch.policy.records import Pool
from flashtune.templates.family import blocks_of_head, wave_efficiency

CALL_TIE = 0.02
"""Share by which whole calls may be slower than PyTorch's where the kernel is faster (trials of the H200's record of D = 128, N = 1024)."""
SHORT_STEP = 1024
"""Most keys for which PyTorch's decode step takes its shortest path on the host (benchmarks/results/2026-11-22-h200-steps/steps.json)."""
FAR = 2.0
"""Octaves of keys from which on a record no longer informs about PyTorch's decode time (an earlier run of `run.py calls --parts grid`)."""
REFERENCES = 3
"""Records that inform about PyTorch's time of a decode step, from leaving records out (benchmarks/results/2026-11-23-stand-in)."""
SMALL_HEADS, FAST_HEADS = 64, 128
"""Largest head sizes of which three, and two, programs of PyTorch's decode kernel fit on an SM (2026-11-24-h200-splits)."""
TWO_ON_AN_SM = 1.41
"""Time of PyTorch's decode step with two programs per SM over that with one (D = 72, the same steps)."""
HOST_BACKWARD_US = 120.0
"""Host time in us of our launches in a training step (benchmarks/results/2026-11-22-h200-training)."""
BACKWARD_TILE = 128
"""Queries and keys of a tile by which a backward's time is scaled (benchmarks/results/2026-11-24-h200-training)."""
BESIDE_TILES_US = 50.0
"""Time in us of a backward beside its tiles, from 16 random problems of 192 to 1088 rows (the same results)."""


def torch_has(problem: Problem) -> bool:
    """True where one call of PyTorch's attention has the features of a problem."""
    f = problem.features
    if f.as_json().keys() - {"causal", "alignment", "mask", "dropout", "tf32", "latent"} or problem.dtype == "fp8":
        return False
    return not f.causal or (problem.band.diagonal == 0 and f.mask == "none")


def calls_tie(record: TuningRecord) -> bool:
    """True where a kernel that gains more than CALL_TIE on the GPU loses no more than that as whole calls, as host noise may explain.

    False for a decode step, whose time is the host's.
    """
    ours, theirs, framework_us = record.outcome.call_us, record.framework_call_us, record.framework_us
    if ours is None or theirs is None or framework_us is None or record.key.n_q <= DECODE_ROWS:
        return False
    return (1 + CALL_TIE) * record.median_us < framework_us and theirs < ours <= (1 + CALL_TIE) * theirs


def _ratio(record: TuningRecord, problem: Problem, target: Target) -> float | None:
    """Expected time of ours over PyTorch's for another decoding step: the worse of a record's ratios on the GPU and as calls.

    What was gained on one side only may be lost at other sizes. Where the GPU waits for the host, calls alone count. None where the record
    has no time of PyTorch's own kernels.
    """
    if record.framework_us is None or not torch_has(record.problem):
        return None
    ratios = [record.median_us / record.framework_us]
    if record.outcome.call_us is not None and record.framework_call_us is not None:
        calls = record.outcome.call_us / record.framework_call_us
        ratios = [calls] if waits(record, problem.key(target.slug)) else [*ratios, calls]
    return max(ratios) * slower_reading(record, problem, target)


def step_ratio(nearest: TuningRecord, problem: Problem, pool: Pool, target: Target) -> tuple[float, Sequence[TuningRecord]] | None:
    """Expected time of ours over PyTorch's for a decoding step, and the records it is from, where these aren't the nearest one.

    Those that best inform about PyTorch's time decide where the nearest says that PyTorch is faster, or has rows of another alignment.
    """
    key, ratio = problem.key(target.slug), _ratio(nearest, problem, target)
    stray = odd_rows(nearest.key) != odd_rows(key)
    if ratio is None or (ratio <= 1.0 and not stray):
        return None if ratio is None else (ratio, ())
    records: list[TuningRecord] = []
    near = sorted((apart, place) for place, other in enumerate(pool.keys) if (apart := _steps_apart(other, key)) < math.inf)
    for _, same in itertools.groupby(near, key=lambda one: one[0]):
        found = (pool.best_of(pool.keys[place], lambda record: _timed_beside(record, problem, target)) for _, place in same)
        records += [record for record in found if record is not None]
        if len(records) >= REFERENCES:
            break
    records = records[:REFERENCES]
    if all(record.key == nearest.key for record in records):
        return ratio, ()
    logs = [math.log((record.relative_time or 1.0) * slower_reading(record, problem, target)) for record in records]
    mean = math.exp(sum(logs) / len(logs))
    return (mean, records) if mean < 1.0 or stray else (ratio, ())


def _timed_beside(record: TuningRecord, problem: Problem, target: Target) -> bool:
    """True for a record that was measured beside PyTorch, which took the same path as for `problem`."""
    measured = record.outcome.source == "measured" and record.outcome.measurement is not None and 0.0 < record.median_us < math.inf
    return measured and _ratio(record, problem, target) is not None


def slower_reading(record: TuningRecord, problem: Problem, target: Target) -> float:
    """Correction of our time over PyTorch's for its read bandwidth with as many key heads.

    Single-query decode, GPU-bound only; else 1, as nothing was measured of more rows.
    """
    if problem.n_q > 1 or record.key.n_q > 1 or waits(record, problem.key(target.slug)):
        return 1.0
    return torch_fills(problem, target.sms) / torch_fills(record.problem, targets()[record.key.gpu].sms)


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


def _steps_apart(theirs: ProblemKey, ours: ProblemKey) -> float:
    """Octaves of keys and of bytes between two decode steps; infinite where PyTorch's time of one doesn't inform about the other."""
    fast = (max(theirs.d, theirs.d_v) > FAST_HEADS) == (max(ours.d, ours.d_v) > FAST_HEADS)
    keys = octaves(theirs.n, ours.n)
    if theirs.n_q != ours.n_q or not fast or odd_rows(theirs) != odd_rows(ours) or keys >= FAR:
        return math.inf
    return keys + abs(math.log2(_read(theirs) / _read(ours))) + octaves(theirs.d, ours.d) / 2


def _read(key: ProblemKey) -> float:
    """Elements of K and V in all heads."""
    return key.n * key.bh_bucket / key.gqa_ratio * (key.d + key.d_v)


def reads_matrix(problem: Problem) -> bool:
    """True where PyTorch needs a mask or bias of all scores for a problem."""
    f = problem.features
    return f.mask != "none" or f.window is not None or f.alibi or f.sinks


def backward_kind(problem: Problem) -> tuple[object, ...]:
    """Features between which PyTorch's backward takes up to nine times as long."""
    f = problem.features
    return f.window is None, f.mask, *(getattr(f, name) for name in FLAGS)


def scaled_backward_us(known_us: float, theirs: Problem, ours: Problem) -> float:
    """Microseconds of a backward for `ours` that takes `known_us` for `theirs`, by their tiles."""
    beside_us = min(known_us, BESIDE_TILES_US)
    return beside_us + (known_us - beside_us) * _tiled(ours) / _tiled(theirs)


def _tiled(problem: Problem) -> int:
    """Multiplications of a backward in tiles of BACKWARD_TILE queries and keys, partly visible tiles counted in full."""
    p = problem
    return max(1, p.batch * p.heads * blocks_of_head(p.band, p.n_q, p.n_kv, BACKWARD_TILE, BACKWARD_TILE) * (p.d + p.d_v))
