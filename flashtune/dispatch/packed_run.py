"""Calls of packed sequences and paged caches without functions: by the plan of their signature, or chosen at a first call."""

import functools
from collections.abc import Hashable
from dataclasses import replace
from numbers import Integral
from operator import is_, or_
from typing import Any

import torch
from torch import Tensor

from flashtune.core.lengths import spread
from flashtune.dispatch import context
from flashtune.dispatch import paged as pages
from flashtune.dispatch.call import PerHead
from flashtune.dispatch.calls import meet_packed
from flashtune.dispatch.context import STACK
from flashtune.dispatch.inspection import GRADIENTS, perhaps_fake, transformed, why_torch_now
from flashtune.dispatch.packed import PackedPlan, explained_pass, served
from flashtune.dispatch.packed_ops import Attention, by_attention, by_kernels, dropout_bits
from flashtune.dispatch.packed_read import parsed
from flashtune.dispatch.parse import Options, seed_bits, signed
from flashtune.dispatch.resolve import Explanation
from flashtune.dispatch.sequences import Numbers, Packed, problem_of


def attend(
    given: tuple[Any, ...],
    options: tuple[Any, ...],
    max_q: int,
    max_k: int,
    seed: int | None,
    splits: int | None = None,
    heads_outside: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call without functions, of tensors as in Packed and options in their order, by the plan of its signature where
    there is one. With `heads_outside` the output of kernels is (Hq, T_q, D_v) in memory."""
    signature = None if torch.compiler.is_compiling() else _signature(given, options, max_q, max_k, splits)
    if signature is not None and heads_outside:
        signature = "heads outside", signature
    plan: Any = None if signature is None else STACK.get().plans.get(signature)
    if plan is None:
        packed, numbers = parsed(Packed(*given), Options(*options), max_q, max_k, splits)
        bits = None if seed is None else signed(seed_bits(seed))
        return _first(packed, numbers, bits, signature if all(map(is_, packed[:6], given[:6])) else None, heads_outside)
    query, key, value, cu_q, cu_k, used, slopes, sinks, *caches = given
    slopes = slopes if slopes is None else slopes.expand(len(cu_q) - 1, -1)
    return _planned(plan, Packed(query, key, value, cu_q, cu_k, used, slopes, sinks, *caches), seed)


def explanation_of(packed: Packed, numbers: Numbers) -> Explanation:
    """Explanation of who serves such a call, and its gradients where they are needed; no kernel is launched."""
    why_torch = _torch_only(packed)
    if why_torch in GRADIENTS:
        found = explained_pass(packed, numbers, None if _has_backward(packed, numbers, why_torch) else why_torch)
        return found if found.kind == "framework" else replace(found, backward=explained_pass(packed, numbers, None, "bwd"))
    return explained_pass(packed, numbers, why_torch)


def _torch_only(packed: Packed) -> str | None:
    return why_torch_now(*packed[:3], None, PerHead(alibi_slopes=packed.slopes, sinks=packed.sinks))


def _has_backward(packed: Packed, numbers: Numbers, why_torch: str | None) -> bool:
    """True if kernels compute the gradients that are needed."""
    return why_torch in GRADIENTS and not GRADIENTS[why_torch] and served(packed, numbers, "bwd") is not None


def _signature(given: tuple[Any, ...], options: tuple[Any, ...], max_q: int, max_k: int, splits: int | None) -> Hashable | None:
    """Key of a plan for calls like this one; None for those whose tensors are to be changed or inspected first."""
    query, key, value, cu_q, cu_k, used, slopes, sinks, *caches = given
    if not (isinstance(max_q, (int, Integral)) and isinstance(max_k, (int, Integral)) and max_q >= 0 <= max_k):
        return None
    try:
        if caches and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in caches[1:]):
            return None
        why_torch = why_torch_now(query, key, value, None, None if slopes is sinks is None else PerHead(alibi_slopes=slopes, sinks=sinks))
        if why_torch is not None and why_torch not in GRADIENTS:
            return None
        addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | cu_q.data_ptr() | cu_k.data_ptr()
        more = None
        if caches or not used is slopes is sinks is None:
            others = [x for x in (used, slopes, sinks, *caches) if x is not None]
            more = used is None, slopes is None, *[(x.shape, x.stride(), x.dtype, x.device) for x in others]
            if caches:
                # A launch has programs for the longest sequence of all calls of its plan.
                more = (*more, sinks is None, caches[1] is None, pages.bounds_of(max_q, max_k), splits)
            addresses |= functools.reduce(or_, [x.data_ptr() for x in others])
            if any([x.is_neg() for x in others]):
                return None
        if addresses % 16 or query.is_neg() or key.is_neg() or value.is_neg() or cu_q.is_neg() or cu_k.is_neg():
            return None
        # Rows are part of the shapes below, so that this counts the mean as `octaves_of` does.
        bounds = spread(max_k, cu_q.shape[0] - 1, key.shape[0]), torch.are_deterministic_algorithms_enabled()
        signature = (
            "packed", query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), query.dtype, key.dtype,
            value.dtype, query.device, key.device, value.device, cu_q.shape, cu_k.shape, cu_q.stride(), cu_k.stride(), cu_q.dtype,
            cu_k.dtype, cu_q.device, cu_k.device, more, bounds, options, why_torch,
        )  # fmt: skip
        hash(signature)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        # An argument isn't a tensor, has no memory, or can't be hashed; parsing raises the error.
        return None
    return signature


def _planned(plan: PackedPlan, packed: Packed, seed: int | None) -> tuple[Tensor, Tensor]:
    """Output and LSE of a decided call."""
    if not plan.trains:
        return by_kernels(plan.memo, packed, plan.numbers, dropout_bits(packed, plan.numbers, seed), plan)
    out, lse = Attention.apply(*packed, seed, plan)  # type: ignore[no-untyped-call]
    return out, lse


def _first(packed: Packed, numbers: Numbers, seed: int | None, signature: Hashable | None, heads_outside: bool) -> tuple[Tensor, Tensor]:
    """Output and LSE by kernels, an operator, or a call for each sequence; a plan of kernels is kept for a signature."""
    if torch.compiler.is_compiling() and not transformed():
        out, lse, _ = torch.ops.flashtune_packed.attention(*packed, seed, *numbers)
        return out, lse
    why_torch = _torch_only(packed)
    if perhaps_fake(why_torch, packed.query) and not transformed():
        out, lse, _ = torch.ops.flashtune_packed.attention(*packed, seed, *numbers)
        return out, lse
    memo = context.current()
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in packed[:3]) and not getattr(packed.slopes, "requires_grad", False)
    if packed.table is None:
        meet_packed(memo, problem_of(packed, numbers, exact=True), why_torch, trained)
    if why_torch is None or why_torch in GRADIENTS:
        found = served(packed, numbers)
        trains = found is not None and why_torch is not None and _has_backward(packed, numbers, why_torch)
        if found is not None and (why_torch is None or trains):
            plan = PackedPlan(memo, found, numbers, trains=trains, heads_outside=heads_outside)
            outputs = _planned(plan, packed, seed)
            if signature is not None and plan.forward is not None:
                memo.keep(signature, plan)  # type: ignore[arg-type]
            return outputs
    return by_attention(packed, numbers, dropout_bits(packed, numbers, seed))
