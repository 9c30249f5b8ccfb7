"""`attention_varlen`: attention of packed sequences of different lengths, with the signature of torch.nn.attention.varlen.varlen_attn."""

import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtune.core import reference
from flashtune.core.band import ALIGNMENTS, Sides
from flashtune.core.errors import InputError, InputTypeError
from flashtune.dispatch import packed as kernels
from flashtune.dispatch.api import attention
from flashtune.dispatch.call import Options, PerHead, seed_bits, signed
from flashtune.dispatch.call.arguments import scalars
from flashtune.dispatch.packed import Numbers, Packed, explained, served
from flashtune.dispatch.plans.dropout_seed import capturing, random_bits
from flashtune.dispatch.plans.gradients import recording
from flashtune.dispatch.resolve import layers
from flashtune.dispatch.resolve.explanation import Explanation
from flashtune.dispatch.resolve.inspection import GRADIENTS, PERHAPS_FAKE, autocast, prepared, transformed, why_torch_now
from flashtune.dispatch.resolve.memo import Memo
from flashtune.dispatch.torch_ops.lazy import define_lazily


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
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
    multiple of Hkv with `enable_gqa`. Kernels never split keys, so that the bits of a sequence don't depend on others, whatever
    `num_splits` says. Beyond it, `is_causal`, `causal_alignment`, `softcap`, `dropout_p`, `seed`, `alibi_slopes` (Hq,) or (sequences, Hq),
    `sinks` (Hq,), `allow_tf32` and `deterministic` are as in `attention`, but for the default of `causal_alignment`.

    On a GPU kernels read lengths on the device: nothing waits for it, and a CUDA graph may be replayed with other lengths. They serve
    float16, bfloat16 and float32 with head sizes up to 256, and gradients of query, key, value and sinks. Elsewhere each sequence is a call
    of `attention`, whose lengths are read by the host. `explain_varlen` says which.

    Raises InputError or InputTypeError for arguments that make no sense; lengths aren't checked.
    """
    if block_table is not None:
        raise InputError("block_table is set, but paged keys and values have no kernel yet: pass packed ones")
    if num_splits is not None and num_splits < 1:
        raise InputError(f"num_splits={num_splits} is no number of splits: give 1 or more, or None")
    packed = Packed(query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sinks)
    options = Options(dropout_p, is_causal, scale, enable_gqa, window_size, softcap, causal_alignment, False, allow_tf32, deterministic)
    packed, numbers = _parsed(packed, options, max_seqlen_q, max_seqlen_k)
    bits = None if seed is None else signed(seed_bits(seed))
    out, lse = _attend(packed, numbers, bits)
    return (out, lse) if return_lse or (return_aux is not None and return_aux.lse) else out


def explain_varlen(*arguments: Any, **keywords: Any) -> Explanation:
    """Explanation of the choice for the same call of `attention_varlen`; no kernel is launched. Raises as that does."""
    bound = inspect.signature(attention_varlen).bind(*arguments, **keywords)
    bound.apply_defaults()
    given = bound.arguments
    tensors = [given[name] for name in ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "sinks")]
    others = {name: given[name] for name in Options._fields if name in given}
    options = Options(**others | {"window": given["window_size"], "return_lse": False})
    packed, numbers = _parsed(Packed(*tensors), options, given["max_seqlen_q"], given["max_seqlen_k"])
    why_torch = _why_torch(packed)
    if why_torch in GRADIENTS:
        found = explained(packed, numbers, None if _trains(packed, numbers, why_torch) else why_torch)
        return found if found.kind == "framework" else replace(found, backward=explained(packed, numbers, None, "bwd"))
    return explained(packed, numbers, why_torch)


def _parsed(packed: Packed, options: Options, max_q: int, max_k: int) -> tuple[Packed, Numbers]:
    """Checked tensors, in autocast's dtype, and the numbers of a call."""
    query, key, value, cu_q, cu_k, used, slopes, sinks = packed
    for name, x in zip(Packed._fields[:5], packed[:5], strict=True):
        if not isinstance(x, Tensor):
            raise InputTypeError(f"{name} must be a tensor, not {type(x).__name__}: pass torch tensors")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise InputError(f"{name} has {x.dim()} dimensions: packed tensors are (tokens, heads, head size)")
    if not query.dtype == key.dtype == value.dtype:
        raise InputTypeError(f"query, key and value have the dtypes {query.dtype}, {key.dtype} and {value.dtype}: give them one")
    heads, kv_heads = query.shape[1], key.shape[1]
    if key.shape[:2] != value.shape[:2] or key.shape[2] != query.shape[2]:
        raise InputError(f"key {tuple(key.shape)} and value {tuple(value.shape)} don't fit to query {tuple(query.shape)}: check the sizes")
    if heads != kv_heads and not options.enable_gqa:
        raise InputError(f"Hq={heads} and Hkv={kv_heads} differ: set enable_gqa=True, or give them the same number of heads")
    if kv_heads == 0 or heads % kv_heads:
        raise InputError(f"{heads} query heads can't share {kv_heads} key heads: make Hq a multiple of Hkv")
    _check_lengths(query, cu_q, cu_k, used)
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
    if torch.compiler.is_compiling():
        query, key, value, _ = autocast(query, key, value, None)
    else:
        query, key, value, _ = prepared(query, key, value, None)
    cu_q, cu_k, used = cu_q.contiguous(), cu_k.contiguous(), None if used is None else used.contiguous()
    scale = 1.0 / math.sqrt(query.shape[2] or 1) if scale is None else scale
    numbers = Numbers(max_q, max_k, scale, left, right, bottom_right, softcap, dropout_p, options.allow_tf32, options.deterministic)
    return Packed(query, key, value, cu_q, cu_k, used, slopes, sinks), numbers


