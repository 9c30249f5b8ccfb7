"""Correctness cases of attention as data, for the interpreter on a CPU and for a real GPU alike.

Inputs lie inside storage that is poisoned with NaN on every side, in the memory layout that the case names; the output lies inside
storage filled with a mark, so that a write beside it shows.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from flashtune.core.problems import reference
from flashtune.core.problems.band import Alignment, Band
from flashtune.core.problems.dtypes import DType, output_dtype
from flashtune.core.problems.parameters import PER_HEAD, PER_HEAD_FLAGS, CallParameters, per_head_words
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.pytorch.dtypes import TORCH_DTYPES
from flashtune.tuner.verify.inputs import Inputs

Layout = Literal["heads_first", "tokens_first", "packed", "gapped", "columns", "shared_batch", "far_heads", "far_rows"]
"""How q, k and v lie in memory: (B, H, N, D); (B, N, H, D); that with q, k and v of a token side by side; rows with gaps between them;
(B, H, D, N); one batch expanded to all; heads 2^31 elements apart; rows 2^27 elements apart. The last two take 6 GB, of which a CPU
that gives out memory on first use touches little."""

MaskForm = Literal["full", "heads", "rows", "keys"]
"""What of a mask is stored: (B, H, N_q, N_kv), (1, H, N_q, N_kv), (B, 1, N_q, 1) or (B, 1, 1, N_kv); the rest is expanded."""

MARK = 77.0
"""What the memory beside the output holds."""

GAP = 16
"""Poisoned elements around a tensor in each dimension that its layout pads: a multiple of 16 bytes for every type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """One call: a problem, how its tensors lie in memory, and what its run-time arguments are."""

    name: str
    problem: Problem
    layout: Layout = "heads_first"
    mask_form: MaskForm = "full"
    scale: float | None = None
    softcap: float = 5.0
    dropout_p: float = 0.3
    seed: int = 1234
    offset: int = 0


def _problem(
    n_q: int,
    n_kv: int,
    d: int,
    features: Features | None = None,
    *,
    d_v: int = 0,
    dtype: DType = "fp16",
    batch: int = 1,
    heads: tuple[int, int] | None = None,
) -> Problem:
    """One head where the case isn't about what heads have of their own: every head costs the interpreter as much again."""
    f = features or Features()
    own = f.mask != "none" or f.dropout or dtype == "fp8" or any(getattr(f, flag) for flag in PER_HEAD_FLAGS.values())
    heads = heads or ((2, 2) if own or batch > 1 else (1, 1))
    return Problem(batch=batch, heads=heads[0], kv_heads=heads[1], n_q=n_q, n_kv=n_kv, d=d, d_v=d_v or d, dtype=dtype, features=f)


_CORNER: Alignment = "bottom_right"

