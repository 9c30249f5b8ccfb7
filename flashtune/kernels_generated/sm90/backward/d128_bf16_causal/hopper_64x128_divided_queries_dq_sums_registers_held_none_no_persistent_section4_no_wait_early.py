"""Attention backward for Hopper: one warp copies tiles with TMA, two warpgroups compute, of 64 keys each.

A program holds a tile of keys and loops over its division of the queries of the group that see it, in five products. dQ is added up in float32 in
memory, from registers, in an order that no two launches share: its last bits vary.

Compiled in: bwd-bf16-d128-causal
Template: flash_bwd_hopper
Variant: ea810253e435cfcb
Config: BLOCK_M=64 BLOCK_N=128 divided_queries=True dq_sums=registers exp_poly=False held=none num_stages=2 persistent=False section=4
wait_early=False

Generated; do not edit. `flashtune generate` writes it anew.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

# Triton 3.6 has no other names for the copies than the longer ones, newer versions none but the short.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

DTYPE = gl.constexpr(gl.bfloat16)
BLOCK_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(128)
BLOCK_D = gl.constexpr(128)
BLOCK_DV = gl.constexpr(128)
CONSUMERS = gl.constexpr(2)
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(2)
SECTION = gl.constexpr(4)
# What each warpgroup makes of a tile of dQ.
PART_M = gl.constexpr(64)
PART_D = gl.constexpr(64)
# Scores have keys as rows, so that they and their gradients leave a product as the left operand of the next.
SCORES_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
DK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
DV_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
DQ_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
PROBS_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=DV_LAYOUT, k_width=2))
DSCORES_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=DK_LAYOUT, k_width=2))
KEY_LAYOUT = gl.constexpr(gl.SliceLayout(1, SCORES_LAYOUT))
QUERY_LAYOUT = gl.constexpr(gl.SliceLayout(0, SCORES_LAYOUT))
DSCORES_SHARED = gl.constexpr(gl.NVMMASharedLayout.get_default_for([KEYS.value, BLOCK_M.value], DTYPE.value))


class Sizes(NamedTuple):
    """The sizes of a call."""

    n_q: gl.tensor
    n_kv: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor
    m_tiles: gl.tensor
    n_tiles: gl.tensor
    divisions: gl.tensor
    diagonal: gl.tensor


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
    division: gl.tensor
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
    BLOCK_D: tl.constexpr = 128
    BLOCK_DV: tl.constexpr = 128

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
    in_tile = in_rows[:, None]
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
    PART_D: tl.constexpr = 64
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
        in_tile = (offs_m < n_q)[:, None]
        tl.store(dq_ptrs, tile.to(dq_ptr.dtype.element_ty), mask=in_tile)


@triton.jit(do_not_specialize=["kv_heads", "n_kv", "rows", "divisions"])
def add_divisions(
    dk_parts_ptr,
    dv_parts_ptr,
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
    kv_heads,
    n_kv,
    rows,
    divisions,
    dk_scale,
):
    """dK and dV of 16 of a head's keys from what each division has found of them, one added to the other."""
    ROWS: tl.constexpr = 16

    head_index = tl.program_id(0) // (rows // ROWS)
    start = tl.program_id(0) % (rows // ROWS) * ROWS
    batch = (head_index // kv_heads).to(tl.int64)
    head = (head_index % kv_heads).to(tl.int64)
    offs_n = start + tl.arange(0, ROWS)  # [ROWS]
    place = head_index.to(tl.int64) * divisions * rows + offs_n  # [ROWS]
    offs_d = tl.arange(0, 128)  # [128]
    parts_ptrs = dk_parts_ptr + place[:, None] * 128 + offs_d[None, :]  # [ROWS, 128]
    total = tl.load(parts_ptrs)  # [ROWS, 128]
    for _ in range(1, divisions):
        parts_ptrs += rows * 128
        total += tl.load(parts_ptrs)
    total *= dk_scale
    out_ptrs = dk_ptr + batch * stride_dkb + head * stride_dkh
    out_ptrs += offs_n.to(tl.int64)[:, None] * stride_dkn + offs_d.to(tl.int64)[None, :] * stride_dkd  # [ROWS, 128]
    tl.store(out_ptrs, total.to(dk_ptr.dtype.element_ty), mask=(offs_n < n_kv)[:, None])
    offs_d = tl.arange(0, 128)  # [128]
    parts_ptrs = dv_parts_ptr + place[:, None] * 128 + offs_d[None, :]  # [ROWS, 128]
    total = tl.load(parts_ptrs)  # [ROWS, 128]
    for _ in range(1, divisions):
        parts_ptrs += rows * 128
        total += tl.load(parts_ptrs)
    out_ptrs = dv_ptr + batch * stride_dvb + head * stride_dvh
    out_ptrs += offs_n.to(tl.int64)[:, None] * stride_dvn + offs_d.to(tl.int64)[None, :] * stride_dvd  # [ROWS, 128]
    tl.store(out_ptrs, total.to(dv_ptr.dtype.element_ty), mask=(offs_n < n_kv)[:, None])


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
def load_rows(desc, corner, numbers_desc, place, pipeline, number):
    """Starts the copy of a block of rows and of their numbers as soon as its stage is empty."""
    stage = number % STAGES
    mbarrier.wait(pipeline.empty.index(stage), number // STAGES & 1 ^ 1)
    mbarrier.expect(pipeline.full.index(stage), desc.block_type.nbytes + numbers_desc.block_type.nbytes)
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
    """The tile of a program, and which of its divisions."""
    tiles = gl.num_programs(0) // sizes.divisions
    division = program % sizes.divisions
    program = program // sizes.divisions
    # A section of heads goes tile by tile, the longest first; the last one has the heads that are left.
    section = program // (sizes.n_tiles * SECTION)
    within = program - section * (sizes.n_tiles * SECTION)
    width = gl.minimum(tiles // sizes.n_tiles - section * SECTION, SECTION)
    n_tile = within // width
    place = section * SECTION + within - n_tile * width
    batch = place // sizes.kv_heads
    key = n_tile * BLOCK_N
    first = 0
    end = sizes.m_tiles
    unmasked_first = 0
    last_key = gl.minimum(key + BLOCK_N, sizes.n_kv) - 1 - sizes.diagonal
    first_key = key - sizes.diagonal
    first = gl.maximum(first_key, 0) // BLOCK_M
    unmasked_first = (gl.maximum(last_key, 0) + BLOCK_M - 1) // BLOCK_M
    # Zeros stand for keys past the end, and the exponential of a score of 0 may be infinite.
    unmasked_first = gl.where(key + BLOCK_N > sizes.n_kv, end, gl.minimum(unmasked_first, end))
    unmasked_end = end
    return TileCoord(batch, place - batch * sizes.kv_heads, division, key, first, unmasked_first, unmasked_end, end)


@gluon.jit
def divided(tile, member, sizes):
    """The tile with what its division has of the blocks of one head's queries: those of all heads of a group are divided as one row."""
    blocks = tile.end - tile.first
    begin = tile.first - member * blocks
    first = begin + blocks * sizes.group * tile.division // sizes.divisions
    end = begin + blocks * sizes.group * (tile.division + 1) // sizes.divisions
    first = gl.minimum(gl.maximum(first, tile.first), tile.end)
    end = gl.minimum(gl.maximum(end, first), tile.end)
    unmasked_first = gl.minimum(gl.maximum(tile.unmasked_first, first), end)
    unmasked_end = gl.minimum(gl.maximum(tile.unmasked_end, first), end)
    return TileCoord(tile.batch, tile.kv_head, tile.division, tile.key, first, unmasked_first, unmasked_end, end)


@gluon.jit
def mask_probs(probs, key, row, sizes):
    """0 where a query (from `row` on) doesn't see a key (from `key` on). Selected, for what is masked may be infinite."""
    keys = key + gl.arange(0, KEYS, layout=KEY_LAYOUT)  # [KEYS]
    columns = gl.arange(0, BLOCK_M, layout=QUERY_LAYOUT)[None, :]  # [1, BLOCK_M]
    first = keys - (row + sizes.diagonal)  # [KEYS]
    first = gl.where(keys < sizes.n_kv, first, BLOCK_M)  # [KEYS]
    # In assembly, or the compiler gathers predicates in registers of their own.
    from_first: gl.constexpr = "{ .reg .pred sees; setp.ge.s32 sees, $2, $3; selp.f32 $0, $1, 0f00000000, sees; }"
    probs = gl.inline_asm_elementwise(from_first, "=f,f,r,r", [probs, columns, first[:, None]], dtype=gl.float32, is_pure=True, pack=1)
    return probs  # [KEYS, BLOCK_M]


@gluon.jit
def producer(descs, smem, sizes):
    """The copying warp: runs ahead of the consumers as far as the stages allow."""
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc = descs
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
        share = divided(tile, member, sizes)
        for block in range(share.first, share.end):
            corner = [tile.batch, head, block * BLOCK_M, 0]
            load_rows(q_desc, corner, lse_desc, (place + block) * BLOCK_M, smem.q, number)
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
        k_tile = smem.k.index(W + zero).reshape([KEYS, BLOCK_D])
        v_tile = smem.v.index(W + zero).reshape([KEYS, BLOCK_DV])
        wait_full(smem.q, number)
        scores = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [KEYS, BLOCK_M]
        wait_full(smem.dout, number)
        dprobs = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [KEYS, BLOCK_M]
        lse = smem.q.numbers.index(number % STAGES).load(QUERY_LAYOUT)  # [BLOCK_M]
        scores = warpgroup_mma_wait(1, deps=[scores])
        probs = gl.exp2(scores * params.score_scale - lse[None, :])  # [KEYS, BLOCK_M]
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
def consumer(dk_ptr, dv_ptr, smem, sizes, params, HAS_DQ: gl.constexpr, HAS_DKDV: gl.constexpr, W: gl.constexpr):
    """One warpgroup: keys W * KEYS .. W * KEYS + KEYS - 1 of the program's tile."""
    tile = tile_at(gl.program_id(0), sizes)
    key = tile.key + W * KEYS
    dk = gl.zeros([KEYS, BLOCK_D], gl.float32, DK_LAYOUT)
    dv = gl.zeros([KEYS, BLOCK_DV], gl.float32, DV_LAYOUT)
    mbarrier.wait(smem.kv_full.index(0), 0)
    number = gl.to_tensor(0)
    head_place = (tile.batch * sizes.kv_heads + tile.kv_head) * sizes.group * sizes.m_tiles
    for member in range(sizes.group):
        share = divided(tile, member, sizes)
        blocks = share.first, share.unmasked_first
        number, dk, dv = mainloop(blocks, number, dk, dv, head_place, key, smem, sizes, params, HAS_DQ, HAS_DKDV, True, W)
        blocks = share.unmasked_first, share.unmasked_end
        number, dk, dv = mainloop(blocks, number, dk, dv, head_place, key, smem, sizes, params, HAS_DQ, HAS_DKDV, False, W)
        head_place += sizes.m_tiles
    if HAS_DKDV:
        row = ((tile.batch * sizes.kv_heads + tile.kv_head) * sizes.divisions + tile.division) * (sizes.n_tiles * BLOCK_N) + key
        rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, DK_LAYOUT))
        columns = gl.arange(0, 128, layout=gl.SliceLayout(0, DK_LAYOUT))
        ptrs = dk_ptr + row.to(gl.int64) * 128 + rows[:, None] * 128 + columns[None, :]  # [KEYS, 128]
        gl.store(ptrs, dk)
        rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, DV_LAYOUT))
        columns = gl.arange(0, 128, layout=gl.SliceLayout(0, DV_LAYOUT))
        ptrs = dv_ptr + row.to(gl.int64) * 128 + rows[:, None] * 128 + columns[None, :]  # [KEYS, 128]
        gl.store(ptrs, dv)


