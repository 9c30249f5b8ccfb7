"""Inspection of a call's tensors before parsing: overriding classes, autocast, memory layout, reasons for PyTorch."""

import threading
from collections.abc import Callable, Hashable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from flashtune.core.problems.parameters import PER_HEAD
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.attention import autocasting, has_address
from flashtune.core.pytorch.private import FORWARD_AD, C, overloaded_among, peek_interpreter_stack, sdpa
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.call.call import Call, PerHead, Returned
from flashtune.dispatch.call.parse import Arguments, Options

GRADIENT = "a gradient is needed"
"""Reason for PyTorch's own operations, unless a backward kernel serves."""

WITH_GRADIENTS = {"attn_mask": "dbias", "alibi_slopes": "dslopes", "sinks": None}
"""Arguments beside query, key and value that kernels have gradients of, and the name of each in a backward; a sink's needs no kernel."""

GRADIENTS: dict[str, tuple[str, ...]] = {GRADIENT: ()} | {
    f"a gradient of {' and '.join(names)} is needed": tuple(requested for name in names if (requested := WITH_GRADIENTS[name]))
    for count in range(1, len(WITH_GRADIENTS) + 1)
    for names in combinations(WITH_GRADIENTS, count)
}
"""Every reason of this kind, and the gradients it requests beside dQ, dK and dV (`flashtune.core.problems.problem.ASKED`)."""

flash_attention_on: Callable[[], bool] = C._get_flash_sdp_enabled
"""State of PyTorch's flash attention switch (torch.nn.attention.sdpa_kernel, torch.backends.cuda.enable_flash_sdp), which kernels obey."""


class _Decided(threading.local):
    """Per-thread flag, True inside code that was compiled for kernels, whatever sdpa_kernel says at run time."""

    kernels = False


DECIDED = _Decided()

ON_THE_CPU = "kernels run on GPUs (or on the CPU with TRITON_INTERPRET=1 set at import)"
"""Reason for PyTorch's own operations there, for which no address matters."""

TRANSFORMED = "a torch.func or forward-mode transform is active"
_WATCHED = "a mode or a tracer watches torch's operations"
_SUBCLASS = "tensor subclasses have their own dispatch"
_SWITCHED_OFF = "flash attention is switched off (torch.nn.attention.sdpa_kernel)"

PERHAPS_FAKE = frozenset((TRANSFORMED, _WATCHED, _SUBCLASS, _SWITCHED_OFF))
"""Reasons with which tensors may be fake ones, which have no address."""

SEEN_THROUGH = PERHAPS_FAKE - {_SWITCHED_OFF}
"""Reasons for which only PyTorch's operations can serve (transforms, modes, tracers, subclasses), whatever implementation is named."""

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
"""Types that kernels accept: subclasses (fake, distributed, ...) have their own dispatch, which only PyTorch's operations reach."""


