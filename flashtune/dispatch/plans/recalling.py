"""Unseeded dropout that kernels drew without gradients, and what draws it again: plans around others."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashtune.dispatch.call import PerHead
from flashtune.dispatch.plans.drawing import DRAWS, MOST_DRAWS, drawn_as, draws_in_a_capture, random_bits, recalled, remember
from flashtune.dispatch.plans.forward import FrameworkPlan, KernelPlan, Outputs


class RememberingPlan:
    """A forward's plan for unseeded dropout whose draws are remembered: the same may be computed again with gradients.

    Where no more can be, torch serves if `torch_trains` such calls, so that nothing has to be remembered.
    """

    __slots__ = ("_framework", "_like", "build", "call", "forward")

    def __init__(self, forward: KernelPlan, *, torch_trains: bool) -> None:
        self.call, self.forward, self.build = forward.call, forward, forward.build
        self._like = drawn_as(forward.call)
        self._framework = FrameworkPlan(call=forward.call) if torch_trains else None

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        seed: int | None,
        per_head: PerHead | None,
    ) -> Outputs:
        """Output and no LSE."""
        forward, instead = self.forward, self._framework
        device = self.call.device
        if draws_in_a_capture(self.call, seed):
            return forward.run(query, key, value, attn_mask, seed, per_head)
        bits: int | None
        if instead is None or len(DRAWS) < MOST_DRAWS:
            bits = random_bits(None, device)[0]
        elif (bits := recalled(device, self._like)) is None:
            return instead.run(query, key, value, attn_mask, None, per_head)
        outputs = forward.run(query, key, value, attn_mask, bits, per_head)
        # What a kernel fails to launch it hasn't dropped.
        remember(bits ^ self._like)
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RecallingPlan(FrameworkPlan):
    """The same for unseeded dropout, save that `again` serves, with the bits for a seed, where a kernel drew them for a call `like` this
    one without gradients: what is computed there again is to drop the same pairs."""

    like: int
    again: Callable[..., Outputs]

    def direct(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """As that of the framework's."""
        words, torchs = self.words, self._torchs
        if words is None:
            return None

        def direct(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            if DRAWS:
                return self.run(query, key, value, None, None, None)[0]
            return torchs(query, key, value, **words)

        return direct

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        seed: int | None,
        per_head: PerHead | None,
    ) -> Outputs:
        """Output and no LSE."""
        if DRAWS and not draws_in_a_capture(self.call, seed):
            bits = recalled(self.call.device, self.like)
            if bits is not None:
                return self.again(query, key, value, attn_mask, bits, per_head)
        # Without an argument it looks for the class that `slots` has replaced.
        return super(RecallingPlan, self).run(query, key, value, attn_mask, seed, per_head)
