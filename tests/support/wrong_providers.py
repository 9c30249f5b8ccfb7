"""Libraries that are wrong, as releases of real ones were, in the place of flash-attn-4 on a CPU; and one that is right."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashtune.dispatch.call.call import Call
from flashtune.dispatch.providers import libraries
from flashtune.dispatch.providers.provider import AT_THE_START, Provider

Spoil = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Changes query, key, value or the output, and returns an output."""


class Library(Provider):
    """Plain and causal attention on CPU tensors, spoilt by a function."""

    package = "flash-attn-4"
    takes = frozenset({"float32 or float64", AT_THE_START})
    devices = ("cpu", "cuda")

    def __init__(self, spoil: Spoil) -> None:
        super().__init__("fa4", "a release of a library")
        self.spoil, self.calls = spoil, 0

    def function(self, call: Call) -> Callable[..., Tensor]:
        """As the base class."""

        def run(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
            self.calls += 1
            wide = (x.double().repeat_interleave(call.heads // x.shape[1], 1) for x in (q, k, v))
            words = {"is_causal": True} if call.torch_causal else {}
            out = torch.nn.functional.scaled_dot_product_attention(*wide, scale=call.scale, **words)  # type: ignore[arg-type]
            return self.spoil(q, k, v, out.to(q.dtype))

        return run


def right(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """Nothing is wrong."""
    return out


def nan(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """One element is NaN, as where a row's sum overflows."""
    found = out.clone()
    found[-1, -1, -1, -1] = torch.nan
    return found


def head(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """One head is off by 1 %, as by a factor that was rounded."""
    found = out.clone()
    found[:, 1] *= 1.01
    return found


class _Skewed(torch.autograd.Function):
    """Identity with a gradient that is off by 2 % in one head."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        """The same values."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Its skewed gradient."""
        found = grad.clone()
        found[:, :1] *= 1.02
        return found


def gradient(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """The output is right, and gradients of one head aren't."""
    found: Tensor = _Skewed.apply(out)  # type: ignore[no-untyped-call]
    return found


def into_inputs(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """It scales the keys where they lie."""
    k.detach().view(k.shape)[0, 0, 0, 0] += 1.0
    return out


def beyond_inputs(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """It writes behind the last value."""
    last = v.storage_offset() + v.numel()
    v.detach().as_strided((4,), (1,), last).zero_()
    return out


def unwritten(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """The last row of each head isn't written, and holds what was in memory."""
    found = torch.empty_like(out)
    found[:, :, :-1] = out[:, :, :-1]
    return found


class Raising:
    """It fails at every other call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            raise RuntimeError("internal error 8")
        return out


WRONG: dict[str, Spoil] = {
    "nan": nan,
    "head": head,
    "into inputs": into_inputs,
    "beyond inputs": beyond_inputs,
    "unwritten": unwritten,
}
"""Faults of a forward."""


def plant(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> Library:
    """Put a library in the place of flash-attn-4."""
    library = Library(spoil)
    monkeypatch.setitem(libraries.PROVIDERS, "fa4", library)  # type: ignore[misc,arg-type]
    return library
