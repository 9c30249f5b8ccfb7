"""Attention that others provide, behind one interface: PyTorch's backends by name, FlexAttention, flash-attn-4 and flash-attn.

Records name a provider; the name is looked up in `PROVIDERS` here and nowhere else, so that a database can't name code.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtune.core.config import Config, Variant
from flashtune.core.errors import InputError
from flashtune.core.problem import Problem
from flashtune.core.torch_attention import compiled_flex, readable
from flashtune.dispatch.call import Call, Outputs, PerHead
from flashtune.dispatch.plan import capturing
from flashtune.dispatch.pytorch import TorchPlan, as_bias, no_autocast, only, readable_inputs, sound_backends_of

Function = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Output (B, Hq, N_q, D_v) of query (B, Hq, N_q, D), key (B, Hkv, N_kv, D), value (B, Hkv, N_kv, D_v) and sinks (Hq,) or None."""


Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Query, key, value and mask of the caller."""

OTHER_BANDS = "bands other than PyTorch's causal one"
AT_THE_START = "a diagonal that doesn't end at the last key"


class Provider:
    """A library's attention: whether it is installed, which calls it takes, and the function that computes them, with its own gradients."""

    package = "torch"
    """Distribution that installs it."""
    takes: frozenset[str] = frozenset()
    """Features of a call beyond plain and causal attention that it computes (`features_of`)."""
    devices: tuple[str, ...] = ("cuda",)

    def __init__(self, name: str, title: str) -> None:
        self.name, self.title = name, title

    def missing(self) -> str | None:
        """Reason why it can't be used on this machine, with the remedy; None where it can."""
        return None

    def refusal(self, call: Call, tensors: Tensors, per_head: PerHead | None) -> str | None:
        """Reason why it can't serve a call with these tensors; None where it should."""
        if (why := self.missing()) is not None:
            return why
        if call.empty or not call.d or not call.d_v:
            return "there is nothing to compute"
        if call.device.type not in self.devices:
            return f"it doesn't run on {call.device.type} tensors"
        lacking = [feature for feature in features_of(call, per_head) if feature not in self.takes]
        return f"it doesn't take {' or '.join(lacking)}" if lacking else None

    def plan(self, call: Call, tensors: Tensors) -> "ProviderPlan":
        """Plan of a call that it doesn't refuse."""
        return ProviderPlan.of(call, self.name, self.function(call), tensors)

    def function(self, call: Call) -> Function:
        """Function that computes calls like this one."""
        raise NotImplementedError


def features_of(call: Call, per_head: PerHead | None) -> list[str]:
    """Features of a call beyond plain and causal attention, in words for messages."""
    numbers = per_head or PerHead()
    aligned = call.band.diagonal == call.n_kv - call.n_q and call.n_q <= call.n_kv
    found = {
        "masks": call.mask_kind != "none",
        "dropout": bool(call.dropout_p),
        "a dropout seed": bool(call.dropout_p) and call.seeded,
        OTHER_BANDS: call.band.bounded and not call.torch_causal,
        "a band beside a mask": call.band.bounded and call.mask_kind != "none",
        AT_THE_START: call.band.bounded and not aligned,
        "a soft cap": bool(call.softcap),
        "ALiBi": numbers.alibi_slopes is not None,
        "sinks": numbers.sinks is not None,
        "sinks of each batch": numbers.sinks is not None and numbers.sinks.numel() != call.heads,
        "an LSE": call.return_lse,
        "fp8": call.factors is not None,
        "float32 or float64": call.dtype in (torch.float32, torch.float64),
        "repeatable gradients": call.deterministic,
        "a scale of 0 or below": call.scale <= 0.0,
    }
    return [feature for feature, there in found.items() if there]


_fused_choice: Any = torch._fused_sdp_choice  # pyright: ignore[reportPrivateImportUsage]

_OURS: set[tuple[int, ...]] = set()
"""Orders of PyTorch's backends that plans set for the time of a call."""


