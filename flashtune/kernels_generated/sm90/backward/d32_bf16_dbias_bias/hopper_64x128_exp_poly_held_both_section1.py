"""Attention backward for Hopper: one warp copies tiles with TMA, two warpgroups compute, of 64 keys each.

A program holds a tile of keys and loops over the queries of its whole group that see it, in five products. dQ is added up in float32 in
memory, from registers, in an order that no two launches share: its last bits vary.

Compiled in: bwd-bf16-d32-dbias-bias
Template: flash_bwd_hopper 0467f5da2bcc0d37
Variant: 16971531864b414e
Config: BLOCK_M=64 BLOCK_N=128 dq_sums=registers exp_poly=True held=both num_stages=2 section=1

Generated; do not edit. `flashtune generate` writes it anew.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.6 has no other names for the copies than the longer ones, newer versions none but the short.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

DTYPE = gl.constexpr(gl.bfloat16)
BLOCK_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(128)
BLOCK_D = gl.constexpr(64)
BLOCK_DV = gl.constexpr(64)
CONSUMERS = gl.constexpr(2)
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(2)
SECTION = gl.constexpr(1)
# What each warpgroup makes of a tile of dQ.
PART_M = gl.constexpr(64)
PART_D = gl.constexpr(32)
# Scores have keys as rows, so that they and their gradients leave a product as the left operand of the next.
SCORES_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
DK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
DV_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
DQ_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
PROBS_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=DV_LAYOUT, k_width=2))
DSCORES_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=DK_LAYOUT, k_width=2))
KEY_LAYOUT = gl.constexpr(gl.SliceLayout(1, SCORES_LAYOUT))
QUERY_LAYOUT = gl.constexpr(gl.SliceLayout(0, SCORES_LAYOUT))
# Keys and values as the left operands of scores and of their gradients.
HELD_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=SCORES_LAYOUT, k_width=2))
DSCORES_SHARED = gl.constexpr(gl.NVMMASharedLayout.get_default_for([KEYS.value, BLOCK_M.value], DTYPE.value))


class Sizes(NamedTuple):
    """The sizes of a call."""

    n_q: gl.tensor
    n_kv: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor
    m_tiles: gl.tensor
    n_tiles: gl.tensor
    bias_by_batch: gl.tensor
    bias_by_head: gl.tensor
    bias_by_row: gl.tensor
    bias_by_column: gl.tensor


class Params(NamedTuple):
    """What tiles work with beside sizes."""

    scale: gl.tensor
    score_scale: gl.tensor


class TileCoord(NamedTuple):
    """Where a tile of keys begins, of which head of k and v, and the blocks of queries that see it.

    These are first .. end-1, of which unmasked_first .. unmasked_end-1 see all of it.
    """

    batch: gl.tensor
    kv_head: gl.tensor
    key: gl.tensor
    first: gl.tensor
    unmasked_first: gl.tensor
    unmasked_end: gl.tensor
    end: gl.tensor


class Pipeline(NamedTuple):
    """Stages of shared memory, with a number for each row beside them, and the barriers that tell when each is full and empty again."""

    smem: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class SharedStorage(NamedTuple):
    """What the roles of a program share."""

    q: Pipeline
    dout: Pipeline
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    dscores: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    sums: gl.tensor


@triton.jit(do_not_specialize=["heads", "n_q", "rows"])
def preprocess(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    lse_2_ptr,
    delta_ptr,
    sums_ptr,
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
    rows,
    HAS_DLSE: tl.constexpr,
    HAS_DQ: tl.constexpr,
):
    """What the products need of 64 of a head's `rows`: rowsum(dO * O) - dLSE, the LSE in units of log 2, and zeroed sums of dQ.

    Rows past the end, and those that see no key, have the LSE +inf, by which they have no probabilities.
    """
    ROWS: tl.constexpr = 64
    BLOCK_D: tl.constexpr = 64
    BLOCK_DV: tl.constexpr = 64

    tiles = rows // ROWS
    head_index = tl.program_id(0) // tiles
    start = tl.program_id(0) % tiles * ROWS
    batch = head_index // heads
    head = head_index % heads
    offs_m = start + tl.arange(0, ROWS)  # [ROWS]
    in_rows = offs_m < n_q  # [ROWS]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    out_ptr += batch.to(tl.int64) * stride_pb + head.to(tl.int64) * stride_ph
    dout_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * stride_pm + offs_dv.to(tl.int64)[None, :] * stride_pd  # [ROWS, BLOCK_DV]
    dout_ptrs = dout_ptr + offs_m.to(tl.int64)[:, None] * stride_om + offs_dv.to(tl.int64)[None, :] * stride_od  # [ROWS, BLOCK_DV]
    in_tile = in_rows[:, None] & (offs_dv < 32)[None, :]
    out_tile = tl.load(out_ptrs, mask=in_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK_DV]
    dout_tile = tl.load(dout_ptrs, mask=in_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK_DV]
    delta = tl.sum(out_tile * dout_tile, 1)  # [ROWS]
    lse = tl.load(lse_ptr + head_index.to(tl.int64) * n_q + offs_m, mask=in_rows, other=float("-inf"))  # [ROWS]
    if HAS_DLSE:
        # What flows to the LSE of a row that sees no key goes no further.
        dlse = tl.load(dlse_ptr + head_index.to(tl.int64) * n_q + offs_m, mask=in_rows, other=0.0)  # [ROWS]
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)  # [ROWS]
    place = head_index.to(tl.int64) * rows + start
    tl.store(lse_2_ptr + place + tl.arange(0, ROWS), tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634))
    tl.store(delta_ptr + place + tl.arange(0, ROWS), delta)
    if HAS_DQ:
        tl.store(sums_ptr + place * BLOCK_D + tl.arange(0, ROWS * BLOCK_D), tl.zeros([ROWS * BLOCK_D], tl.float32))


@triton.jit(do_not_specialize=["heads", "n_q", "m_tiles"])
def finish_dq(
    sums_ptr,
    dq_ptr,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    stride_dqd,
    heads,
    n_q,
    m_tiles,
    scale,
):
    """dQ of one block of rows from its sums, which lie in the order of `in_thread_order`."""
    PART_M: tl.constexpr = 64
    PART_D: tl.constexpr = 32
    PARTS: tl.constexpr = 2

    head_index = tl.program_id(0) // m_tiles
    start = tl.program_id(0) % m_tiles * 64
    dq_ptr += (head_index // heads).to(tl.int64) * stride_dqb + (head_index % heads).to(tl.int64) * stride_dqh
    sums_ptr += tl.program_id(0).to(tl.int64) * (PARTS * PART_M * PART_D)
    for part in tl.static_range(PARTS):
        sums = tl.load(sums_ptr + part * (PART_M * PART_D) + tl.arange(0, PART_M * PART_D))
        corners = sums.reshape([PART_D // 8, PART_M // 16, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
        tile = corners.reshape([PART_M, PART_D]) * scale  # [PART_M, PART_D]
        offs_m = start + tl.arange(0, PART_M)
        offs_d = part * PART_D + tl.arange(0, PART_D)
        dq_ptrs = dq_ptr + offs_m.to(tl.int64)[:, None] * stride_dqm + offs_d.to(tl.int64)[None, :] * stride_dqd  # [PART_M, PART_D]
        in_tile = (offs_m < n_q)[:, None] & (offs_d < 32)[None, :]
        tl.store(dq_ptrs, tile.to(dq_ptr.dtype.element_ty), mask=in_tile)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER barriers that each wait for ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def wait_full(pipeline, number):
    """Waits until the number-th filling of the pipeline has landed in its stage."""
    mbarrier.wait(pipeline.full.index(number % STAGES), number // STAGES & 1)


@gluon.jit
def release(pipeline, number):
    """Says that this warpgroup has read the number-th filling."""
    mbarrier.arrive(pipeline.empty.index(number % STAGES), count=1)


@gluon.jit
def load_rows(desc, corner, numbers_desc, place, pipeline, number, EXTRA_BYTES: gl.constexpr = 0):
    """Starts the copy of a block of rows and of their numbers as soon as its stage is empty, which waits for EXTRA_BYTES bytes more."""
    stage = number % STAGES
    mbarrier.wait(pipeline.empty.index(stage), number // STAGES & 1 ^ 1)
    mbarrier.expect(pipeline.full.index(stage), desc.block_type.nbytes + numbers_desc.block_type.nbytes + EXTRA_BYTES)
    async_load(desc, corner, pipeline.full.index(stage), pipeline.smem.index(stage))
    async_load(numbers_desc, [place], pipeline.full.index(stage), pipeline.numbers.index(stage))


# Hardware barriers from 5 on are free; Triton uses those before.
@gluon.jit
def named_barrier_sync(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Waits at a hardware barrier until THREADS threads are there."""
    gl.inline_asm_elementwise("bar.sync $1, $2; mov.u32 $0, 0;", "=r,r,r", [BARRIER, THREADS], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque_zero():
    """0, which LLVM doesn't know: it would compute every matrix descriptor ahead of the loop and spill them."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def in_thread_order(part):
    """A part of dQ (PART_M, PART_D) as rows of 256, in which the four values that a thread holds of a corner lie side by side."""
    corners = part.reshape([PART_M // 16, 2, 8, PART_D // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return corners.reshape([PART_M * PART_D // 256, 256])


@gluon.jit
def tile_at(program, sizes):
    """The tile of a program."""
    # A section of heads goes tile by tile, so that its queries stay in L2; the last one has the heads that are left.
    section = program // (sizes.n_tiles * SECTION)
    within = program - section * (sizes.n_tiles * SECTION)
    width = gl.minimum(gl.num_programs(0) // sizes.n_tiles - section * SECTION, SECTION)
    n_tile = within // width
    place = section * SECTION + within - n_tile * width
    batch = place // sizes.kv_heads
    key = n_tile * BLOCK_N
    first = 0
    end = sizes.m_tiles
    unmasked_first = 0
    # Zeros stand for keys past the end, and the exponential of a score of 0 may be infinite.
    unmasked_first = gl.where(key + BLOCK_N > sizes.n_kv, end, gl.minimum(unmasked_first, end))
    unmasked_end = end
    return TileCoord(batch, place - batch * sizes.kv_heads, key, first, unmasked_first, unmasked_end, end)


@gluon.jit
def exp2(x):
    """2 to the x. Of four in a thread, one by a polynomial of the third degree, off by 7.5e-5 at most: the special unit takes 16 a clock.

    Below -126 it stays what it is there. Above 127 it is wrong, as no score is that counts.
    """
    # x is j plus f, which 1.5 * 2^23 rounds apart; j's bits are left in the lowest of the sum, whence they move to the exponent.
    text: gl.constexpr = """
    {
        .reg .f32 x, j, f, p;
        .reg .b32 e, b;
        ex2.approx.ftz.f32 $0, $4;
        ex2.approx.ftz.f32 $1, $5;
        ex2.approx.ftz.f32 $2, $6;
        max.f32 x, $7, 0fC2FC0000;
        add.rn.f32 j, x, 0f4B400000;
        sub.rn.f32 f, j, 0f4B400000;
        sub.rn.f32 f, x, f;
        fma.rn.f32 p, f, 0f3D61FB71, 0f3E786EF8;
        fma.rn.f32 p, p, f, 0f3F31798D;
        fma.rn.f32 p, p, f, 0f3F7FFB4A;
        mov.b32 b, p;
        mov.b32 e, j;
        shl.b32 e, e, 23;
        add.s32 b, b, e;
        mov.b32 $3, b;
    }
    """
    return gl.inline_asm_elementwise(text, "=f,=f,=f,=f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4)


@gluon.jit
def mask_probs(probs, key, row, sizes):
    """0 where a query (from `row` on) doesn't see a key (from `key` on). Selected, for what is masked may be infinite."""
    keys = key + gl.arange(0, KEYS, layout=KEY_LAYOUT)  # [KEYS]
    columns = gl.arange(0, BLOCK_M, layout=QUERY_LAYOUT)[None, :]  # [1, BLOCK_M]
    first = gl.zeros([KEYS], gl.int32, KEY_LAYOUT)  # [KEYS]
    first = gl.where(keys < sizes.n_kv, first, BLOCK_M)  # [KEYS]
    # In assembly, or the compiler gathers predicates in registers of their own.
    from_first: gl.constexpr = "{ .reg .pred sees; setp.ge.s32 sees, $2, $3; selp.f32 $0, $1, 0f00000000, sees; }"
    probs = gl.inline_asm_elementwise(from_first, "=f,f,r,r", [probs, columns, first[:, None]], dtype=gl.float32, is_pure=True, pack=1)
    return probs  # [KEYS, BLOCK_M]


@gluon.jit
def producer(descs, smem, sizes):
    """The copying warp: runs ahead of the consumers as far as the stages allow."""
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, bias_desc = descs
    tile = tile_at(gl.program_id(0), sizes)
    kv_full = smem.kv_full.index(0)
    mbarrier.expect(kv_full, CONSUMERS * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for w in gl.static_range(CONSUMERS):
        async_load(k_desc, [tile.batch, tile.kv_head, tile.key + w * KEYS, 0], kv_full, smem.k.index(w))
        async_load(v_desc, [tile.batch, tile.kv_head, tile.key + w * KEYS, 0], kv_full, smem.v.index(w))
    number = gl.to_tensor(0)
    for member in range(sizes.group):
        head = tile.kv_head * sizes.group + member
        place = (tile.batch * sizes.kv_heads * sizes.group + head) * sizes.m_tiles
        for block in range(tile.first, tile.end):
            corner = [tile.batch, head, block * BLOCK_M, 0]
            load_rows(q_desc, corner, lse_desc, (place + block) * BLOCK_M, smem.q, number, CONSUMERS * bias_desc.block_type.nbytes)
            bias_corner = tile.batch * sizes.bias_by_batch, head * sizes.bias_by_head, block * BLOCK_M * sizes.bias_by_row
            for w in gl.static_range(CONSUMERS):
                corner_of_w = [bias_corner[0], bias_corner[1], bias_corner[2], (tile.key + w * KEYS) * sizes.bias_by_column]
                stage = number % STAGES
                async_load(bias_desc, corner_of_w, smem.q.full.index(stage), smem.bias.index(stage * CONSUMERS + w))
            load_rows(dout_desc, corner, delta_desc, (place + block) * BLOCK_M, smem.dout, number)
            number += 1


@gluon.jit
def start_dq(number, smem, zero, W: gl.constexpr):
    """Starts this warpgroup's part of dQ, dS K over all keys of the tile."""
    part = gl.zeros([PART_M, PART_D], gl.float32, DQ_LAYOUT)
    for w in gl.static_range(CONSUMERS):
        dscores = smem.dscores.index(number % 2 * CONSUMERS + w + zero).permute((1, 0))
        keys = smem.k.index(w + zero).reshape([KEYS, BLOCK_D])
        keys = keys.slice(W * PART_D, PART_D, 1)
        if w == 0:
            part = warpgroup_mma(dscores, keys, part, use_acc=False, is_async=True)  # [PART_M, PART_D]
        else:
            part = warpgroup_mma(dscores, keys, part, is_async=True)  # [PART_M, PART_D]
    return part


@gluon.jit
def add_dq(part, place, smem, zero, W: gl.constexpr):
    """Adds this warpgroup's part of dQ to the sums of a block."""
    ordered = in_thread_order(part).reshape([PART_M * PART_D])
    start = smem.sums + (place * CONSUMERS + W).to(gl.int64) * (PART_M * PART_D)
    gl.atomic_add(start + gl.arange(0, PART_M * PART_D, layout=ordered.type.layout), ordered, sem="relaxed")


@gluon.jit
def mainloop(
    blocks,
    number,
    dk,
    dv,
    k_held,
    v_held,
    place,
    key,
    smem,
    sizes,
    params,
    HAS_DQ: gl.constexpr,
    HAS_DKDV: gl.constexpr,
    MASKED: gl.constexpr,
    W: gl.constexpr,
):
    """Blocks blocks[0] .. blocks[1]-1 of one head's queries. Every product of a block has ended before the next block begins."""
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES_LAYOUT)
    for block in range(blocks[0], blocks[1]):
        zero = opaque_zero()
        q_tile = smem.q.smem.index(number % STAGES).reshape([BLOCK_M, BLOCK_D])
        dout_tile = smem.dout.smem.index(number % STAGES).reshape([BLOCK_M, BLOCK_DV])
        wait_full(smem.q, number)
        scores = warpgroup_mma(k_held, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [KEYS, BLOCK_M]
        wait_full(smem.dout, number)
        dprobs = warpgroup_mma(v_held, dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [KEYS, BLOCK_M]
        lse = smem.q.numbers.index(number % STAGES).load(QUERY_LAYOUT)  # [BLOCK_M]
        # Of queries and keys past the ends it is 0: their scores are masked or meet an LSE of +inf.
        bias_tile = smem.bias.index(number % STAGES * CONSUMERS + W).reshape([BLOCK_M, KEYS])
        bias = bias_tile.permute((1, 0)).load(SCORES_LAYOUT)  # [KEYS, BLOCK_M]
        scores = warpgroup_mma_wait(1, deps=[scores])
        scores = scores * params.score_scale  # [KEYS, BLOCK_M]
        # Two multiplications with an addition each, for one that waits for the product.
        probs = exp2(scores + (bias.to(gl.float32) * 1.4426950408889634 - lse[None, :]))  # [KEYS, BLOCK_M]
        if MASKED:
            probs = mask_probs(probs, key, block * BLOCK_M, sizes)
        delta = smem.dout.numbers.index(number % STAGES).load(QUERY_LAYOUT)  # [BLOCK_M]
        dprobs = warpgroup_mma_wait(0, deps=[dprobs])
        dscores = (probs * (dprobs - delta[None, :])).to(DTYPE)  # [KEYS, BLOCK_M]
        probs = gl.convert_layout(probs.to(DTYPE), PROBS_LAYOUT)
        if HAS_DQ:
            smem.dscores.index(number % 2 * CONSUMERS + W + zero).store(dscores)
        dscores = gl.convert_layout(dscores, DSCORES_LAYOUT)
        if HAS_DKDV:
            dv = warpgroup_mma(probs, dout_tile, dv, is_async=True)  # [KEYS, BLOCK_DV]
        if HAS_DQ:
            fence_async_shared()
            # Behind it both halves of dS are there, and nobody reads those of the block before.
            named_barrier_sync(5, 128 * CONSUMERS)
            part = start_dq(number, smem, zero, W)
            if HAS_DKDV:
                dv = warpgroup_mma_wait(CONSUMERS, deps=[dv])
                release(smem.dout, number)
                dk = warpgroup_mma(dscores, q_tile, dk, is_async=True)  # [KEYS, BLOCK_D]
                part = warpgroup_mma_wait(1, deps=[part])
            else:
                part = warpgroup_mma_wait(0, deps=[part])
                release(smem.dout, number)
            add_dq(part, place + block, smem, zero, W)
        else:
            dk = warpgroup_mma(dscores, q_tile, dk, is_async=True)  # [KEYS, BLOCK_D]
            dv = warpgroup_mma_wait(1, deps=[dv])
            release(smem.dout, number)
        if HAS_DKDV:
            dk = warpgroup_mma_wait(0, deps=[dk])
        release(smem.q, number)
        number += 1
    return number, dk, dv


@gluon.jit
def consumer(dk_desc, dv_desc, smem, sizes, params, HAS_DQ: gl.constexpr, HAS_DKDV: gl.constexpr, W: gl.constexpr):
    """One warpgroup: keys W * KEYS .. W * KEYS + KEYS - 1 of the program's tile."""
    tile = tile_at(gl.program_id(0), sizes)
    key = tile.key + W * KEYS
    dk = gl.zeros([KEYS, BLOCK_D], gl.float32, DK_LAYOUT)
    dv = gl.zeros([KEYS, BLOCK_DV], gl.float32, DV_LAYOUT)
    mbarrier.wait(smem.kv_full.index(0), 0)
    k_held = smem.k.index(W).reshape([KEYS, BLOCK_D]).load(HELD_LAYOUT)
    v_held = smem.v.index(W).reshape([KEYS, BLOCK_DV]).load(HELD_LAYOUT)
    number = gl.to_tensor(0)
    head_place = (tile.batch * sizes.kv_heads + tile.kv_head) * sizes.group * sizes.m_tiles
    for _ in range(sizes.group):
        blocks = tile.first, tile.unmasked_first
        number, dk, dv = mainloop(blocks, number, dk, dv, k_held, v_held, head_place, key, smem, sizes, params, HAS_DQ, HAS_DKDV, True, W)
        blocks = tile.unmasked_first, tile.unmasked_end
        number, dk, dv = mainloop(blocks, number, dk, dv, k_held, v_held, head_place, key, smem, sizes, params, HAS_DQ, HAS_DKDV, False, W)
        head_place += sizes.m_tiles
    if HAS_DKDV:
        # The gradients leave through the memory of their keys and values, once nobody reads these.
        named_barrier_sync(7, 128 * CONSUMERS)
        smem.k.index(W).reshape([KEYS, BLOCK_D]).store((dk * params.scale).to(DTYPE))
        smem.v.index(W).reshape([KEYS, BLOCK_DV]).store(dv.to(DTYPE))
        fence_async_shared()
        async_store(dk_desc, [tile.batch, tile.kv_head, key, 0], smem.k.index(W))
        async_store(dv_desc, [tile.batch, tile.kv_head, key, 0], smem.v.index(W))
        tma.store_wait(0)


# Nothing is specialized on sizes, so one compiled kernel serves them all.
@gluon.jit(
    do_not_specialize=[
        "n_q",
        "n_kv",
        "kv_heads",
        "group",
        "m_tiles",
        "n_tiles",
        "bias_by_batch",
        "bias_by_head",
        "bias_by_row",
        "bias_by_column",
    ]
)
def flash_bwd_hopper(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    dk_desc,
    dv_desc,
    bias_desc,
    sums_ptr,
    n_q,
    n_kv,
    kv_heads,
    group,
    m_tiles,
    n_tiles,
    bias_by_batch,
    bias_by_head,
    bias_by_row,
    bias_by_column,
    scale,
    score_scale,
    HAS_DQ: gl.constexpr,
    HAS_DKDV: gl.constexpr,
):
    """Splits the program into two consumers and the producer."""
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    dout_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, BLOCK_DV], dout_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    smem = SharedStorage(
        q=Pipeline(q_smem, lse_smem, make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS)),
        dout=Pipeline(dout_smem, delta_smem, make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS)),
        k=gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, KEYS, BLOCK_D], k_desc.layout),
        v=gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, KEYS, BLOCK_DV], v_desc.layout),
        kv_full=make_barriers(1, 1),
        # Two slots, so that one barrier a block is enough.
        dscores=gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, KEYS, BLOCK_M], DSCORES_SHARED),
        bias=gl.allocate_shared_memory(bias_desc.dtype, [STAGES * CONSUMERS, 1, 1, BLOCK_M, KEYS], bias_desc.layout),
        sums=sums_ptr,
    )
    fence_async_shared()
    sizes = Sizes(n_q, n_kv, kv_heads, group, m_tiles, n_tiles, bias_by_batch, bias_by_head, bias_by_row, bias_by_column)
    params = Params(scale, score_scale)
    descs = q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, bias_desc
    gl.warp_specialize(
        [
            (consumer, (dk_desc, dv_desc, smem, sizes, params, HAS_DQ, HAS_DKDV, 0)),
            (consumer, (dk_desc, dv_desc, smem, sizes, params, HAS_DQ, HAS_DKDV, 1)),
            (producer, (descs, smem, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


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
    in_tile = in_rows[:, None] & (offs_dv < 32)[None, :]  # [BLOCK_M, BLOCK_DV]
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
        "batches",
        "batch_repeats",
        "head_repeats",
        "parts",
        "heads",
        "group",
        "n_q",
        "n_kv",
    ]
)
def score_gradients(
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
    grad_ptr,
    stride_gp,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gn,
    batches,
    batch_repeats,
    head_repeats,
    parts,
    heads,
    group,
    n_q,
    n_kv,
    scale,
    score_scale,
    WIDE: tl.constexpr,
    REPEATS_ROWS: tl.constexpr,
    REPEATS_COLUMNS: tl.constexpr,
):
    """The gradient of a tile of what is added to scores, or one of its `parts`.

    Where it repeats over batches, heads, rows or columns, the program loops over all of these, adds up in float32 in one order, and nothing
    is added up in memory.
    """
    BLOCK_M: tl.constexpr = 128
    BLOCK_N: tl.constexpr = 64
    BLOCK_D: tl.constexpr = 64
    BLOCK_DV: tl.constexpr = 64

    tiles_m = 1 if REPEATS_ROWS else tl.cdiv(n_q, BLOCK_M)
    tiles_n = 1 if REPEATS_COLUMNS else tl.cdiv(n_kv, BLOCK_N)
    program = tl.program_id(0)
    first_n = program % tiles_n
    first_m = program // tiles_n % tiles_m
    plane = program // (tiles_n * tiles_m)
    own_heads = heads // head_repeats
    own_head = plane % own_heads
    own_batch = plane // own_heads % (batches // batch_repeats)
    part = plane // own_heads // (batches // batch_repeats)
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    own_rows = first_m * BLOCK_M + offs_m  # [BLOCK_M]
    own_columns = first_n * BLOCK_N + offs_n  # [BLOCK_N]
    tile_type: tl.constexpr = tl.int64 if WIDE else tl.int32
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    offs_dv = tl.arange(0, BLOCK_DV)  # [BLOCK_DV]
    in_d = (offs_d < 32)[None, :]  # [1, BLOCK_D]
    in_dv = (offs_dv < 32)[None, :]  # [1, BLOCK_DV]

    # Blocks that the program visits, from its first on.
    count_m = 1
    count_n = 1
    if REPEATS_ROWS:
        count_m = tl.cdiv(n_q, BLOCK_M)
    if REPEATS_COLUMNS:
        count_n = tl.cdiv(n_kv, BLOCK_N)
    count = batch_repeats * head_repeats * count_m * count_n
    share = tl.cdiv(count, parts)

    q_offsets = offs_m.to(tile_type)[:, None] * stride_qm + offs_d.to(tile_type)[None, :] * stride_qd  # [BLOCK_M, BLOCK_D]
    dout_offsets = offs_m.to(tile_type)[:, None] * stride_om + offs_dv.to(tile_type)[None, :] * stride_od  # [BLOCK_M, BLOCK_DV]
    k_offsets = offs_n.to(tile_type)[:, None] * stride_kn + offs_d.to(tile_type)[None, :] * stride_kd  # [BLOCK_N, BLOCK_D]
    v_offsets = offs_n.to(tile_type)[:, None] * stride_vn + offs_dv.to(tile_type)[None, :] * stride_vd  # [BLOCK_N, BLOCK_DV]
    if REPEATS_COLUMNS:
        total = tl.zeros([BLOCK_M], tl.float32)
    elif REPEATS_ROWS:
        total = tl.zeros([BLOCK_N], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    for index in range(part * share, tl.minimum(part * share + share, count)):
        start_n = (first_n + index % count_n) * BLOCK_N
        start_m = (first_m + index // count_n % count_m) * BLOCK_M
        member = index // count_n // count_m
        head = own_head + member % head_repeats
        batch = own_batch + member // head_repeats
        kv_head = head // group
        head_index = batch * heads + head
        rows = start_m + offs_m  # [BLOCK_M]
        columns = start_n + offs_n  # [BLOCK_N]
        in_rows = rows < n_q  # [BLOCK_M]
        in_columns = columns < n_kv  # [BLOCK_N]
        q_head = q_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start_m.to(tl.int64) * stride_qm
        dout_head = dout_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start_m.to(tl.int64) * stride_om
        k_head = k_ptr + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh + start_n.to(tl.int64) * stride_kn
        v_head = v_ptr + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh + start_n.to(tl.int64) * stride_vn
        q_tile = tl.load(q_head + q_offsets, mask=in_rows[:, None] & in_d, other=0.0)  # [BLOCK_M, BLOCK_D]
        k_tile = tl.load(k_head + k_offsets, mask=in_columns[:, None] & in_d, other=0.0)  # [BLOCK_N, BLOCK_D]
        dout_tile = tl.load(dout_head + dout_offsets, mask=in_rows[:, None] & in_dv, other=0.0)  # [BLOCK_M, BLOCK_DV]
        v_tile = tl.load(v_head + v_offsets, mask=in_columns[:, None] & in_dv, other=0.0)  # [BLOCK_N, BLOCK_DV]
        lse = tl.load(lse_ptr + head_index.to(tl.int64) * n_q + rows, mask=in_rows, other=float("inf"))  # [BLOCK_M]
        delta = tl.load(delta_ptr + head_index.to(tl.int64) * n_q + rows, mask=in_rows, other=0.0)  # [BLOCK_M]
        # Rows beyond the end, and those that see no key, have no probabilities.
        lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)  # [BLOCK_M]
        mask_ptrs = mask_ptr + batch.to(tl.int64) * stride_mb + head.to(tl.int64) * stride_mh
        mask_ptrs += rows.to(tl.int64)[:, None] * stride_mm + columns.to(tl.int64)[None, :] * stride_mn  # [BLOCK_M, BLOCK_N]
        in_tile = in_rows[:, None] & in_columns[None, :]  # [BLOCK_M, BLOCK_N]
        mask_tile = tl.load(mask_ptrs, mask=in_tile, other=0)  # [BLOCK_M, BLOCK_N]
        scores = tl.dot(q_tile, k_tile.T)  # [BLOCK_M, BLOCK_N]
        scores = scores * score_scale  # [BLOCK_M, BLOCK_N]
        scores = scores + mask_tile.to(tl.float32) * 1.4426950408889634  # [BLOCK_M, BLOCK_N]
        probs = tl.exp2(scores - lse[:, None])  # [BLOCK_M, BLOCK_N]
        # Past the end scores are 0, whose exponential less the LSE may be infinite, and 0 times that is NaN.
        probs = tl.where((columns < n_kv)[None, :], probs, 0.0)  # [BLOCK_M, BLOCK_N]
        dprobs = tl.dot(dout_tile, v_tile.T)  # [BLOCK_M, BLOCK_N]
        # What is added comes after the soft cap, and in natural units.
        grad = probs * (dprobs - delta[:, None])  # [BLOCK_M, BLOCK_N]
        if REPEATS_COLUMNS:
            total += tl.sum(grad, 1)  # [BLOCK_M]
        elif REPEATS_ROWS:
            total += tl.sum(grad, 0)  # [BLOCK_N]
        else:
            total += grad  # [BLOCK_M, BLOCK_N]

    grad_ptr += part.to(tl.int64) * stride_gp + own_batch.to(tl.int64) * stride_gb + own_head.to(tl.int64) * stride_gh
    if REPEATS_ROWS and REPEATS_COLUMNS:
        tl.store(grad_ptr, tl.sum(total, 0).to(grad_ptr.dtype.element_ty))
    elif REPEATS_COLUMNS:
        tl.store(grad_ptr + own_rows.to(tl.int64) * stride_gm, total.to(grad_ptr.dtype.element_ty), mask=own_rows < n_q)
    elif REPEATS_ROWS:
        tl.store(grad_ptr + own_columns.to(tl.int64) * stride_gn, total.to(grad_ptr.dtype.element_ty), mask=own_columns < n_kv)
    else:
        grad_ptrs = grad_ptr + own_rows.to(tl.int64)[:, None] * stride_gm + own_columns.to(tl.int64)[None, :] * stride_gn
        in_grad = (own_rows < n_q)[:, None] & (own_columns < n_kv)[None, :]  # [BLOCK_M, BLOCK_N]
        tl.store(grad_ptrs, total.to(grad_ptr.dtype.element_ty), mask=in_grad)


@triton.jit(do_not_specialize=["parts", "count", "heads", "rows", "columns"])
def sum_parts(
    parts_ptr,
    grad_ptr,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gn,
    parts,
    count,
    heads,
    rows,
    columns,
):
    """A bias's gradient from its `parts` of `count` numbers each, added up in one order."""
    SIZE: tl.constexpr = 256

    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)  # [SIZE]
    total = tl.zeros([SIZE], tl.float32)  # [SIZE]
    for part in range(parts):
        total += tl.load(parts_ptr + tl.cast(part, tl.int64) * count + place, mask=place < count, other=0.0)  # [SIZE]
    column = place % columns  # [SIZE]
    row = place // columns % rows  # [SIZE]
    head = place // columns // rows % heads  # [SIZE]
    batch = place // columns // rows // heads  # [SIZE]
    grad_ptrs = grad_ptr + batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh  # [SIZE]
    grad_ptrs += row.to(tl.int64) * stride_gm + column.to(tl.int64) * stride_gn  # [SIZE]
    tl.store(grad_ptrs, total.to(grad_ptr.dtype.element_ty), mask=place < count)


def accepts(q, k, v, mask):
    """Whether the copy engine can take these tensors: aligned, unit stride along D, other strides multiples of 16 bytes."""
    fits = all(
        t.data_ptr() % 16 == 0
        and t.stride(3) == 1
        and t.shape[3] % 8 == 0
        and all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True))
        for t in (q, k, v)
    )
    return fits and mask.element_size() <= 2


