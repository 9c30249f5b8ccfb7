"""What a call may give per head: ALiBi's slopes, and the factors that fp8 inputs stand for a multiple of."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from flashtune.dispatch.request import Descale, Request


@dataclass(frozen=True, slots=True, eq=False)
class PerHead:
    """As the caller gave them, in the order of `attention`'s arguments; tensors broadcast to (*batch_dims, H) of the request."""

    alibi_slopes: torch.Tensor | None = None
    q_descale: torch.Tensor | float | None = None
    k_descale: torch.Tensor | float | None = None
    v_descale: torch.Tensor | float | None = None

    @property
    def given(self) -> tuple[torch.Tensor | float | None, ...]:
        """All four."""
        return self.alibi_slopes, self.q_descale, self.k_descale, self.v_descale

    def tensors(self) -> list[torch.Tensor]:
        """Those that are tensors."""
        return [x for x in self.given if isinstance(x, torch.Tensor)]

    def signature(self) -> Hashable:
        """What a plan depends on: sizes and places of tensors, values of numbers."""
        return tuple((x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), x) for x in self.given)

    def slopes(self, request: Request) -> torch.Tensor | None:
        """ALiBi's slopes as a view (B, Hq)."""
        return None if self.alibi_slopes is None else request.spread(self.alibi_slopes, request.heads)

    def descale(self, request: Request, numbers: Descale) -> Descale:
        """The factors of q (B, Hq), k (B, Hkv) and v (B, Hkv): views of those that were given as tensors, else from `numbers`."""
        given = (self.q_descale, self.k_descale, self.v_descale)
        counts = (request.heads, request.kv_heads, request.kv_heads)
        q, k, v = (
            request.spread(x, count) if isinstance(x, torch.Tensor) else number
            for x, count, number in zip(given, counts, numbers, strict=True)
        )
        return q, k, v

    def over(self, settings: dict[str, Any], request: Request) -> dict[str, Any]:
        """The settings of a launch with this call's own tensors put in."""
        found = dict(settings)
        if self.alibi_slopes is not None:
            found["slopes"] = self.slopes(request)
        if request.factors is not None:
            found["descale"] = self.descale(request, settings["descale"])
        return found
