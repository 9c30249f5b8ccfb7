"""`attention_varlen`: attention of packed sequences of different lengths, with the signature of torch.nn.attention.varlen.varlen_attn."""

import functools
import inspect
import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from numbers import Integral
from operator import is_, or_
from typing import Any

import torch
from torch import Tensor

from flashtune.core.band import ALIGNMENTS, Sides
from flashtune.core.errors import InputError, InputTypeError
from flashtune.core.lengths import spread
from flashtune.core.torch_attention import autocasting
from flashtune.dispatch import context
from flashtune.dispatch import paged as pages
from flashtune.dispatch import varlen_flex as coded
from flashtune.dispatch.call import PerHead
from flashtune.dispatch.calls import meet_packed
from flashtune.dispatch.context import STACK
from flashtune.dispatch.flex import check_functions, refuse_beside_functions
from flashtune.dispatch.inspection import GRADIENTS, autocast, is_distributed, perhaps_fake, transformed, why_torch_now
from flashtune.dispatch.packed import PackedPlan, explained, served
from flashtune.dispatch.packed_ops import Attention, by_attention, by_kernels, dropout_bits
from flashtune.dispatch.parse import Options, check_flags, scalars, seed_bits, signed, unwrapped, wants_lse
from flashtune.dispatch.resolve import Explanation
from flashtune.dispatch.sequences import Numbers, Packed, problem_of


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: Any = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    is_causal: bool = False,
    causal_alignment: str = "bottom_right",
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    allow_tf32: bool = False,
    deterministic: bool = False,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
) -> Any:
    """Attention of sequences that lie one after the other; each sees its own keys alone.

    query (T_q, Hq, D), key (T_k, Hkv, D), value (T_k, Hkv, D_v). `cu_seqlens_q` and `cu_seqlens_k` (sequences + 1,), int32 or int64 on the
    same device, begin with 0: sequence b has the rows cu[b] .. cu[b + 1] - 1, none if these are equal, so that lists may be padded to a
    capacity with their last number. Rows from the last number on belong to no sequence: their output and gradients are 0, their LSE -inf.
    `max_seqlen_q` and `max_seqlen_k` bound the lengths, and help to choose a kernel. Returns the output (T_q, Hq, D_v), and with
    `return_lse` or a `return_aux` whose `lse` is True (output, LSE), the latter the natural logarithm of each softmax's denominator,
    float32 (Hq, T_q).

    As in torch.nn.attention.varlen.varlen_attn, `window_size` is (left, right) with -1 for unbounded, (-1, 0) is causal, and the last query
    is on the diagonal of the last key; `seqused_k` (sequences,) is the number of keys that are used of each sequence, and Hq may be a
    multiple of Hkv with `enable_gqa`. Kernels never split packed keys, so that the bits of a sequence don't depend on others, whatever
    `num_splits` says. Beyond it, `is_causal`, `causal_alignment`, `softcap`, `dropout_p`, `seed`, `alibi_slopes` (Hq,) or (sequences, Hq),
    `sinks` (Hq,), `allow_tf32` and `deterministic` are as in `attention`, but for the default of `causal_alignment`.

    With `block_table` (sequences, pages), int32 or int64, key (blocks, page size, Hkv, D) and value (blocks, page size, Hkv, D_v) are
    caches, of any page size, and page p of sequence b is block `block_table[b, p]`. Any strides will do without a copy: caches (blocks,
    Hkv, page size, D) are passed transposed. Lengths are `seqused_k`, else those between `cu_seqlens_k`, which may be None. Nothing else
    in the caches matters, nor do entries of pages that aren't used. Caches may be float8_e4m3fn or float8_e5m2 for any query dtype, with
    `k_descale` and `v_descale`, float32 (Hkv,) or (sequences, Hkv), by which they are multiplied. With `num_splits` keys are split into so
    many parts, and the bits of a sequence depend on it alone, not on the batch, `max_seqlen_q` or `max_seqlen_k`; without, or with 0, into
    as many as keep the GPU busy. There is no dropout and there are no gradients (decision 0014).

    `score_mod(score, b, h, q_idx, kv_idx)` and `mask_mod(b, h, q_idx, kv_idx)` are functions as `flex_attention` takes them, where b is
    the number of a sequence and positions count from the sequence's own first query and key. Beside them are `scale`, `is_causal`,
    `window_size`, `seqused_k`, `enable_gqa`, `allow_tf32` and `deterministic`; what else hides keys or changes scores is to be written
    into them. Indices of captured tensors are compared with `max_seqlen_q` and `max_seqlen_k`. Gradients are those of query, key, value
    and captured tensors of `score_mod` that ask for them.

    On a GPU kernels read lengths on the device: nothing waits for it, and a CUDA graph may be replayed with other lengths. They serve
    float16, bfloat16 and float32 with head sizes up to 256, and gradients of query, key, value and sinks. Elsewhere each sequence is a call
    of `attention`, whose lengths are read by the host. `explain_varlen` says which.

    Raises InputError or InputTypeError for arguments that make no sense; lengths aren't checked.
    """
    with_lse = wants_lse(return_lse, return_aux)
    if scale is not None and type(scale) is not float:
        scale = unwrapped(scale)
    if type(dropout_p) is not float:
        dropout_p = unwrapped(dropout_p)
    if score_mod is not None or mask_mod is not None:
        beside = (softcap, dropout_p, alibi_slopes, sinks, block_table, k_descale, v_descale)
        refuse_beside_functions(
            dict(zip(_NOT_BESIDE_FUNCTIONS, beside, strict=True)), _NOT_BESIDE_FUNCTIONS, "mask_mod", "call without functions"
        )
        check_functions(score_mod, mask_mod, "mask_mod")
    num_splits = _splits(num_splits)
    # A plain tuple: a named one takes several times as long to make.
    options = (dropout_p, is_causal, scale, enable_gqa, window_size, softcap, causal_alignment, False, allow_tf32, deterministic)
    if block_table is not None:
        cu_seqlens_k, seqused_k = _of_pages(cu_seqlens_q, cu_seqlens_k, seqused_k)
    elif k_descale is not None or v_descale is not None:
        raise InputError(_NO_CACHES)
    else:
        # Models' positions leave queries and keys in float32 under autocast, and values in its dtype; caches stay in theirs.
        query, key, value = _cast(query, key, value)
    given: tuple[Any, ...] = (query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks)
    if score_mod is not None or mask_mod is not None:
        out, lse = _with_functions(*_parsed(Packed(*given), Options(*options), max_seqlen_q, max_seqlen_k), score_mod, mask_mod)
        return (out, lse) if with_lse else out
    if block_table is not None:
        given = (*given, block_table, k_descale, v_descale)
    out, lse = attend(given, options, max_seqlen_q, max_seqlen_k, seed, num_splits)
    return (out, lse) if with_lse else out


