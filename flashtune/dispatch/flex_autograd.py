"""The autograd function of kernels with a mask and a score as code, of dense tensors and of packed sequences."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtune.core.errors import InputError
from flashtune.core.launches import copyable
from flashtune.core.launching import operand
from flashtune.dispatch.flex_blocks import FlexCall, blocks
from flashtune.dispatch.flex_kernels import ModKernel, NotBuilt, kernel_of, launch
from flashtune.templates.mods.emit import Captured, emitted


def types_of(captured: Sequence[Tensor], trains: Sequence[bool]) -> tuple[Captured, ...]:
    """Types of captured tensors, of which these get gradients."""
    return tuple(Captured(x.dtype, x.dim(), trained and x.is_floating_point()) for x, trained in zip(captured, trains, strict=True))


class Flex(torch.autograd.Function):
    """Output and LSE; gradients of queries, keys, values and captured tensors."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: FlexCall, *captured: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        """Output and LSE of a call's tensors, kept for the gradients."""
        out = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
        if call.sequences is None and query.transpose(1, 2).is_contiguous():
            # The output has the queries' memory layout.
            out = torch.empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]), dtype=query.dtype, device=query.device)
            out = out.transpose(1, 2)
        rows = query.shape[:3] if call.sequences is None else query.shape[1::-1]
        lse = torch.empty(rows, dtype=torch.float32, device=query.device)
        more = [*captured, *_lists(call, call.kernel, query, key)]
        launch(call.kernel, (query, key, value, out, lse), more, call.scale, call.sequences)
        ctx.save_for_backward(query, key, value, out, lse, *captured)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Gradients of all arguments, of those that ask for one."""
        query, key, value, out, lse, *captured = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (4 + len(captured))
        call = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
        if dout.dim() == 3 or not copyable(operand(0, dout)):
            # Gradients may be expanded scalars, or parts of others that begin anywhere.
            dout = dout.contiguous() if dout.data_ptr() % 16 == 0 else dout.clone(memory_format=torch.contiguous_format)
        types = types_of(captured, ctx.needs_input_grad[4:])
        mods = emitted(call.functions.score, call.functions.mask, types, backward=True)
        kernel = kernel_of("bwd", query, key, value, mods, sequences=call.sequences)
        if isinstance(kernel, str):
            raise InputError(f"no kernel computes these gradients ({kernel}): use torch.nn.attention.flex_attention for training")
        call = replace(call, mods=mods, captured=tuple(captured))
        # Sums of atomic additions start from 0, and are rounded once.
        sums = {place: torch.zeros(captured[place].shape, dtype=torch.float32, device=query.device) for place in mods.trained}
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        operands = (query, key, value, out, lse, dout, None if dlse is None else dlse.contiguous(), *gradients)
        more = [*captured, *_lists(call, kernel, query, key, backward=True), *sums.values()]
        try:
            launch(kernel, operands, more, call.scale, call.sequences)
        except NotBuilt:
            return Flex.backward(ctx, dout, dlse)
        of_captured = [sums[place].to(x.dtype) if place in sums else None for place, x in enumerate(captured)]
        wanted = [x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
        return *wanted, None, *of_captured


def _lists(call: FlexCall, kernel: ModKernel, query: Tensor, key: Tensor, *, backward: bool = False) -> list[Tensor]:
    """The lists of blocks that a kernel walks, in its order."""
    if not call.mods.listed(kernel.variant.spec):
        return []
    number = kernel.config.number
    found = [blocks(call, kernel, query, key, (number("BLOCK_M"), number("BLOCK_N")), of_keys=backward)]
    if backward and "DQ_BLOCK_M" in kernel.config.as_dict():
        found.append(blocks(call, kernel, query, key, (number("DQ_BLOCK_M"), number("DQ_BLOCK_N"))))
    return found