CASES: tuple[AttentionCase, ...] = (
    AttentionCase(name="even", problem=_problem(128, 128, 32, heads=(2, 2))),
    AttentionCase(name="ragged", problem=_problem(77, 93, 32)),
    AttentionCase(name="one-query-one-key", problem=_problem(1, 1, 16)),
    AttentionCase(name="one-query", problem=_problem(1, 130, 32)),
    AttentionCase(name="fewer-keys-than-a-block", problem=_problem(70, 5, 32)),
    AttentionCase(name="fp32", problem=_problem(65, 67, 32, dtype="fp32")),
    # The interpreter multiplies the bit patterns of bf16 operands, so kernels refuse these there.
    AttentionCase(name="bf16", problem=_problem(77, 93, 32, dtype="bf16")),
    AttentionCase(name="bf16-causal", problem=_problem(150, 130, 64, Features(causal=True), dtype="bf16")),
    AttentionCase(name="tf32", problem=_problem(65, 67, 32, Features(tf32=True), dtype="fp32")),
    AttentionCase(name="odd-head-sizes", problem=_problem(40, 50, 40, d_v=24)),
    AttentionCase(name="tiny-head-sizes", problem=_problem(40, 50, 8, d_v=8)),
    AttentionCase(name="wide-values", problem=_problem(40, 50, 16, d_v=72)),
    AttentionCase(name="gqa", problem=_problem(50, 60, 16, batch=2, heads=(6, 2))),
    AttentionCase(name="mqa", problem=_problem(50, 60, 16, Features(causal=True), heads=(4, 1))),
    AttentionCase(name="tokens-first", problem=_problem(50, 60, 32, batch=2), layout="tokens_first"),
    AttentionCase(name="packed", problem=_problem(60, 60, 32, Features(causal=True), batch=2), layout="packed"),
    AttentionCase(name="gapped-rows", problem=_problem(50, 60, 24, d_v=40, batch=2), layout="gapped"),
    AttentionCase(name="columns", problem=_problem(50, 60, 32, batch=2), layout="columns"),
    AttentionCase(name="shared-batch", problem=_problem(50, 60, 32, batch=2), layout="shared_batch"),
    AttentionCase(name="far-heads", problem=_problem(40, 50, 16, heads=(2, 2)), layout="far_heads"),
    AttentionCase(name="far-rows", problem=_problem(20, 20, 16), layout="far_rows"),
    AttentionCase(name="causal", problem=_problem(150, 150, 32, Features(causal=True))),
    AttentionCase(name="causal-more-keys", problem=_problem(60, 150, 16, Features(causal=True))),
    AttentionCase(name="causal-fewer-keys", problem=_problem(150, 60, 16, Features(causal=True))),
    AttentionCase(name="causal-corner-more-keys", problem=_problem(60, 150, 16, Features(causal=True, alignment=_CORNER))),
    # The first 90 rows see nothing.
    AttentionCase(name="causal-corner-empty-rows", problem=_problem(150, 60, 16, Features(causal=True, alignment=_CORNER))),
    AttentionCase(name="causal-fp32", problem=_problem(90, 90, 16, Features(causal=True), dtype="fp32")),
    AttentionCase(name="window", problem=_problem(200, 200, 16, Features(window=(20, 5)))),
    AttentionCase(name="window-left-only", problem=_problem(150, 150, 16, Features(window=(20, None)))),
    AttentionCase(name="window-right-only", problem=_problem(150, 150, 16, Features(window=(None, 20)))),
    AttentionCase(name="window-of-one", problem=_problem(90, 90, 16, Features(window=(0, 0)))),
    AttentionCase(name="window-wider-than-all", problem=_problem(90, 90, 16, Features(window=(1000, 2**31)))),
    AttentionCase(name="window-causal", problem=_problem(210, 210, 16, Features(causal=True, window=(70, 0)))),
    # Rows from 80 on see nothing.
    AttentionCase(name="window-empty-rows", problem=_problem(200, 60, 16, Features(window=(20, 10)))),
    AttentionCase(name="window-corner", problem=_problem(200, 60, 16, Features(window=(20, 10), alignment=_CORNER))),
    AttentionCase(name="bool-mask", problem=_problem(90, 100, 16, Features(mask="bool"))),
    AttentionCase(name="bool-mask-over-keys", problem=_problem(90, 100, 16, Features(mask="bool"), batch=2), mask_form="keys"),
    AttentionCase(name="bool-mask-over-rows", problem=_problem(90, 100, 16, Features(mask="bool")), mask_form="rows"),
    AttentionCase(name="bool-mask-causal", problem=_problem(90, 100, 16, Features(mask="bool", causal=True)), mask_form="heads"),
    AttentionCase(name="bias", problem=_problem(90, 100, 16, Features(mask="bias"), batch=2)),
    AttentionCase(name="bias-over-keys", problem=_problem(90, 100, 16, Features(mask="bias")), mask_form="keys"),
    AttentionCase(name="bias-window", problem=_problem(90, 100, 16, Features(mask="bias", window=(30, 30))), mask_form="heads"),
    AttentionCase(name="softcap", problem=_problem(90, 100, 16, Features(softcap=True))),
    AttentionCase(name="softcap-fp32", problem=_problem(90, 100, 16, Features(softcap=True), dtype="fp32"), softcap=50.0),
    AttentionCase(name="softcap-saturated", problem=_problem(50, 60, 16, Features(softcap=True)), softcap=0.01, scale=10.0),
    AttentionCase(name="softcap-bias-causal", problem=_problem(90, 100, 16, Features(softcap=True, mask="bias", causal=True))),
    AttentionCase(name="dropout", problem=_problem(90, 100, 16, Features(dropout=True), batch=2)),
    AttentionCase(name="dropout-causal", problem=_problem(90, 90, 16, Features(dropout=True, causal=True)), seed=-3, offset=2**32 - 1),
    AttentionCase(name="dropout-wide-seed", problem=_problem(50, 60, 16, Features(dropout=True)), seed=2**63 + 5, offset=7),
    AttentionCase(name="dropout-nothing", problem=_problem(50, 60, 16, Features(dropout=True)), dropout_p=0.0),
    AttentionCase(
        name="everything",
        problem=_problem(
            130, 110, 24, Features(causal=True, window=(40, 0), mask="bool", dropout=True, softcap=True), d_v=40, heads=(4, 2)
        ),
        layout="tokens_first",
        mask_form="keys",
    ),
    AttentionCase(name="alibi", problem=_problem(90, 100, 16, Features(alibi=True), batch=2)),
    AttentionCase(name="alibi-fp32", problem=_problem(90, 70, 16, Features(alibi=True), dtype="fp32")),
    AttentionCase(name="alibi-corner-more-keys", problem=_problem(60, 150, 16, Features(alibi=True, alignment=_CORNER))),
    AttentionCase(name="alibi-corner-fewer-keys", problem=_problem(150, 60, 16, Features(alibi=True, alignment=_CORNER))),
    AttentionCase(name="alibi-causal", problem=_problem(150, 150, 16, Features(alibi=True, causal=True), batch=2, heads=(4, 2))),
    AttentionCase(name="alibi-causal-corner", problem=_problem(60, 150, 16, Features(alibi=True, causal=True, alignment=_CORNER))),
    AttentionCase(name="alibi-causal-corner-empty", problem=_problem(150, 60, 16, Features(alibi=True, causal=True, alignment=_CORNER))),
    AttentionCase(name="alibi-window", problem=_problem(200, 200, 16, Features(alibi=True, window=(20, 5)))),
    AttentionCase(name="alibi-bool-mask", problem=_problem(90, 100, 16, Features(alibi=True, mask="bool"))),
    AttentionCase(name="alibi-bias-softcap", problem=_problem(90, 100, 16, Features(alibi=True, mask="bias", softcap=True))),
    AttentionCase(name="alibi-dropout", problem=_problem(90, 100, 16, Features(alibi=True, dropout=True)), layout="tokens_first"),
    AttentionCase(name="alibi-negative-scale", problem=_problem(50, 60, 16, Features(alibi=True)), scale=-0.25),
    AttentionCase(name="fp8", problem=_problem(128, 128, 32, dtype="fp8", batch=2)),
    AttentionCase(name="fp8-ragged", problem=_problem(77, 93, 48, d_v=80, dtype="fp8")),
    AttentionCase(name="fp8-gqa-causal", problem=_problem(90, 100, 16, Features(causal=True), dtype="fp8", batch=2, heads=(4, 2))),
    AttentionCase(name="fp8-packed", problem=_problem(60, 60, 32, dtype="fp8", batch=2), layout="packed"),
    AttentionCase(name="fp8-negative-scale", problem=_problem(50, 60, 16, Features(causal=True), dtype="fp8"), scale=-0.25),
    AttentionCase(name="fp8-softcap-bias", problem=_problem(90, 100, 16, Features(softcap=True, mask="bias"), dtype="fp8")),
    AttentionCase(
        name="fp8-everything",
        problem=_problem(
            130,
            110,
            32,
            Features(alibi=True, causal=True, window=(40, 0), mask="bool", dropout=True, softcap=True),
            d_v=48,
            dtype="fp8",
            heads=(4, 2),
        ),
        layout="tokens_first",
        mask_form="keys",
    ),
    AttentionCase(name="sinks", problem=_problem(50, 60, 16, Features(sinks=True), batch=2, heads=(6, 2))),
    # The first 30 rows see nothing but their sink.
    AttentionCase(name="sinks-empty-rows", problem=_problem(70, 40, 16, Features(sinks=True, causal=True, alignment=_CORNER))),
    AttentionCase(
        name="sinks-everything",
        problem=_problem(
            50,
            60,
            16,
            Features(sinks=True, alibi=True, causal=True, window=(40, 0), mask="bool", dropout=True, softcap=True),
            dtype="fp8",
            heads=(4, 2),
        ),
    ),
    AttentionCase(name="sinks-bias", problem=_problem(40, 50, 16, Features(sinks=True, mask="bias"), heads=(4, 2)), mask_form="rows"),
    AttentionCase(name="large-scores", problem=_problem(50, 60, 16), scale=100.0),
    AttentionCase(name="negative-scale", problem=_problem(50, 60, 16, Features(causal=True)), scale=-0.25),
    AttentionCase(name="zero-scale", problem=_problem(50, 60, 16, Features(mask="bool")), scale=0.0),
)


