"""Arguments of calls of packed sequences and paged caches, checked: their tensors, and the numbers that they mean."""

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from flashtune.core.problems.band import ALIGNMENTS, Sides
from flashtune.core.pytorch.attention import autocasting
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.call.inspection import autocast, is_distributed
from flashtune.dispatch.call.parse import TRUTH_VALUES, Options, check_flags, check_implementation, scalars
from flashtune.dispatch.call.sequences import Numbers, Packed
from flashtune.dispatch.rows.paged import NARROW

NO_CACHES = "k_descale and v_descale are factors of paged caches in float8: pass a block_table, or packed keys in query's dtype"
"""Why these factors are refused without a table."""


def parsed(packed: Packed, options: Options, max_q: int, max_k: int, splits: int | None = None) -> tuple[Packed, Numbers]:
    """Checked tensors and the numbers of a call."""
    if packed.table is None:
        return _checked(packed, options, max_q, max_k)
    # One row of each cache stands for it in the checks of packed calls.
    key, value = _checked_pages(packed, options.dropout_p)
    like, numbers = _checked(packed._replace(key=key, value=value), options, max_q, max_k)
    resolved = Packed(*map(_resolved, packed))  # type: ignore[arg-type]
    bounds = {"cu_q": like.cu_q, "cu_k": like.cu_q, "used": like.used, "slopes": like.slopes}
    return resolved._replace(**bounds), numbers._replace(splits=splits)  # type: ignore[arg-type]


def _checked(packed: Packed, options: Options, max_q: int, max_k: int) -> tuple[Packed, Numbers]:
    """Checked tensors and the numbers of a call without pages."""
    query, key, value, cu_q, cu_k, used, slopes, sinks, *_ = packed
    check_flags({name: getattr(options, name) for name in TRUTH_VALUES})
    for place, (name, x) in enumerate(zip(NAMES[:8], packed[:8], strict=True)):
        if place >= _REQUIRED and x is None:
            continue
        if not isinstance(x, Tensor):
            raise InputTypeError(f"{name} must be a tensor, not {type(x).__name__}: pass torch tensors")
        if is_distributed(x):
            raise InputTypeError(f"{name} is a DTensor, and packed sequences are of one rank: call with to_local() of each tensor")
        if x.layout is not torch.strided:
            raise InputTypeError(f"{name} has the layout {x.layout}: convert it with .to_dense()")
        if x.device != query.device:
            raise InputError(f"{name} is on {x.device} and query on {query.device}: move all to one device")
    for name, most in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
        if not isinstance(most, (int, torch.SymInt, Integral)):
            raise InputTypeError(f"{name} must be an integer, not {type(most).__name__}: give the length of the longest sequence, or more")
        if isinstance(most, int) and most < 0:
            raise InputError(f"{name}={most} is negative: give the length of the longest sequence, or more")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise InputError(f"{name} has {x.dim()} dimensions: packed tensors are (tokens, heads, head size)")
    if query.dtype in NARROW:
        raise InputTypeError(
            f"query is {query.dtype}: give it in float16, bfloat16 or float32, since caches (block_table) alone may be float8"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise InputTypeError(f"query, key and value have the dtypes {query.dtype}, {key.dtype} and {value.dtype}: give them one")
    heads, kv_heads = query.shape[1], key.shape[1]
    if key.shape[:2] != value.shape[:2] or key.shape[2] != query.shape[2]:
        raise InputError(f"key {tuple(key.shape)} and value {tuple(value.shape)} don't fit to query {tuple(query.shape)}: check the sizes")
    if heads != kv_heads and not options.enable_gqa:
        raise InputError(f"Hq={heads} and Hkv={kv_heads} differ: set enable_gqa=True, or give them the same number of heads")
    if kv_heads == 0 or heads % kv_heads:
        raise InputError(f"{heads} query heads can't share {kv_heads} key heads: make Hq a multiple of Hkv")
    _check_lengths(cu_q, cu_k, used)
    check_implementation(options.implementation)
    if options.causal_alignment not in ALIGNMENTS:
        raise InputError(f"unknown causal_alignment {options.causal_alignment!r}: use one of {', '.join(ALIGNMENTS)}")
    sequences = cu_q.shape[0] - 1
    if slopes is not None:
        if slopes.shape not in ((heads,), (sequences, heads)) or slopes.dtype != torch.float32:
            raise InputError(f"alibi_slopes are {slopes.dtype} {tuple(slopes.shape)}: give float32 (Hq,) or (sequences, Hq)")
        slopes = slopes.expand(sequences, heads)
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype not in (torch.float32, query.dtype)):
        raise InputError(f"sinks are {sinks.dtype} {tuple(sinks.shape)}: give ({heads},) in float32 or the output's dtype")
    dropout_p, softcap, scale = scalars(options, wide=query.dtype == torch.float64)
    (left, right), bottom_right = Sides.of(options.window, options.is_causal, "top_left").window, options.causal_alignment == "bottom_right"
    left, right = (-1 if side is None else side for side in (left, right))
    if not torch.compiler.is_compiling():
        query, key, value, cu_q, cu_k = (x.resolve_neg() for x in (query, key, value, cu_q, cu_k))
        used, slopes, sinks = map(_resolved, (used, slopes, sinks))
    cu_q, cu_k, used = cu_q.contiguous(), cu_k.contiguous(), None if used is None else used.contiguous()
    scale = 1.0 / math.sqrt(query.shape[2] or 1) if scale is None else scale
    # numpy's integers lack methods of Python's.
    max_q, max_k = (most if isinstance(most, torch.SymInt) else int(most) for most in (max_q, max_k))
    numbers = Numbers(max_q, max_k, scale, left, right, bottom_right, softcap, dropout_p, **options.flags())
    return Packed(query, key, value, cu_q, cu_k, used, slopes, sinks), numbers


