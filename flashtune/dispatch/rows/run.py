"""Calls of packed sequences and paged caches without functions: by the plan of their signature, or chosen at a first call."""

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from flashtune.core.problems.lengths import spread
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.attention import autocasting
from flashtune.core.pytorch.private import C
from flashtune.dispatch.call.call import PerHead
from flashtune.dispatch.call.inspection import (
    GRADIENTS,
    SEEN_THROUGH,
    has_values,
    perhaps_fake,
    transformed,
    why_torch_now,
)
from flashtune.dispatch.call.parse import Options, cannot_serve, seed_bits, signed
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of
from flashtune.dispatch.decisions.explanation import Explanation, explained
from flashtune.dispatch.plans.autograd import apply
from flashtune.dispatch.plans.plan import Plans
from flashtune.dispatch.policy.choose import Choice
from flashtune.dispatch.policy.offers import OURS
from flashtune.dispatch.rows import paged as pages
from flashtune.dispatch.rows.offered import by_offer, offered
from flashtune.dispatch.rows.operators import TrainedPlan, by_attention, by_kernels, dropout_bits
from flashtune.dispatch.rows.packed import PackedPlan, explained_pass, served
from flashtune.dispatch.rows.read import cast, integers, parsed
from flashtune.dispatch.state import context
from flashtune.dispatch.state.context import STACK
from flashtune.dispatch.state.recorded import meet_packed


