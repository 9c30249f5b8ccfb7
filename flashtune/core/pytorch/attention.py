"""PyTorch's own attention, even where torch.nn.functional was patched."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from flashtune.core.pytorch.private import FORWARD_AD, FakeTensor, hooks_by_dictionary, peek_interpreter_stack, sdpa, vmapped
from flashtune.core.records.faults import wrong_everywhere

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""PyTorch's backends by the names that `flashtune bench` and records have."""

_AUTOCASTS = frozenset(kind for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu") if torch.amp.is_autocast_available(kind))
"""Device types with autocast; computed once, since torch.compile can't trace the query in torch 2.11."""


def autocasting(device_type: str) -> bool:
    """True if torch.autocast is on for devices of this type."""
    return device_type in _AUTOCASTS and torch.is_autocast_enabled(device_type)


MOST_HEADS = 65535
"""Most batches, and most heads, of one launch of PyTorch's CUDA backends; more are served in parts."""


def has_address(x: Tensor) -> bool:
    """True if a tensor has an address; reading that of a fake one warns, and will raise."""
    return not isinstance(x, FakeTensor)


def in_columns(key: Tensor, value: Tensor) -> bool:
    """True if values are the first columns of keys, in the same memory, as multi-head latent attention has them."""
    if torch.compiler.is_compiling() or key.stride() != value.stride() or key.shape[:-1] != value.shape[:-1]:
        return False
    if key.shape[-1] < value.shape[-1] or key.dtype != value.dtype or key.is_meta or not (has_address(key) and has_address(value)):
        return False
    try:
        return key.data_ptr() == value.data_ptr()
    except RuntimeError:
        # Tensors wrapped by torch.func or a tracer have no address.
        return False


def readable(x: Tensor, *, repeats: bool = False) -> Tensor:
    """The tensor, or a copy of it where PyTorch's CUDA backends would misread it, refuse it, or fault.

    Rows must be dense and begin at multiples of 16 bytes; only a mask, which `repeats`, may have strides of 0. On others cuDNN silently
    reads wrong values and FlashAttention-2 faults (torch 2.11 on H100 and H200, `benchmarks/results/2026-11-22-h200-unaligned`).
    Rows whose lengths are no multiples of 16 bytes PyTorch pads itself, or sends to its math backend.
    """
    if x.device.type != "cuda" or torch.compiler.is_compiling() or not has_address(x):
        return x
    # PyTorch converts boolean masks to 16-bit ones with the same strides.
    unit = 16 // max(2, x.element_size())
    if x.shape[-1] % unit and not repeats:
        return x
    dense = x.stride(-1) == 1 or x.shape[-1] == 1
    outer = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    even = x.shape[-1] % unit > 0 or all(stride % unit == 0 for stride in outer)
    if not (dense and even and (repeats or all(outer))):
        return _copied(x, repeats)
    try:
        return x if x.data_ptr() % 16 == 0 else _copied(x, repeats)
    except RuntimeError:
        # Tensors wrapped by torch.func or a tracer have no address.
        return x


def _copied(x: Tensor, repeats: bool) -> Tensor:
    """A dense copy; only of distinct rows where the tensor `repeats` and needs no gradient."""
    if not repeats or x.requires_grad:
        return x.clone(memory_format=torch.preserve_format if x.stride(-1) == 1 and all(x.stride()) else torch.contiguous_format)
    once = (*(slice(None) if stride else slice(1) for stride in x.stride()[:-1]), slice(None))
    return x[once].clone(memory_format=torch.contiguous_format).expand(x.shape)


def differentiable_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """PyTorch's own attention on a GPU, whose backward receives gradients with the output's strides.

    cuDNN's assumes for all later calls with the same input strides the gradient strides of the first (torch 2.11): others give wrong or
    non-finite results or a fault, and so do unaligned gradients.
    """
    out: Tensor = sdpa(query, key, value, mask, **kwargs)
    if out.grad_fn is not None and not torch.compiler.is_compiling():
        lay_out_gradient(out)
    return out


def lay_out_gradient(out: Tensor) -> None:
    """Have the gradient of a fresh output brought into its strides before its backward."""
    if not hooks_by_dictionary:
        out.register_hook(_laying_out(out.stride()))  # type: ignore[no-untyped-call]
        return
    # As register_hook does, at a fraction of its time; later hooks are added to these.
    out._backward_hooks = OrderedDict(((-1, _laying_out(out.stride())),))
    node: Any = out.grad_fn
    node._register_hook_dict(out)


@functools.lru_cache(256)
def _laying_out(strides: tuple[int, ...]) -> Callable[[Tensor | None], Tensor | None]:
    return functools.partial(laid_out, strides)


def out_strides(shape: tuple[int, int, int, int], q_strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Dense strides for an output whose batch, heads and rows lie in memory in the order of the query's, the head size innermost."""
    # Broadcast dimensions (stride 0) go outermost.
    outer = sorted(range(3), key=lambda dim: -q_strides[dim] if q_strides[dim] else -(2**62))
    strides, step = [0, 0, 0], shape[3]
    for dim in reversed(outer):
        strides[dim] = step
        step *= shape[dim]
    return strides[0], strides[1], strides[2], 1


def laid_out(strides: tuple[int, ...], x: Tensor | None) -> Tensor | None:
    """The gradient, or a copy of it where it has other strides or is unaligned to 16 bytes; None stays None."""
    if x is None:
        return None
    try:
        if x.stride() == strides and x.data_ptr() % 16 == 0:
            return x
    except RuntimeError:
        # Tensors wrapped by torch.func or a tracer have no address.
        if x.stride() == strides:
            return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


def transformed() -> bool:
    """True if a transform of torch.func or a forward-mode gradient is active."""
    return FORWARD_AD._current_level >= 0 or peek_interpreter_stack() is not None


# As torch.compiler.assume_constant_result does, whose use here would import the compiler.
vmapped._dynamo_marked_constant = True  # type: ignore[attr-defined]


# At import, since compilers trace what reads them.
UNSOUND = {masked: wrong_everywhere(torch.__version__, "bwd", masked=masked) for masked in (False, True)}
"""Faults of backends' gradients with a mask, and without one, by name."""
_SOUND = {
    masked: [backend for name, backend in BACKENDS.items() if name not in wrong] if wrong.keys() & BACKENDS.keys() else None
    for masked, wrong in UNSOUND.items()
}


def sound_backends(mask: torch.Tensor | None) -> list[SDPBackend] | None:
    """The backends with correct gradients, as far as faults on every GPU are known (flashtune.core.records.faults); None for all."""
    return _SOUND[mask is not None]


@functools.cache
def compiled_flex(*, dynamic: bool | None) -> Callable[..., Any]:
    """PyTorch's flex_attention, compiled for each size anew, or with `dynamic` None for any once a second one was met."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=dynamic)
    return compiled
