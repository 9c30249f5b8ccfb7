"""Attention forward with TMA descriptors.

Compiled in: fwd-bf16-d80
Template: flash_fwd_tma 47f5418c93b3983c
Variant: 0be26d0ccfe1933b
Config: BLOCK_M=64 BLOCK_N=32 ORDER=rows maxnreg=0 num_stages=2 num_warps=4

Generated; do not edit. `flashtune generate` writes it anew.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


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
    in_out = (offs_m < n_q)[:, None] & (offs_dv < 80)[None, :]  # [BLOCK_M, BLOCK_DV]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=in_out)


def strides_of(x):
    """The strides of `x` (B, H, N, D); 16 in place of those of dimensions of size 1, which may be anything and have no meaning."""
    (b, h, n, _), (stride_b, stride_h, stride_n, stride_d) = x.shape, x.stride()
    return [stride_b if b > 1 else 16, stride_h if h > 1 else 16, stride_n if n > 1 else 16, stride_d]


def copyable(x):
    """Whether TMA can read `x` (B, H, N, D): rows without gaps inside, all on 16-byte boundaries, nothing broadcast."""
    stride_b, stride_h, stride_n, stride_d = strides_of(x)
    unit = 16 // x.element_size()
    aligned = stride_b % unit == stride_h % unit == stride_n % unit == x.data_ptr() % 16 == 0
    return aligned and stride_d == 1 and min(stride_b, stride_h, stride_n) > 0


def descriptor(x, rows, columns):
    """The TMA descriptor of `x` (B, H, N, D) for tiles of `rows` by `columns`."""
    return TensorDescriptor(x, list(x.shape), strides_of(x), [1, 1, rows, columns])


def accepts(q, k, v, mask):
    """Whether these tensors can be taken; Triton's interpreter can't multiply bf16."""
    return isinstance(attention_forward, triton.JITFunction) and copyable(q) and copyable(k) and copyable(v)


def counts_needed(q, k):
    """How many of `counts` a call takes."""
    return 0


def records(q, k, v, mask, scale):
    """Whether `launches` computes nothing from tensors like these, so that what it makes of them on the meta device can be replayed."""
    return scale > 0.0


def launches(
    q,
    k,
    v,
    out,
    lse,
    *,
    mask,
    scale,
    diagonal,
    window_left,
    window_right,
    softcap,
    dropout_p,
    seed,
    offset,
    sms,
    counts,
    slopes=None,
    descale=None,
):
    """The launches of one call: (kernel, grid, args, options) each."""
    if scale <= 0.0:
        # The row maximum is taken of the raw scores, so the scale has to be positive: its sign moves into a copy of q.
        copy = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
        q, scale = (torch.neg(q, out=copy), -scale) if scale < 0.0 else (copy.zero_(), 1.0)
    batch, heads, n_q, _ = q.shape
    kv_heads, n_kv = k.shape[1], k.shape[2]
    grid = (triton.cdiv(n_q, 64) * batch * heads,)
    args = (
        descriptor(q, 64, 128),
        descriptor(k, 32, 128),
        descriptor(v, 32, 128),
        out,
        lse,
        *out.stride(),
        heads,
        heads // kv_heads,
        n_q,
        n_kv,
        scale * 1.4426950408889634,
    )
    options = {"num_warps": 4, "num_stages": 2}
    return [(attention_forward, grid, args, options)]


def launch(q, k, v, out, lse, **settings):
    """Run the kernel on the current stream."""
    for kernel, grid, args, options in launches(q, k, v, out, lse, **settings):
        kernel[grid](*args, **options)
