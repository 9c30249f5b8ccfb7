"""Decisions on calls with functions: kernels with them, those of packed sequences or of `attention`, or the reason why PyTorch serves."""

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from flashtune.core.problems.config import Direction
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.flex import Mod
from flashtune.core.records.plans import Place
from flashtune.core.system.errors import InputError
from flashtune.dispatch import api
from flashtune.dispatch.call.sequences import Packed, octaves_of
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.dispatch.functions.blocks import FlexCall, Functions, Passes, agrees, agrees_with_band, listed_by, sizes_of
from flashtune.dispatch.functions.by_torch import SEEN_THROUGH, check_shapes, check_types, why_named, why_torch_dense
from flashtune.dispatch.functions.documents import PackedCall, packed_call
from flashtune.dispatch.functions.kernels import Sequences, kernel_of, problem_with_functions, slower
from flashtune.dispatch.functions.listed import check_lists
from flashtune.dispatch.functions.trained import types_of
from flashtune.dispatch.policy.offers import OURS
from flashtune.dispatch.rows.kernel import NotBuilt, layout, note
from flashtune.dispatch.state.context import Memo, current
from flashtune.templates.mods import known
from flashtune.templates.mods.emit import Mods, emitted
from flashtune.templates.mods.graph import INDICES
from flashtune.templates.mods.reader import Unsupported
from flashtune.templates.mods.scores import slopes_of


def call_of(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Mod | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_aux: Any,
    wants_lse: bool,
    implementation: str | None = None,
) -> FlexCall | PackedCall | dict[str, Any] | str:
    """The call for kernels with its functions, that of packed sequences or arguments for `attention` where these kernels serve it, or the
    reason why PyTorch serves; raises InputError where the implementation can't that is named."""
    check_types(query, key, value)
    if (why := why_torch_dense(query, key, value, scale, return_aux)) is None:
        check_shapes(query, key, value, block_mask, enable_gqa)
    if why not in SEEN_THROUGH and hasattr(block_mask, "BLOCK_SIZE") and query.dim() == key.dim() == 4:
        check_lists(block_mask, query, key)
    if (why := why_named(implementation, why, query)) is not None:
        return why
    found = _by_kernels(query, key, value, score_mod, block_mask, scale, wants_lse, ours=implementation == OURS)
    return (why_named(implementation, found, query) or found) if isinstance(found, str) else found


def _by_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    block_mask: Any,
    scale: float | None,
    wants_lse: bool,
    *,
    ours: bool,
) -> FlexCall | PackedCall | dict[str, Any] | str:
    """The same where no argument leaves the call to PyTorch; with `ours` kernels serve wherever they can, measured or not."""
    key, value = (x.expand(query.shape[0], -1, -1, -1) if x.shape[0] != query.shape[0] else x for x in (key, value))
    sizes = list(zip(INDICES, sizes_of(query, key), strict=True))
    found = flex_functions.functions_of(score_mod, getattr(block_mask, "mask_mod", block_mask), query.device, sizes)
    if isinstance(found, str):
        return found
    functions, captured = found
    tensors = query, key, value
    scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else float(scale)
    given = None if block_mask is None or callable(block_mask) else block_mask
    foreign = given is not None and _lists_alone(functions, given, query, key)
    if not foreign and functions.known is not None:
        foreign = given is not None and not agrees_with_band(given, functions.known[0], query, key)
        if not foreign and (words := _built_in(functions, captured, query, key, value, scale, wants_lse, ours=ours)) is not None:
            return words
    if not foreign and functions.documents is not None:
        packed = packed_call(functions.documents, captured, tensors, scale, given, ours=ours)
        if isinstance(packed, PackedCall):
            return packed
        foreign = packed is not None
    if given is not None and any(size not in (1, now) for size, now in zip(given.shape[:-2], query.shape[:2], strict=True)):
        return f"the BlockMask is for {tuple(given.shape[:-2])} batches and heads"
    if not foreign:
        call = with_kernel(functions, captured, tensors, scale, block_mask, ours=ours)
        # A band knows no end of the keys, and kernels walk full blocks beyond it.
        compared = given is None or (functions.known is not None and key.shape[2] % given.BLOCK_SIZE[1] == 0)
        try:
            if compared or not isinstance(call, FlexCall) or agrees(call, query, key):
                return call
        except NotBuilt:
            # Its next kernel.
            return _by_kernels(query, key, value, score_mod, block_mask, scale, wants_lse, ours=ours)
    listed = listed_by(given, query, key, alone=functions.alone)
    found = flex_functions.functions_of(score_mod, listed, query.device, sizes)
    return found if isinstance(found, str) else with_kernel(*found, tensors, scale, listed, ours=ours)


def _lists_alone(functions: Functions, mask: Any, query: Tensor, key: Tensor) -> bool:
    """True if only a BlockMask's lists can say what is visible, of blocks of any size: its mask_mod hides nothing, and it isn't the one
    block of a mask for no mask; or if tiles can't be made of its blocks."""
    several = any(size < n for size, n in zip(mask.BLOCK_SIZE, (query.shape[2], key.shape[2]), strict=True))
    return (functions.alone and several) or any(size & (size - 1) for size in mask.BLOCK_SIZE)