class TorchBackend(Provider):
    """One of PyTorch's backends, put first in the order in which PyTorch looks for one that takes the call.

    The order is the process's, as PyTorch's switches are. Another thread may be served by another backend meanwhile, but never by none,
    as with switches.
    """

    takes = frozenset({"masks", "dropout", AT_THE_START, "float32 or float64", "a scale of 0 or below"})
    devices = ("cuda", "cpu")

    def __init__(self, name: str, title: str, backend: SDPBackend) -> None:
        super().__init__(name, title)
        self.backend = backend
        if name == "math":
            self.takes |= {"repeatable gradients"}

    def refusal(self, call: Call, tensors: Tensors, per_head: PerHead | None) -> str | None:
        """As the base class; PyTorch itself says which calls a backend takes."""
        why = super().refusal(call, tensors, per_head)
        if why is None and self.backend != self._chosen(call, tensors):
            return "PyTorch doesn't give it a call of these sizes, types and gradients on this device"
        return why

    def plan(self, call: Call, tensors: Tensors) -> "ProviderPlan":
        """PyTorch's plan, with this backend first; unchanged where PyTorch chooses it anyway."""
        torchs = TorchPlan.of(call, *tensors)
        if _choice(call, tensors) == self.backend:
            return ProviderPlan(call, self.name, torchs.run, torchs.direct)
        return ProviderPlan(call, self.name, self._first(call, torchs.run), torchs.direct and self._first(call, torchs.direct))

    def _chosen(self, call: Call, tensors: Tensors) -> SDPBackend:
        # PyTorch writes its own order at its first choice, over one set before.
        _choice(call, tensors)
        found: SDPBackend = self._first(call, _choice)(call, tensors)
        return found

    def _first(self, call: Call, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with this backend first in PyTorch's order."""
        if call.device.type != "cuda":
            return functools.partial(self._alone, function)
        read, write, usual = torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order, torch._C._get_sdp_priority_order()
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


def torchs_choice(call: Call, tensors: Tensors) -> str:
    """Name of the backend that PyTorch itself chooses for a call; `default` where it needs a mask made for it."""
    chosen = _choice(call, tensors) if call.fused_by_torch else None
    return next((one.name for one in PROVIDERS.values() if isinstance(one, TorchBackend) and one.backend == chosen), "default")


def _choice(call: Call, tensors: Tensors) -> SDPBackend:
    """Backend that PyTorch would choose for a call as TorchPlan makes it."""
    *inputs, mask = tensors
    q, k, v, small = readable_inputs(*call.views(*inputs), as_bias(call.small_mask(mask), call.dtype))
    words: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.shared}
    with no_autocast(call.device.type), sound_backends_of(call, q, k, v, small):
        return SDPBackend(_fused_choice(q, k, v, small, call.dropout_p, call.torch_causal, **words))


class FlashAttn(Provider):
    """flash-attn-4 or flash-attn, which take (B, N, H, D): their diagonal ends at the last key, and windows have two sides."""

    takes = frozenset({OTHER_BANDS, "a soft cap"})
    wanted: tuple[str, ...] = ("softmax_scale", "causal", "window_size", "softcap", "deterministic")
    """Parameters of its function that are passed: a version without them doesn't fit."""

    def __init__(self, name: str, title: str, package: str, module: str, unbounded: int | None, sinks: str = "") -> None:
        """`unbounded` is its value for a side of a window without a bound, `sinks` the parameter that takes attention sinks."""
        super().__init__(name, title)
        self.package, self._module, self._unbounded, self._sinks = package, module, unbounded, sinks
        if sinks:
            self.wanted, self.takes = (*self.wanted, sinks), self.takes | {"sinks"}

    @functools.cached_property
    def _found(self) -> tuple[Callable[..., Any] | None, str | None]:
        """Its function, or None and the reason."""
        try:
            # Both packages share a namespace, so that an import alone doesn't tell which one is installed.
            version = importlib.metadata.version(self.package)
            function = importlib.import_module(self._module).flash_attn_func
        except Exception as error:
            # The import compiles and loads libraries, whose errors are of any type.
            absent = isinstance(error, ModuleNotFoundError)
            why = "it isn't installed" if absent else f"its import fails ({type(error).__name__}: {str(error).strip()[:100]})"
            return None, f"{why}: pip install {self.package}"
        lacking = [name for name in self.wanted if name not in inspect.signature(function).parameters]
        return (function, None) if not lacking else (None, f"its version {version} has no {lacking[0]}: pip install -U {self.package}")

    def missing(self) -> str | None:
        """As the base class."""
        return self._found[1]

    def refusal(self, call: Call, tensors: Tensors, per_head: PerHead | None) -> str | None:
        """As the base class; head sizes that it lacks on this GPU show when it is called."""
        why = super().refusal(call, tensors, per_head)
        return f"it takes head sizes in multiples of 8, not {call.d} and {call.d_v}" if why is None and (call.d | call.d_v) % 8 else why

    def function(self, call: Call) -> Function:
        """As the base class; tensors are handed over as they lie in memory."""
        compute, why = self._found
        if compute is None:
            raise InputError(f"{self.title} can't be used: {why}")
        left, right = (self._unbounded if side is None else side for side in (call.band.left, call.band.right))
        words: dict[str, Any] = {"softmax_scale": call.scale, "causal": call.band.left is None and call.band.right == 0}
        if call.band.bounded and not words["causal"]:
            words["window_size"] = left, right
        if call.softcap:
            words["softcap"] = call.softcap
        index, named = call.device.index, self._sinks

        def run(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            if index is not None and torch._C._cuda_getDevice() != index:
                with torch.cuda.device(index):
                    return run(query, key, value, sinks)
            more: dict[str, Any] = {} if sinks is None else {named: sinks}
            if torch.are_deterministic_algorithms_enabled():
                more["deterministic"] = True
            found = compute(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **words, **more)
            out: Tensor = found[0] if isinstance(found, tuple) else found
            return out.transpose(1, 2)

        return run


class Flex(Provider):
    """PyTorch's FlexAttention, compiled for the band and the soft cap of a call."""

    takes = frozenset({OTHER_BANDS, AT_THE_START, "a soft cap", "float32 or float64"})

    def function(self, call: Call) -> Function:
        """As the base class; blocks of hidden pairs are found once."""
        from torch.nn.attention.flex_attention import create_block_mask

        band, cap = call.band, call.softcap
        blocks = None
        if band.bounded:

            def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                at = i + band.diagonal - j
                inside = at >= -(band.right if band.right is not None else call.n_kv + call.n_q)
                return inside if band.left is None else inside & (at <= band.left)

            blocks = create_block_mask(seen, None, None, call.n_q, call.n_kv, device=call.device)

        def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        words = {"block_mask": blocks, "scale": call.scale, "enable_gqa": call.shared, "score_mod": capped if cap else None}
        return lambda query, key, value, _: compiled_flex(dynamic=False)(query, key, value, **words)


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
    )
}
"""Providers by the names of flashtune.core.results.PROVIDERS."""


