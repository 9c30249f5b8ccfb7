"""`attention` for classes that override PyTorch's functions: proxies and modes see it as such a function, others get PyTorch's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_overloaded_args, handle_torch_function, has_torch_function

from flashtune.core.errors import InputTypeError
from flashtune.core.parameters import PER_HEAD
from flashtune.core.torch_attention import sdpa
from flashtune.dispatch.call import Arguments, Options, PerHead


def overridden(attention: Callable[..., Any], *, query: Any, key: Any, value: Any, attn_mask: Any, seed: Any, **kwargs: Any) -> Any:
    """The call by PyTorch's override protocol: tracers' proxies and function modes see `attention` itself.

    Other classes that override functions, as nested tensors, implement PyTorch's function, which is called for them.
    """
    options, per_head = Options(**{name: kwargs[name] for name in Options._fields}), PerHead(*(kwargs[name] for name in PER_HEAD))
    nested(Arguments(query, key, value, attn_mask, seed, per_head), options)
    overloaded = _get_overloaded_args((query, key, value, attn_mask))
    proxied = is_causal_bias(attn_mask) or any(isinstance(x, torch.fx.Proxy) for x in overloaded)
    if overloaded and not proxied and _torch_has(options, seed, per_head):
        return torchs(query, key, value, attn_mask, options)
    return handle_torch_function(attention, (query, key, value, attn_mask), query, key, value, attn_mask, seed=seed, **kwargs)


def nested(arguments: Arguments, options: Options) -> bool:
    """True where a tensor is nested; raises InputTypeError for options that PyTorch's own function, which serves those, lacks."""
    found = [name for name, x in zip(Arguments._fields, arguments[:3], strict=False) if isinstance(x, torch.Tensor) and x.is_nested]
    if not found or _torch_has(options, arguments.seed, arguments.per_head):
        return bool(found)
    more = [name for name, x, usual in zip(Options._fields[4:], options[4:], Options()[4:], strict=True) if x != usual]
    more += [
        name for name, x in zip(("seed", *PER_HEAD), (arguments.seed, *(arguments.per_head or PerHead())), strict=True) if x is not None
    ]
    raise InputTypeError(
        f"{found[0]} is a nested tensor, which PyTorch's own attention alone takes, and that without {' and '.join(more)}: "
        "pad it to a dense one and mask the padding"
    )


def is_torchs(arguments: Arguments, options: Options) -> bool:
    """True where `attention` passes a call on to PyTorch's own function because of the class of its tensors."""
    return nested(arguments, options) or (has_torch_function(arguments[:4]) and _torch_has(options, arguments.seed, arguments.per_head))


def torchs(query: Any, key: Any, value: Any, attn_mask: Any, options: Options) -> Any:
    """The call by PyTorch's own function, whatever its tensors are, with the options that aren't defaults."""
    kwargs = {name: x for name, x, usual in zip(Options._fields, options[:4], Options(), strict=False) if x is not usual and x != usual}
    # A mask's class may not implement comparisons.
    return sdpa(query, key, value, **(kwargs if attn_mask is None else {"attn_mask": attn_mask, **kwargs}))


def is_causal_bias(mask: object) -> bool:
    """True for PyTorch's CausalBias, recognised by name, since its module takes a second to import (it brings the compiler)."""
    return type(mask).__name__ == "CausalBias" and isinstance(mask, torch.Tensor)


def _torch_has(options: Options, seed: int | None, per_head: PerHead | None) -> bool:
    """True where PyTorch's own function has all requested options."""
    return Options(*options[:4]) == options and seed is None and not any(x is not None for x in per_head or ())
