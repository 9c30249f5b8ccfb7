"""Calls with features, types, layouts and gradients in all pairs, on whichever device and branch: values against float64, one meaning.

`CASES` covers every pair of two levels that may stand together, by as few calls as a seeded greedy choice finds.
"""

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from attention_cases import _laid_out

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.problems.tolerances import TOLERANCES

LEVELS: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp16", "bf16", "fp32", "fp8"),
    "band": ("full", "causal", "corner", "window", "window_corner"),
    "mask": ("none", "bool", "keys", "sliced", "bias", "wide_bias"),
    "alibi": ("none", "heads", "batch"),
    "softcap": (0.0, 3.0),
    "dropout_p": (0.0, 0.25),
    "sinks": (False, True),
    "lse": (False, True),
    "heads": ((2, 2), (4, 2)),
    "layout": ("heads_first", "tokens_first", "packed", "gapped", "columns", "shared_batch", "offset"),
    "gradients": ("none", "inputs", "all", "lse"),
    "dout": ("drawn", "ones", "a_row"),
    "rows": ("alive", "dead", "empty"),
    "size": (0, 1, 2),
}
"""What varies. `mask` "keys" is boolean and hides keys alone, "sliced" is every other column of one, "wide_bias" is float32 beside 16
bits; a call with `gradients` of "all" asks for those of a bias, slopes and sinks, too, one of "lse" for those of the LSE alone. `dout` is
how the output's gradient lies in memory: "ones" has no strides at all, "a_row" is one row for all. Rows that are "dead" see no key."""

TINY = ((19, 33, 16, 16), (33, 20, 8, 24), (1, 40, 16, 16))
"""(N_q, N_kv, D, D_v) for the interpreter and the CPU."""

LARGE = ((200, 333, 64, 64), (300, 141, 80, 96), (1, 700, 128, 128))
"""The same for a GPU."""

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Case:
    """One call; `index` is its seed."""

    dtype: str
    band: str
    mask: str
    alibi: str
    softcap: float
    dropout_p: float
    sinks: bool
    lse: bool
    heads: tuple[int, int]
    layout: str
    gradients: str
    dout: str
    rows: str
    size: int
    index: int = 0

    def __str__(self) -> str:
        plain = {"mask": "none", "alibi": "none", "gradients": "none", "rows": "alive", "dout": "drawn", "layout": "heads_first"}
        words = [
            f"{name}={value}" for name in LEVELS if (value := getattr(self, name)) not in (plain.get(name), False, 0.0) or name == "size"
        ]
        return ",".join(word.removeprefix("dtype=").removeprefix("band=").replace(" ", "") for word in words)


def _legal(case: Case) -> bool:
    """True if the levels may stand together: fp8 has no gradients, a dead row needs something that hides it."""
    if case.dtype == "fp8" and case.gradients != "none":
        return False
    if case.mask == "wide_bias" and case.dtype == "fp32":
        return False
    if case.gradients == "lse" and not case.lse:
        return False
    if case.rows == "dead":
        return case.mask in ("bool", "bias", "wide_bias") or ("corner" in case.band and case.size == 1)
    return True


def _pairs(case: Case) -> int:
    """A bit for every pair of levels that a case has."""
    places = [_PLACES[name, getattr(case, name)] for name in LEVELS]
    return sum(1 << (a * len(_PLACES) + b) for a, b in itertools.combinations(places, 2))


_PLACES = {level: place for place, level in enumerate((name, level) for name, levels in LEVELS.items() for level in levels)}


def covering(seed: int = 1) -> tuple[Case, ...]:
    """Legal cases in which every pair of levels occurs that legal cases may have."""
    draw = random.Random(seed)
    drawn = (Case(**{name: draw.choice(levels) for name, levels in LEVELS.items()}) for _ in range(4000))
    pool = [(case, _pairs(case)) for case in drawn if _legal(case)]
    left, found = 0, []
    for _, pairs in pool:
        left |= pairs
    while left:
        case, pairs = max(draw.sample(pool, 200), key=lambda one: (one[1] & left).bit_count())
        if pairs & left:
            left &= ~pairs
            found.append(replace(case, index=len(found)))
    return tuple(found)


CASES = covering()


