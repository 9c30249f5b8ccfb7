"""FlashAttention forward for Hopper: one warp copies tiles with TMA, 1 warpgroup of 64 rows computes.

A program computes one tile.
Key blocks go from right to left.
One block goes from scores to values.

Compiled in: fwd-fp8-d64-window-alibi-bool
Template: flash_fwd_hopper
Variant: 94a186fc5b2c0b75
Config: BLOCK_M=64 BLOCK_N=64 ctas_per_sm=2 intra_wg_overlap=0 maximum=running num_stages=2 order=fixed packed_heads=1 pingpong=False
rescale=always section=1 tiles=one v_columns=padded

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

DTYPE = gl.constexpr(gl.float8e4nv)
OUT_DTYPE = gl.constexpr(gl.bfloat16)
BLOCK_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
BLOCK_D = gl.constexpr(64)
BLOCK_DV = gl.constexpr(64)
CONSUMERS = gl.constexpr(1)
ROWS = gl.constexpr(64)
STAGES = gl.constexpr(2)
Q_SLOTS = gl.constexpr(1)
SCORES_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32]))
OUT_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32]))
PROBS_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=OUT_LAYOUT, k_width=4))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, SCORES_LAYOUT))
COLUMN_LAYOUT = gl.constexpr(gl.SliceLayout(0, SCORES_LAYOUT))
OUT_ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, OUT_LAYOUT))
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
# The four bytes of a register side by side, for [ROWS, BLOCK_N // 4, 2, 2].
FOURS_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 1, 0], [8, 0, 0, 0], [0, 4, 0, 0], [0, 8, 0, 0]],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, 16, 2, 2],
    )
)
LN_2 = gl.constexpr(0.6931471805599453)
MAX_OFFSET = gl.constexpr(8.0)


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
    window_left: gl.tensor
    window_right: gl.tensor
    mask_per_batch: gl.tensor
    mask_per_head: gl.tensor
    section_divisor: Divisor
    inner_divisor: Divisor


class PerHead(NamedTuple):
    """Numbers in memory, one for each batch and head."""

    ptr: gl.tensor
    by_batch: gl.tensor
    by_head: gl.tensor


class CallParams(NamedTuple):
    """What the kernel is given for the scores and the output."""

    scale: gl.tensor
    bias_scale: gl.tensor
    mask_bits_ptr: gl.tensor
    slopes: PerHead
    q_descale: PerHead
    k_descale: PerHead
    v_descale: PerHead


class Params(NamedTuple):
    """What the tiles of one head work with beside sizes."""

    scale: gl.tensor
    bias_scale: gl.tensor
    mask_bits_ptr: gl.tensor
    slope: gl.tensor
    out_scale: gl.tensor


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


@gluon.jit
def start_qk(q_tile, k_tile):
    """Starts Q K^T on the tensor cores."""
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES_LAYOUT)
    k_tile = k_tile.reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
    return warpgroup_mma(q_tile.reshape([ROWS, BLOCK_D]), k_tile, zeros, use_acc=False, is_async=True)  # [ROWS, BLOCK_N]


@gluon.jit
def start_pv(p_tile, v_tile):
    """Starts P V on the tensor cores, by themselves: these products keep some 13 bits of a sum, so that few may go into one."""
    zeros = gl.zeros([ROWS, BLOCK_DV], gl.float32, OUT_LAYOUT)
    v_tile = v_tile.reshape([BLOCK_DV, BLOCK_N]).permute((1, 0))
    return warpgroup_mma(unpack(p_tile), v_tile, zeros, use_acc=False, is_async=True)  # [ROWS, BLOCK_DV]


@gluon.jit
def add_pv(acc, rescale, product):
    """acc * rescale + P V, where that product is under way."""
    return acc * gl.convert_layout(rescale, OUT_ROW_LAYOUT)[:, None] + warpgroup_mma_wait(0, deps=[product])  # [ROWS, BLOCK_DV]


@gluon.jit
def fast_divide(number, divisor):
    """number // divisor, for 0 <= number < 2^31, as a product (Granlund and Montgomery, PLDI 1994)."""
    return (number.to(gl.int64) * divisor.magic >> divisor.shift).to(gl.int32)


