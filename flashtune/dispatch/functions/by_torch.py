"""PyTorch's own flex_attention, which serves what kernels can't, and matrices of all scores, which serve what that can't on a CPU."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashtune.core.problems import reference
from flashtune.core.pytorch.attention import compiled_flex
from flashtune.core.pytorch.flex import Mod, ordered, within
from flashtune.core.pytorch.private import C
from flashtune.core.system.errors import InputError
from flashtune.dispatch.call import inspection
from flashtune.dispatch.call.parse import cannot_serve
from flashtune.dispatch.call.sequences import Numbers
from flashtune.dispatch.functions.kept import OWN, kept
from flashtune.dispatch.functions.listed import PARTIAL, VISIBLE, by_lists, kinds_of_lists, own_lists
from flashtune.dispatch.policy.offers import OURS, TORCHS
from flashtune.dispatch.providers.libraries import refuse_functions
from flashtune.dispatch.rows.kernel import served_here
from flashtune.templates.mods.graph import INTEGERS


def flex_by_torch(query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, *others: Any) -> Tensor | tuple[Tensor, Any]:
    """PyTorch's own function, compiled on a GPU."""
    from torch.nn.attention import flex_attention as module

    scale, enable_gqa, return_lse, kernel_options, return_aux = others
    if _empty(query, key, value) or lacks(query, key, value, return_lse, return_aux, block_mask) is not None:
        check_shapes(query, key, value, block_mask, enable_gqa)
        out, lse = by_matrices(query, key, value, score_mod, _listed_mod(block_mask, query, key), scale)
        if return_aux is not None:
            return out, module.AuxOutput(lse=lse if return_aux.lse else None, max_scores=lse if return_aux.max_scores else None)
        return (out, lse) if return_lse else out
    block_mask = block_mask_of(_as_listed(block_mask, query, key), query, key)
    # A compiler that traces this call compiles PyTorch's function itself.
    eager = isinstance(query, Tensor) and query.device.type == "cuda" and not torch.compiler.is_compiling()
    function: Any = compiled_flex(dynamic=None) if eager else module.flex_attention
    words = scale, enable_gqa, False, kernel_options
    # PyTorch deprecates return_lse, and warns of it.
    aux = module.AuxRequest(lse=True) if return_lse and return_aux is None else return_aux
    found: Any = function(query, key, value, score_mod, block_mask, *words, return_aux=aux)
    return (found[0], found[1].lse) if return_lse and return_aux is None else found


def _listed_mod(block_mask: Any, query: Any, key: Any) -> Mod | None:
    """The mask of a mask_mod or of a BlockMask, whose lists it reads where these are for as many batches and heads."""
    mask_mod: Mod | None = getattr(block_mask, "mask_mod", block_mask)
    if not hasattr(block_mask, "BLOCK_SIZE") or query.dim() != 4:
        return mask_mod
    planes = block_mask.kv_num_blocks.shape[:-1]
    if len(planes) != 2 or any(n not in (1, now) for n, now in zip(planes, query.shape[:2], strict=True)):
        return mask_mod
    kinds = kinds_of_lists(block_mask, (query.shape[2], key.shape[2])).expand(*query.shape[:2], -1, -1)
    return by_lists(kinds, tuple(block_mask.BLOCK_SIZE), mask_mod)


def _as_listed(block_mask: Any, query: Any, key: Any) -> Any:
    """The same BlockMask for PyTorch's function: on a CPU that takes the mask_mod alone, which therefore reads the lists; on a GPU it walks
    these, and gets such as lead nowhere else, with those of keys. A compiler's function is left to it."""
    usual = torch.compiler.is_compiling() or any(type(x) not in (Tensor, torch.nn.Parameter) for x in (query, key))
    if not hasattr(block_mask, "BLOCK_SIZE") or usual or tuple(block_mask.BLOCK_SIZE) == (_WHOLE, _WHOLE):
        return block_mask
    from torch.nn.attention.flex_attention import BlockMask

    words: dict[str, Any] = {"BLOCK_SIZE": block_mask.BLOCK_SIZE, "seq_lengths": block_mask.seq_lengths}
    if query.device.type == "cpu":
        lists = own_lists(block_mask) + own_lists(block_mask, of_keys=True)
        words |= {**dict(zip(OWN, lists, strict=True)), "mask_mod": _listed_mod(block_mask, query, key)}
        return BlockMask(**words)
    if getattr(block_mask, "dq_write_order", None) is not None:
        return block_mask
    lengths = query.shape[-2], key.shape[-2]

    def make() -> Any:
        kinds = kinds_of_lists(block_mask, lengths)
        full: Any = () if block_mask.full_kv_num_blocks is None else ordered(kinds == VISIBLE)
        return BlockMask.from_kv_blocks(*ordered(kinds == PARTIAL), *full, **(words | {"mask_mod": block_mask.mask_mod}))

    return kept(block_mask, ("listed by PyTorch", lengths, id(block_mask.mask_mod)), make)


