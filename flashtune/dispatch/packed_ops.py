"""Packed calls in PyTorch: a call of `attention` for each sequence, the autograd function of kernels, and operators for compilers."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtune.core import reference
from flashtune.core.band import Sides
from flashtune.core.errors import InputError
from flashtune.dispatch import packed as kernels
from flashtune.dispatch.api import attention
from flashtune.dispatch.by_sequence import by_sequence
from flashtune.dispatch.calls import meet_packed
from flashtune.dispatch.context import Memo, current
from flashtune.dispatch.gradients import recording, sink_gradients
from flashtune.dispatch.operators import define_lazily
from flashtune.dispatch.packed import PackedPlan, served
from flashtune.dispatch.paged import gathered
from flashtune.dispatch.parse import signed
from flashtune.dispatch.plan import capturing, random_bits
from flashtune.dispatch.sequences import Numbers, Packed, problem_of


def dropout_bits(packed: Packed, numbers: Numbers, seed: int | None) -> int:
    """64 bits that determine dropout's mask."""
    if not numbers.dropout_p:
        return 0
    if seed is None and capturing(packed.query.device):
        raise InputError("a CUDA graph would drop the same pairs at every replay: pass a seed, or drop none")
    return random_bits(seed, packed.query.device)[0]


def by_attention(packed: Packed, numbers: Numbers, seed: int, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """Output and LSE by a call of `attention` for each sequence, over a copy of its keys where these are in pages."""
    of_sequence = functools.partial(_of_sequence, implementation=implementation)
    if packed.table is None:
        return by_sequence(packed, numbers, seed, of_sequence)
    out, lse = by_sequence(gathered(packed), numbers, seed, of_sequence)
    return out.to(packed.query.dtype), lse


def _of_sequence(
    tensors: list[Tensor],
    numbers: Numbers,
    seed: int,
    index: int,
    slopes: Tensor | None,
    sinks: Tensor | None,
    *,
    implementation: str | None,
) -> tuple[Tensor, Tensor]:
    """Output (1, Hq, N_q, D_v) and LSE of the sequence with this index."""
    q, k, v = tensors
    heads, n_q, n_kv = q.shape[1], q.shape[2], k.shape[2]
    alignment = "bottom_right" if numbers.bottom_right else "top_left"
    if not numbers.dropout_p:
        words: dict[str, Any] = {"window": (numbers.left, numbers.right), "causal_alignment": alignment, "enable_gqa": heads != k.shape[1]}
        words |= {"scale": numbers.scale, "softcap": numbers.softcap, "allow_tf32": numbers.tf32, "return_lse": True}
        words["implementation"] = implementation
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


def by_kernels(memo: Memo, packed: Packed, numbers: Numbers, seed: int, plan: PackedPlan | None = None) -> tuple[Tensor, Tensor]:
    """Output and LSE by the best kernel that can be built here, else by a call for each sequence."""
    return kernels.forward(memo, packed, numbers, seed, plan) or by_attention(packed, numbers, seed)


def _recomputed(
    wanted: Sequence[bool], packed: Packed, numbers: Numbers, seed: int, dout: Tensor, dlse: Tensor | None
) -> list[Tensor | None]:
    """Gradients by a forward for each sequence, differentiated."""
    names = [name for name, want in zip(_NAMES, wanted, strict=True) if want]
    with recording(), torch.enable_grad():
        leaves = {name: getattr(packed, name).detach().requires_grad_() for name in names}
        out, lse = by_attention(packed._replace(**leaves), numbers, seed)
        pairs = [(out, dout)] if dlse is None else [(out, dout), (lse, dlse.masked_fill(lse == -math.inf, 0.0))]
        outputs, grads = zip(*((x, grad) for x, grad in pairs if x.requires_grad), strict=True) if out.requires_grad else ((), ())
        given = torch.autograd.grad(outputs, [*leaves.values()], grads, allow_unused=True, materialize_grads=True) if outputs else ()
    found = dict(zip(names, given or [torch.zeros_like(x) for x in leaves.values()], strict=True))
    return [found.get(name) for name in _NAMES]


class Attention(torch.autograd.Function):
    """Autograd function of the kernels; a Python operator would cost the host several times as much."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Output and LSE of a call's tensors, its seed and its plan."""
        *tensors, seed, plan = given
        packed = Packed(*tensors)
        bits = dropout_bits(packed, plan.numbers, seed)
        out, lse = by_kernels(plan.memo, packed, plan.numbers, bits, plan)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.given = plan, bits
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of all arguments."""
        requested = [ctx.needs_input_grad[place] for place in _DIFFERENTIABLE]
        (plan, bits), (out, lse, *tensors) = ctx.given, ctx.saved_tensors
        # In a graph of the gradients (create_graph) the operator raises for second derivatives.
        if dout is None and dlse is None:
            found: list[Tensor | None] = [None] * len(requested)
        elif torch.is_grad_enabled():
            state = torch.tensor([signed(bits)] if plan.numbers.dropout_p else [], dtype=torch.int64)
            given = dout, dlse, out, lse, state, *tensors, *requested, *plan.numbers
            found = [x if want else None for x, want in zip(torch.ops.flashtune_packed.attention_gradients(*given), requested, strict=True)]
        else:
            found = _gradients_by_kernels(plan.memo, requested, dout, dlse, out, lse, Packed(*tensors), plan.numbers, bits)
        return *_placed(found)[: len(tensors)], None, None


_NAMES = ("query", "key", "value", "slopes", "sinks")
_DIFFERENTIABLE = tuple(map(Packed._fields.index, _NAMES))
"""Names and places of the tensors of a call that have gradients."""


def _placed(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments from those of the tensors that have one."""
    found: list[Tensor | None] = [None] * (len(Packed._fields) + 1 + len(Numbers._fields))
    for place, grad in zip(_DIFFERENTIABLE, grads, strict=True):
        found[place] = grad
    return tuple(found)


def _eager(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE, and dropout's bits on the CPU, without gradients; `given` are a call's tensors, its seed and its numbers."""
    count = len(Packed._fields)
    packed, numbers = Packed(*given[:count]), Numbers(*given[count + 1 :])
    if packed.table is None:
        meet_packed(current(), problem_of(packed, numbers, exact=True), None, False)
    bits = dropout_bits(packed, numbers, given[count])
    with torch.no_grad():
        out, lse = by_kernels(current(), packed, numbers, bits)
    return out.contiguous(), lse.contiguous(), torch.tensor([signed(bits)] if numbers.dropout_p else [], dtype=torch.int64)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save the tensors, the output, the LSE and dropout's bits for the backward."""
    count = len(Packed._fields)
    ctx.save_for_backward(*output, *inputs[:count])
    ctx.numbers = Numbers(*inputs[count + 1 :])
    ctx.set_materialize_grads(False)


def _through_operator(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments of the forward operator, by the operator of gradients."""
    requested = [ctx.needs_input_grad[place] for place in _DIFFERENTIABLE]
    if dout is None and dlse is None:
        return _placed([None] * len(requested))
    found = torch.ops.flashtune_packed.attention_gradients(dout, dlse, *ctx.saved_tensors, *requested, *ctx.numbers)
    return _placed([grad if wanted else None for grad, wanted in zip(found, requested, strict=True)])


def _gradients_by_kernels(
    memo: Memo | None,
    requested: Sequence[bool],
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    packed: Packed,
    numbers: Numbers,
    seed: int,
) -> list[Tensor | None]:
    """Requested gradients, by kernels or a call for each sequence."""
    dout, memo = torch.zeros_like(out) if dout is None else dout, memo or current()
    of_slopes, of_sinks = requested[3:]
    found: Sequence[Tensor | None] | None = None
    if any(requested[:3]) and not of_slopes:
        found = kernels.backward(memo, packed, numbers, seed, out, lse, dout, dlse)
    elif not of_slopes and served(packed, numbers, "bwd", memo) is not None:
        found = [None] * 3
    if found is None:
        return _recomputed(requested, packed, numbers, seed, dout, dlse)
    grads: list[Tensor | None] = [*found, None, None]
    if of_sinks and packed.sinks is not None:
        rows = [x.transpose(0, 1)[None] for x in (out, dout)]
        [of_heads] = sink_gradients(packed.sinks[None], rows[0], lse[None], rows[1], None if dlse is None else dlse[None])
        grads[4] = of_heads.to(packed.sinks.dtype)
    return [grad if wanted else None for grad, wanted in zip(grads, requested, strict=True)]


def _refuse_twice(ctx: Any, *_: object) -> None:
    raise InputError(
        "attention_varlen was differentiated twice, and kernels have first derivatives alone: "
        "call attention for each sequence under sdpa_kernel(SDPBackend.MATH)"
    )


_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_q, Tensor cu_k, Tensor? used, Tensor? slopes, Tensor? sinks, Tensor? table, "
    "Tensor? k_descale, Tensor? v_descale"
)
_NUMBERS_SCHEMA = (
    "SymInt max_q, SymInt max_k, float scale, SymInt left, SymInt right, bool bottom_right, float softcap, float dropout_p, bool tf32, "
    "bool deterministic, SymInt? splits"
)
_SCHEMA = f"({_TENSORS}, int? seed, {_NUMBERS_SCHEMA}) -> (Tensor, Tensor, Tensor)"
_GRADIENTS_SCHEMA = (
    f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor state, {_TENSORS}, "
    f"bool of_query, bool of_key, bool of_value, bool of_slopes, bool of_sinks, {_NUMBERS_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _define() -> None:
    """Define the operators: opaque nodes of a compiler's graph."""
    place = "flashtune_packed::attention"
    tags = (torch.Tag.nondeterministic_seeded,)
    operator = torch.library.custom_op(place, _eager, mutates_args=(), schema=_SCHEMA, tags=tags)

    @operator.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        numbers, (rows, heads, _) = Numbers(*others[len(Packed._fields) - 2 :]), query.shape
        state = torch.empty(1 if numbers.dropout_p else 0, dtype=torch.int64)
        return query.new_empty((rows, heads, value.shape[-1])), query.new_empty((heads, rows), dtype=torch.float32), state

    def gradients(dout: Tensor | None, dlse: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
        saved = 3 + len(Packed._fields)
        requested, numbers = others[saved : saved + len(_DIFFERENTIABLE)], Numbers(*others[saved + len(_DIFFERENTIABLE) :])
        like, lse, state, *tensors = others[:saved]
        seed, packed = int(state.item()) % 2**64 if numbers.dropout_p else 0, Packed(*tensors)
        meet_packed(current(), problem_of(packed, numbers, "bwd", exact=True), None, False)
        found = _gradients_by_kernels(None, requested, dout, dlse, like, lse, packed, numbers, seed)
        return tuple(like.new_empty(0) if x is None else x.contiguous() for x in found)

    backward = torch.library.custom_op(f"{place}_gradients", gradients, mutates_args=(), schema=_GRADIENTS_SCHEMA)

    @backward.register_fake
    def _(dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, state: Tensor, *others: Any) -> tuple[Tensor, ...]:
        requested = others[len(Packed._fields) : len(Packed._fields) + len(_DIFFERENTIABLE)]
        tensors = [others[place] for place in _DIFFERENTIABLE]
        return tuple(x.new_empty(x.shape) if wanted else out.new_empty(0) for x, wanted in zip(tensors, requested, strict=True))

    operator.register_autograd(_through_operator, setup_context=_save_for_backward)
    backward.register_autograd(_refuse_twice, setup_context=lambda ctx, inputs, output: None)


define_lazily(_define, "flashtune_packed")
