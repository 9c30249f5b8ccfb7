"""Calls whose gradient torch computes on a GPU, in the memory layouts, types and sizes that its backends refuse, misread or fail on.

Each is compared with the reference in float64, and served by kernels, too, where `served_by` lets them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_dispatch_torch_serves import EMPTY, GONE
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.band import Sides
from flashtune.core.problems.tolerances import TOLERANCES

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(params=["torch", "kernels"])
def served_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who serves calls of a few rows with gradients: torch, since ours save nothing there, or kernels by force."""
    with dispatch.use(unmeasured=request.param == "kernels"):
        yield request.param


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def inputs(*shape: int, n_kv: int | None = None, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    keys = (*shape[:2], n_kv or shape[2], shape[3])
    return [normal(*sizes, dtype=dtype, seed=seed).requires_grad_() for seed, sizes in enumerate((shape, keys, keys))]


def moved(x: Tensor, offset: int) -> Tensor:
    """A copy that begins `offset` elements behind a boundary of 16 bytes, in the midst of NaN."""
    room = torch.full((x.numel() + 64,), float("nan") if x.is_floating_point() else 1, dtype=x.dtype, device=x.device)
    return room[32 + offset :][: x.numel()].view(x.shape).copy_(x.detach())


def exact(tensors: dict[str, Tensor], dout: Tensor, words: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients by the reference in float64."""
    wide = {n: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for n, x in tensors.items()}
    q, k, v, mask, slopes = wide["q"], wide["k"], wide["v"], wide.get("attn_mask"), wide.get("alibi_slopes")
    given = {name: value for name, value in words.items() if name in ("window", "is_causal", "causal_alignment")}
    usual = {"window": None, "is_causal": False, "causal_alignment": "top_left"} | given
    band = Sides.of(usual["window"], usual["is_causal"], usual["causal_alignment"]).band(q.shape[2], k.shape[2])
    slopes = None if slopes is None else slopes.expand(*q.shape[:2])
    out, _ = reference.attention(q, k, v, mask=mask, scale=q.shape[3] ** -0.5, band=band, slopes=slopes)
    leaves = {name: x for name, x in wide.items() if x.requires_grad}
    found = torch.autograd.grad((out * dout.double()).sum(), list(leaves.values()))
    return out.detach(), dict(zip(leaves, found, strict=True))


def check(q: Tensor, k: Tensor, v: Tensor, *, dout: Tensor | None = None, **words: Any) -> None:
    """Output and all gradients are the reference's, in a backward that gets `dout`."""
    out = dispatch.attention(q, k, v, **words)
    dout = normal(*out.shape, dtype=out.dtype, seed=9) if dout is None else dout
    tensors = {"q": q, "k": k, "v": v, **{name: x for name, x in words.items() if isinstance(x, Tensor)}}
    wanted, gradients = exact(tensors, dout, words)
    bound = TOLERANCES[NAMES[q.dtype]]
    torch.testing.assert_close(out.double(), wanted, atol=2 * bound.atol, rtol=2 * bound.rtol)
    leaves = {name: x for name, x in tensors.items() if x.requires_grad}
    found = torch.autograd.grad(out, list(leaves.values()), dout)
    for (name, grad), given in zip(gradients.items(), found, strict=True):
        off = float((given.double() - grad).norm() / grad.norm().clamp(min=1e-6))
        assert off <= 3 * bound.gradient_norm, f"the gradient of {name} is off by {off:.2e}"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("per", ["head", "batch"])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("more", [{}, {"is_causal": True}, {"window": (100, 50)}], ids=str)
@pytest.mark.parametrize("n_kv", [500, 333])
def test_alibi(dtype: torch.dtype, per: str, alignment: str, more: dict[str, Any], n_kv: int, served_by: str) -> None:
    q, k, v = inputs(2, 4, 500, 64, n_kv=n_kv, dtype=dtype)
    slopes = 2.0 ** -torch.arange(1, 9, device="cuda", dtype=torch.float32).view(2, 4)
    check(q, k, v, alibi_slopes=slopes[0] if per == "head" else slopes, causal_alignment=alignment, **more)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 200, 200), (200, 200), (2, 1, 1, 200)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_bias_of_float32_beside_halves(dtype: torch.dtype, shape: tuple[int, ...], gradient: bool, served_by: str) -> None:
    q, k, v = inputs(2, 4, 200, 64, dtype=dtype)
    check(q, k, v, attn_mask=(1000 + 3 * normal(*shape, dtype=torch.float32, seed=5)).requires_grad_(gradient))


@pytest.mark.parametrize("shape", [(2, 4, 300, 300), (1, 1, 300, 300), (2, 4, 256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_of_a_bias_alone(dtype: torch.dtype, shape: tuple[int, ...], served_by: str) -> None:
    q, k, v = (x.detach() for x in inputs(2, 4, *shape[2:3], 64, dtype=dtype))
    check(q, k, v, attn_mask=normal(*shape, dtype=dtype, seed=5).requires_grad_())


@pytest.mark.parametrize("shape", [(70000, 1, 16, 64), (1, 70000, 16, 64), (33000, 2, 16, 64), (2, 33000, 16, 64)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_more_heads_than_a_grid_has_room_for(shape: tuple[int, ...], masked: bool) -> None:
    q, k, v = inputs(*shape)
    mask = normal(shape[0], 1, 16, 16, seed=5) if masked else None
    if mask is None:
        check(q, k, v, is_causal=True)
    else:
        check(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("offset", [1, 2, 4, 7])
@pytest.mark.parametrize("what", ["inputs", "mask", "bool mask", "gradient", "all"])
@pytest.mark.parametrize(("n", "d"), [(200, 64), (200, 60), (256, 64)])
@pytest.mark.filterwarnings("error:.*is skipped from now on:RuntimeWarning")
def test_tensors_at_any_place_in_memory(offset: int, what: str, n: int, d: int, served_by: str) -> None:
    q, k, v = inputs(3, 4, n, d)
    if what in ("inputs", "all"):
        q, k, v = (moved(x, offset).requires_grad_() for x in (q, k, v))
    mask = moved(normal(n, n, seed=5), offset)
    mask = moved(mask > -1, offset) if what == "bool mask" else mask
    more: dict[str, Any] = {"attn_mask": mask} if "mask" in what or (what == "all" and offset % 2) else {"is_causal": True}
    dout = normal(3, 4, n, d, seed=9)
    check(q, k, v, dout=moved(dout, offset) if what in ("gradient", "all") else dout, **more)


CASES: dict[str, Callable[[int], Tensor]] = {
    "sliced": lambda n: normal(2, 4, n, 500, seed=5)[..., 3 : 3 + n],
    "sliced rows": lambda n: normal(2, 4, 300, n, seed=5)[:, :, 40 : 40 + n],
    "transposed": lambda n: normal(2, 4, n, n, seed=5).mT,
    "every other column": lambda n: normal(2, 4, n, 2 * n, seed=5)[..., ::2],
    "one column": lambda n: normal(2, 4, n, 1, seed=5),
    "expanded": lambda n: normal(2, 1, n, 1, seed=5).expand(2, 4, n, n),
    "one row": lambda n: normal(1, 1, 1, n, seed=5).expand(2, 4, n, n),
}


@pytest.mark.parametrize("kind", ["bool", "bias", "wide bias", "bias with gradient"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [200, 256])
def test_masks_of_any_strides(n: int, case: str, kind: str, served_by: str) -> None:
    mask = CASES[case](n)
    mask = {"bool": mask > -1, "wide bias": mask.float()}.get(kind, mask)
    # That of a number for all keys of a query is 0.
    gradient = kind == "bias with gradient" and case != "one column"
    check(*inputs(2, 4, n, 64), attn_mask=mask.detach().requires_grad_(gradient))


@pytest.mark.parametrize("backend", [None, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], ids=str)
@pytest.mark.parametrize("layout", ["expanded", "tokens first", "odd rows", "columns", "packed", "odd packed"])
def test_inputs_of_any_strides(layout: str, backend: SDPBackend | None) -> None:
    made = []
    for seed in range(3):
        x = normal(2, 3, 128, 64, seed=seed)
        placed = {
            "expanded": x[:1, :1].expand(2, 3, 128, 64),
            "tokens first": x.transpose(1, 2).contiguous().transpose(1, 2),
            "odd rows": normal(2, 3, 128, 67, seed=seed)[..., :64],
            "columns": x.mT.contiguous().mT,
            "packed": normal(2, 3, 128, 192, seed=seed)[..., 64:128],
            "odd packed": normal(2, 3, 128, 192, seed=seed)[..., 63:127],
        }
        made.append(placed[layout].detach().requires_grad_())
    q, k, v = made
    every = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(every if backend is None else backend):
        check(q, k, v, is_causal=True)


LAYOUTS = ("ones", "rows", "dense", "tokens first", "columns", "heads")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """`x`, or a part of it that repeats, in the midst of NaN."""
    if layout == "ones":
        return torch.ones((), dtype=x.dtype, device="cuda").expand(x.shape)
    if layout == "rows":
        return moved(x[:, :, :1], 0).expand(x.shape)
    if layout == "heads":
        return moved(x[:, :1], 0).expand(x.shape)
    if layout == "tokens first":
        return moved(x.transpose(1, 2), 0).transpose(1, 2)
    return moved(x.mT, 0).mT if layout == "columns" else moved(x, 0)


@pytest.mark.parametrize("n", [513, 256])
@pytest.mark.parametrize("first", LAYOUTS)
def test_output_gradients_of_any_strides_one_after_another(first: str, n: int, served_by: str) -> None:
    """Torch's cuDNN takes the strides of the first for those of the next: memory beside them is NaN here."""
    for layout in (first, *LAYOUTS):
        check(*inputs(2, 4, n, 64), dout=laid_out(normal(2, 4, n, 64, seed=9), layout))


@pytest.mark.parametrize("more", [{}, {"is_causal": True}, {"window": 20}, {"seed": 3}, {"return_lse": True}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_dropout_of_everything_gives_zeros_and_zero_gradients(dtype: torch.dtype, more: dict[str, Any], served_by: str) -> None:
    q, k, v = inputs(2, 4, 100, 64, dtype=dtype)
    found = dispatch.attention(q, k, v, dropout_p=1.0, **more)
    out = found[0] if isinstance(found, tuple) else found
    assert not out.any()
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("more", GONE.values(), ids=GONE)
@pytest.mark.parametrize(("shape", "n_kv", "d_v"), EMPTY.values(), ids=EMPTY)
def test_empty_sizes_have_gradients(shape: tuple[int, ...], n_kv: int, d_v: int, more: dict[str, Any], dtype: torch.dtype) -> None:
    sizes = (shape, (*shape[:2], n_kv, shape[3]), (*shape[:2], n_kv, d_v))
    leaves = [torch.randn(x, device="cuda", dtype=dtype, requires_grad=True) for x in sizes]
    found = dispatch.attention(leaves[0], leaves[1], leaves[2], **more)
    out = found[0] if isinstance(found, tuple) else found
    for output in found if isinstance(found, tuple) else (found,):
        for grad, x in zip(torch.autograd.grad(output.sum(), leaves, retain_graph=True), leaves, strict=True):
            assert grad.shape == x.shape and bool(grad.isfinite().all())
    assert out.shape == (*shape[:3], d_v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gradient_of_the_lse_alone_leaves_zeros_for_the_values(dtype: torch.dtype, served_by: str) -> None:
    q, k, v = inputs(2, 4, 100, 64, dtype=dtype)
    _, lse = dispatch.attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert dq.any() and dk.any() and not dv.any()
