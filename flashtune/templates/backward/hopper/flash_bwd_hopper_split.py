"""The family `flash_bwd_hopper_split`: warp-specialised attention backward for Hopper in two kernels, bit for bit repeatable.

One kernel's tiles are of keys and give dK and dV in four products, the other's are of queries and give dQ in three. Without sums in memory
no order of additions varies; for head sizes above 128, whose tiles have too few keys for such sums, two more products are cheaper.
"""

from functools import partial

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.records.results import CompileFacts
from flashtune.templates.backward.hopper.layout import DIVIDED_QUERIES, SplitLayout, divided, refusal
from flashtune.templates.family import FLAGS, Axis, Constraint, Family
from flashtune.templates.launches.hopper_backward import BackwardHopperSplitHost
from flashtune.templates.predicates import warpgroup_facts

AXES = (
    Axis(name="BLOCK_M", values=(64,), why="query rows of a block of dK and dV: more leave no registers"),
    Axis(name="BLOCK_N", values=(64, 128), why="keys of a program: 64 for each of its warpgroups, or the same 64 for both of them"),
    Axis(name="num_stages", values=(1, 2, 3), why="blocks of Q and dO in flight: latency hidden against shared memory"),
    Axis(name="DQ_BLOCK_M", values=(128, 192), why="query rows of a program of dQ, 64 for each of its warpgroups: reuse against registers"),
    Axis(name="DQ_BLOCK_N", values=(64, 128), why="keys of a block of dQ: fewer steps against registers"),
    Axis(name="DQ_num_stages", values=(1, 2, 3), why="blocks of K in flight, and of V one fewer: latency hidden against shared memory"),
    Axis(name="held_columns", values=(0, 64, 128), why="columns of K and V that stay in registers, against reads of shared memory"),
    DIVIDED_QUERIES,
)

CONSTRAINTS = (
    Constraint(
        name="packed sequences",
        holds=lambda c, s, t: not (s.packed and SplitLayout.of(s, c).divides),
        why="programs of packed sequences don't know how many tiles a sequence has",
        axes=("divided_queries",),
    ),
    Constraint(
        name="keys of a program",
        holds=lambda c, s, t: c["BLOCK_N"] == (64 if SplitLayout.of(s, c).wide else 128),
        why="a warpgroup has dK and dV of its own 64 keys where both fit its registers, else one of them for all keys",
        axes=("BLOCK_N",),
    ),
    Constraint(
        name="shared memory",
        holds=lambda c, s, t: SplitLayout.of(s, c).key_shared_bytes <= t.shared_bytes_per_block,
        why="keys, values and the stages of queries and dO live in shared memory",
        axes=("BLOCK_M", "BLOCK_N", "num_stages"),
    ),
    Constraint(
        name="registers",
        holds=lambda c, s, t: SplitLayout.of(s, c).key_registers <= 224,
        why="both scores and the sums of dK and dV live in a warpgroup's registers",
        axes=("BLOCK_M", "BLOCK_N", "held_columns"),
    ),
    Constraint(
        name="halves",
        holds=lambda c, s, t: SplitLayout.of(s, c).halved,
        why="a product's columns are a power of two, in registers, too; of a split accumulator they are the first part",
        axes=("held_columns",),
    ),
    Constraint(
        name="shared memory of dQ",
        holds=lambda c, s, t: SplitLayout.of(s, c).query_shared_bytes <= t.shared_bytes_per_block,
        why="queries, dO and the stages of keys and values live in shared memory",
        axes=("DQ_BLOCK_M", "DQ_BLOCK_N", "DQ_num_stages"),
    ),
    Constraint(
        name="registers of dQ",
        holds=lambda c, s, t: SplitLayout.of(s, c).query_registers <= SplitLayout.of(s, c).query_consumer_registers - 16,
        why="both scores and the sums of dQ live in a warpgroup's registers",
        axes=("DQ_BLOCK_M", "DQ_BLOCK_N"),
    ),
)


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """Winners on an H200 without columns in registers, then with them, and other depths and tiles."""
    keys, queries = [(64, 64, 2, 0), (64, 64, 2, 128)], [(128, 64, 2)]
    block_d = SplitLayout.of(spec, Config.of()).block_d
    if block_d == 128:
        keys, queries = [(64, 128, 2, 0), (64, 128, 2, 64)], [(128, 64, 2), (128, 128, 2)]
    elif block_d == 64:
        keys, queries = [(64, 128, 3, 0), (64, 128, 3, 64)], [(128, 128, 2), (192, 64, 3)]
    elif max(spec.d, spec.d_v) <= 192:
        # Swizzle-width tiles leave room for more blocks in flight.
        keys, queries = [(64, 64, 3, 128), (64, 64, 3, 0), (64, 64, 2, 0)], [(128, 64, 3), (128, 64, 2)]
    pairs = [(keys[0], queries[0]), (keys[1], queries[-1]), *((keys[0], one) for one in queries[1:])]
    if len(keys) > 2:
        pairs.append((keys[-1], queries[-1]))
    elif block_d == 256:
        # A bias with dropout leaves no more shared memory.
        pairs.append(((64, 64, 1, 0), queries[0]))
    names = ("BLOCK_M", "BLOCK_N", "num_stages", "held_columns")
    dq_names = ("DQ_BLOCK_M", "DQ_BLOCK_N", "DQ_num_stages")
    return [
        Config.of(dict(zip(names + dq_names, of_keys + of_queries, strict=True)), divided_queries=False) for of_keys, of_queries in pairs
    ]


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage of the kernel of dK and dV."""
    return warpgroup_facts(target, registers=168, shared=SplitLayout.of(spec, config).key_shared_bytes)


FAMILY = Family(
    name="flash_bwd_hopper_split",
    folder="backward/hopper",
    direction="bwd",
    axes=AXES,
    constraints=CONSTRAINTS,
    flags=FLAGS,
    refuses=partial(refusal, "flash_bwd_hopper_split", 256),
    tried_first=tried_first,
    expected=expected,
    interpretable=False,
    layout=SplitLayout.of,
    resized=divided,
    path_axes=("BLOCK_M", "num_stages", "held_columns", "DQ_BLOCK_M", "DQ_BLOCK_N", "DQ_num_stages", "divided_queries"),
    host=BackwardHopperSplitHost,
    uncompilable=lambda spec, config: SplitLayout.of(spec, config).uncompilable,
)
"""Attention backward for Hopper in two kernels."""
