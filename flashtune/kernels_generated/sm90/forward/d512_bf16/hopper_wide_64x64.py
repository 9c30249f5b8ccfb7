"""FlashAttention forward for Hopper: one warp copies tiles with TMA, two warpgroups share 64 rows by columns of the output.

A program computes one tile.
Key blocks go from right to left.
The scores of one block are under way while the block before it meets its values.

Compiled in: fwd-bf16-d512
Template: flash_fwd_hopper_wide
Variant: 5f2403e2b34e3504
Config: BLOCK_M=64 BLOCK_N=64 K_COLUMNS=256 intra_wg_overlap=1 num_stages=1 rescale=grown section=1

Generated; do not edit. `flashtune generate` writes it anew.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

# Triton 3.6 has no other names for the copies than the longer ones, newer versions none but the short.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

DTYPE = gl.constexpr(gl.bfloat16)
BLOCK_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
BLOCK_D = gl.constexpr(512)
BLOCK_DV = gl.constexpr(256)
CONSUMERS = gl.constexpr(1)
ROWS = gl.constexpr(64)
STAGES = gl.constexpr(1)
# Queries and keys lie in memory as parts of so many columns. Keys go through a ring of them.
PART = gl.constexpr(256)
PARTS = gl.constexpr(2)
RING = gl.constexpr(2)
# The first columns of the output, which one warpgroup has; the other, with the scores, has BLOCK_DV more.
LEFT = gl.constexpr(256)
LEFT_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
LEFT_ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, LEFT_LAYOUT))
PROBS_SHARED = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], DTYPE))
ROWS_SHARED = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
SCORES_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
OUT_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
PROBS_LAYOUT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=OUT_LAYOUT, k_width=2))
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
LN_2 = gl.constexpr(0.6931471805599453)
# From here on exponents are exact by a power of two alone: see `factors`.
HUGE = gl.constexpr(134217728.0)
RESCALE_THRESHOLD = gl.constexpr(2.0)


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
    section_divisor: Divisor
    inner_divisor: Divisor


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
    v_left: Pipeline
    probs: Pipeline
    changes: gl.shared_memory_descriptor


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


@gluon.jit
def start_qk(q_smem, keys, block):
    """Starts Q K^T on the tensor cores, part by part as keys arrive."""
    scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES_LAYOUT)
    for part in gl.static_range(PARTS):
        number = block * PARTS + part
        wait_full(keys, number)
        k_part = keys.smem.index(number % RING).reshape([BLOCK_N, PART]).permute((1, 0))
        scores = warpgroup_mma(q_smem.index(part).reshape([ROWS, PART]), k_part, scores, use_acc=part > 0, is_async=True)
    return scores  # [ROWS, BLOCK_N]


@gluon.jit
def finish_qk(scores, keys, block, BESIDE: gl.constexpr):
    """Q K^T, with so many products under way behind it; keys are handed back part by part."""
    for part in gl.static_range(PARTS):
        scores = warpgroup_mma_wait(PARTS - 1 - part + BESIDE, deps=[scores])
        release(keys, block * PARTS + part)
    return scores  # [ROWS, BLOCK_N]


@gluon.jit
def pack_apart(probs):
    """The result of `pack` for the other warpgroup, by another instruction of the same result, as none of them is below 0.

    Else the compiler would make one of both, before products that still read the registers for it have ended, and wait for each of these.
    """
    even, odd = gl.split(probs.reshape([ROWS, BLOCK_N // 2, 2]))
    convert: gl.constexpr = "cvt.rn.relu.bf16x2.f32 $0, $2, $1;"
    pairs = gl.inline_asm_elementwise(convert, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)  # [ROWS, BLOCK_N // 2]
    return pairs


@gluon.jit
def publish_probs(smem, block, pairs, change):
    """Tells the other warpgroup the packed probs of a block, and how rows of what it has added up so far change for them."""
    wait_empty(smem.probs, block)
    slot = block % 2
    smem.changes.index(slot).store(change)
    smem.probs.smem.index(slot).store(unpack(pairs))
    fence_async_shared()
    mbarrier.arrive(smem.probs.full.index(slot), count=1)


@gluon.jit
def tell_change(smem, block, change):
    """Tells the other warpgroup how rows change after the last block."""
    wait_empty(smem.probs, block)
    smem.changes.index(block % 2).store(change)
    mbarrier.arrive(smem.probs.full.index(block % 2), count=1)


@gluon.jit
def start_pv(p_tile, v_tile, acc):
    """Starts acc + P V on the tensor cores."""
    return warpgroup_mma(unpack(p_tile), v_tile.reshape([BLOCK_N, BLOCK_DV]), acc, is_async=True)  # [ROWS, BLOCK_DV]


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
    return BlockRange(first, unmasked_first, unmasked_end, end)


@gluon.jit
def load_v(desc, coord, first, block, pipeline):
    """Starts the copy of the columns of a value block from `first` on as soon as their stage is empty."""
    wait_empty(pipeline, block)
    stage = block % STAGES
    mbarrier.expect(pipeline.full.index(stage), desc.block_type.nbytes)
    async_load(desc, [coord.batch, coord.head, coord.row, first], pipeline.full.index(stage), pipeline.smem.index(stage))


@gluon.jit
def producer(descs, smem, sizes):
    """The copying warp: runs ahead of the consumers as far as memory allows; a block's values follow the keys of the block after it."""
    q_desc, k_desc, v_desc, v_left_desc = descs
    coord = tile_at(gl.program_id(0), sizes)
    kv_head = coord.head // sizes.kv_group
    blocks = block_range(coord.row, BLOCK_M, sizes)
    mbarrier.expect(smem.q.full.index(0), PARTS * q_desc.block_type.nbytes)
    for part in gl.static_range(PARTS):
        corner = [coord.batch, coord.head, coord.row, part * PART]
        async_load(q_desc, corner, smem.q.full.index(0), smem.q.smem.index(part))
    number = blocks.end - blocks.first
    values = TileCoord(coord.batch, kv_head, gl.to_tensor(0))
    for n in range(number):
        column = (blocks.end - 1 - n) * BLOCK_N
        for part in gl.static_range(PARTS):
            filling = n * PARTS + part
            wait_empty(smem.k, filling)
            mbarrier.expect(smem.k.full.index(filling % RING), k_desc.block_type.nbytes)
            corner = [coord.batch, kv_head, column, part * PART]
            async_load(k_desc, corner, smem.k.full.index(filling % RING), smem.k.smem.index(filling % RING))
        if n > 0:
            load_v(v_left_desc, values, 0, n - 1, smem.v_left)
            load_v(v_desc, values, LEFT, n - 1, smem.v)
        values = TileCoord(coord.batch, kv_head, column)
    load_v(v_left_desc, values, 0, number - 1, smem.v_left)
    load_v(v_desc, values, LEFT, number - 1, smem.v)


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
        end = gl.zeros([ROWS], gl.int32, ROW_LAYOUT) + (sizes.n_kv - column)  # [ROWS]
        visible = bits_before(end)  # [ROWS, 4]
        scores = mask_scores(scores, visible)
    return scores  # [ROWS, BLOCK_N]


