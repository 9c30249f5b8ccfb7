"""Recorder of a call's problem for `flashtune search --calls`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashtune.core.parameters import PER_HEAD
from flashtune.dispatch.call import Arguments, Call
from flashtune.dispatch.calls import CALLS
from flashtune.dispatch.resolve.backwards import trained_as
from flashtune.dispatch.resolve.inspection import GRADIENTS, ON_THE_CPU, PLAIN_TYPES, WITH_GRADIENTS
from flashtune.dispatch.resolve.memo import Memo


def meet(memo: Memo, call: Call, arguments: Arguments, why_torch: str | None) -> None:
    """Record the problem of a call, and its backward's where gradients are requested, if kernels may serve it, or might on a GPU.

    `why_torch` is the result of `why_torch_now`.
    """
    problem = call.problem
    if problem is None or memo.pinned or not (why_torch is None or why_torch is ON_THE_CPU or why_torch in GRADIENTS):
        return
    others = {"attn_mask": arguments.attn_mask, **dict(zip(PER_HEAD, arguments.per_head or (), strict=False))}
    tensors = {name: x for name, x in others.items() if isinstance(x, Tensor)}
    every = (*arguments[:3], *tensors.values())
    if why_torch is ON_THE_CPU and any(type(x) not in PLAIN_TYPES for x in every):
        return
    requested = _requested(every, {name for name, x in tensors.items() if x.requires_grad})
    CALLS.meet(problem)
    if requested is not None:
        CALLS.meet(trained_as(problem, requested))


def meet_step(call: Call, n_kv: int) -> None:
    """Record a decode step of `n_kv` keys that is served like `call` (flashtune.dispatch.resolve.length_buckets)."""
    if call.problem is not None:
        CALLS.meet(replace(call.problem, n_kv=n_kv))


def _requested(every: Sequence[Tensor], wanted: set[str]) -> list[str] | None:
    """Requested gradients beside dQ, dK and dV; None where there is no backward, or none that kernels compute."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in every) or not wanted <= WITH_GRADIENTS.keys():
        return None
    return [requested for name in wanted if (requested := WITH_GRADIENTS[name])]
