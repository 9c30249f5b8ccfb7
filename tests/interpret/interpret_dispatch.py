"""Answers of dispatch where Triton's interpreter serves; see test_dispatch_interpreter."""

from typing import Any

import torch

from flashtune import dispatch


def main() -> list[Any]:
    q = torch.randn(1, 2, 20, 16)
    said = dispatch.explain(q, q, q, is_causal=True)
    half = q.bfloat16()
    of_bf16 = dispatch.explain(half, half, half)
    found: list[Any] = [said.kind, said.template, said.gpu, said.key, "interpreter" in said.reason]
    found += [of_bf16.kind, of_bf16.gpu, of_bf16.reason]
    compiled = torch.compile(lambda x: dispatch.attention(x, x, x, is_causal=True), backend="aot_eager", fullgraph=True)
    rows_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    for x in (q, rows_first):
        served, eager = compiled(x), dispatch.attention(x, x, x, is_causal=True)
        found += [torch.equal(served, eager), served.stride() == eager.stride()]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return [*found, (compiled(q) - wanted).abs().max().item() < 1e-5]