_NO_CACHES = "k_descale and v_descale are factors of paged caches in float8: pass a block_table, or packed keys in query's dtype"


def _of_pages(cu_q: Any, cu_k: Any, used: Any) -> tuple[Any, Any]:
    """Bounds and numbers of keys of a call with pages: keys have no bounds, and their numbers may be given as bounds."""
    return cu_q, cu_k.diff() if used is None and isinstance(cu_k, Tensor) and cu_k.dim() else used


def attend(
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    max_q: int,
    max_k: int,
    seed: int | None,
    splits: int | None = None,
    heads_outside: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call without functions, of tensors as in Packed and options in their order, by the plan of its signature where
    there is one. With `heads_outside` the output of kernels is (Hq, T_q, D_v) in memory."""
    signature = None if torch.compiler.is_compiling() else _signature(given, options, max_q, max_k, splits)
    if signature is not None and heads_outside:
        signature = "heads outside", signature
    plan: Any = None if signature is None else STACK.get().plans.get(signature)
    if plan is None:
        packed, numbers = _parsed(Packed(*given), Options(*options), max_q, max_k, splits)
        bits = None if seed is None else signed(seed_bits(seed))
        return _attend(packed, numbers, bits, signature if all(map(is_, packed[:6], given[:6])) else None, heads_outside)
    query, key, value, cu_q, cu_k, used, slopes, sinks, *caches = given
    slopes = slopes if slopes is None else slopes.expand(len(cu_q) - 1, -1)
    return _planned(plan, Packed(query, key, value, cu_q, cu_k, used, slopes, sinks, *caches), seed)


_NOT_BESIDE_FUNCTIONS: dict[str, Any] = {
    "softcap": 0.0, "dropout_p": 0.0, "alibi_slopes": None, "sinks": None, "block_table": None, "k_descale": None, "v_descale": None,
}  # fmt: skip
"""Arguments that have no place beside functions, with their defaults."""


def _with_functions(packed: Packed, numbers: Numbers, score_mod: Any, mask_mod: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call with a mask or a score as code."""
    call = coded.call_of(packed, numbers, score_mod, mask_mod)
    if isinstance(call, dict):
        out, lse = attention_varlen(*packed[:5], numbers.max_q, numbers.max_k, return_lse=True, **call)
        return out, lse
    return coded.attend(call, packed, numbers, score_mod, mask_mod)


def _cast(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Query, key and value in autocast's dtype, where it is on; as they are where one is in fp8 or no tensor, which is refused later."""
    given = query, key, value
    if not all(isinstance(x, Tensor) for x in given) or not autocasting(query.device.type) or any(x.dtype in pages.NARROW for x in given):
        return given
    return autocast(*given, None)[:3]


def _resolved(x: Tensor | None) -> Tensor | None:
    """A tensor whose lazy negation is in its memory, which kernels read."""
    return None if x is None else x.resolve_neg()


def explain_varlen(*arguments: Any, **keywords: Any) -> Explanation:
    """Explanation of the choice for the same call of `attention_varlen`; no kernel is launched. Raises as that does."""
    bound = inspect.signature(attention_varlen).bind(*arguments, **keywords)
    bound.apply_defaults()
    given = bound.arguments
    wants_lse(given["return_lse"], given["return_aux"])
    functions = given["score_mod"], given["mask_mod"]
    if functions != (None, None):
        refuse_beside_functions(given, _NOT_BESIDE_FUNCTIONS, "mask_mod", "call without functions")
        check_functions(*functions, "mask_mod")
    splits = _splits(given["num_splits"])
    others = {name: given[name] for name in Options._fields if name in given}
    options = Options(**others | {"window": given["window_size"], "return_lse": False})
    if given["block_table"] is not None:
        lists = _of_pages(given["cu_seqlens_q"], given["cu_seqlens_k"], given["seqused_k"])
        given |= dict(zip(("cu_seqlens_k", "seqused_k"), lists, strict=True))
    elif given["k_descale"] is not None or given["v_descale"] is not None:
        raise InputError(_NO_CACHES)
    else:
        given |= dict(zip(_NAMES[:3], _cast(*[given[name] for name in _NAMES[:3]]), strict=True))
    tensors = Packed(*[given[name] for name in _NAMES])
    packed, numbers = _parsed(tensors, options, given["max_seqlen_q"], given["max_seqlen_k"], splits)
    if functions != (None, None):
        call = coded.call_of(packed, numbers, *functions)
        if isinstance(call, dict):
            found = explain_varlen(*packed[:5], numbers.max_q, numbers.max_k, **call)
            return replace(found, reason=f"the functions are built in: {found.reason}")
        return coded.explained(call, packed)
    why_torch = _why_torch(packed)
    if why_torch in GRADIENTS:
        found = explained(packed, numbers, None if _trains(packed, numbers, why_torch) else why_torch)
        return found if found.kind == "framework" else replace(found, backward=explained(packed, numbers, None, "bwd"))
    return explained(packed, numbers, why_torch)


def _parsed(packed: Packed, options: Options, max_q: int, max_k: int, splits: int | None = None) -> tuple[Packed, Numbers]:
    """Checked tensors and the numbers of a call."""
    if packed.table is None:
        return _checked(packed, options, max_q, max_k)
    # The rest is checked of one row of the caches.
    key, value = pages.checked(packed, options.dropout_p)
    like, numbers = _checked(packed._replace(key=key, value=value), options, max_q, max_k)
    resolved = Packed(*map(_resolved, packed))  # type: ignore[arg-type]
    bounds = {"cu_q": like.cu_q, "cu_k": like.cu_q, "used": like.used, "slopes": like.slopes}
    return resolved._replace(**bounds), numbers._replace(splits=splits)  # type: ignore[arg-type]


def _checked(packed: Packed, options: Options, max_q: int, max_k: int) -> tuple[Packed, Numbers]:
    """Checked tensors and the numbers of a call without pages."""
    query, key, value, cu_q, cu_k, used, slopes, sinks, *_ = packed
    check_flags({name: getattr(options, name) for name in ("is_causal", "enable_gqa", "allow_tf32", "deterministic")})
    for place, (name, x) in enumerate(zip(_NAMES[:8], packed[:8], strict=True)):
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
    if query.dtype in pages.NARROW:
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
    numbers = Numbers(max_q, max_k, scale, left, right, bottom_right, softcap, dropout_p, options.allow_tf32, options.deterministic)
    return Packed(query, key, value, cu_q, cu_k, used, slopes, sinks), numbers


_NAMES = (
    "query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "sinks", "block_table", "k_descale", "v_descale",
)  # fmt: skip
"""Names of a call's tensors in the order of Packed."""
_REQUIRED = 5
"""How many of them must be given."""
_MOST_SPLITS = 65535
"""Most programs in the second dimension of a launch."""


def _splits(splits: int | None) -> int | None:
    """A number of splits; None where it is left to the host, as 0 leaves it in other libraries. Raises InputError for any other value."""
    if splits is None:
        return None
    if not (isinstance(splits, (int, torch.SymInt, Integral)) and 0 <= splits <= _MOST_SPLITS):
        raise InputError(f"num_splits={splits!r} is no number of splits: give 1 to {_MOST_SPLITS}, or None or 0 for as many as suit")
    return None if splits == 0 else splits


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


def _why_torch(packed: Packed) -> str | None:
    return why_torch_now(*packed[:3], None, PerHead(alibi_slopes=packed.slopes, sinks=packed.sinks))


def _trains(packed: Packed, numbers: Numbers, why_torch: str | None) -> bool:
    """True if kernels compute the gradients that are needed."""
    return why_torch in GRADIENTS and not GRADIENTS[why_torch] and served(packed, numbers, "bwd") is not None


def _signature(given: tuple[Any, ...], options: tuple[Any, ...], max_q: int, max_k: int, splits: int | None) -> Hashable | None:
    """Key of a plan for calls like this one; None for those whose tensors are to be changed or inspected first."""
    query, key, value, cu_q, cu_k, used, slopes, sinks, *caches = given
    try:
        why_torch = why_torch_now(query, key, value, None, None if slopes is sinks is None else PerHead(alibi_slopes=slopes, sinks=sinks))
        if why_torch is not None and why_torch not in GRADIENTS:
            return None
        addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | cu_q.data_ptr() | cu_k.data_ptr()
        more = None
        if caches or not used is slopes is sinks is None:
            others = [x for x in (used, slopes, sinks, *caches) if x is not None]
            more = used is None, slopes is None, *[(x.shape, x.stride(), x.dtype, x.device) for x in others]
            if caches:
                # A launch has programs for the longest sequence of all calls of its plan.
                more = (*more, sinks is None, caches[1] is None, pages.bounds_of(max_q, max_k), splits)
            addresses |= functools.reduce(or_, [x.data_ptr() for x in others])
            if any([x.is_neg() for x in others]):
                return None
        if addresses % 16 or query.is_neg() or key.is_neg() or value.is_neg() or cu_q.is_neg() or cu_k.is_neg():
            return None
        # Rows are part of the shapes below, so that this counts the mean as `octaves_of` does.
        bounds = spread(max_k, cu_q.shape[0] - 1, key.shape[0]), torch.are_deterministic_algorithms_enabled()
        signature = (
            "packed", query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), query.dtype, key.dtype,
            value.dtype, query.device, key.device, value.device, cu_q.shape, cu_k.shape, cu_q.stride(), cu_k.stride(), cu_q.dtype,
            cu_k.dtype, cu_q.device, cu_k.device, more, bounds, options, why_torch,
        )  # fmt: skip
        hash(signature)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # An argument isn't a tensor, has no memory, or can't be hashed; parsing raises the error.
        return None
    return signature


def _planned(plan: PackedPlan, packed: Packed, seed: int | None) -> tuple[Tensor, Tensor]:
    """Output and LSE of a decided call."""
    if not plan.trains:
        return by_kernels(plan.memo, packed, plan.numbers, dropout_bits(packed, plan.numbers, seed), plan)
    out, lse = Attention.apply(*packed, seed, plan)  # type: ignore[no-untyped-call]
    return out, lse


def _attend(packed: Packed, numbers: Numbers, seed: int | None, signature: Hashable | None, heads_outside: bool) -> tuple[Tensor, Tensor]:
    """Output and LSE by kernels, an operator, or a call for each sequence; a plan of kernels is kept for a signature."""
    if torch.compiler.is_compiling() and not transformed():
        out, lse, _ = torch.ops.flashtune_packed.attention(*packed, seed, *numbers)
        return out, lse
    why_torch = _why_torch(packed)
    if perhaps_fake(why_torch, packed.query) and not transformed():
        out, lse, _ = torch.ops.flashtune_packed.attention(*packed, seed, *numbers)
        return out, lse
    memo = context.current()
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in packed[:3]) and not getattr(packed.slopes, "requires_grad", False)
    if packed.table is None:
        meet_packed(memo, problem_of(packed, numbers, exact=True), why_torch, trained)
    if why_torch is None or why_torch in GRADIENTS:
        found = served(packed, numbers)
        trains = found is not None and why_torch is not None and _trains(packed, numbers, why_torch)
        if found is not None and (why_torch is None or trains):
            plan = PackedPlan(memo, found, numbers, trains=trains, heads_outside=heads_outside)
            outputs = _planned(plan, packed, seed)
            if signature is not None and plan.forward is not None:
                memo.keep(signature, plan)  # type: ignore[arg-type]
            return outputs
    return by_attention(packed, numbers, dropout_bits(packed, numbers, seed))