def traced_backend(name: str | None) -> contextlib.AbstractContextManager[object]:
    """Context for compilers that trace: PyTorch's backend of this name, where it is one."""
    provider = None if name is None else PROVIDERS.get(name)
    return sdpa_kernel([provider.backend]) if isinstance(provider, TorchBackend) else contextlib.nullcontext()


class ProviderPlan:
    """Plan that calls a provider; `direct` is the whole call where nothing else is to be done."""

    __slots__ = ("_compiles", "_served", "call", "direct", "provider")

    def __init__(
        self, call: Call, provider: str, served: Callable[..., Outputs], direct: Callable[..., Tensor] | None, *, compiles: bool = False
    ) -> None:
        self.call, self.provider, self._served, self.direct, self._compiles = call, provider, served, direct, compiles

    @classmethod
    def of(cls, call: Call, provider: str, function: Function, tensors: Tensors) -> "ProviderPlan":
        """Plan of a function of tensors (B, H, ...)."""

        def served(query: Tensor, key: Tensor, value: Tensor, mask: None, seed: None, per_head: PerHead | None) -> Outputs:
            q, k, v = map(readable, call.views(query, key, value))
            sinks = None if per_head is None or per_head.sinks is None else per_head.sinks.reshape(call.heads)
            return call.restored(function(q, k, v, sinks)), None

        as_they_are = call.rank == 4 and call.identity and all(x is readable(x) for x in tensors[:3])
        direct = (lambda query, key, value: function(query, key, value, None)) if as_they_are else None
        return cls(call, provider, served, direct, compiles=True)

    def build(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, per_head: PerHead | None) -> None:
        """Run a library's kernels once, forward and backward, since they are compiled at a call; an exception here is their fault."""
        if not self._compiles or capturing(self.call.device):
            return
        out, _ = self._served(query, key, value, mask, None, per_head)
        wanted = [x for x in (query, key, value, *(per_head or ())) if isinstance(x, Tensor) and x.requires_grad]
        if out.requires_grad:
            torch.autograd.grad(out, wanted, torch.zeros_like(out))

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: int | None, per_head: PerHead | None) -> Outputs:
        """Output, and None for the LSE, which providers don't return."""
        return self._served(query, key, value, mask, seed, per_head)


def variant_of(name: str, problem: Problem | None) -> Variant | None:
    """Variant under which failures of a provider are kept; None for calls that no `Problem` describes, whose failures are raised."""
    return None if problem is None else Variant(template=name, spec=problem.spec(), config=Config.of())


def plan_of(name: str, call: Call, tensors: Tensors, per_head: PerHead | None) -> ProviderPlan:
    """Plan of a provider; raises InputError, with the cause and the remedy, where it can't serve the call."""
    provider = PROVIDERS[name]
    if (why := provider.refusal(call, tensors, per_head)) is not None:
        remedy = "" if ": pip" in why else ": leave implementation out, or name another"
        raise InputError(f"implementation={name!r} ({provider.title}) can't serve this call, since {why}{remedy}")
    return provider.plan(call, tensors)
