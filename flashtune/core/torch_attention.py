"""Torch's own attention, whatever stands in its place in torch.nn.functional by now."""

import torch
from torch.nn.attention import SDPBackend

sdpa = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
"""What torch.nn.functional binds at its import. `F.scaled_dot_product_attention = dispatch.attention` leaves this one alone, even before
flashtune is imported; looked up there at each call, or at import, attention would call itself."""

_AUTOCASTS = frozenset(kind for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu") if torch.amp.is_autocast_available(kind))
"""Asked once: torch.compile can't trace the question in torch 2.11."""


def autocasting(device_type: str) -> bool:
    """Whether torch.autocast is on for devices of this type."""
    return device_type in _AUTOCASTS and torch.is_autocast_enabled(device_type)


def sound_backends(mask: torch.Tensor | None) -> list[SDPBackend] | None:
    """The backends whose gradients are to be trusted; None for all.

    With a mask cuDNN's dQ can be NaN (torch 2.11 on Hopper, pytorch #196678: keys that are no multiple of its tile, an LSE below -88.7).
    """
    return None if mask is None else [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
