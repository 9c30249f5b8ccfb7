"""The autograd function of kernels with a mask and a score as code, of dense tensors and of packed sequences."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtune.core.errors import InputError
from flashtune.core.launches import copyable
from flashtune.core.launching import operand
from flashtune.dispatch.by_sequence import by_sequence
from flashtune.dispatch.flex_blocks import FlexCall, Passes, blocks
from flashtune.dispatch.flex_kernels import kernel_of, launch
from flashtune.dispatch.flex_torch import by_matrices, of_sequence
from flashtune.dispatch.gradients import recording
from flashtune.dispatch.kernel import Kernel, NotBuilt
from flashtune.dispatch.sequences import Packed
from flashtune.templates.mods.emit import Captured, Mods, emitted
from flashtune.templates.mods.scores import as_function


def types_of(captured: Sequence[Tensor], trains: Sequence[bool]) -> tuple[Captured, ...]:
    """Types of captured tensors, of which these get gradients."""
    return tuple(Captured(x.dtype, x.dim(), trained and x.is_floating_point()) for x, trained in zip(captured, trains, strict=True))


def attend_by_kernels(query: Tensor, key: Tensor, value: Tensor, call: FlexCall) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call, with its gradients where it has a backward."""
    if call.kernels.backward is None:
        with torch.no_grad():
            return _forward(query, key, value, call)
    found: tuple[Tensor, Tensor] = AttentionWithFunctions.apply(query, key, value, call, *call.captured)  # type: ignore[no-untyped-call]
    return found


def _forward(query: Tensor, key: Tensor, value: Tensor, call: FlexCall) -> tuple[Tensor, Tensor]:
    if call.sequences is None and query.transpose(1, 2).is_contiguous():
        # The output has the queries' memory layout.
        out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)
    else:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    rows = query.shape[:3] if call.sequences is None else query.shape[1::-1]
    lse = query.new_empty(rows, dtype=torch.float32)
    more = [*call.captured, *_lists(call, call.kernel, query, key)]
    launch(call.kernel, (query, key, value, out, lse), more, call.scale, call.sequences)
    return out, lse


