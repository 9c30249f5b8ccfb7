"""Dependencies of a function beside its arguments: a key for its trace, and the tensors that it may capture."""

import dis
import functools
import sys
import types
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch

PLAIN = (
    type(None), type(...), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types of values that can't change."""
_CONTAINERS = (tuple, list, set, frozenset, dict)
_EXACT = frozenset((*_CONTAINERS, torch.Size, OrderedDict))
"""Types of containers whose items are all of their state."""
_STATELESS = (*PLAIN, *_CONTAINERS, object, torch.Size, OrderedDict, types.SimpleNamespace)
"""Types written in C whose values are in their items, their repr or their attributes."""
_DESCRIPTORS = (
    types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.MethodWrapperType, type(namedtuple("_", "x").x),  # type: ignore[attr-defined]
)  # fmt: skip
"""Types of attributes of classes that read an object's own state."""
_UNUSED = ("__repr__", "__str__", "__format__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__del__")
"""Special methods that nothing reads a value from."""
_KNOWN = ("torch", "builtins")
"""Packages whose classes and modules aren't followed."""
_PURE = ("builtins", "math", "cmath", "operator", "_operator", "torch")
"""Modules of built-in functions whose results depend on their arguments alone."""
_BY_NAME = frozenset(
    ("globals", "locals", "vars", "eval", "exec", "__dict__", "__import__", "grad", "stride", "data_ptr", "storage_offset")
)
"""Names by which a function may read what isn't followed."""
_MOST = 2000
"""Most values that are looked at: a function of more is traced at every call."""
_IN_C = 1 << 8
"""Flag of types whose attributes can't be set (Py_TPFLAGS_IMMUTABLETYPE): those written in C."""


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
    Of classes and modules what any of the functions may read by name counts.
    """

    def __init__(self, *functions: Callable[..., Any] | None) -> None:
        codes = tuple(getattr(getattr(f, "__func__", f), "__code__", None) for f in functions)
        # Calls of objects and of PyTorch's modules read these.
        self._names: dict[str, None] = _NAMES.get(codes, {"__call__": None, "forward": None}).copy()
        self.key: Hashable | None = None
        try:
            while True:
                names, self._named_any = len(self._names), False
                self.tensors: list[torch.Tensor] = []
                self._places: dict[int, int] = {}
                self._seen: dict[int, int] = {}
                key = self._of(functions)
                # Code that was met later may read other things by name.
                if len(self._names) == names or not self._named_any:
                    break
            hash(key)
            self.key = key
            if len(_NAMES) >= _MOST:
                _NAMES.clear()
            _NAMES[codes] = self._names
        except Exception:
            # Too much, or an object of the user's raises when it is looked at.
            self.key = None

    def _of(self, x: Any) -> Hashable:
        kind = type(x)
        if kind in PLAIN:
            # 0.0 equals -0.0, and NaN nothing.
            return kind, repr(x) if kind in (float, complex) else x
        if isinstance(x, torch.Tensor):
            if id(x) not in self._places:
                self._places[id(x)] = len(self.tensors)
                self.tensors.append(x)
                return "tensor", x.dtype, x.shape, x.requires_grad, self._of(x.__dict__) if x.__dict__ else None
            return "tensor", self._places[id(x)]
        if isinstance(x, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return _Same(x)
        if isinstance(x, types.BuiltinFunctionType):
            if not is_pure(x):
                raise _TooMuch
            return _Same(x)
        if kind.__module__ == "numpy" and (numpy := sys.modules.get("numpy")) is not None and isinstance(x, numpy.generic):
            return kind, repr(x)
        if id(x) in self._seen:
            return "again", self._seen[id(x)]
        self._seen[id(x)] = len(self._seen)
        if len(self._seen) > _MOST:
            raise _TooMuch
        if kind in _EXACT:
            return kind, *map(self._of, x), *(map(self._of, x.values()) if isinstance(x, dict) else ())
        if isinstance(x, (types.ModuleType, type)):
            return self._named(x)
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType):
            return "method", self._of(x.__func__), self._of(x.__self__)
        if isinstance(x, (staticmethod, classmethod)):
            return kind, self._of(x.__func__)
        if isinstance(x, (property, functools.cached_property)):
            return kind, self._of(x.fget if isinstance(x, property) else x.func)
        if isinstance(x, _DESCRIPTORS):
            return _Same(x)
        if isinstance(x, functools.partial):
            return "partial", self._of(x.func), self._of(x.args), self._of(x.keywords)
        return self._object(x)

    def _object(self, x: Any) -> Hashable:
        """An object, or a container of a type of its own: its items, its attributes and its class."""
        kind = type(x)
        state = _state_of(kind)  # type: ignore[arg-type]
        if state.elsewhere:
            raise _TooMuch
        items: Iterable[Any] = ()
        # As the container itself has them, whatever a subclass makes of it.
        if isinstance(x, dict):
            items = [*dict.keys(x), *dict.values(x)]
        elif isinstance(x, _CONTAINERS):
            items = state.base.__iter__(x)
        elif state.base in PLAIN:
            items = [state.base.__repr__(x)]
        attributes = [getattr(x, "__dict__", None), *(getattr(x, name, None) for name in state.slots)]
        return self._of(kind), *map(self._of, items), *map(self._of, attributes), None if isinstance(x, _CONTAINERS) else _Same(x)

    def _named(self, x: Any) -> Hashable:
        """A module or class, with what functions may find in it by the names that they read, and a class' own special methods."""
        owner = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
        if owner.partition(".")[0] in _KNOWN:
            return _Same(x)
        self._named_any = True
        followed = [one for one in x.__mro__ if one.__module__.partition(".")[0] not in _KNOWN] if isinstance(x, type) else [x]
        places = [vars(one) for one in followed]
        found = [place[name] for name in tuple(self._names) for place in places if name in place]
        if isinstance(x, type):
            own = [y for place in places for name, y in place.items() if name.startswith("__") and name not in _UNUSED]
            special = [y for y in own if isinstance(y, types.FunctionType)]
            found += [*special, *([] if type(x) is type else [type(x)])]
        return _Same(x), *map(self._of, found)

    def _function(self, x: types.FunctionType) -> Hashable:
        if is_torchs(x):
            return _Same(x)
        if reads_elsewhere(x.__code__):
            raise _TooMuch
        self._names |= dict.fromkeys(names_of(x.__code__))
        cells = []
        for cell in x.__closure__ or ():
            try:
                cells.append(self._of(cell.cell_contents))
            except ValueError:
                cells.append("empty")
        read = [self._of(x.__globals__[name]) for name in names_of(x.__code__) if name in x.__globals__]
        return x.__code__, *cells, self._of(x.__defaults__), self._of(x.__kwdefaults__), self._of(x.__dict__), *read


_NAMES: dict[Hashable, dict[str, None]] = {}
"""Names that functions of these codes, and all that they reach, were seen to read: a walk that begins with them needs no second one."""


class _State(NamedTuple):
    """Where objects of a type keep their state: `elsewhere` where nothing can look, the type that holds their items, and slots."""

    elsewhere: bool
    base: Any
    slots: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _state_of(kind: Any) -> _State:
    elsewhere = any(one.__flags__ & _IN_C and one not in _STATELESS for one in kind.__mro__)
    base = next((one for one in _STATELESS if issubclass(kind, one)), object)
    return _State(elsewhere, base, tuple(name for one in kind.__mro__ for name in _slots(one)))


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    private = [f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]
    return tuple(name for name in private if name not in ("__dict__", "__weakref__"))


def is_pure(x: types.BuiltinFunctionType) -> bool:
    """True for a function written in C whose result depends on its arguments alone."""
    owner = x.__self__
    if owner is not None and not isinstance(owner, (types.ModuleType, type)):
        return False
    return (x.__module__ or getattr(owner, "__module__", "builtins")).partition(".")[0] in _PURE


def is_torchs(x: types.FunctionType) -> bool:
    """True for a function of PyTorch's that closes over nothing."""
    return (x.__module__ or "").partition(".")[0] == "torch" and x.__closure__ is None


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those within it may read from its module or from objects, as text for `getattr`, too."""
    inner = [name for x in code.co_consts if isinstance(x, types.CodeType) for name in names_of(x)]
    texts = [x for x in code.co_consts if isinstance(x, str) and x.isidentifier()]
    return tuple(dict.fromkeys((*code.co_names, *texts, *inner)))


@functools.lru_cache(maxsize=1024)
def reads_elsewhere(code: types.CodeType) -> bool:
    """True if a function or one within it imports or looks values up by name, so that it reads what can't be followed."""
    if not _BY_NAME.isdisjoint(code.co_names) or any(x.opname == "IMPORT_NAME" for x in dis.get_instructions(code)):
        return True
    return any(reads_elsewhere(x) for x in code.co_consts if isinstance(x, types.CodeType))


class _TooMuch(Exception):
    """A function depends on more values than are looked at."""
