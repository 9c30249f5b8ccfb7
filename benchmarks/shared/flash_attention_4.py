"""FlashAttention-4 as a peer, where it is installed (`pip install flash-attn-4`)."""

import os
from typing import Any

import torch

from flashtune.core.problems.parameters import CallParameters
from flashtune.core.problems.problem import Problem

KEPT = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""Has it keep on disk what it compiles, so that the process that times needn't compile again."""


def keep_compiled() -> None:
    """Must run before it is imported."""
    os.environ.setdefault(KEPT, "1")


def words_of(problem: Problem, parameters: CallParameters) -> dict[str, Any] | None:
    """The keywords of its call; None where it lacks a feature. Its diagonal ends at the last key."""
    p, f = problem, problem.features
    if f.mask != "none" or f.dropout or f.alibi or p.dtype not in ("bf16", "fp16") or p.d % 8 or p.d_v % 8:
        return None
    if f.banded and p.band.diagonal != p.n_kv - p.n_q:
        return None
    words: dict[str, Any] = {"causal": f.causal, "softmax_scale": parameters.scale}
    words |= {"window_size": f.window} if f.window is not None else {}
    words |= {"softcap": parameters.softcap} if f.softcap else {}
    # Sinks are alike in every batch here.
    words |= {"learnable_sink": parameters.sinks[0].contiguous()} if parameters.sinks is not None else {}
    return words


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: dict[str, Any]) -> torch.Tensor:
    """Its call, on tensors (B, N, H, D); raises ImportError where it isn't installed."""
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

    found = flash_attn_func(q, k, v, **words)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out