NAMES = (
    "query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "sinks", "block_table", "k_descale", "v_descale",
)  # fmt: skip
"""Names of a call's tensors in the order of Packed."""
_REQUIRED = 5
"""How many of them must be given."""
_MOST_SPLITS = 65535
"""Most programs in the second dimension of a launch."""


def splits_of(splits: int | None) -> int | None:
    """A number of splits; None where it is left to the host, as 0 leaves it in other libraries. Raises InputError for any other value."""
    if splits is None:
        return None
    if not (isinstance(splits, (int, torch.SymInt, Integral)) and 0 <= splits <= _MOST_SPLITS):
        raise InputError(f"num_splits={splits!r} is no number of splits: give 1 to {_MOST_SPLITS}, or None or 0 for as many as suit")
    return None if splits == 0 else splits


def integers(max_q: Any, max_k: Any) -> tuple[int, int]:
    """Bounds of lengths as Python's integers, whose methods numpy's lack in part; raises TypeError for what is no integer."""
    if not (isinstance(max_q, Integral) and isinstance(max_k, Integral)):
        raise TypeError(max_q, max_k)
    return int(max_q), int(max_k)


def _check_lengths(cu_q: Tensor, cu_k: Tensor, used: Tensor | None) -> None:
    """Refuse lists of lengths of a wrong dtype or size; their contents are on the device and aren't read."""
    sequences = cu_q.shape[0] - 1 if cu_q.dim() == 1 else -1
    for name, x, size in (("cu_seqlens_q", cu_q, sequences + 1), ("cu_seqlens_k", cu_k, sequences + 1), ("seqused_k", used, sequences)):
        if x is None:
            continue
        if x.dtype not in (torch.int32, torch.int64):
            raise InputTypeError(f"{name} has dtype {x.dtype}: use int32 or int64")
        if sequences < 0 or x.shape != (size,):
            raise InputError(
                f"{name} has the shape {tuple(x.shape)}: give sequences + 1 bounds of queries and keys, and sequences numbers of used ones"
            )