def make_case(case: AttentionCase, device: torch.device | str) -> Inputs:
    """The tensors and keyword arguments of `case`, the same values on every device."""
    p = case.problem
    generator = torch.Generator().manual_seed(case.seed & 0xFFFF)
    dtype, out_dtype = TORCH_DTYPES[p.dtype], TORCH_DTYPES[output_dtype(p.dtype)]

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q = normal((p.batch, p.heads, p.n_q, p.d))
    k = normal((p.batch, p.kv_heads, p.n_kv, p.d))
    v = normal((p.batch, p.kv_heads, p.n_kv, p.d_v))
    q, k, v = _laid_out([q, k, v], case.layout)
    storage = torch.full((p.batch, p.n_q + 1, p.heads, p.d_v + 3), MARK, dtype=out_dtype, device=device)
    out = storage[:, : p.n_q, :, : p.d_v].transpose(1, 2)
    parameters = CallParameters(
        mask=_mask(case, generator, out_dtype, device),
        scale=p.d**-0.5 if case.scale is None else case.scale,
        band=p.band,
        softcap=case.softcap if p.features.softcap else 0.0,
        dropout_p=case.dropout_p if p.features.dropout else 0.0,
        seed=case.seed,
        offset=case.offset,
    )
    if p.features.alibi:
        # Heads outermost in memory.
        parameters = replace(parameters, slopes=torch.rand((p.heads, p.batch), generator=generator).to(device).T)
    if p.dtype == "fp8":
        # One factor for each head of each batch, one for each head, and one for all.
        sizes = [((p.batch, p.heads), p.heads), ((1, p.kv_heads), p.kv_heads), ((1, 1), p.kv_heads)]
        qf, kf, vf = (torch.rand(stored, generator=generator).to(device).add(0.5).expand(p.batch, heads) for stored, heads in sizes)
        parameters = replace(parameters, descale=(qf, kf, vf))
    if p.features.sinks:
        # Every other number of a parameter in the output's type: none at all, one far above all scores, and the rest as heavy as all keys.
        logits = torch.randn(2 * p.heads, generator=generator) + math.log(p.n_kv)
        logits[0], logits[2] = float("-inf"), 9.0
        parameters = replace(parameters, sinks=logits.to(device, out_dtype)[::2].expand(p.batch, p.heads))
    lse = torch.empty((p.batch, p.heads, p.n_q), dtype=torch.float32, device=device)
    return Inputs(problem=p, operands={"q": q, "k": k, "v": v, "out": out, "lse": lse}, parameters=parameters)


