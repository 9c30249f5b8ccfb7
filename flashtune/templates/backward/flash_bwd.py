"""The family `flash_bwd`: attention backward with plain pointers, for every GPU that Triton compiles for, bit for bit repeatable."""

import functools
from collections.abc import Callable

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import padded
from flashtune.core.records.results import CompileFacts
from flashtune.templates.family import Axis, Family, constraint
from flashtune.templates.launches.backward import BackwardHost
from flashtune.templates.mods.known import trains
from flashtune.templates.predicates import capped_facts, has_scalar_products

AXES = (
    Axis(name="BLOCK_M", values=(16, 32, 64, 128), why="query rows of a step of dK and dV: larger products against registers"),
    Axis(name="BLOCK_N", values=(16, 32, 64, 128), why="key rows of a program of dK and dV: reuse of Q and dO against registers"),
    Axis(name="num_warps", values=(4, 8), why="warps that share a tile of keys: registers a row against programs in flight"),
    Axis(name="num_stages", values=(1, 2, 3), why="blocks of Q and dO in flight: latency hidden against shared memory"),
    Axis(name="DQ_BLOCK_M", values=(16, 32, 64, 128), why="query rows of a program of dQ: reuse of K and V against registers"),
    Axis(name="DQ_BLOCK_N", values=(16, 32, 64, 128), why="key rows of a step of dQ: larger products against registers"),
    Axis(name="DQ_num_warps", values=(4, 8), why="warps that share a tile of queries"),
    Axis(name="DQ_num_stages", values=(1, 2, 3), why="blocks of K and V in flight"),
    Axis(name="ORDER", values=("rows", "longest_first"), why="the tiles of a head side by side, for L2, or a triangle's long ones first"),
)


def key_config(config: Config) -> Config:
    """The axes of the kernel of dK and dV, by the names that all families use."""
    return Config.of({name: config[name] for name in _TILE})


def query_config(config: Config) -> Config:
    """The axes of the kernel of dQ, by the names that all families use."""
    return Config.of({name: config[f"DQ_{name}"] for name in _TILE})


_TILE = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")


def _reads_shared(target: Target) -> bool:
    """True if products read operands from shared memory; others copy them to registers first."""
    return target.capability is not None and 90 <= target.capability < 120


def key_registers(config: Config, spec: KernelSpec, target: Target) -> float:
    """Registers per thread of the kernel of dK and dV: both score tiles, one again as an operand, both sums, and K and V."""
    return _registers(
        config, spec, target, stays=config.number("BLOCK_N"), passes=config.number("BLOCK_M"), sums=padded(spec.d) + padded(spec.d_v)
    )


def query_registers(config: Config, spec: KernelSpec, target: Target) -> float:
    """Registers per thread of the kernel of dQ, with its one sum, Q and dO; takes `query_config`."""
    return _registers(config, spec, target, stays=config.number("BLOCK_M"), passes=config.number("BLOCK_N"), sums=padded(spec.d))


def _registers(config: Config, spec: KernelSpec, target: Target, *, stays: int, passes: int, sums: int) -> float:
    words = ITEMSIZE[spec.dtype] / 4
    in_registers = 0.0 if _reads_shared(target) else (padded(spec.d) + padded(spec.d_v)) * words
    return stays / (config.number("num_warps") * target.warp_size) * (passes * (2 + words) + sums + in_registers)


def key_shared_bytes(config: Config, spec: KernelSpec, target: Target) -> int:
    """Estimated bytes of shared memory of the kernel of dK and dV: K and V, blocks of Q and dO in flight, and dS."""
    return _shared_bytes(config, spec, target, stays=config.number("BLOCK_N"), passes=config.number("BLOCK_M"))


def query_shared_bytes(config: Config, spec: KernelSpec, target: Target) -> int:
    """Estimated bytes of shared memory of the kernel of dQ: Q and dO, and blocks of K and V in flight; takes `query_config`."""
    return _shared_bytes(config, spec, target, stays=config.number("BLOCK_M"), passes=config.number("BLOCK_N"))


def _shared_bytes(config: Config, spec: KernelSpec, target: Target, *, stays: int, passes: int) -> int:
    row, scores = (padded(spec.d) + padded(spec.d_v)) * ITEMSIZE[spec.dtype], stays * passes * ITEMSIZE[spec.dtype]
    stages = config.number("num_stages")
    if _reads_shared(target):
        # TF32 operands are read in one order only, so both streamed ones are stored transposed, too.
        return (stays + (stages + spec.tf32) * passes) * row
    if target.vendor == "amd":
        # The resident tiles pass through shared memory before the loop.
        return max(stays * max(padded(spec.d), padded(spec.d_v)) * ITEMSIZE[spec.dtype], max(1, stages - 1) * passes * row + scores)
    # The current blocks are in registers, and scores change their layout between products.
    return (stays + max(1, stages - 1) * passes) * row + (scores if stages > 1 else 2 * scores)