@gluon.jit
def quarter_sums(probs):
    """Four partial sums of each row, one for each thread that holds a part of it: threads add up only when a tile is finished."""
    parts = gl.sum(probs.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3)
    return gl.sum(parts, 1)  # [ROWS, 4]


@gluon.jit
def next_power(scale):
    """The least power of two that isn't below `scale`."""
    return ((scale.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def factors(row_max, scale):
    """Factors that bring scores of rows with these maxima to units of log 2: `scale`, or from HUGE on `next_power` of it.

    There a product's rounding is more than exp2 can hold, except by a power of two, and the softmax picks the largest score either way:
    where an earlier block has it, the factors of this one don't matter.
    """
    return gl.where(gl.abs(row_max) >= HUGE, next_power(scale), scale)


@gluon.jit
def finished_max(row_max, scale):
    """Maxima of rows in units of log 2, huge ones, too."""
    return gl.where(gl.abs(row_max) >= HUGE, row_max / next_power(scale) * scale, row_max)


@gluon.jit
def online_softmax(scores, row_max, row_sum, scale, GUARD: gl.constexpr):
    """One block of the online softmax in base 2: its probs, the factor for what came before, the new maximum and sum."""
    peak = gl.max(scores, 1)  # [ROWS]
    factor = factors(peak * scale, scale)  # [ROWS]
    new_max = gl.maximum(row_max, peak * factor)  # [ROWS]
    shift = new_max
    if GUARD:
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = gl.exp2(row_max - shift)  # [ROWS]
    probs = gl.exp2(scores * factor[:, None] - shift[:, None])  # [ROWS, BLOCK_N]
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + quarter_sums(probs)
    return probs, rescale, new_max, row_sum


@gluon.jit
def declare_answer(W: gl.constexpr):
    """Declares the predicate in which votes leave their answer: Triton itself reduces to scalars over whole warpgroups alone."""
    gl.inline_asm_elementwise(f".reg .pred answer{W}; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def read_answer(W: gl.constexpr):
    """What the last vote said: 1 or 0, the same for all threads of a warp."""
    read: gl.constexpr = f"selp.b32 $0, 1, $1, answer{W};"
    return gl.inline_asm_elementwise(read, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def vote_grown(growth, W: gl.constexpr):
    """Whether the maximum of a row of this warp grew; each warp asks and answers by itself, without a barrier."""
    compare: gl.constexpr = """
    {
        .reg .pred upper, lower;
        setp.gt.f32 upper, $2, 0f00000000;
        setp.gt.f32 lower, $3, 0f00000000;
        or.pred upper, upper, lower;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
    """
    vote: gl.constexpr = compare + f"vote.sync.any.pred answer{W}" + ", upper, 0xffffffff; }"
    gl.inline_asm_elementwise(vote, "=r,=r,f,f", [growth], dtype=gl.int32, is_pure=False, pack=2)
    return read_answer(W)


@gluon.jit
def lazy_softmax(scores, row_max, scale, W: gl.constexpr, GUARD: gl.constexpr):
    """One block of the online softmax in base 2: a maximum stays until a score is more than 2^RESCALE_THRESHOLD times as heavy.

    Returns its probs, their sums, by how much maxima grew, whether one of this warp did, and the maxima. The threshold is FlashAttention-4's
    idea, for which 2^8 is enough; a smaller one keeps keys that take most of a row at weights that are rounded little or not at all.
    """
    peak = gl.max(scores, 1)  # [ROWS]
    factor = factors(peak * scale, scale)  # [ROWS]
    block_max = peak * factor  # [ROWS]
    new_max = gl.where(block_max > row_max + RESCALE_THRESHOLD, block_max, row_max)  # [ROWS]
    shift = new_max
    if GUARD:
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    growth = shift - row_max  # [ROWS], infinite where a row sees its first key
    grown = vote_grown(growth, W)
    probs = gl.exp2(scores * factor[:, None] - shift[:, None])  # [ROWS, BLOCK_N]
    return probs, quarter_sums(probs), growth, grown, new_max


@gluon.jit
def rescale_acc_and_sum(acc, row_sum, growth):
    """The output and the sums so far, relative to maxima that grew."""
    rescale = gl.exp2(-growth)  # [ROWS]
    acc = acc * gl.convert_layout(rescale, OUT_ROW_LAYOUT)[:, None]
    return acc, row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]


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
    scores = finish_qk(start_qk(q_tile, smem.k, block), smem.k, block, 0)
    scores = modify_scores(scores, coord, column, False, sizes, params)
    row_max, row_sum = init_softmax()
    probs, _, row_max, row_sum = online_softmax(scores, row_max, row_sum, params.scale, True)
    publish_probs(smem, block, pack_apart(probs), gl.zeros([ROWS], gl.float32, ROW_LAYOUT))
    p_tile = pack(probs)
    return SoftmaxState(p_tile, row_max, row_sum)


@gluon.jit
def attend(block, q_tile, acc, state, coord, column, unmasked, smem, sizes, params, W: gl.constexpr):
    """Scores and softmax of one block beside the values of the block before it, whose probs are state.p_tile."""
    value_stage = (block - 1) % STAGES
    scores = start_qk(q_tile, smem.k, block)
    wait_full(smem.v, block - 1)
    product = start_pv(state.p_tile, smem.v.smem.index(value_stage), acc)
    scores = finish_qk(scores, smem.k, block, 1)
    scores = modify_scores(scores, coord, column, unmasked, sizes, params)
    row_sum = state.row_sum
    probs, part, growth, grown, row_max = lazy_softmax(scores, state.row_max, params.scale, W, False)
    publish_probs(smem, block, pack_apart(probs), growth)
    acc = warpgroup_mma_wait(0, deps=[product])
    release(smem.v, block - 1)
    p_tile = pack(probs)
    if grown != 0:
        acc, row_sum = rescale_acc_and_sum(acc, row_sum, growth)
    row_sum += part
    return acc, SoftmaxState(p_tile, row_max, row_sum)


@gluon.jit
def mainloop(block, slot, acc, state, coord, blocks, smem, sizes, params, W: gl.constexpr):
    """The blocks of a tile after its first, right to left."""
    q_tile = smem.q.smem
    for n in range(1, blocks.end - blocks.first):
        column = (blocks.end - 1 - n) * BLOCK_N
        unmasked = True
        acc, state = attend(block + n, q_tile, acc, state, coord, column, unmasked, smem, sizes, params, W)
    return acc, state


@gluon.jit
def epilogue(acc, row_max, row_sum, smem, block, out_desc, lse_ptr, coord, sizes, params):
    """Divides by the sums and writes a tile of the output (TMA leaves out rows past the end) and its log-sum-exp."""
    batch, head, row = coord
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW_LAYOUT)  # [ROWS]
    row_max = finished_max(row_max, params.scale)
    inverse = gl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)  # [ROWS]
    tell_change(smem, block, inverse)
    # Nobody else reads these values, and no more come.
    out_tile = smem.v.smem.index(0)
    acc = acc * gl.convert_layout(inverse, OUT_ROW_LAYOUT)[:, None]  # [ROWS, BLOCK_DV]
    out_tile.reshape([ROWS, BLOCK_DV]).store(acc.to(DTYPE))
    fence_async_shared()
    async_store(out_desc, [batch, head, row, LEFT], out_tile)
    offs_m = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    lse = (row_max + gl.log2(row_sum)) * LN_2  # [ROWS], -inf where nothing was seen
    gl.store(lse_ptr + (batch * sizes.heads + head).to(gl.int64) * sizes.n_q + offs_m, lse, mask=offs_m < sizes.n_q)


@gluon.jit
def compute_tile(work_index, block, out_desc, lse_ptr, smem, sizes, params, W: gl.constexpr):
    """One tile of a warpgroup, from its queries to its output; returns how many blocks all tiles so far had."""
    tile = tile_at(work_index, sizes)
    coord = TileCoord(tile.batch, tile.head, tile.row + W * ROWS)
    blocks = block_range(tile.row, BLOCK_M, sizes)
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, OUT_LAYOUT)
    mbarrier.wait(smem.q.full.index(W), 0)
    q_tile = smem.q.smem
    column = (blocks.end - 1) * BLOCK_N
    state = prologue(block, q_tile, coord, column, smem, sizes, params, W)
    acc, state = mainloop(block, W, acc, state, coord, blocks, smem, sizes, params, W)
    block += blocks.end - blocks.first
    wait_full(smem.v, block - 1)
    product = start_pv(state.p_tile, smem.v.smem.index((block - 1) % STAGES), acc)
    acc = warpgroup_mma_wait(0, deps=[product])
    release(smem.v, block - 1)
    epilogue(acc, state.row_max, state.row_sum, smem, block, out_desc, lse_ptr, coord, sizes, params)
    return block


