"""Dependencies of a function beside its arguments: a key for its trace, and the tensors that it may capture."""

import functools
import sys
import types
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch

from flashtune.templates.mods.bytecode import LOOKING, Chains, chains_of, names_of, reads_elsewhere

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
    types.ClassMethodDescriptorType, type(namedtuple("_", "x").x),  # type: ignore[attr-defined]
)  # fmt: skip
"""Types of attributes of classes that read an object's own state."""
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
"""Types of PyTorch's operators and of their overloads."""
_UNUSED = ("__repr__", "__str__", "__format__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__", "__del__")
"""Special methods that nothing reads a value from."""
_KNOWN = ("torch", "builtins")
"""Packages whose classes and modules aren't followed."""
_PURE = ("builtins", "math", "cmath", "operator", "_operator", "torch")
"""Modules of built-in functions whose results depend on their arguments alone."""
_MOST = 2000
"""Most values that are looked at: a function of more is traced at every call."""
_IN_C = 1 << 8
"""Flag of types whose attributes can't be set (Py_TPFLAGS_IMMUTABLETYPE): those written in C."""


class _Same:
    """An object as a key: equal to itself alone, and held weakly."""

    __slots__ = ("_hash", "_it")

    def __init__(self, it: Any) -> None:
        self._it, self._hash = weakref.ref(it), id(it)

    def __eq__(self, other: object) -> bool:
        it = self._it()
        return it is not None and isinstance(other, _Same) and it is other._it()

    def __hash__(self) -> int:
        return self._hash


class Dependencies:
    """The key of a function's trace, None where it depends on too much, and its tensors in the order of the walk.

    Functions made anew at every call have equal keys if their code and what they close over are equal; of tensors types and sizes count.
    Of classes and modules what any of the functions may read by name counts; of objects all that they have, or where code reads nothing
    but attributes of a variable, as a method of `self`, these attributes. Nothing of a caller's is kept alive.
    """

    def __init__(self, *functions: Callable[..., Any] | None) -> None:
        codes = tuple(
            getattr(getattr(f, "__func__", f), "__code__", None) or getattr(type(f).__call__, "__code__", None) for f in functions
        )
        # Calls of objects and of PyTorch's modules read these.
        self._names: dict[str, None] = _NAMES.get(codes, {"__call__": None, "forward": None}).copy()
        self.key: Hashable | None = None
        try:
            while True:
                names, self._named_any = len(self._names), False
                self.tensors: list[torch.Tensor] = []
                self._places: dict[int, int] = {}
                self._seen: dict[Hashable, int] = {}
                key: Hashable = tuple(map(self._called, functions))
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
        if isinstance(x, _OPERATORS):
            return _Same(x)
        if isinstance(x, types.BuiltinFunctionType):
            if not is_pure(x) or x in LOOKING:
                raise _TooMuch
            return _Same(x)
        if kind.__module__ == "numpy" and (numpy := sys.modules.get("numpy")) is not None and isinstance(x, numpy.generic):
            return kind, repr(x)
        if (again := self._again(id(x))) is not None:
            return again
        if kind in _EXACT:
            return kind, *map(self._of, x), *(map(self._of, x.values()) if isinstance(x, dict) else ())
        if isinstance(x, (types.ModuleType, type)):
            return self._named(x)
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType):
            return "method", self._bound(x.__func__, x.__self__)
        if isinstance(x, (staticmethod, classmethod)):
            return kind, self._of(x.__func__)
        if isinstance(x, (property, functools.cached_property)):
            return kind, self._of(x.fget if isinstance(x, property) else x.func)
        if isinstance(x, _DESCRIPTORS):
            owner = getattr(x, "__objclass__", None)
            return kind, str(x.__reduce__()) if owner is None else (_Same(owner), x.__name__)
        if isinstance(x, functools.partial):
            return "partial", self._of(x.func), self._of(x.args), self._of(x.keywords)
        return self._object(x)

    def _again(self, place: Hashable) -> Hashable:
        """The key of what was met before; None of what is met now."""
        if place in self._seen:
            return "again", self._seen[place]
        self._seen[place] = len(self._seen)
        if len(self._seen) > _MOST:
            raise _TooMuch
        return None

    def _called(self, x: Any) -> Hashable:
        """A function that a caller gives: an object's is that of its class."""
        call = next((vars(one)["__call__"] for one in type(x).__mro__ if "__call__" in vars(one)), None)
        return self._bound(call, x) if isinstance(call, types.FunctionType) and _is_plain(type(x)) else self._of(x)

    def _bound(self, function: Any, x: Any) -> Hashable:
        """A function whose first argument is an object."""
        if not isinstance(function, types.FunctionType) or is_torchs(function) or not function.__code__.co_argcount:
            return self._of(function), self._of(x)
        if (again := self._again((id(function), id(x)))) is not None:
            return again
        return self._of(function), self._read(x, chains_of(function.__code__, function.__code__.co_varnames[0]))

    def _read(self, x: Any, chains: Chains | None) -> Hashable:
        """A value of which these attributes are read alone; None stands for all."""
        kind = type(x)
        if chains is None or not _is_plain(kind):
            return self._of(x)
        if (again := self._again((id(x), chains))) is not None:
            return again
        found: list[Hashable] = []
        for name in dict.fromkeys(chain[0] for chain in chains):
            inner = tuple(chain[1:] for chain in chains if chain[0] == name)
            values = _values_of(x, name)
            owner = next((one for one in kind.__mro__ if name in vars(one)), None)
            if owner is not None and (not values or not isinstance(vars(owner)[name], functools.cached_property)):
                value = vars(owner)[name]
                method = (
                    value.fget if isinstance(value, property) else value.func if isinstance(value, functools.cached_property) else value
                )
                if isinstance(value, types.MemberDescriptorType):
                    values += [getattr(x, name)] if hasattr(x, name) else []
                elif isinstance(method, types.FunctionType) and not _is_known(owner.__module__):
                    found.append(self._bound(method, x))
                elif _is_known(owner.__module__) or (hasattr(type(value), "__get__") and not isinstance(value, staticmethod)):
                    # It may read anything.
                    return self._of(x)
                else:
                    values.append(value)
            if owner is None and not values:
                return self._of(x)
            found += [name, *(self._read(value, None if () in inner else inner) for value in values)]
        return _Same(kind), *found

    def _object(self, x: Any) -> Hashable:
        """An object, or a container of a type of its own: its items, its attributes and its class."""
        kind = type(x)
        state = _state_of(kind)
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
        return self._of(kind), *map(self._of, items), *map(self._of, attributes)

    def _named(self, x: Any) -> Hashable:
        """A module or class, with what functions may find in it by the names that they read, and a class' own special methods."""
        owner = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
        if _is_known(owner):
            return _Same(x)
        self._named_any = True
        followed = [one for one in x.__mro__ if not _is_known(one.__module__)] if isinstance(x, type) else [x]
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
        cells: list[Hashable] = []
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            try:
                contents = cell.cell_contents
            except ValueError:
                cells.append("empty")
            else:
                cells.append(self._read(contents, chains_of(x.__code__, name)))
        within = [name for name in names_of(x.__code__) if name in x.__globals__]
        read = [self._read(x.__globals__[name], chains_of(x.__code__, name, of_module=True)) for name in within]
        return x.__code__, *cells, self._of(x.__defaults__), self._of(x.__kwdefaults__), self._of(x.__dict__), *read


