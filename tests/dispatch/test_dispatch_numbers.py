"""`attention` against the float64 reference over random calls, on whichever path serves them here.

The same table runs on the CPU's framework path, in Triton's interpreter (test_dispatch_interpreter.py starts it so) and, with
FLASHTUNE_TEST_DEVICE=cuda, on a GPU (there FLASHTUNE_TEST_PATH=framework keeps kernels out).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.problems.tolerances import TOLERANCES, Tolerance
from flashtune.core.pytorch import devices

DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cpu")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
EXAMPLES = int(os.environ.get("FLASHTUNE_TEST_EXAMPLES", "120"))

TOLERANCE = {
    torch.float16: TOLERANCES["fp16"],
    torch.bfloat16: TOLERANCES["bf16"],
    torch.float32: TOLERANCES["fp32"],
    torch.float8_e4m3fn: TOLERANCES["fp8"],
    torch.float64: Tolerance(atol=1e-10, rtol=1e-10, lse_atol=1e-5, relative_norm=1e-10, gradient_norm=1e-10),
}
DTYPES = [torch.float32, torch.float16, torch.float8_e4m3fn] if INTERPRETING else list(TOLERANCE)
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True, scope="module")
def path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("FLASHTUNE_TEST_PATH") == "framework":
            patch.setattr(devices, "TRITON", False)
        dispatch.reload()
        yield


@dataclass(frozen=True, kw_only=True)
class Call:
    dtype: torch.dtype
    batch: tuple[int, ...]
    heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    d: int
    d_v: int
    layout: str
    causal: bool
    alignment: str
    window: int | tuple[int | None, int | None] | None
    mask: str
    mask_dims: tuple[bool, ...]
    softcap: float
    dropout_p: float
    scale: float | None
    return_lse: bool
    seed: int
    alibi: str
    sinks: str
    descales: tuple[str, str, str]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    kv_heads = draw(st.integers(1, 3))
    side = st.one_of(st.none(), st.just(-1), st.integers(0, 50))
    mask = draw(st.sampled_from(["none", "none", "bool", "bias", "bias32"]))
    return Call(
        dtype=draw(st.sampled_from(DTYPES)),
        batch=draw(st.sampled_from([(1,), (2,), (2,), (1, 2), (2, 1, 2), ()])),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        n_q=draw(st.integers(1, 70)),
        n_kv=draw(st.integers(1, 70)),
        d=draw(st.sampled_from([1, 8, 20, 32, 64])),
        d_v=draw(st.sampled_from([4, 16, 32])),
        layout=draw(st.sampled_from(["plain", "rows_first", "packed", "broadcast", "reversed_dims"])),
        causal=draw(st.booleans()) and mask == "none",
        alignment=draw(st.sampled_from(["top_left", "bottom_right"])),
        window=draw(st.one_of(st.none(), st.integers(0, 50), st.tuples(side, side))),
        mask=mask,
        mask_dims=tuple(draw(st.lists(st.booleans(), min_size=5, max_size=5))),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3, 0.999, 1.0])),
        scale=draw(st.sampled_from([None, None, 0.3, 0.0, -0.2])),
        return_lse=draw(st.booleans()),
        seed=draw(st.one_of(st.integers(0, 2**64 - 1), st.integers(-(2**63), -1))),
        alibi=draw(st.sampled_from(["none", "none", "heads", "batch"])),
        sinks=draw(st.sampled_from(["none", "none", "heads", "batch"])),
        descales=draw(st.tuples(*[st.sampled_from(["none", "number", "one", "heads", "batch"])] * 3)),
    )


def per_head(call: Call, kind: str, heads: int, generator: torch.Generator) -> torch.Tensor | float | None:
    """A number for each head, in one of the forms that are taken."""
    sizes = {"one": (), "heads": (heads,), "batch": (*call.batch, heads)}
    if kind in sizes:
        return torch.rand(sizes[kind], generator=generator).add(0.5).to(DEVICE)
    return 0.75 if kind == "number" else None


def tensor(call: Call, rows: int, heads: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """(batch, heads, rows, columns) in one of the layouts that models hand over; what is not part of it holds NaN."""
    shape = (*call.batch, heads, rows, columns)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(call.dtype).to(DEVICE)
    if call.layout == "rows_first":
        return values.transpose(-2, -3).contiguous().transpose(-2, -3)
    if call.layout == "packed":
        storage = torch.full((*call.batch, heads, rows + 1, 3, columns + 2), torch.nan, dtype=call.dtype, device=DEVICE)
        storage[..., 1:, 1, 1:-1] = values
        return storage[..., 1:, 1, 1:-1]
    if call.layout == "broadcast" and call.batch:
        return values[(slice(0, 1),) * len(call.batch)]
    if call.layout == "reversed_dims":
        return values.mT.contiguous().mT
    return values


def mask_of(call: Call, generator: torch.Generator) -> torch.Tensor | None:
    if call.mask == "none":
        return None
    full = (*call.batch, call.heads, call.n_q, call.n_kv)
    shape = [size if keep else 1 for size, keep in zip(reversed(full), call.mask_dims, strict=False)][::-1]
    visible = torch.rand(shape, generator=generator) > 0.4
    if call.mask == "bool":
        return visible.to(DEVICE)
    bias = torch.randn(shape, generator=generator).masked_fill(~visible, float("-inf"))
    return bias.to(torch.float32 if call.mask == "bias32" else out_dtype(call.dtype)).to(DEVICE)


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == FP8 else dtype


def expected(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, extras: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.double().cpu().expand(*call.batch, *x.shape[-3:]).reshape(-1, *x.shape[-3:])

    def wide(x: torch.Tensor | float | None, heads: int) -> torch.Tensor:
        x = torch.as_tensor(1.0 if x is None else x).double().cpu()
        return x.expand(*call.batch, heads).reshape(-1, heads)

    counts = {"q_descale": call.heads, "k_descale": call.kv_heads, "v_descale": call.kv_heads}
    q_factor, k_factor, v_factor = (wide(extras.get(name), heads) for name, heads in counts.items())
    slopes, sinks = extras["alibi_slopes"], extras["sinks"]
    left, right = call.window if isinstance(call.window, tuple) else (call.window, call.window)
    left, right = (None if side == -1 else side for side in (left, right))
    sizes = (*call.batch, call.heads, call.n_q, call.n_kv)
    batch = flat(q).shape[0]
    keep = reference.dropout_keep(call.seed % 2**64, 0, batch, *sizes[-3:], call.dropout_p)
    wide_mask = None
    if mask is not None:
        wide_mask = (mask.cpu() if mask.dtype == torch.bool else mask.cpu().double()).expand(sizes).reshape(batch, *sizes[-3:])
    out, lse = reference.attention(
        flat(q),
        flat(k),
        flat(v),
        mask=wide_mask,
        scale=call.d**-0.5 if call.scale is None else call.scale,
        band=Band(
            left=left,
            right=0 if call.causal else right,
            diagonal=call.n_kv - call.n_q if call.alignment == "bottom_right" else 0,
        ),
        softcap=call.softcap,
        keep=keep if call.dropout_p else None,
        dropout_p=call.dropout_p,
        slopes=None if slopes is None else wide(slopes, call.heads),
        sinks=None if sinks is None else wide(sinks, call.heads),
        descale=(q_factor, k_factor, v_factor),
    )
    return out.view(*sizes[:-1], call.d_v), lse.view(sizes[:-1])


def assert_close(got: torch.Tensor, wanted: torch.Tensor, tolerance: Tolerance, scale: float) -> None:
    """Within the table's tolerance; dropout divides by 1 - p, so errors grow by `scale`."""
    error = (got.double().cpu() - wanted).abs()
    assert (error <= scale * tolerance.atol + tolerance.rtol * wanted.abs()).all(), f"largest error {error.max():.3g}"


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(call=calls())
def test_every_combination_of_features_agrees_with_the_float64_reference(call: Call) -> None:
    generator = torch.Generator().manual_seed(call.seed % 2**31)
    q = tensor(call, call.n_q, call.heads, call.d, generator)
    k = tensor(call, call.n_kv, call.kv_heads, call.d, generator)
    v = tensor(call, call.n_kv, call.kv_heads, call.d_v, generator)
    if call.layout == "broadcast" and call.batch:
        v = v.expand(*call.batch, *v.shape[-3:])
    mask = mask_of(call, generator)
    arguments = (q, k, v, mask, call.dropout_p, call.causal, call.scale, call.heads != call.kv_heads)
    extras: dict[str, Any] = {"window": call.window, "softcap": call.softcap, "causal_alignment": call.alignment, "seed": call.seed}
    extras["alibi_slopes"] = per_head(call, call.alibi, call.heads, generator)
    extras["sinks"] = per_head(call, call.sinks, call.heads, generator)
    if extras["sinks"] is not None:
        extras["sinks"][..., -1] = (float("-inf"), 20.0)[call.seed % 2]
    if call.dtype == FP8:
        counts = {"q_descale": call.heads, "k_descale": call.kv_heads, "v_descale": call.kv_heads}
        for (name, heads), kind in zip(counts.items(), call.descales, strict=True):
            extras[name] = per_head(call, kind, heads, generator)
    wanted, wanted_lse = expected(call, q, k, v, mask, extras)
    served = dispatch.attention(*arguments, **extras, return_lse=call.return_lse)
    out, lse = served if call.return_lse else (served, None)
    if INTERPRETING:
        assert dispatch.explain(*arguments, **extras, return_lse=call.return_lse).kind == "default", "a kernel served"
    tolerance = TOLERANCE[call.dtype]
    assert out.dtype == out_dtype(call.dtype) and out.shape == wanted.shape and out.device == q.device
    assert_close(out, wanted, tolerance, 1.0 / (1.0 - call.dropout_p) if call.dropout_p < 1.0 else 1.0)
    empty = wanted_lse == float("-inf")
    assert (out.cpu()[empty] == 0).all(), "rows with nothing to attend to give 0"
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == wanted_lse.shape
        assert (lse.cpu() == float("-inf")).eq(empty).all(), "and their LSE is -inf"
        torch.testing.assert_close(lse.cpu()[~empty].double(), wanted_lse[~empty], atol=tolerance.lse_atol, rtol=1e-5)
    again = dispatch.attention(*arguments, **extras, return_lse=call.return_lse)
    assert torch.equal(again[0] if call.return_lse else again, out), "a second call gives the same"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_dimensions_are_one_head(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(rows, 16).to(dtype).to(DEVICE) for rows in (5, 9, 9))
    out, lse = dispatch.attention(q, k, v, return_lse=True)
    wanted, wanted_lse = reference.attention(q[None, None].cpu(), k[None, None].cpu(), v[None, None].cpu(), scale=0.25)
    assert_close(out, wanted[0, 0], TOLERANCE[dtype], 1.0)
    assert lse.shape == (5,)
    torch.testing.assert_close(lse.cpu(), wanted_lse[0, 0].float(), atol=2e-3, rtol=1e-4)


