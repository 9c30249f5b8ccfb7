"""`attention_varlen`: attention of packed sequences of different lengths, with the signature of torch.nn.attention.varlen.varlen_attn."""

import inspect
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from flashtune.core.pytorch.flex import Mod
from flashtune.core.system.errors import InputError
from flashtune.dispatch import varlen_flex as coded
from flashtune.dispatch.call.call import Returned
from flashtune.dispatch.call.parse import Options, check_window, settled, unwrapped, wants_lse
from flashtune.dispatch.call.sequences import Packed
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.functions.traced import check_functions, refuse_beside_functions
from flashtune.dispatch.policy.offers import OURS
from flashtune.dispatch.rows.read import NAMES, NO_CACHES, cast, keys_between, parsed, splits_of
from flashtune.dispatch.rows.run import attend, explanation_of
from flashtune.dispatch.typed import PackedKeywords, with_signature_of
from flashtune.dispatch.varlen_named import attend_named, explained_named

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest


@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    *, return_aux: None = ..., return_lse: Literal[False] = ..., **keywords: Unpack[PackedKeywords],
) -> Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    *, return_aux: "AuxRequest | None" = ..., return_lse: Literal[True], **keywords: Unpack[PackedKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    *, return_aux: "AuxRequest | None" = ..., return_lse: bool = ..., **keywords: Unpack[PackedKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_aux: "AuxRequest | None" = None,
    scale: float | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
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
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    implementation: str | None = None,
) -> Returned:
    """Attention of sequences that lie one after the other; each sees its own keys alone.

    It takes the arguments of torch.nn.attention.varlen.varlen_attn, and more. On a GPU kernels read lengths on the device: nothing waits
    for it, and a CUDA graph may be replayed with other lengths.

    Args:
        query: (T_q, Hq, D).
        key: (T_k, Hkv, D); with `block_table` (blocks, page size, Hkv, D).
        value: (T_k, Hkv, D_v); with `block_table` (blocks, page size, Hkv, D_v). Values that are the first columns of paged keys
            (`key[..., :D_v]`, as in multi-head latent attention) are read with these, once for both.
        cu_seqlens_q: (sequences + 1,), int32 or int64, on the same device, beginning with 0. Sequence b has rows cu[b] .. cu[b + 1] - 1,
            none if these are equal, so that lists may be padded to a capacity with their last number. Rows from the last number on belong
            to no sequence: their output and gradients are 0, their LSE is -inf.
        cu_seqlens_k: likewise for the keys; with `block_table` it may be None.
        max_seqlen_q: upper bound of the queries of a sequence, by which a kernel is chosen, too.
        max_seqlen_k: likewise for the keys.
        return_aux: an object whose `lse` is True, for (output, LSE), as varlen_attn takes it.
        scale: factor of the scores; None is 1 / sqrt(D).
        window_size: (left, right) with -1 for unbounded; (-1, 0) is causal. The last query is aligned with the last key.
        enable_gqa: allow Hq to be a multiple of Hkv.
        seqused_k: (sequences,), the number of keys that are used of each sequence.
        block_table: (sequences, pages), int32 or int64: key and value are caches of pages of any size, and page p of sequence b is block
            `block_table[b, p]`. Strides may be any: pass a cache (blocks, Hkv, page size, D) transposed. Lengths are
            `seqused_k`, or without it those between `cu_seqlens_k`. Whatever else the caches and the table hold isn't read.
            There is no dropout, and there are no gradients (decision 0014).
        num_splits: with `block_table`, keys are split into so many parts. Then a sequence's bits depend on this number alone, not on the
            batch, `max_seqlen_q` or `max_seqlen_k`. None or 0 takes as many parts as keep the GPU busy. Without `block_table` keys are
            never split.
        k_descale: factor of keys in float8_e4m3fn or float8_e5m2 caches, float32 (Hkv,) or (sequences, Hkv), for any query dtype.
        v_descale: likewise for values.
        is_causal: hide the keys right of the diagonal.
        causal_alignment: as in `attention`, but with "bottom_right" as its default.
        softcap: as in `attention`.
        dropout_p: as in `attention`.
        seed: as in `attention`.
        alibi_slopes: float32 (Hq,) or (sequences, Hq), as in `attention`.
        sinks: (Hq,), as in `attention`.
        return_lse: return (output, LSE). The LSE is the natural logarithm of each softmax's denominator, float32 (Hq, T_q).
        allow_tf32: as in `attention`.
        deterministic: as in `attention`.
        score_mod: scores as a function, as `flex_attention` takes them. b is the number of a sequence, and positions count from the
            sequence's own first query and key. Indices of captured tensors are checked against `max_seqlen_q` and `max_seqlen_k`.
            Captured tensors get gradients if they need them.
        mask_mod: a mask as a function, likewise. Together with functions only `scale`, `is_causal`, `window_size`, `seqused_k`,
            `enable_gqa`, `allow_tf32` and `deterministic` are taken; write soft caps and slopes into the functions.
        implementation: who runs the call: "flashtune" (kernels of ours, measured or not), "torch" (each sequence is a call of PyTorch's,
            whose lengths the host reads; under torch.compile one call of its flex_attention, which copies whole pages and has no dropout),
            or for packed sequences "flash" (PyTorch's varlen_attn), "fa4" or "fa2", which return no LSE; beside functions "flex" on a GPU.
            torch.compile traces PyTorch's flex_attention for all but "flashtune", and beside functions for any name.

    Returns:
        The output (T_q, Hq, D_v), or (output, LSE).

    Raises:
        InputError: for arguments that make no sense, and for an implementation that can't run the call. Lengths and pages are
            checked only where the host reads them.
        InputTypeError: for arguments of a wrong type.

    Kernels take float16, bfloat16 and float32 with head sizes up to 512, over pages 576, and up to 256 compute gradients of query, key,
    value and sinks. Elsewhere each sequence is a call of `attention`, whose lengths the host reads. `explain_varlen` says which.
    """
    with_lse = return_lse if return_aux is None and type(return_lse) is bool else wants_lse(return_lse, return_aux)
    compiling = torch.compiler.is_compiling()
    if score_mod is not None or mask_mod is not None:
        beside = (softcap, dropout_p, alibi_slopes, sinks, block_table, k_descale, v_descale)
        if compiling or not all(map(is_, beside, _NOT_BESIDE_FUNCTIONS.values())):
            named = dict(zip(_NOT_BESIDE_FUNCTIONS, map(unwrapped, beside), strict=True))
            refuse_beside_functions(named, _NOT_BESIDE_FUNCTIONS, "mask_mod", "call without functions")
    if num_splits is not None:
        num_splits = splits_of(num_splits)
    # A plain tuple: a named one takes several times as long to make.
    options: tuple[Any, ...]
    options = (dropout_p, is_causal, scale, enable_gqa, window_size, softcap, causal_alignment, with_lse, allow_tf32, deterministic)
    if implementation is not None:
        options = (*options, implementation)
    # Compilers can't trace comparisons of classes.
    if compiling or not (
        is_causal.__class__ is enable_gqa.__class__ is allow_tf32.__class__ is deterministic.__class__ is bool
        and dropout_p.__class__ is softcap.__class__ is float
        and (scale is None or scale.__class__ is float)
    ):
        options = settled(options)
    if window_size is not _UNBOUNDED and not compiling:
        check_window(window_size)
    if block_table is not None:
        if seqused_k is None:
            seqused_k = keys_between(cu_seqlens_k)
        # Pages have no bounds.
        cu_seqlens_k = cu_seqlens_q
    elif k_descale is not None or v_descale is not None:
        raise InputError(NO_CACHES)
    given: tuple[Any, ...]
    given = query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks, block_table, k_descale, v_descale
    if score_mod is not None or mask_mod is not None:
        out, lse = _with_functions(given, options, (with_lse, max_seqlen_q, max_seqlen_k), score_mod, mask_mod, implementation)
        return (out, lse) if with_lse else out  # type: ignore[return-value]
    if implementation is not None and implementation != OURS:
        if block_table is None:
            given = (*cast(query, key, value), *given[3:])
        read = Options(*options)._replace(return_lse=with_lse)
        found = attend_named(*parsed(Packed(*given), read, max_seqlen_q, max_seqlen_k, num_splits), read, seed)
        return found if with_lse else found[0]  # type: ignore[return-value]
    served = attend(given, options, max_seqlen_q, max_seqlen_k, seed, num_splits, compiling=compiling)
    return served if with_lse else served[0]  # type: ignore[return-value]


_UNBOUNDED = inspect.signature(attention_varlen).parameters["window_size"].default
"""The window of calls without one."""

_NOT_BESIDE_FUNCTIONS: dict[str, Any] = {
    "softcap": 0.0, "dropout_p": 0.0, "alibi_slopes": None, "sinks": None, "block_table": None, "k_descale": None, "v_descale": None,
}  # fmt: skip
"""Arguments that have no place beside functions, with their defaults."""


def _with_functions(
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    lse_and_bounds: tuple[bool, int, int],
    score_mod: Any,
    mask_mod: Any,
    implementation: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Output and LSE of a call with a mask or a score as code; `lse_and_bounds` are True if an LSE is wanted, and the bounds of lengths."""
    if (again := coded.again(given, (*lse_and_bounds, options), score_mod, mask_mod)) is not None:
        return again
    check_functions(score_mod, mask_mod, "mask_mod")
    rows = cast(*given[:3])
    if not all(map(is_, rows, given)):
        return _with_functions((*rows, *given[3:]), options, lse_and_bounds, score_mod, mask_mod, implementation)
    packed, numbers = parsed(Packed(*given), Options(*options), *lse_and_bounds[1:])
    call = coded.call_of(packed, numbers, score_mod, mask_mod, implementation)
    if not isinstance(call, (dict, str)) and all(map(is_, packed[:6], given[:6])):
        coded.keep(call, given, (*lse_and_bounds, options), score_mod, mask_mod)
    if isinstance(call, dict):
        out, lse = attention_varlen(*packed[:5], numbers.max_q, numbers.max_k, return_lse=True, **call)
        return out, lse
    return coded.attend_with_functions(call, packed, numbers, score_mod, mask_mod, implementation)


@with_signature_of(attention_varlen)
def explain_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    *, return_aux: "AuxRequest | None" = None, return_lse: bool = False, **keywords: Unpack[PackedKeywords],
) -> Explanation:  # fmt: skip
    """Explanation of the choice for the same call of `attention_varlen`, whose arguments it takes; no kernel is launched.

    Returns:
        Who runs the call, and why.

    Raises:
        InputError: as `attention_varlen` does.
    """
    packed_rows = query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    bound = inspect.signature(attention_varlen).bind(*packed_rows, return_aux=return_aux, return_lse=return_lse, **keywords)
    bound.apply_defaults()
    given = bound.arguments
    with_lse, implementation = wants_lse(given["return_lse"], given["return_aux"]), given["implementation"]
    given |= {name: unwrapped(given[name]) for name in ("scale", "dropout_p")}
    functions = given["score_mod"], given["mask_mod"]
    if functions != (None, None):
        refuse_beside_functions(given, _NOT_BESIDE_FUNCTIONS, "mask_mod", "call without functions")
        check_functions(*functions, "mask_mod")
    splits = splits_of(given["num_splits"])
    others = {name: given[name] for name in Options._fields if name in given}
    options = Options(**others | {"window": given["window_size"], "return_lse": with_lse})
    if given["block_table"] is not None:
        if given["seqused_k"] is None:
            given["seqused_k"] = keys_between(given["cu_seqlens_k"])
        given["cu_seqlens_k"] = given["cu_seqlens_q"]
    elif given["k_descale"] is not None or given["v_descale"] is not None:
        raise InputError(NO_CACHES)
    else:
        given |= dict(zip(NAMES[:3], cast(*[given[name] for name in NAMES[:3]]), strict=True))
    tensors = Packed(*[given[name] for name in NAMES])
    packed, numbers = parsed(tensors, options, given["max_seqlen_q"], given["max_seqlen_k"], splits)
    if functions != (None, None):
        call = coded.call_of(packed, numbers, *functions, implementation)
        if isinstance(call, dict):
            found = explain_varlen(*packed[:5], numbers.max_q, numbers.max_k, **call)
            return replace(found, reason=f"the functions are built in: {found.reason}")
        return coded.explained_with_functions(call, packed)
    return explanation_of(packed, numbers, return_lse=with_lse) if implementation is None else explained_named(packed, numbers, options)
