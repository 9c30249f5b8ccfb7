"""Attention backward with plain pointers, bit for bit repeatable.

Compiled in: bwd-bf16-d128-causal
Template: flash_bwd
Variant: 42e3d59396376351
Config: BLOCK_M=32 BLOCK_N=128 DQ_BLOCK_M=128 DQ_BLOCK_N=64 DQ_num_stages=2 DQ_num_warps=8 ORDER=longest_first num_stages=2 num_warps=8

Generated; do not edit. `flashtune generate` writes it anew.
"""

import triton
import triton.language as tl


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
    BLOCK_DV: tl.constexpr = 128

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
    ]
)
def key_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
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
    diagonal,
    WIDE: tl.constexpr,
):
    """dK and dV of one tile of keys of one key head, which `group` of the `heads` query heads share."""
    BLOCK_M: tl.constexpr = 32
    BLOCK_N: tl.constexpr = 128
    BLOCK_D: tl.constexpr = 128
    BLOCK_DV: tl.constexpr = 128

    program = tl.program_id(0)
    tiles = tl.cdiv(n_kv, BLOCK_N)
    # The longest tiles of every head first.
    head_count = tl.num_programs(0) // tiles
    tile = program // head_count
    head_index = program % head_count
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

    k_ptr += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    k_ptrs = k_ptr + columns.to(tl.int64)[:, None] * stride_kn + offs_d.to(tl.int64)[None, :] * stride_kd  # [BLOCK_N, BLOCK_D]
    v_ptrs = v_ptr + columns.to(tl.int64)[:, None] * stride_vn + offs_dv.to(tl.int64)[None, :] * stride_vd  # [BLOCK_N, BLOCK_DV]
    # Rows of keys beyond the end are never stored, and no other row takes anything from them.
    k_tile = tl.load(k_ptrs, mask=in_columns, other=0.0)  # [BLOCK_N, BLOCK_D]
    v_tile = tl.load(v_ptrs, mask=in_columns, other=0.0)  # [BLOCK_N, BLOCK_DV]
    q_offsets = offs_m.to(tile_type)[:, None] * stride_qm + offs_d.to(tile_type)[None, :] * stride_qd  # [BLOCK_M, BLOCK_D]
    dout_offsets = offs_m.to(tile_type)[:, None] * stride_om + offs_dv.to(tile_type)[None, :] * stride_od  # [BLOCK_M, BLOCK_DV]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)  # [BLOCK_N, BLOCK_DV]

    # Rows first .. last see some key of the tile; those from free_first to free_last see all of them.
    end_n = tl.minimum(start_n + BLOCK_N, n_kv) - 1
    first = tl.maximum(start_n - diagonal, 0) // BLOCK_M * BLOCK_M
    free_first = tl.minimum(tl.cdiv(tl.maximum(end_n - diagonal, 0), BLOCK_M) * BLOCK_M, tl.cdiv(n_q, BLOCK_M) * BLOCK_M)

    for member in range(group):
        head = kv_head * group + member
        row_head = batch * heads + head
        row_offset = row_head.to(tl.int64) * n_q
        q_head = q_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
        dout_head = dout_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
        for start_m in range(first, free_first, BLOCK_M):
            start_m = tl.multiple_of(start_m, BLOCK_M)
            rows = start_m + offs_m  # [BLOCK_M]
            in_rows = rows < n_q  # [BLOCK_M]
            q_ptrs = q_head + tl.cast(start_m, tl.int64) * stride_qm + q_offsets  # [BLOCK_M, BLOCK_D]
            dout_ptrs = dout_head + tl.cast(start_m, tl.int64) * stride_om + dout_offsets  # [BLOCK_M, BLOCK_DV]
            q_tile = tl.load(q_ptrs, mask=in_rows[:, None], other=0.0)  # [BLOCK_M, BLOCK_D]
            dout_tile = tl.load(dout_ptrs, mask=in_rows[:, None], other=0.0)  # [BLOCK_M, BLOCK_DV]
            lse = tl.load(lse_ptr + row_offset + rows, mask=in_rows, other=float("inf"))  # [BLOCK_M]
            delta = tl.load(delta_ptr + row_offset + rows, mask=in_rows, other=0.0)  # [BLOCK_M]
            # Rows beyond the end, and those that see no key, have no probabilities.
            lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)  # [BLOCK_M]
            scores = tl.dot(k_tile, q_tile.T)  # [BLOCK_N, BLOCK_M]
            scores = scores * score_scale  # [BLOCK_N, BLOCK_M]
            probs = tl.exp2(scores - lse[None, :])  # [BLOCK_N, BLOCK_M]
            # A masked score may exceed the row's LSE by far: its exponential may be infinite, and 0 times that is NaN.
            last_seen = rows + diagonal  # [BLOCK_M]
            visible = columns[:, None] <= last_seen[None, :]  # [BLOCK_N, BLOCK_M]
            probs = tl.where(visible, probs, 0.0)  # [BLOCK_N, BLOCK_M]
            dprobs = tl.dot(v_tile, dout_tile.T)  # [BLOCK_N, BLOCK_M]
            dv = tl.dot(probs.to(dout_tile.dtype), dout_tile, dv)  # [BLOCK_N, BLOCK_DV]
            dscores = probs * (dprobs - delta[None, :])  # [BLOCK_N, BLOCK_M]
            dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk)  # [BLOCK_N, BLOCK_D]
        for start_m in range(free_first, n_q, BLOCK_M):
            start_m = tl.multiple_of(start_m, BLOCK_M)
            rows = start_m + offs_m  # [BLOCK_M]
            in_rows = rows < n_q  # [BLOCK_M]
            q_ptrs = q_head + tl.cast(start_m, tl.int64) * stride_qm + q_offsets  # [BLOCK_M, BLOCK_D]
            dout_ptrs = dout_head + tl.cast(start_m, tl.int64) * stride_om + dout_offsets  # [BLOCK_M, BLOCK_DV]
            q_tile = tl.load(q_ptrs, mask=in_rows[:, None], other=0.0)  # [BLOCK_M, BLOCK_D]
            dout_tile = tl.load(dout_ptrs, mask=in_rows[:, None], other=0.0)  # [BLOCK_M, BLOCK_DV]
            lse = tl.load(lse_ptr + row_offset + rows, mask=in_rows, other=float("inf"))  # [BLOCK_M]
            delta = tl.load(delta_ptr + row_offset + rows, mask=in_rows, other=0.0)  # [BLOCK_M]
            # Rows beyond the end, and those that see no key, have no probabilities.
            lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)  # [BLOCK_M]
            scores = tl.dot(k_tile, q_tile.T)  # [BLOCK_N, BLOCK_M]
            scores = scores * score_scale  # [BLOCK_N, BLOCK_M]
            probs = tl.exp2(scores - lse[None, :])  # [BLOCK_N, BLOCK_M]
            dprobs = tl.dot(v_tile, dout_tile.T)  # [BLOCK_N, BLOCK_M]
            dv = tl.dot(probs.to(dout_tile.dtype), dout_tile, dv)  # [BLOCK_N, BLOCK_DV]
            dscores = probs * (dprobs - delta[None, :])  # [BLOCK_N, BLOCK_M]
            dk = tl.dot(dscores.to(q_tile.dtype), q_tile, dk)  # [BLOCK_N, BLOCK_D]

    dk_ptr += batch.to(tl.int64) * stride_dkb + kv_head.to(tl.int64) * stride_dkh
    dv_ptr += batch.to(tl.int64) * stride_dvb + kv_head.to(tl.int64) * stride_dvh
    dk_ptrs = dk_ptr + columns.to(tl.int64)[:, None] * stride_dkn + offs_d.to(tl.int64)[None, :] * stride_dkd  # [BLOCK_N, BLOCK_D]
    dv_ptrs = dv_ptr + columns.to(tl.int64)[:, None] * stride_dvn + offs_dv.to(tl.int64)[None, :] * stride_dvd  # [BLOCK_N, BLOCK_DV]
    tl.store(dk_ptrs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_columns)
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=in_columns)


