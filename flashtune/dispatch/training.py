"""Calls with gradients outside of tracing and transforms: the forward's kernel keeps the LSE, which the backward's takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtune.core.torch_private import C
from flashtune.dispatch import backwards, operators
from flashtune.dispatch.call import Call, Outputs, PerHead
from flashtune.dispatch.context import Memo
from flashtune.dispatch.forward import KernelPlan
from flashtune.dispatch.gradients import BackwardInputs
from flashtune.dispatch.parse import signed
from flashtune.dispatch.plan import Plan, capturing, random_bits
from flashtune.dispatch.pytorch import TorchPlan


class TrainingPlan(Plan):
    """Plan of a forward and of its gradients.

    A Python operator would cost the host several times as much, so that this is an autograd function around the same kernels.
    """

    __slots__ = ("backward", "call", "forward", "memo", "numbers")

    def __init__(self, memo: Memo, call: Call, forward: TorchPlan | KernelPlan) -> None:
        """`forward` serves `backwards.forward_of(call)`."""
        self.memo, self.call, self.forward = memo, call, forward
        of_forward = backwards.forward_of(call)
        self.backward = backwards.backward_of(memo, of_forward, lambda: of_forward)
        alignment = "bottom_right" if call.band.diagonal else "top_left"
        self.numbers = operators.CallNumbers.of(call, alignment, trains=True)

    def build(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, per_head: PerHead | None) -> None:
        """Load or compile machine code for the forward; an exception here is its kernel's own fault."""
        call = self.call
        given = None if per_head is None else PerHead(*_summed_wide(per_head).views(call))
        with torch.no_grad():
            self.forward.build(*call.views(query, key, value), call.small_mask(mask), given)

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: int | None, per_head: PerHead | None) -> Outputs:
        """Output and, where `return_lse` is set, LSE."""
        call, bits = self.call, None
        if call.dropout_p:
            if seed is None and capturing(call.device):
                # A seed sampled here would be the same at every replay of the graph.
                return TorchPlan(call=call).captured(query, key, value, mask, seed, per_head)
            # Sampled as without gradients, since a recomputed checkpoint has run without them first.
            bits = random_bits(seed, call.device)[0]
        if not call.identity:
            query, key, value = call.views(query, key, value)
        if mask is not None:
            mask = call.small_mask(mask)
        slopes = sinks = None
        if per_head is not None:
            views = PerHead(*_summed_wide(per_head).views(call))
            slopes, sinks = views.alibi_slopes, views.sinks
        out, lse = _apply(query, key, value, mask, slopes, sinks, bits, self)
        if call.rank == 4:
            return out, lse
        return call.restored(out), call.restored(lse) if call.return_lse else None


class _Attention(torch.autograd.Function):
    """Autograd function of a plan: output and LSE (None where it isn't requested) of its forward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Outputs:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, mask, slopes, sinks, bits, plan = given
        # Saving the inputs takes no further memory.
        if mask is None and slopes is None and sinks is None:
            out, lse = plan.forward.run(query, key, value, None, bits, None)
            ctx.save_for_backward(query, key, value, out, lse)
        else:
            per_head = None if slopes is None and sinks is None else PerHead(alibi_slopes=slopes, sinks=sinks)
            out, lse = plan.forward.run(query, key, value, mask, bits, per_head)
            ctx.save_for_backward(query, key, value, out, lse, mask, slopes, sinks)
        ctx.given = plan, bits or 0
        ctx.set_materialize_grads(False)
        return out, lse if plan.call.return_lse else None

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None, None, None, None, None
        query, key, value, out, lse, *others = ctx.saved_tensors
        mask, slopes, sinks = others or _NOTHING
        of_query, of_key, of_value, of_mask, of_slopes, of_sinks, *_ = ctx.needs_input_grad
        dout = torch.zeros_like(out) if dout is None else dout
        plan, bits = ctx.given
        # In a graph of the gradients (create_graph) the operator raises for second derivatives.
        if torch.is_grad_enabled() or not _untraced(dout) or not (dlse is None or _untraced(dlse)):
            state, requested = torch.tensor([signed(bits)]), ctx.needs_input_grad[:6]
            tensors = dout, dlse, query, key, value, out, lse, state, mask, slopes, sinks
            return *operators.gradients(plan.memo, requested, *tensors, numbers=plan.numbers), None, None
        requested = of_query, of_key or of_value, of_mask, of_slopes, of_sinks
        inputs = BackwardInputs(query, key, value, out, lse, dout, dlse, mask, slopes, sinks, bits, *requested)
        dq, dk, dv, *more = plan.backward.gradients(inputs)
        return dq, dk if of_key else None, dv if of_value else None, *more, None, None


_NOTHING = None, None, None

_apply: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply  # pyright: ignore[reportAttributeAccessIssue]
"""Implementation of `_Attention.apply` without its check for transforms of torch.func, under which plans don't serve."""


def _summed_wide(per_head: PerHead) -> PerHead:
    """Per-head arguments with sinks as float32 where their gradient is needed: it is summed over batches before it is rounded."""
    sinks = per_head.sinks
    return per_head if sinks is None or not sinks.requires_grad else per_head._replace(sinks=sinks.float())


def _untraced(x: Tensor) -> bool:
    # Compilers (compiled autograd traces a backward) can trace the first check alone. A tensor of vmap has no storage: only an operator
    # can take such a batch of gradients one by one. An operator resolves lazy negations, too.
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or C._len_torch_dispatch_stack():
        return False
    return bool(C._has_storage(x)) and not x.is_neg()
