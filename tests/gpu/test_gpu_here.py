"""Kernels serve on this GPU at all: what everything else in this folder rests on."""

import torch

from flashtune import dispatch
from flashtune.core import reference
from flashtune.core.tolerances import TOLERANCES


def test_a_kernel_serves_a_plain_call_on_this_gpu() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 4, 1024, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    with dispatch.use(unmeasured=True):
        out, found = dispatch.attention(q, k, v), dispatch.explain(q, k, v)
    wanted, _ = reference.attention(q, k, v, scale=0.125)
    bound = TOLERANCES["bf16"]
    torch.testing.assert_close(out.double(), wanted, atol=bound.atol, rtol=bound.rtol)
    assert found.template is not None, found.reason
