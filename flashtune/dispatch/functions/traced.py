"""Functions of FlexAttention's calls: traced once for all alike, whether a call has those of the one before, and what they exclude."""

import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.pytorch.flex import Mod
from flashtune.core.pytorch.private import check_of, has_guards
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.functions.blocks import Functions
from flashtune.dispatch.functions.listed import Listed
from flashtune.templates.mods import bounds
from flashtune.templates.mods.bytecode import LOOKING, names_of, reads_elsewhere
from flashtune.templates.mods.capture import PLAIN, Dependencies, is_pure, is_torchs
from flashtune.templates.mods.documents import documents_of
from flashtune.templates.mods.graph import loads
from flashtune.templates.mods.reader import Unsupported
from flashtune.templates.mods.scores import known_structure
from flashtune.templates.mods.structure import band
from flashtune.templates.mods.trace import traced_together


def functions_of(
    score_mod: Mod | None, mask_mod: Mod | None, device: torch.device, sizes: Iterable[tuple[str, int]]
) -> tuple[Functions, tuple[Tensor, ...]] | str:
    """Traced functions with their captured tensors, or the reason why kernels can't take them; `sizes` are numbers of values of indices."""
    try:
        functions, captured = _traced(score_mod, mask_mod, device)
    except Unsupported as unsupported:
        return str(unsupported)
    if any(x.device != device for x in captured):
        return "a captured tensor is on another device"
    if any(x.is_neg() or x.is_conj() for x in captured):
        return "a captured tensor is lazily negated"
    place = id(functions), tuple(sizes)
    if functions.fresh or place not in _CHECKED:
        for name, output in zip(functions.names, (functions.score, functions.mask), strict=True):
            if output is not None:
                bounds.check(name, output, captured, dict(place[1]))
        if not functions.fresh:
            if len(_CHECKED) > MOST_TRACES:
                _CHECKED.clear()
            _CHECKED[place] = functions
    return functions, captured


_TRACES: "OrderedDict[Hashable, Functions]" = OrderedDict()
MOST_TRACES = 1024
_CHECKED: dict[Hashable, Functions] = {}
"""Functions whose indices stay within captured tensors at these sizes; sizes of tensors are part of a trace's key."""


def _traced(score_mod: Mod | None, mask_mod: Mod | None, device: torch.device) -> tuple[Functions, tuple[Tensor, ...]]:
    """Graphs of both functions, from their last trace where they are equal, with their captured tensors of this call."""
    known = Dependencies(score_mod, mask_mod)
    key = None if known.key is None else (known.key, device, torch.get_default_dtype())
    found = _TRACES.get(key) if key is not None else None
    if found is None:
        found = _trace(score_mod, mask_mod, device, known.tensors)
        if key is not None and not found.fresh:
            _TRACES[key] = found
            if len(_TRACES) > MOST_TRACES:
                _TRACES.popitem(last=False)
    tensors = found.fresh or [known.tensors[place] for place in found.places]
    return found, tuple(tensors)


def _trace(score_mod: Mod | None, mask_mod: Mod | None, device: torch.device, walked: Sequence[Tensor]) -> Functions:
    score, mask, captured = traced_together(score_mod, mask_mod, device)
    names = tuple("" if f is None else str(getattr(f, "__name__", type(f).__name__)) for f in (score_mod, mask_mod))
    among = [next((place for place, y in enumerate(walked) if y is x), -1) for x in captured]
    fresh = captured if -1 in among else ()
    reads, known, documents = mask is not None and bool(loads([mask])), known_structure(score, mask), documents_of(score, mask)
    return Functions(
        score=score,
        mask=mask,
        names=names,  # type: ignore[arg-type]
        places=tuple(among),
        fresh=fresh,
        known=known,
        reads=reads,
        documents=documents,
        alone=mask is not None and band(mask) == (None, None),
        blocks=mask_mod.size if isinstance(mask_mod, Listed) else None,
    )


class _Held(NamedTuple):
    """A tensor or a function, held weakly, and of a tensor a check of its metadata."""

    it: "weakref.ref[Any]"
    like: Callable[[Tensor], bool] | None


class _Items(NamedTuple):
    """Items of a tuple, each held by itself: the tuple would keep them alive."""

    held: tuple[Any, ...]


class _Reads(NamedTuple):
    """A function, held weakly, and what it reads: its code, defaults and closure, and names of its module, absent ones, too."""

    it: "weakref.ref[types.FunctionType]"
    code: types.CodeType
    defaults: Any
    closure: tuple[Any, ...]
    names: tuple[tuple[str, Any], ...]


_ABSENT = object()


def _held(x: Any) -> Any:
    if type(x) is tuple:
        return _Items(tuple(map(_held, x)))
    if isinstance(x, types.FunctionType):
        return _Held(weakref.ref(x), None)
    return _Held(weakref.ref(x), _like(x)) if isinstance(x, Tensor) else x


