"""FlashAttention forward for Hopper: one warp copies tiles with TMA, 2 warpgroups of 64 rows compute.

A program works through many tiles without draining: the last values of one go beside the first scores of the next.
Key blocks go from right to left.
The scores of one block are under way while the block before it meets its values.

Compiled in: fwd-bf16-d128-causal-packed
Template: flash_fwd_hopper_paged
Variant: 445f777e91849dbc
Config: BLOCK_M=128 BLOCK_N=128 ctas_per_sm=1 intra_wg_overlap=1 maximum=first num_stages=2 order=drawn packed_heads=1 pingpong=True
rescale=grown section=32 tiles=chained v_columns=padded

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
BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
BLOCK_D = gl.constexpr(128)
BLOCK_DV = gl.constexpr(128)
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)
# The end of every sequence for the copy engine.
RAGGED = gl.constexpr(1 << 30)
STAGES = gl.constexpr(2)
Q_SLOTS = gl.constexpr(4)
SECTION = gl.constexpr(32)
SCORES_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
OUT_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
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
# Of tiles in memory, which the copies of pages fill.
K_SMEM_LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for([1, 1, 1, 128, 128], DTYPE))
V_SMEM_LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for([1, 1, 1, 128, 128], DTYPE))
# Entries of the table, one to a thread of the producer.
ENTRIES_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WORK_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))
# Numbers by which consumers are told of a tile: its work index and its place.
WORK_WORDS = gl.constexpr(7)
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
    rows: gl.tensor
    sequences: gl.tensor
    diagonal: gl.tensor
    section_divisor: Divisor
    inner_divisor: Divisor
    last_divisor: Divisor
    cu_q_ptr: gl.tensor
    used_k_ptr: gl.tensor


class Params(NamedTuple):
    """What tiles work with beside sizes."""

    scale: gl.tensor


class TileCoord(NamedTuple):
    """Where the rows of a tile, or of one warpgroup of it, begin."""

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    q_start: gl.tensor
    n_q: gl.tensor
    n_kv: gl.tensor


class BlockRange(NamedTuple):
    """The key blocks first .. end-1, of which unmasked_first .. unmasked_end-1 need no mask."""

    first: gl.tensor
    unmasked_first: gl.tensor
    unmasked_end: gl.tensor
    end: gl.tensor


class PageTable(NamedTuple):
    """The block of memory of each page of each sequence, and rows of memory from a block of keys, or of values, to the next."""

    ptr: gl.tensor
    by_sequence: gl.tensor
    by_page: gl.tensor
    k_rows: gl.tensor
    v_rows: gl.tensor


class KeyBlock(NamedTuple):
    """The keys of a block, of which its tile may see those before `end`, the place of its first one in a page, and the table's
    entries for them."""

    kv_head: gl.tensor
    slot: gl.tensor
    end: gl.tensor
    entries: gl.tensor


class Pipeline(NamedTuple):
    """Stages of shared memory with the barriers that tell when each is full and when it is empty again."""

    smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Redo(NamedTuple):
    """The tile that each warpgroup missed, the barrier at which they end a pass over their tiles, and where launches and misled
    programs are counted: in the GPU's memory, and for the host in its own."""

    missed: gl.shared_memory_descriptor
    ended: gl.shared_memory_descriptor
    misled_ptr: gl.tensor
    host_misled_ptr: gl.tensor


class SharedStorage(NamedTuple):
    """What the roles of a program share."""

    q: Pipeline
    k: Pipeline
    v: Pipeline
    work: Pipeline
    redo: Redo
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
    k_tile = k_tile.reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
    return warpgroup_mma(q_tile.reshape([ROWS, BLOCK_D]), k_tile, zeros, use_acc=False, is_async=True)  # [ROWS, BLOCK_N]


@gluon.jit
def start_pv(p_tile, v_tile, acc):
    """Starts acc + P V on the tensor cores."""
    return warpgroup_mma(unpack(p_tile), v_tile.reshape([BLOCK_N, BLOCK_DV]), acc, is_async=True)  # [ROWS, BLOCK_DV]


@gluon.jit
def draw_work_index(counter_ptr, sizes):
    """The work index of the next tile that no program has taken; past the last tile where there is none."""
    drawn = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    if drawn == sizes.m_tiles * sizes.batches * sizes.heads - 1:
        # Every tile draws once; the last draw leaves the counter as it was found.
        gl.store(counter_ptr, 0)
    return drawn + gl.num_programs(0)


@gluon.jit
def draw_tile(counter_ptr, sizes):
    """The next tile that no program has taken, and its place, which after the last tile is that tile's.

    Tiles past the end of their sequence have nothing to write and are passed over; each draws, too, so that the counter ends right.
    """
    tiles = sizes.m_tiles * sizes.batches * sizes.heads
    work_index = draw_work_index(counter_ptr, sizes)
    tile = tile_at(gl.minimum(work_index, tiles - 1), sizes, 1)
    while (work_index < tiles) & (tile.row >= tile.n_q):
        work_index = draw_work_index(counter_ptr, sizes)
        tile = tile_at(gl.minimum(work_index, tiles - 1), sizes, 1)
    return work_index, tile


