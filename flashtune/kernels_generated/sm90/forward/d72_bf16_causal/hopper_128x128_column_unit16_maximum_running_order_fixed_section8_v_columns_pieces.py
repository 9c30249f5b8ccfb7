"""FlashAttention forward for Hopper: one warp copies tiles with TMA, 2 warpgroups of 64 rows compute.

A program works through many tiles without draining: the last values of one go beside the first scores of the next.
Key blocks go from right to left.
The scores of one block are under way while the block before it meets its values.

Compiled in: fwd-bf16-d72-causal
Template: flash_fwd_hopper 6f99058163a6a12d
Variant: b06423aa9cb0d760
Config: BLOCK_M=128 BLOCK_N=128 column_unit=16 ctas_per_sm=1 intra_wg_overlap=1 maximum=running num_stages=2 order=fixed pingpong=True
section=8 tiles=chained v_columns=pieces

Generated; do not edit. `flashtune generate` writes it anew.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.6 has no other names for the copies than the longer ones, newer versions none but the short.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

DTYPE = gl.constexpr(gl.bfloat16)
BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
BLOCK_D = gl.constexpr(128)
BLOCK_DV = gl.constexpr(128)
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)
STAGES = gl.constexpr(2)
Q_SLOTS = gl.constexpr(4)
SECTION = gl.constexpr(8)
SCORES_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
OUT_LAYOUT_0 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
OUT_LAYOUT_1 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
PROBS_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=OUT_LAYOUT_0, k_width=2))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, SCORES_LAYOUT))
COLUMN_LAYOUT = gl.constexpr(gl.SliceLayout(0, SCORES_LAYOUT))
# One bit for each column that a thread holds of a row, four threads to a row.
MASK_BITS_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )
)
LN_2 = gl.constexpr(0.6931471805599453)


class Divisor(NamedTuple):
    """The factor and the shift by which `fast_divide` divides."""

    magic: gl.tensor
    shift: gl.tensor


class Sizes(NamedTuple):
    """The sizes of a call."""

    n_q: gl.tensor
    n_kv: gl.tensor
    batches: gl.tensor
    heads: gl.tensor
    kv_group: gl.tensor
    m_tiles: gl.tensor
    diagonal: gl.tensor
    section_divisor: Divisor
    inner_divisor: Divisor
    last_divisor: Divisor


class Params(NamedTuple):
    """What tiles work with beside sizes."""

    scale: gl.tensor


class TileCoord(NamedTuple):
    """Where the rows of a tile, or of one warpgroup of it, begin."""

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor


class BlockRange(NamedTuple):
    """The key blocks first .. end-1, of which unmasked_first .. unmasked_end-1 need no mask."""

    first: gl.tensor
    unmasked_first: gl.tensor
    unmasked_end: gl.tensor
    end: gl.tensor


class Pipeline(NamedTuple):
    """Stages of shared memory with the barriers that tell when each is full and when it is empty again."""

    smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class SharedStorage(NamedTuple):
    """What the roles of a program share."""

    q: Pipeline
    k: Pipeline
    v: Pipeline
    out: gl.shared_memory_descriptor


class SoftmaxState(NamedTuple):
    """What a warpgroup carries from block to block beside the output's accumulator."""

    p_tile: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER barriers that each wait for ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def make_pipeline(smem, NUMBER: gl.constexpr, READERS: gl.constexpr):
    """A pipeline over these stages: one arrival fills a stage, and READERS arrivals empty it."""
    return Pipeline(smem, make_barriers(NUMBER, 1), make_barriers(NUMBER, READERS))


