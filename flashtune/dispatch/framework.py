"""The framework's path: torch's own attention where it has the features, a differentiable composite where it lacks them."""

import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtune.core import reference
from flashtune.core.torch_attention import sdpa
from flashtune.dispatch.call import Call, Descale, PerHead

Outputs = tuple[torch.Tensor, torch.Tensor | None]


def takes_as_it_is(call: Call) -> bool:
    """Whether torch's function serves a call with the very arguments of `attention`, but for a mask that needs a gradient."""
    mask = call.mask_kind == "none" or call.dtype != torch.float64
    return call.fused_by_torch and call.identity and call.scale > 0.0 and mask and not call.empty


def attention(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    keep: torch.Tensor | None,
    per_head: PerHead | None,
) -> Outputs:
    """Serve `call` in torch operations, differentiable: output and, when asked for, the float32 LSE.

    Plain, causal and masked attention and dropout from torch's own generator are one call of F.scaled_dot_product_attention. Other
    bands become a boolean mask (or go into the bias) first, ALiBi becomes a bias, and fp8 inputs become bf16. Softcap, LSE and seeded
    dropout run the reference in float32 (float64 for float64 inputs), whose scores take B Hq N_q N_kv elements of memory; `keep`
    (B, Hq, N_q, N_kv) is dropout's mask there.
    """
    q, k, v = call.views(q, k, v)
    mask = call.small_mask(mask)
    slopes = None if per_head is None else per_head.slopes(call)
    descale = None
    if call.factors is not None:
        numbers = call.number_factors()
        descale = numbers if per_head is None else per_head.descale(call, numbers)
    if call.softcap or call.return_lse or keep is not None:
        out, lse = _composite(call, q, k, v, mask, keep, slopes, descale)
        return call.restored(out), call.restored(lse) if call.return_lse else None
    if descale is not None:
        q, k, v = ((x.float() * factor[..., None, None]).to(call.out_dtype) for x, factor in zip((q, k, v), descale, strict=True))
    if slopes is not None:
        # Wide, since the 16-bit types hold no large distances.
        bias = reference.alibi(slopes.to(_wide(call)), call.n_q, call.n_kv, call.band.diagonal)
        mask = reference.joined(bias, mask)
    # A tracer may hold symbolic truth values, which torch refuses; a branch on one settles it.
    causal = True if call.band.torch_causal and mask is None else False  # noqa: SIM210
    shared = True if call.shared else False  # noqa: SIM210
    scale = call.scale
    if scale <= 0.0:
        # Torch's fused backends assume a positive one; its CPU's gives NaN in causal rows otherwise.
        q, scale = (-q, -scale) if scale < 0.0 else (q * 0.0, 1.0)
    if call.band.bounded and not causal:
        mask = _with_band(call, mask)
    if mask is not None and mask.dtype != torch.bool and q.dtype == torch.float64:
        # Torch's fused CPU kernel reads the memory of a narrower mask as if it were float64.
        mask = mask.to(q.dtype)
    # Whatever autocast takes is in its type already, but for fp8 inputs and ALiBi's bias, which aren't to be rounded.
    with _no_autocast(call.device.type), _sound_backends(call.device, q, k, v, mask):
        out = sdpa(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=call.dropout_p,
            is_causal=causal,
            scale=scale,
            enable_gqa=shared,
        )
    return call.restored(out), None


def _with_band(call: Call, mask: torch.Tensor | None) -> torch.Tensor:
    """The mask or bias with the band put into it; (1, 1, N_q, N_kv) when there was none."""
    visible = reference.visible(call.band, call.n_q, call.n_kv, call.device)[None, None]
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else reference.joined(mask, visible)


def _wide(call: Call) -> torch.dtype:
    return torch.float64 if call.dtype == torch.float64 else torch.float32


def _composite(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    keep: torch.Tensor | None,
    slopes: torch.Tensor | None,
    descale: Descale | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float32 or float64, rounded to the output's dtype at the end."""
    # Autocast would turn the float32 products into half ones again.
    with _no_autocast(call.device.type):
        out, lse = reference.attention(
            q,
            k,
            v,
            mask=mask,
            scale=call.scale,
            band=call.band,
            softcap=call.softcap,
            keep=keep,
            dropout_p=call.dropout_p,
            slopes=slopes,
            descale=descale,
            dtype=_wide(call),
        )
    return out.to(call.out_dtype), lse.float()


def _sound_backends(
    device: torch.device, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> contextlib.AbstractContextManager[object]:
    """Keeps cuDNN from calls with a mask whose gradient is needed: its dQ can be NaN there (torch 2.11 on Hopper, pytorch #196678)."""
    if device.type != "cuda" or mask is None or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    if not any(x.requires_grad for x in (q, k, v, mask)):
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