@gluon.jit
def tile_at(work_index, sizes):
    """The tile of a work index."""
    section = fast_divide(work_index, sizes.section_divisor)
    place = section
    m_tile = work_index - section * sizes.m_tiles
    # The longest first.
    m_tile = sizes.m_tiles - 1 - m_tile
    # Batches side by side: they often share the mask.
    head = fast_divide(place, sizes.inner_divisor)
    batch = place - head * sizes.batches
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
    if sizes.window_right >= 0:
        end = gl.minimum(end, gl.maximum(last_row + sizes.window_right + BLOCK_N, 0) // BLOCK_N)
        unmasked_end = gl.minimum(unmasked_end, gl.maximum(row + sizes.window_right + 1, 0) // BLOCK_N)
    if sizes.window_left >= 0:
        first = gl.maximum(row - sizes.window_left, 0) // BLOCK_N
        unmasked_first = gl.maximum(last_row - sizes.window_left + BLOCK_N - 1, 0) // BLOCK_N
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
    corner = [coord.batch, coord.head, 0, coord.row]
    async_load(v_desc, corner, pipeline.full.index(stage), pipeline.smem.index(stage))


@gluon.jit
def load_tile(
    work_index, block, values, descs, smem, sizes
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
                slot = w
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
    block, values = load_tile(gl.program_id(0), block, values, descs, smem, sizes)
    load_v(descs[2], values, block - 1, smem.v)


@gluon.jit
def load_mask_bits(coord, column, sizes, params):
    """What the mask allows of the block that begins at `column`, as `mask_scores` takes it."""
    blocks = (sizes.n_kv + BLOCK_N - 1) // BLOCK_N
    matrix = coord.batch * sizes.mask_per_batch + coord.head * sizes.mask_per_head
    place = matrix.to(gl.int64) * blocks + column // BLOCK_N
    offs_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MASK_BITS_LAYOUT))
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, MASK_BITS_LAYOUT))
    start = params.mask_bits_ptr + (place * (sizes.m_tiles * BLOCK_M) + coord.row) * 4
    return gl.load(start + offs_m[:, None] * 4 + quarter[None, :]).to(gl.int32)  # [ROWS, 4]


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
def modify_scores(scores, coord, column, unmasked, sizes, params, mask_bits):
    """What happens to the raw scores of the block that begins at `column`; -inf masks a key.

    `unmasked` spares the look at the edges.
    """
    ahead = (column - coord.row - sizes.diagonal + gl.arange(0, BLOCK_N, layout=COLUMN_LAYOUT)).to(gl.float32)  # [BLOCK_N]
    distance = gl.abs(ahead[None, :] - gl.arange(0, ROWS, layout=ROW_LAYOUT).to(gl.float32)[:, None])  # [ROWS, BLOCK_N]
    scores -= distance * (params.slope * params.bias_scale)
    if not unmasked:
        diagonal = coord.row + sizes.diagonal - column + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        right = gl.where(sizes.window_right < 0, sizes.n_kv + sizes.n_q, sizes.window_right)
        end = gl.minimum(diagonal + 1 + right, sizes.n_kv - column)  # [ROWS]
        visible = bits_before(end)  # [ROWS, 4]
        visible &= ~bits_before(diagonal - gl.where(sizes.window_left < 0, sizes.n_kv + sizes.n_q, sizes.window_left))
        mask_bits &= visible
    scores = mask_scores(scores, mask_bits)
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
    # The largest of probs is 2^MAX_OFFSET, so that more of the small ones are above the smallest that the type holds.
    shift -= MAX_OFFSET
    probs = gl.exp2(scores * scale - shift[:, None])  # [ROWS, BLOCK_N]
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + quarter_sums(probs)
    return probs, rescale, new_max, row_sum


