"""Tensors that are handed to torch's own attention, as its CUDA backends read them right (those of a CPU stand in here for a GPU's), and
calls of which it leaves gradients out. On a GPU itself: tests/gpu/test_torch_serves.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.core.pytorch import attention as torch_attention
from flashtune.core.pytorch.attention import laid_out, readable
from flashtune.dispatch.call.call import PerHead
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.plans import pytorch

FP32 = TOLERANCES["fp32"]


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(OnGpu)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = normal(2, 4, 16, 32).to(torch.bfloat16)

LAYOUTS: dict[str, tuple[torch.Tensor, bool]] = {
    "dense": (X, True),
    "tokens first": (X.transpose(1, 2), True),
    "packed": (X[..., 8:24], True),
    "odd packed": (X[..., 7:23], False),
    "odd rows": (normal(2, 4, 16, 35).to(torch.bfloat16)[..., :32], False),
    "columns": (X.mT, False),
    "every other column": (X[..., ::2], False),
    "expanded": (X[:1].expand(2, 4, 16, 32), False),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_inputs_are_copied_where_their_rows_arent_dense_and_at_16_bytes(case: str) -> None:
    x, fits = LAYOUTS[case]
    given = on_gpu(x)
    found = readable(given)
    assert (found is given) == fits and torch.equal(found, x)
    assert found.stride(-1) == 1 and found.data_ptr() % 16 == 0 and all(stride and stride % 8 == 0 for stride in found.stride()[:-1])
    assert readable(x) is x, "which no GPU reads"


@pytest.mark.parametrize("kind", ["bool", "bfloat16", "float32"])
def test_of_masks_only_what_differs_is_copied(kind: str) -> None:
    x = (X > 0) if kind == "bool" else X.to(getattr(torch, kind))
    for whole, fits in ((x, True), (x[:1].expand(2, 4, 16, 32), True), (x[:, :, :1].expand(2, 4, 16, 32), True), (x.mT, False)):
        given = on_gpu(whole)
        found = readable(given, repeats=True)
        assert (found is given) == fits and torch.equal(found, whole)
    column = on_gpu(x[:, :1, :, :1].expand(2, 4, 16, 32))
    found = readable(column, repeats=True)
    assert torch.equal(found, column) and found.stride(-1) == 1 and found.stride(1) == 0


def test_output_gradients_are_laid_out_as_the_output_is() -> None:
    strides = X.stride()
    assert laid_out(strides, X) is X
    for other in (X.mT.contiguous().mT, X[:, :1].expand(X.shape), torch.ones((), dtype=X.dtype).expand(X.shape)):
        found = laid_out(strides, other)
        assert found.stride() == strides and torch.equal(found, other)
    room = torch.empty(X.numel() + 1, dtype=X.dtype)[1:].view(X.shape).copy_(X)
    assert laid_out(strides, room).data_ptr() % 16 == 0


def test_a_backward_of_torchs_gets_gradients_laid_out_as_the_output_is_beside_hooks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (normal(2, 4, 16, 32, seed=seed).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for seed in range(3))
    met: list[tuple[int, ...]] = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        met.append(x.stride())
        return x * 2

    wanted = torch.autograd.grad(torch_attention.sdpa(q, k, v).sum(), (q, k, v))
    for first in (True, False):
        out = torch_attention.differentiable_sdpa(q, k, v)
        handle = out.register_hook(doubled)  # type: ignore[no-untyped-call]
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(lambda grads: met.append(grads[0].stride()))
        if not first:
            handle.remove()
        found = torch.autograd.grad(out.sum(), (q, k, v))
        torch.testing.assert_close(found, tuple(x * 2 for x in wanted) if first else wanted)
        assert met[0] == met[-1] == out.stride() and len(met) == 1 + first
        met.clear()
    func = torch.func.grad(lambda q: torch_attention.differentiable_sdpa(q, k, v).sum())
    torch.testing.assert_close(func(q.detach()), wanted[0])
    mapped = torch.func.vmap(torch.func.grad(lambda q, k, v: torch_attention.differentiable_sdpa(q, k, v).sum()))
    torch.testing.assert_close(mapped(*(x.detach()[:, None] for x in (q, k, v)))[:, 0], wanted[0])


@pytest.mark.filterwarnings("ignore:Using backward")
def test_an_output_without_any_gradient_and_second_gradients_are_torchs() -> None:
    q, k, v = (normal(1, 1, 5, 4, seed=seed).double().requires_grad_() for seed in range(3))
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradcheck(torch_attention.differentiable_sdpa, (q, k, v))
        assert torch.autograd.gradgradcheck(torch_attention.differentiable_sdpa, (q, k, v))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(7, 2, 2), (7, 4, 2), (2, 8, 4)])
def test_more_heads_than_a_launch_has_room_for_are_served_in_parts(
    batch: int, heads: int, kv_heads: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytorch, "MOST_HEADS", 4)
    met: list[torch.Size] = []

    def sdpa(*given: Any, **words: Any) -> torch.Tensor:
        met.append(given[0].shape)
        return torch_attention.sdpa(*given, **words)

    monkeypatch.setattr(pytorch, "differentiable_sdpa", sdpa)
    # Parts of these tensors are a CPU's.
    monkeypatch.setattr(pytorch, "sdpa", sdpa)
    q, k, v = normal(batch, heads, 6, 8), normal(batch, kv_heads, 5, 8, seed=1), normal(batch, kv_heads, 5, 8, seed=2)
    mask = normal(1, heads, 6, 5) if masked else None
    call = parse(Arguments(q, k, v, mask), Options(enable_gqa=heads != kv_heads))
    assert not pytorch.takes_as_it_is(replace(call, device=torch.device("cuda")), q, k, v, mask)
    out = pytorch._sdpa(call, on_gpu(q), on_gpu(k), on_gpu(v), mask, scale=call.scale, is_causal=False)
    torch.testing.assert_close(out, reference.attention(q, k, v, mask=mask, scale=call.scale)[0].float(), atol=FP32.atol, rtol=FP32.rtol)
    assert len(met) > 1 and all(max(shape[:2]) <= 4 for shape in met)


def test_the_gradient_of_a_bias_alone_makes_torch_keep_what_it_takes() -> None:
    q, bias = normal(2, 2, 6, 8), normal(6, 6).requires_grad_()
    call = parse(Arguments(q, q, q, bias), Options())
    assert not pytorch.takes_as_it_is(replace(call, device=torch.device("cuda")), q, q, q, bias)
    out = pytorch._sdpa(call, on_gpu(q), on_gpu(q), on_gpu(q), call.small_mask(bias), scale=call.scale, is_causal=False)
    wide = bias.detach().double().requires_grad_()
    [wanted] = torch.autograd.grad(reference.attention(q, q, q, mask=wide, scale=call.scale)[0].square().sum(), wide)
    found = torch.autograd.grad(out.square().sum(), bias)[0].double()
    assert (found - wanted).norm() <= FP32.gradient_norm * wanted.norm()


WIDE_MASK = {"a mask of float32": {"attn_mask": normal(8, 8)}, "slopes": {"alibi_slopes": torch.rand(4)}}


@pytest.mark.parametrize("words", WIDE_MASK.values(), ids=WIDE_MASK)
def test_what_is_wider_than_its_queries_isnt_handed_to_a_gpu_beside_them(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses it there, or reads it as if it were as narrow."""
    met: list[torch.dtype] = []

    def sdpa(call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, **words: Any) -> torch.Tensor:
        met.extend([q.dtype, k.dtype, v.dtype, mask.dtype])
        return torch_attention.sdpa(q, k, v, mask, **words)

    monkeypatch.setattr(pytorch, "_sdpa", sdpa)
    q = X[..., :8, :]
    for given, wide in ((q, False), (on_gpu(q), True)):
        met.clear()
        mask, per_head = words.get("attn_mask"), PerHead(words.get("alibi_slopes"))
        call = parse(Arguments(q, q, q, mask, per_head=per_head), Options())
        out = pytorch.attention_by_torch(call, given, given, given, mask, None, per_head)[0]
        assert met == [torch.float32] * 4 if wide else met == [torch.bfloat16] * 3 + [torch.float32]
        assert out.dtype == torch.bfloat16


