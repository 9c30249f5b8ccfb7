"""Calls whose gradient is needed, as PyTorch operators: the forward's kernel keeps the LSE, which the backward's kernel takes.

`torch.ops.flashtune.attention_training` and `torch.ops.flashtune.attention_gradients` are opaque to compilers. Between them pass the
output, the LSE and 64 bits that determine dropout's mask; nothing is as large as the scores. Where gradients have to be bitwise repeatable,
only families that accumulate in a fixed order serve.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flashtune.core.errors import InputError
from flashtune.core.torch_dtypes import output_torch_dtype
from flashtune.dispatch.call import Arguments, Call, Options, Outputs, PerHead, parse, signed
from flashtune.dispatch.plans.dropout_seed import draws_in_a_capture, random_bits
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.gradients import BackwardInputs
from flashtune.dispatch.plans.memory import out_strides
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.resolve import backwards, layers
from flashtune.dispatch.resolve.inspection import DECIDED
from flashtune.dispatch.resolve.memo import Memo


class Numbers(NamedTuple):
    """Scalar arguments of an operator but for the seed."""

    dropout_p: float
    scale: float
    left: int
    right: int
    softcap: float
    causal_alignment: str
    allow_tf32: bool
    deterministic: bool

    def words(self) -> dict[str, Any]:
        """Keyword arguments of `attention` for these."""
        found = self._asdict()
        return {"window": (found.pop("left"), found.pop("right")), **found}


_NUMBERS = ", ".join(f"{kind.__name__} {name}" for name, kind in Numbers.__annotations__.items())
_PER_HEAD = "Tensor? alibi_slopes, Tensor? sinks"
_FORWARD = f"(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, {_PER_HEAD}, int? seed, {_NUMBERS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    "(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor state, Tensor? attn_mask, "
    f"{_PER_HEAD}, bool of_query, bool of_keys, bool of_mask, bool of_slopes, bool of_sinks, {_NUMBERS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_forwards = threading.local()
"""In `memo`, the dispatch state under which the forward ran whose gradients this thread computes."""


def define(eager: Callable[..., Any]) -> None:
    """Define the operators; `eager` is flashtune.dispatch.attention."""

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        seed: int | None,
        *numbers: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Repeatability concerns the backward alone.
        given = Numbers(*numbers)._replace(deterministic=False)
        bits = 0
        if given.dropout_p:
            # Sampled as without gradients, since a recomputed checkpoint has run without them first.
            bits = random_bits(seed, query.device)[0]
        # A kernel computes the backward, and PyTorch's operations would need memory of all scores for the LSE.
        DECIDED.kernels = True
        try:
            with torch.no_grad():
                out, lse = eager(
                    query.detach(),
                    key.detach(),
                    value.detach(),
                    attn_mask,
                    enable_gqa=query.shape[1] != key.shape[1],
                    return_lse=True,
                    seed=bits if given.dropout_p else None,
                    alibi_slopes=alibi_slopes,
                    sinks=sinks,
                    **given.words(),
                )
        finally:
            DECIDED.kernels = False
        promised = _like_query(query, value.shape[3])
        if out.stride() != promised.stride():
            out = promised.copy_(out)
        return out, lse.contiguous(), torch.tensor([signed(bits)])

    training = torch.library.custom_op(
        "flashtune::attention_training", forward, mutates_args=(), schema=_FORWARD, tags=(torch.Tag.nondeterministic_seeded,)
    )

    @training.register_fake
    def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        return _like_query(query, value.shape[3]), lse, torch.empty(1, dtype=torch.int64)

    backward = torch.library.custom_op("flashtune::attention_gradients", _gradients, mutates_args=(), schema=_BACKWARD)

    @backward.register_fake
    def _(dout: torch.Tensor, dlse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> Any:
        _, _, _, attn_mask, slopes, sinks, of_query, of_keys, of_mask, of_slopes, of_sinks, *_ = others
        more = [
            query.new_empty(0) if x is None or not requested else x.new_empty(x.shape)
            for x, requested in ((attn_mask, of_mask), (slopes, of_slopes), (sinks, of_sinks))
        ]
        return *_written(query, key, value, of_query, of_keys), *more

    training.register_autograd(_differentiated, setup_context=_keep)
    backward.register_autograd(_twice, setup_context=lambda ctx, inputs, output: None)


class TrainingPlan:
    """Plan of calls whose gradient is needed, outside of tracing and transforms: the forward's plan, and its gradients.

    A Python operator would cost the host several times as much, so that this is an autograd function around the same kernels.
    """

    __slots__ = ("_torch", "backward", "call", "forward", "memo", "numbers")

    def __init__(self, memo: Memo, call: Call, forward: TorchPlan | KernelPlan) -> None:
        """`forward` serves `backwards.forward_of(call)`."""
        self.memo, self.call, self.forward = memo, call, forward
        self.backward = backwards.backward(memo, backwards.forward_of(call))
        self._torch = TorchPlan(call=call)
        sides, alignment = call.band.keywords(), "bottom_right" if call.band.diagonal else "top_left"
        tf32 = call.problem is not None and call.problem.features.tf32
        numbers = call.dropout_p, call.scale, sides["window_left"], sides["window_right"], call.softcap
        self.numbers = Numbers(*numbers, alignment, tf32, call.deterministic)

    def build(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, per_head: PerHead | None
    ) -> None:
        """Load or compile machine code for the forward; an exception here is its kernel's own fault."""
        call = self.call
        given = None if per_head is None else PerHead(*_summed_wide(per_head).views(call))
        with torch.no_grad():
            self.forward.build(*call.views(query, key, value), call.small_mask(attn_mask), given)

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        seed: int | None,
        per_head: PerHead | None,
    ) -> Outputs:
        """Output and, where `return_lse` is set, LSE."""
        call, bits = self.call, None
        if call.dropout_p:
            if draws_in_a_capture(call, seed):
                # A seed sampled here would be the same at every replay of the graph.
                return self._torch.captured(query, key, value, attn_mask, seed, per_head)
            # Sampled as without gradients, since a recomputed checkpoint has run without them first.
            bits = random_bits(seed, call.device)[0]
        if not call.identity:
            query, key, value = call.views(query, key, value)
        if attn_mask is not None:
            attn_mask = call.small_mask(attn_mask)
        slopes = sinks = None
        if per_head is not None:
            views = PerHead(*_summed_wide(per_head).views(call))
            slopes, sinks = views.alibi_slopes, views.sinks
        out, lse = _apply(query, key, value, attn_mask, slopes, sinks, bits, self)
        if call.rank == 4:
            return out, lse
        return call.restored(out), call.restored(lse) if call.return_lse else None


