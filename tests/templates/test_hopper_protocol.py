"""The roles of a Hopper kernel never wait for one another forever, and every tile gets the keys that its rows see, once each."""

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hopper_kernels import Launch, config, launch_of, source
from hopper_protocol import Machine

from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.problems.reference import visible
from flashtune.templates.hopper.layout import HopperLayout, tiles_of
from flashtune.templates.loading import load_kernel

CAUSAL = Features(causal=True)
BAND = Features(window=(70, 40))
LEFT = Features(causal=True, window=(100, 0))
CHAINED = {"BLOCK_N": 128, "tiles": "chained"}


def problem_of(generator: random.Random, features: Features, d: int, dtype: DType, d_v: int = 0) -> Problem:
    """Up to 700 queries and keys, with a band's diagonal at either corner; tiles of a bias know no batch."""
    if features.causal or features.window:
        features = replace(features, alignment=generator.choice(["top_left", "bottom_right"]))
    sizes = {"batch": 1 if features.mask == "bias" else 2, "heads": 2, "kv_heads": 1, "d": d, "d_v": d_v or d}
    return Problem(**sizes, n_q=generator.randint(1, 700), n_kv=generator.randint(1, 700), dtype=dtype, features=features)


def seen(problem: Problem, rows: Iterable[int], block_n: int, number: int = 64) -> dict[int, set[int]]:
    """By the first of so many rows: the first keys of the blocks of which some of them see a key."""
    keys = visible(problem.band, problem.n_q, problem.n_kv)
    found = {row: keys[row : row + number].any(0).nonzero().flatten() // block_n * block_n for row in rows}
    return {row: set(blocks.tolist()) for row, blocks in found.items()}


RAISES = (0.0, 0.0, 0.3, 1.0)
"""How often a warp is outgrown in a launch, by its seed; tiles are missed in those of odd ones."""


def assert_tells(machine: Machine, programs: int) -> None:
    """Programs come once to where the first counts the launch, and say once that they were misled: where a tile was missed, or where maxima
    were raised in most blocks."""
    assert sorted(machine.counted) == list(range(programs))
    assert sorted(machine.told) == sorted(machine.missing | {program for program, more in machine.raised.items() if more > 0})


def run(problem: Problem, text: str, launch: Launch, chosen: dict[str, Any], *, programs: int, seed: int) -> None:
    """Runs the kernel's roles and checks each output tile."""
    group, packed = problem.gqa_ratio, chosen["packed_heads"]
    machine = Machine(load_kernel(text, "protocol"), launch, programs=programs, kv_group=group, seed=seed, raises=RAISES[seed % 4])
    machine.run()
    assert machine.counter == [0]
    assert_tells(machine, programs if chosen["maximum"] == "first" else 0)
    block_m, block_n = chosen["BLOCK_M"], chosen["BLOCK_N"]
    queries = 64 // packed
    rows = range(0, -(-problem.n_q * packed // block_m) * block_m // packed, queries)
    columns = (
        range(0, problem.d_v, 64)
        if HopperLayout.of(problem.spec(), Config.of(chosen)).chunked
        else (0, 128)
        if chosen["tiles"] == "loop"
        else (0,)
    )
    heads = [kv_head * group + first for kv_head in range(problem.kv_heads) for first in range(0, group, packed)]
    places = {(b, h, row, column) for b in range(problem.batch) for h in heads for row in rows for column in columns}
    assert set(machine.written) == places
    wanted = seen(problem, rows, block_n, queries)
    for (batch, head, row, _), value in machine.written.items():
        keys = [block[3] for block in value.blocks]
        assert all(block[:3] == (batch, head, row) for block in value.blocks)
        # Right to left, each once, and all that some row sees.
        assert keys == sorted(set(keys), reverse=True)
        assert wanted[row] <= set(keys) <= set(range(0, problem.n_kv, block_n))


@cache
def text_of(spec: KernelSpec, changes: tuple[tuple[str, Any], ...]) -> str:
    return source(spec, **dict(changes))


def try_out(features: Features, changes: dict[str, Any], seed: int, *, broken: tuple[str, str] | None = None) -> None:
    """A problem and an order of events that `seed` draws; `changes` are those of the config, and `dtype` and `chunks`."""
    generator, changes = random.Random(seed), dict(changes)
    dtype, chunks = changes.pop("dtype", "bf16"), changes.pop("chunks", False)
    d, d_v = 256 if changes.get("tiles") == "loop" else 64, 0
    if chunks:
        # At these head sizes tiles lie in chunks.
        d, d_v = 192, 0 if "v_columns" in changes else 128
    problem = problem_of(generator, features, d, dtype, d_v)
    if "packed_heads" in changes:
        problem = replace(problem, heads=2 * (group := generator.choice([3, 4, 5, 8])), kv_heads=2, n_q=-(-problem.n_q // group))
    text = text_of(problem.spec(), tuple(changes.items()))
    if broken:
        assert broken[0] in text
        text = text.replace(*broken)
    launch, chosen = launch_of(problem, **changes), config(problem.spec(), **changes).as_dict()
    tiles = tiles_of(config(problem.spec(), **changes), problem)
    programs = tiles if chosen["tiles"] == "one" else min(tiles, generator.randint(1, 4))
    run(problem, text, launch, chosen, programs=programs, seed=seed)


CHUNKS = {"chunks": True, "num_stages": 3}
PIECES = CHUNKS | {"v_columns": "pieces"}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("features", "changes"),
    [
        (Features(), {"intra_wg_overlap": 0}),
        (Features(), {"intra_wg_overlap": 0, "BLOCK_M": 256, "maximum": "first"}),
        (CAUSAL, {"intra_wg_overlap": 0, "BLOCK_M": 256, "maximum": "first"}),
        (CAUSAL, {"intra_wg_overlap": 0, "pingpong": True, "rescale": "grown"}),
        (BAND, {"intra_wg_overlap": 0, "BLOCK_M": 192, "num_stages": 3, "rescale": "outgrown"}),
        (BAND, {"pingpong": True}),
        (LEFT, {"BLOCK_M": 256, "intra_wg_overlap": 0, "maximum": "first"}),
        (LEFT, {"pingpong": True}),
        (replace(LEFT, mask="bias"), {"pingpong": True}),
        (replace(CAUSAL, mask="bool"), {"maximum": "first", "rescale": "grown"}),
        (Features(), CHAINED | {"maximum": "first", "pingpong": True}),
        (BAND, CHAINED | {"maximum": "first", "order": "drawn"}),
        (Features(), {"tiles": "loop", "maximum": "first", "pingpong": True, "rescale": "grown"}),
        (Features(mask="bias"), CHAINED | {"BLOCK_N": 64, "num_stages": 3}),
        (Features(), {"tiles": "loop", "pingpong": True}),
        (CAUSAL, {"tiles": "loop", "order": "drawn", "maximum": "first"}),
        (LEFT, {"tiles": "loop", "order": "drawn", "pingpong": True, "section": 8}),
        (CAUSAL, {"tiles": "loop", "section": 32, "rescale": "outgrown"}),
        (Features(), CHAINED | {"pingpong": True}),
        (CAUSAL, CHAINED | {"pingpong": True, "order": "drawn", "section": 8}),
        (CAUSAL, CHAINED | {"BLOCK_M": 192, "num_stages": 3, "order": "drawn", "maximum": "first"}),
        (LEFT, CHAINED | {"order": "drawn", "section": 32, "rescale": "outgrown"}),
        (replace(CAUSAL, softcap=True, dropout=True, alibi=True), CHAINED | {"order": "drawn"}),
        # e4m3.
        (CAUSAL, {"dtype": "fp8", "BLOCK_M": 192, "BLOCK_N": 128, "num_stages": 3, "intra_wg_overlap": 0}),
        (replace(BAND, alibi=True), {"dtype": "fp8", "BLOCK_M": 192, "intra_wg_overlap": 0}),
        (CAUSAL, {"dtype": "fp8", "tiles": "chained", "order": "drawn"}),
        # Tiles in chunks.
        (Features(), PIECES | {"tiles": "loop", "maximum": "first", "rescale": "grown", "pingpong": True}),
        (CAUSAL, PIECES | {"tiles": "loop", "order": "drawn"}),
        (CAUSAL, PIECES | {"BLOCK_M": 192, "intra_wg_overlap": 0, "maximum": "first"}),
        (LEFT, PIECES | {"rescale": "outgrown", "pingpong": True}),
        (Features(), CHUNKS | {"num_stages": 2, "tiles": "chained", "maximum": "first"}),
        (CAUSAL, CHUNKS | {"num_stages": 2, "BLOCK_N": 128, "tiles": "loop", "order": "drawn", "pingpong": True}),
        (replace(LEFT, mask="bias"), CHUNKS | {"num_stages": 2}),
        # Tiles of several heads.
        (Features(), {"packed_heads": 4, "intra_wg_overlap": 0, "maximum": "first"}),
        (CAUSAL, {"packed_heads": 8, "BLOCK_M": 192, "pingpong": True}),
        (replace(LEFT, sinks=True), {"packed_heads": 2, "rescale": "outgrown"}),
        (CAUSAL, CHAINED | {"packed_heads": 4, "order": "drawn", "section": 8, "maximum": "first"}),
        (Features(), PIECES | {"packed_heads": 8, "tiles": "loop"}),
    ],
    ids=str,
)
def test_every_tile_gets_the_blocks_that_it_sees(features: Features, changes: dict[str, Any], seed: int) -> None:
    """With maxima that may be outgrown, tiles are missed at one seed, and raised in some blocks at the other."""
    try_out(features, changes, seed)


BROKEN = {
    "a chunk is left": (
        Features(),
        PIECES,
        "for c in gl.static_range(CHUNKS):",
        "for c in gl.static_range(CHUNKS - 1):",
    ),
    "chunks are mixed up": (
        Features(),
        PIECES,
        "c * CHUNK], full, smem.index(first + c))",
        "c * CHUNK], full, smem.index(first + (c + 1) % CHUNKS))",
    ),
    "tiles share chunks": (CAUSAL, PIECES, "stage * DV_CHUNKS, DV_CHUNKS)", "stage * 2, DV_CHUNKS)"),
    "keys are kept": (CAUSAL, {}, "release(smem.k, block)\n        wait_full(smem.v", "wait_full(smem.v"),
    "blocks are left": (
        CAUSAL,
        {},
        "block = skip_blocks(block, tile_blocks.end - blocks.end, smem, W)",
        "block += tile_blocks.end - blocks.end",
    ),
    "turns are left": (CAUSAL, {"pingpong": True}, "        scheduler_barrier_sync(W)\n        scheduler_barrier_arrive(W)\n", ""),
    "scores come early": (
        Features(),
        CHAINED,
        "scores = warpgroup_mma_wait(1, deps=[scores])",
        "scores = warpgroup_mma_wait(2, deps=[scores])",
    ),
    "values come early": (Features(), CHAINED, "    wait_full(smem.v, block - 1)\n    product", "    product"),
    "outputs meet": (Features(), CHAINED, "        tma.store_wait(0)\n        epilogue(", "        epilogue("),
    "halves meet": (Features(), {"tiles": "loop"}, "    tma.store_wait(0)\n    out_tile", "    out_tile"),
    "no work": (CAUSAL, {"tiles": "loop", "order": "drawn"}, "gl.maximum(blocks.end - blocks.first - 2, 0)", "blocks.end - blocks.first"),
    "left edge": (
        LEFT,
        {"BLOCK_M": 256, "intra_wg_overlap": 0},
        "block = skip_blocks(block, blocks.first - tile_blocks.first, smem, W)",
        "pass",
    ),
    "passes overlap": (Features(), CHAINED | {"maximum": "first"}, "passes - 1 & 1", "0"),
    "all write twice": (CAUSAL, {"maximum": "first"}, "gl.where(passes == 0, wrong == 0, missed == work_index)", "wrong == 0"),
    "missed tiles are left": (
        CAUSAL,
        {"tiles": "loop", "maximum": "first"},
        "following = gl.where(chosen, 1, following)",
        "work_index = tiles",
    ),
    "misled programs are silent": (CAUSAL, {"maximum": "first"}, "report_misled(smem.redo, passes > 1)", "pass"),
    "no launch is counted": (CAUSAL, {"maximum": "first"}, "count_launch(smem.redo)", "pass"),
    "all programs are misled": (CAUSAL, {"maximum": "first"}, "report_misled(smem.redo, passes > 1", "report_misled(smem.redo, True"),
    "all warpgroups count": (
        CAUSAL,
        {"maximum": "first"},
        "if W == 0:\n                count_raised",
        "if True:\n                count_raised",
    ),
    "a head is left": (
        CAUSAL,
        {"packed_heads": 2},
        "first_head = (coord.head - kv_head * sizes.kv_group) * PACKED",
        "first_head = coord.head - kv_head * sizes.kv_group",
    ),
    "warpgroups share queries": (CAUSAL, {"packed_heads": 4}, "coord.row + w * QUERIES", "coord.row"),
    "a narrower band": (CAUSAL, {}, "gl.minimum(row + NUMBER, sizes.n_q) - 1 +", "gl.minimum(row + NUMBER, sizes.n_q) - 65 +"),
}
"""Features, changes of the config, what to take out of the text and what to put there."""


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str) -> None:
    features, changes, before, after = BROKEN[name]

    def try_twenty() -> None:
        for seed in range(20):
            try_out(features, changes, seed, broken=(before, after))

    with pytest.raises(AssertionError):
        try_twenty()