@dataclass(frozen=True)
class Made:
    """A call's tensors: `words` are the keywords of `attention` beside q, k and v; `keep` is what dropout keeps, `band` what is seen."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    words: dict[str, Any]
    band: Band
    keep: torch.Tensor | None
    scale: float

    def asking(self, gradients: str) -> list[torch.Tensor]:
        """Those whose gradients are asked for."""
        others = [self.words[name] for name in ("attn_mask", "alibi_slopes", "sinks") if name in self.words]
        wanted = {"none": [], "all": [self.q, self.k, self.v, *(x for x in others if x.is_floating_point())]}
        return wanted.get(gradients, [self.q, self.k, self.v])


def made(case: Case, device: str, sizes: tuple[tuple[int, int, int, int], ...]) -> Made:
    """The tensors of a case; the same values on every device."""
    generator = torch.Generator().manual_seed(case.index)
    n_q, n_kv, d, d_v = sizes[case.size]
    batch, dtype = 2, _TYPES[case.dtype]
    if case.rows == "empty":
        batch, n_q, n_kv = [(0, n_q, n_kv), (2, 0, n_kv), (2, n_q, 0)][case.index % 3]
    heads, kv_heads = case.heads
    out_dtype = torch.bfloat16 if case.dtype == "fp8" else dtype

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = (drawn(batch, *shape).to(dtype).to(device) for shape in ((heads, n_q, d), (kv_heads, n_kv, d), (kv_heads, n_kv, d_v)))
    layout = case.layout
    if case.rows == "empty" or (layout == "packed" and (q.shape != k.shape or k.shape != v.shape)):
        layout = "tokens_first"
    q, k, v = [_shifted(x, 1 + case.index % 7) for x in (q, k, v)] if layout == "offset" else _laid_out([q, k, v], layout)  # type: ignore[arg-type]
    words: dict[str, Any] = {"softcap": case.softcap, "return_lse": case.lse, "enable_gqa": heads != kv_heads}
    if case.dropout_p:
        words |= {"dropout_p": case.dropout_p, "seed": 1000 + case.index}
    if "corner" in case.band:
        words["causal_alignment"] = "bottom_right"
    if case.band in ("causal", "corner"):
        # As a window, since torch's meaning is a mask or a diagonal, never both.
        words |= {"is_causal": True} if case.mask == "none" else {"window": (None, 0)}
    elif case.band != "full":
        words["window"] = (n_kv // 3, 4)
    mask = _mask_of(case, generator, (batch, heads, n_q, n_kv), out_dtype)
    if mask is not None:
        words["attn_mask"] = _shifted(mask.to(device), 1) if layout == "offset" else mask.to(device)
        if case.mask == "sliced":
            words["attn_mask"] = mask.to(device).repeat_interleave(2, -1)[..., ::2]
    if case.alibi != "none":
        words["alibi_slopes"] = torch.rand((heads,) if case.alibi == "heads" else (batch, heads), generator=generator).to(device)
    if case.sinks:
        words["sinks"] = drawn(heads).to(device)
    if case.dtype == "fp8":
        words |= {"q_descale": 0.5, "k_descale": torch.rand(kv_heads, generator=generator).add(0.5).to(device), "v_descale": 1.5}
    left, right = {"full": (None, None), "causal": (None, 0), "corner": (None, 0)}.get(case.band, (n_kv // 3, 4))
    band = Band(left=left, right=right, diagonal=n_kv - n_q if "corner" in case.band else 0)
    keep = reference.dropout_keep(1000 + case.index, 0, batch, heads, n_q, n_kv, case.dropout_p, device) if case.dropout_p else None
    return Made(q=q, k=k, v=v, words=words, band=band, keep=keep, scale=d**-0.5)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """A copy of `x` that begins so many elements behind the start of its storage."""
    storage = torch.zeros(x.numel() + 8, dtype=x.dtype, device=x.device)
    return storage[by : by + x.numel()].view(x.shape).copy_(x)


def _mask_of(case: Case, generator: torch.Generator, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor | None:
    batch, heads, n_q, n_kv = sizes
    if case.mask == "none":
        return None
    shape = {"keys": (batch, 1, 1, n_kv), "sliced": (n_q, n_kv), "bool": (batch, 1, n_q, n_kv)}.get(case.mask, (1, heads, n_q, n_kv))
    seen = torch.rand(shape, generator=generator) > 0.3
    # Every row sees its first keys, but for those that are to see none.
    seen[..., : max(1, n_kv // 4)] = True
    if case.rows == "dead":
        seen[..., :: max(1, n_q // 3), :] = False
    if case.mask in ("bool", "keys", "sliced"):
        return seen
    bias = torch.randn(shape, generator=generator).masked_fill(~seen, float("-inf"))
    return bias if case.mask == "wide_bias" else bias.to(dtype)


def expected(case: Case, call: Made) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE by the reference in float64."""
    words, batch, heads = call.words, call.q.shape[0], call.q.shape[1]
    factors = None
    if case.dtype == "fp8":
        counts = {"q_descale": heads, "k_descale": call.k.shape[1], "v_descale": call.k.shape[1]}
        factors = tuple(torch.as_tensor(words[name]).double().to(call.q.device).expand(batch, count) for name, count in counts.items())
    per_head = {name: words[name].double().expand(batch, heads) for name in ("alibi_slopes", "sinks") if name in words}
    return reference.attention(
        call.q, call.k, call.v, mask=words.get("attn_mask"), scale=call.scale, band=call.band, softcap=case.softcap, keep=call.keep,
        dropout_p=case.dropout_p, slopes=per_head.get("alibi_slopes"), sinks=per_head.get("sinks"), descale=factors,  # type: ignore[arg-type]
    )  # fmt: skip