def _checked_pages(packed: Packed, dropout_p: float) -> list[Tensor]:
    """One row of key and of value in the query's dtype, for the checks of packed calls; raises where the tensors don't fit as pages."""
    query, key, value, cu_q, table = *packed[:4], packed.table
    assert table is not None, "pages have a table"
    for name, x in (("query", query), ("key", key), ("value", value), ("cu_seqlens_q", cu_q), ("block_table", table)):
        if not isinstance(x, Tensor):
            raise InputTypeError(f"{name} must be a tensor, not {type(x).__name__}: pass torch tensors")
        if is_distributed(x):
            raise InputTypeError(f"{name} is a DTensor, and paged caches are of one rank: call with to_local() of each tensor")
    for name, x in (("key", key), ("value", value)):
        if x.dim() != 4:
            raise InputError(f"{name} has {x.dim()} dimensions: with block_table caches are (blocks, page size, heads, head size)")
    if key.shape[:3] != value.shape[:3] or key.shape[1] == 0 or key.dtype != value.dtype:
        raise InputError(
            f"key {tuple(key.shape)} {key.dtype} and value {tuple(value.shape)} {value.dtype} don't fit: give them equal pages, none empty"
        )
    if key.dtype != query.dtype and key.dtype not in NARROW:
        raise InputTypeError(f"query is {query.dtype} and its caches are {key.dtype}: give them one dtype, or caches in float8")
    if table.dim() != 2 or table.dtype not in (torch.int32, torch.int64) or table.device != query.device:
        raise InputError(
            f"block_table is {table.dtype} {tuple(table.shape)} on {table.device}: give (sequences, pages) int32 or int64 on query's device"
        )
    if packed.used is None:
        raise InputError("block_table says nothing about lengths: give seqused_k, the number of keys of each sequence, or cu_seqlens_k")
    if dropout_p:
        raise InputError(f"dropout_p={dropout_p} drops pairs, but paged caches are for inference: drop none, or pass packed keys")
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in packed):
        raise InputError("paged caches have no gradients: call under torch.no_grad(), or pass packed keys and values")
    if cu_q.dim() == 1 and 0 < len(cu_q) != table.shape[0] + 1:
        raise InputError(f"block_table has {table.shape[0]} rows for {len(cu_q) - 1} sequences: give one for each")
    sizes = table.shape[0], key.shape[2]
    for name, factor in (("k_descale", packed.k_descale), ("v_descale", packed.v_descale)):
        if factor is None:
            continue
        if not isinstance(factor, Tensor):
            raise InputTypeError(f"{name} must be a tensor, not {type(factor).__name__}: give float32 (sequences, Hkv) or (Hkv,)")
        if factor.device != query.device:
            raise InputError(f"{name} is on {factor.device} and query on {query.device}: move all to one device")
        if key.dtype not in NARROW or factor.dtype != torch.float32 or factor.shape not in (sizes, sizes[1:]):
            raise InputError(
                f"{name} is {factor.dtype} {tuple(factor.shape)} for {key.dtype}: give float32 (sequences, Hkv) or (Hkv,) and float8 caches"
            )
    stubs = [query.new_empty((1, *x.shape[2:])) for x in (key, value)]
    return stubs


def cast(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Query, key and value in autocast's dtype, where it is on; as they are where one is in fp8 or no tensor, which is refused later."""
    given = query, key, value
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor) and autocasting(query.device.type)):
        return given
    if any(x.dtype in NARROW for x in given):
        return given
    return autocast(*given, None)[:3]


def _resolved(x: Tensor | None) -> Tensor | None:
    """A tensor whose lazy negation is in its memory, which kernels read."""
    return None if x is None else x.resolve_neg()


def keys_between(cu_k: Any) -> Tensor | None:
    """Numbers of keys in pages that are given as bounds; None where these say nothing."""
    return cu_k.diff() if isinstance(cu_k, Tensor) and cu_k.dim() else None
