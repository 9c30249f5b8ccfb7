"""Interface of providers: attention that others compute, with the plan that calls it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch.attention import readable
from flashtune.dispatch.call.call import Call, Outputs, PerHead
from flashtune.dispatch.call.sequences import Numbers
from flashtune.dispatch.plans.plan import capturing

Function = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Output (B, Hq, N_q, D_v) of query (B, Hq, N_q, D), key (B, Hkv, N_kv, D), value (B, Hkv, N_kv, D_v) and sinks (Hq,) or None."""


Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Query, key, value and mask of the caller."""

DESCRIBED = frozenset(
    {"causal", "window", "alignment", "mask", "dropout", "softcap", "alibi", "sinks", "tf32", "latent", "dbias", "dslopes", "packed"}
)
"""Features of a problem that `features_of` has words for, or that change nothing for a provider."""

OTHER_BANDS = "bands other than PyTorch's causal one"
AT_THE_START = "a diagonal that doesn't end at the last key"
FUNCTIONS = "masks and scores as functions"


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
        return self.lacks(features_of(call, per_head), call.device)

    def lacks(self, features: Iterable[str], device: torch.device) -> str | None:
        """Reason why it can't serve a call with these features on a device; None where it can."""
        if device.type not in self.devices:
            return f"it doesn't run on {device.type} tensors"
        lacking = [feature for feature in features if feature not in self.takes]
        return f"it doesn't take {' or '.join(lacking)}" if lacking else None

    def plan(self, call: Call, tensors: Tensors) -> "ProviderPlan":
        """Plan of a call that it doesn't refuse."""
        return ProviderPlan.of(call, self.name, self.function(call), tensors)

    def function(self, call: Call) -> Function:
        """Function that computes calls like this one."""
        raise NotImplementedError


def features_of(call: Call, per_head: PerHead | None) -> list[str]:
    """Features of a call beyond plain and causal attention, in words for messages."""
    given = per_head or PerHead()
    aligned = call.band.diagonal == call.n_kv - call.n_q and call.n_q <= call.n_kv
    found = {
        "masks": call.mask_kind != "none",
        "a dropout seed": bool(call.dropout_p) and call.seeded,
        OTHER_BANDS: call.band.bounded and not call.torch_causal,
        "a band beside a mask": call.band.bounded and call.mask_kind != "none",
        AT_THE_START: call.band.bounded and not aligned,
        **features_anywhere(call, call.dtype, given.alibi_slopes, given.sinks, return_lse=call.return_lse),
        "sinks of each batch": given.sinks is not None and given.sinks.numel() != call.heads,
        "fp8": call.factors is not None,
    }
    return [*(feature for feature, there in found.items() if there), *undescribed(call.problem)]


def undescribed(problem: Problem | None) -> list[str]:
    """Features of a problem that nobody described to providers, which they don't take therefore."""
    return [] if problem is None else sorted(problem.features.as_json().keys() - DESCRIBED)


def features_anywhere(
    numbers: Call | Numbers, dtype: torch.dtype, slopes: Tensor | None, sinks: Tensor | None, *, return_lse: bool
) -> dict[str, bool]:
    """Features of dense and packed calls alike, in words for messages, and whether a call has them."""
    return {
        "dropout": bool(numbers.dropout_p),
        "a soft cap": bool(numbers.softcap),
        "ALiBi": slopes is not None,
        "sinks": sinks is not None,
        "an LSE": return_lse,
        "float32 or float64": dtype in (torch.float32, torch.float64),
        "repeatable gradients": numbers.deterministic,
        "a scale of 0 or below": numbers.scale <= 0.0,
    }


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