class AttentionWithFunctions(torch.autograd.Function):
    """Output and LSE; gradients of queries, keys, values and captured tensors."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: FlexCall, *captured: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        """Output and LSE of a call's tensors, kept for the gradients."""
        out, lse = _forward(query, key, value, call)
        bounds = () if call.sequences is None else call.sequences.bounds
        ctx.save_for_backward(query, key, value, out, lse, *bounds, *captured)
        # Tensors are kept by autograd alone, which frees them and says where one was written to meanwhile.
        sequences = None if call.sequences is None else call.sequences._replace(bounds=())  # type: ignore[arg-type]
        ctx.call = replace(call, captured=(), sequences=sequences)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Gradients of all arguments, of those that ask for one."""
        query, key, value, _, _, *captured = ctx.saved_tensors
        captured = captured if ctx.call.sequences is None else captured[3:]
        if dout is None and dlse is None:
            return (None,) * (4 + len(captured))
        with torch.no_grad():
            found = _gradients_of(ctx, dout, dlse)
        if torch.is_grad_enabled():
            # In a graph of the gradients (create_graph).
            made = [x for x in found if x is not None]
            given = [x for x in (dout, dlse, query, key, value, *captured) if x is not None and x.is_floating_point()]
            again = iter(_Once.apply(len(made), *made, *given))  # type: ignore[no-untyped-call]
            found = tuple(None if x is None else next(again) for x in found)
        return found


class _Once(torch.autograd.Function):
    """The first tensors as they are, without a gradient by all."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        """The first `count` tensors."""
        return given[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:  # pyright: ignore
        """Raise InputError."""
        raise InputError(
            "attention with functions was differentiated twice, and kernels have first derivatives alone: "
            "for second ones write out the scores by torch's operations"
        )


def _gradients_of(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments of `AttentionWithFunctions`, whose context this is."""
    call = ctx.call
    query, key, value, out, lse, *captured = ctx.saved_tensors
    if call.sequences is not None:
        bounds, captured = captured[:3], captured[3:]
        call = replace(call, sequences=call.sequences._replace(bounds=tuple(bounds)))
    dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
    if dout.dim() == 3 or not copyable(operand(0, dout)):
        # Gradients may be expanded scalars, or parts of others that begin anywhere.
        dout = dout.contiguous() if dout.data_ptr() % 16 == 0 else dout.clone(memory_format=torch.contiguous_format)
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    operands = (query, key, value, out, lse, dout, None if dlse is None else dlse.resolve_neg().contiguous(), *gradients)
    while (found := _of_gradients(call, (query, key, value), captured, ctx.needs_input_grad[4:])) is not None:
        kernel, mods = found
        now = replace(call, kernels=Passes(kernel, mods), captured=tuple(captured))
        # Sums of atomic additions start from 0, and are rounded once.
        sums = {place: torch.zeros(captured[place].shape, dtype=torch.float32, device=query.device) for place in mods.trained}
        # Its next kernel, where one can't be built.
        with suppress(NotBuilt):
            more = [*captured, *_lists(now, kernel, query, key, backward=True), *sums.values()]
            launch(kernel, operands, more, call.scale, call.sequences)
            of_captured = [sums[place].to(x.dtype) if place in sums else None for place, x in enumerate(captured)]
            wanted = [x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
            return *wanted, None, *of_captured
    return _by_matrices(call, (query, key, value, *captured), ctx.needs_input_grad, lse, dout, dlse)


def _by_matrices(
    call: FlexCall, tensors: Sequence[Tensor], wanted: Sequence[bool], lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments by matrices of all scores, differentiated, where no kernel computes them."""
    asked = [*wanted[:3], *(need and x.is_floating_point() for need, x in zip(wanted[4:], tensors[3:], strict=True))]
    with recording(), torch.enable_grad():
        leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, asked, strict=True)]
        (query, key, value), captured = leaves[:3], leaves[3:]
        score, mask = (None if x is None else as_function(x, captured) for x in (call.functions.score, call.functions.mask))
        if call.sequences is None:
            outputs = by_matrices(query, key, value, score, mask, call.scale)
        else:
            packed, numbers = Packed(query, key, value, *call.sequences.bounds), call.sequences.numbers
            outputs = by_sequence(packed, numbers, 0, partial(of_sequence, by_matrices, score, mask))
        grads = [dout] if dlse is None else [dout, dlse.masked_fill(lse == -math.inf, 0.0)]
        needed = [x for x in leaves if x.requires_grad]
        pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=False) if x.requires_grad]
        given = iter(
            torch.autograd.grad([x for x, _ in pairs], needed, [grad for _, grad in pairs], allow_unused=True, materialize_grads=True)
        )
        found = [next(given) if x.requires_grad else None for x in leaves]
    return *found[:3], None, *found[3:]


def _of_gradients(
    call: FlexCall, tensors: tuple[Tensor, Tensor, Tensor], captured: Sequence[Tensor], trains: Sequence[bool]
) -> tuple[Kernel, Mods] | None:
    """The kernel of gradients of query, key and value, and of the captured tensors that ask here, with its functions; None where none is
    left that can be built."""
    kernel, mods = call.kernels.backward, call.kernels.trained
    if kernel is None or mods is None or kernel.failed or list(trains) != [x.requires_grad for x in captured]:
        mods = emitted(call.functions.score, call.functions.mask, types_of(captured, trains), backward=True)
        found = kernel_of("bwd", *tensors, mods, sequences=call.sequences)
        if isinstance(found, str):
            return None
        kernel = found
    return kernel, mods


def _lists(call: FlexCall, kernel: Kernel, query: Tensor, key: Tensor, *, backward: bool = False) -> list[Tensor]:
    """The lists of blocks that a kernel walks, in its order."""
    if not call.mods.listed(kernel.spec):
        return []
    # Of keys come first, where there are both.
    places = enumerate(kernel.tiles[: 2 if backward else 1])
    return [blocks(call, kernel, query, key, tile, of_keys=backward and place == 0) for place, tile in places]