def _check_lengths(query: Tensor, cu_q: Tensor, cu_k: Tensor, used: Tensor | None) -> None:
    """Refuse lists of lengths of a wrong dtype, size or device; their contents are on the device and aren't read."""
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
        if x.device != query.device:
            raise InputError(f"{name} is on {x.device} and query on {query.device}: move all to one device")


def _why_torch(packed: Packed) -> str | None:
    return why_torch_now(*packed[:3], None, PerHead(alibi_slopes=packed.slopes, sinks=packed.sinks))


def _trains(packed: Packed, numbers: Numbers, why_torch: str | None) -> bool:
    """True if kernels compute the gradients that are needed."""
    return why_torch in GRADIENTS and not GRADIENTS[why_torch] and served(packed, numbers, "bwd") is not None


def _attend(packed: Packed, numbers: Numbers, seed: int | None) -> tuple[Tensor, Tensor]:
    """Output and LSE by kernels, an operator, or a call for each sequence."""
    if torch.compiler.is_compiling() and not transformed():
        out, lse, _ = torch.ops.flashtune_packed.attention(*packed, seed, *numbers)
        return out, lse
    why_torch = _why_torch(packed)
    if why_torch in PERHAPS_FAKE and not transformed():
        out, lse, _ = torch.ops.flashtune_packed.attention(*packed, seed, *numbers)
        return out, lse
    if why_torch is None or why_torch in GRADIENTS:
        found = served(packed, numbers)
        if found is not None and why_torch is None:
            return kernels.forward(found, packed, numbers, _bits(packed, numbers, seed))
        if found is not None and _trains(packed, numbers, why_torch):
            out, lse, _ = _Attention.apply(*packed, seed, *numbers)  # type: ignore[no-untyped-call]
            return out, lse
    return _by_sequence(packed, numbers, _bits(packed, numbers, seed))


def _bits(packed: Packed, numbers: Numbers, seed: int | None) -> int:
    """64 bits that determine dropout's mask."""
    if not numbers.dropout_p:
        return 0
    if seed is None and capturing(packed.query.device):
        raise InputError("a CUDA graph would drop the same pairs at every replay: pass a seed, or drop none")
    return random_bits(seed, packed.query.device)[0]


def _by_sequence(packed: Packed, numbers: Numbers, seed: int) -> tuple[Tensor, Tensor]:
    """Output and LSE by a call of `attention` for each sequence; lengths are read by the host."""
    query, key, value, cu_q, cu_k, used, slopes, sinks = packed
    of_q, of_k = cu_q.tolist(), cu_k.tolist()
    some = [stop - start for start, stop in itertools.pairwise(of_k)] if used is None else used.tolist()
    outs, lses = [], []
    for b, ((start, stop), (first, end)) in enumerate(zip(itertools.pairwise(of_q), itertools.pairwise(of_k), strict=True)):
        if stop > start:
            keys = slice(first, min(end, first + some[b]))
            tensors = [x.transpose(0, 1)[None] for x in (query[start:stop], key[keys], value[keys])]
            out, lse = _of_sequence(tensors, numbers, seed, b, None if slopes is None else slopes[b], sinks)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
    rows, heads, _ = query.shape
    beside = rows - of_q[-1]
    outs.append(query.new_zeros((beside, heads, value.shape[2])))
    lses.append(query.new_full((heads, beside), -math.inf, dtype=torch.float32))
    return torch.cat(outs), torch.cat([x.to(torch.float32) for x in lses], 1)


