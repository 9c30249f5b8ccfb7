"""Calls that PyTorch serves: by its own attention where it has the features, by a differentiable composite where it lacks them."""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtune.core.problems import reference
from flashtune.core.problems.parameters import CallParameters
from flashtune.core.pytorch.attention import MOST_HEADS, autocasting, differentiable_sdpa, readable, sound_backends, transformed
from flashtune.core.pytorch.private import sdpa, vmapped
from flashtune.dispatch.call.call import Call, Outputs, PerHead
from flashtune.dispatch.plans.plan import capturing, random_bits, relaxed

FEW_SCORES = 2**20
"""Most scores for which PyTorch's math backend computes gradients, as PyTorch itself would choose."""


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class TorchPlan:
    """Plan that runs PyTorch's own attention, or the composite for features that it lacks.

    `direct` is PyTorch's function with the call's options, where it takes the call unchanged; else None.
    """

    call: Call
    direct: Callable[..., Tensor] | None = None

    @classmethod
    def of(cls, call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> "TorchPlan":
        """Plan for a call with these tensors, or others with the same memory layout."""
        if not takes_as_it_is(call, query, key, value, mask):
            return cls(call=call)
        requested = {"dropout_p": call.dropout_p, "is_causal": call.torch_causal, "scale": call.scale, "enable_gqa": call.shared}
        usual = {"dropout_p": 0.0, "is_causal": False, "scale": 1.0 / math.sqrt(call.d or 1), "enable_gqa": False}
        # PyTorch's argument parser takes time for each, so that defaults are left out.
        kwargs: dict[str, Any] = {name: value for name, value in requested.items() if value != usual[name]}
        # On a GPU the function whose backward takes gradients of any layout, which PyTorch's doesn't.
        return cls(call=call, direct=functools.partial(differentiable_sdpa if call.device.type == "cuda" else sdpa, **kwargs))

    def build(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, per_head: PerHead | None) -> None:
        """Nothing to build."""

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: int | None, per_head: PerHead | None) -> Outputs:
        """Output and, where `return_lse` is set, LSE."""
        call = self.call
        if (function := self.direct) is not None:
            if mask is None:
                return function(query, key, value), None
            # One line with gradients and without, since torch.jit.trace compares source lines.
            with sound_backends_of(call, query, key, value, mask):
                return function(query, key, value, as_bias(mask, query.dtype)), None
        keep = None
        if call.dropout_p and not call.torch_draws:
            sizes = (call.batch, call.heads, call.n_q, call.n_kv)
            if seed is None and capturing(call.device):
                # The generator's position can't be read under capture, but PyTorch's own operations sample anew at each replay.
                keep = torch.rand(sizes, device=call.device) >= call.dropout_p
            else:
                keep = reference.dropout_keep(*random_bits(seed, call.device), *sizes, call.dropout_p, device=call.device)
        return attention_by_torch(call, query, key, value, mask, keep, per_head)

    def captured(self, *given: Any) -> Outputs:
        """Outputs of unseeded dropout under capture, whose replays sample anew: PyTorch registers its generator with the graph."""
        return relaxed(self.run, *given)