def written_beside(inputs: Inputs) -> bool:
    """True if a launch wrote to the memory around the output of `make_case`."""
    base = inputs.out._base
    assert base is not None
    return int((base == MARK).sum()) != base.numel() - inputs.out.numel() + int((inputs.out == MARK).sum())


def _laid_out(tensors: list[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    if layout == "packed":
        joined = torch.stack([x.transpose(1, 2) for x in tensors], 2)
        return [x.transpose(1, 2) for x in _poisoned(joined, (1,)).unbind(2)]
    if layout == "shared_batch":
        return [x[:1].expand(x.shape) for x in tensors]
    if layout in ("far_heads", "far_rows"):
        return _far_apart(tensors, (1, 2**31, 64 * 3, 1) if layout == "far_heads" else (1, 1, 2**27, 1))
    if layout == "tokens_first":
        return [_poisoned(x.transpose(1, 2), (1,)).transpose(1, 2) for x in tensors]
    if layout == "columns":
        return [_poisoned(x.transpose(2, 3), (3,)).transpose(2, 3) for x in tensors]
    return [_poisoned(x, (2, 3) if layout == "gapped" else (2,)) for x in tensors]


def _far_apart(tensors: list[torch.Tensor], strides: tuple[int, int, int, int]) -> list[torch.Tensor]:
    """Copies of q, k and v (of one batch, D <= 64) side by side in one storage, 64 elements apart."""
    extent = max(sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) for x in tensors) + 64 * 3
    storage = torch.empty(extent, dtype=tensors[0].dtype, device=tensors[0].device)
    return [storage.as_strided(x.shape, strides, 64 * place).copy_(x) for place, x in enumerate(tensors)]


def _poisoned(x: torch.Tensor, padded: tuple[int, ...]) -> torch.Tensor:
    """A copy of `x` inside storage that goes on with NaN before and after it in the dimensions `padded`."""
    shape = [size + 2 * GAP * (dim in padded) for dim, size in enumerate(x.shape)]
    storage = torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)
    inside = storage[tuple(slice(GAP, GAP + size) if dim in padded else slice(None) for dim, size in enumerate(x.shape))]
    return inside.copy_(x)


