"""Attention backward for Hopper, bit for bit repeatable: one warp copies tiles with TMA, the other warpgroups compute.

Two kernels in seven products. A program of `key_gradients` holds a tile of keys and loops over the queries of its whole group that see it;
a program of `query_gradients` holds a tile of queries and loops over its keys. Nothing is added up in memory.

Compiled in: bwd-bf16-d192-causal
Template: flash_bwd_hopper_split
Variant: 5376375d8f7cc74e
Config: BLOCK_M=64 BLOCK_N=64 DQ_BLOCK_M=128 DQ_BLOCK_N=64 DQ_num_stages=2 divided_queries=False held_columns=128 num_stages=2

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
BLOCK_D = gl.constexpr(256)
BLOCK_DV = gl.constexpr(256)
# Tiles lie in memory as chunks of 64 columns, as the widest swizzle has them anyway, without those past the head size.
CHUNK = gl.constexpr(64)
D_CHUNKS = gl.constexpr(3)
DV_CHUNKS = gl.constexpr(3)
TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, BLOCK_D.value], DTYPE.value))
SECTION = gl.constexpr(4)
# The kernel of dK and dV.
BLOCK_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
KEYS = gl.constexpr(64)
KEY_TILES = gl.constexpr(1)
STAGES = gl.constexpr(2)
# Scores have keys as rows, so that they and their gradients leave a product as the left operand of the next.
SCORES_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
DK_LAYOUT_0 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
DK_LAYOUT_1 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
DV_LAYOUT_0 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
DV_LAYOUT_1 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
PROBS_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=DV_LAYOUT_0, k_width=2))
DSCORES_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=DK_LAYOUT_0, k_width=2))
HELD_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=SCORES_LAYOUT, k_width=2))
KEY_LAYOUT = gl.constexpr(gl.SliceLayout(1, SCORES_LAYOUT))
QUERY_LAYOUT = gl.constexpr(gl.SliceLayout(0, SCORES_LAYOUT))
PROBS_SHARED = gl.constexpr(gl.NVMMASharedLayout.get_default_for([KEYS.value, BLOCK_M.value], DTYPE.value))
# The kernel of dQ, with queries as rows.
DQ_BLOCK_M = gl.constexpr(128)
DQ_BLOCK_N = gl.constexpr(64)
ROWS = gl.constexpr(64)
ROW_TILES = gl.constexpr(2)
DQ_STAGES = gl.constexpr(2)
V_STAGES = gl.constexpr(1)
ROW_SCORES_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
DQ_LAYOUT_0 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
DQ_LAYOUT_1 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
ROW_DSCORES_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=DQ_LAYOUT_0, k_width=2))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, ROW_SCORES_LAYOUT))
COLUMN_LAYOUT = gl.constexpr(gl.SliceLayout(0, ROW_SCORES_LAYOUT))


class Sizes(NamedTuple):
    """The sizes of a call."""

    n_q: gl.tensor
    n_kv: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor
    m_tiles: gl.tensor
    n_tiles: gl.tensor
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


class Ring(NamedTuple):
    """Stages of shared memory and the barriers that tell when each is full and empty again."""

    smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class KeyStorage(NamedTuple):
    """What the roles of a program of dK and dV share."""

    q: Pipeline
    dout: Pipeline
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    probs: gl.shared_memory_descriptor
    probs_full: gl.shared_memory_descriptor


class QueryStorage(NamedTuple):
    """What the roles of a program of dQ share."""

    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k: Ring
    v: Ring


class RowNumbers(NamedTuple):
    """A number for each query, `rows` to a head."""

    lse_ptr: gl.tensor
    delta_ptr: gl.tensor
    rows: gl.tensor


class QueryTile(NamedTuple):
    """Where a tile of queries begins, of which head, and the blocks of keys that it sees.

    These are first .. end-1, of which unmasked_first .. unmasked_end-1 are seen by all of it.
    """

    batch: gl.tensor
    kv_head: gl.tensor
    member: gl.tensor
    row: gl.tensor
    first: gl.tensor
    unmasked_first: gl.tensor
    unmasked_end: gl.tensor
    end: gl.tensor


@triton.jit(do_not_specialize=["heads", "n_q", "rows"])
def preprocess(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    lse_2_ptr,
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
    rows,
    HAS_DLSE: tl.constexpr,
):
    """What the products need of 64 of a head's `rows`: rowsum(dO * O) - dLSE and the LSE in units of log 2.

    Rows past the end, and those that see no key, have the LSE +inf, by which they have no probabilities.
    """
    ROWS: tl.constexpr = 64
    BLOCK_DV: tl.constexpr = 256

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
    in_tile = in_rows[:, None] & (offs_dv < 192)[None, :]
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


@gluon.jit
def load_chunks(desc, corner, full, smem, first, CHUNKS: gl.constexpr):
    """Starts the copies of a tile's chunks, which fill memory from chunk `first` on."""
    for c in gl.static_range(CHUNKS):
        async_load(desc, [corner[0], corner[1], corner[2], c * CHUNK], full, smem.index(first + c))


