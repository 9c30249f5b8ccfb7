"""Masks and scores as code of the shapes that `flashtune referee` judges."""

from typing import Any


def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Each token sees every fourth before it."""
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 4 == 0)


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """All see the first 256 tokens; what follows is causal."""
    return (kv_idx < 256) | (q_idx >= kv_idx)


def falling(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Scores fall with the square of the distance."""
    return score - 1e-4 * (q_idx - kv_idx) * (q_idx - kv_idx)
