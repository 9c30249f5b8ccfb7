"""Attention backward for Hopper of heads beyond 256, bit for bit repeatable: one warp copies tiles with TMA, two warpgroups compute.

Five products. `score_gradients` leaves probabilities and gradients of scores of a chunk in memory, in tiles that some query of theirs sees;
`key_gradients` and `query_gradients` multiply these. Sums over several chunks are added up in a fixed order.

Compiled in: bwd-bf16-d512
Template: flash_bwd_hopper_wide
Variant: 5b8fdb5faf92bf60
Config: BLOCK_M=128 BLOCK_N=128 COLUMNS=256

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
# A tile of scores, half of whose queries each warpgroup has.
BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(128)
ROWS = gl.constexpr(64)
# Q and K, then dO and V, come in parts of so many columns.
PART = gl.constexpr(64)
PARTS = gl.constexpr(8)
V_PARTS = gl.constexpr(8)
STAGES = gl.constexpr(6)
# Blocks of keys of a program, and tiles of queries whose programs run side by side.
RUN = gl.constexpr(16)
BAND = gl.constexpr(16)
# Tiles of gradients: so many columns of BLOCK_M queries or BLOCK_N keys.
COLUMNS = gl.constexpr(256)
D_TILES = gl.constexpr(2)
DV_TILES = gl.constexpr(2)
PRODUCT_STAGES = gl.constexpr(4)
ROW_SCORES_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, ROW_SCORES_LAYOUT))
COLUMN_LAYOUT = gl.constexpr(gl.SliceLayout(0, ROW_SCORES_LAYOUT))
SUM_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))


class Sizes(NamedTuple):
    """The sizes of a call."""

    n_q: gl.tensor
    n_kv: gl.tensor
    kv_heads: gl.tensor
    group: gl.tensor
    m_tiles: gl.tensor
    n_tiles: gl.tensor


class Params(NamedTuple):
    """What tiles work with beside sizes."""

    scale: gl.tensor
    score_scale: gl.tensor


class Chunk(NamedTuple):
    """Key heads from `place` on, counted over batches, of each of which `members` query heads from `member` on, `m_tiles` tiles of queries
    from `m_tile` on."""

    place: gl.tensor
    member: gl.tensor
    members: gl.tensor
    m_tile: gl.tensor
    m_tiles: gl.tensor


class Ring(NamedTuple):
    """Stages of two operands' tiles, of the first of which each warpgroup has its own, and barriers that tell when each stage is full and
    empty again."""

    own: gl.shared_memory_descriptor
    both: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class RowNumbers(NamedTuple):
    """A number for each query, `rows` to a head."""

    lse_ptr: gl.tensor
    delta_ptr: gl.tensor
    rows: gl.tensor


class ScoreTile(NamedTuple):
    """Where tiles of one head's scores begin, which of the chunk's heads that is, and the blocks of keys of the program.

    These are first .. end-1, of which unmasked_first .. unmasked_end-1 are seen by all queries.
    """

    batch: gl.tensor
    kv_head: gl.tensor
    member: gl.tensor
    slot: gl.tensor
    row: gl.tensor
    first: gl.tensor
    unmasked_first: gl.tensor
    unmasked_end: gl.tensor
    end: gl.tensor


class SumTile(NamedTuple):
    """A tile of gradients, `columns` from `column` on, and the blocks first .. end-1 over which its products go."""

    batch: gl.tensor
    kv_head: gl.tensor
    member: gl.tensor
    slot: gl.tensor
    row: gl.tensor
    column: gl.tensor
    first: gl.tensor
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
    BLOCK_DV: tl.constexpr = 512

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


# Hardware barriers from 5 on are free; Triton uses those before.
@gluon.jit
def named_barrier_sync(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Waits at a hardware barrier until THREADS threads are there."""
    gl.inline_asm_elementwise("bar.sync $1, $2; mov.u32 $0, 0;", "=r,r,r", [BARRIER, THREADS], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def mask_probs_dq(probs, key, row, sizes):
    """0 where a query (from `row` on) doesn't see a key (from `key` on). Selected, for what is masked may be infinite."""
    columns = gl.arange(0, BLOCK_N, layout=COLUMN_LAYOUT)[None, :]  # [1, BLOCK_N]
    last = gl.zeros([ROWS], gl.int32, ROW_LAYOUT) + (sizes.n_kv - 1 - key)  # [ROWS]
    # In assembly, or the compiler gathers predicates in registers of their own.
    to_last: gl.constexpr = "{ .reg .pred sees; setp.le.s32 sees, $2, $3; selp.f32 $0, $1, 0f00000000, sees; }"
    probs = gl.inline_asm_elementwise(to_last, "=f,f,r,r", [probs, columns, last[:, None]], dtype=gl.float32, is_pure=True, pack=1)
    return probs  # [ROWS, BLOCK_N]


@gluon.jit
def blocks_of_row(m_tile, sizes):
    """The blocks of keys first .. end-1 that a tile of queries sees, by its last row even where that is past the end."""
    first = 0
    end = sizes.n_tiles
    return first, end


@gluon.jit
def score_tile_at(program, chunk, sizes):
    """The tiles of scores of a program. A band of queries goes run by run of keys, so that what programs read stays in L2."""
    runs = (sizes.n_tiles + RUN - 1) // RUN
    slot = program // (chunk.m_tiles * runs)
    within = program - slot * (chunk.m_tiles * runs)
    band = within // (BAND * runs)
    within -= band * (BAND * runs)
    width = gl.minimum(chunk.m_tiles - band * BAND, BAND)
    m_tile = chunk.m_tile + band * BAND + within % width
    place = chunk.place + slot // chunk.members
    batch = place // sizes.kv_heads
    row = m_tile * BLOCK_M
    first, end = blocks_of_row(m_tile, sizes)
    unmasked_first = first
    # Zeros stand for keys past the end, and the exponential of a score of 0 may be infinite.
    unmasked_end = sizes.n_kv // BLOCK_N
    first = gl.maximum(first, within // width * RUN)
    end = gl.minimum(end, within // width * RUN + RUN)
    unmasked_first = gl.minimum(gl.maximum(unmasked_first, first), end)
    unmasked_end = gl.minimum(gl.maximum(unmasked_end, unmasked_first), end)
    member = chunk.member + slot % chunk.members
    return ScoreTile(batch, place - batch * sizes.kv_heads, member, slot, row, first, unmasked_first, unmasked_end, end)


@gluon.jit
def load_part(own_desc, both_desc, tile, head, key, column, ring, number):
    """Starts the copies of columns of both warpgroups' queries and of a block of keys as soon as their stage is empty."""
    stage = number % STAGES
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), number // STAGES & 1 ^ 1)
    mbarrier.expect(full, 2 * own_desc.block_type.nbytes + both_desc.block_type.nbytes)
    for w in gl.static_range(2):
        async_load(own_desc, [tile.batch, head, tile.row + w * ROWS, column], full, ring.own.index(stage * 2 + w))
    async_load(both_desc, [tile.batch, tile.kv_head, key, column], full, ring.both.index(stage))


@gluon.jit
def score_producer(descs, ring, chunk, sizes):
    """The copying warp: runs ahead of the consumers as far as the stages allow."""
    q_desc, k_desc, v_desc, dout_desc = descs
    tile = score_tile_at(gl.program_id(0), chunk, sizes)
    head = tile.kv_head * sizes.group + tile.member
    number = gl.to_tensor(0)
    for block in range(tile.first, tile.end):
        for part in gl.static_range(PARTS):
            load_part(q_desc, k_desc, tile, head, block * BLOCK_N, part * PART, ring, number + part)
        number += PARTS
        for part in gl.static_range(V_PARTS):
            load_part(dout_desc, v_desc, tile, head, block * BLOCK_N, part * PART, ring, number + part)
        number += V_PARTS


@gluon.jit
def start_part(ring, number, scores, FIRST: gl.constexpr, W: gl.constexpr):
    """Starts the scores of a part's columns, added to those before, as soon as it has come."""
    wait_full(ring, number)
    stage = number % STAGES
    own = ring.own.index(stage * 2 + W).reshape([ROWS, PART])
    both = ring.both.index(stage).reshape([BLOCK_N, PART]).permute((1, 0))
    return warpgroup_mma(own, both, scores, use_acc=not FIRST, is_async=True)  # [ROWS, BLOCK_N]


@gluon.jit
def store_scores(desc, scores, slot, row, column, leaving):
    """Starts to write a tile, once the one before has left its memory."""
    tma.store_wait(0)
    leaving.reshape([ROWS, BLOCK_N]).store(scores)
    fence_async_shared()
    async_store(desc, [slot, row, column], leaving)


@gluon.jit
def score_loop(
    blocks,
    number,
    lse,
    delta,
    slot,
    row,
    slot_row,
    descs,
    ring,
    leaving,
    sizes,
    params,
    MASKED: gl.constexpr,
    W: gl.constexpr,
):
    """Blocks blocks[0] .. blocks[1]-1 of one head's keys. Every product of a block has ended before the next block begins."""
    probs_desc, dscores_desc = descs
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, ROW_SCORES_LAYOUT)
    for block in range(blocks[0], blocks[1]):
        scores = start_part(ring, number, zeros, True, W)
        for part in gl.static_range(1, PARTS):
            scores = start_part(ring, number + part, scores, False, W)
            scores = warpgroup_mma_wait(1, deps=[scores])
            release(ring, number + part - 1)
        number += PARTS
        # The first part of dP runs beside exponentials.
        dprobs = start_part(ring, number, zeros, True, W)
        scores = warpgroup_mma_wait(1, deps=[scores])
        release(ring, number - 1)
        probs = gl.exp2(scores * params.score_scale - lse[:, None])  # [ROWS, BLOCK_N]
        if MASKED:
            probs = mask_probs_dq(probs, block * BLOCK_N, row, sizes)
        store_scores(probs_desc, probs.to(DTYPE), slot, slot_row, block * BLOCK_N, leaving)
        for part in gl.static_range(1, V_PARTS):
            dprobs = start_part(ring, number + part, dprobs, False, W)
            dprobs = warpgroup_mma_wait(1, deps=[dprobs])
            release(ring, number + part - 1)
        dprobs = warpgroup_mma_wait(0, deps=[dprobs])
        number += V_PARTS
        release(ring, number - 1)
        dscores = probs * (dprobs - delta[:, None])  # [ROWS, BLOCK_N]
        store_scores(dscores_desc, dscores.to(DTYPE), slot, slot_row, block * BLOCK_N, leaving)
    return number


@gluon.jit
def score_consumer(descs, numbers, ring, leaving, chunk, sizes, params, W: gl.constexpr):
    """One warpgroup: queries W * ROWS .. W * ROWS + ROWS - 1 of the program's tiles."""
    tile = score_tile_at(gl.program_id(0), chunk, sizes)
    row = tile.row + W * ROWS
    head_index = (tile.batch * sizes.kv_heads + tile.kv_head) * sizes.group + tile.member
    # Rows past the end have the LSE +inf, and so no probabilities.
    offs_m = head_index.to(gl.int64) * numbers.rows + row + gl.arange(0, ROWS, layout=ROW_LAYOUT)  # [ROWS]
    lse = gl.load(numbers.lse_ptr + offs_m)  # [ROWS]
    delta = gl.load(numbers.delta_ptr + offs_m)  # [ROWS]
    slot_row = row - chunk.m_tile * BLOCK_M
    number = gl.to_tensor(0)
    blocks = tile.unmasked_first, tile.unmasked_end
    number = score_loop(blocks, number, lse, delta, tile.slot, row, slot_row, descs, ring, leaving.index(W), sizes, params, False, W)
    blocks = tile.unmasked_end, tile.end
    number = score_loop(blocks, number, lse, delta, tile.slot, row, slot_row, descs, ring, leaving.index(W), sizes, params, True, W)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "rows",
        "place",
        "member",
        "members",
        "m_tile",
        "chunk_m_tiles",
        "n_q",
        "n_kv",
        "kv_heads",
        "group",
        "m_tiles",
        "n_tiles",
    ]
)
def score_gradients(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    probs_desc,
    dscores_desc,
    lse_ptr,
    delta_ptr,
    rows,
    place,
    member,
    members,
    m_tile,
    chunk_m_tiles,
    n_q,
    n_kv,
    kv_heads,
    group,
    m_tiles,
    n_tiles,
    scale,
    score_scale,
):
    """Probabilities and gradients of scores: splits the program into two consumers and the producer."""
    own = gl.allocate_shared_memory(DTYPE, [STAGES * 2, 1, 1, ROWS, PART], q_desc.layout)
    both = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, PART], k_desc.layout)
    leaving = gl.allocate_shared_memory(DTYPE, [2, 1, ROWS, BLOCK_N], probs_desc.layout)
    ring = Ring(own, both, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    fence_async_shared()
    sizes = Sizes(n_q, n_kv, kv_heads, group, m_tiles, n_tiles)
    params = Params(scale, score_scale)
    chunk = Chunk(place, member, members, m_tile, chunk_m_tiles)
    descs = probs_desc, dscores_desc
    numbers = RowNumbers(lse_ptr, delta_ptr, rows)
    gl.warp_specialize(
        [
            (score_consumer, (descs, numbers, ring, leaving, chunk, sizes, params, 0)),
            (score_consumer, (descs, numbers, ring, leaving, chunk, sizes, params, 1)),
            (score_producer, ((q_desc, k_desc, v_desc, dout_desc), ring, chunk, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def start_product(ring, number, sums, TURNED: gl.constexpr, W: gl.constexpr):
    """Starts the product of 64 queries of a tile of keys, or of 64 keys of a tile of queries, as soon as they have come."""
    wait_full(ring, number)
    stage = number % PRODUCT_STAGES
    own = ring.own.index(stage * 2 + W).reshape([64, 64])
    both = ring.both.index(stage).reshape([64, COLUMNS])
    return warpgroup_mma(own.permute((1, 0)) if TURNED else own, both, sums, is_async=True)  # [ROWS, COLUMNS]


@gluon.jit
def release_before(ring, number):
    """Hands back the stage before the number-th, if there is one."""
    before = number - 1
    mbarrier.arrive(ring.empty.index(before % PRODUCT_STAGES), count=1, pred=number > 0)


@gluon.jit
def add_products(blocks, ring, TURNED: gl.constexpr, W: gl.constexpr):
    """The sum of the products of so many blocks, of two steps each."""
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, SUM_LAYOUT)
    number = gl.to_tensor(0)
    for _ in range(blocks):
        sums = start_product(ring, number, sums, TURNED, W)
        sums = warpgroup_mma_wait(1, deps=[sums])
        release_before(ring, number)
        sums = start_product(ring, number + 1, sums, TURNED, W)
        sums = warpgroup_mma_wait(1, deps=[sums])
        release(ring, number)
        number += 2
    return warpgroup_mma_wait(0, deps=[sums])  # [ROWS, COLUMNS]


@gluon.jit
def store_sums(desc, sums, tile, head, ring, W: gl.constexpr):
    """Writes a warpgroup's rows through the memory of an operand, once nobody reads that."""
    named_barrier_sync(7, 256)
    leaving = ring.both.index(W)
    leaving.reshape([ROWS, COLUMNS]).store(sums.to(DTYPE))
    fence_async_shared()
    async_store(desc, [tile.batch, head, tile.row + W * ROWS, tile.column], leaving)
    tma.store_wait(0)


@gluon.jit
def key_tile_at(program, chunk, sizes):
    """The tile of a program: of dV, and behind all of its columns of dK. Those of the first keys, which most queries see, go first."""
    columns = D_TILES + DV_TILES
    place = program // (sizes.n_tiles * columns)
    within = program - place * (sizes.n_tiles * columns)
    n_tile = within // columns
    column = (within - n_tile * columns) * COLUMNS
    first = chunk.m_tile
    end = chunk.m_tile + chunk.m_tiles
    slot = place * chunk.members
    place = chunk.place + place
    batch = place // sizes.kv_heads
    return SumTile(batch, place - batch * sizes.kv_heads, chunk.member, slot, n_tile * BLOCK_N, column, first, end)


@gluon.jit
def load_key_step(scores_desc, other_desc, scores_at, other_at, ring, number):
    """Starts the copies of a step as soon as its stage is empty."""
    stage = number % PRODUCT_STAGES
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), number // PRODUCT_STAGES & 1 ^ 1)
    mbarrier.expect(full, 2 * scores_desc.block_type.nbytes + other_desc.block_type.nbytes)
    slot, row, column = scores_at
    for w in gl.static_range(2):
        async_load(scores_desc, [slot, row, column + w * ROWS], full, ring.own.index(stage * 2 + w))
    async_load(other_desc, [other_at[0], other_at[1], other_at[2], other_at[3]], full, ring.both.index(stage))


@gluon.jit
def load_key_blocks(scores_desc, other_desc, tile, column, ring, chunk, sizes):
    """Copies what one gradient of a tile of keys takes, one query head after another."""
    number = gl.to_tensor(0)
    for member in range(chunk.members):
        head = tile.kv_head * sizes.group + tile.member + member
        for block in range(tile.first, tile.end):
            for half in gl.static_range(2):
                row = block * BLOCK_M + half * 64
                scores_at = tile.slot + member, row - chunk.m_tile * BLOCK_M, tile.row
                load_key_step(scores_desc, other_desc, scores_at, (tile.batch, head, row, column), ring, number + half)
            number += 2


@gluon.jit
def key_producer(descs, ring, chunk, sizes):
    """The copying warp: runs ahead of the consumers as far as the stages allow."""
    tile = key_tile_at(gl.program_id(0), chunk, sizes)
    probs_desc, dscores_desc, q_desc, dout_desc = descs
    if tile.column < DV_TILES * COLUMNS:
        load_key_blocks(probs_desc, dout_desc, tile, tile.column, ring, chunk, sizes)
    else:
        load_key_blocks(dscores_desc, q_desc, tile, tile.column - DV_TILES * COLUMNS, ring, chunk, sizes)


@gluon.jit
def key_consumer(outputs, ring, chunk, sizes, W: gl.constexpr):
    """One warpgroup: 64 keys of the program's tile."""
    tile = key_tile_at(gl.program_id(0), chunk, sizes)
    sums = add_products(chunk.members * (tile.end - tile.first), ring, True, W)
    dk_desc, dv_desc, sums_ptr, dk_factor, dv_factor, starts, ends = outputs
    # Only chunks of one key head have sums beside them, which lie tile after tile.
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUM_LAYOUT))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUM_LAYOUT))
    start = (gl.program_id(0) * 2 + W).to(gl.int64) * (ROWS * COLUMNS)
    sums_ptrs = sums_ptr + start + rows[:, None] * COLUMNS + columns[None, :]  # [ROWS, COLUMNS]
    if starts == 0:
        sums += gl.load(sums_ptrs)
    if ends == 0:
        gl.store(sums_ptrs, sums)
    elif tile.column < DV_TILES * COLUMNS:
        store_sums(dv_desc, sums * dv_factor, tile, tile.kv_head, ring, W)
    else:
        at = SumTile(tile.batch, tile.kv_head, 0, 0, tile.row, tile.column - DV_TILES * COLUMNS, 0, 0)
        store_sums(dk_desc, sums * dk_factor, at, tile.kv_head, ring, W)


