"""PyTorch's backends as providers."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from flashtune.core.pytorch.attention import lay_out_gradient
from flashtune.core.pytorch.private import C, fused_sdp_choice, has_priority_order
from flashtune.dispatch.call.call import Call, PerHead
from flashtune.dispatch.plans.pytorch import TorchPlan, as_bias, no_autocast, only, readable_inputs, sound_backends_of
from flashtune.dispatch.providers.provider import AT_THE_START, Provider, ProviderPlan, Tensors

_OURS: set[tuple[int, ...]] = set()
"""Orders of PyTorch's backends that plans set for the time of a call."""


_SINGLE: Mapping[tuple[SDPBackend, str], tuple[str, str]] = {
    (SDPBackend.FLASH_ATTENTION, "cpu"): (
        "_scaled_dot_product_flash_attention_for_cpu",
        "query key value dropout_p is_causal attn_mask scale",
    ),
    (SDPBackend.FLASH_ATTENTION, "cuda"): (
        "_scaled_dot_product_flash_attention",
        "query key value dropout_p is_causal return_debug_mask scale",
    ),
    (SDPBackend.CUDNN_ATTENTION, "cuda"): (
        "_scaled_dot_product_cudnn_attention",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale",
    ),
    (SDPBackend.EFFICIENT_ATTENTION, "cuda"): (
        "_scaled_dot_product_efficient_attention",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
    ),
}
"""Operators that PyTorch's function runs alone for a backend and a kind of device, with the parameters that they are known by."""


@functools.cache
def operator(backend: SDPBackend, device: str) -> Callable[..., Any] | None:
    """Function of the backend's operator, which returns a tuple with the output first; None where this PyTorch has none, or other
    parameters."""
    name, parameters = _SINGLE.get((backend, device), ("", ""))
    packet = getattr(torch.ops.aten, name, None) if name else None
    schema = getattr(getattr(packet, "default", None), "_schema", None)
    if schema is None or [one.name for one in schema.arguments] != parameters.split():
        return None
    # The one in torch.ops takes longer.
    found: Callable[..., Any] | None = getattr(torch, name, None)
    return found


