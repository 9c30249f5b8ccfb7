"""Dependencies of a function beside its arguments: a key for its trace, and the tensors that it may capture."""

import dis
import functools
import sys
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes, torch.dtype, torch.device, range)
"""Types of values that can't change."""
_BY_NAME = frozenset(("globals", "locals", "vars", "eval", "exec", "__dict__"))
"""Names by which a function may read anything."""
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
        self._names: tuple[str, ...] = ()
        self._walked: set[tuple[int, tuple[str, ...]]] = set()
        self.key: Hashable | None = None
        try:
            self.key = self._of(function)
        except _TooMuch:
            self.key = None

    def _of(self, x: Any) -> Hashable:
        kind = type(x)
        if kind in PLAIN:
            # 0.0 equals -0.0, and NaN nothing.
            return kind, repr(x) if kind in (float, complex) else x
        if (numpy := sys.modules.get("numpy")) is not None and isinstance(x, numpy.generic):
            return kind, repr(x)
        if isinstance(x, torch.Tensor):
            if id(x) not in self._places:
                self._places[id(x)] = len(self.tensors)
                self.tensors.append(x)
                return "tensor", x.dtype, x.shape, x.requires_grad
            return "tensor", self._places[id(x)]
        if isinstance(x, (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return _Same(x)
        if isinstance(x, (types.ModuleType, type)):
            return self._named(x, self._names)
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
        return self._named(kind, (*self._names, "__call__", "forward")), *map(self._of, _attributes(x)), _Same(x)

    def _named(self, x: Any, names: tuple[str, ...]) -> Hashable:
        """A module or class, with what a function that reads these names, and methods of these names, may find in it."""
        owner = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
        if owner.partition(".")[0] in ("torch", "builtins") or (id(x), names) in self._walked:
            return _Same(x)
        self._walked.add((id(x), names))
        places = [vars(one) for one in (x.__mro__ if isinstance(x, type) else (x,))]
        found, waiting = dict[str, Any](), list(names)
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            found[name] = next((place[name] for place in places if name in place), None)
            if isinstance(x, type):
                waiting += [more for code in _codes(found[name]) for more in names_of(code)]
        return _Same(x), *map(self._of, found.values())

    def _function(self, x: types.FunctionType) -> Hashable:
        if is_torchs(x):
            return _Same(x)
        if reads_elsewhere(x.__code__):
            raise _TooMuch
        before, self._names = self._names, names_of(x.__code__)
        cells = []
        for cell in x.__closure__ or ():
            try:
                cells.append(self._of(cell.cell_contents))
            except ValueError:
                cells.append("empty")
        read = [self._of(x.__globals__[name]) for name in self._names if name in x.__globals__]
        found = x.__code__, *cells, self._of(x.__defaults__), self._of(x.__kwdefaults__), self._of(x.__dict__), *read
        self._names = before
        return found


def _attributes(x: Any) -> list[Any]:
    """The state of an object: its attributes and slots. Raises _TooMuch for one that keeps it elsewhere, as types written in C do."""
    slots = [name for one in type(x).__mro__ for name in _slots(one)]
    if not hasattr(x, "__dict__") and not any("__slots__" in vars(one) for one in type(x).__mro__[:-1]):
        raise _TooMuch
    return [getattr(x, "__dict__", {}), *(getattr(x, name, None) for name in slots)]


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    private = [f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]
    return tuple(name for name in private if name not in ("__dict__", "__weakref__"))


def _codes(x: Any) -> list[types.CodeType]:
    """The code of a method, a property, or a static or class method."""
    inner = [getattr(x, name, None) for name in ("fget", "__func__")]
    return [one.__code__ for one in (x, *inner) if isinstance(one, types.FunctionType)]


def is_torchs(x: types.FunctionType) -> bool:
    """True for a function of PyTorch's that closes over nothing."""
    return (x.__module__ or "").partition(".")[0] == "torch" and x.__closure__ is None


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those within it may read from its module."""
    inner = [name for x in code.co_consts if isinstance(x, types.CodeType) for name in names_of(x)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@functools.lru_cache(maxsize=1024)
def reads_elsewhere(code: types.CodeType) -> bool:
    """True if a function or one within it imports or looks values up by name, so that it reads what can't be followed."""
    if not _BY_NAME.isdisjoint(code.co_names) or any(x.opname == "IMPORT_NAME" for x in dis.get_instructions(code)):
        return True
    return any(reads_elsewhere(x) for x in code.co_consts if isinstance(x, types.CodeType))


class _TooMuch(Exception):
    """A function depends on more values than are looked at."""
