"""Calls with functions that were decided before, found again in microseconds: the same functions and mask, and tensors like those."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from flashtune.core.pytorch.private import FORWARD_AD, C, check_of
from flashtune.dispatch.call.inspection import flash_attention_on
from flashtune.dispatch.functions.blocks import FlexCall, Functions, Passes, varies
from flashtune.dispatch.functions.documents import PackedCall
from flashtune.dispatch.functions.kept import Lists, stream_of
from flashtune.dispatch.functions.kernels import Launched, Sequences
from flashtune.dispatch.functions.listed import Listed
from flashtune.dispatch.functions.traced import Snapshot
from flashtune.dispatch.plans.plan import guarded
from flashtune.dispatch.state.context import STACK, current

MOST = 256
"""Most calls of a context: a model has a few, unless it makes its functions anew."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RecentCall:
    """A decided call, with the conditions under which it is the same again."""

    check: Callable[..., bool]
    state: tuple[Any, ...]
    mask: Lists | None
    score: Snapshot | None
    mask_mod: Snapshot | None
    call: Any
    functions: Functions | None
    captured: tuple["weakref.ref[Tensor]", ...]
    scale: float
    listed: "weakref.ref[Listed] | None" = None
    numbers: Any = None
    launched: Launched | None = None


def _settings(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Settings that a decision depends on beside arguments that are tensors and functions."""
    return (
        options, torch.is_grad_enabled(), torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda"), stream_of(),
        flash_attention_on(), torch.get_float32_matmul_precision(), C._get_deterministic_algorithms(), torch.get_default_dtype(),
    )  # fmt: skip


_ADDRESS = Tensor.data_ptr


def recent_call(tensors: Sequence[Any], score_mod: Any, block_mask: Any, options: tuple[Any, ...], bounds: Any = None) -> Any:
    """The call that was decided for these tensors and arguments, as `flex_attention` takes it, or of packed sequences with these `bounds`;
    None where it has to be decided."""
    if torch.compiler.is_compiling():
        return None
    recent = STACK.get().plans.flex.get((id(score_mod), id(block_mask), len(tensors)))
    if (
        recent is None
        or not recent.check(*tensors)
        or recent.state != _settings(options)
        or FORWARD_AD._current_level >= 0
        or C._len_torch_dispatch_stack()
        or reduce(or_, found := [*map(_ADDRESS, tensors)]) % 16
    ):
        return None
    score, mask, call = recent.score, recent.mask_mod, recent.call
    if (score is not None and not score.same(score_mod)) or (recent.mask is not None and not recent.mask.same(block_mask)):
        return None
    if mask is not None and not mask.same(getattr(block_mask, "mask_mod", block_mask)):
        return None
    if call.__class__ is not Passes:
        return None if isinstance(call, PackedCall) and not call.read.holds() else call
    launched = recent.launched
    # A forward whose launches are kept was built; a backward that failed is chosen anew where gradients are computed.
    if (launched is None or launched.kept is None) and call.failed:
        return None
    captured, mask_of = tuple([ref() for ref in recent.captured]), block_mask if recent.listed is None else recent.listed()
    if mask_of is None and recent.listed is not None:
        return None
    sequences = None if bounds is None else Sequences(bounds, recent.numbers)
    return FlexCall(recent.functions, captured, call, recent.scale, mask_of, sequences, launched, found)


def keep_recent(
    call: FlexCall | PackedCall | dict[str, Any] | str, tensors: Sequence[Any], score_mod: Any, block_mask: Any, options: tuple[Any, ...]
) -> None:
    """Keep a decided call, where its conditions can be compared."""
    if (
        isinstance(call, str)
        or isinstance(options[0], Tensor)
        or torch.compiler.is_compiling()
        or not guarded(tensors)
        or any(x.data_ptr() % 16 for x in tensors)
    ):
        return
    if (isinstance(call, dict) and "alibi_slopes" in call) or (isinstance(call, PackedCall) and call.slopes is not None):
        # Slopes are computed anew.
        return
    if isinstance(call, FlexCall) and varies(call):
        return
    mask_mod = getattr(block_mask, "mask_mod", block_mask)
    snapshots = tuple(None if function is None else Snapshot.make(function) for function in (score_mod, mask_mod))
    if any(function is not None and one is None for function, one in zip((score_mod, mask_mod), snapshots, strict=True)):
        return
    kept: tuple[Any, ...] = call, None, (), 1.0
    if isinstance(call, FlexCall):
        # Tensors and masks are held by callers.
        listed = weakref.ref(call.mask_of) if isinstance(call.mask_of, Listed) else None
        numbers = None if call.sequences is None else call.sequences.numbers
        kept = call.kernels, call.functions, tuple(weakref.ref(x) for x in call.captured), call.scale, listed, numbers, Launched()
    mask = None if mask_mod is block_mask else Lists.of(block_mask)
    recent = current().plans.flex
    if len(recent) >= MOST:
        recent.clear()
    # Guards of other numbers of tensors can't be asked.
    recent[id(score_mod), id(block_mask), len(tensors)] = RecentCall(check_of(tensors), _settings(options), mask, *snapshots, *kept)  # type: ignore[arg-type]
