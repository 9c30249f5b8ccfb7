"""Random shapes: problems of usual sizes whose keys no record has."""

import math
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from benchmarks.shared.cells import DEFAULT_AND_FA4, Cell
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import Features, Problem, ProblemKey
from flashtune.core.system.errors import InputError

HEAD_SIZES = ((40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (160, 160), (192, 192), (192, 128), (256, 256))
HEADS = (4, 8, 12, 16, 20, 24, 32, 40, 64)
SHARING = (1, 1, 1, 2, 4, 5, 8)
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"causal": True},
    {"causal": True},
    {"causal": True},
    {"causal": True, "window": (1024, 0)},
    {"causal": True, "window": (300, 0)},
    {"mask": "bool"},
    {"mask": "bias"},
    {"causal": True, "dropout": True},
    {"causal": True, "softcap": True},
    {"causal": True, "alibi": True},
    {"causal": True, "sinks": True},
)
"""Drawn with repetitions for weight; all else is uniform, N in its logarithm."""
KEYS = (128, 16384)
DECODING, CROSS, FP16 = 0.1, 0.15, 0.2
"""Shares of decoding steps, of cross attention, and of fp16."""
FEW, CACHE = (2, 512), (1024, 65536)
"""Rows and keys of few queries over a cache: prompts in chunks, and guesses that a model checks."""
FEW_BATCHES, FEW_SHARING = 16, (1, 4, 8)
FEW_FEATURES: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"causal": True}, {"causal": True, "window": (1024, 0)})

SHORT_HEAD_SIZES = (32, 48, 56, 64, 64, 72, 80, 88, 96, 104, 128)
SHORT_FEATURES: tuple[dict[str, Any], ...] = ({}, {}, {}, {"causal": True}, {"mask": "bool"}, {"mask": "bias"})
SHORT, MANY = (16, 512), (64, 4096)
"""Keys and sequences of many short ones: patches in windows, sentences, captions."""

SEQUENCES, SEQUENCE = (1, 1, 2), (256, 8192)
"""Sequences and keys of backwards of few of them, as models are fine-tuned."""
SHARED_BY = (1, 4, 4, 5, 7, 8)
SEQUENCE_FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"mask": "bool"},
    {"mask": "bias"},
    {"causal": True},
    {"causal": True},
    {"causal": True},
    {"causal": True, "window": (1024, 0)},
    {"causal": True, "mask": "bool"},
    {"causal": True, "mask": "bool", "window": (1024, 0)},
    {"causal": True, "dropout": True},
    {"causal": True, "softcap": True},
    {"mask": "bias", "dropout": True},
)

CAPTIONS, PATCHES = (16, 128), (16, 4096)
"""Keys of backwards that one tile holds, each sequence by itself or under queries of an image's patches."""
CAPTION_HEAD_SIZES = (32, 40, 64, 64, 64, 72, 80, 96, 128)
CAPTION_FEATURES: tuple[dict[str, Any], ...] = (*SHORT_FEATURES, {"dropout": True}, {"mask": "bool", "dropout": True})

Kind = Literal["any", "steps", "few", "short", "training", "sequences", "captions"]
"""Calls of every kind, decoding steps, few queries over a cache, many short sequences; and backwards, of any calls, of few sequences or of
few keys."""

TFLOPS, TB_S = 450.0, 3.0
"""Rates by which times are guessed before anything runs."""
FROM_US, TO_US = 20.0, 2000.0
MOST_BYTES = 1 << 30
"""Bytes of a mask, and of all else."""


def random_problems(count: int, *, seed: int, gpu: str, known: Collection[ProblemKey], kind: Kind = "any") -> list[Cell]:
    """`count` calls of usual sizes, of one kind, whose keys are not `known` and which take 20 us to 2 ms by a guess."""
    draw: dict[Kind, Callable[[random.Random], Problem | None]] = {
        "any": _draw,
        "steps": partial(_draw, decoding=1.0),
        "few": _draw_few,
        "short": _draw_short,
        "training": _draw_training,
        "sequences": _draw_sequences,
        "captions": _draw_captions,
    }
    dice, cells = random.Random(seed), dict[ProblemKey, Cell]()
    while len(cells) < count:
        problem = draw[kind](dice)
        if problem is None or not FROM_US <= guess_us(problem) <= TO_US or max(_bytes(problem)) > MOST_BYTES:
            continue
        key = problem.key(gpu)
        if key not in known and key not in cells:
            case = f"{problem.label()} H={problem.heads}"
            cells[key] = Cell(group="unprepared", case=case, problem=problem, peers=DEFAULT_AND_FA4)
    return list(cells.values())


