"""Torch's own attention, whatever stands in its place in torch.nn.functional by now."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

sdpa = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
"""What torch.nn.functional binds at its import. `F.scaled_dot_product_attention = dispatch.attention` leaves this one alone, even before
flashtune is imported; looked up there at each call, or at import, attention would call itself."""

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

_AUTOCASTS = frozenset(kind for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu") if torch.amp.is_autocast_available(kind))
"""Asked once: torch.compile can't trace the question in torch 2.11."""


def autocasting(device_type: str) -> bool:
    """Whether torch.autocast is on for devices of this type."""
    return device_type in _AUTOCASTS and torch.is_autocast_enabled(device_type)


MOST_HEADS = 65535
"""Batches, and heads, that a launch of torch's CUDA backends has room for: more are served in parts."""


def has_address(x: Tensor) -> bool:
    """Whether a tensor may be asked where it lies in memory: fake ones warn, and will raise."""
    return not isinstance(x, FakeTensor)


def readable(x: Tensor, *, repeats: bool = False) -> Tensor:
    """The tensor, or a copy of it where torch's CUDA backends would misread it, refuse it, or end in a fault that spoils the process.

    Rows are to be dense, and to begin at multiples of 16 bytes; strides of 0 are a mask's alone, which `repeats`. cuDNN, torch's first
    choice, reads other numbers than the tensor's elsewhere without a word, and FlashAttention-2 faults (torch 2.11 on an H100 and an H200,
    `benchmarks/results/2026-11-22-h200-unaligned`). Rows of other lengths than multiples of 16 bytes torch pads, or sends to its math.
    """
    if x.device.type != "cuda" or torch.compiler.is_compiling() or not has_address(x):
        return x
    # Boolean masks become ones of 16 bits with the same strides.
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
        # What torch.func or a tracer has wrapped has no address.
        return x


def _copied(x: Tensor, repeats: bool) -> Tensor:
    """A dense copy; of what `repeats`, and needs no gradient, only the rows that differ."""
    if not repeats or x.requires_grad:
        return x.clone(memory_format=torch.preserve_format if x.stride(-1) == 1 and all(x.stride()) else torch.contiguous_format)
    once = (*(slice(None) if stride else slice(1) for stride in x.stride()[:-1]), slice(None))
    return x[once].clone(memory_format=torch.contiguous_format).expand(x.shape)


def differentiable_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **words: Any) -> Tensor:
    """Torch's own attention on a GPU, with a backward that gets gradients laid out as the output is.

    cuDNN's takes the strides of its first call's for those of all later ones with the same inputs' (torch 2.11): gradients of other strides
    come out wrong, not finite, or in a fault which spoils the process, and so does one that begins at no multiple of 16 bytes.
    """
    out: Tensor = sdpa(query, key, value, mask, **words)
    node = out.grad_fn
    if node is not None and not torch.compiler.is_compiling():
        # What register_hook does, at a fraction of its time; it adds others to these.
        out._backward_hooks = OrderedDict(((-1, _laying_out(out.stride())),))
        node._register_hook_dict(out)
    return out


@functools.lru_cache(256)
def _laying_out(strides: tuple[int, ...]) -> Callable[[Tensor | None], Tensor | None]:
    return functools.partial(laid_out, strides)


def laid_out(strides: tuple[int, ...], x: Tensor | None) -> Tensor | None:
    """The tensor, or a copy of it where it hasn't these strides or begins at no multiple of 16 bytes; None is no gradient at all."""
    if x is None:
        return None
    try:
        if x.stride() == strides and x.data_ptr() % 16 == 0:
            return x
    except RuntimeError:
        # What torch.func or a tracer has wrapped has no address.
        if x.stride() == strides:
            return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


def transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode gradient is active."""
    return forward_ad._current_level >= 0 or _functorch.peek_interpreter_stack() is not None


def vmapped() -> bool:
    """Whether torch.func.vmap is among the active transforms."""
    return any(one.key() == _functorch.TransformType.Vmap for one in _functorch.get_interpreter_stack() or ())


# What torch.compiler.assume_constant_result sets, which would import the compiler here: dynamo then asks while it traces.
vmapped._dynamo_marked_constant = True  # type: ignore[attr-defined]


def sound_backends(mask: torch.Tensor | None) -> list[SDPBackend] | None:
    """The backends whose gradients are to be trusted; None for all.

    With a mask cuDNN's dQ can be NaN (torch 2.11 on Hopper, pytorch #196678: keys that are no multiple of its tile, an LSE below -88.7).
    """
    return None if mask is None else [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
