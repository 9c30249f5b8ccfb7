"""Attention forward over paged keys and values.

Compiled in: fwd-bf16-d128-causal-packed
Template: flash_paged
Variant: 78df5276cdb8ed62
Config: BLOCK_M=16 BLOCK_N=64 num_stages=4 num_warps=4 programs=1 unmasked=False

Generated; do not edit. `flashtune generate` writes it anew.
"""

import triton
import triton.language as tl


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
        outs = tl.load(out_ptrs, mask=(inside & (part_max > float('-inf')))[:, :, None], other=0.0, cache_modifier=".cg")  # [SPLITS, ROWS, BLOCK_DV]
        new_max = tl.maximum(row_max, tl.max(part_max, 0))  # [ROWS]
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # [ROWS]
        rescale = tl.exp2(row_max - shift)  # [ROWS]
        weights = sums * tl.exp2(part_max - shift[None, :])  # [SPLITS, ROWS]
        row_max = new_max  # [ROWS]
        row_sum = row_sum * rescale + tl.sum(weights, 0)  # [ROWS]
        acc = acc * rescale[:, None] + tl.sum(outs * weights[:, :, None], 0)  # [ROWS, BLOCK_DV]
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # [ROWS]
    return acc * (1.0 / row_sum)[:, None], (row_max + tl.log2(row_sum)) * 0.6931471805599453


