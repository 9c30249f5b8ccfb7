"""`attention` under torch.compile: a kernel is one opaque operator of the graph, the framework's path is traced like any other code."""

from typing import Any

import torch

from flashtune.core import reference
from flashtune.dispatch import framework
from flashtune.dispatch.arguments import parse, seed_bits
from flashtune.dispatch.per_head import PerHead
from flashtune.dispatch.plans import out_strides


def traced(arguments: tuple[Any, ...], extras: dict[str, Any], *, kernels: bool) -> Any:
    """The call while a compiler traces it, without a graph break. `kernels` says whether a kernel may serve."""
    request = parse(*arguments, **extras)
    query, key, value, attn_mask = arguments[:4]
    seed, per_head = extras["seed"], extras["per_head"]
    # Operators take signed integers; seeds wrap.
    bits = None if seed is None else (seed_bits(seed) + 2**63) % 2**64 - 2**63
    if kernels:
        sides = request.band.keywords()
        out, lse = torch.ops.flashtune.attention(
            query,
            key,
            value,
            attn_mask,
            request.dropout_p,
            request.scale,
            arguments[7],
            sides["window_left"],
            sides["window_right"],
            request.softcap,
            extras["causal_alignment"],
            request.return_lse,
            bits,
            extras["allow_tf32"],
            *_tensors(per_head or PerHead(), query.device),
        )
        return (out, lse) if request.return_lse else out
    keep = None
    if request.dropout_p and not request.fused_by_torch:
        sizes = (request.batch, request.heads, request.n_q, request.n_kv)
        if bits is None:
            keep = torch.rand(sizes, device=request.device) >= request.dropout_p
        else:
            keep = torch.ops.flashtune.dropout_keep(query, bits, *sizes, request.dropout_p)
    out, lse = framework.attention(request, query, key, value, attn_mask, keep, per_head)
    return (out, lse) if request.return_lse else out


def _tensors(per_head: PerHead, device: torch.device) -> list[torch.Tensor | None]:
    """What was given per head as the operator takes it: numbers become tensors."""
    return [
        x if x is None or isinstance(x, torch.Tensor) else torch.full((), x, dtype=torch.float32, device=device) for x in per_head.given
    ]


@torch.library.custom_op(
    "flashtune::attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, float scale, bool enable_gqa, "
    "int left, int right, float softcap, str causal_alignment, bool return_lse, int? seed, bool allow_tf32, "
    "Tensor? alibi_slopes, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    scale: float,
    enable_gqa: bool,
    left: int,
    right: int,
    softcap: float,
    causal_alignment: str,
    return_lse: bool,
    seed: int | None,
    allow_tf32: bool,
    alibi_slopes: torch.Tensor | None,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager call; `window` says all that `is_causal` would. Without `return_lse` the second output is empty."""
    from flashtune.dispatch.api import attention

    served = attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        False,
        scale,
        enable_gqa,
        window=(left, right),
        softcap=softcap,
        causal_alignment=causal_alignment,
        return_lse=return_lse,
        seed=seed,
        allow_tf32=allow_tf32,
        alibi_slopes=alibi_slopes,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    out, lse = served if return_lse else (served, query.new_empty(0, dtype=torch.float32))
    # What the graph was promised; the framework's own backends choose otherwise.
    promised = _promised_out(query, key, value, enable_gqa)
    return out if out.stride() == promised.stride() else promised.copy_(out), lse


@_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    scale: float,
    enable_gqa: bool,
    left: int,
    right: int,
    softcap: float,
    causal_alignment: str,
    return_lse: bool,
    seed: int | None,
    allow_tf32: bool,
    alibi_slopes: torch.Tensor | None,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = _promised_out(query, key, value, enable_gqa)
    return out, query.new_empty(out.shape[:-1] if return_lse else (0,), dtype=torch.float32)


def _promised_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
    """An output as kernels lay it out."""
    request = parse(query, key, value, enable_gqa=enable_gqa)
    q = request.views(query, key, value)[0]
    shape = (request.batch, request.heads, request.n_q, request.d_v)
    return request.restored(torch.empty_strided(shape, out_strides(shape, q.stride()), dtype=request.out_dtype, device=query.device))


@torch.library.custom_op(
    "flashtune::dropout_keep",
    mutates_args=(),
    schema="(Tensor like, int seed, int batch, int heads, int n_q, int n_kv, float p) -> Tensor",
)
def _dropout_keep(like: torch.Tensor, seed: int, batch: int, heads: int, n_q: int, n_kv: int, p: float) -> torch.Tensor:
    """The reference's mask on the device of `like`; traced, its loop over heads would be unrolled."""
    return reference.dropout_keep(seed % 2**64, 0, batch, heads, n_q, n_kv, p, device=like.device)


@_dropout_keep.register_fake
def _(like: torch.Tensor, seed: int, batch: int, heads: int, n_q: int, n_kv: int, p: float) -> torch.Tensor:
    return like.new_empty((batch, heads, n_q, n_kv), dtype=torch.bool)
