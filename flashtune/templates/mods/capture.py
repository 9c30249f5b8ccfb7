"""Dependencies of a function beside its arguments: a key for its trace, and the tensors that it may capture."""

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, range)
_MOST = 2000
"""Most values that are looked at: a function of more is traced at every call."""


class _Same:
    """An object as a key: equal to itself alone, and kept alive."""

    __slots__ = ("it",)

    def __init__(self, it: Any) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


class Dependencies:
    """The key of a function's trace, None where it depends on too much, and its tensors in the order of the walk.

    Functions made anew at every call have equal keys if their code and what they close over are equal; of tensors types and sizes count.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self.key: Hashable | None = None
        try:
            self.key = self._of(function)
        except _TooMuch:
            self.key = None

    def _of(self, x: Any) -> Hashable:
        kind = type(x)
        if kind in _PLAIN:
            return kind, x
        if isinstance(x, torch.Tensor):
            if id(x) not in self._places:
                self._places[id(x)] = len(self.tensors)
                self.tensors.append(x)
                return "tensor", x.dtype, x.shape, x.requires_grad
            return "tensor", self._places[id(x)]
        if isinstance(x, (types.ModuleType, type, types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return _Same(x)
        if id(x) in self._seen:
            return "again", self._seen[id(x)]
        self._seen[id(x)] = len(self._seen)
        if len(self._seen) > _MOST:
            raise _TooMuch
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType):
            return "method", self._of(x.__func__), self._of(x.__self__)
        if isinstance(x, functools.partial):
            return "partial", self._of(x.func), self._of(x.args), self._of(x.keywords)
        if isinstance(x, (tuple, list, set, frozenset)):
            return kind, *map(self._of, x)
        if isinstance(x, dict):
            return kind, *((self._of(name), self._of(value)) for name, value in x.items())
        # Objects that hold no state of Python's own are themselves.
        state = getattr(x, "__dict__", None)
        return (_Same(kind), self._of(state), _Same(x)) if state else _Same(x)

    def _function(self, x: types.FunctionType) -> Hashable:
        if (x.__module__ or "").partition(".")[0] == "torch" and x.__closure__ is None:
            return _Same(x)
        cells = []
        for cell in x.__closure__ or ():
            try:
                cells.append(self._of(cell.cell_contents))
            except ValueError:
                cells.append("empty")
        read = [self._of(x.__globals__[name]) for name in _names(x.__code__) if name in x.__globals__]
        return x.__code__, *cells, self._of(x.__defaults__), self._of(x.__kwdefaults__), *read


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those within it may read from its module."""
    inner = [name for x in code.co_consts if isinstance(x, types.CodeType) for name in _names(x)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


class _TooMuch(Exception):
    """A function depends on more values than are looked at."""