def loss_of(case: Case, out: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """A scalar of output and LSE, the same of kernels' and the reference's; rows without keys have no LSE to speak of."""
    total = out.new_zeros((), dtype=torch.float64)
    if lse is not None:
        total = total + lse.double().masked_fill(lse == float("-inf"), 0.0).sin().sum()
    if case.gradients == "lse":
        return total
    if case.dout == "ones":
        return out.sum().double() + total
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.device)
    weights = weights[:, :, :1].expand(out.shape) if case.dout == "a_row" else weights
    # In the output's type, so that this is what its gradient is.
    return (out * weights.to(out.dtype)).double().sum() + total


def check(case: Case, device: str, sizes: tuple[tuple[int, int, int, int], ...]) -> None:
    """Raises AssertionError where values, meaning or gradients of the call aren't the reference's, or a second call gives other bits."""
    call = made(case, device, sizes)
    asking = [x.requires_grad_() for x in call.asking(case.gradients)]
    given = dispatch.attention(call.q, call.k, call.v, **call.words)
    out, lse = given if case.lse else (given, None)
    wanted, wanted_lse = expected(case, call)
    bounds, growth = TOLERANCES[case.dtype], 1.0 / (1.0 - case.dropout_p)
    _close("output", out, wanted, growth * bounds.atol, bounds.rtol, growth * bounds.relative_norm)
    dead = wanted_lse == float("-inf")
    assert not out[dead].any(), "rows with nothing to attend to give 0"
    if lse is not None:
        assert lse.dtype == torch.float32 and torch.equal(lse == float("-inf"), dead), "the LSE of rows without keys is -inf"
        _close("LSE", lse[~dead], wanted_lse[~dead], bounds.lse_atol, 1e-5, None)
    if asking:
        theirs = torch.autograd.grad(loss_of(case, wanted, wanted_lse if case.lse else None), asking, allow_unused=True)
        ours = torch.autograd.grad(loss_of(case, out, lse), asking)
        largest = max((float(x.double().norm()) for x in theirs if x is not None), default=0.0)
        for place, (x, gradient, right) in enumerate(zip(asking, ours, theirs, strict=True)):
            assert gradient.shape == x.shape and gradient.dtype == x.dtype
            right = torch.zeros_like(x) if right is None else right
            # A gradient that all but vanishes is known no better than the others that are summed beside it.
            slack = 1e-3 * bounds.gradient_norm * largest
            gap = float((gradient.double() - right.double()).norm())
            # Distances weigh what belongs to slopes, in which torch, where it serves, has rounded gradients of scores to 16 bits.
            own = 2.0 if x is call.words.get("alibi_slopes") else 1.0
            allowed = own * growth * bounds.gradient_norm * float(right.double().norm()) + slack
            assert gap <= allowed, f"gradient {place}: off by {gap:.3g}, allowed {allowed:.3g}"
    again = dispatch.attention(call.q, call.k, call.v, **call.words)
    assert torch.equal(again[0] if case.lse else again, out), "a second call gives the same bits"


def _close(name: str, got: torch.Tensor, wanted: torch.Tensor, atol: float, rtol: float, norm: float | None) -> None:
    assert got.shape == wanted.shape, f"{name}: {tuple(got.shape)} for {tuple(wanted.shape)}"
    error = (got.double() - wanted).detach().abs()
    assert (error <= atol + rtol * wanted.abs()).all(), f"{name}: largest error {float(error.max()):.3g}"
    if norm is not None and wanted.numel():
        assert float(error.norm()) <= norm * (size := float(wanted.detach().norm())) + 1e-12, (
            f"{name}: {float(error.norm()) / size:.3g} of its norm"
        )