def _is(x: Any, was: Any) -> bool:
    """True if a value is the one that was held."""
    kind = was.__class__
    if kind is _Held:
        return was.it() is x and (was.like is None or (was.like(x) and not x.__dict__))
    if kind is _Items:
        return type(x) is tuple and len(x) == len(was.held) and all(map(_is, x, was.held))
    return was is x


_MOST_READ = 64
"""Most values of a snapshot: a function that calls itself holds itself."""


class Snapshot:
    """Values that a function reads beside its arguments, by identity: a cheap check at every call that a function is the same.

    Tensors and functions are held weakly; metadata of tensors are part of it, values aren't. `make` is None for functions that read other
    things than tensors, constants, PyTorch's modules, and tuples and functions of these, of which something may change unseen; for those
    with attributes or defaults of keywords; and for those that `reads_elsewhere` refuses.
    """

    __slots__ = ("_reads",)

    def __init__(self, reads: list[_Reads]) -> None:
        self._reads = reads

    @classmethod
    def make(cls, function: Any) -> "Snapshot | None":
        """The snapshot of a function, where it is a plain one, as are those that it calls."""
        if type(function) is not types.FunctionType:
            return None
        found: list[_Reads] = []
        count = 1
        waiting: list[Any] = [function]
        while waiting:
            x = waiting.pop()
            if type(x) is tuple:
                values: list[Any] = list(x)
            elif type(x) is not types.FunctionType or is_torchs(x):
                continue
            else:
                if x.__dict__ or x.__kwdefaults__ is not None or reads_elsewhere(x.__code__):
                    return None
                try:
                    closure = [cell.cell_contents for cell in x.__closure__ or ()]
                except ValueError:
                    # One isn't set yet.
                    return None
                named = [(name, x.__globals__.get(name, _ABSENT)) for name in names_of(x.__code__)]
                names = tuple((name, _held(one)) for name, one in named)
                found.append(_Reads(weakref.ref(x), x.__code__, _held(x.__defaults__), tuple(map(_held, closure)), names))
                values = [x.__defaults__, *closure, *(one for _, one in named if one is not _ABSENT)]
            count += len(values)
            if count > _MOST_READ or not all(map(_simple, values)):
                return None
            waiting += values
        return cls(found)

    def same(self, function: types.FunctionType) -> bool:
        """True if a function is that one, and reads the same."""
        if self._reads[0].it() is not function:
            return False
        for it, code, defaults, closure, names in self._reads:
            x = it()
            if x is None or x.__code__ is not code or x.__dict__ or x.__kwdefaults__ is not None or not _is(x.__defaults__, defaults):
                return False
            if closure:
                try:
                    for cell, was in zip(x.__closure__ or (), closure, strict=True):
                        if not _is(cell.cell_contents, was):
                            return False
                except ValueError:
                    return False
            within = x.__globals__
            for name, was in names:
                if within.get(name, _ABSENT) is not was and not _is(within.get(name, _ABSENT), was):
                    return False
        return True


def _like(x: Tensor) -> Callable[[Tensor], bool]:
    """Check of tensors for the metadata of this one."""
    if has_guards:
        return check_of([x])
    state = _state(x)
    return lambda y: _state(y) == state


def _state(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


def _simple(x: Any) -> bool:
    if isinstance(x, Tensor):
        return type(x) in (Tensor, torch.nn.Parameter) and not x.__dict__
    if isinstance(x, types.BuiltinFunctionType):
        return is_pure(x) and x not in LOOKING
    return (
        type(x) is tuple
        or isinstance(x, (*PLAIN, types.FunctionType))
        or (isinstance(x, types.ModuleType) and x.__name__.partition(".")[0] == "torch")
    )


def check_functions(score_mod: Any, mask: Any, name: str) -> None:
    """Raise InputTypeError for a score_mod or a mask of this name that is no function; a `block_mask` may be a BlockMask, too."""
    if score_mod is not None and not callable(score_mod):
        raise InputTypeError(f"score_mod must be a function or None, not {type(score_mod).__name__}: check the order of the arguments")
    if mask is not None and not callable(mask) and not (name == "block_mask" and hasattr(mask, "mask_mod")):
        kinds = "a BlockMask, a function" if name == "block_mask" else "a function"
        raise InputTypeError(f"{name} must be {kinds} or None, not {type(mask).__name__}: check the order of the arguments")


_WRITABLE = ("attn_mask", "is_causal", "window", "softcap", "causal_alignment", "alibi_slopes")
"""Arguments of `attention` that a caller can write into the functions."""


def refuse_beside_functions(given: Mapping[str, Any], usual: Mapping[str, Any], mask: str, remedy: str) -> None:
    """Raise InputError for an argument that isn't its default, of those that have no place beside score_mod and `mask`."""
    for name, default in usual.items():
        if given[name] is not default and (isinstance(given[name], Tensor) or given[name] != default):
            what = "write it into these functions" if name in _WRITABLE else f"{remedy} where you need it"
            raise InputError(f"{name} is no argument beside score_mod and {mask}: leave it out, and {what}")
