"""Attention forward with plain pointers.

Compiled in: fwd-fp32-d80x64-window-dropout-bool
Template: flash_fwd
Variant: c642f0549a963806
Config: BLOCK_M=128 BLOCK_N=64 LOAD_V_EARLY=True ORDER=heads maxnreg=0 num_stages=1 num_warps=8

Generated; do not edit. `flashtune generate` writes it anew.
"""

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, seed):
    """Four words of 32 random bits for a counter of four: Philox4x32-7, the values of tl.philox(seed, c0, c1, c2, c3, 7)."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        # One wide product takes the GPU half the multiplications of tl.philox's high and low words.
        a = c0.to(tl.uint64) * 0xD2511F53  # [BLOCK_M, BLOCK_N]
        b = c2.to(tl.uint64) * 0xCD9E8D57  # [BLOCK_M, BLOCK_N]
        c0, c1 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32)  # [BLOCK_M, BLOCK_N]
        c2, c3 = (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)  # [BLOCK_M, BLOCK_N]
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def dropout_keep(seed, offset, head_index, start_m, start_n, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which pairs of a tile dropout keeps: a function of the absolute row, column and head alone.

    One Philox call draws for the sixteen pairs (row, row + 8) x (col, col + 1) x (columns + 0, 8, 16, 24). In a tensor-core product
    they sit in one thread's registers and the compiler merges their calls, since the counters have none of the bits that tell them apart.
    """
    row = tl.arange(0, BLOCK_M).to(tl.uint32)[:, None]  # [BLOCK_M, 1]
    col = tl.arange(0, BLOCK_N).to(tl.uint32)[None, :]  # [1, BLOCK_N]
    # start_m and start_n are multiples of 16 and 32, so nothing carries from them into the tile's own bits.
    row_counter = (row >> 4 << 3 | row & 7) + tl.cast(start_m // 2, tl.uint32)  # [BLOCK_M, 1]
    col_counter = (col >> 5 << 2 | col >> 1 & 3) + tl.cast(start_n // 8, tl.uint32)  # [1, BLOCK_N]
    zero = tl.zeros([BLOCK_M, BLOCK_N], tl.uint32)  # [BLOCK_M, BLOCK_N]
    head_counter = zero + tl.cast(head_index, tl.uint32)  # [BLOCK_M, BLOCK_N]
    call_counter = zero + tl.cast(offset, tl.uint32)  # [BLOCK_M, BLOCK_N]
    seed = tl.cast(seed, tl.uint64)
    word_0, word_1, word_2, word_3 = philox(zero + col_counter, zero + row_counter, head_counter, call_counter, seed)
    low = tl.where((col & 8) == 0, word_0, word_1)  # [BLOCK_M, BLOCK_N]
    high = tl.where((col & 8) == 0, word_2, word_3)  # [BLOCK_M, BLOCK_N]
    word = tl.where((col & 16) == 0, low, high)  # [BLOCK_M, BLOCK_N]
    # Above a rate of one half the bits' complement is what draws.
    word = word ^ tl.cast((16384 - threshold) >> 31, tl.uint32)  # [BLOCK_M, BLOCK_N]
    word = tl.where((row & 8) == 0, word, word << 8 | word >> 24)  # [BLOCK_M, BLOCK_N]
    # A draw's 15 bits are compared at the top of a register; what stands below them can't change the outcome.
    draw = tl.where((col & 1) == 0, word << 17, word << 1)  # [BLOCK_M, BLOCK_N]
    return draw >= tl.cast(threshold, tl.uint32) << 17


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
        "diagonal",
        "window_left",
        "window_right",
        "threshold",
        "seed",
        "offset",
    ]
)
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    mask_ptr,
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
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    heads,
    group,
    n_q,
    n_kv,
    score_scale,
    diagonal,
    window_left,
    window_right,
    keep_scale,
    threshold,
    seed: tl.uint64,
    offset: tl.uint32,
    WIDE: tl.constexpr,
):
    """One query tile of one head. Of `heads` query heads, `group` share a key head; `score_scale` brings scores to units of log 2."""
    BLOCK_M: tl.constexpr = 128
    BLOCK_N: tl.constexpr = 64
    BLOCK_D: tl.constexpr = 128
    BLOCK_DV: tl.constexpr = 64

    program = tl.program_id(0)
    tiles = tl.cdiv(n_q, BLOCK_M)
    head_count = tl.num_programs(0) // tiles
    tile = program // head_count
    head_index = program % head_count
    batch = head_index // heads
    head = head_index % heads
    kv_head = head // group
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    in_d = (offs_d < 80)[None, :]  # [1, BLOCK_D]

    # Offsets are 64-bit; those within one tile fit 32 bits, which saves registers, unless its rows lie very far apart.
    tile_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    k_ptr += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    k_offsets = offs_n.to(tile_type)[:, None] * stride_kn + offs_d.to(tile_type)[None, :] * stride_kd  # [BLOCK_N, BLOCK_D]
    v_offsets = offs_n.to(tile_type)[:, None] * stride_vn + offs_dv.to(tile_type)[None, :] * stride_vd  # [BLOCK_N, BLOCK_DV]
    # Rows beyond the end read the last one's mask, which saves a predicate; they are never stored.
    mask_rows = tl.minimum(offs_m, n_q - 1).to(tl.int64)[:, None] * stride_mm  # [BLOCK_M, 1]
    mask_ptrs = mask_ptr + batch.to(tl.int64) * stride_mb + head.to(tl.int64) * stride_mh + mask_rows  # [BLOCK_M, 1]

    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    q_ptrs = q_ptr + offs_m.to(tl.int64)[:, None] * stride_qm + offs_d.to(tl.int64)[None, :] * stride_qd  # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(q_ptrs, mask=(offs_m < n_q)[:, None] & in_d, other=0.0)  # [BLOCK_M, BLOCK_D]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    row_sum = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]

    end_m = tl.minimum(start_m + BLOCK_M, n_q) - 1
    # Columns first .. last are visited; all rows of the tile see those from free_first to free_last.
    row_last = tl.minimum(offs_m + diagonal + window_right, n_kv - 1)  # [BLOCK_M]
    last = tl.minimum(end_m + diagonal + window_right + 1, n_kv)
    row_first = offs_m + diagonal - window_left  # [BLOCK_M]
    first = tl.maximum(start_m + diagonal - window_left, 0) // BLOCK_N * BLOCK_N
    free_last = tl.maximum(tl.minimum(start_m + diagonal + window_right + 1, n_kv), 0) // BLOCK_N * BLOCK_N
    free_first = tl.cdiv(tl.maximum(end_m + diagonal - window_left, 0), BLOCK_N) * BLOCK_N
    free_first = tl.minimum(free_first, tl.cdiv(tl.maximum(last, 0), BLOCK_N) * BLOCK_N)
    free_last = tl.maximum(free_last, free_first)

    for start_n in range(first, free_first, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        columns = start_n + offs_n  # [BLOCK_N]
        k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offsets  # [BLOCK_N, BLOCK_D]
        k_tile = tl.load(k_ptrs, mask=(columns < n_kv)[:, None] & in_d, other=0.0)  # [BLOCK_N, BLOCK_D]
        v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offsets  # [BLOCK_N, BLOCK_DV]
        v_tile = tl.load(v_ptrs, mask=(columns < n_kv)[:, None], other=0.0)  # [BLOCK_N, BLOCK_DV]
        mask_columns = columns.to(tl.int64)[None, :] * stride_mn  # [1, BLOCK_N]
        mask_tile = tl.load(mask_ptrs + mask_columns, mask=(columns < n_kv)[None, :], other=0) != 0  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores = tl.where(mask_tile, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        visible = (columns[None, :] >= row_first[:, None]) & (columns[None, :] <= row_last[:, None])  # [BLOCK_M, BLOCK_N]
        scores = tl.where(visible, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        block_max = tl.max(scores, 1)  # [BLOCK_M]
        factor = factors(block_max * score_scale, score_scale)  # [BLOCK_M]
        new_max = tl.maximum(row_max, block_max * factor)  # [BLOCK_M]
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # [BLOCK_M]
        rescale = tl.exp2(row_max - shift)  # [BLOCK_M]
        probs = tl.exp2(scores * factor[:, None] - shift[:, None])  # [BLOCK_M, BLOCK_N]
        row_max = new_max  # [BLOCK_M]
        row_sum = row_sum * rescale + tl.sum(probs, 1)  # [BLOCK_M]
        acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
        keep = dropout_keep(seed, offset, head_index, start_m, start_n, threshold, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        # A product, or the compiler selects after the rounding to 16 bits, half a register at a time.
        probs = probs * keep.to(tl.float32)  # [BLOCK_M, BLOCK_N]
        acc = tl.dot(probs, v_tile, acc, input_precision="ieee")  # [BLOCK_M, BLOCK_DV]

    for start_n in range(free_first, free_last, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        columns = start_n + offs_n  # [BLOCK_N]
        k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offsets  # [BLOCK_N, BLOCK_D]
        k_tile = tl.load(k_ptrs, mask=in_d, other=0.0)  # [BLOCK_N, BLOCK_D]
        v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offsets  # [BLOCK_N, BLOCK_DV]
        v_tile = tl.load(v_ptrs)  # [BLOCK_N, BLOCK_DV]
        mask_columns = columns.to(tl.int64)[None, :] * stride_mn  # [1, BLOCK_N]
        mask_tile = tl.load(mask_ptrs + mask_columns) != 0  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores = tl.where(mask_tile, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        block_max = tl.max(scores, 1)  # [BLOCK_M]
        factor = factors(block_max * score_scale, score_scale)  # [BLOCK_M]
        new_max = tl.maximum(row_max, block_max * factor)  # [BLOCK_M]
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # [BLOCK_M]
        rescale = tl.exp2(row_max - shift)  # [BLOCK_M]
        probs = tl.exp2(scores * factor[:, None] - shift[:, None])  # [BLOCK_M, BLOCK_N]
        row_max = new_max  # [BLOCK_M]
        row_sum = row_sum * rescale + tl.sum(probs, 1)  # [BLOCK_M]
        acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
        keep = dropout_keep(seed, offset, head_index, start_m, start_n, threshold, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        # A product, or the compiler selects after the rounding to 16 bits, half a register at a time.
        probs = probs * keep.to(tl.float32)  # [BLOCK_M, BLOCK_N]
        acc = tl.dot(probs, v_tile, acc, input_precision="ieee")  # [BLOCK_M, BLOCK_DV]

    for start_n in range(free_last, last, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        columns = start_n + offs_n  # [BLOCK_N]
        k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offsets  # [BLOCK_N, BLOCK_D]
        k_tile = tl.load(k_ptrs, mask=(columns < n_kv)[:, None] & in_d, other=0.0)  # [BLOCK_N, BLOCK_D]
        v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offsets  # [BLOCK_N, BLOCK_DV]
        v_tile = tl.load(v_ptrs, mask=(columns < n_kv)[:, None], other=0.0)  # [BLOCK_N, BLOCK_DV]
        mask_columns = columns.to(tl.int64)[None, :] * stride_mn  # [1, BLOCK_N]
        mask_tile = tl.load(mask_ptrs + mask_columns, mask=(columns < n_kv)[None, :], other=0) != 0  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores = tl.where(mask_tile, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        visible = (columns[None, :] >= row_first[:, None]) & (columns[None, :] <= row_last[:, None])  # [BLOCK_M, BLOCK_N]
        scores = tl.where(visible, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        block_max = tl.max(scores, 1)  # [BLOCK_M]
        factor = factors(block_max * score_scale, score_scale)  # [BLOCK_M]
        new_max = tl.maximum(row_max, block_max * factor)  # [BLOCK_M]
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # [BLOCK_M]
        rescale = tl.exp2(row_max - shift)  # [BLOCK_M]
        probs = tl.exp2(scores * factor[:, None] - shift[:, None])  # [BLOCK_M, BLOCK_N]
        row_max = new_max  # [BLOCK_M]
        row_sum = row_sum * rescale + tl.sum(probs, 1)  # [BLOCK_M]
        acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
        keep = dropout_keep(seed, offset, head_index, start_m, start_n, threshold, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        # A product, or the compiler selects after the rounding to 16 bits, half a register at a time.
        probs = probs * keep.to(tl.float32)  # [BLOCK_M, BLOCK_N]
        acc = tl.dot(probs, v_tile, acc, input_precision="ieee")  # [BLOCK_M, BLOCK_DV]

    # In the units of all other scores again.
    row_max = tl.where(tl.abs(row_max) >= 134217728.0, row_max / factors(row_max, score_scale) * score_scale, row_max)  # [BLOCK_M]
    # A row that saw no key has the sum 0 and the maximum -inf: its output is 0 and its LSE -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # [BLOCK_M]
    result = acc * (keep_scale / row_sum)[:, None]  # [BLOCK_M, BLOCK_DV]
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
        "dtype": "fp32",
        "d": 80,
        "d_v": 64,
        "causal": False,
        "window": True,
        "mask": "bool",
        "dropout": True,
        "softcap": False,
        "tf32": False,
    },
    "config": {
        "BLOCK_M": 128,
        "BLOCK_N": 64,
        "LOAD_V_EARLY": True,
        "ORDER": "heads",
        "maxnreg": 0,
        "num_stages": 1,
        "num_warps": 8,
    },
}
