"""Packed calls in PyTorch: a call of `attention` for each sequence, plans with gradients, and operators for compilers."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtune.core.problems import reference
from flashtune.core.problems.band import Sides
from flashtune.core.system.errors import InputError
from flashtune.dispatch.api import attention
from flashtune.dispatch.call.parse import signed
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of
from flashtune.dispatch.operators import define_lazily, schema_of
from flashtune.dispatch.plans.autograd import differentiated, refuse_twice
from flashtune.dispatch.plans.gradients import sink_gradients
from flashtune.dispatch.plans.plan import capturing, random_bits
from flashtune.dispatch.rows import packed as kernels
from flashtune.dispatch.rows.by_sequence import by_sequence
from flashtune.dispatch.rows.packed import PackedPlan, served
from flashtune.dispatch.rows.paged import gathered, recordable
from flashtune.dispatch.state.context import Memo, current
from flashtune.dispatch.state.recorded import meet_packed


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
    if not numbers.dropout_p:
        words = numbers.words() | {"enable_gqa": heads != k.shape[1], "return_lse": True, "implementation": implementation}
        out, lse = attention(q, k, v, alibi_slopes=slopes, sinks=sinks, **words)
        return out, lse
    # Heads of all sequences are counted, as kernels do, so that each has a mask of its own.
    rows = [reference.dropout_keep_rows(seed, 0, index * heads + h, 0, n_q, n_kv, numbers.dropout_p, q.device) for h in range(heads)]
    of_slopes, of_sinks = (None if x is None else x[None] for x in (slopes, sinks))
    band = Sides((numbers.band.left, numbers.band.right), numbers.alignment).band(n_q, n_kv)
    parameters = replace(numbers.parameters(), band=band, slopes=of_slopes, sinks=of_sinks)
    out, lse = reference.attention(
        *(q, k, v),
        keep=torch.stack(rows)[None],
        dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        **parameters.formula(),
    )
    return out.to(q.dtype), lse


def by_kernels(memo: Memo, packed: Packed, numbers: Numbers, seed: int, plan: PackedPlan | None = None) -> tuple[Tensor, Tensor]:
    """Output and LSE by the best kernel that can be built here, else by a call for each sequence."""
    return kernels.forward(memo, packed, numbers, seed, plan) or by_attention(packed, numbers, seed)


class TrainedPlan(PackedPlan):
    """Plan of a call whose gradients, which are needed, kernels compute."""

    __slots__ = ()
    returns_lse = True

    def again(self, given: Sequence[Tensor | None], places: Sequence[int]) -> None:
        """None: a call is part of autograd's graph."""

    def outputs(self, seed: int | None, *tensors: Any) -> tuple[Tensor, Tensor, int]:
        """Output, LSE and dropout's bits."""
        packed = Packed(*tensors)
        bits = dropout_bits(packed, self.numbers, seed)
        return *by_kernels(self.memo, packed, self.numbers, bits, self), bits

    def gradients(self, requested: Sequence[bool], bits: int, *given: Any) -> list[Tensor | None]:
        """Requested gradients, by kernels or a call for each sequence."""
        memo, numbers, (dout, dlse, out, lse, *tensors) = self.memo, self.numbers, given
        packed, needs = Packed(*tensors), Packed(*requested)  # type: ignore[arg-type]
        found: Sequence[Tensor | None] | None = None
        if any(requested[:3]) and not needs.slopes:
            found = kernels.backward(memo, packed, numbers, bits, out, lse, dout, dlse, self)
        elif not needs.slopes and served(packed, numbers, "bwd", memo) is not None:
            found = [None] * 3
        if found is None:
            return differentiated(lambda *x: by_attention(Packed(*x), numbers, bits), packed, requested, dout, dlse, lse)
        of_heads, (dq, dk, dv) = None, found
        if needs.sinks and packed.sinks is not None:
            rows = [x.transpose(0, 1)[None] for x in (out, dout)]
            [of_heads] = sink_gradients(packed.sinks[None], rows[0], lse[None], rows[1], None if dlse is None else dlse[None])
            of_heads = of_heads.to(packed.sinks.dtype)
        return [*(dq if needs.query else None, dk if needs.key else None, dv if needs.value else None), *[None] * 4, of_heads, *[None] * 3]

    def traced(self, requested: Sequence[bool], bits: int, *given: Any) -> list[Tensor | None]:
        """The same by the operator."""
        return _by_operator(requested, *given[:4], _state(self.numbers, bits), *given[4:], numbers=self.numbers)


