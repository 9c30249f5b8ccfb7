"""Prints what dispatch says and computes where Triton's interpreter serves; see test_dispatch_interpreter."""

import torch

from flashtune import dispatch


def main() -> None:
    q = torch.randn(1, 2, 20, 16)
    found = dispatch.explain(q, q, q, is_causal=True)
    print(found.kind, found.template, found.gpu, found.key, "interpreter" in found.reason)
    half = q.bfloat16()
    found = dispatch.explain(half, half, half)
    print(found.kind, found.gpu, found.reason)
    compiled = torch.compile(lambda x: dispatch.attention(x, x, x, is_causal=True), backend="aot_eager", fullgraph=True)
    rows_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    for x in (q, rows_first):
        served, eager = compiled(x), dispatch.attention(x, x, x, is_causal=True)
        print(torch.equal(served, eager), served.stride() == eager.stride())
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    print((compiled(q) - wanted).abs().max().item() < 1e-5)


if __name__ == "__main__":
    main()
