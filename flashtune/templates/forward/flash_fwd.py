"""The family `flash_fwd`: attention forward with plain pointers, for every GPU that Triton compiles for."""

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec, Value
from flashtune.core.problems.problem import MAX_HEAD_DIM, wide_heads
from flashtune.core.records.results import CompileFacts
from flashtune.templates.family import Axis, Family
from flashtune.templates.launches.pointers import PointerHost
from flashtune.templates.predicates import (
    ORDERS,
    dropout_block_is_whole,
    early_v_matters,
    expected_facts,
    first_with_room,
    has_scalar_products,
    multiplies_by_warpgroups,
    narrow_block_is_needed,
    order_matters,
    register_cap_helps,
    registers_fit,
    scalar_products_are_short,
    shared_bytes,
    shared_memory_fits,
    stages_exist,
    warps_own_rows,
)

AXES = (
    Axis(name="BLOCK_M", values=(16, 32, 64, 128, 256), why="query rows of a program: reuse of K and V against registers and waves"),
    Axis(name="BLOCK_N", values=(16, 32, 64, 128), why="key rows of a step: fewer, larger products against registers and shared memory"),
    Axis(name="num_warps", values=(1, 2, 4, 8), why="warps that share a query tile: registers a row against programs in flight"),
    Axis(name="num_stages", values=(1, 2, 3, 4), why="key blocks in flight: latency hidden against shared memory"),
    Axis(name="maxnreg", values=(0, 128, 168), why="a cap on registers a thread (0: the compiler's choice): occupancy against spills"),
    Axis(name="ORDER", values=ORDERS, why="which tiles run first: balance of a triangle's rows, and whose K and V stay in L2"),
    Axis(name="LOAD_V_EARLY", values=(False, True), why="V before the softmax: its latency hidden, its registers occupied longer"),
)

CONSTRAINTS = (
    warps_own_rows,
    registers_fit,
    shared_memory_fits,
    register_cap_helps,
    stages_exist,
    order_matters,
    early_v_matters,
    narrow_block_is_needed,
    dropout_block_is_whole,
    scalar_products_are_short,
)


def refuses(spec: KernelSpec, target: Target) -> str | None:
    """The reason why this family can't serve `spec` on `target`, or None."""
    if not target.compilable:
        return f"Triton doesn't compile for {target.name}"
    if spec.dtype == "fp8" and not target.has_e4m3:
        return f"{target.name} has no e4m3 (fp8): it came with compute capability 8.9 and gfx950"
    if spec.packed and spec.mask != "none":
        return "flash_fwd takes no mask beside packed sequences"
    if wide_heads(spec.d, spec.d_v) and target.vendor != "nvidia":
        return f"{target.name} has no tiles for heads beyond {MAX_HEAD_DIM}: they are of NVIDIA's tensor cores"
    if spec.tf32 and target.vendor == "amd" and target.arch != "gfx942":
        return f"{target.name} has no TF32 products"
    return None


def _tiles(spec: KernelSpec, target: Target) -> list[tuple[int, int, int, int]]:
    """(BLOCK_M, BLOCK_N, num_warps, num_stages) by the units of the products, best known first, down to one that always fits."""
    if wide_heads(spec.d, spec.d_v):
        return _wide_tiles(spec, target)
    if has_scalar_products(spec, target):
        return [(64, 32, 8, 1), (64, 64, 8, 1), (32, 32, 4, 1), (64, 16, 4, 1), (32, 32, 8, 1), (32, 16, 4, 1)]
    small = [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 2, 1), (16, 32, 1, 1), (64, 16, 4, 1)]
    if target.vendor == "amd":
        return [(128, 64, 4, 2), (128, 64, 4, 1), (128, 32, 4, 2), *small]
    if target.capability is not None and 90 <= target.capability < 120:
        return [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 2), *small]
    if spec.d_v <= 64:
        return [(128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 32, 4, 3), *small]
    return [(128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 4, 3), (128, 32, 8, 2), *small]


def _wide_tiles(spec: KernelSpec, target: Target) -> list[tuple[int, int, int, int]]:
    """The same for heads beyond 256, whose output eight warps keep by columns: in tiles of more keys than rows where others' warps would
    have all of it each."""
    if has_scalar_products(spec, target):
        return [(16, 16, 8, 1), (16, 16, 4, 1)]
    few = [(32, 64, 8, 2), (32, 64, 8, 1), (16, 64, 8, 1), (16, 32, 4, 2), (16, 32, 4, 1)]
    return [(64, 32, 8, 2), (64, 32, 8, 1), *few] if multiplies_by_warpgroups(spec, target) else few


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """The field's published tiles."""
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    others: dict[str, Value] = {"maxnreg": 0, "ORDER": "longest_first" if spec.causal else "rows", "LOAD_V_EARLY": False}
    return [Config.of(others | dict(zip(names, tile, strict=True))) for tile in _tiles(spec, target)]


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage."""
    return expected_facts(config, spec, target, shared=shared_bytes(config, spec, target), beside=56)


FAMILY = Family(
    name="flash_fwd",
    folder="forward",
    axes=AXES,
    constraints=CONSTRAINTS,
    largest=512,
    functions=True,
    refuses=refuses,
    tried_first=tried_first,
    pick=first_with_room,
    expected=expected,
    interpretable=True,
    path_axes=("ORDER", "LOAD_V_EARLY"),
    host=PointerHost,
)
"""Attention forward with plain pointers."""