def takes_as_it_is(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """True where PyTorch's function serves a call with the unchanged arguments of `attention`."""
    # PyTorch's fused CPU kernel indexes rows and columns of a mask, so that it needs two dimensions.
    fits = mask is None or (call.dtype != torch.float64 and mask.dim() > 1)
    fits = fits and call.fused_by_torch and not call.deterministic and call.identity and call.scale > 0.0
    if not fits or call.empty or not call.d_v or call.dropout_p == 1.0 or transformed():
        return False
    if call.device.type != "cuda":
        return True
    alone = mask is not None and mask.requires_grad and not any(x.requires_grad for x in (q, k, v))
    if alone or not call.d or max(call.batch, call.heads) > MOST_HEADS or (mask is not None and mask.dtype not in (torch.bool, q.dtype)):
        return False
    return all(made is x for made, x in zip(readable_inputs(q, k, v, mask), (q, k, v, mask), strict=True))


def readable_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The inputs in memory layouts that PyTorch's CUDA backends read correctly; copies where they have to be."""
    if mask is not None and mask.device.type == "cuda":
        # PyTorch pads a mask's rows, of one column, too, before it expands them.
        wide = mask if mask.shape[-1] == k.shape[2] else mask.expand(*mask.shape[:-1], k.shape[2])
        mask = readable(wide, repeats=True)
    return readable(q), readable(k), readable(v), mask


def as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean CUDA mask as the bias that PyTorch makes of it, but with -inf for hidden pairs.

    With the smallest number in their place cuDNN gives the mean of the values in rows that see no key (PyTorch 2.11).
    """
    return mask.to(dtype).log() if mask is not None and mask.dtype == torch.bool and mask.is_cuda else mask


def attention_by_torch(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor | None, per_head: PerHead | None
) -> Outputs:
    """Serve `call` in PyTorch operations, differentiable: output and, where `return_lse` is set, the float32 LSE.

    Plain, causal and masked attention and dropout from PyTorch's own generator are one call of F.scaled_dot_product_attention. Other bands
    become a boolean mask (or go into the bias) first, ALiBi becomes a bias, and fp8 inputs become bf16. Sinks become one more key (see
    `_with_sinks`), so that memory stays that of q, k and v. Softcap, LSE and seeded dropout run the reference in float32 (float64 for
    float64 inputs), whose scores take B Hq N_q N_kv elements of memory; `keep` (B, Hq, N_q, N_kv) is dropout's mask there.
    """
    mask = call.small_mask(mask)
    q, k, v = call.views(q, k, v)
    parameters = call.parameters(mask, per_head)
    if (call.empty or not call.d_v or call.dropout_p == 1.0) and not call.return_lse:
        zeros = q.new_zeros((call.batch, call.heads, call.n_q, call.d_v), dtype=call.out_dtype)
        return call.restored(_alongside(zeros, q, k, v, mask, parameters.slopes, parameters.sinks)), None
    operations = call.composite or keep is not None
    if not operations and vmapped():
        # Under vmap cuDNN gives wrong gradients, memory-efficient attention refuses its own LSE or an unbatched mask, and PyTorch's math
        # adds a batched mask in place to unbatched scores (PyTorch 2.11).
        operations = True
        if call.dropout_p:
            keep = torch.rand((call.batch, call.heads, call.n_q, call.n_kv), device=call.device) >= call.dropout_p
    if operations:
        out, lse = _composite(call, q, k, v, parameters, keep)
        return call.restored(out), call.restored(_alongside(lse, v)) if call.return_lse else None
    return call.restored(_fused(call, q, k, v, parameters)), None


def _fused(call: Call, q: Tensor, k: Tensor, v: Tensor, parameters: CallParameters) -> Tensor:
    """Output by one call of PyTorch's attention."""
    mask, descale, slopes, sinks = parameters.mask, parameters.descale, parameters.slopes, parameters.sinks
    if descale is not None:
        q, k, v = ((x.float() * factor[..., None, None]).to(call.out_dtype) for x, factor in zip((q, k, v), descale, strict=True))
    if slopes is not None:
        # In float32 or float64, since the 16-bit types can't represent large distances.
        bias = reference.alibi(slopes.to(_wide(call)), call.n_q, call.n_kv, call.band.diagonal)
        mask = reference.joined(bias, mask)
    if mask is not None and mask.dtype not in (torch.bool, q.dtype) and (q.is_cuda or q.dtype == torch.float64):
        # PyTorch's GPU kernels take no wider mask, and its fused CPU kernel reads a narrower one's memory as if it were float64.
        wide = torch.promote_types(q.dtype, mask.dtype)
        q, k, v, mask = q.to(wide), k.to(wide), v.to(wide), mask.to(wide)
    # A tracer may hold symbolic truth values, which PyTorch refuses; a branch on one makes it a constant.
    causal = True if call.torch_causal and mask is None else False  # noqa: SIM210
    scale = call.scale
    if scale <= 0.0:
        # PyTorch's fused backends assume a positive scale; the CPU one gives NaN in causal rows otherwise.
        q, scale = (-q, -scale) if scale < 0.0 else (q * 0.0, 1.0)
    if call.band.bounded and not causal:
        seen = reference.visible(call.band, call.n_q, call.n_kv, call.device)
        mask = reference.hidden_outside(seen[None, None], mask)
    if sinks is not None:
        q, k, v, mask = _with_sinks(q, k, v, mask, sinks.to(_wide(call)) / scale, causal)
    # Inputs that autocast applies to are in its dtype already; fp8 inputs and ALiBi's bias aren't to be rounded to it.
    with no_autocast(call.device.type), sound_backends_of(call, q, k, v, mask):
        out = _sdpa(call, q, k, v, mask, is_causal=causal, scale=scale).to(call.out_dtype)
    return out if sinks is None else out[:, :, out.shape[2] - call.n_q :, : call.d_v]


def _alongside(x: Tensor, *others: Tensor | None) -> Tensor:
    """`x`, with a path in the graph that gives each of the others a gradient of zeros."""
    for other in others:
        if other is not None and other.requires_grad:
            x = x + other[..., :0].to(x.dtype).sum()
    return x


def _sdpa(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **words: Any) -> Tensor:
    """PyTorch's own attention of tensors (B, H, ...) in any memory and number: passed on as its backends take them."""
    # A branch makes a tracer's symbolic truth value a constant.
    words |= {"dropout_p": call.dropout_p, "enable_gqa": True if call.shared else False}  # noqa: SIM210
    if not q.is_cuda:
        return sdpa(q, k, v, mask, **words)
    if mask is not None and mask.requires_grad and not any(x.requires_grad for x in (q, k, v)):
        # PyTorch keeps no LSE for the gradient of a bias alone.
        q = _alongside(q, mask)
    if not call.d:
        # PyTorch's kernels write no output where the head size is 0.
        q, k = (torch.nn.functional.pad(x, (0, 8)) for x in (q, k))
    q, k, v, mask = readable_inputs(q, k, v, as_bias(mask, q.dtype))
    if torch.compiler.is_compiling() or max(q.shape[:2]) <= MOST_HEADS:
        return differentiable_sdpa(q, k, v, mask, **words)
    dim = 0 if q.shape[0] > MOST_HEADS else 1
    key_heads = max(1, MOST_HEADS * k.shape[dim] // q.shape[dim])
    sizes = key_heads * q.shape[dim] // k.shape[dim], key_heads, key_heads
    parts = [torch.split(x, size, dim) for x, size in zip((q, k, v), sizes, strict=True)]
    masks = [mask] * len(parts[0]) if mask is None or mask.shape[dim] == 1 else torch.split(mask, sizes[0], dim)
    return torch.cat([_sdpa(call, *part, **words) for part in zip(*parts, masks, strict=True)], dim)


_SINK_KEY = 256.0
"""Value in a sink's key: with it fp16 reaches sinks of 1.6e7 times the scale."""


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The call with one more key in front, whose score is the head's own of `scores` (B, Hq) for every query, and whose value is 0.

    More columns make that score, so that key heads stay shared, bands stay masks for all heads and causal calls need none: queries have the
    score there, split into parts which together have float32's digits, the key in front has `_SINK_KEY` and all others 0. A `causal` call
    gets one more query, too, since its diagonal begins at the first key. The caller cuts the additional row and columns off the output.
    """
    parts = 3 if q.dtype.itemsize == 2 else 1
    more = -(-(q.shape[3] + parts) // 8) * 8 - q.shape[3]
    rest = scores / _SINK_KEY
    # -inf times the other keys' 0 would be NaN; no score is as low as this limit.
    limit = min(torch.finfo(q.dtype).max, 1e30)
    rest = rest.clamp(-limit, limit)
    columns = []
    for _ in range(parts):
        columns.append(rest.to(q.dtype).to(rest.dtype))
        rest = rest - columns[-1]
    # Rounded after the expansion, so that the gradient of a sink is summed over its queries before it is rounded.
    beside = torch.stack(columns, -1)[:, :, None].expand(*q.shape[:3], parts).to(q.dtype)
    q = torch.nn.functional.pad(torch.cat([q, beside], -1), (0, more - parts))
    ahead = k.new_zeros(k.shape[3] + more)
    ahead[k.shape[3] : k.shape[3] + parts] = _SINK_KEY
    k = torch.cat([ahead.expand(*k.shape[:2], 1, -1), torch.nn.functional.pad(k, (0, more))], 2)
    # PyTorch's fastest kernels need equal head sizes of keys and values.
    v = torch.nn.functional.pad(v, (0, more if v.shape[3] + more == q.shape[3] else 0, 1, 0))
    if causal:
        q = torch.nn.functional.pad(q, (0, 0, 1, 0))
    if mask is not None:
        mask = mask.expand(*mask.shape[:3], k.shape[2] - 1)
        mask = torch.nn.functional.pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
    return q, k, v, mask


def _wide(call: Call) -> torch.dtype:
    return torch.float64 if call.dtype == torch.float64 else torch.float32


def _composite(call: Call, q: Tensor, k: Tensor, v: Tensor, parameters: CallParameters, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and LSE of the reference in float32 or float64, rounded to the output's dtype at the end."""
    # Autocast would turn the float32 products into 16-bit ones again.
    with no_autocast(call.device.type):
        out, lse = reference.attention(q, k, v, keep=keep, dtype=_wide(call), **parameters.formula())
    return out.to(call.out_dtype), lse.float()


_FLAGS = threading.RLock()
_ON: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def sound_backends_of(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> contextlib.AbstractContextManager[object]:
    """Context in which PyTorch uses only backends that are right for this call.

    Calls whose gradient is needed use backends with correct gradients, repeatable ones where `deterministic` is set. So do calls whose
    dropout mask PyTorch samples, since they may be recomputed with gradients and each backend drops other pairs.
    """
    if call.device.type != "cuda" or (mask is None and call.identity and not call.deterministic):
        return contextlib.nullcontext()
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *([] if mask is None else [mask])))
    if not (differentiable or call.torch_draws):
        return contextlib.nullcontext()
    # Where inputs aren't 4-D, or broadcast, PyTorch computes gradients without rounding the output first.
    few = not call.identity and call.batch * call.heads * call.n_q * call.n_kv <= FEW_SCORES
    backends = [SDPBackend.MATH] if call.deterministic or few else sound_backends(mask)
    if backends is None:
        return contextlib.nullcontext()
    # A caller's sdpa_kernel stays in force, except under compilers, which can't read its flags; if it leaves none, nothing is changed.
    if torch.compiler.is_compiling():
        return sdpa_kernel(backends)
    left = [backend for backend in backends if _ON[backend]()]
    return only(left) if left else contextlib.nullcontext()


@contextlib.contextmanager
def only(backends: list[SDPBackend]) -> Iterator[None]:
    """sdpa_kernel under a lock: its flags are global, and overlapping contexts of two threads would leave the first one's set."""
    with _FLAGS, sdpa_kernel(backends):
        yield


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Context with autocast off; a null context where it isn't on."""
    if autocasting(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