class _Attention(torch.autograd.Function):
    """Autograd function of a plan: output and LSE (None where it isn't requested) of its forward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        bits: int | None,
        plan: TrainingPlan,
    ) -> Outputs:
        # Saving the inputs takes no further memory.
        if attn_mask is None and slopes is None and sinks is None:
            out, lse = plan.forward.run(query, key, value, None, bits, None)
            ctx.save_for_backward(query, key, value, out, lse)
        else:
            per_head = None if slopes is None and sinks is None else PerHead(alibi_slopes=slopes, sinks=sinks)
            out, lse = plan.forward.run(query, key, value, attn_mask, bits, per_head)
            ctx.save_for_backward(query, key, value, out, lse, attn_mask, slopes, sinks)
        ctx.given = plan, bits or 0
        ctx.set_materialize_grads(False)
        return out, lse if plan.call.return_lse else None

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None, None, None, None, None
        query, key, value, out, lse, *others = ctx.saved_tensors
        attn_mask, slopes, sinks = others or _NOTHING
        of_query, of_key, of_value, of_mask, of_slopes, of_sinks, *_ = ctx.needs_input_grad
        dout = torch.zeros_like(out) if dout is None else dout
        plan, bits = ctx.given
        # In a graph of the gradients (create_graph) the operator raises for second derivatives.
        if torch.is_grad_enabled() or not _untraced(dout) or not (dlse is None or _untraced(dlse)):
            state, requested = torch.tensor([signed(bits)]), ctx.needs_input_grad[:6]
            tensors = dout, dlse, query, key, value, out, lse, state, attn_mask, slopes, sinks
            return *_by_operator(plan.memo, requested, *tensors, numbers=plan.numbers), None, None
        requested = of_query, of_key or of_value, of_mask, of_slopes, of_sinks
        inputs = BackwardInputs(query, key, value, out, lse, dout, dlse, attn_mask, slopes, sinks, bits, *requested)
        dq, dk, dv, *more = plan.backward.gradients(inputs)
        return dq, dk if of_key else None, dv if of_value else None, *more, None, None


_NOTHING = None, None, None

_apply: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply  # pyright: ignore[reportAttributeAccessIssue]
"""Implementation of `_Attention.apply` without its check for transforms of torch.func, under which plans don't serve."""