@gluon.jit
def wait_full(pipeline, number, pred=True):
    """Waits until the number-th filling of the pipeline has landed in its stage."""
    stages: gl.constexpr = pipeline.full.shape[0]
    mbarrier.wait(pipeline.full.index(number % stages), number // stages & 1, pred=pred)


@gluon.jit
def wait_empty(pipeline, number):
    """Waits until the stage of the number-th filling is empty."""
    stages: gl.constexpr = pipeline.empty.shape[0]
    mbarrier.wait(pipeline.empty.index(number % stages), number // stages & 1 ^ 1)


@gluon.jit
def release(pipeline, number, pred=True):
    """Says that this warpgroup has read the number-th filling."""
    stages: gl.constexpr = pipeline.empty.shape[0]
    mbarrier.arrive(pipeline.empty.index(number % stages), count=1, pred=pred)


# Hardware barriers from 5 on are free; Triton uses those before.
@gluon.jit
def scheduler_barrier_sync(W: gl.constexpr):
    """Waits until the warpgroup before this one has handed over the tensor cores."""
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [5 + W], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scheduler_barrier_arrive(W: gl.constexpr):
    """Hands the tensor cores to the next warpgroup, without waiting for it."""
    after = 5 + (W + 1) % CONSUMERS
    gl.inline_asm_elementwise("bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [after], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_qk(q_tile, k_tile):
    """Starts Q K^T on the tensor cores."""
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES_LAYOUT)
    # Without the columns that only fill the tile up to a power of two.
    q_tile = q_tile.reshape([ROWS, BLOCK_D])
    k_tile = k_tile.reshape([BLOCK_N, BLOCK_D])
    k_piece = k_tile.slice(0, 64, 1).permute((1, 0))
    scores = warpgroup_mma(q_tile.slice(0, 64, 1), k_piece, zeros, use_acc=False, is_async=True)  # [ROWS, BLOCK_N]
    k_piece = k_tile.slice(64, 16, 1).permute((1, 0))
    scores = warpgroup_mma(q_tile.slice(64, 16, 1), k_piece, scores, is_async=True)  # [ROWS, BLOCK_N]
    return scores


@gluon.jit
def zero_acc():
    """A sum of nothing for every piece."""
    return (
        gl.zeros([ROWS, 64], gl.float32, OUT_LAYOUT_0),
        gl.zeros([ROWS, 16], gl.float32, OUT_LAYOUT_1),
    )


@gluon.jit
def rescale_acc(acc, factor):
    """Rows of all pieces times their factors."""
    return (
        acc[0] * gl.convert_layout(factor, gl.SliceLayout(1, OUT_LAYOUT_0))[:, None],  # [ROWS, 64]
        acc[1] * gl.convert_layout(factor, gl.SliceLayout(1, OUT_LAYOUT_1))[:, None],  # [ROWS, 16]
    )


@gluon.jit
def start_pv(p_tile, v_tile, acc):
    """Starts acc + P V on the tensor cores, without the columns that only fill the tile up to a power of two."""
    probs = unpack(p_tile)
    v_tile = v_tile.reshape([BLOCK_N, BLOCK_DV])
    probs_0 = gl.convert_layout(probs, gl.DotOperandLayout(operand_index=0, parent=OUT_LAYOUT_0, k_width=2))
    piece_0 = warpgroup_mma(probs_0, v_tile.slice(0, 64, 1), acc[0], is_async=True)
    probs_1 = gl.convert_layout(probs, gl.DotOperandLayout(operand_index=0, parent=OUT_LAYOUT_1, k_width=2))
    piece_1 = warpgroup_mma(probs_1, v_tile.slice(64, 16, 1), acc[1], is_async=True)
    return piece_0, piece_1


@gluon.jit
def fixed_work_index(iteration):
    """The work index of the iteration-th tile of this program; past the last tile where it has none."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    return iteration * programs + program


@gluon.jit
def fast_divide(number, divisor):
    """number // divisor, for 0 <= number < 2^31, as a product (Granlund and Montgomery, PLDI 1994)."""
    return (number.to(gl.int64) * divisor.magic >> divisor.shift).to(gl.int32)


@gluon.jit
def tile_at(work_index, sizes):
    """The tile of a work index."""
    section = fast_divide(work_index, sizes.section_divisor)
    # A section of heads goes row tile by row tile, so that its keys and values stay in L2; the last one has the heads that are left.
    within = work_index - section * (sizes.m_tiles * SECTION)
    left = sizes.batches * sizes.heads - section * SECTION
    m_tile = gl.where(left >= SECTION, within // SECTION, fast_divide(within, sizes.last_divisor))
    place = section * SECTION + within - m_tile * gl.minimum(left, SECTION)
    # The longest first.
    m_tile = sizes.m_tiles - 1 - m_tile
    batch = fast_divide(place, sizes.inner_divisor)
    head = place - batch * sizes.heads
    return TileCoord(batch, head, m_tile * BLOCK_M)


@gluon.jit
def block_range(row, NUMBER: gl.constexpr, sizes):
    """The key blocks that NUMBER rows from `row` on may see."""
    n_kv = sizes.n_kv
    end = (n_kv + BLOCK_N - 1) // BLOCK_N
    unmasked_end = n_kv // BLOCK_N
    first = 0
    unmasked_first = 0
    last_row = gl.minimum(row + NUMBER, sizes.n_q) - 1 + sizes.diagonal
    row += sizes.diagonal
    end = gl.minimum(end, gl.maximum(last_row + BLOCK_N, 0) // BLOCK_N)
    unmasked_end = gl.minimum(unmasked_end, gl.maximum(row + 1, 0) // BLOCK_N)
    # Rows that see nothing still take one block, all of it masked, so that every role counts alike.
    end = gl.maximum(end, 1)
    first = gl.minimum(first, end - 1)
    unmasked_first = gl.minimum(gl.maximum(unmasked_first, first), end)
    unmasked_end = gl.minimum(gl.maximum(unmasked_end, unmasked_first), end)
    return BlockRange(first, unmasked_first, unmasked_end, end)


@gluon.jit
def load_v(v_desc, coord, block, pipeline):
    """Starts the copy of a value block as soon as its stage is empty; the row of `coord` is that of its first key."""
    wait_empty(pipeline, block)
    stage = block % STAGES
    mbarrier.expect(pipeline.full.index(stage), v_desc.block_type.nbytes)
    corner = [coord.batch, coord.head, coord.row, 0]
    async_load(v_desc, corner, pipeline.full.index(stage), pipeline.smem.index(stage))


@gluon.jit
def load_tile(
    iteration, work_index, block, values, descs, smem, sizes
):
    """Copies the queries, keys and values of one tile; a block's values follow the keys of the block after it."""
    q_desc, k_desc, v_desc = descs
    coord = tile_at(work_index, sizes)
    kv_head = coord.head // sizes.kv_group
    blocks = block_range(coord.row, BLOCK_M, sizes)
    for n in range(blocks.end - blocks.first):
        column = (blocks.end - 1 - n) * BLOCK_N
        wait_empty(smem.k, block)
        stage = block % STAGES
        mbarrier.expect(smem.k.full.index(stage), k_desc.block_type.nbytes)
        async_load(k_desc, [coord.batch, kv_head, column, 0], smem.k.full.index(stage), smem.k.smem.index(stage))
        if block > 0:
            # Before the queries, for these values are wanted first.
            load_v(v_desc, values, block - 1, smem.v)
        if n == 0:
            for w in gl.static_range(CONSUMERS):
                slot = iteration % 2 * CONSUMERS + w
                mbarrier.wait(smem.q.empty.index(slot), iteration // 2 & 1 ^ 1)
                mbarrier.expect(smem.q.full.index(slot), q_desc.block_type.nbytes)
                async_load(q_desc, [coord.batch, coord.head, coord.row + w * ROWS, 0], smem.q.full.index(slot), smem.q.smem.index(slot))
        values = TileCoord(coord.batch, kv_head, column)
        block += 1
    return block, values


@gluon.jit
def producer(descs, smem, sizes):
    """The copying warp: runs ahead of the consumers as far as the stages allow."""
    block = gl.to_tensor(0)
    values = TileCoord(gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    tiles = sizes.m_tiles * sizes.batches * sizes.heads
    iteration = gl.to_tensor(0)
    work_index = fixed_work_index(0)
    while work_index < tiles:
        block, values = load_tile(iteration, work_index, block, values, descs, smem, sizes)
        iteration += 1
        work_index = fixed_work_index(iteration)
    load_v(descs[2], values, block - 1, smem.v)


@gluon.jit
def bits_before(end):
    """Mask bits of the columns of each row before `end`."""
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, MASK_BITS_LAYOUT))
    end = gl.convert_layout(end, gl.SliceLayout(1, MASK_BITS_LAYOUT))
    room = gl.minimum(gl.maximum(end[:, None] - 2 * quarter[None, :], 0), BLOCK_N)  # [ROWS, 4]
    # How many of its thread's columns of a row are before `end`.
    number = room // 8 * 2 + gl.minimum(room % 8, 2)
    # In assembly, where shifting by as many bits as a word has leaves none.
    ones: gl.constexpr = "{ .reg .b32 end; mov.b32 end, 1; shl.b32 end, end, $1; add.s32 $0, end, -1; }"
    return gl.inline_asm_elementwise(ones, "=r,r", [number], dtype=gl.int32, is_pure=True, pack=1)  # [ROWS, 4]


@gluon.jit
def mask_scores(scores, mask_bits):
    """-inf where a key's bit is 0. Four threads share a row and hold columns 8 i + 2 t + j of it; t's word has their bits at 2 i + j.

    Which bit a register needs is known to the compiler, so that a score takes two instructions.
    """
    fours: gl.constexpr = scores.reshape([ROWS, BLOCK_N // 8, 4, 2]).type.layout
    mask_bits = gl.convert_layout(mask_bits, gl.SliceLayout(1, gl.SliceLayout(3, fours)))
    spread = gl.zeros([ROWS, BLOCK_N // 8, 4, 2], gl.int32, fours) | mask_bits.expand_dims(1).expand_dims(3)
    spread = gl.convert_layout(spread.reshape([ROWS, BLOCK_N]), SCORES_LAYOUT)  # [ROWS, BLOCK_N]
    offs_n = gl.arange(0, BLOCK_N, layout=COLUMN_LAYOUT)
    bit = gl.full([BLOCK_N], 1, gl.int32, COLUMN_LAYOUT) << (offs_n % 128 // 8 * 2 + offs_n % 2)  # [BLOCK_N]
    # In assembly, or the compiler gathers predicates in registers of their own.
    select: gl.constexpr = """
    {
        .reg .pred allowed;
        .reg .b32 one;
        and.b32 one, $2, $3;
        setp.ne.u32 allowed, one, 0;
        selp.f32 $0, $1, 0fFF800000, allowed;
    }
    """
    return gl.inline_asm_elementwise(select, "=f,f,r,r", [scores, spread, bit[None, :]], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def modify_scores(scores, coord, column, unmasked, sizes, params):
    """What happens to the raw scores of the block that begins at `column`; -inf masks a key.

    `unmasked` spares the look at the edges.
    """
    if not unmasked:
        diagonal = coord.row + sizes.diagonal - column + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        end = gl.minimum(diagonal + 1, sizes.n_kv - column)  # [ROWS]
        visible = bits_before(end)  # [ROWS, 4]
        scores = mask_scores(scores, visible)
    return scores  # [ROWS, BLOCK_N]


@gluon.jit
def quarter_sums(probs):
    """Four partial sums of each row, one for each thread that holds a part of it: threads add up only when a tile is finished."""
    parts = gl.sum(probs.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3)
    return gl.sum(parts, 1)  # [ROWS, 4]


@gluon.jit
def online_softmax(scores, row_max, row_sum, scale, GUARD: gl.constexpr):
    """One block of the online softmax in base 2: its probs, the factor for what came before, the new maximum and sum."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)  # [ROWS]
    shift = new_max
    if GUARD:
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = gl.exp2(row_max - shift)  # [ROWS]
    probs = gl.exp2(scores * scale - shift[:, None])  # [ROWS, BLOCK_N]
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + quarter_sums(probs)
    return probs, rescale, new_max, row_sum


@gluon.jit
def pack(probs):
    """Probs by twos, which is how they wait for their product: else the compiler splits pairs that wait from one loop to the next."""
    even, odd = gl.split(probs.reshape([ROWS, BLOCK_N // 2, 2]))
    convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    pairs = gl.inline_asm_elementwise(convert, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)  # [ROWS, BLOCK_N // 2]
    return pairs


@gluon.jit
def unpack(pairs):
    """Packed probs as the left operand of a product; nothing moves."""
    halves = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [gl.join(pairs, pairs)], dtype=gl.int16, is_pure=True, pack=2)
    return gl.convert_layout(halves.reshape([ROWS, BLOCK_N]).to(DTYPE, bitcast=True), PROBS_LAYOUT)  # [ROWS, BLOCK_N]


@gluon.jit
def init_softmax():
    """Maximum and sum of rows that have met no key yet."""
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    row_sum = quarter_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES_LAYOUT))
    return row_max, row_sum


@gluon.jit
def prologue(block, q_tile, coord, column, smem, sizes, params, W: gl.constexpr):
    """Scores and softmax of the first block of a tile."""
    wait_full(smem.k, block)
    scheduler_barrier_sync(W)
    scores = start_qk(q_tile, smem.k.smem.index(block % STAGES))
    scheduler_barrier_arrive(W)
    scores = warpgroup_mma_wait(0, deps=[scores])
    release(smem.k, block)
    scores = modify_scores(scores, coord, column, False, sizes, params)
    row_max, row_sum = init_softmax()
    probs, _, row_max, row_sum = online_softmax(scores, row_max, row_sum, params.scale, True)
    p_tile = pack(probs)
    return SoftmaxState(p_tile, row_max, row_sum)


@gluon.jit
def attend(block, q_tile, acc, state, coord, column, unmasked, smem, sizes, params, W: gl.constexpr):
    """Scores and softmax of one block beside the values of the block before it, whose probs are state.p_tile."""
    stage = block % STAGES
    value_stage = (block - 1) % STAGES
    wait_full(smem.k, block)
    scheduler_barrier_sync(W)
    scores = start_qk(q_tile, smem.k.smem.index(stage))
    wait_full(smem.v, block - 1)
    product = start_pv(state.p_tile, smem.v.smem.index(value_stage), acc)
    scheduler_barrier_arrive(W)
    scores = warpgroup_mma_wait(2, deps=[scores])
    release(smem.k, block)
    scores = modify_scores(scores, coord, column, unmasked, sizes, params)
    probs, rescale, row_max, row_sum = online_softmax(scores, state.row_max, state.row_sum, params.scale, True)
    acc = warpgroup_mma_wait(0, deps=[product[0], product[1]])
    release(smem.v, block - 1)
    acc = rescale_acc(acc, rescale)
    p_tile = pack(probs)
    return acc, SoftmaxState(p_tile, row_max, row_sum)


@gluon.jit
def chained_prologue(block, more, q_tile, acc, state, coord, column, smem, sizes, params, W: gl.constexpr):
    """The last values of one tile beside the first scores of the next; without `more` tiles those scores are never used."""
    stage = block % STAGES
    value_stage = (block - 1) % STAGES
    wait_full(smem.k, block, pred=more)
    scheduler_barrier_sync(W)
    scores = start_qk(q_tile, smem.k.smem.index(stage))
    wait_full(smem.v, block - 1)
    product = start_pv(state.p_tile, smem.v.smem.index(value_stage), acc)
    scheduler_barrier_arrive(W)
    scores = warpgroup_mma_wait(2, deps=[scores])
    release(smem.k, block, pred=more)
    scores = modify_scores(scores, coord, column, False, sizes, params)
    row_max, row_sum = init_softmax()
    probs, _, row_max, row_sum = online_softmax(scores, row_max, row_sum, params.scale, True)
    acc = warpgroup_mma_wait(0, deps=[product[0], product[1]])
    release(smem.v, block - 1)
    p_tile = pack(probs)
    return acc, SoftmaxState(p_tile, row_max, row_sum)


@gluon.jit
def mainloop(block, slot, acc, state, coord, blocks, smem, sizes, params, W: gl.constexpr):
    """The blocks of a tile after its first, right to left."""
    q_tile = smem.q.smem.index(slot)
    for n in range(1, blocks.end - blocks.first):
        column = (blocks.end - 1 - n) * BLOCK_N
        unmasked = n >= blocks.end - blocks.unmasked_end
        acc, state = attend(block + n, q_tile, acc, state, coord, column, unmasked, smem, sizes, params, W)
    return acc, state


@gluon.jit
def epilogue(acc, row_max, row_sum, out_tile, out_desc, lse_ptr, coord, sizes):
    """Divides by the sums and writes a tile of the output (TMA leaves out rows past the end) and its log-sum-exp."""
    batch, head, row = coord
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW_LAYOUT)  # [ROWS]
    inverse = gl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)  # [ROWS]
    acc = rescale_acc(acc, inverse)
    # What the memory holds past the last piece is past the output's columns, which TMA leaves out too.
    out_columns = out_tile.reshape([ROWS, BLOCK_DV])
    out_columns.slice(0, 64, 1).store(acc[0].to(DTYPE))
    out_columns.slice(64, 16, 1).store(acc[1].to(DTYPE))
    fence_async_shared()
    async_store(out_desc, [batch, head, row, 0], out_tile)
    offs_m = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    lse = (row_max + gl.log2(row_sum)) * LN_2  # [ROWS], -inf where nothing was seen
    gl.store(lse_ptr + (batch * sizes.heads + head).to(gl.int64) * sizes.n_q + offs_m, lse, mask=offs_m < sizes.n_q)


@gluon.jit
def consumer(out_desc, lse_ptr, smem, sizes, params, W: gl.constexpr):
    """One warpgroup: rows W * ROWS .. W * ROWS + ROWS - 1 of every tile of this program."""
    if W == CONSUMERS - 1:
        scheduler_barrier_arrive(W)
    block = gl.to_tensor(0)
    tiles = sizes.m_tiles * sizes.batches * sizes.heads
    iteration = gl.to_tensor(0)
    work_index = fixed_work_index(0)
    tile = tile_at(work_index, sizes)
    blocks = block_range(tile.row, BLOCK_M, sizes)
    coord = TileCoord(tile.batch, tile.head, tile.row + W * ROWS)
    column = (blocks.end - 1) * BLOCK_N
    mbarrier.wait(smem.q.full.index(W), 0)
    state = prologue(block, smem.q.smem.index(W), coord, column, smem, sizes, params, W)
    while work_index < tiles:
        blocks = block_range(tile.row, BLOCK_M, sizes)
        coord = TileCoord(tile.batch, tile.head, tile.row + W * ROWS)
        acc = zero_acc()
        slot = iteration % 2 * CONSUMERS + W
        next_slot = (iteration + 1) % 2 * CONSUMERS + W
        next_phase = (iteration + 1) // 2 & 1
        acc, state = mainloop(block, slot, acc, state, coord, blocks, smem, sizes, params, W)
        next_index = fixed_work_index(iteration + 1)
        more = next_index < tiles
        mbarrier.arrive(smem.q.empty.index(slot), count=1)
        block += blocks.end - blocks.first
        # After the last tile the idle work takes that tile's place, so that no load leaves the tensors.
        tile = tile_at(gl.where(more, next_index, work_index), sizes)
        blocks = block_range(tile.row, BLOCK_M, sizes)
        next_coord = TileCoord(tile.batch, tile.head, tile.row + W * ROWS)
        column = (blocks.end - 1) * BLOCK_N
        mbarrier.wait(smem.q.full.index(next_slot), next_phase, pred=more)
        q_tile = smem.q.smem.index(next_slot)
        acc, next_state = chained_prologue(block, more, q_tile, acc, state, next_coord, column, smem, sizes, params, W)
        tma.store_wait(0)
        epilogue(acc, state.row_max, state.row_sum, smem.out.index(W), out_desc, lse_ptr, coord, sizes)
        state = next_state
        work_index = next_index
        iteration += 1
    tma.store_wait(0)


# Nothing is specialized on sizes, so one compiled kernel serves them all.
@gluon.jit(
    do_not_specialize=[
        "n_q",
        "n_kv",
        "batches",
        "heads",
        "kv_group",
        "m_tiles",
        "diagonal",
        "section_magic",
        "section_shift",
        "inner_magic",
        "inner_shift",
        "last_magic",
        "last_shift",
    ]
)
def flash_fwd_hopper(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    n_q,
    n_kv,
    batches,
    heads,
    kv_group,
    m_tiles,
    diagonal,
    section_magic,
    section_shift,
    inner_magic,
    inner_shift,
    last_magic,
    last_shift,
    scale,
):
    """Splits the program into 2 consumers and the producer."""
    q_smem = gl.allocate_shared_memory(DTYPE, [Q_SLOTS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    out_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, ROWS, BLOCK_DV], out_desc.layout)
    smem = SharedStorage(
        q=make_pipeline(q_smem, Q_SLOTS, 1),
        k=make_pipeline(k_smem, STAGES, CONSUMERS),
        v=make_pipeline(v_smem, STAGES, CONSUMERS),
        out=out_smem,
    )
    fence_async_shared()
    sizes = Sizes(
        n_q,
        n_kv,
        batches,
        heads,
        kv_group,
        m_tiles,
        diagonal,
        Divisor(section_magic, section_shift),
        Divisor(inner_magic, inner_shift),
        Divisor(last_magic, last_shift),
    )
    params = Params(
        scale,
    )
    gl.warp_specialize(
        [
            (consumer, (out_desc, lse_ptr, smem, sizes, params, 0)),
            (consumer, (out_desc, lse_ptr, smem, sizes, params, 1)),
            (producer, ((q_desc, k_desc, v_desc), smem, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


def accepts(q, k, v, mask):
    """Whether the copy engine can take these tensors: aligned, unit stride along D, other strides multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0
        and t.stride(3) == 1
        and t.shape[3] % 8 == 0
        and all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True))
        for t in (q, k, v)
    )


def descriptor(tensor, rows, columns):
    """A TMA descriptor over (B, H, N, D) with tiles of `rows` rows of one head; the copy engine fills what is outside with zeros."""
    strides = [stride if size > 1 else 16 for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block, layout)


def magic_divisor(divisor):
    """The factor and the shift by which `fast_divide` divides."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


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
    batches, heads, n_q, _ = q.shape
    m_tiles = -(-n_q // 128)
    tiles = m_tiles * batches * heads
    programs = min(tiles, sms)
    arguments = (
        descriptor(q, 64, 128),
        descriptor(k, 128, 128),
        descriptor(v, 128, 128),
        descriptor(out, 64, 128),
        lse,
        n_q,
        k.shape[2],
        batches,
        heads,
        heads // k.shape[1],
        m_tiles,
        diagonal,
        *magic_divisor(m_tiles * 8),
        *magic_divisor(heads),
        # The heads of the last section, where that isn't whole.
        *magic_divisor(batches * heads % 8 or 1),
        1.4426950408889634 * scale,
    )
    return [
        (flash_fwd_hopper, (programs,), arguments, {"num_warps": 4}),
    ]


def launch(q, k, v, out, lse, **settings):
    """Runs the kernel on the current stream."""
    for kernel, grid, arguments, options in launches(q, k, v, out, lse, **settings):
        kernel[grid](*arguments, **options)
