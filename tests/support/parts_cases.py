"""Attention over parts of the keys, drawn at random: merged, and as one call, both against float64."""

import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune import dispatch

ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-23}


class Found(NamedTuple):
    """Output, LSE, and gradients of query, key, value and perhaps sinks."""

    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...]


class Split(NamedTuple):
    """A dense call, and the bounds of the parts that its keys are cut into."""

    tensors: tuple[Tensor, ...]
    mask: Tensor | None
    causal: bool
    bounds: list[int]
    grads: tuple[Tensor, Tensor]
    with_sinks: int


def drawn(seed: int, dtype: torch.dtype, device: str = "cpu", most: int = 40) -> Split:
    """A call of a random kind in up to 8 parts, some of them empty; rows of it may see no key."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    batch, kv_heads, ratio = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 2, 4))
    n_q, n_kv, d = rng.randint(1, most), rng.randint(1, most), rng.choice((16, 32, 64))
    kind = rng.choice(("plain", "causal", "bool", "bias"))
    tensors = [normal(batch, kv_heads * ratio, n_q, d), *(normal(batch, kv_heads, n_kv, d) for _ in range(2))]
    sinks = rng.random() < 0.3
    if sinks:
        tensors.append(normal(kv_heads * ratio))
    mask = None
    if kind == "bool":
        mask = (torch.rand((batch, 1, n_q, n_kv), generator=generator) < 0.6).to(device)
        mask[0, 0, 0] = False
    elif kind == "bias":
        mask = normal(1, 1, n_q, n_kv)
    inner = sorted(rng.randint(0, n_kv) for _ in range(rng.randint(0, 7)))
    bounds = [0, *inner, n_kv]
    grads = normal(batch, kv_heads * ratio, n_q, d), normal(batch, kv_heads * ratio, n_q).float()
    return Split(tuple(tensors), mask, kind == "causal", bounds, grads, rng.randrange(len(bounds) - 1))


def formula(split: Split) -> Found:
    """The call by matrices of all scores in float64."""
    q, k, v, *sinks = (x.detach().double().requires_grad_() for x in split.tensors)
    ratio, n_q, n_kv = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    wide = [x.repeat_interleave(ratio, 1) for x in (k, v)]
    scores = q @ wide[0].mT / math.sqrt(q.shape[-1])
    if split.mask is not None:
        scores = scores.masked_fill(~split.mask, -math.inf) if split.mask.dtype == torch.bool else scores + split.mask.double()
    if split.causal:
        scores = scores.masked_fill(torch.ones(n_q, n_kv, dtype=torch.bool, device=q.device).triu(n_kv - n_q + 1), -math.inf)
    for sink in sinks:
        scores = torch.cat([scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    top = scores.detach().amax(-1, keepdim=True).clamp_min(-1e300)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, top + safe.log())[..., 0]
    return with_gradients(split, (weights / safe)[..., :n_kv] @ wide[1], lse, (q, k, v, *sinks))


def undivided(split: Split) -> Found:
    """The call by `attention`."""
    leaves = [x.detach().requires_grad_() for x in split.tensors]
    return with_gradients(split, *dispatch.attention(*leaves[:3], **words(split, 0, split.bounds[-1], leaves[3:])), leaves)


def merged(split: Split) -> Found:
    """The call by `attention` over each part, and `merge`."""
    leaves = [x.detach().requires_grad_() for x in split.tensors]
    return with_gradients(split, *dispatch.merge(parts_of(split, leaves)), leaves)


def parts_of(split: Split, leaves: list[Tensor]) -> list[Any]:
    """(output, LSE) of each part."""
    q, k, v, *sinks = leaves
    bounds = zip(split.bounds, split.bounds[1:], strict=False)
    return [
        dispatch.attention(q, k[:, :, a:b], v[:, :, a:b], **words(split, a, b, sinks if place == split.with_sinks else []))
        for place, (a, b) in enumerate(bounds)
    ]


def words(split: Split, a: int, b: int, sinks: list[Tensor]) -> dict[str, Any]:
    """Arguments of a call over keys a .. b - 1."""
    found: dict[str, Any] = {"return_lse": True, "enable_gqa": True, "sinks": sinks[0] if sinks else None}
    if split.mask is not None:
        found["attn_mask"] = split.mask[..., a:b]
    if split.causal:
        # The diagonal of all keys, seen from the part's last one.
        found |= {"window": (None, split.bounds[-1] - b), "causal_alignment": "bottom_right"}
    return found


def with_gradients(split: Split, out: Tensor, lse: Tensor, leaves: Any) -> Found:
    """The outputs and the gradients of their product with the split's."""
    dout, dlse = split.grads
    # A row that sees no key has no LSE to differentiate.
    given = dout.to(out.dtype), torch.where(lse == -math.inf, 0.0, dlse).to(lse.dtype)
    return Found(out.detach(), lse.detach(), torch.autograd.grad((out, lse), leaves, given))


def agrees(split: Split) -> None:
    """The merged call is within twice the rounding of the undivided one, against float64."""
    exact, whole, ours = formula(split), undivided(split), merged(split)
    assert torch.equal(ours.lse == -math.inf, exact.lse == -math.inf)
    for name, true, one, many in (
        ("out", exact.out, whole.out, ours.out),
        ("lse", exact.lse, whole.lse, ours.lse),
        *zip(("dq", "dk", "dv", "dsinks"), exact.grads, whole.grads, ours.grads, strict=False),
    ):
        true, one, many = (torch.where(x == -math.inf, 0.0, x.double()) for x in (true, one, many))
        unit = (ROUNDING[split.tensors[0].dtype] if name != "lse" else 2**-22) * max(1.0, float(true.abs().max()))
        allowed, found = 2 * float((one - true).abs().max()) + 2 * unit, float((many - true).abs().max())
        assert found <= allowed, (name, found, allowed)
