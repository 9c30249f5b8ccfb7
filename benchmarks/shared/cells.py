"""Cells of the forward pass: the calls that the case `forward` times, in groups. Nothing here needs a GPU."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.shared.environment import names_of
from flashtune.core.problems.dtypes import ITEMSIZE, DType
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.models import ModelAttention, models
from flashtune.tuner.verify.distributions import PRESENT

Group = Literal["plain", "features", "fp8", "decode", "small", "models", "scores", "unprepared", "deterministic"]
USUAL: tuple[Group, ...] = ("plain", "features", "fp8", "decode", "small")
"""Groups of a run that names none."""
GROUPS: tuple[Group, ...] = (*USUAL, "models", "scores")
"""Groups of fixed cells; the case `random_shapes` draws its own, of group "unprepared"."""


def groups_of(text: str) -> tuple[Group, ...]:
    """Groups of cells (see `names_of`)."""
    return names_of(text, GROUPS, "cells")


def peers_of_text(text: str) -> tuple[str, ...]:
    """Peers that some cell has (see `names_of`), or none."""
    return names_of(text, sorted({peer for cell in cells(GROUPS) for peer in cell.peers}), "peers") if text else ()


TOKENS = 16384
"""B * N of the plain, feature and fp8 cells."""

WIDTH = 2048
"""H * D of the same cells."""

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

FEATURES: dict[str, Features] = {
    "mask": Features(mask="bool"),
    "bias": Features(mask="bias"),
    "dropout": Features(causal=True, dropout=True),
    "window": Features(causal=True, window=(1024, 0)),
    "alibi": Features(causal=True, alibi=True),
    "softcap": Features(causal=True, softcap=True),
    "gqa": Features(causal=True),
}
"""The cases of the feature cells."""

DECODE = ((128, 16, 4096), (128, 1, 65536), (128, 1, 8192), (64, 16, 4096))
"""(D, B, N) of one query row over a cache of N keys, with 32 query and 8 key heads."""

ALONE = ((128, 16, (256, 512, 1024, 2048)), (64, 12, (512, 1024)))
"""(D, H, lengths) of one sequence by itself, which leaves much of a large GPU idle or fills it once or twice."""

DEFAULT_AND_FA4 = ("default", "cudnn", "flash", "fa4")
"""The best of torch, and FlashAttention-4."""

PREFILL = (512, 2048, 8192)
"""Lengths of models' causal self-attention, those that a model has; other attentions have the model's own."""

AT_ONCE = 8192
"""Batch times queries of a model's prefill, or one sequence where that has more."""

STEP = (8, 4096)
"""Sequences and keys of a model's decoding step; fewer keys where it has fewer."""

LAST_ROWS = ((16, 8192), (128, 16384), (192, 16384))
"""(N_q, N_kv) of the last rows of one long sequence, as a draft to verify or a chunk of prefill: D = 128, 32 query and 8 key heads."""


CUDNN_FP8 = "cudnn fp8"
"""cuDNN's own fp8 (cudnn_fp8.py); what is `cudnn` beside fp8 is its bf16."""

RANDOM = "random numbers"
"""Our own call on the normal inputs that a distribution was made of."""

TELLING = ("random", "sink+30", "needle+30", "deviation-8", "drift+60", "drift-60", "sink+8", "misled-10%")
"""Distributions that say the most: a run that is cut short has these."""

PADDED = ("random", "sink+8", "sink+30", "needle+30", "deviation-8", "drift+60", "drift-60")
"""Distributions that are also timed with half of the keys hidden by a mask."""

SCORE_DTYPES: tuple[DType, ...] = ("bf16", "fp16")

OTHER_LENGTHS = (1024, 16384)
"""Where sinks and drifts are timed, beside N = 4096."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One call to time, and beside what. `scores` names the distribution of its scores (flashtune.tuner.verify.distributions), if any."""

    group: Group
    case: str
    problem: Problem
    peers: tuple[str, ...] = ()
    scores: str = ""

    @property
    def name(self) -> str:
        """For tables and messages: `plain causal D=64 N=4096`, `small 128 rows D=128 B=1 N=16384`."""
        if self.group == "unprepared":
            return f"{self.case} B={self.problem.batch}"
        batch = f" B={self.problem.batch}" if self.group in ("decode", "small") else ""
        rows = f"{self.problem.n_q}x" if self.group == "models" and self.problem.n_q not in (1, self.problem.n_kv) else ""
        return f"{self.group} {self.case} D={self.problem.d}{batch} N={rows}{self.problem.n_kv}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V together, the traffic of decoding."""
        p = self.problem
        return ITEMSIZE[p.dtype] * p.batch * p.kv_heads * p.n_kv * (p.d + p.d_v)


def cells(
    groups: tuple[Group, ...] = USUAL,
    *,
    d: Collection[int] | None = None,
    n: Collection[int] | None = None,
    without: tuple[str, ...] = (),
    only: str = "",
) -> list[Cell]:
    """The cells of these groups, less the peers `without`; of these head sizes and lengths only where they are given, and of all these
    those whose name the regular expression `only` finds."""
    return [
        replace(cell, peers=tuple(name for name in cell.peers if name not in without))
        for group in groups
        for cell in _EVERY[group]()
        if (d is None or cell.problem.d in d) and (n is None or cell.problem.n_kv in n) and re.search(only, cell.name)
    ]