@gluon.jit
def consumer(out_desc, lse_ptr, smem, sizes, params, W: gl.constexpr):
    """One warpgroup: rows W * ROWS .. W * ROWS + ROWS - 1 of every tile of this program."""
    block = gl.to_tensor(0)
    declare_answer(W)
    compute_tile(gl.program_id(0), block, out_desc, lse_ptr, smem, sizes, params, W)
    tma.store_wait(0)


@gluon.jit
def value_consumer(out_desc, smem, sizes):
    """The first columns of a tile's output: sums of the other warpgroup's probs times values."""
    tile = tile_at(gl.program_id(0), sizes)
    blocks = block_range(tile.row, BLOCK_M, sizes)
    number = blocks.end - blocks.first
    acc = gl.zeros([ROWS, LEFT], gl.float32, LEFT_LAYOUT)
    declare_answer(1)
    for block in range(number):
        slot = block % 2
        stage = block % STAGES
        wait_full(smem.probs, block)
        change = smem.changes.index(slot).load(LEFT_ROW_LAYOUT)  # [ROWS]
        if vote_grown(change, 1) != 0:
            acc *= gl.exp2(-change)[:, None]
        wait_full(smem.v_left, block)
        values = smem.v_left.smem.index(stage).reshape([BLOCK_N, LEFT])
        product = warpgroup_mma(smem.probs.smem.index(slot), values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[product])  # [ROWS, LEFT]
        release(smem.probs, block)
        release(smem.v_left, block)
    wait_full(smem.probs, number)
    acc *= smem.changes.index(number % 2).load(LEFT_ROW_LAYOUT)[:, None]
    # Nobody else reads these values, and no more come.
    out_tile = smem.v_left.smem.index(0)
    out_tile.reshape([ROWS, LEFT]).store(acc.to(DTYPE))
    fence_async_shared()
    async_store(out_desc, [tile.batch, tile.head, tile.row, 0], out_tile)
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
        "section_magic",
        "section_shift",
        "inner_magic",
        "inner_shift",
    ]
)
def flash_fwd_hopper(
    q_desc,
    k_desc,
    v_desc,
    v_left_desc,
    out_desc,
    out_left_desc,
    lse_ptr,
    n_q,
    n_kv,
    batches,
    heads,
    kv_group,
    m_tiles,
    section_magic,
    section_shift,
    inner_magic,
    inner_shift,
    scale,
):
    """Splits the program into the scores' consumer, the consumer of the first values and the producer."""
    q_smem = gl.allocate_shared_memory(DTYPE, [PARTS, 1, 1, ROWS, PART], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [RING, 1, 1, BLOCK_N, PART], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, BLOCK_DV], v_desc.layout)
    v_left_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, LEFT], v_left_desc.layout)
    probs_smem = gl.allocate_shared_memory(DTYPE, [2, ROWS, BLOCK_N], PROBS_SHARED)
    smem = SharedStorage(
        # Nobody waits for it to be empty.
        q=Pipeline(q_smem, make_barriers(1, 1), None),
        k=make_pipeline(k_smem, RING, 1),
        v=make_pipeline(v_smem, STAGES, 1),
        v_left=make_pipeline(v_left_smem, STAGES, 1),
        probs=make_pipeline(probs_smem, 2, 1),
        changes=gl.allocate_shared_memory(gl.float32, [2, ROWS], ROWS_SHARED),
    )
    fence_async_shared()
    sizes = Sizes(
        n_q,
        n_kv,
        batches,
        heads,
        kv_group,
        m_tiles,
        Divisor(section_magic, section_shift),
        Divisor(inner_magic, inner_shift),
    )
    params = Params(
        scale,
    )
    gl.warp_specialize(
        [
            (consumer, (out_desc, lse_ptr, smem, sizes, params, 0)),
            (value_consumer, (out_left_desc, smem, sizes)),
            (producer, ((q_desc, k_desc, v_desc, v_left_desc), smem, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


KERNEL = {
    "template": "flash_fwd_hopper_wide",
    "spec": {
        "direction": "fwd",
        "dtype": "bf16",
        "d": 512,
        "d_v": 512,
        "causal": False,
        "window": False,
        "mask": "none",
        "dropout": False,
        "softcap": False,
        "tf32": False,
    },
    "config": {
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "K_COLUMNS": 256,
        "intra_wg_overlap": 1,
        "num_stages": 1,
        "rescale": "grown",
        "section": 1,
    },
}
