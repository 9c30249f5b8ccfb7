"""`attention` of what overrides torch's functions: proxies and modes see it as one of torch's own, other classes are asked for torch's."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_overloaded_args, handle_torch_function, has_torch_function

from flashtune.core.errors import InputTypeError
from flashtune.core.parameters import PER_HEAD
from flashtune.core.torch_attention import sdpa
from flashtune.dispatch.call import Arguments, Options, PerHead


def overridden(attention: Callable[..., Any], *, query: Any, key: Any, value: Any, attn_mask: Any, seed: Any, **words: Any) -> Any:
    """The call for torch's protocol of overrides: tracers' proxies and function modes see `attention` itself. Other classes that override
    functions, nested tensors for one, have an implementation of torch's and are asked for that."""
    options, per_head = Options(**{name: words[name] for name in Options._fields}), PerHead(*(words[name] for name in PER_HEAD))
    nested(Arguments(query, key, value, attn_mask, seed, per_head), options)
    asked = _get_overloaded_args((query, key, value, attn_mask))
    proxied = is_causal_bias(attn_mask) or any(isinstance(x, torch.fx.Proxy) for x in asked)
    if asked and not proxied and _torch_has(options, seed, per_head):
        return torchs(query, key, value, attn_mask, options)
    return handle_torch_function(attention, (query, key, value, attn_mask), query, key, value, attn_mask, seed=seed, **words)


def nested(given: Arguments, options: Options) -> bool:
    """Whether a tensor is nested; raises InputTypeError where torch's own function, which serves those, doesn't take all that is asked."""
    found = [name for name, x in zip(Arguments._fields, given[:3], strict=False) if isinstance(x, torch.Tensor) and x.is_nested]
    if not found or _torch_has(options, given.seed, given.per_head):
        return bool(found)
    more = [name for name, x, usual in zip(Options._fields[4:], options[4:], Options()[4:], strict=True) if x != usual]
    more += [name for name, x in zip(("seed", *PER_HEAD), (given.seed, *(given.per_head or PerHead())), strict=True) if x is not None]
    raise InputTypeError(
        f"{found[0]} is a nested tensor, which torch's own attention alone takes, and that without {' and '.join(more)}: "
        "pad it to a dense one and mask the padding"
    )


def is_torchs(given: Arguments, options: Options) -> bool:
    """Whether `attention` gives a call to torch's own function for what its tensors are."""
    return nested(given, options) or (has_torch_function(given[:4]) and _torch_has(options, given.seed, given.per_head))


def torchs(query: Any, key: Any, value: Any, attn_mask: Any, options: Options) -> Any:
    """The call by torch's own function, whatever its tensors are, with what was asked for and no more."""
    words = {name: x for name, x, usual in zip(Options._fields, options[:4], Options(), strict=False) if x is not usual and x != usual}
    # A mask's class may not know how to compare it.
    return sdpa(query, key, value, **(words if attn_mask is None else {"attn_mask": attn_mask, **words}))


def is_causal_bias(mask: object) -> bool:
    """Whether this is torch's CausalBias, whose module takes a second to import (it brings the compiler)."""
    return type(mask).__name__ == "CausalBias" and isinstance(mask, torch.Tensor)


def _torch_has(options: Options, seed: int | None, per_head: PerHead | None) -> bool:
    """Whether torch's own function takes all that is asked for."""
    return Options(*options[:4]) == options and seed is None and not any(x is not None for x in per_head or ())