def test_ranks_mix_and_single_heads_broadcast_as_in_torch() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 6, 7, 16, device=DEVICE)
    for k_shape, v_shape in [((9, 16), (9, 8)), ((1, 9, 16), (6, 9, 8)), ((2, 1, 9, 16), (1, 6, 9, 8)), ((3, 1, 6, 9, 16), (9, 8))]:
        k, v = torch.randn(k_shape, device=DEVICE), torch.randn(v_shape, device=DEVICE)
        wanted = torch.softmax(q.double() @ k.double().mT / 4.0, -1) @ v.double()
        assert_close(dispatch.attention(q, k, v), wanted.cpu(), TOLERANCES["fp32"], 1.0)


def test_key_and_value_may_differ_in_heads_with_gqa() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 7, 16, device=DEVICE), torch.randn(2, 2, 9, 16, device=DEVICE), torch.randn(2, 3, 9, 16, device=DEVICE)
    for key, value in [(k, v), (k[:, :1], v), (k, v[:, :1])]:
        repeated = [x.repeat_interleave(6 // x.shape[1], 1).double() for x in (key, value)]
        wanted = torch.softmax(q.double() @ repeated[0].mT / 4.0, -1) @ repeated[1]
        assert_close(dispatch.attention(q, key, value, enable_gqa=True), wanted.cpu(), TOLERANCES["fp32"], 1.0)


def test_the_output_lies_in_memory_like_the_query() -> None:
    """Models that keep (B, N, H, D) can merge the heads afterwards without a copy."""
    q = torch.randn(2, 33, 4, 16, device=DEVICE).transpose(1, 2)
    out = dispatch.attention(q, q, q, is_causal=True)
    assert out.transpose(1, 2).is_contiguous()


def test_unseeded_dropout_follows_torchs_generator_and_moves_it_on() -> None:
    q = torch.randn(2, 2, 33, 16, device=DEVICE)
    for extras in ({}, {"softcap": 2.0}):
        torch.manual_seed(3)
        first, second = (dispatch.attention(q, q, q, dropout_p=0.5, **extras) for _ in range(2))
        torch.manual_seed(3)
        again = dispatch.attention(q, q, q, dropout_p=0.5, **extras)
        assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] if INTERPRETING else [torch.float32, torch.bfloat16], ids=str)
