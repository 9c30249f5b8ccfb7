"""`cascade`: attention of many requests over a prefix that they share and a suffix of each."""

from typing import Any

import torch
from torch import Tensor

from flashtune.core.system.errors import InputError
from flashtune.dispatch.api import attention
from flashtune.dispatch.parts.merge import Pair, check_pairs, merge
from flashtune.dispatch.varlen import attention_varlen


def cascade(
    query: Tensor,
    prefix: Pair,
    suffix: Pair,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    *,
    prefix_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    allow_tf32: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention of requests whose keys are a prefix, one for all, and then a suffix of their own.

    The prefix is read once for all queries together. Both parts are calls of `attention` or `attention_varlen`, and `merge` joins them.

    Args:
        query: (requests, Hq, N, D); with `cu_seqlens_q` packed, (T, Hq, D).
        prefix: its keys and values, (1, Hkv, P, D); for packed queries (P, Hkv, D), or with `prefix_table` caches of pages.
        suffix: keys and values of the requests, (requests, Hkv, S, D); for packed queries (T_k, Hkv, D), or with `block_table` caches.
        cu_seqlens_q: where the requests' queries begin, as in `attention_varlen`.
        cu_seqlens_k: likewise for their suffixes.
        max_seqlen_q: bound of the numbers of queries.
        max_seqlen_k: bound of the lengths of suffixes.
        prefix_table: int32 or int64 (pages,): the prefix is these blocks of its caches, each full. There are no gradients then.
        seqused_k: the used keys of each suffix, as in `attention_varlen`.
        block_table: pages of each suffix, as in `attention_varlen`, without gradients.
        num_splits: as in `attention_varlen`: parts of the keys of the suffixes, and of the prefix where no gradient is needed.
        k_descale: factors of float8 caches of suffixes, as in `attention_varlen`.
        v_descale: likewise for values.
        is_causal: hide the keys right of the diagonal, which ends at each suffix's last query and key; the prefix is before all of them.
        scale: factor of the scores; None is 1 / sqrt(D).
        enable_gqa: allow Hq to be a multiple of Hkv.
        softcap: as in `attention`.
        sinks: (Hq,), as in `attention`.
        return_lse: return (output, LSE).
        allow_tf32: as in `attention`.
        deterministic: as in `attention`.
        implementation: as in `attention`, for both parts.

    Returns:
        The output, or (output, LSE), laid out as `attention` or `attention_varlen` does.

    Raises:
        InputError: for arguments that make no sense.
        InputTypeError: for arguments of a wrong type.
    """
    check_pairs(prefix=prefix, suffix=suffix)
    words: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "softcap": softcap, "allow_tf32": allow_tf32}
    words |= {"deterministic": deterministic, "implementation": implementation, "return_lse": True}
    more: dict[str, Any] = {"is_causal": is_causal, "causal_alignment": "bottom_right", "sinks": sinks}
    if cu_seqlens_q is None:
        if any(x is not None for x in (cu_seqlens_k, prefix_table, seqused_k, block_table, num_splits, k_descale, v_descale)):
            raise InputError("lists of lengths and pages are of packed requests: give cu_seqlens_q, and queries (T, Hq, D)")
        out, lse = _dense(query, prefix, suffix, words, more)
    else:
        more |= {"block_table": block_table, "seqused_k": seqused_k, "k_descale": k_descale, "v_descale": v_descale}
        words["num_splits"] = num_splits
        # The suffixes first, whose call checks the queries and their bounds.
        key, value = suffix
        own = attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **words, **more)
        parts = [own, _over_prefix(query, prefix, prefix_table, cu_seqlens_q, words)]
        out, lse = merge(parts, packed=True)
    return (out, lse) if return_lse else out


def _dense(query: Tensor, prefix: Pair, suffix: Pair, words: dict[str, Any], more: dict[str, Any]) -> Pair:
    """Output and LSE of requests of equal sizes."""
    for name, x in (("query", query), *zip(("the prefix's keys", "the prefix's values"), prefix, strict=True)):
        if x.dim() != 4 or (x is not query and x.shape[0] != 1):
            raise InputError(f"{name} are {tuple(x.shape)}: give queries (requests, Hq, N, D) and one prefix (1, Hkv, P, D)")
    own = attention(query, suffix[0], suffix[1], **words, **more)
    together = query.transpose(0, 1).flatten(1, 2)[None]
    out, lse = (
        x[0].unflatten(1, (query.shape[0], query.shape[2])).transpose(0, 1) for x in attention(together, prefix[0], prefix[1], **words)
    )
    return merge([own, (out, lse)])


def _over_prefix(query: Tensor, prefix: Pair, table: Tensor | None, cu_q: Tensor, words: dict[str, Any]) -> Any:
    """Output and LSE of packed queries over the prefix: one sequence, whose queries end where the last request's do."""
    key, value = prefix
    # With a step of the number of requests: the first bound and the last.
    ends, device = cu_q[:: len(cu_q) - 1].contiguous() if len(cu_q) > 1 else cu_q.repeat(2), query.device
    if table is None:
        if key.dim() != 3:
            raise InputError(f"the prefix's keys are {tuple(key.shape)}: give (P, Hkv, D) for packed queries, or a prefix_table of pages")
        count = key.shape[0]
        if not count or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))):
            return attention_varlen(query, key, value, ends, count * torch.arange(2, device=device), query.shape[0], count, **words)
        # A cache of one page: keys of caches are split over the GPU, those of packed sequences aren't.
        key, value, table = key[None], value[None], torch.zeros(1, dtype=torch.int32, device=device)
    elif table.dim() != 1 or key.dim() != 4:
        raise InputError(f"prefix_table is {tuple(table.shape)} for keys {tuple(key.shape)}: give (pages,) and caches of pages")
    count = table.shape[0] * key.shape[1]
    used = torch.full((1,), count, dtype=torch.int32, device=device)
    return attention_varlen(query, key, value, ends, None, query.shape[0], count, seqused_k=used, block_table=table[None], **words)
