"""Calls with gradients outside of tracing and transforms: the forward's kernel keeps the LSE, which the backward's takes."""

from typing import Any

import torch
from torch import Tensor

from flashtune.dispatch import operators
from flashtune.dispatch.call.call import Call, Outputs, PerHead
from flashtune.dispatch.call.parse import signed
from flashtune.dispatch.decisions import backwards
from flashtune.dispatch.plans import autograd
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.gradients import BackwardInputs
from flashtune.dispatch.plans.plan import Plan, capturing, random_bits
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.state.context import Memo


class TrainingPlan(Plan):
    """Plan of a forward and of its gradients: of query, key and value, and of mask, slopes and sinks where a call has one."""

    __slots__ = ("backward", "call", "forward", "memo", "numbers", "plain", "returns_lse")

    def __init__(self, memo: Memo, call: Call, forward: TorchPlan | KernelPlan) -> None:
        """`forward` serves `backwards.forward_of(call)`."""
        self.memo, self.call, self.forward, self.returns_lse = memo, call, forward, call.return_lse
        self.plain = call.identity and call.rank == 4 and not call.dropout_p
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
        if self.plain and mask is None and per_head is None:
            # Arguments that are None take the host's time, too.
            found: Outputs = autograd.apply(self, None, query, key, value)
            return found
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
        more: tuple[Tensor | None, ...] = (mask,)
        if per_head is not None:
            views = PerHead(*_summed_wide(per_head).views(call))
            more = mask, views.alibi_slopes, views.sinks
        out, lse = autograd.apply(self, bits, query, key, value, *more)
        if call.rank == 4:
            return out, lse
        return call.restored(out), call.restored(lse) if call.return_lse else None

    def outputs(
        self, bits: int | None, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, slopes: Any = None, sinks: Any = None
    ) -> Any:
        """Output, LSE and dropout's bits."""
        per_head = None if slopes is None and sinks is None else PerHead(alibi_slopes=slopes, sinks=sinks)
        out, lse = self.forward.run(query, key, value, mask, bits, per_head)
        return out, lse, bits or 0

    def gradients(
        self, requested: Any, bits: int, dout: Any, dlse: Any, out: Any, lse: Any, query: Any, key: Any, value: Any,
        mask: Any = None, slopes: Any = None, sinks: Any = None,
    ) -> Any:  # fmt: skip
        """Requested gradients."""
        of_query, of_key, of_value, *more = requested
        inputs = BackwardInputs(query, key, value, out, lse, dout, dlse, mask, slopes, sinks, bits, of_query, of_key or of_value, *more)
        found = self.backward.gradients(inputs)[: len(requested)]
        if of_key is of_value:
            return found
        return found[0], found[1] if of_key else None, found[2] if of_value else None, *found[3:]

    def traced(self, requested: Any, bits: int, dout: Any, dlse: Any, out: Any, lse: Any, *tensors: Any) -> Any:
        """The same by the operator."""
        query, key, value, mask, slopes, sinks, *_ = *tensors, None, None, None
        given = dout, dlse, query, key, value, out, lse, torch.tensor([signed(bits)]), mask, slopes, sinks
        wanted = (*requested, False, False, False)[:6]
        return operators.gradients(self.memo, wanted, *given, numbers=self.numbers)[: len(requested)]


def _summed_wide(per_head: PerHead) -> PerHead:
    """Per-head arguments with sinks as float32 where their gradient is needed: it is summed over batches before it is rounded."""
    sinks = per_head.sinks
    return per_head if sinks is None or not sinks.requires_grad else per_head._replace(sinks=sinks.float())