def test_sinks_are_one_more_column_of_logits_as_in_gpt_oss(dtype: torch.dtype) -> None:
    """Every other number of a parameter in the inputs' own type, with a sliding window from the last key."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, rows, 64, generator=generator).to(DEVICE, dtype) for heads, rows in ((8, 9), (2, 17), (2, 17)))
    sinks = torch.randn(16, generator=generator).to(DEVICE, dtype)[::2]
    out = dispatch.attention(
        q, k, v, is_causal=True, window=(5, 0), causal_alignment="bottom_right", scale=0.125, enable_gqa=True, sinks=sinks
    )
    rows, columns = torch.arange(9)[:, None] + 8, torch.arange(17)[None]
    hidden = (columns > rows) | (columns < rows - 5)
    keys, values = (x.double().cpu().repeat_interleave(4, 1) for x in (k, v))
    logits = (q.double().cpu() @ keys.mT * 0.125).masked_fill(hidden, float("-inf"))
    column = sinks.double().cpu().reshape(1, -1, 1, 1).expand(2, 8, 9, 1)
    probs = torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1]
    assert_close(out, probs @ values, TOLERANCE[dtype], 1.0)


def test_the_seed_alone_decides_dropouts_mask_whatever_the_sizes_around() -> None:
    """With one value row per key and equal scores the output shows which keys were kept."""
    q, k = torch.zeros(1, 1, 8, 16, device=DEVICE), torch.zeros(1, 1, 32, 16, device=DEVICE)
    v = torch.eye(32, device=DEVICE)[None, None]
    out = dispatch.attention(q, k, v, dropout_p=0.5, seed=11)
    assert torch.equal((out > 0).cpu(), reference.dropout_keep(11, 0, 1, 1, 8, 32, 0.5))


def test_a_float32_mask_beside_float64_inputs_is_read_as_what_it_is() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 17, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(17, 17, generator=generator)
    wanted = torch.softmax(q @ k.mT / 4 + mask.double(), -1) @ v
    torch.testing.assert_close(dispatch.attention(q, k, v, attn_mask=mask), wanted)
    torch.testing.assert_close(dispatch.attention(q[None], k[None], v[None], attn_mask=mask)[0], wanted)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != FP8])
@pytest.mark.parametrize("sizes", [(), (1,), (19,)], ids=["none", "one", "keys"])
@pytest.mark.parametrize("boolean", [True, False], ids=["bool", "bias"])
def test_masks_of_fewer_than_two_dimensions_broadcast_over_any_inputs(dtype: torch.dtype, sizes: tuple[int, ...], boolean: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, n, 16, generator=generator).to(DEVICE, dtype) for n in (17, 19, 19))
    mask = torch.randn(sizes, generator=generator)
    mask = (mask > -0.5) | (mask == mask.max()) if boolean else mask
    # The reference broadcasts, too.
    wanted, _ = reference.attention(*(x.cpu() for x in (q, k, v)), mask=mask, scale=0.25)
    tolerance = TOLERANCE[dtype]
    for lead in ((), (0,), (0, 0)):
        out = dispatch.attention(q[lead], k[lead], v[lead], mask.to(DEVICE))
        torch.testing.assert_close(out.cpu().double(), wanted[lead], atol=tolerance.atol, rtol=tolerance.rtol)