_NAMES: dict[Hashable, dict[str, None]] = {}
"""Names that functions of these codes, and all that they reach, were seen to read: a walk that begins with them needs no second one."""


class _State(NamedTuple):
    """Where objects of a type keep their state: `elsewhere` where nothing can look, the type that holds their items, and slots."""

    elsewhere: bool
    base: Any
    slots: tuple[str, ...]


_STATES: "weakref.WeakKeyDictionary[Any, _State]" = weakref.WeakKeyDictionary()


def _state_of(kind: Any) -> _State:
    found = _STATES.get(kind)
    if found is None:
        elsewhere = any(one.__flags__ & _IN_C and one not in _STATELESS for one in kind.__mro__)
        base = next((one for one in _STATELESS if issubclass(kind, one)), object)
        found = _STATES[kind] = _State(elsewhere, base, tuple(name for one in kind.__mro__ for name in _slots(one)))
    return found


def _is_plain(kind: Any) -> bool:
    """True for a type of objects whose attributes are found in the usual places."""
    state = _state_of(kind)
    asked = getattr(kind, "__getattr__", None)
    usual = kind.__getattribute__ is object.__getattribute__ and asked in (None, torch.nn.Module.__getattr__)
    return not state.elsewhere and state.base is object and usual


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


def _values_of(x: Any, name: str) -> list[Any]:
    """An object's own attribute of this name, if it has one."""
    own = getattr(x, "__dict__", {})
    tables = [own, *((own.get(table) or {} for table in _TABLES) if isinstance(x, torch.nn.Module) else ())]
    return [table[name] for table in tables if name in table]


_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of PyTorch's modules that hold others."""


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


class _TooMuch(Exception):
    """A function depends on more values than are looked at."""
