"""Attention forward for few query rows: several programs share the keys of a tile.

Compiled in: fwd-bf16-d128
Template: flash_decode
Variant: 72a8a51167897c51
Config: BLOCK_M=16 BLOCK_N=128 combine=kernel loads=tma num_stages=3 num_warps=2 programs=1

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


@triton.jit
def combined(part_out_ptr, part_sums_ptr, packed, rows, splits, SPLITS: tl.constexpr, UNROLL: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Output and LSE of the rows `packed` from those of all `splits`, `rows` apart: `SPLITS` a step, `UNROLL` steps in flight.

    Each split's output counts by its share of the softmax's sum, which is its own times exp2(its maximum - the largest). One that saw no
    key has the maximum -inf. The sums lie behind the maxima: an LSE of both would round the sum away beside a large maximum.
    """
    ROWS: tl.constexpr = packed.shape[0]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    row_max = tl.full([ROWS], float("-inf"), tl.float32)  # [ROWS]
    row_sum = tl.zeros([ROWS], tl.float32)  # [ROWS]
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)  # [ROWS, BLOCK_DV]
    for start in tl.range(0, splits, SPLITS, loop_unroll_factor=UNROLL):
        at = start + tl.arange(0, SPLITS)  # [SPLITS]
        offsets = at[:, None] * rows + packed[None, :]  # [SPLITS, ROWS]
        inside = (at < splits)[:, None] & (packed < rows)[None, :]  # [SPLITS, ROWS]
        # Other programs wrote these; .cg reads them where all meet, in L2.
        part_max = tl.load(part_sums_ptr + offsets, mask=inside, other=float("-inf"), cache_modifier=".cg")  # [SPLITS, ROWS]
        sums = tl.load(part_sums_ptr + splits * rows + offsets, mask=inside, other=0.0, cache_modifier=".cg")  # [SPLITS, ROWS]
        out_ptrs = part_out_ptr + offsets[:, :, None] * BLOCK_DV + offs_dv  # [SPLITS, ROWS, BLOCK_DV]
        outs = tl.load(out_ptrs, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")  # [SPLITS, ROWS, BLOCK_DV]
        new_max = tl.maximum(row_max, tl.max(part_max, 0))  # [ROWS]
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # [ROWS]
        rescale = tl.exp2(row_max - shift)  # [ROWS]
        weights = sums * tl.exp2(part_max - shift[None, :])  # [SPLITS, ROWS]
        row_max = new_max  # [ROWS]
        row_sum = row_sum * rescale + tl.sum(weights, 0)  # [ROWS]
        acc = acc * rescale[:, None] + tl.sum(outs * weights[:, :, None], 0)  # [ROWS, BLOCK_DV]
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # [ROWS]
    return acc * (1.0 / row_sum)[:, None], (row_max + tl.log2(row_sum)) * 0.6931471805599453


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
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    part_out_ptr,
    part_sums_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
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
    """One tile's share of keys. Of `heads` query heads, `group` share a key head; `score_scale` brings scores to units of log 2."""
    BLOCK_M: tl.constexpr = 16
    BLOCK_N: tl.constexpr = 128
    BLOCK_D: tl.constexpr = 128
    BLOCK_DV: tl.constexpr = 128

    split, splits = tl.program_id(1), tl.num_programs(1)
    program = tl.program_id(0)
    kv_heads = heads // group
    rows = n_q * group
    tiles = tl.cdiv(rows, BLOCK_M)
    tile = program % tiles
    kv_head = program // tiles % kv_heads
    batch = program // tiles // kv_heads
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_m = packed // group  # [BLOCK_M]
    head = (kv_head * group + packed % group)[:, None]  # [BLOCK_M, 1]
    head_index = batch * heads + kv_head * group + packed % group  # [BLOCK_M]
    # Where the results of this key head's splits are: tiles that are split are too few to pass 2^31.
    part_sums_ptr += (batch * kv_heads + kv_head) * splits * rows * 2
    part_out_ptr += (batch * kv_heads + kv_head) * splits * rows * BLOCK_DV
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]

    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    q_ptrs = q_ptr + offs_m.to(tl.int64)[:, None] * stride_qm + offs_d.to(tl.int64)[None, :] * stride_qd  # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(q_ptrs, mask=(offs_m < n_q)[:, None], other=0.0)  # [BLOCK_M, BLOCK_D]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    row_sum = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]

    # Splits take equal shares of whole blocks; where blocks are few, the last splits take none.
    share = tl.cdiv(n_kv, BLOCK_N * splits) * BLOCK_N
    split_first = split * share
    split_last = tl.minimum(split_first + share, n_kv)

    for start_n in range(split_first, split_last, BLOCK_N):
        columns = start_n + offs_n  # [BLOCK_N]
        k_tile = k_desc.load([batch, kv_head, start_n, 0]).reshape([BLOCK_N, BLOCK_D])  # [BLOCK_N, BLOCK_D]
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
        v_tile = v_desc.load([batch, kv_head, start_n, 0]).reshape([BLOCK_N, BLOCK_DV])  # [BLOCK_N, BLOCK_DV]
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc)  # [BLOCK_M, BLOCK_DV]

    # In the units of all other scores again.
    row_max = tl.where(tl.abs(row_max) >= 134217728.0, row_max / factors(row_max, score_scale) * score_scale, row_max)  # [BLOCK_M]
    # A row that saw no key has the sum 0 and the maximum -inf: its output is 0 and its LSE -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # [BLOCK_M]
    result = acc * (1.0 / row_sum)[:, None]  # [BLOCK_M, BLOCK_DV]
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453  # [BLOCK_M]
    finished = splits == 1
    if splits > 1:
        part_rows = split * rows + packed  # [BLOCK_M]
        tl.store(part_sums_ptr + part_rows, row_max, mask=packed < rows)
        tl.store(part_sums_ptr + splits * rows + part_rows, row_sum, mask=packed < rows)
        tl.store(part_out_ptr + part_rows[:, None] * BLOCK_DV + offs_dv[None, :], result, mask=(packed < rows)[:, None])
    stored = tl.where(finished, n_q, 0)
    tl.store(lse_ptr + tl.cast(head_index, tl.int64) * n_q + offs_m, lse, mask=offs_m < stored)
    out_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * stride_om + offs_dv.to(tl.int64)[None, :] * stride_od  # [BLOCK_M, BLOCK_DV]
    in_out = (offs_m < stored)[:, None]  # [BLOCK_M, 1]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=in_out)