@gluon.jit(
    do_not_specialize=[
        "starts",
        "ends",
        "place",
        "member",
        "members",
        "m_tile",
        "chunk_m_tiles",
        "n_q",
        "n_kv",
        "kv_heads",
        "group",
        "m_tiles",
        "n_tiles",
    ]
)
def key_gradients(
    probs_desc,
    dscores_desc,
    q_desc,
    dout_desc,
    dk_desc,
    dv_desc,
    sums_ptr,
    dk_factor,
    dv_factor,
    starts,
    ends,
    place,
    member,
    members,
    m_tile,
    chunk_m_tiles,
    n_q,
    n_kv,
    kv_heads,
    group,
    m_tiles,
    n_tiles,
):
    """dK and dV of a tile of keys: splits the program into two consumers and the producer."""
    own = gl.allocate_shared_memory(DTYPE, [PRODUCT_STAGES * 2, 1, 64, 64], dscores_desc.layout)
    both = gl.allocate_shared_memory(DTYPE, [PRODUCT_STAGES, 1, 1, 64, COLUMNS], q_desc.layout)
    ring = Ring(own, both, make_barriers(PRODUCT_STAGES, 1), make_barriers(PRODUCT_STAGES, 2))
    fence_async_shared()
    sizes = Sizes(n_q, n_kv, kv_heads, group, m_tiles, n_tiles)
    chunk = Chunk(place, member, members, m_tile, chunk_m_tiles)
    outputs = dk_desc, dv_desc, sums_ptr, dk_factor, dv_factor, starts, ends
    gl.warp_specialize(
        [
            (key_consumer, (outputs, ring, chunk, sizes, 0)),
            (key_consumer, (outputs, ring, chunk, sizes, 1)),
            (key_producer, ((probs_desc, dscores_desc, q_desc, dout_desc), ring, chunk, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def query_tile_at(program, chunk, sizes):
    """The tile of a program."""
    slot = program // (chunk.m_tiles * D_TILES)
    within = program - slot * (chunk.m_tiles * D_TILES)
    index = within // D_TILES
    m_tile = chunk.m_tile + index
    place = chunk.place + slot // chunk.members
    batch = place // sizes.kv_heads
    first, end = blocks_of_row(m_tile, sizes)
    member = chunk.member + slot % chunk.members
    column = (within - index * D_TILES) * COLUMNS
    return SumTile(batch, place - batch * sizes.kv_heads, member, slot, m_tile * BLOCK_M, column, first, end)


@gluon.jit
def load_query_step(scores_desc, other_desc, scores_at, other_at, ring, number):
    """Starts the copies of a step as soon as its stage is empty."""
    stage = number % PRODUCT_STAGES
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), number // PRODUCT_STAGES & 1 ^ 1)
    mbarrier.expect(full, 2 * scores_desc.block_type.nbytes + other_desc.block_type.nbytes)
    slot, row, column = scores_at
    for w in gl.static_range(2):
        async_load(scores_desc, [slot, row + w * ROWS, column], full, ring.own.index(stage * 2 + w))
    async_load(other_desc, [other_at[0], other_at[1], other_at[2], other_at[3]], full, ring.both.index(stage))


@gluon.jit
def query_producer(descs, ring, chunk, sizes):
    """The copying warp: runs ahead of the consumers as far as the stages allow."""
    tile = query_tile_at(gl.program_id(0), chunk, sizes)
    dscores_desc, k_desc = descs
    number = gl.to_tensor(0)
    for block in range(tile.first, tile.end):
        for half in gl.static_range(2):
            key = block * BLOCK_N + half * 64
            scores_at = tile.slot, tile.row - chunk.m_tile * BLOCK_M, key
            load_query_step(dscores_desc, k_desc, scores_at, (tile.batch, tile.kv_head, key, tile.column), ring, number + half)
        number += 2


@gluon.jit
def query_consumer(outputs, ring, chunk, sizes, W: gl.constexpr):
    """One warpgroup: 64 queries of the program's tile."""
    tile = query_tile_at(gl.program_id(0), chunk, sizes)
    dq_desc, dq_factor = outputs
    sums = add_products(tile.end - tile.first, ring, False, W)
    store_sums(dq_desc, sums * dq_factor, tile, tile.kv_head * sizes.group + tile.member, ring, W)


@gluon.jit(
    do_not_specialize=[
        "place",
        "member",
        "members",
        "m_tile",
        "chunk_m_tiles",
        "n_q",
        "n_kv",
        "kv_heads",
        "group",
        "m_tiles",
        "n_tiles",
    ]
)
def query_gradients(
    dscores_desc,
    k_desc,
    dq_desc,
    dq_factor,
    place,
    member,
    members,
    m_tile,
    chunk_m_tiles,
    n_q,
    n_kv,
    kv_heads,
    group,
    m_tiles,
    n_tiles,
):
    """dQ of a tile of queries: splits the program into two consumers and the producer."""
    own = gl.allocate_shared_memory(DTYPE, [PRODUCT_STAGES * 2, 1, 64, 64], dscores_desc.layout)
    both = gl.allocate_shared_memory(DTYPE, [PRODUCT_STAGES, 1, 1, 64, COLUMNS], k_desc.layout)
    ring = Ring(own, both, make_barriers(PRODUCT_STAGES, 1), make_barriers(PRODUCT_STAGES, 2))
    fence_async_shared()
    sizes = Sizes(n_q, n_kv, kv_heads, group, m_tiles, n_tiles)
    chunk = Chunk(place, member, members, m_tile, chunk_m_tiles)
    outputs = dq_desc, dq_factor
    gl.warp_specialize(
        [
            (query_consumer, (outputs, ring, chunk, sizes, 0)),
            (query_consumer, (outputs, ring, chunk, sizes, 1)),
            (query_producer, ((dscores_desc, k_desc), ring, chunk, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


KERNEL = {
    "template": "flash_bwd_hopper_wide",
    "spec": {
        "direction": "bwd",
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
        "BLOCK_M": 128,
        "BLOCK_N": 128,
        "COLUMNS": 256,
    },
}
