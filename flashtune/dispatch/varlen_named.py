"""Packed sequences and paged caches by PyTorch or a library, which the caller names; ours are called where nothing is named, too."""

import torch
from torch import Tensor

from flashtune.core.pytorch import devices
from flashtune.core.pytorch.private import fake_or_traced
from flashtune.dispatch.call.inspection import SEEN_THROUGH
from flashtune.dispatch.call.parse import Options, seed_bits, signed
from flashtune.dispatch.call.sequences import Numbers, Packed
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.policy.offers import OURS, TORCHS
from flashtune.dispatch.rows.libraries import by_provider, refuse
from flashtune.dispatch.rows.operators import by_attention, dropout_bits
from flashtune.dispatch.rows.run import explanation_of, meet, refuse_ours, torch_only
from flashtune.dispatch.varlen_flex import traced_by_torch


def attend_named(packed: Packed, numbers: Numbers, options: Options, seed: int | None) -> tuple[Tensor, Tensor | None]:
    """Output and LSE by PyTorch, or the output and None by a library; raises InputError, with the cause and the remedy, where the library
    can't serve the call."""
    # Lengths can be read under a user's own mode, for which PyTorch's flex_attention has no rule.
    if torch.compiler.is_compiling() or fake_or_traced() or packed.query.is_meta:
        return traced_by_torch(packed, numbers)
    why_torch = torch_only(packed)
    meet(packed, numbers, why_torch)
    if _heeded(packed, options, why_torch):
        return by_provider(str(options.implementation), packed, numbers, return_lse=options.return_lse), None
    bits = None if seed is None else signed(seed_bits(seed))
    return by_attention(packed, numbers, dropout_bits(packed, numbers, bits), TORCHS)


def explained_named(packed: Packed, numbers: Numbers, options: Options) -> Explanation:
    """Explanation of a call whose caller names an implementation; raises InputError as the call does."""
    name, why_torch = options.implementation, torch_only(packed)
    if name == OURS:
        found = explanation_of(packed, numbers)
        if found.kind == "framework":
            refuse_ours(packed, numbers, why_torch)
        return found
    gpu, reason = devices.slug_here(packed.query.device), f"the caller named {name}"
    if _heeded(packed, options, why_torch):
        refuse(str(name), packed, numbers, return_lse=options.return_lse)
        return Explanation(kind="provider", reason=reason, gpu=gpu, provider=name)
    more = ", and there is nothing to compute" if packed.empty else ", so each sequence is a call of PyTorch's"
    return Explanation(kind="framework", reason=reason + more, gpu=gpu)


def _heeded(packed: Packed, options: Options, why_torch: str | None) -> bool:
    """True where a library is to serve; PyTorch serves under transforms and modes, and where there is nothing to compute."""
    return not (options.implementation == TORCHS or packed.empty or why_torch in SEEN_THROUGH)
