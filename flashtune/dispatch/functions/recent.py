"""Calls with functions that were decided before, found again in microseconds: the same functions and mask, and tensors like those."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.problems.problem import MAX_HEAD_DIM
from flashtune.core.pytorch.attention import autocasting
from flashtune.core.pytorch.private import FORWARD_AD, C, check_of
from flashtune.dispatch import api
from flashtune.dispatch.call.inspection import flash_attention_on
from flashtune.dispatch.call.parse import Options
from flashtune.dispatch.functions.blocks import FlexCall, Functions, Passes, varies
from flashtune.dispatch.functions.documents import PackedCall
from flashtune.dispatch.functions.kept import Lists, stream_of
from flashtune.dispatch.functions.kernels import Launched, Sequences
from flashtune.dispatch.functions.listed import Listed
from flashtune.dispatch.functions.traced import Snapshot
from flashtune.dispatch.plans.plan import Plan, guarded
from flashtune.dispatch.state.context import STACK, current

MOST = 256
"""Most calls of a context: a model has a few, unless it makes its functions anew."""


class Planned(NamedTuple):
    """A call that a plan of `attention` serves as it is."""

    plan: Plan


@dataclass(slots=True, eq=False, repr=False)
class RecentCall:
    """A decided call, with the conditions under which it is the same again."""

    check: Callable[..., bool]
    state: tuple[Any, ...]
    cast_to: torch.dtype | None
    """The dtype of autocast, which `check` doesn't see; None without it."""
    mask: Lists | None
    score: Snapshot | None
    mask_mod: Snapshot | None
    call: Any
    stream: tuple[int, bool] | None = None
    """The stream, where there are lists of blocks, or documents that aren't read under capture."""
    functions: Functions | None = None
    captured: tuple["weakref.ref[Tensor]", ...] = ()
    scale: float = 1.0
    listed: "weakref.ref[Listed] | None" = None
    numbers: Any = None
    launched: Launched | None = None
    words: tuple[Any, ...] | None = None
    """Options of `attention` in their order, where its plan serves such tensors as they are."""
    planned: Planned | None = None

    def by_plan(self, tensors: Sequence[Any], addresses: Sequence[int]) -> Any:
        """The call by the plan of `attention` that served it before; its arguments where there is none for tensors as they are."""
        plans, words = STACK.get().plans, self.words
        if words is not None:
            # Looked up once: from then on the plan serves, or arguments do.
            self.words = None
            query, key, value, *_ = tensors
            api.looked_up(plans, query, key, value, None, None, words, seeded=False, cast=False)
            last = plans.recent
            if last is not None and last.options == words and not last.seeded and last.check(*tensors) and last.unchanged(addresses):
                self.planned = Planned(last.plan)
        return self.planned or self.call


def _state(query: Tensor, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that any decision depends on beside arguments that are tensors and functions."""
    precision = query.dtype is torch.float32 and torch.get_float32_matmul_precision()
    return options, torch.is_grad_enabled(), flash_attention_on(), precision, C._get_deterministic_algorithms(), torch.get_default_dtype()


_ADDRESS = Tensor.data_ptr


def recent_call(tensors: Sequence[Any], score_mod: Any, block_mask: Any, options: tuple[Any, ...], bounds: Any = None) -> Any:
    """The call that was decided for these tensors and arguments, as `flex_attention` takes it, or of packed sequences with these `bounds`:
    for a forward that was launched before the Repeat, with the addresses of functions' tensors and the call's; None where it has to be
    decided."""
    if torch.compiler.is_compiling():
        return None
    recent = STACK.get().plans.flex.get((id(score_mod), id(block_mask), len(tensors)))
    if (
        recent is None
        or not recent.check(*tensors)
        or recent.state != _state(tensors[0], options)
        or (recent.cast_to is not None and recent.cast_to is not torch.get_autocast_dtype(tensors[0].device.type))
        or (recent.stream is not None and recent.stream != stream_of())
        or FORWARD_AD._current_level >= 0
        or C._len_torch_dispatch_stack()
        or gcd(16, *(found := [*map(_ADDRESS, tensors)])) != 16
    ):
        return None
    score, mask, call = recent.score, recent.mask_mod, recent.call
    if (score is not None and not score.same(score_mod)) or (recent.mask is not None and not recent.mask.same(block_mask)):
        return None
    if mask is not None and not mask.same(getattr(block_mask, "mask_mod", block_mask)):
        return None
    if call.__class__ is dict:
        return recent.planned or recent.by_plan(tensors, found)
    if call.__class__ is not Passes:
        return None if isinstance(call, PackedCall) and not call.read.holds() else call
    launched, captured = recent.launched, tuple([ref() for ref in recent.captured])
    mask_of = block_mask if recent.listed is None else recent.listed()
    if mask_of is None and recent.listed is not None:
        return None
    lists = None if launched is None or call.backward is not None else launched.lists()
    if launched is not None and lists is not None and (again := launched.again(call.forward, [*captured, *lists])) is not None:
        return *again, found
    # A forward whose launches are kept was built; a backward that failed is chosen anew where gradients are computed.
    if (launched is None or launched.kept is None) and call.failed:
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
    score, visible = (None if function is None else Snapshot.make(function) for function in (score_mod, mask_mod))
    if (score is None and score_mod is not None) or (visible is None and mask_mod is not None):
        return
    query, key = tensors[:2]
    trains, kind = torch.is_grad_enabled() and any(x.requires_grad for x in tensors), query.device.type
    cast_to = torch.get_autocast_dtype(kind) if autocasting(kind) else None
    kept: dict[str, Any] = {"call": call}
    if isinstance(call, FlexCall):
        trains = call.kernels.backward is not None
        kept = {"call": call.kernels, "functions": call.functions, "scale": call.scale, "launched": Launched()}
        # Tensors and masks are held by callers.
        kept["captured"] = tuple(weakref.ref(x) for x in call.captured)
        kept["listed"] = weakref.ref(call.mask_of) if isinstance(call.mask_of, Listed) else None
        kept["numbers"] = None if call.sequences is None else call.sequences.numbers
        kept["stream"] = None if call.mask_of is None else stream_of()
    elif isinstance(call, PackedCall):
        kept["stream"] = stream_of()
    elif isinstance(call, dict) and cast_to is None and query.shape[0] == key.shape[0] and query.shape[3] <= MAX_HEAD_DIM:
        # Autocast makes other tensors of these, and values of wider heads may be columns of keys, or not.
        words = Options(**call, return_lse=options[2])
        kept["words"] = words if "implementation" in call else words[:-1]
    mask = None if mask_mod is block_mask else Lists.of(block_mask, trains=trains)
    recent = current().plans.flex
    if len(recent) >= MOST:
        recent.clear()
    # Guards of other numbers of tensors can't be asked.
    made = RecentCall(check_of(tensors), _state(query, options), cast_to, mask, score, visible, **kept)
    recent[id(score_mod), id(block_mask), len(tensors)] = made