class TorchBackend(Provider):
    """One of PyTorch's backends: its operator where PyTorch's function does nothing else, elsewhere put first in the order in which PyTorch
    looks for one that takes the call.

    The order is the process's, as PyTorch's switches are. Another thread may be served by another backend meanwhile, but never by none,
    as with switches.
    """

    takes = frozenset({"masks", "dropout", AT_THE_START, "float32 or float64", "a scale of 0 or below"})

    def __init__(self, name: str, title: str, backend: SDPBackend) -> None:
        super().__init__(name, title)
        self.backend = backend
        if name == "math":
            self.takes |= {"repeatable gradients"}
        if name in ("flash", "math"):
            self.devices = ("cuda", "cpu")

    def never(self, call: Call) -> str | None:
        """Reason for which PyTorch gives it no calls like this one, as far as that is known without tensors; None elsewhere."""
        if call.device.type not in self.devices:
            return f"it doesn't run on {call.device.type} tensors"
        if call.device.type != "cuda" or self.name == "math":
            return None
        taken = (torch.float16, torch.bfloat16, *([torch.float32] if self.name == "efficient" else []))
        if call.out_dtype not in taken:
            return f"it doesn't take {str(call.dtype).removeprefix('torch.')} on a GPU"
        masked = call.mask_kind != "none" or (call.band.bounded and not call.torch_causal)
        return "it doesn't take masks on a GPU" if self.name == "flash" and masked else None

    def refusal(self, call: Call, tensors: Tensors, per_head: PerHead | None) -> str | None:
        """As the base class; PyTorch itself says which calls a backend takes."""
        why = super().refusal(call, tensors, per_head)
        if why is None and self.backend != self._chosen(call, tensors):
            return "PyTorch doesn't give it a call of these sizes, types and gradients on this device"
        return why

    def plan(self, call: Call, tensors: Tensors) -> "ProviderPlan":
        """PyTorch's plan by the backend's operator, or with this backend first; unchanged where PyTorch chooses it anyway."""
        torchs = TorchPlan.of(call, *tensors)
        run, direct = torchs.run, torchs.direct
        if choice(call, tensors) != self.backend:
            run, direct = self._first(call, run), direct and self._first(call, direct)
        if direct is not None and (single := self._operator(call, direct)) is not None:
            return ProviderPlan(call, self.name, lambda query, key, value, *_: (single(query, key, value), None), single)
        return ProviderPlan(call, self.name, run, direct)

    def transformed(self, call: Call, tensors: Tensors) -> "ProviderPlan":
        """PyTorch's plan with this backend first, for calls that only PyTorch's function can take: the math backend alone has derivatives
        of every kind."""
        return ProviderPlan(call, self.name, self._first(call, TorchPlan.of(call, *tensors).run), None)

    def _operator(self, call: Call, otherwise: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
        """Function of query, key and value that runs the backend's operator as PyTorch's function would, without choosing a backend; None
        where that does more. In PyTorch's deterministic mode, which backends may refuse, it is the function `otherwise`."""
        run = operator(self.backend, call.device.type)
        if run is None or call.mask_kind != "none" or call.dropout_p:
            return None
        if self.backend == SDPBackend.FLASH_ATTENTION and call.device.type == "cuda" and (call.d != call.d_v or call.d % 8):
            # PyTorch pads the head size.
            return None
        # Arguments take time to parse, so that defaults are left out.
        more = (0.0, True) if call.torch_causal else ()
        words = {} if call.scale == 1.0 / math.sqrt(call.d) else {"scale": call.scale}
        keeps, cuda = self.backend != SDPBackend.FLASH_ATTENTION, call.device.type == "cuda"
        deterministic, enabled = C._get_deterministic_algorithms, torch.is_grad_enabled

        def single(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if deterministic():
                return otherwise(query, key, value)
            if keeps:
                trains = enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
                out: Tensor = run(query, key, value, None, trains, *more, **words)[0]
            else:
                out = run(query, key, value, *more, **words)[0]
            if out.grad_fn is not None and cuda:
                lay_out_gradient(out)
            return out

        return single

    def _chosen(self, call: Call, tensors: Tensors) -> SDPBackend:
        # PyTorch writes its own order at its first choice, over one set before.
        choice(call, tensors)
        found: SDPBackend = self._first(call, choice)(call, tensors)
        return found

    def _first(self, call: Call, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with this backend first in PyTorch's order."""
        if call.device.type != "cuda" or not has_priority_order:
            return functools.partial(self._alone, function)
        read, write, usual = C._get_sdp_priority_order, C._set_sdp_priority_order, C._get_sdp_priority_order()
        order = [int(self.backend.value), *(one for one in usual if one != int(self.backend.value))]
        _OURS.add(tuple(order))

        def first(*given: Any) -> Any:
            before = read()
            write(order)
            try:
                return function(*given)
            finally:
                # An order of ours belongs to another thread's call, which may have ended meanwhile.
                write(usual if tuple(before) in _OURS else before)

        return first

    def _alone(self, function: Callable[..., Any], *given: Any) -> Any:
        """Result of the function with this backend and math alone enabled: on the CPU PyTorch's order is fixed."""
        with only([self.backend, SDPBackend.MATH]):
            return function(*given)


def choice(call: Call, tensors: Tensors) -> SDPBackend:
    """Backend that PyTorch would choose for a call as TorchPlan makes it."""
    *inputs, mask = tensors
    q, k, v, small = readable_inputs(*call.views(*inputs), as_bias(call.small_mask(mask), call.dtype))
    words: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.shared}
    with no_autocast(call.device.type), sound_backends_of(call, q, k, v, small):
        return SDPBackend(fused_sdp_choice(q, k, v, small, call.dropout_p, call.torch_causal, **words))