def _draw(dice: random.Random, decoding: float = DECODING) -> Problem | None:
    """Any call; None for one that makes no sense."""
    d, d_v = dice.choice(HEAD_SIZES)
    heads, sharing, features = dice.choice(HEADS), dice.choice(SHARING), dict(dice.choice(FEATURES))
    low, high = map(math.log2, KEYS)
    n = int(2 ** dice.uniform(low, high))
    if dice.random() < 0.5:
        n = -(-n // 64) * 64
    n_q, kind = n, dice.random()
    if kind < decoding:
        n_q, features = 1, {}
    elif kind < decoding + CROSS:
        n_q = int(2 ** dice.uniform(low, math.log2(n + 1)))
        if features.get("causal"):
            features["alignment"] = "bottom_right"
    batch = int(2 ** dice.uniform(0, 7))
    dtype = "fp16" if dice.random() < FP16 else "bf16"
    if heads % sharing:
        return None
    try:
        sizes = {"batch": batch, "heads": heads, "kv_heads": heads // sharing, "n_q": n_q, "n_kv": n, "d": d, "d_v": d_v}
        return Problem(**sizes, dtype=dtype, features=Features(**features)).seen()
    except InputError:
        return None


def _draw_few(dice: random.Random) -> Problem:
    """A few queries over a cache."""
    d, d_v = dice.choice(HEAD_SIZES)
    kv_heads, sharing, features = dice.choice((2, 4, 8, 16)), dice.choice(FEW_SHARING), dict(dice.choice(FEW_FEATURES))
    n_q, n_kv = (int(2 ** dice.uniform(*map(math.log2, bounds))) for bounds in (FEW, CACHE))
    if features.get("causal"):
        features["alignment"] = "bottom_right"
    batch = int(2 ** dice.uniform(0, math.log2(FEW_BATCHES)))
    dtype = "fp16" if dice.random() < FP16 else "bf16"
    sizes = {"batch": batch, "heads": kv_heads * sharing, "kv_heads": kv_heads, "n_q": n_q, "n_kv": n_kv, "d": d, "d_v": d_v}
    return Problem(**sizes, dtype=dtype, features=Features(**features)).seen()


def _draw_short(dice: random.Random) -> Problem:
    """Many short sequences, each by itself."""
    d, heads, features = dice.choice(SHORT_HEAD_SIZES), dice.choice(HEADS), dict(dice.choice(SHORT_FEATURES))
    n, batch = (int(2 ** dice.uniform(*map(math.log2, bounds))) for bounds in (SHORT, MANY))
    dtype = "fp16" if dice.random() < FP16 else "bf16"
    sizes = {"batch": batch, "heads": heads, "kv_heads": heads, "n_q": n, "n_kv": n, "d": d, "d_v": d}
    return Problem(**sizes, dtype=dtype, features=Features(**features)).seen()


def _draw_training(dice: random.Random) -> Problem | None:
    """The backward of any call but a decoding step."""
    problem = _draw(dice, decoding=0.0)
    return None if problem is None else replace(problem, direction="bwd")


def _draw_sequences(dice: random.Random) -> Problem:
    """The backward of one sequence or two, whose heads often share keys."""
    d, d_v = dice.choice([*HEAD_SIZES, (32, 32)])
    kv_heads, sharing, features = dice.choice((2, 4, 8, 10)), dice.choice(SHARED_BY), dict(dice.choice(SEQUENCE_FEATURES))
    n, batch = int(2 ** dice.uniform(*map(math.log2, SEQUENCE))), dice.choice(SEQUENCES)
    dtype = "fp16" if dice.random() < FP16 else "bf16"
    sizes = {"batch": batch, "heads": kv_heads * sharing, "kv_heads": kv_heads, "n_q": n, "n_kv": n, "d": d, "d_v": d_v}
    return Problem(**sizes, dtype=dtype, features=Features(**features), direction="bwd").seen()


def _draw_captions(dice: random.Random) -> Problem:
    """The backward of many sequences of few keys, half of them with queries of their own number."""
    d, heads, features = dice.choice(CAPTION_HEAD_SIZES), dice.choice(HEADS), dict(dice.choice(CAPTION_FEATURES))
    n_kv, batch = (int(2 ** dice.uniform(*map(math.log2, bounds))) for bounds in (CAPTIONS, MANY))
    n_q = n_kv if features.get("causal") or dice.random() < 0.5 else int(2 ** dice.uniform(*map(math.log2, PATCHES)))
    dtype = "fp16" if dice.random() < FP16 else "bf16"
    sizes = {"batch": batch, "heads": heads, "kv_heads": heads, "n_q": n_q, "n_kv": n_kv, "d": d, "d_v": d}
    return Problem(**sizes, dtype=dtype, features=Features(**features), direction="bwd").seen()


def guess_us(problem: Problem) -> float:
    """About how long a call takes."""
    return max(problem.flops() / TFLOPS, sum(_bytes(problem)) / TB_S) / 1e6


def _bytes(p: Problem) -> tuple[int, int]:
    """Bytes of the mask, and of all else."""
    mask = {"none": 0, "bool": p.n_q * p.n_kv, "bias": 2 * p.heads * p.n_q * p.n_kv}[p.features.mask]
    heads = p.heads * p.n_q * (p.d + p.d_v) + p.kv_heads * p.n_kv * (p.d + p.d_v)
    return mask, ITEMSIZE[p.dtype] * p.batch * heads
