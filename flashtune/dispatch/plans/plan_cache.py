"""Plan cache by signature, with a fast path to the plan that served last: checking the tensors is quicker than a lookup."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flashtune.dispatch.call import Outputs, PerHead
from flashtune.dispatch.plans.pytorch import TorchPlan


class Plan(Protocol):
    """Interface of a plan: prepared execution of calls with equal signatures."""

    def build(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, per_head: PerHead | None) -> None:
        """Load or compile machine code for calls like this one."""
        ...

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: int | None, per_head: PerHead | None) -> Outputs:
        """Output and, where `return_lse` is set, LSE."""
        ...


_guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
"""Guard class of torch.compile, which checks in one call if tensors are like those before; it needs no compiler.

None in versions of PyTorch without it.
"""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Recent:
    """Plan of calls without a mask and per-head arguments, with the conditions under which it serves again.

    `check` is True where three tensors agree in type, dtype, device, sizes, strides, requires_grad and dispatch keys with those that the
    plan served, under the modes, transforms and autocast of this thread. The need for a gradient depends on the grad mode, too: `grad_mode`
    is the one in which the plan served, None where no tensor requires a gradient. `check` doesn't see the dtype to which autocast casts:
    `cast_to` is the one under which the plan served, None without autocast. `direct` is PyTorch's function with the plan's options, where
    the plan does nothing else.
    """

    options: tuple[Any, ...]
    seeded: bool
    grad_mode: bool | None
    cast_to: torch.dtype | None
    check: Callable[[Tensor, Tensor, Tensor], bool]
    plan: Plan
    direct: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


class Plans(dict[Hashable, Plan]):
    """Plans by signature; `recent` is the one that served last, where it has a fast path."""

    __slots__ = ("_made", "recent")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.recent: Recent | None = None
        self._made: dict[Hashable, Recent] = {}

    def clear(self) -> None:
        """Drop all plans."""
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
        """Put the plan that served these tensors on the fast path; the call has no mask and no per-head arguments."""
        query, key, value = tensors
        if _guards is None or query is key or key is value or query is value:
            # The guard distinguishes aliased arguments from separate ones.
            return
        made = self._made.get(signature)
        if made is None or made is self.recent:
            # An entry of this signature that rejects its tensors was made under another mode.
            check = _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            grad_mode = torch.is_grad_enabled() if any(x.requires_grad for x in tensors) else None
            direct = plan.direct() if isinstance(plan, TorchPlan) else None
            made = self._made[signature] = Recent(options, seeded, grad_mode, cast_to, check, plan, direct)
        self.recent = made
        if signature not in self:
            # Another thread cleared the cache meanwhile.
            self.clear()