def _of_both(holds: Callable[[Config, KernelSpec, Target, bool], bool]) -> Callable[[Config, KernelSpec, Target], bool]:
    """A predicate over configs from one over a kernel's axes: True where it holds for both kernels. Its last argument is True for dQ's."""

    @functools.wraps(holds)
    def of_both(config: Config, spec: KernelSpec, target: Target) -> bool:
        return holds(key_config(config), spec, target, False) and holds(query_config(config), spec, target, True)

    return of_both


@constraint()
@_of_both
def warps_own_rows(config: Config, spec: KernelSpec, target: Target, of_queries: bool) -> bool:
    """each warp takes 16 to 64 rows of its tile, or 8 of large heads"""
    row_bytes = max(padded(spec.d), padded(spec.d_v)) * ITEMSIZE[spec.dtype]
    fewest = 4 if has_scalar_products(spec, target) else 8 if row_bytes > 256 else 16
    return fewest <= config.number("BLOCK_M" if of_queries else "BLOCK_N") // config.number("num_warps") <= 64


@constraint()
@_of_both
def registers_fit(config: Config, spec: KernelSpec, target: Target, of_queries: bool) -> bool:
    """both score tiles and the sums fit into a thread's registers"""
    registers = (query_registers if of_queries else key_registers)(config, spec, target)
    # CDNA's accumulation registers double a thread's; on Hopper addresses take more.
    return registers <= (448 if target.vendor == "amd" else 200 if _reads_shared(target) else 232)


@constraint()
@_of_both
def shared_memory_fits(config: Config, spec: KernelSpec, target: Target, of_queries: bool) -> bool:
    """resident tiles and blocks in flight fit into shared memory"""
    return (query_shared_bytes if of_queries else key_shared_bytes)(config, spec, target) <= target.shared_bytes_per_block


@constraint()
@_of_both
def stages_exist(config: Config, spec: KernelSpec, target: Target, of_queries: bool) -> bool:
    """AMD pipelines two stages at most"""
    return target.vendor == "nvidia" or config.number("num_stages") <= 2


@constraint()
@_of_both
def narrow_block_is_needed(config: Config, spec: KernelSpec, target: Target, of_queries: bool) -> bool:
    """16 rows a step waste the tensor cores where 32 fit"""
    passes = config.number("BLOCK_N" if of_queries else "BLOCK_M")
    return passes >= 32 or spec.dtype == "fp32" or max(padded(spec.d), padded(spec.d_v)) > 128


@constraint()
@_of_both
def dropout_block_is_whole(config: Config, spec: KernelSpec, target: Target, of_queries: bool) -> bool:
    """dropout's counters come in groups of 32 columns"""
    return not spec.dropout or config.number("BLOCK_N") >= 32


@constraint()
@_of_both
def scalar_products_are_short(config: Config, spec: KernelSpec, target: Target, of_queries: bool) -> bool:
    """IEEE fp32 products are unrolled multiply-adds: with many of them a thread, registers and compile time explode"""
    if not has_scalar_products(spec, target):
        return True
    products = config.number("BLOCK_M") * config.number("BLOCK_N") * max(padded(spec.d), padded(spec.d_v))
    return products <= 1024 * config.number("num_warps") * target.warp_size


@constraint()
def tile_of_scores_fits(config: Config, spec: KernelSpec, target: Target) -> bool:
    """sums and operands of the gradient of a bias, of slopes or of captured tensors fit beside each other"""
    if not (spec.dbias or spec.dslopes or trains(spec)):
        return True
    queries = query_config(config)
    block_m, block_n, stages = (queries.number(name) for name in ("BLOCK_M", "BLOCK_N", "num_stages"))
    size = ITEMSIZE[spec.dtype]
    registers = block_m * block_n / (queries.number("num_warps") * target.warp_size) * (3 + size / 4)
    # No tile stays from step to step: a stage has Q, dO, K and V.
    stage = (block_m + block_n) * (padded(spec.d) + padded(spec.d_v)) * size * (1 + spec.tf32)
    limit = 448 if target.vendor == "amd" else 200
    return registers <= limit and stages * stage + block_m * block_n * size <= target.shared_bytes_per_block


@constraint()
def order_matters(config: Config, spec: KernelSpec, target: Target) -> bool:
    """only a causal triangle has long tiles to begin with"""
    return config["ORDER"] == "rows" or spec.causal


