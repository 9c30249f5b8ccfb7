"""Corners of F.scaled_dot_product_attention that torch documents, on a GPU and both branches: what each means, by torch in float64."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branches import BRANCHES, Branch, forced, served
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from flashtune import dispatch
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.integrations.swap import torchs_place

DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")
BOUND = TOLERANCES["fp16"]

pytestmark = pytest.mark.parametrize("branch", BRANCHES)


@pytest.fixture(autouse=True)
def record(branch: Branch, record_property: Callable[[str, str], None]) -> Iterator[None]:
    with forced(branch):
        yield
        record_property("served", served())


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16, gradients: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_(gradients) for shape in shapes]


def square(n: int = 77, d: int = 64, heads: int = 3, **words: Any) -> list[torch.Tensor]:
    return tensors(*[(2, heads, n, d)] * 3, **words)


def agrees(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **words: Any) -> torch.Tensor:
    """Output and gradients are those of torch's formula in float64; returns the output."""
    out = dispatch.attention(q, k, v, mask, **words)
    inputs = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in (q, k, v)]
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.detach().double().requires_grad_(mask.requires_grad)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(*wide, wide_mask, **words)
    assert out.shape == wanted.shape and out.dtype == q.dtype
    torch.testing.assert_close(out.double(), wanted, atol=BOUND.atol, rtol=BOUND.rtol)
    if inputs:
        wide_inputs = [x for x in (*wide, wide_mask) if x is not None and x.requires_grad]
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, out.dtype)
        theirs = torch.autograd.grad(wanted, wide_inputs, dout.double())
        for x, ours, right in zip(inputs, torch.autograd.grad(out, inputs, dout), theirs, strict=True):
            gap, norm = float((ours.double() - right).norm()), float(right.norm())
            # What is added to a whole row of scores has no gradient but what is left of rounded ones.
            slack = 3e-2 if x is mask and x.numel() < 200 else 1e-3
            assert gap <= BOUND.gradient_norm * norm + slack, f"off by {gap:.3g} of {norm:.3g}"
    return out.detach()


@pytest.mark.parametrize(("n_q", "n_kv"), [(5, 9), (9, 5), (1, 130), (130, 1), (1, 1), (129, 257), (1023, 65)])
def test_the_causal_diagonal_begins_at_the_first_query_and_key(n_q: int, n_kv: int) -> None:
    agrees(*tensors((2, 3, n_q, 64), (2, 3, n_kv, 64), (2, 3, n_kv, 64)), is_causal=True)


@pytest.mark.parametrize(("n_q", "n_kv"), [(40, 70), (64, 64)])
def test_causal_biases_of_torch_mean_their_corner(n_q: int, n_kv: int) -> None:
    q, k, v = tensors((2, 3, n_q, 64), (2, 3, n_kv, 64), (2, 3, n_kv, 64), gradients=False)
    for bias in (causal_upper_left(n_q, n_kv), causal_lower_right(n_q, n_kv)):
        seen = torch.ones(n_q, n_kv, dtype=torch.bool, device=DEVICE).tril(0 if bias.variant.name == "UPPER_LEFT" else n_kv - n_q)
        wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), seen)
        torch.testing.assert_close(dispatch.attention(q, k, v, bias).double(), wanted, atol=BOUND.atol, rtol=BOUND.rtol)


@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_rows_that_a_mask_hides_altogether_are_zero_and_so_are_their_gradients(kind: str) -> None:
    q, k, v = square()
    seen = torch.rand(77, 77, generator=torch.Generator().manual_seed(1)) > 0.4
    seen[::5] = False
    mask = seen.to(DEVICE) if kind == "bool" else torch.zeros(77, 77).masked_fill(~seen, float("-inf")).to(DEVICE, torch.float16)
    out = agrees(q, k, v, mask)
    assert not out[:, :, ::5].any()


@pytest.mark.parametrize("sizes", [(77,), (1, 77), (77, 1), (2, 1, 1, 77), (2, 1, 77, 1), (1, 3, 77, 77), (2, 3, 77, 77), ()], ids=str)
@pytest.mark.parametrize("kind", ["bool", "bias", "learned"])
def test_masks_broadcast(sizes: tuple[int, ...], kind: str) -> None:
    values = torch.randn(sizes, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mask = values > -0.8 if kind == "bool" else values.half().requires_grad_(kind == "learned")
    agrees(*square(), mask)


@pytest.mark.parametrize("d", [1, 7, 8, 20, 65, 96, 192, 256])
def test_any_head_size(d: int) -> None:
    agrees(*square(d=d), is_causal=True)


@pytest.mark.parametrize(("d", "d_v"), [(64, 128), (192, 128), (16, 40), (40, 16)])
def test_values_may_be_wider_or_narrower(d: int, d_v: int) -> None:
    agrees(*tensors((2, 3, 70, d), (2, 3, 50, d), (2, 3, 50, d_v)))


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 0.01])
def test_any_scale(scale: float) -> None:
    agrees(*square(), scale=scale)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_gradient_of_one_input_alone(which: int) -> None:
    found = square()
    for place, x in enumerate(found):
        x.requires_grad_(place == which)
    agrees(*found, is_causal=True)


