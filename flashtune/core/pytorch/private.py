"""PyTorch's private names, each with what does its work in a version without it: all that the package uses of them."""

import contextlib
import functools
import pkgutil
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad


def found(path: str, otherwise: Any) -> Any:
    """Object under a private name in this version of PyTorch, `otherwise` where it has none."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return otherwise


def _has_storage(x: torch.Tensor) -> bool:
    try:
        x.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


_WITHOUT: dict[str, Any] = {
    # Modes aren't seen; the tensors of most are of classes of their own, which are.
    "_len_torch_dispatch_stack": lambda: 0,
    "_is_tracing": lambda: torch.jit.is_tracing(),  # type: ignore[attr-defined, no-untyped-call]
    "_has_storage": _has_storage,
    "_get_flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled,
    "_get_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    # An operator that differentiates then fails in autograd, which says that nothing was recorded.
    "_dispatch_tls_is_dispatch_key_excluded": lambda key: False,
    "_dispatch_tls_set_dispatch_key_excluded": lambda key, excluded: None,
    # Checkpoints then read positions once for each layer.
    "_current_graph_task_id": lambda: -1,
    "DispatchKey": SimpleNamespace(AutogradFunctionality=None),
}
_WITHOUT_ON_GPUS: dict[str, Any] = {
    "_cuda_getDevice": torch.cuda.current_device,
    "_cuda_getCurrentRawStream": lambda index: torch.cuda.current_stream(index).cuda_stream,
    "_cuda_isCurrentStreamCapturing": torch.cuda.is_current_stream_capturing,
}


class _Filled:
    """PyTorch's module of functions in C, with others in place of those that it lacks."""

    def __init__(self, lacking: dict[str, Any]) -> None:
        self.__dict__.update(lacking)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._C, name)


def _functions_in_c() -> Any:
    # A build without GPUs lacks functions that nothing calls there.
    wanted = _WITHOUT | (_WITHOUT_ON_GPUS if torch.version.cuda or torch.version.hip else {})
    lacking = {name: other for name, other in wanted.items() if found(f"torch._C.{name}", None) is None}
    return _Filled(lacking) if lacking else torch._C


C: Any = _functions_in_c()
"""PyTorch's functions in C; itself where it lacks nothing, so that calls take no longer."""

FORWARD_AD: Any = forward_ad if found("torch.autograd.forward_ad._current_level", None) is not None else SimpleNamespace(_current_level=0)
"""Module whose `_current_level` is at least 0 inside forward-mode differentiation; without it always, so that PyTorch serves."""

peek_interpreter_stack: Callable[[], object] = found("torch._C._functorch.peek_interpreter_stack", lambda: True)
"""Innermost transform of torch.func, None outside of all; without it one is taken for active, so that PyTorch serves."""

_interpreters: Callable[[], list[Any] | None] = found("torch._C._functorch.get_interpreter_stack", lambda: None)
_vmap: Any = found("torch._C._functorch.TransformType.Vmap", None)


def vmapped() -> bool:
    """True if torch.func.vmap is among the active transforms; without PyTorch's list of them nobody knows, and none is seen."""
    return any(one.key() == _vmap for one in _interpreters() or ())


is_functorch_wrapped_tensor: Callable[[torch.Tensor], bool] = found("torch._C._functorch.is_functorch_wrapped_tensor", lambda x: False)
"""True for a tensor inside a transform of torch.func, whose trace then fails where it isn't recognised."""


class _NoFakeTensor(torch.Tensor):
    """Class of no tensor."""


FakeTensor: type[torch.Tensor] = found("torch._subclasses.fake_tensor.FakeTensor", _NoFakeTensor)
"""Class of tensors without values, which torch.compile and traces use."""

fused_sdp_choice: Callable[..., int] = found("torch._fused_sdp_choice", lambda *_, **__: int(torch.nn.attention.SDPBackend.ERROR.value))
"""Backend that PyTorch's attention would choose, by its number; without it none is known."""

has_priority_order: bool = None not in (found("torch._C._get_sdp_priority_order", None), found("torch._C._set_sdp_priority_order", None))
"""True where PyTorch's order of its backends can be read and set."""

saving_hooks: Callable[[bool], Any] = found("torch._C._autograd._top_saved_tensors_default_hooks", lambda _: ())
"""Hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks) that are in force, else None; without it there may always be some."""

