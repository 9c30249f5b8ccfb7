"""PyTorch's attention and varlen_attn by the name FLASHTUNE on a GPU: PyTorch's samples, packed sequences, compiled code."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branches import forced, served
from test_gpu_opinfo import results, samples
from torch.nn import attention

from flashtune import dispatch

pytestmark = pytest.mark.skipif(not hasattr(attention, "activate_flash_attention_impl"), reason="this PyTorch has one implementation alone")
held = F.scaled_dot_product_attention


@pytest.fixture
def active() -> Iterator[None]:
    attention.activate_flash_attention_impl("FLASHTUNE")
    yield
    attention.restore_flash_attention_impl()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("index", range(25))
def test_pytorchs_samples_pass_through_it(index: int, dtype: torch.dtype, active: None) -> None:
    pytest.importorskip("expecttest")
    found = samples(dtype)
    if index >= len(found):
        pytest.skip("this torch has fewer samples")
    words = dict(found[index].kwargs)
    mask = words.pop("attn_mask", None)
    tensors = [x.detach().requires_grad_() for x in (found[index].input, *found[index].args, *([] if mask is None else [mask]))]
    torch.manual_seed(3)
    with forced("kernels"):
        ours = results(held, tensors, words)
    attention.restore_flash_attention_impl()
    torch.manual_seed(3)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    theirs, exact = results(held, tensors, words), results(held, wide, words)
    attention.activate_flash_attention_impl("FLASHTUNE")
    for one, other, right in zip(ours, theirs, exact, strict=True):
        if words.get("dropout_p"):
            assert torch.equal(one, other), "dropout is PyTorch's own"
        else:
            off, allowed = (one.double() - right).norm(), (other.double() - right).norm()
            assert off <= 2 * allowed + 2e-2 * right.norm() * (dtype.itemsize == 2) + 1e-5 * right.norm()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0)])
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_sequences_forward_and_backward(window: tuple[int, int], compiled: bool, active: None) -> None:
    from torch.nn.attention.varlen import varlen_attn

    cu = torch.tensor([0, 300, 301, 900, 1500], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(1500, heads, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for heads in (8, 2, 2))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return varlen_attn(q, k, v, cu, cu, 600, 600, window_size=window, enable_gqa=True)

    with dispatch.use(unmeasured=True):
        out = (torch.compile(attend, fullgraph=True) if compiled else attend)(q, k, v)
        found = [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = dispatch.attention_varlen(*wide, cu, cu, 600, 600, window_size=window, enable_gqa=True)
    for one, other in zip(found, [right, *torch.autograd.grad(right.square().sum(), wide)], strict=True):
        assert one.isfinite().all() and (one.double() - other).norm() <= 2e-2 * other.norm()


def test_kernels_serve_and_compiled_programs_have_our_operator(active: None) -> None:
    q = torch.randn(2, 4, 512, 64, dtype=torch.bfloat16, device="cuda")
    with forced("kernels"):
        held(q, q, q, is_causal=True)
        assert served() != "torch"
        traced = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), fullgraph=True)(q)
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        torch.testing.assert_close(traced, held(q, q, q, is_causal=True), atol=2e-2, rtol=2e-2)