def with_kernel(
    functions: Functions,
    captured: tuple[Tensor, ...],
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: float,
    mask_of: Any = None,
    sequences: Sequences | None = None,
    *,
    ours: bool = False,
) -> FlexCall | str:
    """The call of kernels with these functions, or the reason why none serves. Those of packed sequences serve measured or not, and so do
    all with `ours`."""
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *captured))
    memo = current()
    flags: tuple[Any, ...] = memo.unmeasured, torch.get_float32_matmul_precision(), ours
    if sequences is not None:
        sizes = octaves_of(Packed(*tensors, *sequences.bounds), sequences.numbers), sequences.bounds[0].shape
        flags = (*flags, *sequences.numbers[3:], *sizes, sequences.bounds[2] is None, sequences.deterministic)
    place = id(functions), layout(tensors), tensors[0].device, trains, flags
    known = _chosen_in(memo)
    of, chosen = known.get(place, (None, ""))
    if of is not functions or (not isinstance(chosen, str) and chosen.failed):
        chosen = _kernels(functions, captured, tensors, trains, sequences, always=ours or sequences is not None)
        if not functions.fresh:
            if len(known) >= flex_functions.MOST_TRACES:
                known.clear()
            known[place] = functions, chosen
    if isinstance(chosen, str):
        return chosen
    return FlexCall(functions=functions, captured=captured, kernels=chosen, scale=scale, mask_of=mask_of, sequences=sequences)


def _chosen_in(memo: Memo) -> dict[Hashable, tuple[Functions | None, Passes | str]]:
    """Kernels by what decides on them: functions, layout and device of the tensors, gradients, and settings."""
    found: dict[Hashable, tuple[Functions | None, Passes | str]] = memo.packed.setdefault("functions", {})
    return found


def _kernels(
    functions: Functions,
    captured: tuple[Tensor, ...],
    tensors: tuple[Tensor, Tensor, Tensor],
    trains: bool,
    sequences: Sequences | None,
    *,
    always: bool,
) -> Passes | str:
    """The kernels of a call's passes, or the reason why none serve; with `always` they serve unmeasured, or slower than PyTorch, too."""
    query, backward, trained = tensors[0], None, None
    try:
        blocks, trains_of = functions.blocks, [x.requires_grad for x in captured]
        mods = emitted(functions.score, functions.mask, types_of(captured, [False] * len(captured)), blocks, backward=False)
        unmeasured = always or _unmeasured_too(query)
        if trains:
            trained = emitted(functions.score, functions.mask, types_of(captured, trains_of), blocks, backward=True)
            unmeasured = unmeasured or (bool(trained.trained) and _torchs_fails(query))
            backward = kernel_of("bwd", *tensors, trained, unmeasured=unmeasured, sequences=sequences)
    except Unsupported as unsupported:
        return str(unsupported)
    kernel = kernel_of("fwd", *tensors, mods, unmeasured=unmeasured, sequences=sequences)
    if isinstance(kernel, str) or isinstance(backward, str):
        return kernel if isinstance(kernel, str) else str(backward)
    # The alternative of packed sequences is a call for each.
    if not always and (why := slower([kernel] if backward is None else [kernel, backward])) is not None:
        passes: dict[Direction, Mods] = {"fwd": mods, **({} if trained is None else {"bwd": trained})}
        for direction, of_pass in passes.items():
            problem = problem_with_functions(direction, *tensors, known.keep(of_pass))
            assert problem is not None, "a kernel takes such tensors"
            note(current(), Place("functions", devices.slug_here(query.device), problem), None, alone=True)
        return why
    return Passes(kernel, mods, backward, trained)


def _built_in(
    functions: Functions,
    captured: tuple[Tensor, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    wants_lse: bool,
    *,
    ours: bool,
) -> dict[str, Any] | None:
    """The arguments of `attention` for functions that it has built in, where its kernels serve the call: they are tuned for the GPU."""
    assert functions.known is not None, "the caller looked"
    window, score = functions.known
    words: dict[str, Any] = {"window": None if window == (None, None) else window, "enable_gqa": True, **score.words(scale)}
    if ours:
        words["implementation"] = OURS
    slopes = slopes_of(score, captured, query.shape[0], query.shape[1], query.device)
    if slopes is not None:
        words["alibi_slopes"] = slopes
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, *(() if slopes is None else (slopes,))))
    numbers = tuple(x for x in words.values() if not isinstance(x, Tensor))
    wanted = tuple(trained and x is not None and x.requires_grad for x in (query, key, value, slopes))
    place = layout((query, key, value, slopes)), query.device, numbers, wants_lse, wanted
    known: dict[Hashable, bool] = current().packed.setdefault("built in", {})
    if place not in known:
        try:
            served = api.explain(query, key, value, return_lse=wants_lse, **words)
        except InputError:
            # No kernel of theirs can: those with functions may.
            if not ours:
                raise
            known[place] = False
        else:
            known[place] = served.kind != "framework" and (not trained or served.backward is not None)
    return words if known[place] else None


def _torchs_fails(query: Tensor) -> bool:
    """True where PyTorch's backward with gradients of captured tensors needs more shared memory than a Hopper GPU has: 233,472 of 232,448
    bytes for a head size of 128 in PyTorch 2.11, measured on an H100."""
    return 64 < query.shape[3] <= 128 and torch.__version__.startswith("2.11.") and devices.target_of(query.device).is_hopper


def _unmeasured_too(query: Tensor) -> bool:
    """True where any kernel with functions may serve: in the interpreter, or where unmeasured ones are allowed."""
    return query.device.type != "cuda" or current().unmeasured