@triton.jit(
    do_not_specialize=[
        "heads",
        "group",
        "n_q",
        "n_kv",
        "diagonal",
    ]
)
def query_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
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
    diagonal,
    WIDE: tl.constexpr,
):
    """dQ of one tile of queries of one head; `group` of the `heads` query heads share a key head."""
    BLOCK_M: tl.constexpr = 128
    BLOCK_N: tl.constexpr = 64
    BLOCK_D: tl.constexpr = 128
    BLOCK_DV: tl.constexpr = 128

    program = tl.program_id(0)
    tiles = tl.cdiv(n_q, BLOCK_M)
    # The longest tiles of every head first.
    head_count = tl.num_programs(0) // tiles
    tile = tiles - 1 - program // head_count
    head_index = program % head_count
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

    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    dout_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    k_ptr += batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_ptr += batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    q_ptrs = q_ptr + rows.to(tl.int64)[:, None] * stride_qm + offs_d.to(tl.int64)[None, :] * stride_qd  # [BLOCK_M, BLOCK_D]
    dout_ptrs = dout_ptr + rows.to(tl.int64)[:, None] * stride_om + offs_dv.to(tl.int64)[None, :] * stride_od  # [BLOCK_M, BLOCK_DV]
    q_tile = tl.load(q_ptrs, mask=in_rows[:, None], other=0.0)  # [BLOCK_M, BLOCK_D]
    dout_tile = tl.load(dout_ptrs, mask=in_rows[:, None], other=0.0)  # [BLOCK_M, BLOCK_DV]
    row_offset = head_index.to(tl.int64) * n_q
    lse = tl.load(lse_ptr + row_offset + rows, mask=in_rows, other=float("inf"))  # [BLOCK_M]
    delta = tl.load(delta_ptr + row_offset + rows, mask=in_rows, other=0.0)  # [BLOCK_M]
    # Rows that see no key have no probabilities.
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)  # [BLOCK_M]
    k_offsets = offs_n.to(tile_type)[:, None] * stride_kn + offs_d.to(tile_type)[None, :] * stride_kd  # [BLOCK_N, BLOCK_D]
    v_offsets = offs_n.to(tile_type)[:, None] * stride_vn + offs_dv.to(tile_type)[None, :] * stride_vd  # [BLOCK_N, BLOCK_DV]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]

    end_m = tl.minimum(start_m + BLOCK_M, n_q) - 1
    # Columns first .. last are visited; every row sees those from free_first to free_last.
    last = tl.minimum(end_m + diagonal + 1, n_kv)
    free_last = tl.maximum(tl.minimum(start_m + diagonal + 1, n_kv), 0) // BLOCK_N * BLOCK_N

    for start_n in range(0, free_last, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        columns = start_n + offs_n  # [BLOCK_N]
        k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offsets  # [BLOCK_N, BLOCK_D]
        v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offsets  # [BLOCK_N, BLOCK_DV]
        k_tile = tl.load(k_ptrs)  # [BLOCK_N, BLOCK_D]
        v_tile = tl.load(v_ptrs)  # [BLOCK_N, BLOCK_DV]
        scores = tl.dot(q_tile, k_tile.T)  # [BLOCK_M, BLOCK_N]
        scores = scores * score_scale  # [BLOCK_M, BLOCK_N]
        probs = tl.exp2(scores - lse[:, None])  # [BLOCK_M, BLOCK_N]
        dprobs = tl.dot(dout_tile, v_tile.T)  # [BLOCK_M, BLOCK_N]
        dscores = probs * (dprobs - delta[:, None])  # [BLOCK_M, BLOCK_N]
        dq = tl.dot(dscores.to(k_tile.dtype), k_tile, dq)  # [BLOCK_M, BLOCK_D]

    for start_n in range(free_last, last, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        columns = start_n + offs_n  # [BLOCK_N]
        k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offsets  # [BLOCK_N, BLOCK_D]
        v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offsets  # [BLOCK_N, BLOCK_DV]
        k_tile = tl.load(k_ptrs, mask=(columns < n_kv)[:, None], other=0.0)  # [BLOCK_N, BLOCK_D]
        v_tile = tl.load(v_ptrs, mask=(columns < n_kv)[:, None], other=0.0)  # [BLOCK_N, BLOCK_DV]
        scores = tl.dot(q_tile, k_tile.T)  # [BLOCK_M, BLOCK_N]
        scores = scores * score_scale  # [BLOCK_M, BLOCK_N]
        probs = tl.exp2(scores - lse[:, None])  # [BLOCK_M, BLOCK_N]
        # A masked score may exceed the row's LSE by far: its exponential may be infinite, and 0 times that is NaN.
        last_seen = rows + diagonal  # [BLOCK_M]
        visible = columns[None, :] <= last_seen[:, None]  # [BLOCK_M, BLOCK_N]
        visible &= (columns < n_kv)[None, :]  # [BLOCK_M, BLOCK_N]
        probs = tl.where(visible, probs, 0.0)  # [BLOCK_M, BLOCK_N]
        dprobs = tl.dot(dout_tile, v_tile.T)  # [BLOCK_M, BLOCK_N]
        dscores = probs * (dprobs - delta[:, None])  # [BLOCK_M, BLOCK_N]
        dq = tl.dot(dscores.to(k_tile.dtype), k_tile, dq)  # [BLOCK_M, BLOCK_D]

    dq_ptr += batch.to(tl.int64) * stride_dqb + head.to(tl.int64) * stride_dqh
    dq_ptrs = dq_ptr + rows.to(tl.int64)[:, None] * stride_dqm + offs_d.to(tl.int64)[None, :] * stride_dqd  # [BLOCK_M, BLOCK_D]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_rows[:, None])


KERNEL = {
    "template": "flash_bwd",
    "spec": {
        "direction": "bwd",
        "dtype": "bf16",
        "d": 128,
        "d_v": 128,
        "causal": True,
        "window": False,
        "mask": "none",
        "dropout": False,
        "softcap": False,
        "tf32": False,
    },
    "config": {
        "BLOCK_M": 32,
        "BLOCK_N": 128,
        "DQ_BLOCK_M": 128,
        "DQ_BLOCK_N": 64,
        "DQ_num_stages": 2,
        "DQ_num_warps": 8,
        "ORDER": "longest_first",
        "num_stages": 2,
        "num_warps": 8,
    },
}