_mode_keys, _mode_of = found("torch._C._TorchDispatchModeKey", None), found("torch._C._get_dispatch_mode", None)


def fake_or_traced() -> bool:
    """True under PyTorch's own modes, which make tensors fake or trace operations; where they can't be told apart, under any mode."""
    if _mode_keys is None or _mode_of is None:
        return bool(C._len_torch_dispatch_stack())
    return any(_mode_of(getattr(_mode_keys, name)) is not None for name in ("FAKE", "PROXY", "FUNCTIONAL") if hasattr(_mode_keys, name))


_guards: Any = found("torch._C._dynamo.guards.TensorGuards", None)


def check_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Check of torch.compile's guards, which says in one call if tensors are like these; it needs no compiler.

    A nested tensor, looked for in the first place alone, is like none.
    """
    like: Callable[..., bool] = _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def check(first: Any, *others: Any) -> bool:
        # Guards of a nested tensor, whose sizes they ask for, end the process.
        return not (first.__class__ is torch.Tensor and first.is_nested) and like(first, *others)

    return check


def _guards_work() -> bool:
    tensors = torch.empty(1), torch.empty(2)
    try:
        return check_of(tensors)(*tensors)
    except (TypeError, AttributeError):
        return False


has_guards: bool = _guards_work()
"""True where PyTorch has the guards of `check_of` by the parameters known here."""

sdpa: Callable[..., torch.Tensor] = found("torch._C._nn.scaled_dot_product_attention", torch.nn.functional.scaled_dot_product_attention)
"""The function behind torch.nn.functional's. Looked up there instead, attention would call itself after
`F.scaled_dot_product_attention = dispatch.attention`."""

_no_table: dict[int, str] = {}
scripted: Callable[[], dict[int, str]] = found("torch.jit._builtins._get_builtin_table", lambda: _no_table)
"""PyTorch's operations by the ids of the functions for which torch.jit.script substitutes them; without it that has no such substitute."""

hooks_by_dictionary: bool = found("torch._C._FunctionBase._register_hook_dict", None) is not None
"""True where nodes of autograd take a dictionary of hooks."""

TorchDispatchMode: Any = found("torch.utils._python_dispatch.TorchDispatchMode", contextlib.nullcontext)
"""Base class of contexts that see every operator; without it none does."""

gpu_sleep: Callable[[int], None] = found("torch.cuda._sleep", lambda clocks: None)
"""Has the GPU wait for some clocks; without it the launches that are timed wait for the host more often."""


def decompositions(operations: Any) -> dict[Any, Any]:
    """PyTorch's decompositions of operations; without them traces keep these, and PyTorch serves."""
    # Looked up late, since it brings the compiler.
    return dict(found("torch._decomp.get_decompositions", lambda _: {})(operations))


def kernel_of(operator: Any, keys: Sequence[str]) -> Callable[..., Any] | None:
    """PyTorch's own kernel of an operator, of the first of these dispatch keys that has one; None where it can't be called."""
    has, call = found("torch._C._dispatch_has_kernel_for_dispatch_key", lambda *_: False), getattr(operator, "_op_dk", None)
    own = next((one for one in keys if has(operator.name(), one)), None)
    return None if own is None or call is None else functools.partial(call, getattr(C.DispatchKey, own))


def end(library: torch.library.Library) -> None:
    """Take a library's kernels out of PyTorch's dispatcher; without PyTorch's function for it they go with the library."""
    getattr(library, "_destroy", lambda: None)()


def overloaded_among(tensors: tuple[Any, ...]) -> list[Any]:
    """Arguments whose classes have a __torch_function__ of their own, subclasses first."""
    return list(found("torch.overrides._get_overloaded_args", _overloaded)(tensors))


def _overloaded(tensors: tuple[Any, ...]) -> list[Any]:
    none = getattr(torch._C, "_disabled_torch_function_impl", None)
    first: list[Any] = []
    for x in tensors:
        kind = type(x)
        if getattr(kind, "__torch_function__", none) is not none and all(type(y) is not kind for y in first):
            first.insert(next((at for at, y in enumerate(first) if issubclass(kind, type(y))), len(first)), x)
    return first


def kept_by_backwards() -> contextlib.AbstractContextManager[None]:
    """Context in which compiled backwards may run several times over one forward's tensors."""
    # Looked up late, since it brings the compiler.
    functorch = found("torch._functorch.config", None)
    return contextlib.nullcontext() if functorch is None else functorch.patch(donated_buffer=False)