@pytest.mark.parametrize("shapes", [
    ((7, 64), (9, 64), (9, 64)), ((3, 7, 64), (3, 9, 64), (3, 9, 64)), ((2, 2, 3, 7, 64), (2, 2, 3, 9, 64), (2, 2, 3, 9, 64)),
    ((3, 7, 64), (2, 3, 9, 64), (2, 3, 9, 64)), ((2, 3, 7, 64), (3, 9, 64), (1, 1, 9, 64)),
], ids=str)  # fmt: skip
def test_fewer_and_more_dimensions_broadcast(shapes: tuple[tuple[int, ...], ...]) -> None:
    agrees(*tensors(*shapes))


@pytest.mark.parametrize("heads", [(6, 2), (8, 1), (4, 4)])
def test_query_heads_share_key_heads(heads: tuple[int, int]) -> None:
    q, k, v = tensors((2, heads[0], 90, 64), (2, heads[1], 70, 64), (2, heads[1], 70, 64))
    agrees(q, k, v, enable_gqa=True, is_causal=True)


def test_dropout_keeps_the_mean_and_follows_the_generator() -> None:
    q, k, v = square(n=200, gradients=False)
    v = torch.ones_like(v)
    torch.manual_seed(5)
    first, second = (dispatch.attention(q, k, v, dropout_p=0.3) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(dispatch.attention(q, k, v, dropout_p=0.3), first) and not torch.equal(first, second)
    assert abs(float(first.float().mean()) - 1.0) < 0.02


@pytest.mark.parametrize("words", [
    {"is_causal": True, "attn_mask": True}, {"dropout_p": 1.5}, {"dropout_p": -0.1},
], ids=str)  # fmt: skip
def test_what_makes_no_sense_is_refused(words: dict[str, Any]) -> None:
    q, k, v = square(gradients=False)
    words = {**words, **({"attn_mask": torch.ones(77, 77, dtype=torch.bool, device=DEVICE)} if "attn_mask" in words else {})}
    # Torch 2.11 may take the first, and ends the process by the others.
    with pytest.raises(RuntimeError):
        dispatch.attention(q, k, v, **words)


@pytest.mark.parametrize("given", ["dtypes", "head sizes", "keys and values", "devices"])
def test_tensors_that_dont_fit_are_refused(given: str) -> None:
    q, k, v = square(gradients=False)
    wrong = {"dtypes": (q, k.float(), v), "head sizes": (q, k[..., :32], v), "keys and values": (q, k, v[:, :, 1:])}
    with pytest.raises(RuntimeError):
        dispatch.attention(*wrong.get(given, (q, k.cpu() if DEVICE == "cuda" else k.to("meta"), v)))


def test_autocast_computes_in_its_dtype() -> None:
    q, k, v = square(dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = dispatch.attention(q, k, v, is_causal=True)
    assert out.dtype == torch.bfloat16
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(out.double(), wanted, atol=4e-2, rtol=4e-2)
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_first_and_second_gradients_in_float64() -> None:
    q, k, v = (x[:, :1, :5, :4].detach().double().requires_grad_() for x in square(dtype=torch.float32))
    function: Callable[..., torch.Tensor] = lambda *x: dispatch.attention(*x, is_causal=True)  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradcheck(function, (q, k, v)) and torch.autograd.gradgradcheck(function, (q, k, v))


@pytest.mark.parametrize(
    "backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
)
def test_a_backend_of_torchs_may_be_asked_for(backend: SDPBackend) -> None:
    q, k, v = square(n=128, gradients=False)
    with sdpa_kernel(backend):
        out = dispatch.attention(q, k, v, is_causal=True)
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(out.double(), wanted, atol=BOUND.atol, rtol=BOUND.rtol)


def test_very_large_values_stay_finite() -> None:
    for n in (1, 64, 513):
        q = torch.full((1, 1, n, 64), 133120.0, dtype=torch.bfloat16, device=DEVICE)
        out = dispatch.attention(q, q, q)
        assert torch.equal(out, q), f"{n} keys that are all alike"


def test_inputs_that_are_one_row_for_all_batches_and_heads() -> None:
    q, k, v = (x[:1, :1].detach().expand(2, 3, 77, 64).requires_grad_() for x in square())
    agrees(q, k, v)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.no_grad():
        assert torch.isfinite(dispatch.attention(q, k, v)).all()


def test_inputs_in_reverse_order_of_dimensions_and_with_gaps() -> None:
    q, k, v = (x.detach() for x in square())
    agrees(*(x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0).requires_grad_() for x in (q, k, v)))
    agrees(*(torch.cat([x, x], 3)[..., ::2].requires_grad_() for x in (q, k, v)))


@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"window": 20}], ids=str)
def test_vmap_and_its_gradients_are_the_calls_one_by_one(words: dict[str, Any]) -> None:
    q, k, v = tensors(*[(3, 2, 4, 64, 64)] * 3, gradients=False)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dispatch.attention(q, k, v, **words).float().square().sum()

    together = torch.vmap(torch.func.grad(loss))(q, k, v)
    for place in range(3):
        x = q[place].clone().requires_grad_()
        (alone,) = torch.autograd.grad(loss(x, k[place], v[place]), x)
        assert float((together[place] - alone).float().norm()) <= 2 * BOUND.gradient_norm * float(alone.float().norm())