@triton.jit
def store_rows(out_ptr, lse_ptr, result, lse, rows, inside, heads, n_q):
    """Stores these rows of all heads, `rows` (query * heads + head), int64, where they are `inside`."""
    offs_dv = tl.arange(0, 128)  # [BLOCK_DV]
    tl.store(lse_ptr + rows % heads * n_q + rows // heads, lse, mask=inside)
    out_ptrs = out_ptr + rows[:, None] * 128 + offs_dv[None, :]  # [ROWS, BLOCK_DV]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(
    do_not_specialize=[
        "stride_tb",
        "stride_tp",
        "stride_dkb",
        "stride_dkh",
        "stride_dvb",
        "stride_dvh",
        "tiles",
        "sequences",
        "pages",
        "heads",
        "group",
        "n_q",
        "n_kv",
        "sequences",
        "diagonal",
    ]
)
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    cu_q_ptr,
    used_k_ptr,
    table_ptr,
    part_out_ptr,
    part_sums_ptr,
    k_descale_ptr,
    v_descale_ptr,
    stride_qm,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_vd,
    stride_tb,
    stride_tp,
    stride_dkb,
    stride_dkh,
    stride_dvb,
    stride_dvh,
    heads,
    group,
    n_q,
    tiles,
    sequences,
    pages,
    score_scale,
    diagonal,
    PAGE: tl.constexpr,
    BY_BOUNDS: tl.constexpr,
    NARROW: tl.constexpr,
    K_DESCALED: tl.constexpr,
    V_DESCALED: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
):
    """One tile's share of keys. Of `heads` query heads, `group` share a key head; `score_scale` brings scores to units of log 2."""
    BLOCK_M: tl.constexpr = 16
    BLOCK_N: tl.constexpr = 64
    BLOCK_D: tl.constexpr = 128
    BLOCK_DV: tl.constexpr = 128
    # A block of keys then lies in one page.
    WITHIN: tl.constexpr = PAGE % BLOCK_N == 0

    split, splits = tl.program_id(1), tl.num_programs(1)
    kv_heads = heads // group
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(0) // tiles % kv_heads
    if BY_BOUNDS:
        count = tl.zeros([128], tl.int32)  # [128]
        for chunk in range(0, sequences + 1, 128):
            indices = chunk + tl.arange(0, 128)  # [128]
            bounds = tl.load(cu_q_ptr + indices, mask=indices <= sequences, other=0).to(tl.int32)  # [128]
            count += ((indices <= sequences) & (bounds * group // BLOCK_M + indices <= tile)).to(tl.int32)  # [128]
        sequence = tl.sum(count, 0) - 1
        following = tl.minimum(sequence + 1, sequences)
    else:
        # Every sequence has as many tiles as the longest.
        sequence = tl.program_id(0) // tiles // kv_heads
        following = tl.minimum(sequence + 1, sequences)
    q_start = tl.load(cu_q_ptr + sequence).to(tl.int32)
    if BY_BOUNDS:
        tile -= q_start * group // BLOCK_M + sequence
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    if sequence == sequences:
        # Rows after the last sequence; where keys are split, the combination writes them.
        rows = (n_q - q_start) * group
        for start in range(0, tl.where(splits == 1, rows - tile * BLOCK_M, 0), tiles * BLOCK_M):
            places = (q_start + (start + packed) // group).to(tl.int64) * heads + kv_head * group + (start + packed) % group  # [BLOCK_M]
            nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
            zeros = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]
            store_rows(out_ptr, lse_ptr, zeros, nothing, places, start + packed < rows, heads, n_q)
        return
    all_rows = n_q
    n_q = tl.load(cu_q_ptr + following).to(tl.int32) - q_start
    rows = n_q * group
    if tile * BLOCK_M >= rows:
        return
    batch = sequence
    n_kv = tl.minimum(tl.maximum(tl.load(used_k_ptr + batch).to(tl.int32), 0), pages * PAGE)
    offs_m = packed // group  # [BLOCK_M]
    head_index = kv_head * group + packed % group  # [BLOCK_M]
    head = head_index[:, None]  # [BLOCK_M, 1]
    # 1 where the last query is on the last key, else 0.
    diagonal = diagonal * (n_kv - n_q)
    if K_DESCALED:
        score_scale *= tl.load(k_descale_ptr + batch * stride_dkb + kv_head * stride_dkh)

    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    q_rows = (q_start + offs_m).to(tl.int64) * stride_qm + head_index.to(tl.int64) * stride_qh  # [BLOCK_M]
    q_ptrs = q_ptr + q_rows[:, None] + offs_d.to(tl.int64)[None, :] * stride_qd  # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(q_ptrs, mask=(packed < rows)[:, None], other=0.0)  # [BLOCK_M, BLOCK_D]
    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    table_ptr += batch.to(tl.int64) * stride_tb
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    row_sum = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]

    start_m = tile * BLOCK_M // group
    end_m = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group, n_q - 1)
    row_last = tl.minimum(offs_m + diagonal, n_kv - 1)  # [BLOCK_M]
    last = tl.minimum(end_m + diagonal + 1, n_kv)
    # A share depends on this sequence alone, so that its bits don't depend on others.
    share = tl.maximum(tl.cdiv(tl.maximum(last - 0, 0), BLOCK_N * splits) * BLOCK_N, LEAST_KEYS)
    split_first = 0 + split * share
    split_last = tl.minimum(split_first + share, last)

    ahead = split_first if WITHIN else split_first + offs_n
    blocks = tl.load(table_ptr + ahead // PAGE * stride_tp, mask=ahead < split_last, other=0)
    for start_n in range(split_first, split_last, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        columns = start_n + offs_n  # [BLOCK_N]
        inside = (columns < split_last)  # [BLOCK_N]
        here = blocks.to(tl.int64)
        slots = (start_n % PAGE + offs_n if WITHIN else columns % PAGE).to(tl.int64)  # [BLOCK_N]
        ahead = (start_n if WITHIN else columns) + BLOCK_N
        blocks = tl.load(table_ptr + ahead // PAGE * stride_tp, mask=ahead < split_last, other=0)
        k_rows = here * stride_kb + slots * stride_kn  # [BLOCK_N]
        k_ptrs = k_ptr + k_rows[:, None] + offs_d.to(tl.int64)[None, :] * stride_kd  # [BLOCK_N, BLOCK_D]
        k_tile = tl.load(k_ptrs, mask=inside[:, None], other=0.0)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q_tile, k_tile.to(q_tile.dtype).T)  # [BLOCK_M, BLOCK_N]
        scores = scores * score_scale  # [BLOCK_M, BLOCK_N]
        scores = tl.where(columns[None, :] <= row_last[:, None], scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        new_max = tl.maximum(row_max, tl.max(scores, 1))  # [BLOCK_M]
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # [BLOCK_M]
        rescale = tl.exp2(row_max - shift)  # [BLOCK_M]
        probs = tl.exp2(scores - shift[:, None])  # [BLOCK_M, BLOCK_N]
        row_max = new_max  # [BLOCK_M]
        row_sum = row_sum * rescale + tl.sum(probs, 1)  # [BLOCK_M]
        acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
        v_rows = here * stride_vb + slots * stride_vn  # [BLOCK_N]
        v_ptrs = v_ptr + v_rows[:, None] + offs_dv.to(tl.int64)[None, :] * stride_vd  # [BLOCK_N, BLOCK_DV]
        v_tile = tl.load(v_ptrs, mask=inside[:, None], other=0.0)  # [BLOCK_N, BLOCK_DV]
        if NARROW:
            # Fp16 holds both kinds of fp8 exactly.
            v_tile = v_tile.to(tl.float16)  # [BLOCK_N, BLOCK_DV]
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc)  # [BLOCK_M, BLOCK_DV]

    # A row that saw no key has the sum 0 and the maximum -inf: its output is 0 and its LSE -inf.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # [BLOCK_M]
    result = acc * (1.0 / row_sum)[:, None]  # [BLOCK_M, BLOCK_DV]
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453  # [BLOCK_M]
    if V_DESCALED:
        result *= tl.load(v_descale_ptr + batch * stride_dvb + kv_head * stride_dvh)
    places = (q_start + offs_m).to(tl.int64) * heads + head_index  # [BLOCK_M]
    if splits == 1:
        store_rows(out_ptr, lse_ptr, result, lse, places, packed < rows, heads, all_rows)
    else:
        parts = tl.cast(all_rows, tl.int64) * heads
        part_rows = split * parts + places  # [BLOCK_M]
        tl.store(part_sums_ptr + part_rows, row_max, mask=packed < rows)
        tl.store(part_sums_ptr + splits * parts + part_rows, row_sum, mask=packed < rows)
        seen = (packed < rows) & (row_max > float("-inf"))  # [BLOCK_M]
        tl.store(part_out_ptr + part_rows[:, None] * BLOCK_DV + offs_dv[None, :], result, mask=seen[:, None])


@triton.jit(do_not_specialize=["heads", "n_q", "sequences", "splits"])
def combine_splits(part_out_ptr, part_sums_ptr, out_ptr, lse_ptr, cu_q_ptr, heads, n_q, sequences, splits):
    """One query of one head; zeros for queries after the last sequence."""
    row = tl.program_id(0)
    places = (row + tl.arange(0, 1)).to(tl.int64)  # [1]
    parts = tl.where(row < tl.load(cu_q_ptr + sequences).to(tl.int32) * heads, splits, 0)
    sums_ptr = part_sums_ptr
    result, lse = combined(part_out_ptr, sums_ptr, places, n_q * heads, parts, 32, 1, 128)
    store_rows(out_ptr, lse_ptr, result, lse, places, places >= 0, heads, n_q)


KERNEL = {
    "template": "flash_paged",
    "spec": {
        "direction": "fwd",
        "dtype": "bf16",
        "d": 128,
        "d_v": 128,
        "causal": True,
        "window": False,
        "mask": "none",
        "dropout": False,
        "softcap": False,
        "tf32": False,
        "packed": True,
    },
    "config": {
        "BLOCK_M": 16,
        "BLOCK_N": 64,
        "num_stages": 4,
        "num_warps": 4,
        "programs": 1,
        "unmasked": False,
    },
}
