"""`torchs_place`: dispatch.attention, or another function, in place of F.scaled_dot_product_attention, for a while and for one thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from flashtune import dispatch
from flashtune.core.pytorch.private import scripted, sdpa
from flashtune.core.system.errors import InputError, InputTypeError

_OURS = object()
_serving: ContextVar[Any] = ContextVar("flashtune_serving", default=None)
"""`_OURS` or another function inside `torchs_place`, None outside."""

_ARGUMENTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
"""Arguments of PyTorch's function behind the tensors, with their defaults."""

_lock = threading.Lock()
_users = 0
_ours: Callable[..., Any] | None = None
"""Function that is in torch.nn.functional for the present users."""
_before: Callable[..., Any] = sdpa
"""Function that was there before the first of them entered."""


@contextmanager
def torchs_place(attend: Callable[..., Any] | None = None) -> Iterator[None]:
    """Run calls of `torch.nn.functional.scaled_dot_product_attention` by `flashtune.dispatch.attention` until the block is left.

    Args:
        attend: a function in its place, as `functools.partial(dispatch.ring, group=group)`. It gets query, key and value, and those of the
            other arguments that aren't PyTorch's defaults, by name. Its errors are raised, and PyTorch doesn't run the call instead. If it
            calls PyTorch's function, that one runs. torch.compile breaks the graph there.

    Raises:
        InputTypeError: for what can't be called.

    It is a context manager, and as `@torchs_place()` a decorator of functions. It affects this thread (or task) alone, may be nested, and
    ends with an exception, too. If code imported PyTorch's function by name before (`from torch.nn.functional import
    scaled_dot_product_attention`), it keeps PyTorch's. So do threads that autograd starts for recomputation on a GPU. To replace it in all
    threads for good: `torch.nn.functional.scaled_dot_product_attention = flashtune.dispatch.attention`.
    """
    if attend is not None and not callable(attend):
        raise InputTypeError(f"attend must be a function of query, key and value, not {type(attend).__name__}: pass one, or nothing")
    _enter()
    token = _serving.set(_OURS if attend is None else attend)
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
            _ours = F.scaled_dot_product_attention = _substitute(_before, _inside)
        _users += 1


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        del scripted()[id(_ours)]
        # A function that somebody else put over ours stays; ours passes calls on from now on.
        if F.scaled_dot_product_attention is _ours:
            F.scaled_dot_product_attention = _before


def _inside() -> bool:
    """True inside `torchs_place` in this thread."""
    return _serving.get() is not None


def _given() -> bool:
    """True where another function than dispatch.attention runs the calls of this thread."""
    found = _serving.get()
    return found is not None and found is not _OURS


# As torch.compiler.assume_constant_result sets it, whose import brings the compiler: a compiled call keeps the value seen while tracing.
_inside._dynamo_marked_constant = _given._dynamo_marked_constant = True  # type: ignore[attr-defined]


def for_compilers() -> Callable[[], None]:
    """Have torch.compile trace dispatch.attention in place of PyTorch's function, in all threads, until the result is called."""
    serving = [True]
    before = F.scaled_dot_product_attention
    ours = F.scaled_dot_product_attention = _substitute(before, lambda: serving[0] and torch.compiler.is_compiling())

    def leave() -> None:
        global _before
        serving[0] = False
        with _lock:
            scripted().pop(id(ours), None)
            if F.scaled_dot_product_attention is ours:
                F.scaled_dot_product_attention = before
            if _before is ours:
                _before = before

    return leave


def _by_given(query: Any, key: Any, value: Any, words: dict[str, Any]) -> Any:
    """Result of the function of this context, which calls PyTorch's own where it calls it."""
    attend = _serving.get()
    token = _serving.set(None)
    try:
        # Compiled code may have been traced in another context.
        return (dispatch.attention if attend is None or attend is _OURS else attend)(query, key, value, **words)
    finally:
        _serving.reset(token)


def _substitute(before: Callable[..., Any], serves: Callable[[], bool]) -> Callable[..., Any]:
    """Function for torch.nn.functional, and for torch.jit.script: ours where it `serves`, else `before`."""

    def scaled_dot_product_attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *others: Any, **words: Any) -> Any:
        if serves():
            if _given():
                words = dict(zip(_ARGUMENTS, (attn_mask, *others), strict=False)) | words
                # Tensors have no single truth value.
                given = {name: x for name, x in words.items() if isinstance(x, torch.Tensor) or x != _ARGUMENTS.get(name, _OURS)}
                return _by_given(query, key, value, given)
            try:
                return dispatch.attention(query, key, value, attn_mask, *others, **words)
            except (InputError, InputTypeError):
                # PyTorch accepts some calls that ours refuses, as a mask beside is_causal on the CPU; else its own error is raised.
                return before(query, key, value, attn_mask, *others, **words)
        if type(attn_mask).__name__ == "CausalBias" and before is sdpa and hasattr(attn_mask, "_dispatch"):
            # CausalBias looks PyTorch's function up in torch.nn.functional, where it would find ours again.
            return type(attn_mask)._dispatch(query, key, value, attn_mask, *others, **words)
        return before(query, key, value, attn_mask, *others, **words)

    # Pickle stores it by name, like PyTorch's own.
    scaled_dot_product_attention.__module__, scaled_dot_product_attention.__qualname__ = F.__name__, "scaled_dot_product_attention"
    # torch.jit.script looks up PyTorch's operation by the function's id.
    scripted()[id(scaled_dot_product_attention)] = "aten::scaled_dot_product_attention"
    return scaled_dot_product_attention
