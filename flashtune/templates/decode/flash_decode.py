"""The family `flash_decode`: attention forward for few query rows, whose keys are split over many programs; for every GPU.

Decoding reads all of K and V for a row or two, so that memory bandwidth is the limit, and a grid over rows and heads alone leaves
most of the GPU idle (Dao, Haziza, Massa, Sizov, "Flash-Decoding", 2023). See docs/decisions/0010-dispatch.md.
"""

import math

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.problem import DECODE_ROWS, WIDEST_HEAD, Problem, padded, wide_heads
from flashtune.core.records.results import CompileFacts
from flashtune.templates.family import Axis, Family, constraint, wave_efficiency
from flashtune.templates.forward import flash_fwd
from flashtune.templates.launches.pointers import DecodeHost
from flashtune.templates.predicates import (
    address_registers,
    expected_facts,
    first_with_room,
    has_scalar_products,
    live_registers,
    multiplies_by_warpgroups,
    scalar_products_are_short,
    shared_bytes,
    split_bytes,
    stages_exist,
)

AXES = (
    Axis(name="BLOCK_M", values=(16, 32, 64), why="rows of a program, heads packed in: reuse of K and V against padding and registers"),
    Axis(name="BLOCK_N", values=(32, 64, 128, 256), why="key rows of a step: fewer steps against shared memory and uneven shares"),
    Axis(name="num_warps", values=(1, 2, 4, 8), why="warps that share a tile: registers a thread against waiting for each other"),
    Axis(name="num_stages", values=(1, 2, 3, 4, 6), why="key blocks in flight: bandwidth used against programs that fit on an SM"),
    Axis(name="programs", values=(1, 2, 3, 4, 8), why="programs to an SM that keys are split for: SMs kept busy against parts to add up"),
    Axis(
        name="combine",
        values=("kernel", "last", "rows"),
        why="combination of splits: by a second launch, or by the last program of a tile, for all its rows at once or for two at a time",
    ),
    Axis(name="loads", values=("pointer", "tma"), why="how K and V are read: any strides, against no address arithmetic"),
)

SMALL_TILE = 64
"""Query rows of the smallest tiles at which families without split keys are efficient."""

BUSY = 0.5
"""Wave efficiency from which on keys aren't split, an estimate: splits could gain at most a factor of two, less the cost of adding them up.

FlashAttention-3 splits below 0.8 of one wave (`num_splits_heuristic` in hopper/heuristics.h of Dao-AILab/flash-attention); it
has one kernel for whole and for split keys, flashtune hasn't.
"""

FEWEST_KEYS = 1024
"""Least keys worth splitting: one program reads fewer in the few microseconds that splitting costs."""

COMBINE_WARPS = 4
"""Warps of a program of the combining launch."""