CONSTRAINTS = (
    warps_own_rows,
    registers_fit,
    shared_memory_fits,
    stages_exist,
    narrow_block_is_needed,
    dropout_block_is_whole,
    scalar_products_are_short,
    tile_of_scores_fits,
    order_matters,
)


def refuses(spec: KernelSpec, target: Target) -> str | None:
    """The reason why this family can't serve `spec` on `target`, or None."""
    if not target.compilable:
        return f"Triton doesn't compile for {target.name}"
    if spec.dtype == "fp8":
        return "fp8 inputs have no gradients: train in bf16 or fp16"
    if spec.packed and (spec.mask != "none" or spec.dslopes):
        return "flash_bwd takes no mask and no gradient of slopes beside packed sequences"
    if spec.tf32 and target.vendor == "amd" and target.arch != "gfx942":
        return f"{target.name} has no TF32 products"
    if not FAMILY.starts(spec, target):
        return f"no tile of flash_bwd fits into {target.name}'s registers and shared memory at the head sizes {spec.d} and {spec.d_v}"
    return None


Tile = tuple[int, int, int, int]


def _tiles(spec: KernelSpec, target: Target) -> list[tuple[Tile, Tile]]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages) of dK and dV and of dQ, best known first, down to some that always fit."""
    tiny: list[tuple[Tile, Tile]] = [((16, 32, 8, 1), (32, 16, 8, 1)), ((16, 32, 4, 1), (16, 32, 4, 1)), ((16, 32, 8, 1), (32, 32, 8, 1))]
    tiny += [((16, 16, 4, 1), (16, 16, 4, 1)), ((16, 32, 4, 1), (32, 32, 4, 1))]
    if has_scalar_products(spec, target):
        return [((16, 64, 8, 1), (64, 16, 8, 1)), ((16, 32, 4, 1), (32, 16, 4, 1)), *tiny]
    small = [((32, 64, 4, 2), (64, 32, 4, 2)), ((32, 64, 4, 1), (64, 32, 4, 1))]
    last = [((16, 64, 4, 1), (64, 16, 4, 1)), ((32, 128, 8, 1), (128, 32, 8, 1)), ((16, 128, 8, 1), (128, 16, 8, 1))]
    if max(spec.d, spec.d_v) > 128:
        return [((32, 64, 8, 2), (64, 32, 8, 2)), ((32, 64, 8, 1), (64, 32, 8, 1)), ((32, 32, 4, 1), (32, 32, 4, 1)), *small, *last, *tiny]
    large: list[tuple[Tile, Tile]] = [
        ((64, 128, 8, 2), (128, 64, 8, 2)),
        ((32, 128, 8, 3), (128, 32, 8, 3)),
        ((32, 128, 4, 2), (128, 32, 4, 2)),
    ]
    return [*large, ((64, 64, 4, 2), (64, 64, 4, 2)), *small, *last, *tiny]


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """Tiles of the field's backward kernels."""
    order = "longest_first" if spec.causal else "rows"
    return [
        Config.of(
            dict(zip(_TILE, keys, strict=True)) | {f"DQ_{name}": value for name, value in zip(_TILE, queries, strict=True)}, ORDER=order
        )
        for keys, queries in _tiles(spec, target)
    ]


def pick(starts: list[Config], spec: KernelSpec, target: Target) -> Config:
    """The first config that leaves a quarter of the shared memory free, as its estimate is rough."""

    def fits(config: Config) -> bool:
        keys, queries = key_config(config), query_config(config)
        most = max(key_shared_bytes(keys, spec, target), query_shared_bytes(queries, spec, target))
        return most <= 0.75 * target.shared_bytes_per_block

    return next(filter(fits, starts), starts[-1])


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage of the kernel of dK and dV, which is the larger one."""
    keys = key_config(config)
    return _expected(keys, target, key_registers(keys, spec, target), key_shared_bytes(keys, spec, target))


def expected_of_queries(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage of the kernel of dQ."""
    queries = query_config(config)
    return _expected(queries, target, query_registers(queries, spec, target), query_shared_bytes(queries, spec, target))


def _expected(config: Config, target: Target, registers: float, shared: int) -> CompileFacts:
    # 70 for addresses and early loads, as compiled from the published tiles.
    return capped_facts(config, target, needed=registers + 70, shared=shared)


FAMILY = Family(
    name="flash_bwd",
    folder="backward",
    direction="bwd",
    axes=AXES,
    constraints=CONSTRAINTS,
    functions=True,
    refuses=refuses,
    tried_first=tried_first,
    pick=pick,
    expected=expected,
    interpretable=True,
    path_axes=("ORDER",),
    host=BackwardHost,
)
"""Attention backward with plain pointers."""