def copyable(bias):
    """Whether the copy engine can take the bias from where it is."""
    rows = all(size == 1 or (step > 0 and step % 8 == 0) for size, step in zip(bias.shape[:3], bias.stride()[:3], strict=True))
    return rows and bias.data_ptr() % 16 == 0 and bias.stride(3) == 1


def compact_bias(bias):
    """The bias with one of each batch and head that it repeats and a tile of repeated rows or columns, as the copy engine can take it."""
    bias = bias[tuple(slice(None if stride else most) for stride, most in zip(bias.stride(), (1, 1, 128, 128), strict=True))]
    if not copyable(bias):
        padded = torch.empty(*bias.shape[:3], -(-bias.shape[3] // 8) * 8, dtype=bias.dtype, device=bias.device)
        padded[..., : bias.shape[3]] = bias
        # What is past the bias's columns is past the last key, which no query sees.
        bias = padded
    return bias


def counts_needed(q, k):
    """How many of `counts` a call takes."""
    return 0


def records(q, k, v, mask, scale):
    """Whether `launches` computes nothing from tensors like these, so that what it makes of them on the meta device can be replayed."""
    return copyable(compact_bias(mask))


def descriptor(tensor, rows, columns):
    """A TMA descriptor over (B, H, N, D) with tiles of `rows` rows of one head; the copy engine fills what is outside with zeros."""
    strides = [stride if size > 1 else 16 for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    block = [1, 1, rows, columns]
    # Only the width counts, which a bias of the other type shares.
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def launches(
    q,
    k,
    v,
    out,
    lse,
    dout,
    dlse,
    dq,
    dk,
    dv,
    dbias,
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
):
    """The launches of one call: (kernel, grid, args, options) each. Without `dq`, or `dk` and `dv`, what makes only these is left out.

    dout, dk and dv are tensors that the copy engine can take, too.
    """
    batches, heads, n_q, _ = q.shape
    kv_heads, n_kv = k.shape[1], k.shape[2]
    m_tiles, n_tiles = -(-n_q // 64), -(-n_kv // 128)
    rows = m_tiles * 64
    lse_2 = torch.empty(batches * heads * rows, dtype=torch.float32, device=q.device)
    deltas = torch.empty_like(lse_2)
    # Nothing is written to those of a call without dQ.
    sums = torch.empty((batches * heads * rows * 64 // 256 if dq is not None else 8, 256), dtype=torch.float32, device=q.device)

    def numbers_of(tensor):
        return TensorDescriptor(tensor, list(tensor.shape), [1], [64], gl.NVMMASharedLayout(0, 32, 1))

    args = (out, dout, lse, lse if dlse is None else dlse, lse_2, deltas, sums, *out.stride(), *dout.stride(), heads, n_q, rows)
    args = (*args, dlse is not None, dq is not None)
    found = [(preprocess, (rows // 64 * batches * heads,), args, {"num_warps": 4, "enable_fp_fusion": True})]
    args = (
        descriptor(q, 64, 64),
        descriptor(k, 64, 64),
        descriptor(v, 64, 64),
        descriptor(dout, 64, 64),
        numbers_of(lse_2),
        numbers_of(deltas),
        descriptor(k if dk is None else dk, 64, 64),
        descriptor(v if dv is None else dv, 64, 64),
        descriptor(compact_bias(mask), 64, 64),
        sums,
        n_q,
        n_kv,
        kv_heads,
        heads // kv_heads,
        m_tiles,
        n_tiles,
        # 0 where the same one is meant for all.
        *(int(stride > 0) for stride in mask.stride()),
        scale,
        scale * 1.4426950408889634,
        dq is not None,
        dk is not None,
    )
    found.append((flash_bwd_hopper, (n_tiles * batches * kv_heads,), args, {"num_warps": 4, "enable_fp_fusion": True}))
    if dq is not None:
        args = (sums, dq, *dq.stride(), heads, n_q, m_tiles, scale)
        found.append((finish_dq, (m_tiles * batches * heads,), args, {"num_warps": 4, "enable_fp_fusion": True}))
    if dq is None and dk is None:
        # Nothing of what goes before is needed.
        found.clear()
    batch, deltas = batches, torch.empty((batches, heads, n_q), dtype=torch.float32, device=q.device)
    args = (out, dout, lse, lse if dlse is None else dlse, deltas, *out.stride(), *dout.stride(), heads, n_q, dlse is not None)
    found.append((row_deltas, (triton.cdiv(n_q, 32) * batch * heads,), args, {"num_warps": 4, "enable_fp_fusion": True}))
    # A tile has up to 2^8 rows and columns, so that smaller strides than these keep its offsets below 2^31.
    wide = max(*q.stride()[2:], *k.stride()[2:], *v.stride()[2:], *dout.stride()[2:]) >= 2**22
    tensors = (
        q,
        k,
        v,
        dout,
        lse,
        deltas,
        mask,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *dout.stride(),
        *mask.stride(),
    )
    numbers = (
        heads,
        heads // kv_heads,
        n_q,
        n_kv,
        scale,
        scale * 1.4426950408889634,
        wide,
    )
    if dbias is not None:
        repeats = [size > 1 and not stride for size, stride in zip(dbias.shape, dbias.stride(), strict=True)]
        own = [1 if repeated else size for size, repeated in zip(dbias.shape, repeats, strict=True)]
        repeats_rows, repeats_columns = repeats[2:]
        tiles = own[0] * own[1] * triton.cdiv(own[2], 128) * triton.cdiv(own[3], 64)
        members = batch * heads // (own[0] * own[1])
        members *= triton.cdiv(n_q, 128) if repeats_rows else 1
        members *= triton.cdiv(n_kv, 64) if repeats_columns else 1
        # A small bias keeps a GPU busy by parts. Their number is the same on every GPU, for it says in which order is added up.
        parts = max(1, min(members, 512 // tiles))
        grads, steps = dbias, (0, *dbias.stride())
        if parts > 1:
            grads = torch.empty((parts, *own), dtype=torch.float32, device=q.device)
            steps = grads.stride()
        args = (*tensors, grads, *steps, batch, batch // own[0], heads // own[1], parts, *numbers, repeats_rows, repeats_columns)
        found.append((score_gradients, (tiles * parts,), args, {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}))
        if parts > 1:
            count = own[0] * own[1] * own[2] * own[3]
            args = (grads, dbias, *dbias.stride(), parts, count, *own[1:])
            found.append((sum_parts, (triton.cdiv(count, 256),), args, {"num_warps": 4, "enable_fp_fusion": True}))
    return found


def launch(*tensors, **settings):
    """Run the kernels on the current stream."""
    for kernel, grid, args, options in launches(*tensors, **settings):
        kernel[grid](*args, **options)