@gluon.jit
def store_chunks(desc, corner, smem, first, CHUNKS: gl.constexpr):
    """Starts to write a tile's chunks, which lie in memory from chunk `first` on."""
    for c in gl.static_range(CHUNKS):
        async_store(desc, [corner[0], corner[1], corner[2], c * CHUNK], smem.index(first + c))


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
    stages: gl.constexpr = pipeline.full.shape[0]
    mbarrier.wait(pipeline.full.index(number % stages), number // stages & 1)


@gluon.jit
def release(pipeline, number):
    """Says that this warpgroup has read the number-th filling."""
    stages: gl.constexpr = pipeline.full.shape[0]
    mbarrier.arrive(pipeline.empty.index(number % stages), count=1)


@gluon.jit
def load_rows(desc, corner, numbers_desc, place, pipeline, number, CHUNKS: gl.constexpr):
    """Starts the copy of a block of rows and of their numbers as soon as its stage is empty."""
    stages: gl.constexpr = pipeline.full.shape[0]
    stage = number % stages
    mbarrier.wait(pipeline.empty.index(stage), number // stages & 1 ^ 1)
    mbarrier.expect(pipeline.full.index(stage), CHUNKS * desc.block_type.nbytes + numbers_desc.block_type.nbytes)
    load_chunks(desc, corner, pipeline.full.index(stage), pipeline.smem, stage * CHUNKS, CHUNKS)
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
def tile_at(program, sizes):
    """The tile of a program."""
    # A section of heads goes tile by tile, the longest first; the last one has the heads that are left.
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
    last_key = gl.minimum(key + BLOCK_N, sizes.n_kv) - 1 - sizes.diagonal
    first_key = key - sizes.diagonal
    first = gl.maximum(first_key, 0) // BLOCK_M
    unmasked_first = (gl.maximum(last_key, 0) + BLOCK_M - 1) // BLOCK_M
    # Zeros stand for keys past the end, and the exponential of a score of 0 may be infinite.
    unmasked_first = gl.where(key + BLOCK_N > sizes.n_kv, end, gl.minimum(unmasked_first, end))
    unmasked_end = end
    return TileCoord(batch, place - batch * sizes.kv_heads, key, first, unmasked_first, unmasked_end, end)


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
def mask_probs_dq(probs, key, row, sizes):
    """0 where a query (from `row` on) doesn't see a key (from `key` on). Selected, for what is masked may be infinite."""
    columns = gl.arange(0, DQ_BLOCK_N, layout=COLUMN_LAYOUT)[None, :]  # [1, DQ_BLOCK_N]
    rows = row + gl.arange(0, ROWS, layout=ROW_LAYOUT) + (sizes.diagonal - key)  # [ROWS]
    last = gl.minimum(rows, sizes.n_kv - 1 - key)  # [ROWS]
    # In assembly, or the compiler gathers predicates in registers of their own.
    to_last: gl.constexpr = "{ .reg .pred sees; setp.le.s32 sees, $2, $3; selp.f32 $0, $1, 0f00000000, sees; }"
    probs = gl.inline_asm_elementwise(to_last, "=f,f,r,r", [probs, columns, last[:, None]], dtype=gl.float32, is_pure=True, pack=1)
    return probs  # [ROWS, DQ_BLOCK_N]


@gluon.jit
def zero_dk():
    """A sum of nothing for every piece of dk."""
    return (
        gl.zeros([KEYS, 128], gl.float32, DK_LAYOUT_0),
        gl.zeros([KEYS, 64], gl.float32, DK_LAYOUT_1),
    )


@gluon.jit
def start_dk(dscores, tile, dk):
    """Starts dk plus a block's product on the tensor cores, without the columns that only fill the tile up to a power of two."""
    left_0 = gl.convert_layout(dscores, gl.DotOperandLayout(operand_index=0, parent=DK_LAYOUT_0, k_width=2))
    piece_0 = warpgroup_mma(left_0, tile.slice(0, 128, 1), dk[0], is_async=True)
    left_1 = gl.convert_layout(dscores, gl.DotOperandLayout(operand_index=0, parent=DK_LAYOUT_1, k_width=2))
    piece_1 = warpgroup_mma(left_1, tile.slice(128, 64, 1), dk[1], is_async=True)
    return piece_0, piece_1


@gluon.jit
def zero_dv():
    """A sum of nothing for every piece of dv."""
    return (
        gl.zeros([KEYS, 128], gl.float32, DV_LAYOUT_0),
        gl.zeros([KEYS, 64], gl.float32, DV_LAYOUT_1),
    )


@gluon.jit
def start_dv(probs, tile, dv):
    """Starts dv plus a block's product on the tensor cores, without the columns that only fill the tile up to a power of two."""
    left_0 = gl.convert_layout(probs, gl.DotOperandLayout(operand_index=0, parent=DV_LAYOUT_0, k_width=2))
    piece_0 = warpgroup_mma(left_0, tile.slice(0, 128, 1), dv[0], is_async=True)
    left_1 = gl.convert_layout(probs, gl.DotOperandLayout(operand_index=0, parent=DV_LAYOUT_1, k_width=2))
    piece_1 = warpgroup_mma(left_1, tile.slice(128, 64, 1), dv[1], is_async=True)
    return piece_0, piece_1


@gluon.jit
def zero_dq():
    """A sum of nothing for every piece of dq."""
    return (
        gl.zeros([ROWS, 128], gl.float32, DQ_LAYOUT_0),
        gl.zeros([ROWS, 64], gl.float32, DQ_LAYOUT_1),
    )


@gluon.jit
def start_dq(dscores, tile, dq):
    """Starts dq plus a block's product on the tensor cores, without the columns that only fill the tile up to a power of two."""
    left_0 = gl.convert_layout(dscores, gl.DotOperandLayout(operand_index=0, parent=DQ_LAYOUT_0, k_width=2))
    piece_0 = warpgroup_mma(left_0, tile.slice(0, 128, 1), dq[0], is_async=True)
    left_1 = gl.convert_layout(dscores, gl.DotOperandLayout(operand_index=0, parent=DQ_LAYOUT_1, k_width=2))
    piece_1 = warpgroup_mma(left_1, tile.slice(128, 64, 1), dq[1], is_async=True)
    return piece_0, piece_1


@gluon.jit
def mainloop_dv(blocks, number, dv, k_held, key, smem, sizes, params, MASKED: gl.constexpr):
    """Blocks blocks[0] .. blocks[1]-1 of one head's queries: their probabilities, which both warpgroups need, and dV."""
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES_LAYOUT)
    for block in range(blocks[0], blocks[1]):
        zero = opaque_zero()
        q_tile = smem.q.smem.index(number % STAGES * D_CHUNKS + zero)._reinterpret(DTYPE, [BLOCK_M, BLOCK_D], TILE_LAYOUT)
        dout_tile = smem.dout.smem.index(number % STAGES * DV_CHUNKS + zero)._reinterpret(DTYPE, [BLOCK_M, BLOCK_DV], TILE_LAYOUT)
        k_tile = smem.k.index(zero)._reinterpret(DTYPE, [KEYS, BLOCK_D], TILE_LAYOUT)
        wait_full(smem.q, number)
        piece = q_tile.slice(0, 128, 1)
        scores = warpgroup_mma(k_held, piece.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [KEYS, BLOCK_M]
        piece = q_tile.slice(128, 64, 1)
        scores = warpgroup_mma(k_tile.slice(128, 64, 1), piece.permute((1, 0)), scores, is_async=True)  # [KEYS, BLOCK_M]
        lse = smem.q.numbers.index(number % STAGES).load(QUERY_LAYOUT)  # [BLOCK_M]
        scores = warpgroup_mma_wait(0, deps=[scores])
        probs = gl.exp2(scores * params.score_scale - lse[None, :])  # [KEYS, BLOCK_M]
        if MASKED:
            probs = mask_probs(probs, key, block * BLOCK_M, sizes)
        # The stage of Q is only filled again when the other warpgroup has read what lies in this one.
        shared_probs = probs  # [KEYS, BLOCK_M]
        smem.probs.index(number % STAGES + zero).store(shared_probs.to(DTYPE))
        mbarrier.arrive(smem.probs_full.index(number % STAGES), count=1)
        release(smem.q, number)
        probs = gl.convert_layout(probs.to(DTYPE), PROBS_LAYOUT)
        wait_full(smem.dout, number)
        dv = start_dv(probs, dout_tile, dv)
        dv = warpgroup_mma_wait(0, deps=[dv[0], dv[1]])
        release(smem.dout, number)
        number += 1
    return number, dv


@gluon.jit
def mainloop_dk(blocks, number, dk, v_held, smem, params):
    """The same blocks: dK, of the other warpgroup's probabilities."""
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, SCORES_LAYOUT)
    for _ in range(blocks[0], blocks[1]):
        zero = opaque_zero()
        q_tile = smem.q.smem.index(number % STAGES * D_CHUNKS + zero)._reinterpret(DTYPE, [BLOCK_M, BLOCK_D], TILE_LAYOUT)
        dout_tile = smem.dout.smem.index(number % STAGES * DV_CHUNKS + zero)._reinterpret(DTYPE, [BLOCK_M, BLOCK_DV], TILE_LAYOUT)
        v_tile = smem.v.index(zero)._reinterpret(DTYPE, [KEYS, BLOCK_DV], TILE_LAYOUT)
        wait_full(smem.dout, number)
        piece = dout_tile.slice(0, 128, 1)
        dprobs = warpgroup_mma(v_held, piece.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [KEYS, BLOCK_M]
        piece = dout_tile.slice(128, 64, 1)
        dprobs = warpgroup_mma(v_tile.slice(128, 64, 1), piece.permute((1, 0)), dprobs, is_async=True)  # [KEYS, BLOCK_M]
        delta = smem.dout.numbers.index(number % STAGES).load(QUERY_LAYOUT)  # [BLOCK_M]
        dprobs = warpgroup_mma_wait(0, deps=[dprobs])
        release(smem.dout, number)
        mbarrier.wait(smem.probs_full.index(number % STAGES), number // STAGES & 1)
        probs = smem.probs.index(number % STAGES + zero).load(SCORES_LAYOUT).to(gl.float32)  # [KEYS, BLOCK_M]
        dscores = (probs * (dprobs - delta[None, :])).to(DTYPE)  # [KEYS, BLOCK_M]
        dscores = gl.convert_layout(dscores, DSCORES_LAYOUT)
        wait_full(smem.q, number)
        dk = start_dk(dscores, q_tile, dk)
        dk = warpgroup_mma_wait(0, deps=[dk[0], dk[1]])
        release(smem.q, number)
        number += 1
    return number, dk


@gluon.jit
def value_consumer(dv_desc, smem, sizes, params):
    """The warpgroup that has dV."""
    tile = tile_at(gl.program_id(0), sizes)
    dv = zero_dv()
    mbarrier.wait(smem.kv_full.index(0), 0)
    k_held = smem.k.index(0)._reinterpret(DTYPE, [KEYS, BLOCK_D], TILE_LAYOUT).slice(0, 128, 1).load(HELD_LAYOUT)
    number = gl.to_tensor(0)
    for _ in range(sizes.group):
        blocks = tile.first, tile.unmasked_first
        number, dv = mainloop_dv(blocks, number, dv, k_held, tile.key, smem, sizes, params, True)
        blocks = tile.unmasked_first, tile.unmasked_end
        number, dv = mainloop_dv(blocks, number, dv, k_held, tile.key, smem, sizes, params, False)
    # The gradients leave through the memory of their keys and values, once nobody reads these.
    named_barrier_sync(7, 256)
    smem.v.index(0)._reinterpret(DTYPE, [KEYS, BLOCK_DV], TILE_LAYOUT).slice(0, 128, 1).store(dv[0].to(DTYPE))
    smem.v.index(0)._reinterpret(DTYPE, [KEYS, BLOCK_DV], TILE_LAYOUT).slice(128, 64, 1).store(dv[1].to(DTYPE))
    fence_async_shared()
    store_chunks(dv_desc, [tile.batch, tile.kv_head, tile.key, 0], smem.v, 0, DV_CHUNKS)
    tma.store_wait(0)


@gluon.jit
def key_consumer(dk_desc, smem, sizes, params):
    """The warpgroup that has dK."""
    tile = tile_at(gl.program_id(0), sizes)
    dk = zero_dk()
    mbarrier.wait(smem.kv_full.index(0), 0)
    v_held = smem.v.index(0)._reinterpret(DTYPE, [KEYS, BLOCK_DV], TILE_LAYOUT).slice(0, 128, 1).load(HELD_LAYOUT)
    number = gl.to_tensor(0)
    for _ in range(sizes.group):
        number, dk = mainloop_dk((tile.first, tile.end), number, dk, v_held, smem, params)
    named_barrier_sync(7, 256)
    smem.k.index(0)._reinterpret(DTYPE, [KEYS, BLOCK_D], TILE_LAYOUT).slice(0, 128, 1).store((dk[0] * params.scale).to(DTYPE))
    smem.k.index(0)._reinterpret(DTYPE, [KEYS, BLOCK_D], TILE_LAYOUT).slice(128, 64, 1).store((dk[1] * params.scale).to(DTYPE))
    fence_async_shared()
    store_chunks(dk_desc, [tile.batch, tile.kv_head, tile.key, 0], smem.k, 0, D_CHUNKS)
    tma.store_wait(0)


@gluon.jit
def producer(descs, smem, sizes):
    """The copying warp: runs ahead of the consumers as far as the stages allow."""
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc = descs
    tile = tile_at(gl.program_id(0), sizes)
    kv_full = smem.kv_full.index(0)
    mbarrier.expect(kv_full, KEY_TILES * (D_CHUNKS * k_desc.block_type.nbytes + DV_CHUNKS * v_desc.block_type.nbytes))
    for w in gl.static_range(KEY_TILES):
        load_chunks(k_desc, [tile.batch, tile.kv_head, tile.key + w * KEYS, 0], kv_full, smem.k, w * D_CHUNKS, D_CHUNKS)
        load_chunks(v_desc, [tile.batch, tile.kv_head, tile.key + w * KEYS, 0], kv_full, smem.v, w * DV_CHUNKS, DV_CHUNKS)
    number = gl.to_tensor(0)
    for member in range(sizes.group):
        head = tile.kv_head * sizes.group + member
        place = (tile.batch * sizes.kv_heads * sizes.group + head) * sizes.m_tiles
        for block in range(tile.first, tile.end):
            corner = [tile.batch, head, block * BLOCK_M, 0]
            load_rows(q_desc, corner, lse_desc, (place + block) * BLOCK_M, smem.q, number, D_CHUNKS)
            load_rows(dout_desc, corner, delta_desc, (place + block) * BLOCK_M, smem.dout, number, DV_CHUNKS)
            number += 1


# Nothing is specialized on sizes, so one compiled kernel serves them all.
@gluon.jit(
    do_not_specialize=[
        "n_q",
        "n_kv",
        "kv_heads",
        "group",
        "m_tiles",
        "n_tiles",
        "diagonal",
    ]
)
def key_gradients(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    dk_desc,
    dv_desc,
    n_q,
    n_kv,
    kv_heads,
    group,
    m_tiles,
    n_tiles,
    diagonal,
    scale,
    score_scale,
):
    """dK and dV of a tile of keys: splits the program into two consumers and the producer."""
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES * D_CHUNKS, 1, 1, BLOCK_M, CHUNK], q_desc.layout)
    dout_smem = gl.allocate_shared_memory(DTYPE, [STAGES * DV_CHUNKS, 1, 1, BLOCK_M, CHUNK], dout_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    smem = KeyStorage(
        q=Pipeline(q_smem, lse_smem, make_barriers(STAGES, 1), make_barriers(STAGES, 2)),
        dout=Pipeline(dout_smem, delta_smem, make_barriers(STAGES, 1), make_barriers(STAGES, 2)),
        k=gl.allocate_shared_memory(DTYPE, [KEY_TILES * D_CHUNKS, 1, 1, KEYS, CHUNK], k_desc.layout),
        v=gl.allocate_shared_memory(DTYPE, [KEY_TILES * DV_CHUNKS, 1, 1, KEYS, CHUNK], v_desc.layout),
        kv_full=make_barriers(1, 1),
        probs=gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, BLOCK_M], PROBS_SHARED),
        probs_full=make_barriers(STAGES, 1),
    )
    fence_async_shared()
    sizes = Sizes(n_q, n_kv, kv_heads, group, m_tiles, n_tiles, diagonal)
    params = Params(scale, score_scale)
    descs = q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc
    gl.warp_specialize(
        [
            (value_consumer, (dv_desc, smem, sizes, params)),
            (key_consumer, (dk_desc, smem, sizes, params)),
            (producer, (descs, smem, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def query_tile_at(program, sizes):
    """The tile of queries of a program."""
    # A section of heads goes tile by tile, the longest first; the last one has the heads that are left.
    section = program // (sizes.m_tiles * SECTION)
    within = program - section * (sizes.m_tiles * SECTION)
    width = gl.minimum(gl.num_programs(0) // sizes.m_tiles - section * SECTION, SECTION)
    m_tile = sizes.m_tiles - 1 - within // width
    heads = sizes.kv_heads * sizes.group
    place = section * SECTION + within % width
    batch = place // heads
    head = place - batch * heads
    kv_head = head // sizes.group
    row = m_tile * DQ_BLOCK_M
    first = 0
    end = sizes.n_tiles
    unmasked_first = 0
    # Zeros stand for keys past the end, and the exponential of a score of 0 may be infinite.
    unmasked_end = sizes.n_kv // DQ_BLOCK_N
    first_row = row + sizes.diagonal
    last_row = gl.minimum(row + DQ_BLOCK_M, sizes.n_q) - 1 + sizes.diagonal
    end = gl.minimum(end, gl.maximum(last_row + DQ_BLOCK_N, 0) // DQ_BLOCK_N)
    unmasked_end = gl.minimum(unmasked_end, gl.maximum(first_row + 1, 0) // DQ_BLOCK_N)
    unmasked_end = gl.minimum(unmasked_end, end)
    return QueryTile(batch, kv_head, head - kv_head * sizes.group, row, first, unmasked_first, unmasked_end, end)


@gluon.jit
def load_block(desc, corner, pipeline, number, CHUNKS: gl.constexpr):
    """Starts the copy of a block of keys or values as soon as its stage is empty."""
    stages: gl.constexpr = pipeline.full.shape[0]
    stage = number % stages
    mbarrier.wait(pipeline.empty.index(stage), number // stages & 1 ^ 1)
    mbarrier.expect(pipeline.full.index(stage), CHUNKS * desc.block_type.nbytes)
    load_chunks(desc, corner, pipeline.full.index(stage), pipeline.smem, stage * CHUNKS, CHUNKS)


@gluon.jit
def query_producer(descs, smem, sizes):
    """The copying warp: runs ahead of the consumers as far as the stages allow."""
    q_desc, k_desc, v_desc, dout_desc = descs
    tile = query_tile_at(gl.program_id(0), sizes)
    head = tile.kv_head * sizes.group + tile.member
    q_full = smem.q_full.index(0)
    mbarrier.expect(q_full, ROW_TILES * (D_CHUNKS * q_desc.block_type.nbytes + DV_CHUNKS * dout_desc.block_type.nbytes))
    for w in gl.static_range(ROW_TILES):
        load_chunks(q_desc, [tile.batch, head, tile.row + w * ROWS, 0], q_full, smem.q, w * D_CHUNKS, D_CHUNKS)
        load_chunks(dout_desc, [tile.batch, head, tile.row + w * ROWS, 0], q_full, smem.dout, w * DV_CHUNKS, DV_CHUNKS)
    number = gl.to_tensor(0)
    for block in range(tile.first, tile.end):
        corner = [tile.batch, tile.kv_head, block * DQ_BLOCK_N, 0]
        load_block(k_desc, corner, smem.k, number, D_CHUNKS)
        load_block(v_desc, corner, smem.v, number, DV_CHUNKS)
        number += 1


@gluon.jit
def mainloop_dq(
    blocks,
    number,
    dq,
    lse,
    delta,
    row,
    smem,
    sizes,
    params,
    MASKED: gl.constexpr,
    W: gl.constexpr,
):
    """Blocks blocks[0] .. blocks[1]-1 of one head's keys. Every product of a block has ended before the next block begins."""
    zeros = gl.zeros([ROWS, DQ_BLOCK_N], gl.float32, ROW_SCORES_LAYOUT)
    for block in range(blocks[0], blocks[1]):
        zero = opaque_zero()
        k_tile = smem.k.smem.index(number % DQ_STAGES * D_CHUNKS + zero)._reinterpret(DTYPE, [DQ_BLOCK_N, BLOCK_D], TILE_LAYOUT)
        v_tile = smem.v.smem.index(number % V_STAGES * DV_CHUNKS + zero)._reinterpret(DTYPE, [DQ_BLOCK_N, BLOCK_DV], TILE_LAYOUT)
        q_tile = smem.q.index(W * D_CHUNKS + zero)._reinterpret(DTYPE, [ROWS, BLOCK_D], TILE_LAYOUT)
        dout_tile = smem.dout.index(W * DV_CHUNKS + zero)._reinterpret(DTYPE, [ROWS, BLOCK_DV], TILE_LAYOUT)
        wait_full(smem.k, number)
        piece = k_tile.slice(0, 128, 1)
        scores = warpgroup_mma(q_tile.slice(0, 128, 1), piece.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [ROWS, DQ_BLOCK_N]
        piece = k_tile.slice(128, 64, 1)
        scores = warpgroup_mma(q_tile.slice(128, 64, 1), piece.permute((1, 0)), scores, is_async=True)  # [ROWS, DQ_BLOCK_N]
        wait_full(smem.v, number)
        piece = v_tile.slice(0, 128, 1)
        dprobs = warpgroup_mma(dout_tile.slice(0, 128, 1), piece.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [ROWS, DQ_BLOCK_N]
        piece = v_tile.slice(128, 64, 1)
        dprobs = warpgroup_mma(dout_tile.slice(128, 64, 1), piece.permute((1, 0)), dprobs, is_async=True)  # [ROWS, DQ_BLOCK_N]
        scores = warpgroup_mma_wait(2, deps=[scores])
        probs = gl.exp2(scores * params.score_scale - lse[:, None])  # [ROWS, DQ_BLOCK_N]
        if MASKED:
            probs = mask_probs_dq(probs, block * DQ_BLOCK_N, row, sizes)
        dprobs = warpgroup_mma_wait(0, deps=[dprobs])
        release(smem.v, number)
        dscores = (probs * (dprobs - delta[:, None])).to(DTYPE)  # [ROWS, DQ_BLOCK_N]
        dq = start_dq(gl.convert_layout(dscores, ROW_DSCORES_LAYOUT), k_tile, dq)
        dq = warpgroup_mma_wait(0, deps=[dq[0], dq[1]])
        release(smem.k, number)
        number += 1
    return number, dq


@gluon.jit
def query_consumer(dq_desc, numbers, smem, sizes, params, W: gl.constexpr):
    """One warpgroup: queries W * ROWS .. W * ROWS + ROWS - 1 of the program's tile."""
    tile = query_tile_at(gl.program_id(0), sizes)
    row = tile.row + W * ROWS
    head_index = (tile.batch * sizes.kv_heads + tile.kv_head) * sizes.group + tile.member
    # Rows past the end are never stored, and no other row takes anything from them.
    offs_m = gl.minimum(row + gl.arange(0, ROWS, layout=ROW_LAYOUT), sizes.n_q - 1)  # [ROWS]
    lse = gl.load(numbers.lse_ptr + head_index.to(gl.int64) * numbers.rows + offs_m)  # [ROWS]
    delta = gl.load(numbers.delta_ptr + head_index.to(gl.int64) * numbers.rows + offs_m)  # [ROWS]
    dq = zero_dq()
    mbarrier.wait(smem.q_full.index(0), 0)
    number = gl.to_tensor(0)
    blocks = tile.unmasked_first, tile.unmasked_end
    number, dq = mainloop_dq(blocks, number, dq, lse, delta, row, smem, sizes, params, False, W)
    blocks = tile.unmasked_end, tile.end
    number, dq = mainloop_dq(blocks, number, dq, lse, delta, row, smem, sizes, params, True, W)
    # dQ leaves through the memory of this warpgroup's own queries.
    smem.q.index(W * D_CHUNKS)._reinterpret(DTYPE, [ROWS, BLOCK_D], TILE_LAYOUT).slice(0, 128, 1).store((dq[0] * params.scale).to(DTYPE))
    smem.q.index(W * D_CHUNKS)._reinterpret(DTYPE, [ROWS, BLOCK_D], TILE_LAYOUT).slice(128, 64, 1).store((dq[1] * params.scale).to(DTYPE))
    fence_async_shared()
    store_chunks(dq_desc, [tile.batch, tile.kv_head * sizes.group + tile.member, row, 0], smem.q, W * D_CHUNKS, D_CHUNKS)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "rows",
        "n_q",
        "n_kv",
        "kv_heads",
        "group",
        "m_tiles",
        "n_tiles",
        "diagonal",
    ]
)
def query_gradients(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dq_desc,
    lse_ptr,
    delta_ptr,
    rows,
    n_q,
    n_kv,
    kv_heads,
    group,
    m_tiles,
    n_tiles,
    diagonal,
    scale,
    score_scale,
):
    """dQ of a tile of queries: splits the program into its consumers and the producer."""
    k_smem = gl.allocate_shared_memory(DTYPE, [DQ_STAGES * D_CHUNKS, 1, 1, DQ_BLOCK_N, CHUNK], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [V_STAGES * DV_CHUNKS, 1, 1, DQ_BLOCK_N, CHUNK], v_desc.layout)
    smem = QueryStorage(
        q=gl.allocate_shared_memory(DTYPE, [ROW_TILES * D_CHUNKS, 1, 1, ROWS, CHUNK], q_desc.layout),
        dout=gl.allocate_shared_memory(DTYPE, [ROW_TILES * DV_CHUNKS, 1, 1, ROWS, CHUNK], dout_desc.layout),
        q_full=make_barriers(1, 1),
        k=Ring(k_smem, make_barriers(DQ_STAGES, 1), make_barriers(DQ_STAGES, ROW_TILES)),
        v=Ring(v_smem, make_barriers(V_STAGES, 1), make_barriers(V_STAGES, ROW_TILES)),
    )
    fence_async_shared()
    sizes = Sizes(n_q, n_kv, kv_heads, group, m_tiles, n_tiles, diagonal)
    params = Params(scale, score_scale)
    numbers = RowNumbers(lse_ptr, delta_ptr, rows)
    gl.warp_specialize(
        [
            (query_consumer, (dq_desc, numbers, smem, sizes, params, 0)),
            (query_consumer, (dq_desc, numbers, smem, sizes, params, 1)),
            (query_producer, ((q_desc, k_desc, v_desc, dout_desc), smem, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


KERNEL = {
    "template": "flash_bwd_hopper_split",
    "spec": {
        "direction": "bwd",
        "dtype": "bf16",
        "d": 192,
        "d_v": 192,
        "causal": True,
        "window": False,
        "mask": "none",
        "dropout": False,
        "softcap": False,
        "tf32": False,
    },
    "config": {
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "DQ_BLOCK_M": 128,
        "DQ_BLOCK_N": 64,
        "DQ_num_stages": 2,
        "divided_queries": False,
        "held_columns": 128,
        "num_stages": 2,
    },
}