@triton.jit(do_not_specialize=["heads", "group", "n_q", "splits"])
def combine_splits(part_out_ptr, part_sums_ptr, out_ptr, lse_ptr, stride_ob, stride_oh, stride_om, stride_od, heads, group, n_q, splits):
    """One query of one head. Of `heads` query heads, `group` share a key head."""
    BLOCK_M: tl.constexpr = 1
    BLOCK_DV: tl.constexpr = 128

    program = tl.program_id(0)
    kv_heads = heads // group
    rows = n_q * group
    tiles = tl.cdiv(rows, BLOCK_M)
    tile = program % tiles
    kv_head = program // tiles % kv_heads
    batch = program // tiles // kv_heads
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_m = packed // group  # [BLOCK_M]
    head = (kv_head * group + packed % group)[:, None]  # [BLOCK_M, 1]
    head_index = batch * heads + kv_head * group + packed % group  # [BLOCK_M]
    # Where the results of this key head's splits are: tiles that are split are too few to pass 2^31.
    part_sums_ptr += (batch * kv_heads + kv_head) * splits * rows * 2
    part_out_ptr += (batch * kv_heads + kv_head) * splits * rows * BLOCK_DV
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    stored = n_q
    result, lse = combined(part_out_ptr, part_sums_ptr, packed, rows, splits, 32, 1, BLOCK_DV)
    tl.store(lse_ptr + tl.cast(head_index, tl.int64) * n_q + offs_m, lse, mask=offs_m < stored)
    out_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * stride_om + offs_dv.to(tl.int64)[None, :] * stride_od  # [BLOCK_M, BLOCK_DV]
    in_out = (offs_m < stored)[:, None]  # [BLOCK_M, 1]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=in_out)


KERNEL = {
    "template": "flash_decode",
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
        "BLOCK_N": 128,
        "combine": "kernel",
        "loads": "tma",
        "num_stages": 3,
        "num_warps": 2,
        "programs": 1,
    },
}
