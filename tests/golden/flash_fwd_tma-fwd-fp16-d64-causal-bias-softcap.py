"""Attention forward with TMA descriptors.

Compiled in: fwd-fp16-d64-causal-softcap-bias
Template: flash_fwd_tma
Variant: 24a063f8d8a07203
Config: BLOCK_M=128 BLOCK_N=64 ORDER=grouped maxnreg=168 num_stages=2 num_warps=8

Generated; do not edit. `flashtune generate` writes it anew.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh(x), 2e-7 off at most, which 16-bit probabilities don't see; can't overflow: exp2 goes to 0 or inf."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit(
    do_not_specialize=[
        "heads",
        "group",
        "n_q",
        "n_kv",
        "diagonal",
    ]
)
def attention_forward(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    mask_ptr,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    heads,
    group,
    n_q,
    n_kv,
    score_scale,
    inner_scale,
    diagonal,
):
    """One query tile of one head. Of `heads` query heads, `group` share a key head; `score_scale` brings scores to units of log 2."""
    BLOCK_M: tl.constexpr = 128
    BLOCK_N: tl.constexpr = 64
    BLOCK_D: tl.constexpr = 64
    BLOCK_DV: tl.constexpr = 64

    program = tl.program_id(0)
    tiles = tl.cdiv(n_q, BLOCK_M)
    # Longest rows first among eight heads at a time, whose keys and values stay in the L2 cache.
    group_start = program // (8 * tiles) * 8
    group_size = tl.minimum(tl.num_programs(0) // tiles - group_start, 8)
    place = program % (8 * tiles)
    tile = tiles - 1 - place // group_size
    head_index = group_start + place % group_size
    batch = head_index // heads
    head = head_index % heads
    kv_head = head // group
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    # Rows beyond the end read the last one's mask, which saves a predicate; they are never stored.
    mask_rows = tl.minimum(offs_m, n_q - 1).to(tl.int64)[:, None] * stride_mm  # [BLOCK_M, 1]
    mask_ptrs = mask_ptr + batch.to(tl.int64) * stride_mb + head.to(tl.int64) * stride_mh + mask_rows  # [BLOCK_M, 1]

    q_tile = q_desc.load([batch, head, start_m, 0]).reshape([BLOCK_M, BLOCK_D])  # [BLOCK_M, BLOCK_D]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    row_sum = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]

    end_m = tl.minimum(start_m + BLOCK_M, n_q) - 1
    # Columns up to last are visited; all rows of the tile see those up to free_last.
    row_last = tl.minimum(offs_m + diagonal, n_kv - 1)  # [BLOCK_M]
    last = tl.minimum(end_m + diagonal + 1, n_kv)
    free_last = tl.maximum(tl.minimum(start_m + diagonal + 1, n_kv), 0) // BLOCK_N * BLOCK_N

    for start_n in range(0, free_last, BLOCK_N):
        columns = start_n + offs_n  # [BLOCK_N]
        k_tile = k_desc.load([batch, kv_head, start_n, 0]).reshape([BLOCK_N, BLOCK_D])  # [BLOCK_N, BLOCK_D]
        mask_columns = columns.to(tl.int64)[None, :] * stride_mn  # [1, BLOCK_N]
        mask_tile = tl.load(mask_ptrs + mask_columns)  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_tile, k_tile.T)  # [BLOCK_M, BLOCK_N]
        scores = tanh(scores * inner_scale)  # [BLOCK_M, BLOCK_N]
        scores = scores * score_scale + mask_tile.to(tl.float32) * 1.4426950408889634  # [BLOCK_M, BLOCK_N]
        new_max = tl.maximum(row_max, tl.max(scores, 1))  # [BLOCK_M]
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # [BLOCK_M]
        rescale = tl.exp2(row_max - shift)  # [BLOCK_M]
        probs = tl.exp2(scores - shift[:, None])  # [BLOCK_M, BLOCK_N]
        row_max = new_max  # [BLOCK_M]
        row_sum = row_sum * rescale + tl.sum(probs, 1)  # [BLOCK_M]
        acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
        v_tile = v_desc.load([batch, kv_head, start_n, 0]).reshape([BLOCK_N, BLOCK_DV])  # [BLOCK_N, BLOCK_DV]
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc)  # [BLOCK_M, BLOCK_DV]

    for start_n in range(free_last, last, BLOCK_N):
        columns = start_n + offs_n  # [BLOCK_N]
        k_tile = k_desc.load([batch, kv_head, start_n, 0]).reshape([BLOCK_N, BLOCK_D])  # [BLOCK_N, BLOCK_D]
        mask_columns = columns.to(tl.int64)[None, :] * stride_mn  # [1, BLOCK_N]
        mask_tile = tl.load(mask_ptrs + mask_columns, mask=(columns < n_kv)[None, :], other=0.0)  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_tile, k_tile.T)  # [BLOCK_M, BLOCK_N]
        scores = tanh(scores * inner_scale)  # [BLOCK_M, BLOCK_N]
        scores = scores * score_scale + mask_tile.to(tl.float32) * 1.4426950408889634  # [BLOCK_M, BLOCK_N]
        scores = tl.where(columns[None, :] <= row_last[:, None], scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        new_max = tl.maximum(row_max, tl.max(scores, 1))  # [BLOCK_M]
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # [BLOCK_M]
        rescale = tl.exp2(row_max - shift)  # [BLOCK_M]
        probs = tl.exp2(scores - shift[:, None])  # [BLOCK_M, BLOCK_N]
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
    in_out = (offs_m < n_q)[:, None]  # [BLOCK_M, 1]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=in_out)


KERNEL = {
    "template": "flash_fwd_tma",
    "spec": {
        "direction": "fwd",
        "dtype": "fp16",
        "d": 64,
        "d_v": 64,
        "causal": True,
        "window": False,
        "mask": "bias",
        "dropout": False,
        "softcap": True,
        "tf32": False,
    },
    "config": {
        "BLOCK_M": 128,
        "BLOCK_N": 64,
        "ORDER": "grouped",
        "maxnreg": 168,
        "num_stages": 2,
        "num_warps": 8,
    },
}
