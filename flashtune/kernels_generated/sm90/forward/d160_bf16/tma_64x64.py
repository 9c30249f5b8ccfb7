"""Attention forward with TMA descriptors.

Compiled in: fwd-bf16-d160
Template: flash_fwd_tma
Variant: 7b61e607911334d4
Config: BLOCK_M=64 BLOCK_N=64 ORDER=rows maxnreg=0 num_stages=3 num_warps=4

Generated; do not edit. `flashtune generate` writes it anew.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "heads",
        "group",
        "n_q",
        "n_kv",
    ]
)
def attention_forward(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    heads,
    group,
    n_q,
    n_kv,
    score_scale,
):
    """One query tile of one head. Of `heads` query heads, `group` share a key head; `score_scale` brings scores to units of log 2."""
    BLOCK_M: tl.constexpr = 64
    BLOCK_N: tl.constexpr = 64
    BLOCK_D: tl.constexpr = 256
    BLOCK_DV: tl.constexpr = 256

    program = tl.program_id(0)
    tiles = tl.cdiv(n_q, BLOCK_M)
    tile = program % tiles
    head_index = program // tiles
    batch = head_index // heads
    head = head_index % heads
    kv_head = head // group
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]

    q_tile = q_desc.load([batch, head, start_m, 0]).reshape([BLOCK_M, BLOCK_D])  # [BLOCK_M, BLOCK_D]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    row_sum = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]

    # Only a block that reaches over the end needs a mask.
    free_last = n_kv // BLOCK_N * BLOCK_N

    for start_n in range(0, free_last, BLOCK_N):
        k_tile = k_desc.load([batch, kv_head, start_n, 0]).reshape([BLOCK_N, BLOCK_D])  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q_tile, k_tile.T)  # [BLOCK_M, BLOCK_N]
        new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)  # [BLOCK_M]
        rescale = tl.exp2(row_max - new_max)  # [BLOCK_M]
        probs = tl.exp2(scores * score_scale - new_max[:, None])  # [BLOCK_M, BLOCK_N]
        row_max = new_max  # [BLOCK_M]
        row_sum = row_sum * rescale + tl.sum(probs, 1)  # [BLOCK_M]
        acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
        v_tile = v_desc.load([batch, kv_head, start_n, 0]).reshape([BLOCK_N, BLOCK_DV])  # [BLOCK_N, BLOCK_DV]
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc)  # [BLOCK_M, BLOCK_DV]

    for start_n in range(free_last, n_kv, BLOCK_N):
        columns = start_n + offs_n  # [BLOCK_N]
        k_tile = k_desc.load([batch, kv_head, start_n, 0]).reshape([BLOCK_N, BLOCK_D])  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q_tile, k_tile.T)  # [BLOCK_M, BLOCK_N]
        scores = tl.where(columns[None, :] < n_kv, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)  # [BLOCK_M]
        rescale = tl.exp2(row_max - new_max)  # [BLOCK_M]
        probs = tl.exp2(scores * score_scale - new_max[:, None])  # [BLOCK_M, BLOCK_N]
        row_max = new_max  # [BLOCK_M]
        row_sum = row_sum * rescale + tl.sum(probs, 1)  # [BLOCK_M]
        acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
        v_tile = v_desc.load([batch, kv_head, start_n, 0]).reshape([BLOCK_N, BLOCK_DV])  # [BLOCK_N, BLOCK_DV]
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc)  # [BLOCK_M, BLOCK_DV]

    # A row that saw no key has the sum 0 and the maximum -inf: its output is 0 and its LSE -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # [BLOCK_M]
    result = acc * (1.0 / row_sum)[:, None]  # [BLOCK_M, BLOCK_DV]
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453  # [BLOCK_M]
    tl.store(lse_ptr + tl.cast(head_index, tl.int64) * n_q + offs_m, lse, mask=offs_m < n_q)
    out_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * stride_om + offs_dv.to(tl.int64)[None, :] * stride_od  # [BLOCK_M, BLOCK_DV]
    in_out = (offs_m < n_q)[:, None] & (offs_dv < 160)[None, :]  # [BLOCK_M, BLOCK_DV]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=in_out)


KERNEL = {
    "template": "flash_fwd_tma",
    "spec": {
        "direction": "fwd",
        "dtype": "bf16",
        "d": 160,
        "d_v": 160,
        "causal": False,
        "window": False,
        "mask": "none",
        "dropout": False,
        "softcap": False,
        "tf32": False,
    },
    "config": {
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "ORDER": "rows",
        "maxnreg": 0,
        "num_stages": 3,
        "num_warps": 4,
    },
}
