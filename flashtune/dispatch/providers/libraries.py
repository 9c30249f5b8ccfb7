"""Attention that others provide, behind one interface: PyTorch's backends by name, FlexAttention and libraries.

Records name a provider; the name is looked up in `PROVIDERS` here and nowhere else, so that a database can't name code.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch.attention import compiled_flex
from flashtune.core.pytorch.flex import band_mod, flex_arguments, soft_cap_mod
from flashtune.core.system.errors import InputError
from flashtune.dispatch.call.call import Call, PerHead
from flashtune.dispatch.call.parse import cannot_serve
from flashtune.dispatch.providers.cudnn_frontend import CudnnFrontend
from flashtune.dispatch.providers.ffpa import Ffpa
from flashtune.dispatch.providers.library import Library, on_its_device
from flashtune.dispatch.providers.provider import AT_THE_START, FUNCTIONS, OTHER_BANDS, Function, Provider, ProviderPlan, Tensors
from flashtune.dispatch.providers.torch_backends import TorchBackend, choice


class FlashAttn(Library):
    """flash-attn-4 or flash-attn, which take (B, N, H, D): their diagonal ends at the last key, and windows have two sides."""

    takes = frozenset({OTHER_BANDS, "a soft cap"})
    wanted: tuple[str, ...] = ("softmax_scale", "causal", "window_size", "softcap", "deterministic")

    def __init__(self, name: str, title: str, package: str, module: str, unbounded: int | None, sinks: str = "") -> None:
        """`unbounded` is its value for a side of a window without a bound, `sinks` the parameter that takes attention sinks."""
        super().__init__(name, title, package, module, "flash_attn_func")
        self._unbounded, self._sinks = unbounded, sinks
        if sinks:
            self.wanted, self.takes = (*self.wanted, sinks), self.takes | {"sinks"}

    def function(self, call: Call) -> Function:
        """As the base class; tensors are handed over as they lie in memory."""
        compute, named = self.computes(), self._sinks
        left, right = (self._unbounded if side is None else side for side in (call.band.left, call.band.right))
        words: dict[str, Any] = {"softmax_scale": call.scale, "causal": call.band.left is None and call.band.right == 0}
        if call.band.bounded and not words["causal"]:
            words["window_size"] = left, right
        if call.softcap:
            words["softcap"] = call.softcap

        def run(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            more: dict[str, Any] = {} if sinks is None else {named: sinks}
            if torch.are_deterministic_algorithms_enabled():
                more["deterministic"] = True
            found = compute(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **words, **more)
            out: Tensor = found[0] if isinstance(found, tuple) else found
            return out.transpose(1, 2)

        return on_its_device(call, run)


class Flex(Provider):
    """PyTorch's FlexAttention, compiled for the band and the soft cap of a call."""

    takes = frozenset({OTHER_BANDS, AT_THE_START, "a soft cap", "float32 or float64", FUNCTIONS})

    def plan(self, call: Call, tensors: Tensors) -> "ProviderPlan":
        """As the base class; blocks of hidden pairs are found once."""
        band = band_mod(call.band) if call.band.bounded else None
        functions = flex_arguments(band, soft_cap_mod(call.softcap), (None, None, call.n_q, call.n_kv), call.device)

        def run(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
            found: Tensor = compiled_flex(dynamic=False)(query, key, value, scale=call.scale, enable_gqa=call.shared, **functions)
            return found

        return ProviderPlan.of(call, self.name, run, tensors)


PROVIDERS: Mapping[str, Provider] = {
    one.name: one
    for one in (
        TorchBackend("flash", "PyTorch's flash attention", SDPBackend.FLASH_ATTENTION),
        TorchBackend("cudnn", "PyTorch's cuDNN attention", SDPBackend.CUDNN_ATTENTION),
        TorchBackend("efficient", "PyTorch's memory-efficient attention", SDPBackend.EFFICIENT_ATTENTION),
        TorchBackend("math", "PyTorch's math attention", SDPBackend.MATH),
        Flex("flex", "PyTorch's FlexAttention"),
        FlashAttn("fa4", "FlashAttention-4", "flash-attn-4", "flash_attn.cute", None, "learnable_sink"),
        FlashAttn("fa2", "FlashAttention-2", "flash-attn", "flash_attn", -1),
        CudnnFrontend("cudnn_fe", "cuDNN's frontend", "nvidia-cudnn-frontend", "cudnn.sdpa.fwd.torch_op", "sdpa"),
        Ffpa("ffpa", "FFPA", "ffpa-attn", "ffpa_attn", "ffpa_attn_func"),
    )
}
"""Providers by the names of flashtune.core.records.results.PROVIDERS."""


def traced_backend(name: str | None, call: Call) -> contextlib.AbstractContextManager[object]:
    """Context for compilers that trace: PyTorch's backend of this name, where it is one; raises InputError where it never serves such
    calls."""
    provider = None if name is None else PROVIDERS.get(name)
    if not isinstance(provider, TorchBackend) or call.empty or call.composite:
        return contextlib.nullcontext()
    if (why := provider.never(call)) is not None:
        raise refused(provider, why)
    return sdpa_kernel([provider.backend])


def refused(provider: Provider, why: str) -> InputError:
    """Error where a caller names a provider that can't serve the call."""
    return cannot_serve(provider.name, why, provider.title)


def refuse_functions(name: str, device: torch.device) -> None:
    """Raise InputError where a provider can't serve calls with masks and scores as functions."""
    provider = PROVIDERS[name]
    if (why := provider.missing() or provider.lacks([FUNCTIONS], device)) is not None:
        raise refused(provider, why)


def torchs_choice(call: Call, tensors: Tensors) -> str:
    """Name of the backend that PyTorch itself chooses for a call; `default` where it needs a mask made for it."""
    chosen = choice(call, tensors) if call.fused_by_torch else None
    return next((one.name for one in PROVIDERS.values() if isinstance(one, TorchBackend) and one.backend == chosen), "default")


def variant_of(name: str, problem: Problem | None) -> Variant | None:
    """Variant under which failures of a provider are kept; None for calls that no `Problem` describes, whose failures are raised."""
    return None if problem is None else Variant(template=name, spec=problem.spec(), config=Config.of())


def plan_of(name: str, call: Call, tensors: Tensors, per_head: PerHead | None) -> ProviderPlan:
    """Plan of a provider; raises InputError, with the cause and the remedy, where it can't serve the call."""
    provider = PROVIDERS[name]
    if (why := provider.refusal(call, tensors, per_head)) is not None:
        raise refused(provider, why)
    return provider.plan(call, tensors)
