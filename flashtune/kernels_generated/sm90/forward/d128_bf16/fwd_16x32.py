"""Attention forward with plain pointers.

Compiled in: fwd-bf16-d128
Template: flash_fwd
Variant: a959f033bce92cf7
Config: BLOCK_M=16 BLOCK_N=32 LOAD_V_EARLY=False ORDER=rows maxnreg=0 num_stages=1 num_warps=1

Generated; do not edit. `flashtune generate` writes it anew.
"""

import triton
import triton.language as tl


@triton.jit
def factors(row_max, scale):
    """Factors that bring scores of rows with these maxima to units of log 2: `scale`, or from 2^27 on the next power of two.

    There a product's rounding is more than exp2 can hold, except by a power of two, and the softmax picks the largest score either way:
    where an earlier block has it, the factors of this one don't matter.
    """
    bits = (tl.cast(scale, tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    power = tl.cast(bits, tl.float32, bitcast=True)
    return tl.where(tl.abs(row_max) >= 134217728.0, power, scale)


@triton.jit(
    do_not_specialize=[
        "heads",
        "group",
        "n_q",
        "n_kv",
    ]
)
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    heads,
    group,
    n_q,
    n_kv,
    score_scale,
    WIDE: tl.constexpr,
):
    """One query tile of one head. Of `heads` query heads, `group` share a key head; `score_scale` brings scores to units of log 2."""
    BLOCK_M: tl.constexpr = 16
    BLOCK_N: tl.constexpr = 32
    BLOCK_D: tl.constexpr = 128
    BLOCK_DV: tl.constexpr = 128

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
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]

    # Offsets are 64-bit; those within one tile fit 32 bits, which saves registers, unless its rows lie very far apart.
    tile_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    k_ptr += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    k_offsets = offs_n.to(tile_type)[:, None] * stride_kn + offs_d.to(tile_type)[None, :] * stride_kd  # [BLOCK_N, BLOCK_D]
    v_offsets = offs_n.to(tile_type)[:, None] * stride_vn + offs_dv.to(tile_type)[None, :] * stride_vd  # [BLOCK_N, BLOCK_DV]

    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    q_ptrs = q_ptr + offs_m.to(tl.int64)[:, None] * stride_qm + offs_d.to(tl.int64)[None, :] * stride_qd  # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(q_ptrs, mask=(offs_m < n_q)[:, None], other=0.0)  # [BLOCK_M, BLOCK_D]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    row_sum = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]

    # Only a block that reaches over the end needs a mask.
    free_last = n_kv // BLOCK_N * BLOCK_N

    for start_n in range(0, free_last, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offsets  # [BLOCK_N, BLOCK_D]
        k_tile = tl.load(k_ptrs)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q_tile, k_tile.T)  # [BLOCK_M, BLOCK_N]
        block_max = tl.max(scores, 1)  # [BLOCK_M]
        factor = factors(block_max * score_scale, score_scale)  # [BLOCK_M]
        new_max = tl.maximum(row_max, block_max * factor)  # [BLOCK_M]
        rescale = tl.exp2(row_max - new_max)  # [BLOCK_M]
        probs = tl.exp2(scores * factor[:, None] - new_max[:, None])  # [BLOCK_M, BLOCK_N]
        row_max = new_max  # [BLOCK_M]
        row_sum = row_sum * rescale + tl.sum(probs, 1)  # [BLOCK_M]
        acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
        v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offsets  # [BLOCK_N, BLOCK_DV]
        v_tile = tl.load(v_ptrs)  # [BLOCK_N, BLOCK_DV]
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc)  # [BLOCK_M, BLOCK_DV]

    for start_n in range(free_last, n_kv, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        columns = start_n + offs_n  # [BLOCK_N]
        k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offsets  # [BLOCK_N, BLOCK_D]
        k_tile = tl.load(k_ptrs, mask=(columns < n_kv)[:, None], other=0.0)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q_tile, k_tile.T)  # [BLOCK_M, BLOCK_N]
        scores = tl.where(columns[None, :] < n_kv, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        block_max = tl.max(scores, 1)  # [BLOCK_M]
        factor = factors(block_max * score_scale, score_scale)  # [BLOCK_M]
        new_max = tl.maximum(row_max, block_max * factor)  # [BLOCK_M]
        rescale = tl.exp2(row_max - new_max)  # [BLOCK_M]
        probs = tl.exp2(scores * factor[:, None] - new_max[:, None])  # [BLOCK_M, BLOCK_N]
        row_max = new_max  # [BLOCK_M]
        row_sum = row_sum * rescale + tl.sum(probs, 1)  # [BLOCK_M]
        acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
        v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offsets  # [BLOCK_N, BLOCK_DV]
        v_tile = tl.load(v_ptrs, mask=(columns < n_kv)[:, None], other=0.0)  # [BLOCK_N, BLOCK_DV]
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc)  # [BLOCK_M, BLOCK_DV]

    # In the units of all other scores again.
    row_max = tl.where(tl.abs(row_max) >= 134217728.0, row_max / factors(row_max, score_scale) * score_scale, row_max)  # [BLOCK_M]
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
    "template": "flash_fwd",
    "spec": {
        "direction": "fwd",
        "dtype": "bf16",
        "d": 128,
        "d_v": 128,
        "causal": False,
        "window": False,
        "mask": "none",
        "dropout": False,
        "softcap": False,
        "tf32": False,
    },
    "config": {
        "BLOCK_M": 16,
        "BLOCK_N": 32,
        "LOAD_V_EARLY": False,
        "ORDER": "rows",
        "maxnreg": 0,
        "num_stages": 1,
        "num_warps": 1,
    },
}
