"""Random inputs for a problem: fresh every time, inside memory poisoned with NaN, with the arguments of a launch."""

from dataclasses import dataclass
from typing import Any

import torch

from flashtune.core.dtypes import output_dtype
from flashtune.core.problem import Problem
from flashtune.core.torch_dtypes import TORCH_DTYPES

SOFTCAP = 20.0
"""Soft cap of generated inputs: small enough to bend scores of random data."""

DROPOUT_P = 0.1

_GUARD = 256
"""Poisoned elements before and after every tensor, a multiple of 16 bytes so that TMA's alignment holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Tensors of one problem and the keyword arguments that `launch` takes beside them."""

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    keywords: dict[str, Any]

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """The positional arguments of `launch`."""
        return self.q, self.k, self.v, self.out, self.lse

    def poison(self) -> None:
        """Fill the outputs with NaN, so that an element that isn't written can't pass."""
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An uninitialised contiguous tensor with NaN on both sides of it in memory."""
    size = 1
    for extent in shape:
        size *= extent
    buffer = torch.full((size + 2 * _GUARD,), float("nan"), dtype=dtype, device=device)
    return buffer[_GUARD : _GUARD + size].view(shape)


def alibi_slopes(heads: int, device: torch.device | str) -> torch.Tensor:
    """2^(-8 i / H) for head i = 1 .. H: float32 (H,), the slopes of Press et al. ("Train Short, Test Long", ICLR 2022)."""
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=device))


def make_inputs(problem: Problem, *, device: torch.device | str, seed: int, heads_inside: bool = False) -> Inputs:
    """Standard normal q, k, v (and mask, where the problem has one) on `device`.

    Tensors are contiguous (B, H, N, D), or with `heads_inside` views of (B, N, H, D), as projections leave them. ALiBi's slopes
    are the geometric series of its paper; fp8 tensors have factors between 0.5 and 1.5, other ones for each head.

    On the "meta" device nothing is allocated: such inputs serve to compile a launch without a GPU.
    """
    kind, out_kind = TORCH_DTYPES[problem.dtype], TORCH_DTYPES[output_dtype(problem.dtype)]
    meta = torch.device(device).type == "meta"
    generator = None if meta else torch.Generator(device=device).manual_seed(seed)
    p, f = problem, problem.features

    def normal(batch: int, heads: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (batch, rows, heads, columns) if heads_inside else (batch, heads, rows, columns)
        if meta:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        elif dtype.itemsize > 1:
            tensor = guarded(shape, dtype, device).normal_(generator=generator)
        else:
            # Torch draws no fp8 numbers.
            tensor = guarded(shape, dtype, device).copy_(torch.randn(shape, device=device, generator=generator))
        return tensor.transpose(1, 2) if heads_inside else tensor

    def factor(heads: int) -> torch.Tensor:
        shape = p.batch, heads
        return torch.empty(shape, device=device) if meta else torch.rand(shape, device=device, generator=generator) + 0.5

    mask = None
    if f.mask == "bias":
        mask = normal(1, p.heads, p.n_q, p.n_kv, out_kind)
    elif f.mask == "bool":
        mask = torch.empty((1, 1, p.n_q, p.n_kv), dtype=torch.bool, device=device)
        if not meta:
            mask.copy_(torch.rand(mask.shape, device=device, generator=generator) < 0.8)
            mask[..., -1, :] = False
    extras: dict[str, Any] = {}
    if f.alibi:
        extras["slopes"] = alibi_slopes(p.heads, device).expand(p.batch, p.heads)
    if p.dtype == "fp8":
        extras["descale"] = factor(p.heads), factor(p.kv_heads), factor(p.kv_heads)
    return Inputs(
        problem=problem,
        q=normal(p.batch, p.heads, p.n_q, p.d, kind),
        k=normal(p.batch, p.kv_heads, p.n_kv, p.d, kind),
        v=normal(p.batch, p.kv_heads, p.n_kv, p.d_v, kind),
        out=normal(p.batch, p.heads, p.n_q, p.d_v, out_kind),
        lse=torch.empty((p.batch, p.heads, p.n_q), dtype=torch.float32, device=device),
        keywords={
            "mask": None if mask is None else mask.expand(p.batch, p.heads, p.n_q, p.n_kv),
            "scale": p.d**-0.5,
            **p.band.keywords(),
            "softcap": SOFTCAP if f.softcap else 0.0,
            "dropout_p": DROPOUT_P if f.dropout else 0.0,
            "seed": seed,
            "offset": 0,
            **extras,
        },
    )
