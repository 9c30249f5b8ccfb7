"""Autograd of kernels: one function of all calls, the layouts that kernels read, and gradients by a forward in PyTorch, differentiated."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from flashtune.core.code.launches import copyable
from flashtune.core.code.launching import operand
from flashtune.core.pytorch.private import C, saving_hooks
from flashtune.core.system.errors import InputError
from flashtune.dispatch.call.inspection import PLAIN_TYPES


class Trained(Protocol):
    """A plan with gradients. It keeps no tensor of a call: autograd does, which frees them and says where one was written to meanwhile."""

    returns_lse: bool

    def outputs(self, *given: Any, **words: Any) -> tuple[Tensor, Tensor, int]:
        """Output and LSE of a seed and the tensors of a call, and the bits that determine dropout's mask."""
        ...

    def gradients(self, *given: Any, **words: Any) -> Sequence[Tensor | None]:
        """Gradients of the tensors, None where not requested, of booleans for these, dropout's bits, gradients of output and LSE, output,
        LSE, and the tensors."""
        ...

    def traced(self, *given: Any, **words: Any) -> Sequence[Tensor | None]:
        """The same by operations that a tracer, or a class of tensors, can look into."""
        ...


class Attention(torch.autograd.Function):
    """Output and LSE (None where a plan returns none) of kernels; a Python operator would cost the host several times as much."""

    @staticmethod
    def forward(ctx: Any, plan: Trained, seed: int | None, *tensors: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Output and LSE, kept beside the tensors for the gradients."""
        out, lse, bits = plan.outputs(seed, *tensors)
        ctx.save_for_backward(out, lse, *tensors)
        # Hooks may give saved tensors back with other strides than those that a kernel was chosen for.
        hooked = None if saving_hooks(True) is None else [None if x is None else x.stride() for x in (out, lse, *tensors)]
        ctx.given = plan, bits, hooked
        ctx.set_materialize_grads(False)
        return out, lse if plan.returns_lse else None

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of all arguments."""
        (plan, bits, hooked), saved, requested = ctx.given, ctx.saved_tensors, ctx.needs_input_grad[2:]
        if hooked is not None:
            saved = [x if x is None or x.stride() == strides else _laid_out(x, strides) for x, strides in zip(saved, hooked, strict=True)]
        if dout is None:
            if dlse is None:
                return None, None, *[None] * len(requested)
            out: Any = saved[0]
            dout = torch.zeros_like(out)
        # Compilers (compiled autograd traces a backward) can trace the first check alone.
        if torch.compiler.is_compiling() or C._len_torch_dispatch_stack() or not (_plain(dout) and (dlse is None or _plain(dlse))):
            found = plan.traced(requested, bits, dout, dlse, *saved)
            return None, None, *(_refusing(found, (dout, dlse, *saved)) if torch.is_grad_enabled() else found)
        if dout.is_neg():
            dout = dout.resolve_neg()
        if dlse is not None and dlse.is_neg():
            dlse = dlse.resolve_neg()
        if torch.is_grad_enabled():
            # In a graph of the gradients (create_graph).
            return None, None, *_Once.apply(plan, requested, bits, dout, dlse, *saved)  # type: ignore[no-untyped-call]
        return None, None, *plan.gradients(requested, bits, dout, dlse, *saved)


apply: Callable[..., Any] = super(torch.autograd.Function, Attention).apply  # pyright: ignore[reportAttributeAccessIssue]
"""Implementation of `Attention.apply` without its check for transforms of torch.func, under which plans don't serve."""


class _Once(torch.autograd.Function):
    """The gradients, which have none themselves."""

    @staticmethod
    def forward(ctx: Any, plan: Trained, *given: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(plan.gradients(*given))

    @staticmethod
    def backward(ctx: Any, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_twice(ctx)


def _refusing(found: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients, of which those without a graph get one that refuses: operations that a tracer, or a batch, goes through."""
    # Nothing of a tensor adds up to 0, whatever its values.
    nothing = sum(x.flatten()[:0].float().sum() for x in given if x is not None and x.requires_grad)
    if not isinstance(nothing, Tensor):
        return list(found)
    nothing.register_hook(lambda grad: refuse_twice(None))  # type: ignore[no-untyped-call]
    return [x if x is None or x.requires_grad else x + nothing.to(x.dtype) for x in found]


def refuse_twice(ctx: Any, *_: object) -> None:
    """Raise InputError for second derivatives."""
    raise InputError(
        "attention was differentiated twice, and kernels have first derivatives alone: for second ones call "
        "F.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH), or write out the scores by torch's operations"
    )


def _laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy with these strides, whose gradients are the tensor's."""
    # A tensor that repeats elements in memory can't be written to.
    return x.contiguous() if 0 in strides else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _plain(x: Tensor) -> bool:
    # A tensor of vmap has no storage.
    return type(x) in PLAIN_TYPES and C._has_storage(x)


def readable(out: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients as kernels read them: the output's with dense rows on 16-byte boundaries without broadcasting, the LSE's contiguous.

    They may be expanded scalars, or parts of others that begin anywhere.
    """
    if dout.data_ptr() % 16:
        dout = dout.clone(memory_format=torch.contiguous_format)
    elif dout.stride() != out.stride() and not (dout.dim() == 4 and copyable(operand(0, dout))):
        dout = dout.contiguous()
    return dout, dlse if dlse is None or dlse.is_contiguous() else dlse.contiguous()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Context in which autograd records operations, also inside an operator, whose implementation runs below it."""
    key = C.DispatchKey.AutogradFunctionality
    excluded = C._dispatch_tls_is_dispatch_key_excluded(key)
    C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def differentiated(
    forward: Callable[..., tuple[Tensor, Tensor]], tensors: Sequence[Any], requested: Sequence[bool], dout: Tensor, dlse: Any, lse: Tensor
) -> list[Tensor | None]:
    """Requested gradients of tensors by a forward in PyTorch that makes output and LSE of them, where no kernel computes them."""
    with recording(), torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_(needed) for x, needed in zip(tensors, requested, strict=True)]
        # A row that sees no key has no gradient of its LSE.
        grads = dout, None if dlse is None else dlse.masked_fill(lse == -math.inf, 0.0)
        pairs = [(x, grad) for x, grad in zip(forward(*leaves), grads, strict=True) if x.requires_grad and grad is not None]
        needed = [x for x in leaves if x is not None and x.requires_grad]
        outputs, given = zip(*pairs, strict=True) if pairs else ((), ())
        made = torch.autograd.grad(outputs, needed, given, allow_unused=True, materialize_grads=True) if pairs else ()
    found = iter(made or map(torch.zeros_like, needed))
    return [next(found) if x is not None and x.requires_grad else None for x in leaves]