@gluon.jit
def write_word(smem, word):
    """Writes a number for the consumers."""
    smem.store(gl.full([1], word, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_word(smem):
    """A number that the producer wrote."""
    return gl.max(smem.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def publish_tile(pipeline, iteration, work_index, tile):
    """Tells the consumers which tile this program's iteration-th is, and where it lies, so that they needn't look it up."""
    wait_empty(pipeline, iteration - 1)
    slot = (iteration - 1) % 2
    write_word(pipeline.smem.index(slot * WORK_WORDS), work_index)
    write_word(pipeline.smem.index(slot * WORK_WORDS + 1), tile.batch)
    write_word(pipeline.smem.index(slot * WORK_WORDS + 2), tile.head)
    write_word(pipeline.smem.index(slot * WORK_WORDS + 3), tile.row)
    write_word(pipeline.smem.index(slot * WORK_WORDS + 4), tile.q_start)
    write_word(pipeline.smem.index(slot * WORK_WORDS + 5), tile.n_q)
    write_word(pipeline.smem.index(slot * WORK_WORDS + 6), tile.n_kv)
    mbarrier.arrive(pipeline.full.index(slot), count=1)


@gluon.jit
def read_tile(pipeline, iteration):
    """The iteration-th tile as the producer tells it: its work index and its place."""
    wait_full(pipeline, iteration - 1)
    first = (iteration - 1) % 2 * WORK_WORDS
    work_index = read_word(pipeline.smem.index(first))
    batch = read_word(pipeline.smem.index(first + 1))
    head = read_word(pipeline.smem.index(first + 2))
    row = read_word(pipeline.smem.index(first + 3))
    q_start = read_word(pipeline.smem.index(first + 4))
    n_q = read_word(pipeline.smem.index(first + 5))
    n_kv = read_word(pipeline.smem.index(first + 6))
    release(pipeline, iteration - 1)
    return work_index, TileCoord(batch, head, row, q_start, n_q, n_kv)


@gluon.jit
def fast_divide(number, divisor):
    """number // divisor, for 0 <= number < 2^31, as a product (Granlund and Montgomery, PLDI 1994)."""
    return (number.to(gl.int64) * divisor.magic >> divisor.shift).to(gl.int32)


@gluon.jit
def sequence_at(tile, head, sizes, WARPS: gl.constexpr):
    """A tile of packed rows in its sequence.

    Sequence b has the tiles from start // BLOCK_M + b on, which are at most one more than it needs, so that no sums of tiles are needed.
    Rows after the last sequence are one more, in which nothing is seen, so that zeros are written there.
    """
    indices = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    count = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    for chunk in range(0, sizes.sequences + 1, 32):
        places = chunk + indices  # [32]
        bounds = gl.load(sizes.cu_q_ptr + gl.minimum(places, sizes.sequences)).to(gl.int32)  # [32]
        count += gl.where((places <= sizes.sequences) & (bounds // BLOCK_M + places <= tile), 1, 0)
    sequence = gl.sum(count, 0) - 1
    following = gl.minimum(sequence + 1, sizes.sequences)
    batch = gl.minimum(sequence, sizes.sequences - 1)
    q_start = gl.load(sizes.cu_q_ptr + sequence).to(gl.int32)
    q_end = gl.load(sizes.cu_q_ptr + following).to(gl.int32)
    used = gl.load(sizes.used_k_ptr + batch).to(gl.int32)
    present = gl.where(sequence < sizes.sequences, 1, 0)
    n_q = gl.where(present != 0, q_end, sizes.rows) - q_start
    # No more than the table has room for.
    n_kv = gl.minimum(gl.maximum(used, 0), sizes.n_kv)
    row = (tile - q_start // BLOCK_M - sequence) * BLOCK_M
    # A tile past its sequence's end takes one block, and writes nothing.
    n_kv = gl.where((row < n_q) & (present != 0), n_kv, 0)
    return TileCoord(batch, head, row, q_start, n_q, n_kv)


@gluon.jit
def tile_at(work_index, sizes, WARPS: gl.constexpr):
    """The tile of a work index."""
    section = fast_divide(work_index, sizes.section_divisor)
    # A section of heads goes row tile by row tile, so that its keys and values stay in L2; the last one has the heads that are left.
    within = work_index - section * (sizes.m_tiles * SECTION)
    left = sizes.batches * sizes.heads - section * SECTION
    m_tile = gl.where(left >= SECTION, within // SECTION, fast_divide(within, sizes.last_divisor))
    place = section * SECTION + within - m_tile * gl.minimum(left, SECTION)
    # The longest first.
    m_tile = sizes.m_tiles - 1 - m_tile
    return sequence_at(m_tile, place, sizes, WARPS)


@gluon.jit
def sizes_of(coord, sizes):
    """The sizes of a call with a tile's sequence."""
    return Sizes(
        coord.n_q,
        coord.n_kv,
        sizes.batches,
        sizes.heads,
        sizes.kv_group,
        sizes.m_tiles,
        sizes.rows,
        sizes.sequences,
        sizes.diagonal * (coord.n_kv - coord.n_q),
        sizes.section_divisor,
        sizes.inner_divisor,
        sizes.last_divisor,
        sizes.cu_q_ptr,
        sizes.used_k_ptr,
    )


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
def check_overflow(row_sum, work_index, missed, passes, tiles, W: gl.constexpr):
    """Whether a tile's output may be written, and the tile that this warpgroup missed, or `tiles` where it missed none.

    A score some 2^127 times as heavy as all before it leaves no sum. Such a tile is computed once more, with running maxima, and then
    only warpgroups that missed it write. A warpgroup that missed one settles no more, so that there is never a second.
    """
    wrong = (passes == 0) & (missed >= tiles)
    if wrong:
        wrong = vote_overflowed(row_sum, W) != 0
    writes = gl.where(passes == 0, wrong == 0, missed == work_index)
    return writes, gl.where(wrong, work_index, missed)


@gluon.jit
def count_launch(redo):
    """Counts the launch, in the high half of a 64-bit word, and tells the host how it stood before, one of the last eight launches, and
    how it stands now. In the first program alone, where it begins: waiting for the count costs nothing beside the first copies."""
    count: gl.constexpr = """
    {
        .reg .pred first;
        .reg .b32 number;
        .reg .b64 word, place;
        mov.u32 number, %tid.x;
        setp.eq.u32 first, number, 0;
        mov.u32 number, %ctaid.x;
        setp.eq.and.u32 first, number, 0, first;
        @first atom.relaxed.gpu.global.add.u64 word, [$1], 0x100000000;
        shr.u64 place, word, 29;
        and.b64 place, place, 56;
        add.u64 place, place, $2;
        @first st.relaxed.sys.global.u64 [place+8], word;
        add.u64 word, word, 0x100000000;
        @first st.relaxed.sys.global.u64 [$2], word;
        mov.b32 $0, 0;
    }
    """
    where = [redo.misled_ptr.to(gl.int64), redo.host_misled_ptr.to(gl.int64)]
    gl.inline_asm_elementwise(count, "=r,l,l", where, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def report_misled(redo, missed):
    """Counts this program, in the low half of the word, and tells the host how it stands, where it was misled about its scores.

    That is where a tile was missed, or where the first warp, which speaks for all, raised its maxima in more than half of the blocks: then
    maxima that are looked for in every block cost less.
    """
    misled = gl.where(missed | (read_raised() > 0), 1, 0)
    # Warps may differ here, so only the first thread's own instructions: what Triton makes of an atomic has all of them meet.
    count: gl.constexpr = """
    {
        .reg .pred first;
        .reg .b32 number;
        .reg .b64 word;
        mov.u32 number, %tid.x;
        setp.eq.u32 first, number, 0;
        setp.ne.and.b32 first, $3, 0, first;
        @first atom.relaxed.gpu.global.add.u64 word, [$1], 1;
        @first add.u64 word, word, 1;
        @first st.relaxed.sys.global.u64 [$2], word;
        mov.b32 $0, 0;
    }
    """
    where = [redo.misled_ptr.to(gl.int64), redo.host_misled_ptr.to(gl.int64), misled]
    gl.inline_asm_elementwise(count, "=r,l,l,r", where, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_pass(redo, missed, W: gl.constexpr):
    """Says that this warpgroup needs nothing more of the shared memory, and which tile it missed."""
    tma.store_wait(0)
    redo.missed.index(W).store(gl.full([1], missed, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(redo.ended.index(0), count=1)


@gluon.jit
def next_missed(redo, passes, after, tiles, WARPS: gl.constexpr):
    """Once all warpgroups have ended so many passes: the next tile that is computed once more, or `tiles`, and where the list goes on."""
    mbarrier.wait(redo.ended.index(0), passes - 1 & 1)
    missed_0 = gl.max(redo.missed.index(0).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    missed_1 = gl.max(redo.missed.index(1).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    work_index = tiles
    following = after
    chosen = (after <= 1) & (missed_1 < tiles) & (missed_0 != missed_1)
    work_index = gl.where(chosen, missed_1, work_index)
    following = gl.where(chosen, 2, following)
    chosen = (after <= 0) & (missed_0 < tiles)
    work_index = gl.where(chosen, missed_0, work_index)
    following = gl.where(chosen, 1, following)
    return work_index, following


@gluon.jit
def key_block(batch, kv_head, column, end, table, COPIED: gl.constexpr, PAGE: gl.constexpr):
    """The keys of the block that begins at `column`, with an entry of the table for each copy of COPIED rows; none is read of pages that
    no row of the tile sees."""
    places = column + gl.arange(0, 32, layout=ENTRIES_LAYOUT) * COPIED  # [32]
    wanted = (places >= 0) & (places < gl.minimum(column + BLOCK_N, end))
    entries = batch.to(gl.int64) * table.by_sequence + (places // PAGE).to(gl.int64) * table.by_page
    entries = gl.load(table.ptr + entries, mask=wanted, other=0).to(gl.int32)
    return KeyBlock(kv_head, column & (PAGE - 1), end - column, entries)


@gluon.jit
def load_pages(desc, block, rows_of_block, full, smem, stage, CHUNKS: gl.constexpr, PAGE: gl.constexpr):
    """Starts the copies of a block of keys or values; rows that no row of its tile sees are zeros."""
    COPIED: gl.constexpr = desc.block_type.shape[3]
    COLUMNS: gl.constexpr = desc.block_type.shape[4]
    PARTS: gl.constexpr = BLOCK_N // COPIED
    # Chunk by chunk of columns, and within these copy by copy, as products read a tile.
    parts = smem._reinterpret(DTYPE, [STAGES * CHUNKS * PARTS, 1, 1, 1, COPIED, COLUMNS], desc.layout)
    mbarrier.expect(full, CHUNKS * PARTS * desc.block_type.nbytes)
    for p in gl.static_range(PARTS):
        entry = gl.sum(gl.where(gl.arange(0, 32, layout=ENTRIES_LAYOUT) == p, block.entries, 0), 0)
        # The descriptor ends behind the last key, and may as well begin with the first: see `ragged` in launches/hopper_forward.py.
        left = gl.minimum(gl.maximum(block.end - p * COPIED, 0), COPIED)
        row = entry * rows_of_block
        if PAGE > COPIED:
            row += block.slot
        wrap, place = RAGGED, RAGGED - left
        row += left
        for c in gl.static_range(CHUNKS):
            async_load(desc, [wrap, row, block.kv_head, place, c * COLUMNS], full, parts.index((stage * CHUNKS + c) * PARTS + p))


@gluon.jit
def load_v(v_desc, keys, block, pipeline, table, PAGE: gl.constexpr):
    """Starts the copies of a value block as soon as its stage is empty."""
    wait_empty(pipeline, block)
    stage = block % STAGES
    load_pages(v_desc, keys, table.v_rows, pipeline.full.index(stage), pipeline.smem, stage, 2, PAGE)


@gluon.jit
def load_tile(
    iteration, work_index, block, begun, values, descs, counter_ptr, smem, sizes, table, PAGE: gl.constexpr, REDO: gl.constexpr
):
    """Copies the queries, keys and values of one tile; a block's values follow the keys of the block after it, where that was begun."""
    q_desc, k_desc, v_desc = descs
    coord = tile_at(work_index, sizes, 1)
    # Sizes of its sequence, and where that ends.
    sequence = sizes_of(coord, sizes)
    q_end, q_row = coord.q_start + coord.n_q, RAGGED - coord.n_q + coord.row
    kv_head = coord.head // sizes.kv_group
    blocks = block_range(coord.row, BLOCK_M, sequence)
    COPIED: gl.constexpr = k_desc.block_type.shape[3]
    next_keys = key_block(coord.batch, kv_head, (blocks.end - 1) * BLOCK_N, coord.n_kv, table, COPIED, PAGE)
    for n in range(blocks.end - blocks.first):
        column = (blocks.end - 1 - n) * BLOCK_N
        keys = next_keys
        # An iteration ahead, so that no copy waits for its entry.
        next_keys = key_block(coord.batch, kv_head, column - BLOCK_N, coord.n_kv, table, COPIED, PAGE)
        wait_empty(smem.k, block)
        stage = block % STAGES
        load_pages(k_desc, keys, table.k_rows, smem.k.full.index(stage), smem.k.smem, stage, 2, PAGE)
        if block > begun:
            # Before the queries, for these values are wanted first.
            load_v(v_desc, values, block - 1, smem.v, table, PAGE)
        if n == 0:
            for w in gl.static_range(CONSUMERS):
                slot = iteration % 2 * CONSUMERS + w
                mbarrier.wait(smem.q.empty.index(slot), iteration // 2 & 1 ^ 1)
                mbarrier.expect(smem.q.full.index(slot), q_desc.block_type.nbytes)
                async_load(q_desc, [RAGGED, q_end, coord.head, q_row + w * ROWS, 0], smem.q.full.index(slot), smem.q.smem.index(slot))
        # Late, so that no tile waits for a program that has another to finish, but before the consumers ask.
        if n == gl.maximum(blocks.end - blocks.first - 2, 0):
            if not REDO:
                work_index, following = draw_tile(counter_ptr, sizes)
                publish_tile(smem.work, iteration + 1, work_index, following)
        values = keys
        block += 1
    return work_index, block, values


@gluon.jit
def producer(descs, counter_ptr, smem, sizes, table, PAGE: gl.constexpr):
    """The copying warp: runs ahead of the consumers as far as the stages allow."""
    block = gl.to_tensor(0)
    values = KeyBlock(gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.full([32], 0, gl.int32, ENTRIES_LAYOUT))
    tiles = sizes.m_tiles * sizes.batches * sizes.heads
    iteration = gl.to_tensor(0)
    work_index = gl.program_id(0)
    while work_index < tiles:
        work_index, block, values = load_tile(iteration, work_index, block, 0, values, descs, counter_ptr, smem, sizes, table, PAGE, False)
        iteration += 1
    load_v(descs[2], values, block - 1, smem.v, table, PAGE)
    passes = gl.to_tensor(1)
    work_index, after = next_missed(smem.redo, passes, 0, tiles, 1)
    while work_index < tiles:
        _, block, values = load_tile(iteration, work_index, block, block, values, descs, counter_ptr, smem, sizes, table, PAGE, True)
        load_v(descs[2], values, block - 1, smem.v, table, PAGE)
        iteration += 1
        passes += 1
        work_index, after = next_missed(smem.redo, passes, after, tiles, 1)


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
def declare_raised():
    """Declares by how much the blocks in which a warp raised its maxima outnumber those in which it didn't: a register of its own, so that
    no loop carries anything more from block to block."""
    gl.inline_asm_elementwise(".reg .s32 raised; mov.b32 raised, 0; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_raised():
    """Counts a block in which this warp raises its maxima, twice, for `count_blocks` counts it as one in which it didn't."""
    gl.inline_asm_elementwise("add.s32 raised, raised, 2; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_blocks(number):
    """Counts the blocks of a tile."""
    gl.inline_asm_elementwise("sub.s32 raised, raised, $1; mov.b32 $0, 0;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_peaked(number):
    """Counts all blocks of a tile as such that raised maxima: it looks for them in every block."""
    gl.inline_asm_elementwise("add.s32 raised, raised, $1; mov.b32 $0, 0;", "=r,r", [2 * number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def read_raised():
    """By how many blocks those in which this warp raised its maxima are more than the others; negative where they are fewer."""
    return gl.inline_asm_elementwise("add.s32 $0, raised, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def read_answer(W: gl.constexpr):
    """What the last vote said: 1 or 0, the same for all threads of a warp."""
    read: gl.constexpr = f"selp.b32 $0, 1, $1, answer{W};"
    return gl.inline_asm_elementwise(read, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def vote_outgrown(part, row_sum, W: gl.constexpr):
    """Whether a row of this warp got probs in a block, with the sums `part`, that are large beside all of it before.

    A warp asks and answers by itself, without a barrier. That is why warps of one warpgroup may hold their rows' maxima differently.
    """
    # More than 8 times what was there, or too much for fp16.
    compare: gl.constexpr = """
    {
        .reg .pred upper, lower;
        .reg .f32 bound;
        fma.rn.ftz.f32 bound, $4, 0f41000000, 0f40800000;
        min.ftz.f32 bound, bound, 0f46000000;
        setp.gt.f32 upper, $2, bound;
        fma.rn.ftz.f32 bound, $5, 0f41000000, 0f40800000;
        min.ftz.f32 bound, bound, 0f46000000;
        setp.gt.f32 lower, $3, bound;
        or.pred upper, upper, lower;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
    """
    vote: gl.constexpr = compare + f"vote.sync.any.pred answer{W}" + ", upper, 0xffffffff; }"
    gl.inline_asm_elementwise(vote, "=r,=r,f,f,f,f", [part, row_sum], dtype=gl.int32, is_pure=False, pack=2)
    return read_answer(W)


# Hardware barriers from 9 on are free, too.
@gluon.jit
def vote_peaked(row_sum, W: gl.constexpr):
    """Whether most rows of this warpgroup gave few keys of their first block nearly all of its weight.

    Such rows meet new maxima often, and looking for them in every block costs less than being surprised.
    """
    total = gl.sum(row_sum, 1)  # [ROWS]
    compare: gl.constexpr = """
    {
        .reg .pred upper, lower;
        .reg .b32 threads;
        setp.lt.f32 upper, $2, 0f40400000;
        setp.gt.and.f32 upper, $2, 0f00000000, upper;
        setp.lt.f32 lower, $3, 0f40400000;
        setp.gt.and.f32 lower, $3, 0f00000000, lower;
        and.pred upper, upper, lower;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
    """
    # The vote at the end tells ptxas that the answer is the same for the warp, so that loops over keys count in uniform registers.
    tell: gl.constexpr = "setp.gt.u32 upper, threads, 64; vote.sync.any.pred "
    vote: gl.constexpr = compare + f"bar.red.popc.u32 threads, {9 + W}, 128, upper; " + tell + f"answer{W}" + ", upper, 0xffffffff; }"
    gl.inline_asm_elementwise(vote, "=r,=r,f,f", [total], dtype=gl.int32, is_pure=False, pack=2)
    return read_answer(W)


@gluon.jit
def vote_overflowed(row_sum, W: gl.constexpr):
    """Whether the sum of a row of this warpgroup is infinite or no number."""
    compare: gl.constexpr = """
    {
        .reg .pred upper, lower;
        setp.geu.f32 upper, $2, 0f7F800000;
        setp.geu.f32 lower, $3, 0f7F800000;
        or.pred upper, upper, lower;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
    """
    vote: gl.constexpr = compare + f"bar.red.or.pred upper, {9 + W}, 128, upper; vote.sync.any.pred answer{W}" + ", upper, 0xffffffff; }"
    gl.inline_asm_elementwise(vote, "=r,=r,f,f", [row_sum], dtype=gl.int32, is_pure=False, pack=2)
    return read_answer(W)


@gluon.jit
def unless_huge(row_max):
    """Maxima that can settle, and no number for those to which exponents aren't exact (`factors`): it leaves a row no sum, and the tile is
    computed once more with running maxima."""
    return gl.where((gl.abs(row_max) >= HUGE / 2) & (row_max != float("-inf")), float("nan"), row_max)


@gluon.jit
def settled_softmax(scores, row_max, scale, W: gl.constexpr):
    """One block of the softmax relative to maxima that stay as they are: its probs, their sums, and the maxima."""
    probs = gl.exp2(scores * scale - row_max[:, None])  # [ROWS, BLOCK_N]
    return probs, quarter_sums(probs), row_max


@gluon.jit
def raise_maxima(probs, acc, row_max, row_sum):
    """All of it relative to maxima raised to those of the block with these probs, so that the largest of them is 1, which no rounding changes."""
    # No further than exp2 has an answer other than 0: what is above is infinite then, which a row's sum tells of.
    growth = gl.minimum(gl.log2(gl.maximum(gl.max(probs, 1), 1.0)), 126.0)
    rescale = gl.exp2(-growth)  # [ROWS]
    probs = probs * rescale[:, None]
    acc = acc * gl.convert_layout(rescale, OUT_ROW_LAYOUT)[:, None]
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return probs, acc, row_max + growth, row_sum


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
def attend(block, q_tile, acc, state, coord, column, unmasked, smem, sizes, params, W: gl.constexpr, SETTLED: gl.constexpr):
    """Scores and softmax of one block beside the values of the block before it, whose probs are state.p_tile."""
    stage = block % STAGES
    value_stage = (block - 1) % STAGES
    wait_full(smem.k, block)
    scheduler_barrier_sync(W)
    scores = start_qk(q_tile, smem.k.smem.index(stage))
    wait_full(smem.v, block - 1)
    product = start_pv(state.p_tile, smem.v.smem.index(value_stage), acc)
    scheduler_barrier_arrive(W)
    scores = warpgroup_mma_wait(1, deps=[scores])
    release(smem.k, block)
    scores = modify_scores(scores, coord, column, unmasked, sizes, params)
    if SETTLED:
        row_sum = state.row_sum
        probs, part, row_max = settled_softmax(scores, state.row_max, params.scale, W)
    else:
        row_sum = state.row_sum
        probs, part, growth, grown, row_max = lazy_softmax(scores, state.row_max, params.scale, W, True)
    acc = warpgroup_mma_wait(0, deps=[product])
    release(smem.v, block - 1)
    # Before the vote, for only what rarely happens waits for its answer.
    p_tile = pack(probs)
    if SETTLED:
        if vote_outgrown(part, row_sum, W) != 0:
            if W == 0:
                count_raised()
            probs, acc, row_max, row_sum = raise_maxima(probs, acc, row_max, row_sum)
            part = quarter_sums(probs)
            p_tile = pack(probs)
        row_sum += part
    else:
        if grown != 0:
            acc, row_sum = rescale_acc_and_sum(acc, row_sum, growth)
        row_sum += part
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
    scores = warpgroup_mma_wait(1, deps=[scores])
    release(smem.k, block, pred=more)
    scores = modify_scores(scores, coord, column, False, sizes, params)
    row_max, row_sum = init_softmax()
    probs, _, row_max, row_sum = online_softmax(scores, row_max, row_sum, params.scale, True)
    acc = warpgroup_mma_wait(0, deps=[product])
    release(smem.v, block - 1)
    p_tile = pack(probs)
    return acc, SoftmaxState(p_tile, row_max, row_sum)


@gluon.jit
def mainloop(block, slot, settling, acc, state, coord, blocks, smem, sizes, params, W: gl.constexpr):
    """The blocks of a tile after its first, right to left; maxima settle where `settling` is true."""
    q_tile = smem.q.smem.index(slot)
    number = blocks.end - blocks.first
    if W == 0:
        count_blocks(number)
    # Where the first row's last key is: each row that sees a key has seen one by then.
    edge = gl.maximum(coord.row + sizes.diagonal, 0) // BLOCK_N
    settled = gl.minimum(gl.maximum(blocks.end - gl.minimum(blocks.unmasked_end, edge), 1), number)
    if vote_peaked(state.row_sum, W) != 0:
        settled = number
        if W == 0:
            count_peaked(number)
    if not settling:
        settled = number
    for n in range(1, settled):
        column = (blocks.end - 1 - n) * BLOCK_N
        unmasked = n >= blocks.end - blocks.unmasked_end
        acc, state = attend(block + n, q_tile, acc, state, coord, column, unmasked, smem, sizes, params, W, False)
    row_max = gl.where(settled < number, unless_huge(state.row_max), state.row_max)
    # Rows that see no key at all.
    row_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    state = SoftmaxState(state.p_tile, row_max, state.row_sum)
    # A number that the compiler can't know to be the same, or ptxas 12.8 takes addresses from the loop above even where that was skipped.
    q_tile = smem.q.smem.index(gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1))
    for n in range(settled, number):
        column = (blocks.end - 1 - n) * BLOCK_N
        unmasked = True
        acc, state = attend(block + n, q_tile, acc, state, coord, column, unmasked, smem, sizes, params, W, True)
    return acc, state


@gluon.jit
def epilogue(acc, row_max, row_sum, out_tile, out_desc, lse_ptr, coord, sizes, params):
    """Divides by the sums and writes a tile of the output (TMA leaves out rows past the end) and its log-sum-exp."""
    head, row = coord.head, coord.row
    # Where its sequence ends, and how far that is from the row.
    end, place = coord.q_start + coord.n_q, RAGGED - coord.n_q + row
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW_LAYOUT)  # [ROWS]
    row_max = finished_max(row_max, params.scale)
    inverse = gl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)  # [ROWS]
    acc = acc * gl.convert_layout(inverse, OUT_ROW_LAYOUT)[:, None]  # [ROWS, BLOCK_DV]
    out_tile.reshape([ROWS, BLOCK_DV]).store(acc.to(DTYPE))
    fence_async_shared()
    async_store(out_desc, [RAGGED, end, head, place, 0], out_tile)
    offs_m = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    lse = (row_max + gl.log2(row_sum)) * LN_2  # [ROWS], -inf where nothing was seen
    gl.store(lse_ptr + head.to(gl.int64) * sizes.rows + coord.q_start + offs_m, lse, mask=offs_m < sizes.n_q)


@gluon.jit
def consumer(out_desc, lse_ptr, smem, sizes, params, W: gl.constexpr):
    """One warpgroup: rows W * ROWS .. W * ROWS + ROWS - 1 of every tile of this program."""
    if W == CONSUMERS - 1:
        scheduler_barrier_arrive(W)
    block = gl.to_tensor(0)
    declare_answer(W)
    if W == 0:
        declare_raised()
        count_launch(smem.redo)
    tiles = sizes.m_tiles * sizes.batches * sizes.heads
    iteration = gl.to_tensor(0)
    # The tile that this warpgroup missed; the program's tiles are the first pass, each that some warpgroup missed is one more.
    missed = tiles
    passes = gl.to_tensor(0)
    after = gl.to_tensor(0)
    work_index = gl.program_id(0)
    while work_index < tiles:
        # A chain of tiles; those that are computed once more are chains of one.
        tile = tile_at(work_index, sizes, 4)
        first_sizes = sizes_of(tile, sizes)
        blocks = block_range(tile.row, BLOCK_M, first_sizes)
        coord = TileCoord(tile.batch, tile.head, tile.row + W * ROWS, tile.q_start, tile.n_q, tile.n_kv)
        column = (blocks.end - 1) * BLOCK_N
        slot = iteration % 2 * CONSUMERS + W
        mbarrier.wait(smem.q.full.index(slot), iteration // 2 & 1)
        state = prologue(block, smem.q.smem.index(slot), coord, column, smem, first_sizes, params, W)
        while work_index < tiles:
            tile_sizes = sizes_of(tile, sizes)
            blocks = block_range(tile.row, BLOCK_M, tile_sizes)
            coord = TileCoord(tile.batch, tile.head, tile.row + W * ROWS, tile.q_start, tile.n_q, tile.n_kv)
            acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, OUT_LAYOUT)
            slot = iteration % 2 * CONSUMERS + W
            next_slot = (iteration + 1) % 2 * CONSUMERS + W
            next_phase = (iteration + 1) // 2 & 1
            acc, state = mainloop(block, slot, (passes == 0) & (missed >= tiles), acc, state, coord, blocks, smem, tile_sizes, params, W)
            next_index = tiles
            if passes == 0:
                next_index, tile = read_tile(smem.work, iteration + 1)
            more = next_index < tiles
            mbarrier.arrive(smem.q.empty.index(slot), count=1)
            block += blocks.end - blocks.first
            next_sizes = sizes_of(tile, sizes)
            blocks = block_range(tile.row, BLOCK_M, next_sizes)
            next_coord = TileCoord(tile.batch, tile.head, tile.row + W * ROWS, tile.q_start, tile.n_q, tile.n_kv)
            column = (blocks.end - 1) * BLOCK_N
            mbarrier.wait(smem.q.full.index(next_slot), next_phase, pred=more)
            q_tile = smem.q.smem.index(next_slot)
            acc, next_state = chained_prologue(block, more, q_tile, acc, state, next_coord, column, smem, next_sizes, params, W)
            tma.store_wait(0)
            writes, missed = check_overflow(state.row_sum, work_index, missed, passes, tiles, W)
            if writes:
                epilogue(acc, state.row_max, state.row_sum, smem.out.index(W), out_desc, lse_ptr, coord, tile_sizes, params)
            state = next_state
            work_index = next_index
            iteration += 1
        if work_index >= tiles:
            end_pass(smem.redo, missed, W)
            passes += 1
            work_index, after = next_missed(smem.redo, passes, after, tiles, 4)
    tma.store_wait(0)
    if W == 0:
        # Each pass after the first is over tiles that were missed.
        report_misled(smem.redo, passes > 1)


# Nothing is specialized on sizes, so one compiled kernel serves them all.
@gluon.jit(
    do_not_specialize=[
        "n_q",
        "n_kv",
        "batches",
        "heads",
        "kv_group",
        "m_tiles",
        "rows",
        "sequences",
        "diagonal",
        "by_sequence",
        "by_page",
        "k_rows",
        "v_rows",
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
    cu_q_ptr,
    table_ptr,
    used_k_ptr,
    counter_ptr,
    misled_ptr,
    host_misled_ptr,
    n_q,
    n_kv,
    batches,
    heads,
    kv_group,
    m_tiles,
    rows,
    sequences,
    diagonal,
    by_sequence,
    by_page,
    k_rows,
    v_rows,
    section_magic,
    section_shift,
    inner_magic,
    inner_shift,
    last_magic,
    last_shift,
    scale,
    PAGE: gl.constexpr,
):
    """Splits the program into 2 consumers and the producer."""
    q_smem = gl.allocate_shared_memory(DTYPE, [Q_SLOTS, 1, 1, 1, ROWS, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, 1, BLOCK_N, BLOCK_D], K_SMEM_LAYOUT)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, 1, BLOCK_N, BLOCK_DV], V_SMEM_LAYOUT)
    out_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, 1, 1, 1, ROWS, BLOCK_DV], out_desc.layout)
    work_smem = gl.allocate_shared_memory(gl.int32, [2 * WORK_WORDS, 1], WORK_LAYOUT)
    missed_smem = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], WORK_LAYOUT)
    smem = SharedStorage(
        q=make_pipeline(q_smem, Q_SLOTS, 1),
        k=make_pipeline(k_smem, STAGES, CONSUMERS),
        v=make_pipeline(v_smem, STAGES, CONSUMERS),
        work=make_pipeline(work_smem, 2, CONSUMERS),
        redo=Redo(missed_smem, make_barriers(1, CONSUMERS), misled_ptr, host_misled_ptr),
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
        rows,
        sequences,
        diagonal,
        Divisor(section_magic, section_shift),
        Divisor(inner_magic, inner_shift),
        Divisor(last_magic, last_shift),
        cu_q_ptr,
        used_k_ptr,
    )
    table = PageTable(table_ptr, by_sequence, by_page, k_rows, v_rows)
    params = Params(
        scale,
    )
    gl.warp_specialize(
        [
            (consumer, (out_desc, lse_ptr, smem, sizes, params, 0)),
            (consumer, (out_desc, lse_ptr, smem, sizes, params, 1)),
            (producer, ((q_desc, k_desc, v_desc), counter_ptr, smem, sizes, table, PAGE)),
        ],
        [4, 1],
        [232, 40],
    )


KERNEL = {
    "template": "flash_fwd_hopper_paged",
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
        "BLOCK_M": 128,
        "BLOCK_N": 128,
        "ctas_per_sm": 1,
        "intra_wg_overlap": 1,
        "maximum": "first",
        "num_stages": 2,
        "order": "drawn",
        "packed_heads": 1,
        "pingpong": True,
        "rescale": "grown",
        "section": 32,
        "tiles": "chained",
        "v_columns": "padded",
    },
}
