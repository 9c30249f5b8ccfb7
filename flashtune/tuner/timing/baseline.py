"""PyTorch's own attention as the baseline: the same problem through `F.scaled_dot_product_attention`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from flashtune.core import reference
from flashtune.core.band import Band
from flashtune.core.torch_attention import sdpa, sound_backends
from flashtune.tuner.verify.inputs import Inputs

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""PyTorch's backends by the names that `flashtune bench` shows."""


def pytorch_call(inputs: Inputs, backend: str | None = None, *, step: bool = False) -> Callable[[], object] | None:
    """PyTorch's pass on these inputs (its default choice, or one of `BACKENDS`); None where it can't express the problem.

    A backward is the gradients alone, dQ, dK and dV, then the bias's and the slopes' where requested: the forward that they need runs at
    the first call, and is kept; in a training `step` it runs each time. The default choice leaves out cuDNN where its gradients are
    unreliable (flashtune.core.torch_attention).

    A diagonal at the last key is PyTorch's `causal_lower_right`, where that reaches FlashAttention. Other bands that are not PyTorch's own
    causal become a boolean mask, and ALiBi a bias in the inputs' dtype (the one that every backend takes), made once and outside of the
    timed part. A soft cap has no equivalent, nor have sinks and fp8 inputs.
    """
    p, parameters = inputs.problem, inputs.parameters
    if p.features.softcap or p.features.sinks or p.dtype == "fp8":
        return None
    own = inputs.mask
    # Generated slopes are the same in every batch.
    slopes = None if parameters.slopes is None else parameters.slopes[:1]
    if own is not None and p.features.dbias:
        own = own.detach().requires_grad_()
    if slopes is not None and p.features.dslopes:
        slopes = slopes.detach().requires_grad_()
    causal = parameters.band == Band(right=0) and own is None and slopes is None
    lower_right = own is None and slopes is None and backend in (None, "flash") and _flash_takes_lower_right(inputs)

    def joined() -> torch.Tensor | None:
        """Bias or mask of the features that PyTorch lacks."""
        mask = own
        if slopes is not None:
            mask = reference.joined(reference.alibi(slopes, p.n_q, p.n_kv, parameters.band.diagonal).to(inputs.q.dtype), mask)
        if not parameters.band.bounded or causal:
            return mask
        return reference.hidden_outside(reference.visible(parameters.band, p.n_q, p.n_kv, inputs.q.device), mask)

    called: Callable[..., torch.Tensor] = sdpa
    if lower_right:
        # Imports torch's compiler, for seconds, which other problems shouldn't wait for.
        from torch.nn.attention.bias import causal_lower_right

        mask: torch.Tensor | None = causal_lower_right(p.n_q, p.n_kv)
        # Called directly, since it recognises PyTorch's function by its place in torch.nn.functional, which may be patched.
        called = type(mask)._dispatch  # type: ignore[union-attr]
    else:
        try:
            with torch.enable_grad():
                mask = joined()
        except torch.OutOfMemoryError:
            return None

    backends = sound_backends(mask) if p.direction == "bwd" else None
    if backend is not None:
        backends = [BACKENDS[backend]]

    def chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        with nullcontext() if backends is None else sdpa_kernel(backends):
            kwargs = {"dropout_p": parameters.dropout_p, "is_causal": causal, "scale": parameters.scale, "enable_gqa": p.gqa_ratio > 1}
            return called(q, k, v, attn_mask=mask, **kwargs)

    if p.direction == "fwd":
        return lambda: chosen(inputs.q, inputs.k, inputs.v, mask)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    leaves = [q, k, v, *(x for x in (own, slopes) if x is not None and x.requires_grad)]
    kept: list[torch.Tensor] = []

    def gradients() -> tuple[torch.Tensor, ...]:
        if not kept or step:
            with torch.enable_grad():
                # Built anew with each forward where a gradient flows through it.
                kept[:] = [chosen(q, k, v, joined() if kept and p.features.asked else mask)]
        return torch.autograd.grad(kept[0], leaves, inputs.operands["dout"], retain_graph=not step)

    return gradients


def backend_name(call: Callable[[], object]) -> str:
    """Name of the PyTorch backend that serves a call, from the operators that it runs, since a profiler takes seconds to start."""

    class Named(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Records the operators of a block."""

        names = ""

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Otherwise torch would import its whole compiler (seconds) to keep it out of here.
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names += f" {func}"
            return func(*args, **(kwargs or {}))

    with Named() as ran:  # type: ignore[no-untyped-call]
        call()
    return next((name for name in ("cudnn", "flash", "efficient") if f"_scaled_dot_product_{name}_attention" in ran.names), "math")


def _flash_takes_lower_right(inputs: Inputs) -> bool:
    """True where FlashAttention computes the band of these inputs from a diagonal at the last key, without a mask."""
    p, parameters = inputs.problem, inputs.parameters
    if parameters.band.left is not None or parameters.band.right != 0 or parameters.band.diagonal <= 0:
        return False
    return can_use_flash_attention(SDPAParams(inputs.q, inputs.k, inputs.v, None, parameters.dropout_p, False, p.gqa_ratio > 1))