def _mask(case: AttentionCase, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor | None:
    """A mask of the case's form, expanded; some rows of it hide every key where the form lets them."""
    p = case.problem
    if p.features.mask == "none":
        return None
    shape = {
        "full": (p.batch, p.heads, p.n_q, p.n_kv),
        "heads": (1, p.heads, p.n_q, p.n_kv),
        "rows": (p.batch, 1, p.n_q, 1),
        "keys": (p.batch, 1, 1, p.n_kv),
    }[case.mask_form]
    attends = torch.rand(shape, generator=generator) < 0.7
    if case.mask_form in ("full", "heads"):
        attends[..., 3, :] = False
        attends[..., -1, :] = False
    mask = attends if p.features.mask == "bool" else torch.randn(shape, generator=generator).to(dtype).masked_fill(~attends, float("-inf"))
    return mask.to(device).expand(p.batch, p.heads, p.n_q, p.n_kv)


def band_of(words: dict[str, Any]) -> Band:
    """The band that a launch's keyword arguments say."""
    left, right = (None if words[side] < 0 else words[side] for side in ("window_left", "window_right"))
    return Band(left=left, right=right, diagonal=words["diagonal"])


def by_the_book(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, **words: Any) -> None:
    """A right launch of any problem, in float32 by the reference."""
    keep = None
    if words["dropout_p"]:
        keep = reference.dropout_keep(words["seed"], words["offset"], q.shape[0], q.shape[1], q.shape[2], k.shape[2], words["dropout_p"])
    per_head = per_head_words(dict.fromkeys(PER_HEAD))
    shared = {name: words.get(name) for name in ("mask", "scale", "softcap", "dropout_p", *per_head)}
    found = reference.attention(q, k, v, band=band_of(words), keep=keep, dtype=torch.float32, **shared)
    out.copy_(found[0])
    lse.copy_(found[1])
