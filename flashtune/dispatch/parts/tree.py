"""`tree`: attention of drafts that form a tree, over a cache and each other."""

from typing import Any

import torch
from torch import Tensor

from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.api import attention
from flashtune.dispatch.call.inspection import PLAIN_TYPES
from flashtune.dispatch.parts.merge import Pair, check_pairs, merge
from flashtune.dispatch.varlen import attention_varlen


def tree(
    query: Tensor,
    cache: Pair,
    drafts: Pair,
    parents: Tensor,
    *,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    allow_tf32: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention of drafted tokens: each sees all of its request's cache, and of the drafts its ancestors and itself.

    The cache is a call without a mask, the drafts one with the tree's, and `merge` joins them. Nothing is read on the host.

    Args:
        query: (requests, Hq, N, D), the drafts' queries.
        cache: keys and values before the drafts, (requests, Hkv, S, D); with `block_table` caches of pages, as in `attention_varlen`.
        drafts: the drafts' own keys and values, (requests, Hkv, N, D).
        parents: integers (N,) or (requests, N): the place of each draft's parent, which comes before it, and -1 for roots.
        seqused_k: (requests,), the keys that are used of each cache, without gradients.
        block_table: pages of each cache, without gradients.
        num_splits: as in `attention_varlen`, for caches with `seqused_k`.
        k_descale: factors of float8 caches, likewise.
        v_descale: likewise for values.
        scale: factor of the scores; None is 1 / sqrt(D).
        enable_gqa: allow Hq to be a multiple of Hkv.
        softcap: as in `attention`.
        sinks: (Hq,), as in `attention`.
        return_lse: return (output, LSE).
        allow_tf32: as in `attention`.
        implementation: as in `attention`, for both parts.

    Returns:
        The output (requests, Hq, N, D_v), or (output, LSE).

    Raises:
        InputError: for arguments that make no sense; places of parents are checked on a CPU. On a GPU one out of range is a root.
        InputTypeError: for arguments of a wrong type.
    """
    check_pairs(cache=cache, drafts=drafts)
    if not isinstance(query, Tensor) or query.dim() != 4:
        raise InputError(f"query is {tuple(getattr(query, 'shape', ()))}: give the drafts' queries, (requests, Hq, N, D)")
    words: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "softcap": softcap, "allow_tf32": allow_tf32}
    words |= {"implementation": implementation, "return_lse": True}
    own = attention(query, drafts[0], drafts[1], attn_mask=ancestors(parents, query), sinks=sinks, **words)
    if block_table is None and seqused_k is None:
        if any(x is not None for x in (num_splits, k_descale, v_descale)):
            raise InputError("num_splits, k_descale and v_descale are of caches with lengths: give seqused_k, or block_table")
        before = attention(query, cache[0], cache[1], **words)
    else:
        more = {"num_splits": num_splits, "k_descale": k_descale, "v_descale": v_descale, "seqused_k": seqused_k}
        before = _over_caches(query, cache, block_table, words | more)
    out, lse = merge([own, before])
    return (out, lse) if return_lse else out


def _over_caches(query: Tensor, cache: Pair, table: Tensor | None, words: dict[str, Any]) -> Pair:
    """Output and LSE of the drafts over caches with lengths: packed queries, as many of each request."""
    requests, _, count, _ = query.shape
    device = query.device
    if table is None:
        # Each cache is a page.
        cache = cache[0].transpose(1, 2), cache[1].transpose(1, 2)
        table = torch.arange(requests, dtype=torch.int32, device=device)[:, None]
    starts = count * torch.arange(requests + 1, dtype=torch.int32, device=device)
    most = table.shape[-1] * cache[0].shape[1]
    rows = query.transpose(1, 2).flatten(0, 1)
    out, lse = attention_varlen(rows, cache[0], cache[1], starts, None, count, most, block_table=table, **words)
    sizes = (requests, count)
    return out.unflatten(0, sizes).transpose(1, 2), lse.unflatten(1, sizes).transpose(0, 1)


def ancestors(parents: Tensor, query: Tensor) -> Tensor:
    """Mask of drafts: (N, N) or (requests, 1, N, N), True where the second is the first or one of its ancestors."""
    count = query.shape[2]
    if not isinstance(parents, Tensor) or parents.dtype not in (torch.int32, torch.int64):
        raise InputTypeError(f"parents are {getattr(parents, 'dtype', type(parents).__name__)}: give int32 or int64 places, -1 for roots")
    if parents.shape not in ((count,), (query.shape[0], count)) or parents.device != query.device:
        place = f"{tuple(parents.shape)} on {parents.device}"
        raise InputError(f"parents are {place} for {count} drafts: give (N,) or (requests, N) on {query.device}")
    places = torch.arange(count, device=parents.device)
    if parents.is_cpu and type(parents) in PLAIN_TYPES and not torch.compiler.is_compiling():
        wrong = (parents < -1) | (parents >= places)
        if bool(wrong.any()):
            raise InputError(f"parents name {int(parents[wrong][0])}, no draft before the one it is for: give earlier places, -1 for roots")
    sees = (parents[..., None] == places) | (places[:, None] == places)
    # Twice as many generations each time.
    for _ in range(max(0, count - 1).bit_length()):
        steps = sees.float()
        sees = steps @ steps > 0
    return sees if parents.dim() == 1 else sees[:, None]
