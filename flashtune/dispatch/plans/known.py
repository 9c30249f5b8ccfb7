"""Plans by signature, and the shortest way to the one that served last: comparing what a call brings is quicker than looking it up."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flashtune.dispatch.call import PerHead
from flashtune.dispatch.plans.forward import FrameworkPlan, Outputs


class Plan(Protocol):
    """What serves calls that are alike."""

    def build(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, per_head: PerHead | None) -> None:
        """Take or compile machine code for calls like this one."""
        ...

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, seed: int | None, per_head: PerHead | None
    ) -> Outputs:
        """Output and, when asked for, LSE."""
        ...


_guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
"""How torch.compile tells whether tensors are like those that it compiled for, in one call; there without its compiler. Not all of torch's
versions need have it."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Recent:
    """The plan of calls without a mask and without anything per head.

    `check` says whether three tensors agree in type, dtype, device, sizes, strides, requires_grad and dispatch keys with those that the
    plan served: with what torch's modes, transforms and autocast make of them in this thread. Whether a gradient is needed hangs on the
    grad mode, too: `grad_mode` is the one in which the plan served, None where no tensor asks for a gradient. What autocast, where it is
    on, casts to is no part of what `check` sees: `cast_to` is the dtype under which the plan served, None without autocast. `direct` is
    torch's function with all that the plan would tell it, where the plan does nothing else.
    """

    options: tuple[Any, ...]
    seeded: bool
    grad_mode: bool | None
    cast_to: torch.dtype | None
    check: Callable[[Tensor, Tensor, Tensor], bool]
    plan: Plan
    direct: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


class Plans(dict[Hashable, Plan]):
    """Plans by signature; `recent` is the one that served last, where there is a short way to it."""

    __slots__ = ("_made", "recent")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.recent: Recent | None = None
        self._made: dict[Hashable, Recent] = {}

    def clear(self) -> None:
        """Forget all of them."""
        super().clear()
        self.recent = None
        self._made.clear()

    def served(
        self,
        signature: Hashable,
        plan: Plan,
        options: tuple[Any, ...],
        *,
        seeded: bool,
        cast_to: torch.dtype | None = None,
        tensors: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Take the plan that was found for these for the one that will serve next; the call has no mask and nothing per head."""
        query, key, value = tensors
        if _guards is None or query is key or key is value or query is value:
            # Tensors that are one don't count as like others.
            return
        made = self._made.get(signature)
        if made is None or made is self.recent:
            # What was made of this signature, and doesn't know its tensors again, is of another mode.
            check = _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            grad_mode = torch.is_grad_enabled() if any(x.requires_grad for x in tensors) else None
            direct = plan.direct() if isinstance(plan, FrameworkPlan) else None
            made = self._made[signature] = Recent(options, seeded, grad_mode, cast_to, check, plan, direct)
        self.recent = made
        if signature not in self:
            # It was forgotten meanwhile, by another thread.
            self.clear()
