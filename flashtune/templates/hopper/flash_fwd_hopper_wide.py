"""`flash_fwd_hopper_wide`: the warp-specialised forward for Hopper of heads beyond 256, whose output takes two warpgroups' registers.

One computes the scores of 64 rows, their softmax and the last columns of the output; it hands its probs to the other, which has the first
ones. Keys come in parts of columns, through a ring, so that copies of a block begin while products of the one before still read.
"""

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.problem import MAX_HEAD_DIM, Problem, wide_heads
from flashtune.core.records.results import CompileFacts
from flashtune.templates.family import FLAGS, Axis, Constraint, Family
from flashtune.templates.hopper import flash_fwd_hopper
from flashtune.templates.hopper.wide import WideLayout
from flashtune.templates.launches.hopper_forward import WideForwardHost
from flashtune.templates.predicates import plain, warpgroup_facts

LARGEST_HEAD = 512
"""Largest head size with registers for an accumulator, and memory for tiles."""

LEAST_QUERIES = 1024
"""Queries and keys from which calls without a record run here."""

LEAST_VALUES = 65
"""Smallest head size of values of which each warpgroup has a whole swizzle width."""

AXES = (
    Axis(name="BLOCK_M", values=(64,), why="query rows of a tile: two warpgroups have registers for no more"),
    Axis(name="BLOCK_N", values=(64,), why="keys of a block: queries, keys and values of more have no shared memory"),
    Axis(name="K_COLUMNS", values=(64, 128, 256), why="columns of keys that come together: early copies against barriers"),
    Axis(name="num_stages", values=(1, 2), why="value blocks in flight: latency hiding against keys in flight"),
    Axis(name="intra_wg_overlap", values=(0, 1), why="values of the block before beside the softmax of a block, against registers"),
    Axis(name="section", values=(1, 8, 32), why="heads that run side by side: balance against K/V that stay in L2"),
    Axis(
        name="rescale", values=("always", "grown"), why="rescale for a new maximum: always, or where it grew past 2^2: work against votes"
    ),
)

CONSTRAINTS = (
    Constraint(
        name="shared memory",
        holds=lambda c, s, t: WideLayout.of(s, c).shared_bytes <= t.shared_bytes_per_block,
        why="queries, a block of keys, the stages of values and probs live in shared memory",
        axes=("K_COLUMNS", "num_stages"),
    ),
    Constraint(
        name="even parts",
        holds=lambda c, s, t: WideLayout.of(s, c).part == c.number("K_COLUMNS"),
        why="parts of keys have the same number of columns",
        axes=("K_COLUMNS",),
    ),
    next(one for one in flash_fwd_hopper.CONSTRAINTS if one.name == "heads side by side"),
)


def refuses(spec: KernelSpec, target: Target) -> str | None:
    """The reason why this family can't serve a spec on a target, or None where it can."""
    if not wide_heads(spec.d, spec.d_v) or spec.d_v < LEAST_VALUES:
        return f"flash_fwd_hopper_wide takes heads beyond {MAX_HEAD_DIM}, and values from {LEAST_VALUES} on, not {spec.d} and {spec.d_v}"
    if spec.dtype not in ("fp16", "bf16") or spec.mask == "bias":
        return "flash_fwd_hopper_wide takes fp16 and bf16, and no mask of numbers"
    return flash_fwd_hopper.refuses(spec, target)


def outruns_torch(problem: Problem, target: Target) -> str | None:
    """The run on an H200 in which heads of 320 and 512 took 0.3 of PyTorch's time at most: 2,048 to 32,768 queries, one and eight query
    heads to a key head, causal and not."""
    return "2026-11-30-h200-wide-heads" if plain(problem, LEAST_QUERIES) else None


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """Winners on an H200 first: parts of 256 columns, one stage of values, products in flight beside the softmax."""
    section = 8 if spec.banded else 1
    return [
        Config.of(BLOCK_M=64, BLOCK_N=64, K_COLUMNS=columns, num_stages=stages, intra_wg_overlap=overlap, section=section, rescale=rescale)
        for rescale in ("grown", "always")
        for overlap in (1, 0)
        for columns in (256, 128, 64)
        for stages in (1, 2)
    ]


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage."""
    layout = WideLayout.of(spec, config)
    return warpgroup_facts(target, registers=layout.entry_registers, shared=layout.shared_bytes)


FAMILY = Family(
    name="flash_fwd_hopper_wide",
    folder="hopper",
    axes=AXES,
    constraints=CONSTRAINTS,
    largest=LARGEST_HEAD,
    flags=FLAGS - {"packed"},
    refuses=refuses,
    outruns_torch=outruns_torch,
    tried_first=tried_first,
    expected=expected,
    interpretable=False,
    layout=WideLayout.of,
    path_axes=("K_COLUMNS", "num_stages", "intra_wg_overlap", "rescale"),
    host=WideForwardHost,
)
"""Attention forward for Hopper of heads beyond 256."""
