"""The family `flash_paged`: attention forward over paged keys and values, for decoding steps and chunks of prompts; for every GPU."""

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import WIDEST_HEAD, Problem, padded, wide_heads
from flashtune.templates.decode import flash_decode
from flashtune.templates.family import Axis, Family, constraint
from flashtune.templates.forward import flash_fwd
from flashtune.templates.launches.paged import COMBINE_WARPS, PagedHost
from flashtune.templates.predicates import (
    first_with_room,
    has_scalar_products,
    multiplies_by_warpgroups,
    registers_fit,
    scalar_products_are_short,
    shared_bytes,
    split_bytes,
    stages_exist,
)

AXES = (
    Axis(
        name="BLOCK_M", values=(16, 32, 64, 128), why="rows of a program, heads packed in: reuse of K and V against padding and registers"
    ),
    Axis(name="BLOCK_N", values=(16, 32, 64, 128, 256), why="keys of a step: fewer steps and entries of the table against shared memory"),
    Axis(name="num_warps", values=(1, 2, 4, 8), why="warps that share a tile: registers a thread against waiting for each other"),
    Axis(name="num_stages", values=(1, 2, 3, 4, 5, 6), why="key blocks in flight: bandwidth used against programs that fit on an SM"),
    Axis(name="programs", values=(1, 2, 3, 4, 8), why="programs to an SM that keys are split for: SMs kept busy against parts to add up"),
    Axis(
        name="unmasked", values=(False, True), why="a loop of its own for blocks that all rows see: no masks against more pipelines to fill"
    ),
)

TILE_BYTES = 16384
"""Bytes of K in a step of a decoding program over 16-bit caches: those of flash_decode's tuned records with plain loads on the H200."""

FEW_ROWS, SOME_ROWS = 16, 64
"""Rows of a tile for decoding steps, and for a few dozen rows."""


WIDE_FEW = ((16, 64, 8, 3), (16, 32, 8, 4), (16, 32, 4, 4), (16, 64, 8, 2), (16, 32, 4, 3), (16, 32, 4, 2), (16, 16, 8, 1))
WIDE_SOME = ((64, 64, 8, 2), (64, 32, 8, 3), (64, 32, 8, 2), (64, 32, 8, 1))
WIDE_SPREAD = ((32, 64, 8, 3), (32, 64, 8, 2))
"""(BLOCK_M, BLOCK_N, num_warps, num_stages) for heads beyond 256: of decoding steps, where about 72 KiB of keys are in flight; of more rows
where warpgroups multiply; and elsewhere, where warps that share rows would each keep all of their output."""


@constraint("BLOCK_M", "BLOCK_N", "num_stages")
def shared_memory_fits(config: Config, spec: KernelSpec, target: Target) -> bool:
    """K and V blocks in flight fit into shared memory"""
    return split_bytes(config, spec, target) <= target.shared_bytes_per_block


def refuses(spec: KernelSpec, target: Target) -> str | None:
    """The reason why this family can't serve `spec` on `target`, or None: limits of flash_fwd's loop, and no mask."""
    return "flash_paged has no masks" if spec.mask != "none" else flash_fwd.refuses(spec, target)


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """Tiles for many rows, for a few dozen, and for the rows of a decoding step, down to one that always fits."""
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    if wide_heads(spec.d, spec.d_v):
        some_rows = WIDE_SOME if multiplies_by_warpgroups(spec, target) else WIDE_SPREAD
        tiles = [(tile, unmasked) for unmasked in (True, False) for tile in (*some_rows, *WIDE_FEW)]
        return [Config.of(dict(zip(names, tile, strict=True)) | {"programs": 1, "unmasked": unmasked}) for tile, unmasked in tiles]
    # Addresses of a wider block of pages take too many registers.
    many = [x for x in flash_fwd.FAMILY.tried_first(spec, target) if x.number("BLOCK_N") <= 64]
    some = [Config.of(BLOCK_M=64, BLOCK_N=n, num_warps=4, num_stages=stages) for n, stages in ((64, 3), (64, 2), (32, 2))]
    columns = TILE_BYTES // (ITEMSIZE[spec.dtype] * padded(spec.d))
    sizes = [(max(32, min(n, 128)), stages) for n, stages in ((columns, 4), (columns, 3), (columns, 2))]
    few = [Config.of(BLOCK_M=16, BLOCK_N=n, num_warps=4, num_stages=stages) for n, stages in (*sizes, (32, 2), (16, 1))]
    found = [(x, True) for x in many] + [(x, False) for x in (*some, *few)]
    return [Config.of({name: x[name] for name in names} | {"programs": 1, "unmasked": unmasked}) for x, unmasked in found]


def chosen(spec: KernelSpec, target: Target, rows: int | None, *, narrow: bool = False) -> Config:
    """The default config for at most `rows` rows to a key head and sequence (queries times the query heads that share it), with caches in
    fp8 where `narrow`; None is any number of rows, so that a sequence's bits don't depend on the numbers of the others.

    Decoding steps on an H100 (D = 128, pages of 16 to 256, 53 cells) take a median of 2 % more time than by the best of 21 configs.
    With fp8 two programs share an SM, since converting takes time, and fewer blocks are in flight.
    """
    wide = wide_heads(spec.d, spec.d_v)
    many = rows is not None and rows > SOME_ROWS * (1 + wide)
    fewest = (rows is not None and rows <= FEW_ROWS) or has_scalar_products(spec, target)
    suited = [config for config in FAMILY.starts(spec, target) if config["unmasked"] == many]
    if fewest and not many:
        columns = max(64 if wide else 32, TILE_BYTES // (ITEMSIZE[spec.dtype] * padded(spec.d)))
        most = 3 if narrow else 4
        suited = [x for x in suited if x["BLOCK_M"] == FEW_ROWS and x.number("BLOCK_N") <= columns and x.number("num_stages") <= most]
    return first_with_room(suited, spec, target, split_bytes if wide else shared_bytes).replace(programs=2 if narrow else 1)


def at_sizes(problem: Problem, target: Target) -> Config:
    """The default config of a problem."""
    return chosen(problem.spec(), target, problem.longest[0] * problem.gqa_ratio)


FAMILY = Family(
    name="flash_paged",
    folder="paged",
    axes=AXES,
    constraints=(registers_fit, shared_memory_fits, stages_exist, scalar_products_are_short),
    largest=WIDEST_HEAD,
    flags=(flash_fwd.FAMILY.flags - {"dropout"}) | {"latent"},
    refuses=refuses,
    reads=lambda problem: None if problem.features.page else "flash_paged reads keys in pages, not in rows",
    tried_first=tried_first,
    pick=first_with_room,
    at_sizes=at_sizes,
    expected=flash_decode.expected,
    interpretable=True,
    layout=lambda spec, config: {"row_splits": max(1, min(1024 * COMBINE_WARPS // padded(spec.d_v), 64))},
    path_axes=("unmasked",),
    host=PagedHost,
)
"""Attention forward over paged keys and values."""