def _empty(*tensors: Any) -> bool:
    """True where there is nothing to compute, which PyTorch's function refuses for some sizes."""
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in tensors) or all(x.numel() for x in tensors):
        return False
    return torch.compiler.is_compiling() or _plain(*tensors)


def zero_of(score_mod: Mod | None, *tensors: Tensor) -> Tensor:
    """A 0 in whose graph are tensors, of which there may be none, and those that a score captures."""
    none = [torch.empty(0, dtype=dtype, device=tensors[0].device) for dtype in (torch.float32, *[torch.int64] * 4)]
    more = [] if score_mod is None else [score_mod(*none)]
    return torch.stack([x.flatten()[:0].sum().float() for x in (*tensors, *more)]).sum()


def lacks(query: Any, key: Any, value: Any, return_lse: bool, return_aux: Any, block_mask: Any = None) -> str | None:
    """A call's need that PyTorch's function, in version 2.11, has none of on a CPU; None for other calls."""
    if not isinstance(query, Tensor) or query.device.type != "cpu" or (return_aux is not None and return_aux.max_scores):
        return None
    compiling = torch.compiler.is_compiling()
    if not compiling and not _plain(query, key, value):
        return None
    if not query.dim() == key.dim() == value.dim() == 4 or not query.dtype == key.dtype == value.dtype:
        return None
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return "gradients"
    if compiling and tuple(getattr(block_mask, "BLOCK_SIZE", (_WHOLE, _WHOLE))) != (_WHOLE, _WHOLE):
        # Of its backends some read the mask_mod alone.
        return "lists of blocks in torch.compile"
    return "an LSE in torch.compile" if compiling and (return_lse or return_aux is not None) else None


_WHOLE = 1 << 30
"""Rows and columns of the one block of PyTorch's empty BlockMask, which is for any lengths."""


def check_types(query: Any, key: Any, value: Any) -> None:
    """Raise InputError for tensors of several types, unless autocast makes them one; keys and values alone may have 8 bits."""
    if torch.compiler.is_compiling() or not all(isinstance(x, Tensor) for x in (query, key, value)):
        return
    types = query.dtype, key.dtype, value.dtype
    narrow = key.dtype is value.dtype and key.dtype.itemsize == 1
    if len(set(types)) > 1 and not narrow and not torch.is_autocast_enabled(query.device.type):
        raise InputError(f"query, key and value have the dtypes {types[0]}, {types[1]} and {types[2]}: give them one")