# Nothing is specialized on sizes, so one compiled kernel serves them all.
@gluon.jit(
    do_not_specialize=[
        "n_q",
        "n_kv",
        "kv_heads",
        "group",
        "m_tiles",
        "n_tiles",
        "divisions",
        "diagonal",
    ]
)
def flash_bwd_hopper(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    dk_ptr,
    dv_ptr,
    sums_ptr,
    n_q,
    n_kv,
    kv_heads,
    group,
    m_tiles,
    n_tiles,
    divisions,
    diagonal,
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
        sums=sums_ptr,
    )
    fence_async_shared()
    sizes = Sizes(n_q, n_kv, kv_heads, group, m_tiles, n_tiles, divisions, diagonal)
    params = Params(scale, score_scale)
    descs = q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc
    gl.warp_specialize(
        [
            (consumer, (dk_ptr, dv_ptr, smem, sizes, params, HAS_DQ, HAS_DKDV, 0)),
            (consumer, (dk_ptr, dv_ptr, smem, sizes, params, HAS_DQ, HAS_DKDV, 1)),
            (producer, (descs, smem, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


KERNEL = {
    "template": "flash_bwd_hopper",
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
        "BLOCK_M": 64,
        "BLOCK_N": 128,
        "divided_queries": True,
        "dq_sums": "registers",
        "exp_poly": False,
        "held": "none",
        "num_stages": 2,
        "persistent": False,
        "section": 4,
        "wait_early": False,
    },
}
