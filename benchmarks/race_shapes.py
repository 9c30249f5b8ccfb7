"""Shapes that race_again.py races because few rows are near them."""

from typing import Any

from forward_cells import TOKENS

from flashtune.core.dtypes import DType
from flashtune.core.problem import Features, Problem


def shape(
    batch: int, heads: int, n: int, d: int, *, d_v: int = 0, sharing: int = 1, n_q: int = 0, dtype: DType = "bf16", **features: Any
) -> Problem:
    """A forward of so many batches and heads, with as many queries as keys where `n_q` doesn't say."""
    sizes = {"batch": batch, "heads": heads, "kv_heads": heads // sharing, "n_q": n_q or n, "n_kv": n, "d": d, "d_v": d_v or d}
    return Problem(**sizes, dtype=dtype, features=Features(**features))


def short_shapes() -> list[Problem]:
    """Shapes near which drawn ones were served worst (unprepared.py): few keys, which tiles of other sizes fit; features at few keys, whose
    rows are of many; steps of all heads over few keys; biases whose rows of N aren't aligned; and head sizes whose rows were tried of few
    configs."""
    window = {"causal": True, "window": (300, 0)}
    found = [shape(16, 16, 1024, 160), shape(16, 16, 1024, 40), shape(2, 8, 4096, 40), shape(16, 16, 1024, 192, d_v=128)]
    found += [shape(1, 16, 2001, d, mask="bias") for d in (128, 64)]
    found += [shape(64, 16, 256, d, causal=causal) for d in (128, 64) for causal in (False, True)]
    found += [shape(96, 16, 192, d, causal=causal) for d in (128, 64) for causal in (False, True)]
    found += [shape(32, 16, 512, d, causal=True, alibi=True) for d in (128, 64)]
    found += [shape(32, 16, 512, d, mask=mask) for mask in ("bool", "bias") for d in (128, 64)]
    found += [shape(64, 32, n, d, n_q=1) for d in (128, 64) for n in (256, 1024)]
    found += [shape(2, 16, 1536, d, causal=True, dropout=True) for d in (64, 128)]
    found += [shape(16, 16, 1024, d, **window) for d in (128, 64)]
    found += [shape(6, 8, 2048, 64, causal=True), shape(6, 8, 2048, 128, causal=True)]
    found += [shape(32, 16, 512, d, causal=True) for d in (112, 80, 160, 96)]
    found += [shape(64, 16, 256, d) for d in (256, 80, 40)] + [shape(64, 16, 192, 192, d_v=128, mask="bool")]
    found += [shape(4, 16, 4096, d, causal=True, softcap=True) for d in (40, 80)]
    found += [shape(16, 16, 1024, d, mask="bias") for d in (80, 160)] + [shape(64, 32, n, 112, n_q=1) for n in (256, 1024)]
    found += [shape(32, 40, 640, 64, sharing=8, causal=True), shape(16, 16, 1024, 256, causal=True, dropout=True)]
    # Whose bf16 winners never raced in fp16.
    found += [shape(TOKENS // n, 32, n, 64, dtype="fp16") for n in (4096, 16384, 8192, 2048)]
    found += [shape(TOKENS // n, 32, n, 64, dtype="fp16", causal=True) for n in (2048, 16384)]
    return found


CACHES = ((4, 32, 8192), (1, 128, 8192), (8, 8, 4096), (2, 300, 16384), (8, 100, 2560))
"""Batches, queries and keys of few queries over a cache: prompts in chunks, and guesses that a model checks."""


def few_shapes() -> list[Problem]:
    """Few queries over a cache by head size and sharing, those first that most models have."""
    causal = {"causal": True, "alignment": "bottom_right"}
    window = causal | {"window": (1024, 0)}
    found: list[Problem] = []
    for b, n_q, n_kv in CACHES:
        found += [shape(b, 32, n_kv, 128, sharing=sharing, n_q=n_q, **causal) for sharing in (4, 8, 1)]
        found += [shape(b, 64, n_kv, 64, sharing=sharing, n_q=n_q, **causal) for sharing in (8, 4)]
    for b, n_q, n_kv in ((16, 26, 8192), (4, 90, 16384)):
        found += [shape(b, 32, n_kv, d, sharing=4, n_q=n_q, **window) for d in (128, 64, 256, 40, 96)]
    found += [shape(4, 64, 8192, 64, sharing=8, n_q=n_q, sinks=True, **features) for n_q in (32, 128) for features in (causal, window)]
    found += [shape(4, 64, 8192, 192, d_v=128, sharing=8, n_q=9, dtype="fp16", **window)]
    for b, n_q, n_kv in CACHES[:4]:
        found += [shape(b, 16, n_kv, d, sharing=4, n_q=n_q, **causal) for d in (256, 160, 80)]
    found += [shape(b, 16, n_kv, 192, d_v=128, n_q=n_q, **causal) for b, n_q, n_kv in CACHES[:2]]
    found += [shape(b, 8, n_kv, d, n_q=n_q, **causal) for b, n_q, n_kv in ((3, 180, 15360), (4, 60, 8192)) for d in (40, 64, 80)]
    return found + [shape(6, 32, 8192, d, sharing=4, n_q=n_q) for n_q in (100, 24) for d in (64, 160)]


def brief_shapes() -> list[Problem]:
    """Many sequences of 16 to 96 rows, as sentences, captions and patches in windows are, those first that most others are near to; and
    calls of few heads, whose last tiles the GPU waits for."""
    causal = {"causal": True}
    found = [shape(512, 16, n, 64) for n in (24, 56, 16, 40, 96)] + [shape(512, 16, n, 64, dtype="fp16") for n in (20, 60)]
    found += [shape(512, 16, n, 64, **causal) for n in (24, 60, 16)] + [shape(512, 16, n, d) for d in (96, 80, 128, 32) for n in (24, 60)]
    found += [shape(512, 16, n, d, **causal) for d in (128, 80) for n in (24, 60)] + [shape(512, 16, 16, d, **causal) for d in (128, 80)]
    found += [shape(512, 16, n, d, mask="bool") for d in (64, 128) for n in (20, 60)] + [shape(512, 16, 24, 64, mask="bias")]
    found += [shape(1, 8, 3840, d, causal=True, alibi=True) for d in (64, 128)] + [shape(4, 8, 600, d, n_q=160) for d in (40, 80, 64)]
    return found + [shape(2, 8, 1536, d, sharing=8, sinks=True, **causal) for d in (64, 128)]


def sparse_shapes() -> list[Problem]:
    """Shapes of kinds that few rows are of, near which drawn ones were served worst or by moved configs, those first that most others are
    near to: D = 40, whose rows were tried of few configs; features and short calls at sizes between powers of two; few rows over many
    keys; calls that hardly fill the GPU; and steps of head sizes without any."""
    causal, window = {"causal": True}, {"causal": True, "window": (300, 0)}
    mask, dropout, alibi = {"mask": "bool"}, {"causal": True, "dropout": True}, {"causal": True, "alibi": True}
    found = [shape(16, 16, 1024, 40, **features) for features in ({}, causal, window, dropout, mask, alibi)]
    found += [shape(4, 16, 4096, 40, **features) for features in ({}, causal)]
    found += [shape(16, 16, 1024, d, **window) for d in (96, 80, 160)] + [shape(16, 16, 1024, d, mask="bool") for d in (80, 96, 160)]
    found += [shape(16, 16, 1024, d, **dropout) for d in (96, 80, 160)] + [shape(8, 16, 2048, 160, causal=True)]
    found += [shape(32, 16, 512, d) for d in (96, 80, 192, 160, 112)] + [shape(32, 16, 512, 192, causal=True)]
    found += [shape(8, 16, 2048, 96, causal=True), shape(2, 16, 2048, 80, causal=True, window=(1024, 0))]
    found += [shape(16, 16, n, d, n_q=256) for n, d in ((4096, 64), (4096, 96), (4096, 128))]
    found += [shape(16, 16, 1024, 96, mask="bias"), shape(16, 16, 1024, 112, mask="bool"), shape(4, 16, 4096, 72, mask="bool")]
    found += [shape(16, 8, 1024, 256, **features) for features in (mask, {"mask": "bias"}, window)]
    found += [shape(32, 16, 512, d, **alibi) for d in (96, 160)] + [shape(32, 16, 512, 112, **window)]
    found += [shape(16, 16, 1024, 192, **features) for features in (mask, dropout)] + [shape(32, 16, 512, 192, d_v=128)]
    found += [shape(64, 32, 1024, d, n_q=1) for d in (80, 160, 40)] + [shape(32, 16, 1024, 256, n_q=1)]
    found += [
        shape(32, 16, 512, 40, causal=True),
        shape(16, 16, 1024, 40, causal=True, softcap=True),
        shape(16, 16, 1024, 256, **dropout),
    ]
    return found
