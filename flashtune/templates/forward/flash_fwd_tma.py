"""The family `flash_fwd_tma`: attention forward whose tiles come through Hopper's bulk tensor copy engine, for sm_90 and later."""

from functools import partial

from flashtune.core.config import Config, KernelSpec, Value
from flashtune.core.results import CompileFacts
from flashtune.core.target import Target
from flashtune.templates.family import Axis, Family
from flashtune.templates.launches.pointers import PointerHost
from flashtune.templates.predicates import (
    ORDERS,
    dropout_block_is_whole,
    expected_facts,
    first_with_room,
    has_scalar_products,
    order_matters,
    register_cap_helps,
    registers_fit,
    shared_bytes,
    shared_memory_fits,
    warps_own_rows,
)

AXES = (
    Axis(name="BLOCK_M", values=(64, 128, 256), why="query rows of a program: reuse of K and V against registers and waves"),
    Axis(name="BLOCK_N", values=(32, 64, 128, 256), why="key rows of a step: fewer, larger products against registers and shared memory"),
    Axis(name="num_warps", values=(4, 8), why="one or two warpgroups to a query tile"),
    Axis(name="num_stages", values=(1, 2, 3, 4), why="key blocks in flight: latency hidden against shared memory"),
    Axis(name="maxnreg", values=(0, 128, 168), why="a cap on registers a thread (0: the compiler's choice): occupancy against spills"),
    Axis(name="ORDER", values=ORDERS, why="which tiles run first: balance of a triangle's rows, and whose K and V stay in L2"),
)

CONSTRAINTS = (
    warps_own_rows,
    registers_fit,
    shared_memory_fits,
    register_cap_helps,
    order_matters,
    dropout_block_is_whole,
)


def supports(spec: KernelSpec, target: Target) -> str | None:
    """The reason why this family can't serve `spec` on `target`, or None."""
    if not target.compilable:
        return f"Triton doesn't compile for {target.name}"
    if not target.has_tma:
        return f"{target.name} has no bulk tensor copy engine (TMA): it came with compute capability 9.0"
    if spec.direction != "fwd":
        return f"flash_fwd_tma computes the forward pass, not {spec.direction!r}"
    if has_scalar_products(spec, target):
        return "IEEE fp32 products need no tiles in shared memory for tensor cores: flash_fwd serves them"
    return None


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """The field's published tiles."""
    tiles = [
        (128, 128, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 4, 2),
        (64, 128, 4, 2),
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (64, 32, 4, 1),
    ]
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    others: dict[str, Value] = {"maxnreg": 0, "ORDER": "longest_first" if spec.causal else "rows"}
    return [Config.of(others | dict(zip(names, tile, strict=True))) for tile in tiles]


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage."""
    return expected_facts(config, spec, target, shared=shared_bytes(config, spec, target), beside=28)


FAMILY = Family(
    name="flash_fwd_tma",
    folder="forward",
    axes=AXES,
    constraints=CONSTRAINTS,
    supports=supports,
    tried_first=tried_first,
    pick=first_with_room,
    expected=expected,
    interpretable=True,
    path_axes=("ORDER",),
    host=partial(PointerHost, described="qkv"),
)
"""Attention forward with TMA descriptors."""
