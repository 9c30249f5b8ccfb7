"""The ways in to attention as one kind of call: the same four sequences, options under the same names, and each way's own arguments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune import dispatch

HEADS, KV_HEADS, ROWS, KEYS, D = 2, 1, 9, 32, 16
"""Each of the two sequences has this many queries and keys, the last query on the diagonal of the last key."""

SEQUENCES = 2


class Tensors(NamedTuple):
    """Query (sequences, HEADS, ROWS, D), and key and value (sequences, KV_HEADS, KEYS, D)."""

    query: Tensor
    key: Tensor
    value: Tensor


def tensors(dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> Tensors:
    """Random tensors, equal at every call."""
    drawn = torch.Generator().manual_seed(3)
    shapes = (HEADS, ROWS, D), (KV_HEADS, KEYS, D), (KV_HEADS, KEYS, D)
    return Tensors(*(torch.randn(SEQUENCES, *shape, generator=drawn).to(dtype).requires_grad_(requires_grad) for shape in shapes))


def bounds(rows: int) -> Tensor:
    """Where sequences of equal length begin and end."""
    return torch.arange(SEQUENCES + 1, dtype=torch.int32) * rows


def packed_rows(x: Tensor) -> Tensor:
    """The rows of a batch one after the other: (tokens, heads, head size)."""
    return x.transpose(1, 2).flatten(0, 1)


def pages(x: Tensor) -> Tensor:
    """The keys of a batch in pages of 16: (blocks, 16, heads, head size)."""
    return x.transpose(1, 2).reshape(-1, 16, *x.shape[1:2], x.shape[3])


def doubled(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A score that is no feature of `attention`: the same for every pair but through the cosine of 0."""
    return score * torch.cos(0.0 * (i - j))


def dense(given: Tensors, **words: Any) -> Any:
    """Call of `attention`."""
    return dispatch.attention(*given, enable_gqa=True, **words)


def packed(given: Tensors, **words: Any) -> Any:
    """Call of `attention_varlen`."""
    rows = map(packed_rows, given)
    return dispatch.attention_varlen(*rows, bounds(given.query.shape[2]), bounds(given.key.shape[2]), ROWS, KEYS, enable_gqa=True, **words)


def paged(given: Tensors, **words: Any) -> Any:
    """Call of `attention_varlen` with a block table."""
    blocks = given.key.shape[2] // 16
    table = torch.arange(SEQUENCES * blocks, dtype=torch.int32).view(SEQUENCES, blocks)
    words |= {"block_table": table, "seqused_k": torch.full((SEQUENCES,), given.key.shape[2], dtype=torch.int32), "enable_gqa": True}
    caches = [pages(x) for x in given[1:]]
    return dispatch.attention_varlen(packed_rows(given.query), *caches, bounds(given.query.shape[2]), None, ROWS, KEYS, **words)


def functions(given: Tensors, **words: Any) -> Any:
    """Call of `flex_attention`."""
    return dispatch.flex_attention(*given, **{"score_mod": doubled, "enable_gqa": True, **words})


def packed_functions(given: Tensors, **words: Any) -> Any:
    """Call of `attention_varlen` with a score as code."""
    return packed(given, **{"score_mod": doubled, **words})


WAYS: dict[str, Callable[..., Any]] = {
    "dense": dense,
    "packed": packed,
    "paged": paged,
    "functions": functions,
    "packed functions": packed_functions,
}
"""Ways in by name; each takes Tensors and its options."""

EXPLAINED: dict[str, Callable[..., Any]] = {
    "attention": dispatch.explain,
    "attention_varlen": dispatch.explain_varlen,
    "flex_attention": dispatch.explain_flex,
}
"""Explanations by the name of the call that they explain."""


def rows_of(way: str, out: Tensor) -> Tensor:
    """A way's output as (sequences, heads, rows, head size)."""
    return out if out.dim() == 4 else out.unflatten(0, (SEQUENCES, -1)).transpose(1, 2)