_DIFFERENTIABLE = tuple(map(Packed._fields.index, ("query", "key", "value", "slopes", "sinks")))
"""Places of the tensors of a call that have gradients."""


def _state(numbers: Numbers, bits: int) -> Tensor:
    """Dropout's bits on the CPU."""
    return torch.tensor([signed(bits)] if numbers.dropout_p else [], dtype=torch.int64)


def _placed(values: Sequence[Any]) -> list[Any]:
    """A value for each tensor of a call from those for the ones that have gradients."""
    found = dict(zip(_DIFFERENTIABLE, values, strict=True))
    return [found.get(place) for place in range(len(Packed._fields))]


def _eager(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, LSE, and dropout's bits on the CPU, without gradients; `given` are a call's tensors, its seed and its numbers."""
    count = len(Packed._fields)
    packed, numbers = Packed(*given[:count]), Numbers(*given[count + 1 :])
    if packed.table is None or recordable(packed, numbers):
        meet_packed(current(), problem_of(packed, numbers, exact=True), None, False)
    bits = dropout_bits(packed, numbers, given[count])
    with torch.no_grad():
        out, lse = by_kernels(current(), packed, numbers, bits)
    return out.contiguous(), lse.contiguous(), _state(numbers, bits)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save the tensors, the output, the LSE and dropout's bits for the backward."""
    count = len(Packed._fields)
    ctx.save_for_backward(*output, *inputs[:count])
    ctx.numbers = Numbers(*inputs[count + 1 :])
    ctx.set_materialize_grads(False)


def _through_operator(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments of the forward operator, by the operator of gradients."""
    found: list[Tensor | None] = [None] * len(Packed._fields)
    if dout is not None or dlse is not None:
        found = _by_operator(ctx.needs_input_grad, dout, dlse, *ctx.saved_tensors, numbers=ctx.numbers)
    return *found, *(None,) * (1 + len(Numbers._fields))


def _by_operator(requested: Sequence[bool], *tensors: Tensor | None, numbers: Numbers) -> list[Tensor | None]:
    """Requested gradients of a call's tensors, by the operator, which takes these tensors."""
    wanted = [requested[place] for place in _DIFFERENTIABLE]
    found = torch.ops.flashtune_packed.attention_gradients(*tensors, *wanted, *numbers)
    return _placed([grad if needed else None for grad, needed in zip(found, wanted, strict=True)])


_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor cu_q, Tensor cu_k, Tensor? used, Tensor? slopes, Tensor? sinks, Tensor? table, "
    "Tensor? k_descale, Tensor? v_descale"
)
_NUMBERS_SCHEMA = schema_of(Numbers).replace("int", "SymInt")
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
        wanted, numbers = others[saved : saved + len(_DIFFERENTIABLE)], Numbers(*others[saved + len(_DIFFERENTIABLE) :])
        like, lse, state, *tensors = others[:saved]
        dout = torch.zeros_like(like) if dout is None else dout
        bits, memo = int(state.item()) % 2**64 if numbers.dropout_p else 0, current()
        meet_packed(memo, problem_of(Packed(*tensors), numbers, "bwd", exact=True), None, False)
        found = TrainedPlan(memo, None, numbers).gradients(list(map(bool, _placed(wanted))), bits, dout, dlse, like, lse, *tensors)
        return tuple(like.new_empty(0) if x is None else x.contiguous() for x in map(found.__getitem__, _DIFFERENTIABLE))

    backward = torch.library.custom_op(f"{place}_gradients", gradients, mutates_args=(), schema=_GRADIENTS_SCHEMA)

    @backward.register_fake
    def _(dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, state: Tensor, *others: Any) -> tuple[Tensor, ...]:
        requested = others[len(Packed._fields) : len(Packed._fields) + len(_DIFFERENTIABLE)]
        tensors = [others[place] for place in _DIFFERENTIABLE]
        return tuple(x.new_empty(x.shape) if wanted else out.new_empty(0) for x, wanted in zip(tensors, requested, strict=True))

    operator.register_autograd(_through_operator, setup_context=_save_for_backward)
    backward.register_autograd(refuse_twice, setup_context=lambda ctx, inputs, output: None)


define_lazily(_define, "flashtune_packed")