@gluon.jit
def pack(probs):
    """Probs by fours, which is how they wait for their product: left alone, the compiler gives every byte a register.

    A thread holds pairs of columns where the product wants fours, so the keys are renamed; `transpose_v` renames those of v alike.
    """
    evens, odds = gl.split(probs.reshape([ROWS, BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, BLOCK_N // 2, 2]))
    first, third = gl.split(evens.reshape([ROWS, BLOCK_N // 4, 2]))
    second, fourth = gl.split(odds.reshape([ROWS, BLOCK_N // 4, 2]))
    convert: gl.constexpr = """
    {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }
    """
    parts = [first, second, third, fourth]
    return gl.inline_asm_elementwise(convert, "=r,f,f,f,f", parts, dtype=gl.int32, is_pure=True, pack=1)  # [ROWS, BLOCK_N // 4]


@gluon.jit
def unpack(fours):
    """Packed probs as the left operand of a product; nothing moves."""
    twice = gl.join(fours, fours)
    bytes = gl.convert_layout(gl.join(twice, twice), FOURS_LAYOUT)
    bytes = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [bytes], dtype=gl.int8, is_pure=True, pack=4)
    return gl.convert_layout(bytes.reshape([ROWS, BLOCK_N]).to(DTYPE, bitcast=True), PROBS_LAYOUT)  # [ROWS, BLOCK_N]


@gluon.jit
def init_softmax():
    """Maximum and sum of rows that have met no key yet."""
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
    row_sum = quarter_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES_LAYOUT))
    return row_max, row_sum


@gluon.jit
def attend(block, q_tile, acc, state, coord, column, unmasked, smem, sizes, params, W: gl.constexpr):
    """One block from scores to values."""
    mask_bits = load_mask_bits(coord, column, sizes, params)
    stage = block % STAGES
    wait_full(smem.k, block)
    scores = start_qk(q_tile, smem.k.smem.index(stage))
    scores = warpgroup_mma_wait(0, deps=[scores])
    release(smem.k, block)
    scores = modify_scores(scores, coord, column, unmasked, sizes, params, mask_bits)
    probs, rescale, row_max, row_sum = online_softmax(scores, state.row_max, state.row_sum, params.scale, True)
    p_tile = pack(probs)
    wait_full(smem.v, block)
    product = start_pv(p_tile, smem.v.smem.index(stage))
    acc = add_pv(acc, rescale, product)
    release(smem.v, block)
    return acc, SoftmaxState(row_max, row_sum)


@gluon.jit
def mainloop(block, slot, acc, state, coord, blocks, smem, sizes, params, W: gl.constexpr):
    """The blocks of a tile, right to left."""
    q_tile = smem.q.smem.index(slot)
    for n in range(0, blocks.end - blocks.first):
        column = (blocks.end - 1 - n) * BLOCK_N
        unmasked = (n >= blocks.end - blocks.unmasked_end) & (n < blocks.end - blocks.unmasked_first)
        acc, state = attend(block + n, q_tile, acc, state, coord, column, unmasked, smem, sizes, params, W)
    return acc, state


@gluon.jit
def load_per_head(numbers, batch, head):
    """The number of a head."""
    return gl.load(numbers.ptr + batch * numbers.by_batch + head * numbers.by_head)


@gluon.jit
def load_head_params(coord, call_params, sizes):
    """What the tiles of one head work with, of what the kernel was given."""
    scale = call_params.scale
    bias_scale = call_params.bias_scale
    mask_bits_ptr = call_params.mask_bits_ptr
    kv_head = coord.head // sizes.kv_group
    q_descale = load_per_head(call_params.q_descale, coord.batch, coord.head)
    k_descale = load_per_head(call_params.k_descale, coord.batch, kv_head)
    # Heads of nothing but zeros may come with factors of 0, and scores are compared before they are scaled.
    factor = gl.maximum(q_descale * k_descale, 1e-20)
    scale *= factor
    bias_scale /= factor
    out_scale = load_per_head(call_params.v_descale, coord.batch, kv_head)
    slope = load_per_head(call_params.slopes, coord.batch, coord.head)
    return Params(scale, bias_scale, mask_bits_ptr, slope, out_scale)


@gluon.jit
def epilogue(acc, row_max, row_sum, out_tile, out_desc, lse_ptr, coord, sizes, params):
    """Divides by the sums and writes a tile of the output (TMA leaves out rows past the end) and its log-sum-exp."""
    batch, head, row = coord
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW_LAYOUT)  # [ROWS]
    inverse = gl.where(row_sum > 0.0, params.out_scale / row_sum, 0.0)  # [ROWS]
    acc = acc * gl.convert_layout(inverse, OUT_ROW_LAYOUT)[:, None]  # [ROWS, BLOCK_DV]
    out_tile.reshape([ROWS, BLOCK_DV]).store(acc.to(OUT_DTYPE))
    fence_async_shared()
    async_store(out_desc, [batch, head, row, 0], out_tile)
    offs_m = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    lse = (row_max + gl.log2(row_sum) - MAX_OFFSET) * LN_2  # [ROWS], -inf where nothing was seen
    gl.store(lse_ptr + (batch * sizes.heads + head).to(gl.int64) * sizes.n_q + offs_m, lse, mask=offs_m < sizes.n_q)


@gluon.jit
def compute_tile(work_index, block, out_desc, lse_ptr, smem, sizes, call_params, W: gl.constexpr):
    """One tile of a warpgroup, from its queries to its output; returns how many blocks all tiles so far had."""
    tile = tile_at(work_index, sizes)
    coord = TileCoord(tile.batch, tile.head, tile.row + W * ROWS)
    blocks = block_range(tile.row, BLOCK_M, sizes)
    params = load_head_params(coord, call_params, sizes)
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, OUT_LAYOUT)
    mbarrier.wait(smem.q.full.index(W), 0)
    row_max, row_sum = init_softmax()
    state = SoftmaxState(row_max, row_sum)
    acc, state = mainloop(block, W, acc, state, coord, blocks, smem, sizes, params, W)
    block += blocks.end - blocks.first
    epilogue(acc, state.row_max, state.row_sum, smem.out.index(W), out_desc, lse_ptr, coord, sizes, params)
    return block


@gluon.jit
def consumer(out_desc, lse_ptr, smem, sizes, call_params, W: gl.constexpr):
    """One warpgroup: rows W * ROWS .. W * ROWS + ROWS - 1 of every tile of this program."""
    block = gl.to_tensor(0)
    compute_tile(gl.program_id(0), block, out_desc, lse_ptr, smem, sizes, call_params, W)
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
        "window_left",
        "window_right",
        "mask_per_batch",
        "mask_per_head",
        "section_magic",
        "section_shift",
        "inner_magic",
        "inner_shift",
        "slopes_by_batch",
        "slopes_by_head",
        "q_descale_by_batch",
        "q_descale_by_head",
        "k_descale_by_batch",
        "k_descale_by_head",
        "v_descale_by_batch",
        "v_descale_by_head",
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
    window_left,
    window_right,
    mask_per_batch,
    mask_per_head,
    section_magic,
    section_shift,
    inner_magic,
    inner_shift,
    scale,
    bias_scale,
    mask_bits_ptr,
    slopes_ptr,
    slopes_by_batch,
    slopes_by_head,
    q_descale_ptr,
    q_descale_by_batch,
    q_descale_by_head,
    k_descale_ptr,
    k_descale_by_batch,
    k_descale_by_head,
    v_descale_ptr,
    v_descale_by_batch,
    v_descale_by_head,
):
    """Splits the program into 1 consumer and the producer."""
    q_smem = gl.allocate_shared_memory(DTYPE, [Q_SLOTS, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_DV, BLOCK_N], v_desc.layout)
    out_smem = gl.allocate_shared_memory(OUT_DTYPE, [CONSUMERS, 1, 1, ROWS, BLOCK_DV], out_desc.layout)
    smem = SharedStorage(
        # Nobody waits for it to be empty.
        q=Pipeline(q_smem, make_barriers(Q_SLOTS, 1), None),
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
        window_left,
        window_right,
        mask_per_batch,
        mask_per_head,
        Divisor(section_magic, section_shift),
        Divisor(inner_magic, inner_shift),
    )
    call_params = CallParams(
        scale,
        bias_scale,
        mask_bits_ptr,
        PerHead(slopes_ptr, slopes_by_batch, slopes_by_head),
        PerHead(q_descale_ptr, q_descale_by_batch, q_descale_by_head),
        PerHead(k_descale_ptr, k_descale_by_batch, k_descale_by_head),
        PerHead(v_descale_ptr, v_descale_by_batch, v_descale_by_head),
    )
    gl.warp_specialize(
        [
            (consumer, (out_desc, lse_ptr, smem, sizes, call_params, 0)),
            (producer, ((q_desc, k_desc, v_desc), smem, sizes)),
        ],
        [1],
        [24],
    )


@triton.jit
def pack_mask(mask_ptr, mask_bits_ptr, m_b, m_h, m_m, m_n, heads, n_q, n_kv, rows, BLOCK_N: tl.constexpr):
    """Writes 64 rows of a block of one matrix of the mask (batches, heads, N_q, N_kv) as words (batches, heads, blocks, rows, 4).

    Bit 2 i + j of word t stands for column 8 i + 2 t + j of the block: a word has what one thread of the tensor cores' layout holds.
    """
    row_tiles, blocks = rows // 64, tl.cdiv(n_kv, BLOCK_N)
    program = tl.program_id(0)
    block, matrix = program // row_tiles % blocks, program // row_tiles // blocks
    offs_m = program % row_tiles * 64 + tl.arange(0, 64)
    offs_n = tl.arange(0, BLOCK_N)
    columns = block * BLOCK_N + offs_n
    source = mask_ptr + (matrix // heads).to(tl.int64) * m_b + (matrix % heads).to(tl.int64) * m_h
    offsets = offs_m.to(tl.int64)[:, None] * m_m + columns.to(tl.int64)[None, :] * m_n
    allowed = tl.load(source + offsets, mask=(offs_m < n_q)[:, None] & (columns < n_kv)[None, :], other=0) != 0  # [64, BLOCK_N]
    bits = allowed.to(mask_bits_ptr.dtype.element_ty) << (offs_n // 8 * 2 + offs_n % 2).to(mask_bits_ptr.dtype.element_ty)[None, :]
    words = tl.sum(tl.sum(bits.reshape([64, BLOCK_N // 8, 4, 2]), 3), 1)  # [64, 4]
    target = mask_bits_ptr + (program // row_tiles).to(tl.int64) * rows * 4 + offs_m[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(target, words.to(mask_bits_ptr.dtype.element_ty))
@triton.jit
def transpose_v(v_ptr, out_ptr, v_b, v_h, v_n, v_d, heads, n_kv, n_padded, D_V: tl.constexpr, WIDTH: tl.constexpr):
    """Copies WIDTH keys of one head of v (B, Hkv, N_kv, D_v) into out (B, Hkv, D_v, n_padded), zeros past N_kv.

    Products of this type want the keys innermost. Within sixteen of them, key 8 b + 2 t + c goes to place 4 t + 2 b + c (b and c are
    bits, t is two), which is the order in which a thread holds the probs.
    """
    blocks = tl.cdiv(n_padded, WIDTH)
    batch_head = tl.program_id(0) // blocks
    place = tl.program_id(0) % blocks * WIDTH + tl.arange(0, WIDTH)
    key = place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    offs_d = tl.arange(0, 64)
    source = v_ptr + (batch_head // heads).to(tl.int64) * v_b + (batch_head % heads).to(tl.int64) * v_h
    inside = (key < n_kv)[:, None] & (offs_d < D_V)[None, :]
    tile = tl.load(source + key.to(tl.int64)[:, None] * v_n + offs_d[None, :] * v_d, mask=inside, other=0)  # [WIDTH, BLOCK_DV]
    target = out_ptr + batch_head.to(tl.int64) * D_V * n_padded + offs_d[:, None] * n_padded + place[None, :]
    tl.store(target, tl.trans(tile), mask=(offs_d < D_V)[:, None] & (place < n_padded)[None, :])


KERNEL = {
    "template": "flash_fwd_hopper",
    "spec": {
        "direction": "fwd",
        "dtype": "fp8",
        "d": 64,
        "d_v": 64,
        "causal": False,
        "window": True,
        "mask": "bool",
        "dropout": False,
        "softcap": False,
        "tf32": False,
        "alibi": True,
    },
    "config": {
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "ctas_per_sm": 2,
        "intra_wg_overlap": 0,
        "maximum": "running",
        "num_stages": 2,
        "order": "fixed",
        "packed_heads": 1,
        "pingpong": False,
        "rescale": "always",
        "section": 1,
        "tiles": "one",
        "v_columns": "padded",
    },
}