def _of_sequence(
    tensors: list[Tensor], numbers: Numbers, seed: int, index: int, slopes: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output (1, Hq, N_q, D_v) and LSE of the sequence with this index."""
    q, k, v = tensors
    heads, n_q, n_kv = q.shape[1], q.shape[2], k.shape[2]
    alignment = "bottom_right" if numbers.bottom_right else "top_left"
    if not numbers.dropout_p:
        words: dict[str, Any] = {"window": (numbers.left, numbers.right), "causal_alignment": alignment, "enable_gqa": heads != k.shape[1]}
        words |= {"scale": numbers.scale, "softcap": numbers.softcap, "allow_tf32": numbers.tf32, "return_lse": True}
        out, lse = attention(q, k, v, alibi_slopes=slopes, sinks=sinks, **words)
        return out, lse
    # Heads of all sequences are counted, as kernels do, so that each has a mask of its own.
    rows = [reference.dropout_keep_rows(seed, 0, index * heads + h, 0, n_q, n_kv, numbers.dropout_p, q.device) for h in range(heads)]
    out, lse = reference.attention(
        *(q, k, v),
        scale=numbers.scale,
        band=Sides.of((numbers.left, numbers.right), False, alignment).band(n_q, n_kv),
        softcap=numbers.softcap,
        keep=torch.stack(rows)[None],
        dropout_p=numbers.dropout_p,
        slopes=None if slopes is None else slopes[None],
        sinks=None if sinks is None else sinks[None],
        dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
    )
    return out.to(q.dtype), lse


def _recomputed(
    wanted: Sequence[bool], packed: Packed, numbers: Numbers, seed: int, dout: Tensor, dlse: Tensor | None
) -> list[Tensor | None]:
    """Gradients by a forward for each sequence, differentiated."""
    names = [name for name, want in zip(("query", "key", "value", "sinks"), wanted, strict=True) if want]
    with recording(), torch.enable_grad():
        leaves = {name: getattr(packed, name).detach().requires_grad_() for name in names}
        out, lse = _by_sequence(packed._replace(**leaves), numbers, seed)
        pairs = [(out, dout)] if dlse is None else [(out, dout), (lse, dlse.masked_fill(lse == -math.inf, 0.0))]
        outputs, grads = zip(*((x, grad) for x, grad in pairs if x.requires_grad), strict=True) if out.requires_grad else ((), ())
        given = torch.autograd.grad(outputs, [*leaves.values()], grads, allow_unused=True, materialize_grads=True) if outputs else ()
    found = dict(zip(names, given or [torch.zeros_like(x) for x in leaves.values()], strict=True))
    return [found.get(name) for name in ("query", "key", "value", "sinks")]


class _Attention(torch.autograd.Function):
    """Autograd function of the kernels; a Python operator would cost the host several times as much."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        results = _eager(*given)
        _keep(ctx, given, results)
        ctx.mark_non_differentiable(results[2])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # In a graph of the gradients (create_graph) the operator raises for second derivatives.
        if torch.is_grad_enabled():
            return _differentiated(ctx, *grads)
        requested = [ctx.needs_input_grad[place] for place in _DIFFERENTIABLE]
        return _placed(_gradients(ctx.memo, requested, *grads[:2], *ctx.saved_tensors, numbers=ctx.numbers))


_DIFFERENTIABLE = (0, 1, 2, 7)
"""Places of query, key, value and sinks among a call's tensors."""


def _placed(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments from those of query, key, value and sinks."""
    found: list[Tensor | None] = [None] * (len(Packed._fields) + 1 + len(Numbers._fields))
    for place, grad in zip(_DIFFERENTIABLE, grads, strict=True):
        found[place] = grad
    return tuple(found)


def _eager(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE, and dropout's bits on the CPU, without gradients; `given` are a call's tensors, its seed and its numbers."""
    count = len(Packed._fields)
    packed, numbers = Packed(*given[:count]), Numbers(*given[count + 1 :])
    bits, found = _bits(packed, numbers, given[count]), served(packed, numbers)
    with torch.no_grad():
        out, lse = _by_sequence(packed, numbers, bits) if found is None else kernels.forward(found, packed, numbers, bits)
    return out.contiguous(), lse.contiguous(), torch.tensor([signed(bits)] if numbers.dropout_p else [], dtype=torch.int64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save the tensors, the output, the LSE and dropout's bits for the backward."""
    count = len(Packed._fields)
    ctx.save_for_backward(*output, *inputs[:count])
    ctx.numbers = Numbers(*inputs[count + 1 :])
    # Autograd's threads have no layers of their own.
    ctx.memo = layers.current()
    ctx.set_materialize_grads(False)


def _differentiated(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments of the forward operator, by the operator of gradients."""
    requested = [ctx.needs_input_grad[place] for place in _DIFFERENTIABLE]
    if dout is None and dlse is None:
        return _placed([None] * len(requested))
    found = torch.ops.flashtune_packed.attention_gradients(dout, dlse, *ctx.saved_tensors, *requested, *ctx.numbers)
    return _placed([grad if wanted else None for grad, wanted in zip(found, requested, strict=True)])


def _gradients(
    memo: Memo | None, requested: Sequence[bool], dout: Tensor | None, dlse: Tensor | None, *saved: Any, numbers: Numbers
) -> list[Tensor | None]:
    """Requested gradients of query, key, value and sinks, by kernels or a call for each sequence; `saved` as by `_keep`."""
    out, lse, state, *tensors = saved
    packed, seed = Packed(*tensors), int(state.item()) % 2**64 if numbers.dropout_p else 0
    dout = torch.zeros_like(out) if dout is None else dout
    found = served(packed, numbers, "bwd", memo)
    if found is None:
        return _recomputed(requested, packed, numbers, seed, dout, dlse)
    grads: list[Tensor | None] = [None, None, None, None]
    if any(requested[:3]):
        grads[:3] = kernels.backward(found, packed, numbers, seed, out, lse, dout, dlse)
    if requested[3] and packed.sinks is not None:
        grads[3] = kernels.sink_gradient(packed, out, lse, dout, dlse).to(packed.sinks.dtype)
    return [grad if wanted else None for grad, wanted in zip(grads, requested, strict=True)]


def _twice(ctx: Any, *_: object) -> None:
    raise InputError(
        "attention_varlen was differentiated twice, and kernels have first derivatives alone: "
        "call attention for each sequence under sdpa_kernel(SDPBackend.MATH)"
    )


_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor cu_q, Tensor cu_k, Tensor? used, Tensor? slopes, Tensor? sinks"
_NUMBERS = (
    "SymInt max_q, SymInt max_k, float scale, SymInt left, SymInt right, bool bottom_right, float softcap, float dropout_p, bool tf32, "
    "bool deterministic"
)
_FORWARD = f"({_TENSORS}, int? seed, {_NUMBERS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor state, {_TENSORS}, "
    f"bool of_query, bool of_key, bool of_value, bool of_sinks, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _define() -> None:
    """Define the operators: opaque nodes of a compiler's graph."""
    place = "flashtune_packed::attention"
    tags = (torch.Tag.nondeterministic_seeded,)
    operator = torch.library.custom_op(place, _eager, mutates_args=(), schema=_FORWARD, tags=tags)

    @operator.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        numbers, (rows, heads, _) = Numbers(*others[len(Packed._fields) - 2 :]), query.shape
        state = torch.empty(1 if numbers.dropout_p else 0, dtype=torch.int64)
        return query.new_empty((rows, heads, value.shape[2])), query.new_empty((heads, rows), dtype=torch.float32), state

    def gradients(dout: Tensor | None, dlse: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
        saved = 3 + len(Packed._fields)
        requested, numbers = others[saved : saved + len(_DIFFERENTIABLE)], Numbers(*others[saved + len(_DIFFERENTIABLE) :])
        found = _gradients(None, requested, dout, dlse, *others[:saved], numbers=numbers)
        like = others[0]
        return tuple(like.new_empty(0) if x is None else x.contiguous() for x in found)

    backward = torch.library.custom_op(f"{place}_gradients", gradients, mutates_args=(), schema=_BACKWARD)

    @backward.register_fake
    def _(dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, state: Tensor, *others: Any) -> tuple[Tensor, ...]:
        requested = others[len(Packed._fields) : len(Packed._fields) + len(_DIFFERENTIABLE)]
        tensors = [others[place] for place in _DIFFERENTIABLE]
        return tuple(x.new_empty(x.shape) if wanted else out.new_empty(0) for x, wanted in zip(tensors, requested, strict=True))

    operator.register_autograd(_differentiated, setup_context=_keep)
    backward.register_autograd(_twice, setup_context=lambda ctx, inputs, output: None)


define_lazily(_define, "flashtune_packed")
