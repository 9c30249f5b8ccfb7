"""Checked call of `attention` without its tensors, for which a plan is made, and its per-head arguments."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.problems.band import Band
from flashtune.core.problems.parameters import FACTORS, PER_HEAD, CallParameters, per_head_words
from flashtune.core.problems.problem import MaskKind, Problem, unfit_heads
from flashtune.core.pytorch.dtypes import KERNEL_DTYPES

Outputs = tuple[Tensor, Tensor | None]
"""Output and, where it is requested, LSE."""
Returned = Tensor | tuple[Tensor, Tensor]
"""Return value of a call: its output, or (output, LSE)."""


def surely(condition: bool) -> bool:
    """Value of a comparison of sizes; under a compiler, True only where it is true of all values of symbolic sizes.

    Taking the value of a symbolic comparison would specialise the graph.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


class PerHead(NamedTuple):
    """Per-head arguments of the caller, in the order of `PER_HEAD`; tensors broadcast to (*batch_dims, H) of the call."""

    alibi_slopes: Tensor | None = None
    q_descale: Tensor | float | None = None
    k_descale: Tensor | float | None = None
    v_descale: Tensor | float | None = None
    sinks: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Arguments that are tensors."""
        return [x for x in self if isinstance(x, Tensor)]

    def resolved(self) -> "PerHead":
        """Copy in which tensors with a lazy negation (is_neg) are negated in memory."""
        return self._replace(**{name: x.resolve_neg() for name, x in zip(PER_HEAD, self, strict=True) if isinstance(x, Tensor)})

    def signature(self) -> Hashable:
        """Key for a plan: sizes, strides, dtypes and devices of tensors, values of numbers."""
        return tuple((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in self)

    def views(self, call: "Call") -> list[Tensor | None]:
        """Tensors as views (B, Hq) or (B, Hkv); None for the others."""
        counts = PER_HEAD.values()
        return [call.spread(x, getattr(call, count)) if isinstance(x, Tensor) else None for x, count in zip(self, counts, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, checked and normalised.

    Of `band`, sides that hide nothing at these sizes are dropped. `problem` is None where neither kernels nor records' providers serve: for
    float64, for heads beyond 1024, and where there is nothing to compute. `rank` is the output's number of dimensions, `batch_dims` those
    before the heads and `batch` their product. `identity` is True where q, k and v are used unchanged: 4-D, with equal batches and heads
    that need no broadcasting. `per_head` is True with any per-head argument. `factors` are numbers by which fp8 q, k and v are multiplied,
    1 for an absent one or a tensor; None for other dtypes.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device
    problem: Problem | None
    scale: float
    band: Band
    softcap: float
    per_head: bool
    factors: tuple[float, float, float] | None
    dropout_p: float
    deterministic: bool
    seeded: bool
    return_lse: bool
    mask_kind: MaskKind
    rank: int
    batch_dims: tuple[int, ...]
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    d: int
    d_v: int
    identity: bool

    @property
    def shared(self) -> bool:
        """True where several query heads share a key head."""
        # A tracer may hold a size as a tensor, whose comparison is one.
        return bool(self.heads != self.kv_heads)

    @property
    def empty(self) -> bool:
        """True where there is nothing to compute: no query, or no key to attend to."""
        return 0 in (self.batch, self.heads, self.n_q, self.n_kv)

    @property
    def large(self) -> bool:
        """True where heads are larger than kernels take, though others may take them."""
        return self.problem is not None and unfit_heads(self.d, self.d_v) is not None

    @property
    def out_of_reach(self) -> str | None:
        """Reason why no kernel can serve a call like this, whatever was measured; None where one might."""
        if self.empty:
            return "there is nothing to compute"
        if self.dtype in KERNEL_DTYPES and (self.problem is None or self.large):
            return unfit_heads(self.d, self.d_v)
        if self.problem is None:
            return f"kernels take float16, bfloat16, float32 and float8_e4m3fn, not {str(self.dtype).removeprefix('torch.')}"
        if self.problem.dtype == "bf16" and self.device.type == "cpu":
            return "Triton's interpreter can't multiply bfloat16"
        return None

    @property
    def fused_by_torch(self) -> bool:
        """True where one call of PyTorch's own attention serves this, with no mask built for it."""
        band = self.torch_causal and self.mask_kind == "none" if self.band.bounded else True
        return band and not (self.composite or self.per_head or self.factors is not None)

    @property
    def torch_causal(self) -> bool:
        """True where the band is exactly PyTorch's `is_causal`."""
        return self.band.left is None and self.band.right == 0 and surely(self.band.diagonal == 0)

    @property
    def composite(self) -> bool:
        """True where PyTorch computes this by operations on all scores, not by one of its kernels."""
        return bool(self.softcap or self.return_lse or (self.dropout_p and self.seeded))

    @property
    def torch_draws(self) -> bool:
        """True where PyTorch's own attention, if it serves this, samples dropout's mask itself: other bits than kernels sample."""
        return bool(self.dropout_p) and not self.composite

    def views(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, Hq, N_q, D), k (B, Hkv, N_kv, D), v (B, Hkv, N_kv, D_v): views, save for batch dimensions that can't be merged."""
        if self.identity:
            return q, k, v
        return self._merged(q, self.heads), self._merged(k, self.kv_heads), self._merged(v, self.kv_heads)

    def _merged(self, x: Tensor, heads: int) -> Tensor:
        """`x` as (B, heads, rows, columns): batch dimensions are broadcast and merged, heads broadcast or repeated."""
        while x.dim() < len(self.batch_dims) + 3:
            x = x[None]
        if not self.batch_dims:
            x = x[None]
        else:
            x = x.expand(*self.batch_dims, *x.shape[-3:])
            x = x if len(self.batch_dims) == 1 else x.reshape(self.batch, *x.shape[-3:])
        if x.shape[1] == heads:
            return x
        return x.expand(-1, heads, -1, -1) if x.shape[1] == 1 else x.repeat_interleave(heads // x.shape[1], 1)

    def small_mask(self, mask: Tensor | None) -> Tensor | None:
        """Mask as 4-D that broadcasts to (B, Hq, N_q, N_kv); only where several batch dimensions are merged these are expanded."""
        if mask is None:
            return None
        while mask.dim() < max(4, len(self.batch_dims) + 3):
            mask = mask[None]
        if mask.dim() == 4:
            return mask
        *batch, heads, rows, columns = mask.shape
        if math.prod(batch) == 1:
            return mask.reshape(1, heads, rows, columns)
        return mask.expand(*self.batch_dims, heads, rows, columns).reshape(self.batch, heads, rows, columns)

    def full_mask(self, mask: Tensor | None) -> Tensor | None:
        """Mask as a view expanded to (B, Hq, N_q, N_kv), with stride 0 where it is broadcast."""
        small = self.small_mask(mask)
        return None if small is None else small.expand(self.batch, self.heads, self.n_q, self.n_kv)

    def spread(self, x: Tensor, heads: int) -> Tensor:
        """Per-head numbers that broadcast to (..., heads) as (B, heads), not expanded in memory with a single batch dimension."""
        x = x.expand(*self.batch_dims, heads)
        return x if len(self.batch_dims) == 1 else x.reshape(self.batch, heads)

    def parameters(self, mask: Tensor | None, per_head: PerHead | None) -> CallParameters:
        """Parameters of a launch and of the reference beside the operands, but for dropout's seed; `mask` is 4-D."""
        given = dict(zip(PER_HEAD, (per_head or PerHead()).views(self), strict=True))
        for name, factor in zip(FACTORS, self.factors or (), strict=False):
            if given[name] is None:
                number = torch.full((), factor, dtype=torch.float32, device=self.device)
                given[name] = number.expand(self.batch, getattr(self, PER_HEAD[name]))
        return CallParameters(
            scale=self.scale,
            band=self.band,
            mask=mask,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            **per_head_words({name: x for name, x in given.items() if x is not None}),
        )

    def restored(self, x: Tensor) -> Tensor:
        """Output or LSE (B, Hq, ...) with the caller's own leading dimensions."""
        if self.rank == 4:
            return x
        if self.rank == 2:
            return x[0, 0]
        return x[0] if self.rank == 3 else x.view(*self.batch_dims, *x.shape[1:])


def trained_as(problem: Problem, requested: Sequence[str] = ()) -> Problem:
    """Backward of a forward problem; `requested` are requested gradients beside dQ, dK and dV (`flashtune.core.problems.problem.ASKED`)."""
    return replace(problem, direction="bwd", features=replace(problem.features.asking(requested), latent=False))