GONE: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": True}, "window": {"window": 3}, "lse": {"return_lse": True}, "softcap": {"softcap": 2.0}
}  # fmt: skip

EMPTY = {
    "no batch": ((0, 4, 8, 16), 8, 16),
    "no tokens": ((2, 4, 0, 16), 0, 16),
    "no queries": ((2, 4, 0, 16), 8, 16),
    "no keys": ((2, 4, 8, 16), 0, 16),
    "no columns": ((2, 4, 8, 0), 8, 32),
    "no values": ((2, 4, 8, 16), 8, 0),
    "no heads": ((2, 0, 8, 16), 8, 16),
}


@pytest.mark.parametrize("more", GONE.values(), ids=GONE)
@pytest.mark.parametrize(("shape", "n_kv", "d_v"), EMPTY.values(), ids=EMPTY)
def test_all_inputs_of_empty_calls_have_gradients(shape: tuple[int, ...], n_kv: int, d_v: int, more: dict[str, Any]) -> None:
    q, k, v = (torch.randn(x, requires_grad=True) for x in (shape, (*shape[:2], n_kv, shape[3]), (*shape[:2], n_kv, d_v)))
    slopes, sinks = (torch.rand(shape[1], requires_grad=True) for _ in range(2))
    bias = torch.zeros(shape[2], n_kv, requires_grad=True)
    others: tuple[dict[str, Any], ...] = (
        {},
        {"alibi_slopes": slopes},
        {"sinks": sinks},
        {} if "is_causal" in more else {"attn_mask": bias},
    )
    for given in others:
        leaves = [q, k, v, *given.values()]
        found = dispatch.attention(q, k, v, **more, **given)
        for out in found if isinstance(found, tuple) else (found,):
            for grad, x in zip(torch.autograd.grad(out.sum(), leaves, retain_graph=True), leaves, strict=True):
                assert grad.shape == x.shape and bool(grad.isfinite().all())


@pytest.mark.parametrize("more", GONE.values(), ids=GONE)
def test_dropout_of_everything_gives_zeros_and_zero_gradients(more: dict[str, Any]) -> None:
    q, k, v = (normal(2, 4, 10, 16, seed=seed).requires_grad_() for seed in range(3))
    for seed in (None, 3):
        found = dispatch.attention(q, k, v, dropout_p=1.0, seed=seed, **more)
        out = found[0] if isinstance(found, tuple) else found
        assert not out.any() and all(not grad.any() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_a_gradient_of_the_lse_alone_leaves_zeros_for_the_values() -> None:
    q, k, v = (normal(2, 4, 10, 16, seed=seed).requires_grad_() for seed in range(3))
    dq, dk, dv = torch.autograd.grad(dispatch.attention(q, k, v, return_lse=True)[1].sum(), (q, k, v))
    assert dq.any() and dk.any() and not dv.any()


def test_each_element_of_a_repeated_bias_that_is_differentiated_has_its_own_gradient() -> None:
    bias = on_gpu(X[:1, :, :, :1].float().expand(2, 4, 16, 32)).requires_grad_()
    [grad] = torch.autograd.grad(readable(bias, repeats=True).sum(), bias)
    assert torch.equal(grad, torch.ones(2, 4, 16, 32))
