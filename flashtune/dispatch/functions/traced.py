"""Functions of FlexAttention's calls: traced once for all alike, whether a call has those of the one before, and what they exclude."""

import types
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.pytorch.flex import Mod
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
    it: "weakref.ref[Any]"
    state: Hashable


def _held(x: Any) -> Any:
    if isinstance(x, types.FunctionType):
        return _Held(weakref.ref(x), None)
    return _Held(weakref.ref(x), _state(x)) if isinstance(x, Tensor) else x


_MOST_READ = 64
"""Most values of a snapshot: a function that calls itself holds itself."""


class Snapshot:
    """Values that a function reads beside its arguments, by identity: to know in microseconds that a function is the same.

    Tensors and functions are held weakly; metadata of tensors are part of it, values aren't. `make` is None for functions that read other
    things than tensors, numbers and modules of PyTorch's, of which something may change unseen.
    """

    __slots__ = ("_seen",)

    def __init__(self, seen: list[Any]) -> None:
        self._seen = [_held(x) for x in seen]

    @classmethod
    def make(cls, function: Any) -> "Snapshot | None":
        """The snapshot of a function, where it is a plain one, as are those that it calls."""
        seen = _read_tensor(function) if type(function) is types.FunctionType else None
        return None if seen is None or not all(_simple(x) for x in seen) else cls(seen)

    def same(self, function: types.FunctionType) -> bool:
        """True if a function is that one, and reads the same."""
        now = _read_tensor(function)
        if now is None or len(now) != len(self._seen):
            return False
        for x, was in zip(now, self._seen, strict=True):
            if type(was) is _Held:
                if was.it() is not x or (was.state is not None and was.state != _state(x)):
                    return False
            elif was is not x:
                return False
        return True


def _read_tensor(function: types.FunctionType) -> list[Any] | None:
    """Values that a function reads, and those that functions and tuples among them hold; None where it is too much, isn't set yet,
    or where a function imports or has attributes."""
    found: list[Any] = []
    waiting: list[Any] = [function]
    while waiting:
        x = waiting.pop()
        # A tuple would hold what is in it.
        found.append(len(x) if type(x) is tuple else x)
        if type(x) is tuple:
            waiting += x
        elif type(x) is types.FunctionType and not is_torchs(x):
            if x.__dict__ or reads_elsewhere(x.__code__):
                return None
            try:
                waiting += [cell.cell_contents for cell in x.__closure__ or ()]
            except ValueError:
                return None
            within = x.__globals__
            waiting += (x.__code__, x.__defaults__, x.__kwdefaults__, *(within[name] for name in names_of(x.__code__) if name in within))
        if len(found) > _MOST_READ:
            return None
    return found


def _state(x: Any) -> Hashable:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, bool(x.__dict__)


def _simple(x: Any) -> bool:
    if isinstance(x, Tensor):
        return type(x) in (Tensor, torch.nn.Parameter) and not x.__dict__
    if isinstance(x, types.BuiltinFunctionType):
        return is_pure(x) and x not in LOOKING
    return isinstance(x, (*PLAIN, types.CodeType, types.FunctionType)) or (
        isinstance(x, types.ModuleType) and x.__name__.partition(".")[0] == "torch"
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