def prepared(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Tensors in autocast's dtype, with lazy negations resolved in memory."""
    query, key, value = query.resolve_neg(), key.resolve_neg(), value.resolve_neg()
    return autocast(query, key, value, None if attn_mask is None else attn_mask.resolve_neg())


def perhaps_fake(why_torch: str | None, query: Tensor) -> bool:
    """True where tensors may have no values to read: with reasons of PERHAPS_FAKE, and on the CPU, where classes aren't a reason."""
    return why_torch in PERHAPS_FAKE or (why_torch is ON_THE_CPU and (query.is_meta or type(query) not in PLAIN_TYPES))


def has_values(why_torch: str | None, query: Tensor) -> bool:
    """True where the host may read values though kernels don't serve: under forward-mode AD, and where flash attention is switched off."""
    return why_torch is TRANSFORMED or (why_torch is _SWITCHED_OFF and type(query) in PLAIN_TYPES and not query.is_meta)


def why_torch_now(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, per_head: PerHead | None) -> str | None:
    """Reason for which only PyTorch's own operations can serve these tensors now, or None where a kernel may."""
    if FORWARD_AD._current_level >= 0 or peek_interpreter_stack() is not None:
        return TRANSFORMED
    if C._len_torch_dispatch_stack() or C._is_tracing():
        return _WATCHED
    if not (flash_attention_on() or DECIDED.kernels):
        return _SWITCHED_OFF
    return why_torch_ever(query, key, value, attn_mask, per_head)


def transformed() -> bool:
    """True while a transform of torch.func is active."""
    return peek_interpreter_stack() is not None


def switched_off() -> bool:
    """True where flash attention is switched off; also for compilers that trace."""
    return not flash_attention_on()


# As torch.compiler.assume_constant_result sets it, whose import brings the compiler: dynamo evaluates these while tracing.
transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]
switched_off._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_torch_ever(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, per_head: PerHead | None) -> str | None:
    """Reason for which only PyTorch's own operations can serve these tensors at any time, or None."""
    if not query.is_cuda and not (devices.INTERPRETING and query.is_cpu):
        return ON_THE_CPU
    if (
        type(query) not in PLAIN_TYPES
        or type(key) not in PLAIN_TYPES
        or type(value) not in PLAIN_TYPES
        or (attn_mask is not None and type(attn_mask) not in PLAIN_TYPES)
        or (per_head is not None and any(type(x) not in PLAIN_TYPES for x in per_head.tensors()))
    ):
        return _SUBCLASS
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
        or (per_head is not None and any(x.requires_grad for x in per_head.tensors()))
    ):
        wanted = [] if attn_mask is None or not attn_mask.requires_grad else ["attn_mask"]
        wanted += (
            []
            if per_head is None
            else [name for name, x in zip(PER_HEAD, per_head, strict=True) if isinstance(x, Tensor) and x.requires_grad]
        )
        if not wanted:
            return GRADIENT
        why = f"a gradient of {' and '.join(wanted)} is needed"
        return why if all(name in WITH_GRADIENTS for name in wanted) else f"{why}, which kernels don't compute"
    return None


def places_in_memory(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, why_torch: str | None) -> Hashable:
    """Key for the properties that a kernel's `accepts`, or PyTorch, may depend on beyond sizes and strides.

    Each address modulo 16, where there is one and it matters, and the mask's sizes, strides and dtype. `why_torch` is the result of
    `why_torch_now`.
    """
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if why_torch is ON_THE_CPU:
        places: Hashable = None
    elif why_torch in PERHAPS_FAKE:
        places = tuple(x.data_ptr() % 16 if has_address(x) else 0 for x in tensors)
    else:
        places = tuple([x.data_ptr() % 16 for x in tensors])
    return places if attn_mask is None else (places, attn_mask.shape, attn_mask.stride(), attn_mask.dtype, attn_mask.device)