@pytest.mark.parametrize("words", [{}, {"window": 20}, {"softcap": 3.0}], ids=str)
def test_a_compiled_call_is_the_eager_one(words: dict[str, Any]) -> None:
    q, k, v = square(n=128)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dispatch.attention(q, k, v, **words)

    torch._dynamo.reset()
    out, eager = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, v), step(q, k, v)
    torch.testing.assert_close(out, eager, atol=BOUND.atol, rtol=BOUND.rtol)
    for ours, theirs in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(eager.sum(), (q, k, v)), strict=True):
        assert float((ours - theirs).float().norm()) <= 2 * BOUND.gradient_norm * float(theirs.float().norm()) + 1e-3


def test_nested_tensors_of_unequal_lengths() -> None:
    parts = [torch.randn(n, 3, 64, generator=torch.Generator().manual_seed(n)).to(DEVICE, torch.float16) for n in (5, 70, 33)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out = dispatch.attention(nested, nested, nested, is_causal=True).transpose(1, 2)
    for part, found in zip(parts, out.unbind(), strict=True):
        x = part.transpose(0, 1).double()
        wanted = F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(0, 1)
        torch.testing.assert_close(found.double(), wanted, atol=BOUND.atol, rtol=BOUND.rtol)


def test_multi_head_attention_in_torchs_place() -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True, device=DEVICE)
    x = torch.randn(2, 30, 64, device=DEVICE)
    padding = torch.arange(30, device=DEVICE)[None] >= torch.tensor([[30], [17]], device=DEVICE)
    for words in ({}, {"key_padding_mask": padding}, {"attn_mask": torch.ones(30, 30, dtype=torch.bool, device=DEVICE).triu(1)}):
        wanted, _ = layer(x, x, x, need_weights=False, **words)
        with torchs_place():
            found, _ = layer(x, x, x, need_weights=False, **words)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_deterministic_gradients_are_the_same_bits_every_time() -> None:
    q, k, v = square(n=300)
    dout = torch.randn(2, 3, 300, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    found = [torch.autograd.grad(dispatch.attention(q, k, v, deterministic=True), (q, k, v), dout) for _ in range(3)]
    assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(found[0], again, strict=True))


@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"attn_mask": True}], ids=str)
@pytest.mark.parametrize("sizes", [(257, 257), (320, 320), (512, 512), (512, 300), (64, 400)], ids=str)
def test_wide_heads(sizes: tuple[int, int], words: dict[str, Any], branch: Branch) -> None:
    d, d_v = sizes
    q, k, v = tensors((2, 3, 150, d), (2, 3, 150, d), (2, 3, 150, d_v), gradients=False)
    more = dict(words)
    mask = torch.rand(150, 150, generator=torch.Generator().manual_seed(2)).to(DEVICE) < 0.7 if more.pop("attn_mask", False) else None
    agrees(q, k, v, mask, **more)
    if branch == "kernels":
        on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
        own = on_hopper and d % 8 == d_v % 8 == 0
        # Beside 256 columns, a piece of 16 is loaded from rows of whole 16 bytes alone.
        anywhere = None if d == 257 else "flash_fwd"
        assert dispatch.explain(q, k, v, mask, **more).template == ("flash_fwd_hopper_wide" if own else anywhere)


@pytest.mark.parametrize("n_q", [1, 4])
def test_latent_steps(n_q: int, branch: Branch) -> None:
    """Values in the keys, beside them in the same layout, and in the keys again."""
    q, k, other = tensors((2, 16, n_q, 576), (2, 1, 300, 576), (2, 1, 300, 576), gradients=False)
    for values in (k, other, k):
        agrees(q, k, values[..., :512], enable_gqa=True)
