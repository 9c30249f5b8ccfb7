"""Attention's forward pass in Helion's language, written as its users would: one loop over keys with a running softmax.

Imported only where Helion is installed, in the processes of helion_attention.py.
"""

import math

import helion  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
import helion.language as hl  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
import torch


@helion.kernel(static_shapes=True)  # type: ignore[untyped-decorator]
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v of full attention; q, k and v are (B * H, N, D) and contiguous, and so is what is returned."""
    heads, queries, d = q.size()
    keys = k.size(1)
    d = hl.specialize(d)
    scale = 1.0 / (math.sqrt(d) * math.log(2.0))
    out = torch.empty_like(q)
    for some, rows in hl.tile([heads, queries]):
        largest = hl.full([some, rows], float("-inf"), dtype=torch.float32)
        total = hl.zeros([some, rows], dtype=torch.float32)
        sums = hl.zeros([some, rows, d], dtype=torch.float32)
        mine = q[some, rows, :]
        for columns in hl.tile(keys):
            scores = torch.bmm(mine, k[some, columns, :].transpose(1, 2), out_dtype=torch.float32)
            larger = torch.maximum(largest, torch.amax(scores, -1) * scale)
            weights = torch.exp2(scores * scale - larger[:, :, None])
            fade = torch.exp2(largest - larger)
            total = total * fade + torch.sum(weights, -1)
            sums = torch.baddbmm(sums * fade[:, :, None], weights.to(v.dtype), v[some, columns, :])
            largest = larger
        out[some, rows, :] = (sums / total[:, :, None]).to(out.dtype)
    return out