def autocast(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Tensors as autocast, where it is on, passes them to F.scaled_dot_product_attention: floating ones in its dtype.

    Not float64 and fp8, which is no number without its factor.
    """
    if not autocasting(query.device.type):
        return query, key, value, attn_mask
    dtype = torch.get_autocast_dtype(query.device.type)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype not in (torch.float64, torch.float8_e4m3fn) else x

    return cast(query), cast(key), cast(value), None if attn_mask is None else cast(attn_mask)


def overridden(attention: Callable[..., Any], *, query: Any, key: Any, value: Any, attn_mask: Any, seed: Any, **kwargs: Any) -> Returned:
    """The call by PyTorch's override protocol: tracers' proxies and function modes see `attention` itself.

    Other classes that override functions, as nested tensors, implement PyTorch's function, which is called for them.
    """
    options, per_head = Options(**{name: kwargs[name] for name in Options._fields}), PerHead(*(kwargs[name] for name in PER_HEAD))
    nested(Arguments(query, key, value, attn_mask, seed, per_head), options)
    overloaded = overloaded_among((query, key, value, attn_mask))
    proxied = is_causal_bias(attn_mask) or any(isinstance(x, torch.fx.Proxy) for x in overloaded)
    if overloaded and not proxied and _torch_has(options, seed, per_head):
        return torchs(query, key, value, attn_mask, options)
    found: Returned = handle_torch_function(attention, (query, key, value, attn_mask), query, key, value, attn_mask, seed=seed, **kwargs)
    return found


def nested(arguments: Arguments, options: Options) -> bool:
    """True where a tensor is nested; raises InputTypeError for options that PyTorch's own function, which serves those, lacks."""
    found = [name for name, x in zip(Arguments._fields, arguments[:3], strict=False) if isinstance(x, torch.Tensor) and x.is_nested]
    if not found or _torch_has(options, arguments.seed, arguments.per_head):
        return bool(found)
    raise InputTypeError(
        f"{found[0]} is a nested tensor, which PyTorch's own attention alone takes, and that without {_beyond_torch(arguments, options)}: "
        "pad it to a dense one and mask the padding"
    )


def _beyond_torch(arguments: Arguments, options: Options) -> str:
    """Names of a call's arguments that PyTorch's own attention lacks."""
    more = [name for name, x, usual in zip(Options._fields[4:], options[4:], Options()[4:], strict=True) if x != usual]
    given = zip(("seed", *PER_HEAD), (arguments.seed, *(arguments.per_head or PerHead())), strict=True)
    return " and ".join([*more, *(name for name, x in given if x is not None)])


def is_distributed(x: object) -> bool:
    """True for PyTorch's DTensor, recognised by name, since its module is slow to import."""
    return type(x).__name__ == "DTensor" and isinstance(x, torch.Tensor)


def refuse_distributed(call: Call, arguments: Arguments, options: Options) -> None:
    """Raise InputTypeError where some tensors of a checked call are DTensors and others aren't, or where PyTorch's own attention, which
    alone takes them, can't compute it: no operation mixes them with the tensors that are made for it here."""
    given = {name: x for name, x in zip(Arguments._fields, arguments[:4], strict=False) if x is not None}
    distributed = [name for name, x in given.items() if is_distributed(x)]
    if not distributed:
        return
    if len(distributed) < len(given):
        plain = next(name for name in given if name not in distributed)
        raise InputTypeError(f"{distributed[0]} is a DTensor and {plain} isn't: distribute both, or call with to_local() of each")
    if not call.fused_by_torch:
        raise InputTypeError(
            f"{distributed[0]} is a DTensor, which PyTorch's own attention alone takes, and that without "
            f"{_beyond_torch(arguments, options)}: call with to_local() of each tensor"
        )


def is_torchs(arguments: Arguments, options: Options) -> bool:
    """True where `attention` passes a call on to PyTorch's own function because of the class of its tensors."""
    return nested(arguments, options) or (has_torch_function(arguments[:4]) and _torch_has(options, arguments.seed, arguments.per_head))


def torchs(query: Any, key: Any, value: Any, attn_mask: Any, options: Options) -> Tensor:
    """The call by PyTorch's own function, whatever its tensors are, with the options that aren't defaults."""
    kwargs = {name: x for name, x, usual in zip(Options._fields, options[:4], Options(), strict=False) if x is not usual and x != usual}
    # A mask's class may not implement comparisons.
    found: Tensor = sdpa(query, key, value, **(kwargs if attn_mask is None else {"attn_mask": attn_mask, **kwargs}))
    return found


def is_causal_bias(mask: object) -> bool:
    """True for PyTorch's CausalBias, recognised by name, since its module takes a second to import (it brings the compiler)."""
    return type(mask).__name__ == "CausalBias" and isinstance(mask, torch.Tensor)


def _torch_has(options: Options, seed: int | None, per_head: PerHead | None) -> bool:
    """True where PyTorch's own function has all requested options."""
    return Options(*options[:4]) == options and seed is None and not any(x is not None for x in per_head or ())


def causal_of(bias: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> tuple[bool, str]:
    """`is_causal` and `causal_alignment` equivalent to PyTorch's CausalBias, whose tensor is empty."""
    if is_causal:
        raise InputError("CausalBias should not be used with causal=True: give one of them")
    if (bias.seq_len_q, bias.seq_len_kv) != (query.shape[-2], key.shape[-2]):
        made, met = (bias.seq_len_q, bias.seq_len_kv), (query.shape[-2], key.shape[-2])
        raise InputError(f"attn_mask is a CausalBias for (queries, keys) of {made}, and these are {met}: make it for the same sizes")
    return True, "bottom_right" if bias.variant.name == "LOWER_RIGHT" else "top_left"