def problem_of(d: int, n: int, features: Features, *, sharing: int = 1, dtype: DType = "bf16") -> Problem:
    """N queries and keys of head size `d`, TOKENS of them in all batches together, with `sharing` query heads to a key head; a backward
    where the features ask for gradients."""
    heads = WIDTH // d
    sizes = {"batch": TOKENS // n, "heads": heads, "kv_heads": heads // sharing, "n_q": n, "n_kv": n, "d": d, "d_v": d}
    return Problem(**sizes, dtype=dtype, features=features, direction="bwd" if features.asked else "fwd")


def _bands() -> Iterator[tuple[str, Features]]:
    for causal in (False, True):
        yield ("causal" if causal else "full"), Features(causal=causal)


def _plain() -> Iterator[Cell]:
    for d in (64, 128, 256):
        for case, features in _bands():
            for n in LENGTHS:
                yield Cell(group="plain", case=case, problem=problem_of(d, n, features), peers=("cudnn", "flash", "fa4", "flex"))


def _features() -> Iterator[Cell]:
    for d in (64, 128):
        for case, features in FEATURES.items():
            problem = problem_of(d, 4096, features, sharing=4 if case == "gqa" else 1)
            yield Cell(group="features", case=case, problem=problem, peers=("default", "cudnn", "flash", "efficient", "fa4", "flex"))


def _fp8() -> Iterator[Cell]:
    for case, features in _bands():
        alone = problem_of(128, 16384, features, dtype="fp8")
        for name, problem in ((case, alone), (f"{case} 64/8", replace(alone, heads=64, kv_heads=8))):
            yield Cell(group="fp8", case=name, problem=problem, peers=("ours in bf16", "cudnn", CUDNN_FP8))


def _decode() -> Iterator[Cell]:
    for d, batch, n in DECODE:
        problem = Problem(batch=batch, heads=32, kv_heads=8, n_q=1, n_kv=n, d=d, d_v=d, dtype="bf16")
        yield Cell(group="decode", case="one row", problem=problem, peers=("cudnn", "flash", "flex", "copy"))


def _small() -> Iterator[Cell]:
    peers = ("cudnn", "flash")
    for d, heads, lengths in ALONE:
        for case, features in _bands():
            for n in lengths:
                problem = Problem(batch=1, heads=heads, kv_heads=heads, n_q=n, n_kv=n, d=d, d_v=d, dtype="bf16", features=features)
                yield Cell(group="small", case=case, problem=problem, peers=peers)
    for rows, n in LAST_ROWS:
        features = Features(causal=True, alignment="bottom_right")
        problem = Problem(batch=1, heads=32, kv_heads=8, n_q=rows, n_kv=n, d=128, d_v=128, dtype="bf16", features=features)
        yield Cell(group="small", case=f"{rows} rows", problem=problem, peers=peers)


def _models() -> Iterator[Cell]:
    """Each problem once, under the name of the first model that has it."""
    known: set[Problem] = set()
    for step in (False, True):
        for model in models().values():
            for kind in model.attentions:
                for problem in _steps(kind) if step else _prefills(kind):
                    if problem not in known:
                        known.add(problem)
                        case = f"{model.slug} {kind.what.split(',')[0]}" + (" step" if step else "")
                        yield Cell(group="models", case=case, problem=problem, peers=DEFAULT_AND_FA4)


def _prefills(kind: ModelAttention) -> Iterator[Problem]:
    growing = kind.causal and kind.n_q is None
    for n in [n for n in PREFILL if growing and n <= max(kind.n)] or kind.n:
        yield kind.problem(n=n, dtype="bf16", batch=max(1, AT_ONCE // (kind.n_q or n)))


def _steps(kind: ModelAttention) -> Iterator[Problem]:
    if kind.causal and kind.what != "text":
        batch, n = STEP
        yield kind.problem(n=min(n, max(kind.n)), dtype="bf16", batch=batch, n_q=1)


def _scores() -> Iterator[Cell]:
    """Plain cells on every distribution, those first without which a run says least."""
    for names in (TELLING, [name for name in PRESENT if name not in TELLING]):
        for scores in names:
            yield from _of_scores(scores, 4096)
        for scores in names:
            if scores in PADDED:
                yield from _of_scores(scores, 4096, padded=True)
        for scores in names:
            if scores.startswith(("sink", "drift")):
                for n in OTHER_LENGTHS:
                    yield from _of_scores(scores, n)


def _of_scores(scores: str, n: int, *, padded: bool = False) -> Iterator[Cell]:
    for dtype in SCORE_DTYPES:
        for d in (64, 128, 256):
            for case, features in _bands():
                # Torch's FlashAttention takes no mask, cuDNN not every one.
                peers = ("cudnn", "efficient", RANDOM) if padded else ("cudnn", RANDOM)
                masked = replace(features, mask="bool") if padded else features
                name = " ".join([case, dtype, *(["padded"] if padded else []), scores])
                yield Cell(group="scores", case=name, problem=problem_of(d, n, masked, dtype=dtype), peers=peers, scores=scores)


_EVERY: dict[Group, Callable[[], Iterator[Cell]]] = {
    "plain": _plain,
    "features": _features,
    "fp8": _fp8,
    "decode": _decode,
    "small": _small,
    "models": _models,
    "scores": _scores,
}
