"""Attention backward with plain pointers, bit for bit repeatable.

Compiled in: bwd-fp32-d80x64-window-alibi-dropout-softcap-bool
Template: flash_bwd
Variant: f6e4249a929c5f40
Config: BLOCK_M=32 BLOCK_N=128 DQ_BLOCK_M=128 DQ_BLOCK_N=64 DQ_num_stages=2 DQ_num_warps=8 ORDER=rows num_stages=2 num_warps=8

Generated; do not edit. `flashtune generate` writes it anew.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh(x) to a few units in the last place; can't overflow."""
    # Near 0 the quotient cancels, so the Taylor series stands in: at 0.25 its next term is 3e-7 of the value.
    square = x * x
    series = x * (1.0 + square * (-0.33333334 + square * (0.13333334 - square * 0.05396825)))
    # exp2 goes to 0 or inf, where the quotient is -1 or 1.
    quotient = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.25, series, quotient)


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
def dropout_keep_transposed(seed, offset, head_index, start_m, start_n, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """`dropout_keep` for a tile whose rows are keys: the same draws of the same pairs."""
    row = tl.arange(0, BLOCK_M).to(tl.uint32)[None, :]  # [1, BLOCK_M]
    col = tl.arange(0, BLOCK_N).to(tl.uint32)[:, None]  # [BLOCK_N, 1]
    row_counter = (row >> 4 << 3 | row & 7) + tl.cast(start_m // 2, tl.uint32)  # [1, BLOCK_M]
    col_counter = (col >> 5 << 2 | col >> 1 & 3) + tl.cast(start_n // 8, tl.uint32)  # [BLOCK_N, 1]
    zero = tl.zeros([BLOCK_N, BLOCK_M], tl.uint32)  # [BLOCK_N, BLOCK_M]
    head_counter = zero + tl.cast(head_index, tl.uint32)  # [BLOCK_N, BLOCK_M]
    call_counter = zero + tl.cast(offset, tl.uint32)  # [BLOCK_N, BLOCK_M]
    seed = tl.cast(seed, tl.uint64)
    word_0, word_1, word_2, word_3 = philox(zero + col_counter, zero + row_counter, head_counter, call_counter, seed)
    low = tl.where((col & 8) == 0, word_0, word_1)  # [BLOCK_N, BLOCK_M]
    high = tl.where((col & 8) == 0, word_2, word_3)  # [BLOCK_N, BLOCK_M]
    word = tl.where((col & 16) == 0, low, high)  # [BLOCK_N, BLOCK_M]
    word = word ^ tl.cast((16384 - threshold) >> 31, tl.uint32)  # [BLOCK_N, BLOCK_M]
    word = tl.where((row & 8) == 0, word, word << 8 | word >> 24)  # [BLOCK_N, BLOCK_M]
    draw = tl.where((col & 1) == 0, word << 17, word << 1)  # [BLOCK_N, BLOCK_M]
    return draw >= tl.cast(threshold, tl.uint32) << 17


@triton.jit(do_not_specialize=["heads", "n_q"])
def row_deltas(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    stride_pb,
    stride_ph,
    stride_pm,
    stride_pd,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    heads,
    n_q,
    HAS_DLSE: tl.constexpr,
):
    """rowsum(dO * O) - dLSE of some rows of one head: what each probability's gradient is lessened by."""
    BLOCK_M: tl.constexpr = 32
    BLOCK_DV: tl.constexpr = 64

    tiles = tl.cdiv(n_q, BLOCK_M)
    tile = tl.program_id(0) % tiles
    head_index = tl.program_id(0) // tiles
    batch = head_index // heads
    head = head_index % heads
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    in_rows = rows < n_q  # [BLOCK_M]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    out_ptr += batch.to(tl.int64) * stride_pb + head.to(tl.int64) * stride_ph
    dout_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_pm + offs_dv.to(tl.int64)[None, :] * stride_pd  # [BLOCK_M, BLOCK_DV]
    dout_ptrs = dout_ptr + rows.to(tl.int64)[:, None] * stride_om + offs_dv.to(tl.int64)[None, :] * stride_od  # [BLOCK_M, BLOCK_DV]
    in_tile = in_rows[:, None]  # [BLOCK_M, 1]
    out_tile = tl.load(out_ptrs, mask=in_tile, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_DV]
    dout_tile = tl.load(dout_ptrs, mask=in_tile, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_DV]
    delta = tl.sum(out_tile * dout_tile, 1)  # [BLOCK_M]
    row_offset = head_index.to(tl.int64) * n_q
    if HAS_DLSE:
        # What flows to the LSE of a row that sees no key goes no further.
        lse = tl.load(lse_ptr + row_offset + rows, mask=in_rows, other=0.0)  # [BLOCK_M]
        dlse = tl.load(dlse_ptr + row_offset + rows, mask=in_rows, other=0.0)  # [BLOCK_M]
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)  # [BLOCK_M]
    tl.store(delta_ptr + row_offset + rows, delta, mask=in_rows)


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
def key_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
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
    slopes_ptr,
    stride_sb,
    stride_sh,
    dk_ptr,
    dv_ptr,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dkd,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    stride_dvd,
    heads,
    group,
    n_q,
    n_kv,
    scale,
    score_scale,
    inner_scale,
    diagonal,
    window_left,
    window_right,
    keep_scale,
    threshold,
    seed: tl.uint64,
    offset: tl.uint32,
    WIDE: tl.constexpr,
):
    """dK and dV of one tile of keys of one key head, which `group` of the `heads` query heads share."""
    BLOCK_M: tl.constexpr = 32
    BLOCK_N: tl.constexpr = 128
    BLOCK_D: tl.constexpr = 128
    BLOCK_DV: tl.constexpr = 64

    program = tl.program_id(0)
    tiles = tl.cdiv(n_kv, BLOCK_N)
    tile = program % tiles
    head_index = program // tiles
    kv_heads = heads // group
    batch = head_index // kv_heads
    kv_head = head_index % kv_heads
    start_n = tile * BLOCK_N
    columns = start_n + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    in_columns = (columns < n_kv)[:, None]  # [BLOCK_N, 1]
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    tile_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    in_d = (offs_d < 80)[None, :]  # [1, BLOCK_D]

    k_ptr += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    k_ptrs = k_ptr + columns.to(tl.int64)[:, None] * stride_kn + offs_d.to(tl.int64)[None, :] * stride_kd  # [BLOCK_N, BLOCK_D]
    v_ptrs = v_ptr + columns.to(tl.int64)[:, None] * stride_vn + offs_dv.to(tl.int64)[None, :] * stride_vd  # [BLOCK_N, BLOCK_DV]
    # Rows of keys beyond the end are never stored, and no other row takes anything from them.
    k_tile = tl.load(k_ptrs, mask=in_columns & in_d, other=0.0)  # [BLOCK_N, BLOCK_D]
    v_tile = tl.load(v_ptrs, mask=in_columns, other=0.0)  # [BLOCK_N, BLOCK_DV]
    q_offsets = offs_m.to(tile_type)[:, None] * stride_qm + offs_d.to(tile_type)[None, :] * stride_qd  # [BLOCK_M, BLOCK_D]
    dout_offsets = offs_m.to(tile_type)[:, None] * stride_om + offs_dv.to(tile_type)[None, :] * stride_od  # [BLOCK_M, BLOCK_DV]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)  # [BLOCK_N, BLOCK_DV]

    # Rows first .. last see some key of the tile; those from free_first to free_last see all of them.
    end_n = tl.minimum(start_n + BLOCK_N, n_kv) - 1
    first = tl.maximum(start_n - diagonal - window_right, 0) // BLOCK_M * BLOCK_M
    free_first = tl.minimum(tl.cdiv(tl.maximum(end_n - diagonal - window_right, 0), BLOCK_M) * BLOCK_M, tl.cdiv(n_q, BLOCK_M) * BLOCK_M)
    last = tl.minimum(end_n - diagonal + window_left + 1, n_q)
    free_last = tl.maximum(tl.minimum(start_n - diagonal + window_left + 1, n_q), 0) // BLOCK_M * BLOCK_M
    free_first = tl.minimum(free_first, tl.maximum(tl.cdiv(last, BLOCK_M) * BLOCK_M, first))
    free_last = tl.maximum(free_last, free_first)

    for member in range(group):
        head = kv_head * group + member
        row_head = batch * heads + head
        row_offset = row_head.to(tl.int64) * n_q
        q_head = q_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        dout_head = dout_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
        mask_head = mask_ptr + batch.to(tl.int64) * stride_mb + head.to(tl.int64) * stride_mh
        mask_head += columns.to(tl.int64)[:, None] * stride_mn  # [BLOCK_N, 1]
        slope = tl.load(slopes_ptr + batch * stride_sb + head * stride_sh) * 1.4426950408889634
        for start_m in range(first, free_first, BLOCK_M):
            start_m = tl.multiple_of(start_m, BLOCK_M)
            rows = start_m + offs_m  # [BLOCK_M]
            in_rows = rows < n_q  # [BLOCK_M]
            q_ptrs = q_head + tl.cast(start_m, tl.int64) * stride_qm + q_offsets  # [BLOCK_M, BLOCK_D]
            dout_ptrs = dout_head + tl.cast(start_m, tl.int64) * stride_om + dout_offsets  # [BLOCK_M, BLOCK_DV]
            q_tile = tl.load(q_ptrs, mask=in_rows[:, None] & in_d, other=0.0)  # [BLOCK_M, BLOCK_D]
            dout_tile = tl.load(dout_ptrs, mask=in_rows[:, None], other=0.0)  # [BLOCK_M, BLOCK_DV]
            lse = tl.load(lse_ptr + row_offset + rows, mask=in_rows, other=float("inf"))  # [BLOCK_M]
            delta = tl.load(delta_ptr + row_offset + rows, mask=in_rows, other=0.0)  # [BLOCK_M]
            # Rows beyond the end, and those that see no key, have no probabilities.
            lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)  # [BLOCK_M]
            mask_rows = tl.minimum(rows, n_q - 1).to(tl.int64)[None, :] * stride_mm  # [1, BLOCK_M]
            mask_tile = tl.load(mask_head + mask_rows, mask=in_columns, other=0) != 0  # [BLOCK_N, BLOCK_M]
            scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
            capped = tanh(scores * inner_scale)  # [BLOCK_N, BLOCK_M]
            scores = capped * score_scale  # [BLOCK_N, BLOCK_M]
            positions = (rows + diagonal).to(tl.float32)  # [BLOCK_M]
            scores = scores - slope * tl.abs(positions[None, :] - columns.to(tl.float32)[:, None])  # [BLOCK_N, BLOCK_M]
            probs = tl.exp2(scores - lse[None, :])  # [BLOCK_N, BLOCK_M]
            probs = tl.where(mask_tile, probs, 0.0)  # [BLOCK_N, BLOCK_M]
            # A masked score may exceed the row's LSE by far: its exponential may be infinite, and 0 times that is NaN.
            last_seen = rows + diagonal + window_right  # [BLOCK_M]
            visible = columns[:, None] <= last_seen[None, :]  # [BLOCK_N, BLOCK_M]
            visible &= columns[:, None] >= (rows + diagonal - window_left)[None, :]  # [BLOCK_N, BLOCK_M]
            probs = tl.where(visible, probs, 0.0)  # [BLOCK_N, BLOCK_M]
            dprobs = tl.dot(v_tile, dout_tile.T, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
            keep = dropout_keep_transposed(seed, offset, row_head, start_m, start_n, threshold, BLOCK_M, BLOCK_N)  # [BLOCK_N, BLOCK_M]
            kept = keep.to(tl.float32) * keep_scale  # [BLOCK_N, BLOCK_M]
            dropped = probs * kept  # [BLOCK_N, BLOCK_M]
            dv = tl.dot(dropped, dout_tile, dv, input_precision="ieee")  # [BLOCK_N, BLOCK_DV]
            dprobs = dprobs * kept  # [BLOCK_N, BLOCK_M]
            dscores = probs * (dprobs - delta[None, :])  # [BLOCK_N, BLOCK_M]
            dscores = dscores * (1.0 - capped * capped)  # [BLOCK_N, BLOCK_M]
            dk = tl.dot(dscores, q_tile, dk, input_precision="ieee")  # [BLOCK_N, BLOCK_D]
        for start_m in range(free_first, free_last, BLOCK_M):
            start_m = tl.multiple_of(start_m, BLOCK_M)
            rows = start_m + offs_m  # [BLOCK_M]
            in_rows = rows < n_q  # [BLOCK_M]
            q_ptrs = q_head + tl.cast(start_m, tl.int64) * stride_qm + q_offsets  # [BLOCK_M, BLOCK_D]
            dout_ptrs = dout_head + tl.cast(start_m, tl.int64) * stride_om + dout_offsets  # [BLOCK_M, BLOCK_DV]
            q_tile = tl.load(q_ptrs, mask=in_rows[:, None] & in_d, other=0.0)  # [BLOCK_M, BLOCK_D]
            dout_tile = tl.load(dout_ptrs, mask=in_rows[:, None], other=0.0)  # [BLOCK_M, BLOCK_DV]
            lse = tl.load(lse_ptr + row_offset + rows, mask=in_rows, other=float("inf"))  # [BLOCK_M]
            delta = tl.load(delta_ptr + row_offset + rows, mask=in_rows, other=0.0)  # [BLOCK_M]
            # Rows beyond the end, and those that see no key, have no probabilities.
            lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)  # [BLOCK_M]
            mask_rows = tl.minimum(rows, n_q - 1).to(tl.int64)[None, :] * stride_mm  # [1, BLOCK_M]
            mask_tile = tl.load(mask_head + mask_rows, mask=in_columns, other=0) != 0  # [BLOCK_N, BLOCK_M]
            scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
            capped = tanh(scores * inner_scale)  # [BLOCK_N, BLOCK_M]
            scores = capped * score_scale  # [BLOCK_N, BLOCK_M]
            positions = (rows + diagonal).to(tl.float32)  # [BLOCK_M]
            scores = scores - slope * tl.abs(positions[None, :] - columns.to(tl.float32)[:, None])  # [BLOCK_N, BLOCK_M]
            probs = tl.exp2(scores - lse[None, :])  # [BLOCK_N, BLOCK_M]
            probs = tl.where(mask_tile, probs, 0.0)  # [BLOCK_N, BLOCK_M]
            dprobs = tl.dot(v_tile, dout_tile.T, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
            keep = dropout_keep_transposed(seed, offset, row_head, start_m, start_n, threshold, BLOCK_M, BLOCK_N)  # [BLOCK_N, BLOCK_M]
            kept = keep.to(tl.float32) * keep_scale  # [BLOCK_N, BLOCK_M]
            dropped = probs * kept  # [BLOCK_N, BLOCK_M]
            dv = tl.dot(dropped, dout_tile, dv, input_precision="ieee")  # [BLOCK_N, BLOCK_DV]
            dprobs = dprobs * kept  # [BLOCK_N, BLOCK_M]
            dscores = probs * (dprobs - delta[None, :])  # [BLOCK_N, BLOCK_M]
            dscores = dscores * (1.0 - capped * capped)  # [BLOCK_N, BLOCK_M]
            dk = tl.dot(dscores, q_tile, dk, input_precision="ieee")  # [BLOCK_N, BLOCK_D]
        for start_m in range(free_last, last, BLOCK_M):
            start_m = tl.multiple_of(start_m, BLOCK_M)
            rows = start_m + offs_m  # [BLOCK_M]
            in_rows = rows < n_q  # [BLOCK_M]
            q_ptrs = q_head + tl.cast(start_m, tl.int64) * stride_qm + q_offsets  # [BLOCK_M, BLOCK_D]
            dout_ptrs = dout_head + tl.cast(start_m, tl.int64) * stride_om + dout_offsets  # [BLOCK_M, BLOCK_DV]
            q_tile = tl.load(q_ptrs, mask=in_rows[:, None] & in_d, other=0.0)  # [BLOCK_M, BLOCK_D]
            dout_tile = tl.load(dout_ptrs, mask=in_rows[:, None], other=0.0)  # [BLOCK_M, BLOCK_DV]
            lse = tl.load(lse_ptr + row_offset + rows, mask=in_rows, other=float("inf"))  # [BLOCK_M]
            delta = tl.load(delta_ptr + row_offset + rows, mask=in_rows, other=0.0)  # [BLOCK_M]
            # Rows beyond the end, and those that see no key, have no probabilities.
            lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)  # [BLOCK_M]
            mask_rows = tl.minimum(rows, n_q - 1).to(tl.int64)[None, :] * stride_mm  # [1, BLOCK_M]
            mask_tile = tl.load(mask_head + mask_rows, mask=in_columns, other=0) != 0  # [BLOCK_N, BLOCK_M]
            scores = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
            capped = tanh(scores * inner_scale)  # [BLOCK_N, BLOCK_M]
            scores = capped * score_scale  # [BLOCK_N, BLOCK_M]
            positions = (rows + diagonal).to(tl.float32)  # [BLOCK_M]
            scores = scores - slope * tl.abs(positions[None, :] - columns.to(tl.float32)[:, None])  # [BLOCK_N, BLOCK_M]
            probs = tl.exp2(scores - lse[None, :])  # [BLOCK_N, BLOCK_M]
            probs = tl.where(mask_tile, probs, 0.0)  # [BLOCK_N, BLOCK_M]
            # A masked score may exceed the row's LSE by far: its exponential may be infinite, and 0 times that is NaN.
            last_seen = rows + diagonal + window_right  # [BLOCK_M]
            visible = columns[:, None] <= last_seen[None, :]  # [BLOCK_N, BLOCK_M]
            visible &= columns[:, None] >= (rows + diagonal - window_left)[None, :]  # [BLOCK_N, BLOCK_M]
            probs = tl.where(visible, probs, 0.0)  # [BLOCK_N, BLOCK_M]
            dprobs = tl.dot(v_tile, dout_tile.T, input_precision="ieee")  # [BLOCK_N, BLOCK_M]
            keep = dropout_keep_transposed(seed, offset, row_head, start_m, start_n, threshold, BLOCK_M, BLOCK_N)  # [BLOCK_N, BLOCK_M]
            kept = keep.to(tl.float32) * keep_scale  # [BLOCK_N, BLOCK_M]
            dropped = probs * kept  # [BLOCK_N, BLOCK_M]
            dv = tl.dot(dropped, dout_tile, dv, input_precision="ieee")  # [BLOCK_N, BLOCK_DV]
            dprobs = dprobs * kept  # [BLOCK_N, BLOCK_M]
            dscores = probs * (dprobs - delta[None, :])  # [BLOCK_N, BLOCK_M]
            dscores = dscores * (1.0 - capped * capped)  # [BLOCK_N, BLOCK_M]
            dk = tl.dot(dscores, q_tile, dk, input_precision="ieee")  # [BLOCK_N, BLOCK_D]

    dk_ptr += batch.to(tl.int64) * stride_dkb + kv_head.to(tl.int64) * stride_dkh
    dv_ptr += batch.to(tl.int64) * stride_dvb + kv_head.to(tl.int64) * stride_dvh
    dk_ptrs = dk_ptr + columns.to(tl.int64)[:, None] * stride_dkn + offs_d.to(tl.int64)[None, :] * stride_dkd  # [BLOCK_N, BLOCK_D]
    dv_ptrs = dv_ptr + columns.to(tl.int64)[:, None] * stride_dvn + offs_dv.to(tl.int64)[None, :] * stride_dvd  # [BLOCK_N, BLOCK_DV]
    tl.store(dk_ptrs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_columns & in_d)
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=in_columns)


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
def query_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
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
    slopes_ptr,
    stride_sb,
    stride_sh,
    dq_ptr,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    stride_dqd,
    heads,
    group,
    n_q,
    n_kv,
    scale,
    score_scale,
    inner_scale,
    diagonal,
    window_left,
    window_right,
    keep_scale,
    threshold,
    seed: tl.uint64,
    offset: tl.uint32,
    WIDE: tl.constexpr,
):
    """dQ of one tile of queries of one head; `group` of the `heads` query heads share a key head."""
    BLOCK_M: tl.constexpr = 128
    BLOCK_N: tl.constexpr = 64
    BLOCK_D: tl.constexpr = 128
    BLOCK_DV: tl.constexpr = 64

    program = tl.program_id(0)
    tiles = tl.cdiv(n_q, BLOCK_M)
    tile = program % tiles
    head_index = program // tiles
    batch = head_index // heads
    head = head_index % heads
    kv_head = head // group
    start_m = tile * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    rows = offs_m  # [BLOCK_M]
    in_rows = rows < n_q  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    tile_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    in_d = (offs_d < 80)[None, :]  # [1, BLOCK_D]

    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    dout_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    k_ptr += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    q_ptrs = q_ptr + rows.to(tl.int64)[:, None] * stride_qm + offs_d.to(tl.int64)[None, :] * stride_qd  # [BLOCK_M, BLOCK_D]
    dout_ptrs = dout_ptr + rows.to(tl.int64)[:, None] * stride_om + offs_dv.to(tl.int64)[None, :] * stride_od  # [BLOCK_M, BLOCK_DV]
    q_tile = tl.load(q_ptrs, mask=in_rows[:, None] & in_d, other=0.0)  # [BLOCK_M, BLOCK_D]
    dout_tile = tl.load(dout_ptrs, mask=in_rows[:, None], other=0.0)  # [BLOCK_M, BLOCK_DV]
    row_offset = head_index.to(tl.int64) * n_q
    lse = tl.load(lse_ptr + row_offset + rows, mask=in_rows, other=float("inf"))  # [BLOCK_M]
    delta = tl.load(delta_ptr + row_offset + rows, mask=in_rows, other=0.0)  # [BLOCK_M]
    # Rows that see no key have no probabilities.
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)  # [BLOCK_M]
    # Rows beyond the end read the last one's mask, which saves a predicate; they are never stored.
    mask_rows = tl.minimum(offs_m, n_q - 1).to(tl.int64)[:, None] * stride_mm  # [BLOCK_M, 1]
    mask_ptrs = mask_ptr + batch.to(tl.int64) * stride_mb + head.to(tl.int64) * stride_mh + mask_rows  # [BLOCK_M, 1]
    slope = tl.load(slopes_ptr + batch * stride_sb + head * stride_sh) * 1.4426950408889634
    k_offsets = offs_n.to(tile_type)[:, None] * stride_kn + offs_d.to(tile_type)[None, :] * stride_kd  # [BLOCK_N, BLOCK_D]
    v_offsets = offs_n.to(tile_type)[:, None] * stride_vn + offs_dv.to(tile_type)[None, :] * stride_vd  # [BLOCK_N, BLOCK_DV]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]

    end_m = tl.minimum(start_m + BLOCK_M, n_q) - 1
    # Columns first .. last are visited; every row sees those from free_first to free_last.
    last = tl.minimum(end_m + diagonal + window_right + 1, n_kv)
    free_last = tl.maximum(tl.minimum(start_m + diagonal + window_right + 1, n_kv), 0) // BLOCK_N * BLOCK_N
    first = tl.maximum(start_m + diagonal - window_left, 0) // BLOCK_N * BLOCK_N
    free_first = tl.cdiv(tl.maximum(end_m + diagonal - window_left, 0), BLOCK_N) * BLOCK_N
    free_first = tl.minimum(free_first, tl.cdiv(tl.maximum(last, 0), BLOCK_N) * BLOCK_N)
    free_last = tl.maximum(free_last, free_first)

    for start_n in range(first, free_first, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        columns = start_n + offs_n  # [BLOCK_N]
        k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offsets  # [BLOCK_N, BLOCK_D]
        v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offsets  # [BLOCK_N, BLOCK_DV]
        k_tile = tl.load(k_ptrs, mask=(columns < n_kv)[:, None] & in_d, other=0.0)  # [BLOCK_N, BLOCK_D]
        v_tile = tl.load(v_ptrs, mask=(columns < n_kv)[:, None], other=0.0)  # [BLOCK_N, BLOCK_DV]
        mask_columns = columns.to(tl.int64)[None, :] * stride_mn  # [1, BLOCK_N]
        mask_tile = tl.load(mask_ptrs + mask_columns, mask=(columns < n_kv)[None, :], other=0) != 0  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        capped = tanh(scores * inner_scale)  # [BLOCK_M, BLOCK_N]
        scores = capped * score_scale  # [BLOCK_M, BLOCK_N]
        positions = (rows + diagonal).to(tl.float32)  # [BLOCK_M]
        scores = scores - slope * tl.abs(positions[:, None] - columns.to(tl.float32)[None, :])  # [BLOCK_M, BLOCK_N]
        probs = tl.exp2(scores - lse[:, None])  # [BLOCK_M, BLOCK_N]
        probs = tl.where(mask_tile, probs, 0.0)  # [BLOCK_M, BLOCK_N]
        # A masked score may exceed the row's LSE by far: its exponential may be infinite, and 0 times that is NaN.
        last_seen = rows + diagonal + window_right  # [BLOCK_M]
        visible = columns[None, :] <= last_seen[:, None]  # [BLOCK_M, BLOCK_N]
        visible &= columns[None, :] >= (rows + diagonal - window_left)[:, None]  # [BLOCK_M, BLOCK_N]
        visible &= (columns < n_kv)[None, :]  # [BLOCK_M, BLOCK_N]
        probs = tl.where(visible, probs, 0.0)  # [BLOCK_M, BLOCK_N]
        dprobs = tl.dot(dout_tile, v_tile.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        keep = dropout_keep(seed, offset, head_index, start_m, start_n, threshold, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        dprobs = dprobs * (keep.to(tl.float32) * keep_scale)  # [BLOCK_M, BLOCK_N]
        dscores = probs * (dprobs - delta[:, None])  # [BLOCK_M, BLOCK_N]
        dscores = dscores * (1.0 - capped * capped)  # [BLOCK_M, BLOCK_N]
        dq = tl.dot(dscores, k_tile, dq, input_precision="ieee")  # [BLOCK_M, BLOCK_D]

    for start_n in range(free_first, free_last, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        columns = start_n + offs_n  # [BLOCK_N]
        k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offsets  # [BLOCK_N, BLOCK_D]
        v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offsets  # [BLOCK_N, BLOCK_DV]
        k_tile = tl.load(k_ptrs, mask=in_d, other=0.0)  # [BLOCK_N, BLOCK_D]
        v_tile = tl.load(v_ptrs)  # [BLOCK_N, BLOCK_DV]
        mask_columns = columns.to(tl.int64)[None, :] * stride_mn  # [1, BLOCK_N]
        mask_tile = tl.load(mask_ptrs + mask_columns) != 0  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        capped = tanh(scores * inner_scale)  # [BLOCK_M, BLOCK_N]
        scores = capped * score_scale  # [BLOCK_M, BLOCK_N]
        positions = (rows + diagonal).to(tl.float32)  # [BLOCK_M]
        scores = scores - slope * tl.abs(positions[:, None] - columns.to(tl.float32)[None, :])  # [BLOCK_M, BLOCK_N]
        probs = tl.exp2(scores - lse[:, None])  # [BLOCK_M, BLOCK_N]
        probs = tl.where(mask_tile, probs, 0.0)  # [BLOCK_M, BLOCK_N]
        dprobs = tl.dot(dout_tile, v_tile.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        keep = dropout_keep(seed, offset, head_index, start_m, start_n, threshold, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        dprobs = dprobs * (keep.to(tl.float32) * keep_scale)  # [BLOCK_M, BLOCK_N]
        dscores = probs * (dprobs - delta[:, None])  # [BLOCK_M, BLOCK_N]
        dscores = dscores * (1.0 - capped * capped)  # [BLOCK_M, BLOCK_N]
        dq = tl.dot(dscores, k_tile, dq, input_precision="ieee")  # [BLOCK_M, BLOCK_D]

    for start_n in range(free_last, last, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        columns = start_n + offs_n  # [BLOCK_N]
        k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offsets  # [BLOCK_N, BLOCK_D]
        v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offsets  # [BLOCK_N, BLOCK_DV]
        k_tile = tl.load(k_ptrs, mask=(columns < n_kv)[:, None] & in_d, other=0.0)  # [BLOCK_N, BLOCK_D]
        v_tile = tl.load(v_ptrs, mask=(columns < n_kv)[:, None], other=0.0)  # [BLOCK_N, BLOCK_DV]
        mask_columns = columns.to(tl.int64)[None, :] * stride_mn  # [1, BLOCK_N]
        mask_tile = tl.load(mask_ptrs + mask_columns, mask=(columns < n_kv)[None, :], other=0) != 0  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        capped = tanh(scores * inner_scale)  # [BLOCK_M, BLOCK_N]
        scores = capped * score_scale  # [BLOCK_M, BLOCK_N]
        positions = (rows + diagonal).to(tl.float32)  # [BLOCK_M]
        scores = scores - slope * tl.abs(positions[:, None] - columns.to(tl.float32)[None, :])  # [BLOCK_M, BLOCK_N]
        probs = tl.exp2(scores - lse[:, None])  # [BLOCK_M, BLOCK_N]
        probs = tl.where(mask_tile, probs, 0.0)  # [BLOCK_M, BLOCK_N]
        # A masked score may exceed the row's LSE by far: its exponential may be infinite, and 0 times that is NaN.
        last_seen = rows + diagonal + window_right  # [BLOCK_M]
        visible = columns[None, :] <= last_seen[:, None]  # [BLOCK_M, BLOCK_N]
        visible &= columns[None, :] >= (rows + diagonal - window_left)[:, None]  # [BLOCK_M, BLOCK_N]
        visible &= (columns < n_kv)[None, :]  # [BLOCK_M, BLOCK_N]
        probs = tl.where(visible, probs, 0.0)  # [BLOCK_M, BLOCK_N]
        dprobs = tl.dot(dout_tile, v_tile.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        keep = dropout_keep(seed, offset, head_index, start_m, start_n, threshold, BLOCK_M, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        dprobs = dprobs * (keep.to(tl.float32) * keep_scale)  # [BLOCK_M, BLOCK_N]
        dscores = probs * (dprobs - delta[:, None])  # [BLOCK_M, BLOCK_N]
        dscores = dscores * (1.0 - capped * capped)  # [BLOCK_M, BLOCK_N]
        dq = tl.dot(dscores, k_tile, dq, input_precision="ieee")  # [BLOCK_M, BLOCK_D]

    dq_ptr += batch.to(tl.int64) * stride_dqb + head.to(tl.int64) * stride_dqh
    dq_ptrs = dq_ptr + rows.to(tl.int64)[:, None] * stride_dqm + offs_d.to(tl.int64)[None, :] * stride_dqd  # [BLOCK_M, BLOCK_D]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_rows[:, None] & in_d)


KERNEL = {
    "template": "flash_bwd",
    "spec": {
        "direction": "bwd",
        "dtype": "fp32",
        "d": 80,
        "d_v": 64,
        "causal": False,
        "window": True,
        "mask": "bool",
        "dropout": True,
        "softcap": True,
        "tf32": False,
        "alibi": True,
    },
    "config": {
        "BLOCK_M": 32,
        "BLOCK_N": 128,
        "DQ_BLOCK_M": 128,
        "DQ_BLOCK_N": 64,
        "DQ_num_stages": 2,
        "DQ_num_warps": 8,
        "ORDER": "rows",
        "num_stages": 2,
        "num_warps": 8,
    },
}