@constraint("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
def shared_memory_fits(config: Config, spec: KernelSpec, target: Target) -> bool:
    """K and V blocks in flight fit into shared memory"""
    return split_bytes(config, spec, target) <= target.shared_bytes_per_block


@constraint("BLOCK_M", "BLOCK_N", "num_warps", "loads")
def registers_fit(config: Config, spec: KernelSpec, target: Target) -> bool:
    """scores, probs, acc and the addresses of K and V fit into a thread's registers"""
    addresses = address_registers(config, spec, target) if config["loads"] == "pointer" else 0
    return live_registers(config, spec, target) + addresses <= (232 if target.vendor == "nvidia" else 448)


@constraint("BLOCK_M", "BLOCK_N", "num_warps")
def warps_have_work(config: Config, spec: KernelSpec, target: Target) -> bool:
    """each warp has a matrix instruction's share of the scores"""
    return config.number("BLOCK_M") * config.number("BLOCK_N") >= 16 * 8 * config.number("num_warps")


@constraint("loads")
def copy_engine(config: Config, spec: KernelSpec, target: Target) -> bool:
    """descriptors are for GPUs with TMA, products on tensor cores, and tiles in one piece"""
    whole = not (spec.latent or wide_heads(spec.d, spec.d_v))
    return config["loads"] == "pointer" or (target.has_tma and whole and not has_scalar_products(spec, target))


CONSTRAINTS = (shared_memory_fits, registers_fit, warps_have_work, copy_engine, stages_exist, scalar_products_are_short)


def few_rows(config: Config) -> int:
    """Rows that are combined at a time, by a program of the combining launch or by the last program of a tile."""
    return 2 if config["combine"] == "rows" else 1


def row_splits(config: Config, d_v: int) -> int:
    """Splits of `few_rows` rows that are read at once: a tile of 32 numbers per thread."""
    warps = config.number("num_warps") if config["combine"] == "rows" else COMBINE_WARPS
    return max(1, min(32 * 32 * warps // (few_rows(config) * padded(d_v)), 64))


def suits(problem: Problem, target: Target) -> str | None:
    """The reason why splitting keys won't help `problem` on `target`, or None for a decoding step, or where tiles leave SMs idle."""
    if problem.n_q <= DECODE_ROWS:
        return None
    # Heads that share keys fill tiles together, here and where flash_fwd_hopper packs them.
    tiles = problem.batch * problem.kv_heads * math.ceil(problem.n_q * problem.gqa_ratio / SMALL_TILE)
    if (busy := wave_efficiency(tiles, target.sms)) >= BUSY:
        return f"flash_decode splits keys where rows are few, and {tiles} tiles of {SMALL_TILE} rows fill {busy:.0%} of {target.name}"
    if problem.n_kv < FEWEST_KEYS:
        return f"flash_decode splits keys where there are many, and {problem.n_kv} are few"
    return None


def _tiles(spec: KernelSpec, target: Target) -> list[tuple[int, int, int, int]]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages) for any strides: about 64 KiB in flight on each SM, down to one that always fits."""
    if wide_heads(spec.d, spec.d_v) and not has_scalar_products(spec, target):
        few = [(16, 32, 4, 3), (16, 64, 8, 3), (16, 32, 4, 4), (16, 64, 8, 2), (16, 32, 4, 2), (16, 32, 4, 1)]
        # Elsewhere warps that share rows would each keep all of their output.
        some = [(64, 32, 8, 3), (64, 32, 8, 2)] if multiplies_by_warpgroups(spec, target) else [(32, 64, 8, 3), (32, 64, 8, 2)]
        return [*few[:2], *some, *few[2:]]
    small = [(16, 64, 4, 3), (16, 64, 8, 3), (16, 64, 4, 2), (16, 32, 4, 3), (16, 32, 4, 2), (16, 32, 4, 1)]
    if has_scalar_products(spec, target):
        return [*small, *[(16, 32, 8, 1)] * wide_heads(spec.d, spec.d_v)]
    # Rows of matrix products are free here, and 64 fit the heads of a group for several queries.
    return [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), *small]


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """Plain loads in tiles of several sizes, then others with enough of K and V in flight: few deep programs, or many small ones."""
    plain = [(*tile, 2, "kernel", "pointer") for tile in _tiles(spec, target)]
    others = [
        (16, 64, 4, 4, 2, "rows", "tma"),
        (64, 64, 4, 3, 2, "kernel", "tma"),
        (16, 64, 4, 6, 1, "kernel", "tma"),
        (16, 128, 4, 3, 1, "last", "pointer"),
        (16, 128, 8, 3, 1, "kernel", "tma"),
        (16, 32, 1, 4, 4, "kernel", "tma"),
    ]
    names = [axis.name for axis in AXES]
    return [Config.of(dict(zip(names, values, strict=True))) for values in [*plain[:2], *others, *plain[2:]]]


def pick(starts: list[Config], spec: KernelSpec, target: Target) -> Config:
    """The first config with plain loads, which take any strides, that leaves some shared memory free."""
    plain = [config for config in starts if config["loads"] == "pointer" and config["combine"] == "kernel"]
    return first_with_room(plain, spec, target, split_bytes if wide_heads(spec.d, spec.d_v) else shared_bytes)


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage."""
    return expected_facts(config, spec, target, shared=split_bytes(config, spec, target), beside=72)


FAMILY = Family(
    name="flash_decode",
    folder="decode",
    axes=AXES,
    constraints=CONSTRAINTS,
    largest=WIDEST_HEAD,
    flags=(flash_fwd.FAMILY.flags - {"dropout", "packed"}) | {"latent"},
    refuses=flash_fwd.refuses,
    suits=suits,
    tried_first=tried_first,
    pick=pick,
    expected=expected,
    interpretable=True,
    layout=lambda spec, config: {
        "few_rows": few_rows(config),
        "row_splits": row_splits(config, spec.d_v),
    },
    path_axes=("combine", "loads"),
    host=DecodeHost,
)
"""Attention forward for few query rows."""
