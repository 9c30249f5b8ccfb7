"""The family `flash_bwd_hopper_wide`: attention backward for Hopper of heads beyond 256, bit for bit repeatable, in five products.

Gradients of such heads have no room in registers beside scores. So probabilities and gradients of scores go through memory, a bounded chunk
at a time, and their products are plain matrix products with large tiles.
"""

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.problem import MAX_HEAD_DIM, Problem, wide_heads
from flashtune.core.records.results import CompileFacts
from flashtune.templates.backward.hopper.wide import WideBackwardLayout
from flashtune.templates.family import FLAGS, Axis, Family
from flashtune.templates.launches.hopper_backward_wide import WideBackwardHost
from flashtune.templates.predicates import plain, warpgroup_facts

LARGEST_HEAD = 512
"""Largest head size: that of forwards."""

LEAST_QUERIES = 1024
"""Queries and keys from which calls without a record run here."""

AXES = (
    Axis(name="BLOCK_M", values=(128,), why="queries of a tile of scores, 64 for each warpgroup"),
    Axis(name="BLOCK_N", values=(128,), why="keys of a tile of scores: both scores fit a warpgroup's registers"),
    Axis(name="COLUMNS", values=(128, 256), why="columns of a tile of gradients: reuse against padding"),
)


def refuses(spec: KernelSpec, target: Target) -> str | None:
    """The reason why this family can't serve a spec on a target, or None where it can."""
    if not target.is_hopper:
        return f"flash_bwd_hopper_wide needs compute capability 9.0, which {target.name} is not"
    if not wide_heads(spec.d, spec.d_v):
        return f"flash_bwd_hopper_wide takes heads beyond {MAX_HEAD_DIM}, not {spec.d} and {spec.d_v}"
    if spec.dtype not in ("fp16", "bf16"):
        return f"flash_bwd_hopper_wide takes fp16 and bf16, not {spec.dtype}"
    if spec.mask == "bias":
        return "flash_bwd_hopper_wide takes no bias"
    if spec.d % 8 or spec.d_v % 8:
        return f"flash_bwd_hopper_wide needs head sizes that are multiples of 8 (TMA), not {spec.d} and {spec.d_v}"
    return None


def outruns_torch(problem: Problem, target: Target) -> str | None:
    """The run on an H200 in which gradients of D = 512 took at most 0.15 of PyTorch's time, for 1,000 to 4,096 queries, causal and not. At
    D = 320 and 384 the kernels reach 0.7 to 0.9 of their rate at 512, and PyTorch was timed forward alone."""
    return "2026-11-30-h200-libraries" if plain(problem, LEAST_QUERIES) else None


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """Tiles of gradients with the least padding first, and the wider ones among equals."""

    def padding(columns: int) -> tuple[int, int]:
        return sum(-head % columns for head in (spec.d, spec.d_v)), -columns

    return [Config.of(BLOCK_M=128, BLOCK_N=128, COLUMNS=columns) for columns in sorted((256, 128), key=padding)]


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage of the kernel of scores."""
    return warpgroup_facts(target, registers=168, shared=WideBackwardLayout.of(spec, config).shared_bytes)


FAMILY = Family(
    name="flash_bwd_hopper_wide",
    folder="backward/hopper",
    direction="bwd",
    axes=AXES,
    constraints=(),
    largest=LARGEST_HEAD,
    flags=FLAGS - {"packed", "dbias", "dslopes"},
    refuses=refuses,
    outruns_torch=outruns_torch,
    tried_first=tried_first,
    expected=expected,
    interpretable=False,
    layout=WideBackwardLayout.of,
    path_axes=("COLUMNS",),
    host=WideBackwardHost,
)
"""Attention backward for Hopper of heads beyond 256."""