def check_shapes(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """Raise InputError for shapes that don't fit together."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3] or key.shape[0] not in (1, query.shape[0]):
        found = f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        raise InputError(f"{found} don't fit together: give (B, Hq, L, E), (B, Hkv, S, E) and (B, Hkv, S, Ev)")
    if heads != kv_heads and not enable_gqa:
        raise InputError(f"{heads} query heads share {kv_heads} key heads: set enable_gqa=True")
    if heads % kv_heads:
        raise InputError(f"{heads} query heads can't share {kv_heads} key heads: make Hq a multiple of Hkv")
    lengths = getattr(block_mask, "seq_lengths", None)
    if lengths is not None and tuple(block_mask.BLOCK_SIZE) != (_WHOLE, _WHOLE) and tuple(lengths) != (query.shape[2], key.shape[2]):
        raise InputError(
            f"block_mask is for {tuple(lengths)} queries and keys, and these are {query.shape[2]} and {key.shape[2]}: make a new one"
        )


def by_matrices(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None, mask_mod: Mod | None, scale: float | None, *_: bool
) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, L, Ev) and LSE (B, Hq, L) by matrices of all scores."""
    if not (query.numel() and key.numel() and value.numel()):
        out = query.new_zeros((*query.shape[:3], value.shape[3])) + zero_of(score_mod, query, key, value)
        return out, query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
    places = [torch.arange(size, device=query.device) for size in (*query.shape[:3], key.shape[2])]

    def at_all(function: Mod, *scores: Tensor) -> Tensor:
        for place in (3, 2, 1, 0):
            function = torch.vmap(function, in_dims=(*(0 for _ in scores), *(0 if dim == place else None for dim in range(4))))
        # A program that is exported without the compiler would have the values of indices.
        exported = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        with _Indexing() if exported else nullcontext():
            return function(*scores, *places)

    def mods(scores: Tensor) -> Tensor:
        hidden = torch.zeros((), dtype=torch.bool) if mask_mod is None else ~at_all(mask_mod)
        if score_mod is not None:
            # A derivative at a score that is hidden may be NaN, which no 0 takes away.
            scores = at_all(score_mod, scores.masked_fill(hidden, 1.0)).to(dtype)
        return scores.masked_fill(hidden, -math.inf)

    key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    if torch.is_autocast_enabled("cpu") and query.dtype is not torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    dtype = torch.promote_types(query.dtype, torch.float32)
    factor: float = query.shape[3] ** -0.5 if scale is None else scale
    with torch.autocast("cpu", enabled=False):
        out, lse = reference.attention(query, key, value, scale=factor, mods=mods, dtype=dtype)
    return out.to(query.dtype), lse


class _Indexing(TorchFunctionMode):
    """Indexing by scalar tensors as one operation on the whole tensor."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.__getitem__:
            x, index = args
            places = index if isinstance(index, tuple) else (index,)
            numbers = [torch.full((), y, device=x.device) if type(y) is int else y for y in places]
            if all(isinstance(y, Tensor) and y.dtype in INTEGERS for y in numbers):
                return torch.ops.aten.index.Tensor(x, numbers)
        return func(*args, **(kwargs or {}))


def in_band(numbers: Numbers, diagonal: Tensor, key: Tensor) -> Tensor:
    """True for keys in the band of a packed call around the key on a query's diagonal."""
    left, right = (None if side < 0 else side for side in (numbers.left, numbers.right))
    return within(diagonal - key, left, right)


def of_sequence(
    attend: Callable[..., Any],
    score_mod: Mod | None,
    mask_mod: Mod | None,
    tensors: list[Tensor],
    numbers: Numbers,
    seed: int,
    index: int,
    *_: None,
) -> tuple[Tensor, Tensor]:
    """Output (1, Hq, N_q, D_v) and LSE of the packed sequence with this index, by `flex_attention` or `by_matrices`."""
    query, key, value = tensors
    # Captured, so that compiled functions are those of other sequences.
    places = torch.tensor([index, (key.shape[2] - query.shape[2]) * numbers.bottom_right], device=query.device)

    def score(x: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert score_mod is not None, "only functions that a caller gives are called"
        return score_mod(x, places[b], h, q_idx, kv_idx)

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found = in_band(numbers, q_idx + places[b + 1], kv_idx)
        return found if mask_mod is None else found & mask_mod(places[b], h, q_idx, kv_idx)

    masked = mask_mod is not None or max(numbers.left, numbers.right) >= 0
    functions = None if score_mod is None else score, visible if masked else None
    out, lse = attend(query, key, value, *functions, numbers.scale, query.shape[1] != key.shape[1], True)
    return out, lse


def _plain(*tensors: Any) -> bool:
    """True for tensors of no subclass, outside of transforms and modes: others are left to PyTorch as they are."""
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors) and not (C._len_torch_dispatch_stack() or inspection.transformed())


def block_mask_of(block_mask: Any, query: Any, key: Any) -> Any:
    """The BlockMask of a caller's BlockMask or mask_mod; None for None."""
    from torch.nn.attention import flex_attention as module

    if block_mask is None or isinstance(block_mask, module.BlockMask):
        return block_mask
    return module.create_block_mask(block_mask, query.shape[0], query.shape[1], query.shape[2], key.shape[2], device=query.device)


_TRACED, _SUBCLASS = "torch.compile traces the call", "arguments aren't plain tensors"
_TRANSFORMED = "a transform of torch.func is active"
SEEN_THROUGH = frozenset((_TRACED, _SUBCLASS, _TRANSFORMED))
"""Reasons for which PyTorch serves calls with functions, whatever implementation is named."""

NOTHING = "there is nothing to compute"


def why_torch(query: Any, key: Any, value: Any, scale: Any, *, dimensions: int = 4) -> str | None:
    """The reason why no kernel with functions takes tensors of so many dimensions; None where one may."""
    every = (query, key, value)
    if torch.compiler.is_compiling():
        return _TRACED
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in every) or C._len_torch_dispatch_stack():
        return _SUBCLASS
    if inspection.transformed():
        return _TRANSFORMED
    if any(x.dim() != dimensions for x in every) or len({(x.dtype, x.device) for x in every}) > 1:
        return f"tensors don't have {'four' if dimensions == 4 else 'three'} dimensions, one dtype and one device"
    if not served_here(query.device, query.dtype):
        return f"no kernel runs on {query.device} with {query.dtype}"
    if scale is not None and not scale > 0:
        return "the scale isn't above 0"
    if torch.is_autocast_enabled(query.device.type) and torch.get_autocast_dtype(query.device.type) is not query.dtype:
        return "autocast takes another type"
    if any(x.is_neg() for x in every):
        return "a tensor is lazily negated"
    return None


def why_torch_dense(query: Any, key: Any, value: Any, scale: Any, return_aux: Any) -> str | None:
    """The same for calls of `flex_attention`."""
    why = why_torch(query, key, value, scale)
    if why not in SEEN_THROUGH and not all(x.numel() for x in (query, key, value)):
        return NOTHING
    if why is not None:
        return why
    if return_aux is not None and return_aux.max_scores:
        return "kernels return no maxima of scores"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are requested"
    return None


def why_named(name: str | None, why: str | None, query: Any, *, nothing: bool = False) -> str | None:
    """The reason why PyTorch serves a call with functions whose caller names an implementation, None for kernels; `why` is that so far.

    Raises InputError, with the cause and the remedy, where the implementation can't serve a call with something to compute.
    """
    if name == TORCHS:
        return f"the caller named {name}"
    if name is None or nothing or why in SEEN_THROUGH or why == NOTHING:
        return why
    if name != OURS:
        refuse_functions(name, query.device)
        return f"the caller named {name}"
    if why is not None:
        raise cannot_serve(name, why)
    return None
