"""cuDNN's frontend, whose own kernels serve head sizes up to 512 where PyTorch's cuDNN backend takes 256."""

import torch
from torch import Tensor

from flashtune.dispatch.call.call import Call, PerHead
from flashtune.dispatch.providers.library import Library, causal_alone, on_its_device
from flashtune.dispatch.providers.provider import AT_THE_START, OTHER_BANDS, Function, Tensors

LARGEST = 512
"""Largest head size that its kernels take."""


class CudnnFrontend(Library):
    """cudnn.sdpa_torch, which takes (B, H, N, D) at any strides; it keeps the LSE, which its gradients read, only where it is asked to."""

    takes = frozenset({OTHER_BANDS, AT_THE_START})
    wanted = ("scale", "is_causal", "causal_bottom_right", "return_lse")

    def refusal(self, call: Call, tensors: Tensors, per_head: PerHead | None) -> str | None:
        """As the base class; cuDNN itself says which sizes it has no kernel for, when it is called."""
        why = super().refusal(call, tensors, per_head)
        if why is None and max(call.d, call.d_v) > LARGEST:
            return f"it takes head sizes up to {LARGEST}, not {call.d} and {call.d_v}"
        return causal_alone(call) if why is None else why

    def function(self, call: Call) -> Function:
        """As the base class."""
        compute, words = self.computes(), {"scale": call.scale}
        if call.band.bounded:
            words |= {"is_causal": True, "causal_bottom_right": call.band.diagonal > 0}

        def run(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
            trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
            found = compute(query, key, value, **words, return_lse=trains)
            out: Tensor = found[0] if trains else found
            return out

        return on_its_device(call, run)