def attend(
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    max_q: int,
    max_k: int,
    seed: int | None,
    splits: int | None = None,
    heads_outside: bool = False,
    *,
    compiling: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Output and LSE of a call without functions, of tensors as in Packed and options in their order, by the plan of its signature where
    there is one; the LSE may be None where the options want none. With `heads_outside` the output of kernels is (Hq, T_q, D_v) in memory.
    Of implementations options name ours alone; `compiling` is True in a compiler's trace."""
    query, key, value, cu_q, cu_k, used, slopes, sinks, table, of_k, of_v = given
    signature: Hashable | None = None
    plan: Any = None
    plans: Any = None
    words: tuple[Any, ...] | None = None
    repeat: Any = None
    if not compiling:
        plans = STACK.get().plans
        try:
            if not max_q.__class__ is max_k.__class__ is int:
                max_q, max_k = integers(max_q, max_k)
            # All that a plan depends on beside layouts.
            words = (
                max_q, max_k, options, splits, heads_outside, cu_k is cu_q, used is None, slopes is None, sinks is None, table is None,
                of_k is None, of_v is None, C._get_deterministic_algorithms(),
            )  # fmt: skip
            recent = plans.packed.get(words)
            if recent is not None:
                tensors = recent.picked(given)
                if recent.check(*tensors) and recent.unchanged(addresses := [*map(_ADDRESS, tensors)]):
                    plan = recent.plan
                    if seed is None and ((repeat := plan.repeat) is None or plan.latch is not None):
                        repeat = plan.again(given, recent.places)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            # An argument isn't a tensor, has no memory, or can't be hashed; parsing raises the error.
            words = repeat = None
        if repeat is not None:
            return repeat.run(query, addresses, with_lse=options[_WITH_LSE])  # type: ignore[no-any-return]
    if plan is None and table is None:
        # Models' positions leave queries and keys in float32 under autocast, and values in its dtype; caches stay in theirs.
        rows = cast(query, key, value)
        if not (rows[0] is query and rows[1] is key and rows[2] is value):
            return attend((*rows, *given[3:]), options, max_q, max_k, seed, splits, heads_outside, compiling=compiling)
    if plan is None and words is not None:
        with suppress(AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            plan, signature = _looked_up(plans, given, words)
    if plan is None:
        read = Options(*options)
        packed, numbers = parsed(Packed(*given), read, max_q, max_k, splits)
        bits = None if seed is None else signed(seed_bits(seed))
        signature = signature if all(map(is_, packed[:6], given[:6])) else None
        ours = read.implementation is not None
        if not (ours or read.return_lse) and (out := _by_library(packed, numbers)) is not None:
            return out, None
        return _first(packed, numbers, bits, signature, heads_outside, ours=ours)
    if seed is not None:
        seed_bits(seed)
    if slopes is not None:
        slopes = slopes.expand(len(cu_q) - 1, -1)
    return _planned(plan, Packed(query, key, value, cu_q, cu_k, used, slopes, *given[7:]), seed)


def _by_library(packed: Packed, numbers: Numbers) -> Tensor | None:
    """Output by the library that a record prefers, where there is one; it isn't traced into a compiler's graph."""
    if torch.compiler.is_compiling() or transformed():
        return None
    why_torch = torch_only(packed)
    memo, found = context.current(), _library_of(packed, numbers, why_torch)
    if found is None or (perhaps_fake(why_torch, packed.query) and not has_values(why_torch, packed.query)):
        return None
    out = by_offer(memo, *found, packed, numbers)
    if out is not None:
        meet(packed, numbers, why_torch)
    return out


def _library_of(packed: Packed, numbers: Numbers, why_torch: str | None) -> tuple[Choice, Problem] | None:
    """Choice of a library and the problem, for a call without an LSE; a learned bias's gradients are kernels' or PyTorch's."""
    if why_torch is not None and (why_torch not in GRADIENTS or GRADIENTS[why_torch]):
        return None
    memo = context.current()
    with memo.lock:
        return offered(memo, packed, numbers, trained=why_torch is not None)


def explanation_of(packed: Packed, numbers: Numbers, *, return_lse: bool = True) -> Explanation:
    """Explanation of who serves such a call, and its gradients where they are needed; no kernel is launched."""
    why_torch = torch_only(packed)
    if not return_lse and (library := _library_of(packed, numbers, why_torch)) is not None:
        chosen, problem = library
        problem = problem_of(packed, numbers, problem.direction, exact=True) or problem
        return explained(chosen, problem, devices.target_of(packed.query.device), ())
    if why_torch in GRADIENTS:
        found = explained_pass(packed, numbers, None if _has_backward(packed, numbers, why_torch) else why_torch)
        return found if found.kind == "framework" else replace(found, backward=explained_pass(packed, numbers, None, "bwd"))
    return explained_pass(packed, numbers, why_torch)


_WITH_LSE = Options._fields.index("return_lse")
_CU_Q, _CU_K, _TABLE = map(Packed._fields.index, ("cu_q", "cu_k", "table"))
"""Places among a call's options and tensors."""

_ADDRESS = Tensor.data_ptr


def torch_only(packed: Packed) -> str | None:
    """Reason for which only PyTorch's operations can serve a call now, or None where a kernel may."""
    return why_torch_now(*packed[:3], None, PerHead(alibi_slopes=packed.slopes, sinks=packed.sinks))


def _has_backward(packed: Packed, numbers: Numbers, why_torch: str | None) -> bool:
    """True if kernels compute the gradients that are needed."""
    return why_torch in GRADIENTS and not GRADIENTS[why_torch] and served(packed, numbers, "bwd") is not None


def _looked_up(plans: Plans, given: tuple[Any, ...], words: tuple[Any, ...]) -> tuple[Any, Hashable | None]:
    """Plan of a call's signature, None where there is none yet, and the signature, None where a plan served calls of its kind before."""
    if words[0] < 0 or words[1] < 0:
        raise ValueError(words)
    places = tuple([place for place, x in enumerate(given) if x is not None and not (place == _CU_K and x is given[_CU_Q])])
    tensors = [given[place] for place in places]
    # Growing lengths share a plan.
    state = _bounds(given, *words[:2]), *words[2:]
    recent = plans.packed.get(state)
    if recent is not None and recent.check(*tensors) and recent.unchanged([x.data_ptr() for x in tensors]):
        plans.alike(words, recent)
        return recent.plan, None
    latent = given[_TABLE] is not None and given[1].data_ptr() == given[2].data_ptr()
    signature = _signature(given, (*state, latent), tensors)
    plan: Any = None if signature is None else plans.get(signature)
    if plan is not None:
        kind = given[0].device.type
        cast_to = torch.get_autocast_dtype(kind) if given[_TABLE] is None and autocasting(kind) else None
        plans.served(signature, plan, state, seeded=False, cast_to=cast_to, tensors=tensors, places=places, latent=latent)
        if (recent := plans.packed.get(state)) is not None:
            plans.alike(words, recent)
    return plan, signature


def _bounds(given: tuple[Any, ...], max_q: int, max_k: int) -> Any:
    """All that a plan takes from the bounds of lengths."""
    if given[_TABLE] is not None:
        # A launch has programs for the longest sequence of all calls of its plan.
        return pages.bounds_of(max_q, max_k)
    # Rows are part of the shapes, so that this counts the mean as `octaves_of` does.
    return spread(max_k, given[_CU_Q].shape[0] - 1, given[1].shape[0])


def _signature(given: tuple[Any, ...], state: tuple[Any, ...], tensors: list[Tensor]) -> Hashable | None:
    """All that a plan depends on; None for a call that has to be parsed."""
    query, key, value, _, _, _, slopes, sinks, _, *factors = given
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in factors):
        return None
    why_torch = why_torch_now(query, key, value, None, None if slopes is sinks is None else PerHead(alibi_slopes=slopes, sinks=sinks))
    if (why_torch is not None and why_torch not in GRADIENTS) or any([x.data_ptr() % 16 or x.is_neg() for x in tensors]):
        return None
    signature = "packed", state, why_torch, *[(x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    hash(signature)
    return signature


def _planned(plan: PackedPlan, packed: Packed, seed: int | None) -> tuple[Tensor, Tensor]:
    """Output and LSE of a decided call."""
    if not isinstance(plan, TrainedPlan):
        return by_kernels(plan.memo, packed, plan.numbers, dropout_bits(packed, plan.numbers, seed), plan)
    out, lse = apply(plan, seed, *packed)
    return out, lse


def meet(packed: Packed, numbers: Numbers, why_torch: str | None) -> None:
    """Record a call, unless no record serves its pages."""
    if packed.table is None or pages.recordable(packed, numbers):
        trained = (
            torch.is_grad_enabled() and any(x.requires_grad for x in packed[:3]) and not getattr(packed.slopes, "requires_grad", False)
        )
        meet_packed(context.current(), problem_of(packed, numbers, exact=True), why_torch, trained)


def refuse_ours(packed: Packed, numbers: Numbers, why_torch: str | None) -> None:
    """Raise InputError with the reason why no kernel serves a call whose caller names ours."""
    if not (packed.empty or why_torch in SEEN_THROUGH):
        raise cannot_serve(OURS, explanation_of(packed, numbers).reason.partition(", so each sequence is ")[0])


def _first(
    packed: Packed, numbers: Numbers, seed: int | None, signature: Hashable | None, heads_outside: bool, *, ours: bool
) -> tuple[Tensor, Tensor]:
    """Output and LSE by kernels, an operator, or a call for each sequence, which with `ours` is refused; a plan of kernels is kept for a
    signature."""
    if torch.compiler.is_compiling() and not transformed():
        out, lse, _ = torch.ops.flashtune_packed.attention(*packed, seed, *numbers)
        return out, lse
    why_torch = torch_only(packed)
    if perhaps_fake(why_torch, packed.query) and not (transformed() or has_values(why_torch, packed.query)):
        out, lse, _ = torch.ops.flashtune_packed.attention(*packed, seed, *numbers)
        return out, lse
    memo = context.current()
    meet(packed, numbers, why_torch)
    if why_torch is None or why_torch in GRADIENTS:
        found = served(packed, numbers)
        trains = found is not None and why_torch is not None and _has_backward(packed, numbers, why_torch)
        if found is not None and (why_torch is None or trains):
            plan = (TrainedPlan if trains else PackedPlan)(memo, found, numbers, heads_outside=heads_outside)
            outputs = _planned(plan, packed, seed)
            if plan.forward is None and ours:
                refuse_ours(packed, numbers, why_torch)
            if signature is not None and plan.forward is not None:
                memo.keep(signature, plan)  # type: ignore[arg-type]
            return outputs
    if ours:
        refuse_ours(packed, numbers, why_torch)
    return by_attention(packed, numbers, dropout_bits(packed, numbers, seed))
