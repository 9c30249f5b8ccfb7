"""FFPA, whose kernels split the head: sizes from 320 to 1024, forward and backward."""

from typing import Any

from torch import Tensor

from flashtune.core.pytorch.private import C
from flashtune.dispatch.call.call import Call, Outputs, PerHead
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.providers.library import Library, causal_alone, on_its_device
from flashtune.dispatch.providers.provider import OTHER_BANDS, Function, ProviderPlan, Tensors

SIZES = 320, 1024
"""Smallest and largest head size."""

LARGEST_CUTEDSL = 512
"""Largest head size of its kernels for Hopper; those in Triton serve larger ones."""

FEWEST_ROWS = 512
"""Queries, but for a decoding step's, and keys below which its Triton kernels leave a call to PyTorch, whose causal diagonal is another."""


class Ffpa(Library):
    """ffpa_attn_func, which takes (B, H, N, D); its diagonal ends at the last key. Its gradients may be added up in any order."""

    takes = frozenset({OTHER_BANDS})
    wanted = ("scale", "is_causal", "enable_gqa")
    multiple = 64

    def refusal(self, call: Call, tensors: Tensors, per_head: PerHead | None) -> str | None:
        """As the base class; what it would hand back to PyTorch is PyTorch's."""
        why = super().refusal(call, tensors, per_head)
        if why is not None:
            return why
        if call.d != call.d_v or not SIZES[0] <= call.d <= SIZES[1]:
            return f"it takes one head size from {SIZES[0]} to {SIZES[1]}, not {call.d} and {call.d_v}"
        if call.d > LARGEST_CUTEDSL and (8 <= call.n_q < FEWEST_ROWS or call.n_kv < FEWEST_ROWS):
            return f"at head sizes above {LARGEST_CUTEDSL} it takes at least {FEWEST_ROWS} queries and keys, not {call.n_q} and {call.n_kv}"
        return causal_alone(call)

    def plan(self, call: Call, tensors: Tensors) -> ProviderPlan:
        """As the base class; in PyTorch's deterministic mode its plan serves."""
        torchs, ours = TorchPlan.of(call, *tensors), super().plan(call, tensors)

        def served(*given: Tensor | None) -> Outputs:
            found: Outputs = (torchs if C._get_deterministic_algorithms() else ours).run(*given)  # type: ignore[arg-type]
            return found

        return ProviderPlan(call, self.name, served, None, compiles=True)

    def function(self, call: Call) -> Function:
        """As the base class."""
        compute, backend = self.computes(), "cutedsl" if call.d <= LARGEST_CUTEDSL else "triton"
        words: dict[str, Any] = {"scale": call.scale, "is_causal": call.band.bounded, "enable_gqa": call.shared, "backend": backend}

        def run(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> Tensor:
            out: Tensor = compute(query, key, value, **words)
            return out

        return on_its_device(call, run)