def _summed_wide(per_head: PerHead) -> PerHead:
    """Per-head arguments with sinks as float32 where their gradient is needed: it is summed over batches before it is rounded."""
    sinks = per_head.sinks
    return per_head if sinks is None or not sinks.requires_grad else per_head._replace(sinks=sinks.float())


def _untraced(x: torch.Tensor) -> bool:
    # Compilers (compiled autograd traces a backward) can trace the first check alone. A tensor of vmap has no storage: only an operator
    # can take such a batch of gradients one by one. An operator resolves lazy negations, too.
    if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter) or torch._C._len_torch_dispatch_stack():
        return False
    return bool(torch._C._has_storage(x)) and not x.is_neg()


def _like_query(query: torch.Tensor, columns: int) -> torch.Tensor:
    """Empty output with the query's memory order."""
    shape = query.shape[0], query.shape[1], query.shape[2], columns
    return query.new_empty_strided(shape, out_strides(shape, query.stride()), dtype=output_torch_dtype(query.dtype))


def _written(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, of_query: bool, of_keys: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised gradients, each laid out as its input; empty for those not requested."""
    dq, dk, dv = (
        x.new_empty_strided(x.shape, out_strides((x.shape[0], x.shape[1], x.shape[2], x.shape[3]), x.stride()))
        if requested
        else x.new_empty(0)
        for x, requested in ((query, of_query), (key, of_keys), (value, of_keys))
    )
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Save the inputs, the output, the LSE and the random state for the backward."""
    query, key, value, attn_mask, slopes, sinks, _, *numbers = inputs
    ctx.save_for_backward(query, key, value, *output, attn_mask, slopes, sinks)
    ctx.numbers = numbers
    # Autograd's threads have no layers of their own.
    ctx.memo = layers.current()
    ctx.set_materialize_grads(False)


def _differentiated(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: object) -> tuple[torch.Tensor | None, ...]:
    """Requested gradients."""
    query, key, value, *others = ctx.saved_tensors
    nothing = (None,) * (1 + len(ctx.numbers))
    requested = ctx.needs_input_grad[:6]
    if dout is None and dlse is None:
        return *(None for _ in requested), *nothing
    dout = torch.zeros_like(others[0]) if dout is None else dout
    return *_by_operator(ctx.memo, requested, dout, dlse, query, key, value, *others, numbers=ctx.numbers), *nothing


def _by_operator(memo: Memo, requested: Sequence[bool], *tensors: torch.Tensor | None, numbers: Sequence[Any]) -> Any:
    """Requested gradients of query, key, value, mask, slopes and sinks; `tensors` as the operator takes them."""
    of_query, of_key, of_value, *of_others = requested
    # Autograd's threads have no layers of their own.
    _forwards.memo = memo
    try:
        found = torch.ops.flashtune.attention_gradients(*tensors, of_query, of_key or of_value, *of_others, *numbers)
    finally:
        _forwards.memo = None
    return tuple(grad if wanted else None for grad, wanted in zip(found, requested, strict=True))


def _twice(ctx: Any, *_: object) -> None:
    raise InputError(
        "attention was differentiated twice, and kernels have first derivatives alone: "
        "for second ones call F.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH), or write out what torch lacks"
    )


def _gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    state: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *others: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients by the best backward kernel that takes the call, else by the formula."""
    memo = getattr(_forwards, "memo", None) or layers.current()
    tensors = query, key, value, attn_mask, alibi_slopes, sinks
    kinds = tuple(None if x is None else (x.shape, x.dtype) for x in tensors)
    requested, numbers = others[:5], Numbers(*others[5:])
    backward = backwards.backward_of(
        memo,
        (kinds, query.device, numbers),
        lambda: parse(
            Arguments(query, key, value, attn_mask, per_head=PerHead(alibi_slopes=alibi_slopes, sinks=sinks)),
            Options(enable_gqa=query.shape[1] != key.shape[1], **numbers.words()),
        ),
    )
    seed = int(state.item()) % 2**64 if numbers.dropout_p else 0
    inputs = BackwardInputs(query, key, value, out, lse, dout, dlse, attn_mask, alibi_slopes, sinks, seed, *requested)
    return tuple(query.new_empty(0) if grad is None else grad for grad in backward.gradients(inputs))
