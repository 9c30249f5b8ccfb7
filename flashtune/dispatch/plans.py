"""What a call's signature is bound to after its first call: everything decided, ready to run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashtune.core import reference
from flashtune.dispatch import framework
from flashtune.dispatch.arguments import seed_bits
from flashtune.dispatch.per_head import PerHead
from flashtune.dispatch.request import Request

Outputs = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkPlan:
    """Runs torch's own attention, or the composite for what it lacks."""

    request: Request

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        seed: int | None,
        per_head: PerHead | None,
    ) -> Outputs:
        """Output and, when asked for, LSE."""
        request = self.request
        keep = None
        if request.dropout_p and (request.seeded or request.softcap or request.return_lse):
            bits, offset = random_bits(seed, request.device)
            sizes = (request.batch, request.heads, request.n_q, request.n_kv)
            keep = reference.dropout_keep(bits, offset, *sizes, request.dropout_p, device=request.device)
        return framework.attention(request, query, key, value, attn_mask, keep, per_head)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    """Launches one kernel. `settings` are the keyword arguments of its `launch` but mask, seed, offset and tensors per head; `out_stride`
    is the output's."""

    request: Request
    launch: Callable[..., None]
    settings: dict[str, Any]
    out_shape: tuple[int, int, int, int]
    out_stride: tuple[int, int, int, int]
    lse_shape: tuple[int, int, int]
    lse_stride: tuple[int, int, int]

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        seed: int | None,
        per_head: PerHead | None,
    ) -> Outputs:
        """Output and, when asked for, LSE; on the tensors' device and its current stream."""
        request = self.request
        device = request.device
        q, k, v = request.views(query, key, value)
        mask = None if attn_mask is None else request.full_mask(attn_mask)
        out = torch.empty_strided(self.out_shape, self.out_stride, dtype=request.out_dtype, device=device)
        lse = torch.empty_strided(self.lse_shape, self.lse_stride, dtype=torch.float32, device=device)
        settings = self.settings if per_head is None else per_head.over(self.settings, request)
        bits, offset = random_bits(seed, device) if request.dropout_p else (0, 0)
        if device.type != "cuda" or torch.cuda.current_device() == device.index:
            self.launch(q, k, v, out, lse, mask=mask, seed=bits, offset=offset, **settings)
        else:
            with torch.cuda.device(device):
                self.launch(q, k, v, out, lse, mask=mask, seed=bits, offset=offset, **settings)
        if request.rank == 4:
            return out, lse if request.return_lse else None
        return request.restored(out), request.restored(lse) if request.return_lse else None


def kernel_plan(request: Request, launch: Callable[..., None], q: torch.Tensor) -> KernelPlan:
    """The plan for a kernel; the output's dimensions lie in memory as those of `q` (B, Hq, N_q, D) do, as in torch."""
    shape = (request.batch, request.heads, request.n_q, request.d_v)
    settings: dict[str, Any] = {
        "scale": request.scale,
        **request.band.keywords(),
        "softcap": request.softcap,
        "dropout_p": request.dropout_p,
    }
    if request.factors is not None:
        settings["descale"] = request.number_factors()
    return KernelPlan(
        request=request,
        launch=launch,
        settings=settings,
        out_shape=shape,
        out_stride=out_strides(shape, q.stride()),
        lse_shape=shape[:3],
        lse_stride=(request.heads * request.n_q, request.n_q, 1),
    )


def out_strides(shape: tuple[int, int, int, int], q_strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Dense strides for an output whose batch, heads and rows lie in memory in the order of the query's, the head size innermost."""
    # Broadcast dimensions (stride 0) go outermost.
    outer = sorted(range(3), key=lambda dim: -q_strides[dim] if q_strides[dim] else -(2**62))
    strides, step = [0, 0, 0], shape[3]
    for dim in reversed(outer):
        strides[dim] = step
        step *= shape[dim]
    return strides[0], strides[1], strides[2], 1


def random_bits(seed: int | None, device: torch.device) -> tuple[int, int]:
    """(seed, offset) of one call's dropout: the caller's seed with offset 0, else drawn from torch's default generator of the device.

    On a GPU that is the generator's own seed and position, which then moves on: nothing waits for the GPU, and torch.manual_seed,
    checkpointing and torch.random.fork_rng work as for torch's own dropout.
    """
    if seed is not None:
        return seed_bits(seed), 0
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        position = generator.get_offset()
        generator.set_offset(position + 4)
        return generator.initial_seed() % 2**64, position // 4 % 2**32
    return int(torch.randint(2**63 - 1, ()).item()), 0
