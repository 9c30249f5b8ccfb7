"""`torchs_place`: dispatch.attention in the place of F.scaled_dot_product_attention, for a while and for one thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.nn.functional as F
from torch.jit import _builtins

from flashtune import dispatch
from flashtune.core.errors import InputError, InputTypeError
from flashtune.core.torch_attention import sdpa

_serving: ContextVar[bool] = ContextVar("flashtune_serving", default=False)
_lock = threading.Lock()
_users = 0
_ours: Callable[..., Any] | None = None
"""What was put into torch.nn.functional for the present users."""
_before: Callable[..., Any] = sdpa
"""What stood there before the first of them came."""
_scripted: Callable[[], dict[int, str]] = _builtins._get_builtin_table
"""Torch's operations by the ids of the functions for which torch.jit.script takes them."""


@contextmanager
def torchs_place() -> Iterator[None]:
    """Let `flashtune.dispatch.attention` serve what calls torch.nn.functional.scaled_dot_product_attention by that name meanwhile.

    A context manager, and as `@torchs_place()` a decorator of functions. It holds for this thread (or task) alone, may be nested, and ends
    with an exception as with anything else. Code that took torch's function by another name before (`from torch.nn.functional import
    scaled_dot_product_attention`) keeps what it took, and so do threads that autograd starts for recomputation on a GPU.
    For all threads and for good: `torch.nn.functional.scaled_dot_product_attention = flashtune.dispatch.attention`.
    """
    _enter()
    token = _serving.set(True)
    try:
        yield
    finally:
        _serving.reset(token)
        _leave()


def _enter() -> None:
    global _users, _ours, _before
    with _lock:
        if _users == 0:
            _before = F.scaled_dot_product_attention
            _ours = F.scaled_dot_product_attention = _stand_in(_before)
            # torch.jit.script finds torch's operation under it, by its id.
            _scripted()[id(_ours)] = "aten::scaled_dot_product_attention"
        _users += 1


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        del _scripted()[id(_ours)]
        # Whoever put something over ours meanwhile keeps it; ours passes calls on from now on.
        if F.scaled_dot_product_attention is _ours:
            F.scaled_dot_product_attention = _before


def _inside() -> bool:
    """Whether this thread is inside."""
    return _serving.get()


# As torch.compiler.assume_constant_result sets it, whose import brings the compiler: a compiled call stays with what its tracing met.
_inside._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _stand_in(before: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in torch.nn.functional while anybody is inside: ours for those, `before` for the rest."""

    def scaled_dot_product_attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *others: Any, **words: Any) -> Any:
        if _inside():
            try:
                return dispatch.attention(query, key, value, attn_mask, *others, **words)
            except (InputError, InputTypeError):
                # Torch takes some of what ours refuses, as a mask beside is_causal on the CPU, and else says so in its own words.
                return before(query, key, value, attn_mask, *others, **words)
        if type(attn_mask).__name__ == "CausalBias" and before is sdpa:
            # It knows torch's function by its place only.
            return type(attn_mask)._dispatch(query, key, value, attn_mask, *others, **words)
        return before(query, key, value, attn_mask, *others, **words)

    # Pickled by its place, as torch's own is.
    scaled_dot_product_attention.__module__, scaled_dot_product_attention.__qualname__ = F.__name__, "scaled_dot_product_attention"
    return scaled_dot_product_attention
