"""Kernel options of PyTorch's FlexAttention that a search tunes and a database may hold: their names, values and constraints."""

from collections.abc import Mapping, Sequence

from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.words import shown

BLOCKS, WARPS, STAGES = (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4, 5)

FORWARD: Mapping[str, tuple[int, ...]] = {
    "fwd_BLOCK_M": BLOCKS,
    "fwd_BLOCK_N": BLOCKS,
    "fwd_num_warps": WARPS,
    "fwd_num_stages": STAGES,
}
"""Options of the forward kernel: a tile's queries and keys, warps of a program, stages of the software pipeline."""

BACKWARD: Mapping[str, tuple[int, ...]] = {
    "bwd_BLOCK_M1": BLOCKS,
    "bwd_BLOCK_N1": BLOCKS,
    "bwd_BLOCK_M2": BLOCKS,
    "bwd_BLOCK_N2": BLOCKS,
    "bwd_num_warps": WARPS,
    "bwd_num_stages": STAGES,
}
"""Options of the backward kernel: tiles of dK and dV (N1 keys, M1 queries at a time) and of dQ (M2 queries, N2 keys at a time)."""

PARTS: Mapping[str, Mapping[str, tuple[int, ...]]] = {"fwd": FORWARD, "bwd": BACKWARD}
"""Options by kernel. Those of one kernel belong together: constraints join them, and PyTorch's defaults for the others differ by GPU."""

_DIVIDES = (("bwd_BLOCK_M1", "bwd_BLOCK_N1"), ("bwd_BLOCK_N2", "bwd_BLOCK_M2"))
"""Pairs of which the first has to divide the second, as PyTorch's kernel asserts."""

_OF_MASK = {0: ("fwd_BLOCK_M", "bwd_BLOCK_M1", "bwd_BLOCK_M2"), 1: ("fwd_BLOCK_N", "bwd_BLOCK_N1", "bwd_BLOCK_N2")}
"""Options that have to divide the queries (0) and keys (1) of a mask's blocks: PyTorch's backward doesn't check it."""

SHORTEST = 128
"""Queries of a call from which on these kernels serve: fewer have a kernel of their own."""


def refusal(values: Mapping[str, object]) -> str | None:
    """Reason why these aren't options that a search would store, to follow the name of a column; None where they are."""
    known = {**FORWARD, **BACKWARD}
    for name, value in values.items():
        if name not in known:
            return f"has {shown(name)}, which is no tuned option of FlexAttention"
        if type(value) is not int or value not in known[name]:
            return f"has {name}={shown(value)}, not one of {', '.join(map(str, known[name]))}"
    for which, axes in PARTS.items():
        if (missing := [name for name in axes if name not in values]) and len(missing) < len(axes):
            return f"lacks {missing[0]}, beside other options of FlexAttention's {which} kernel"
    for small, large in _DIVIDES:
        if small in values and int(str(values[large])) % int(str(values[small])):
            return f"has {small}={values[small]}, which doesn't divide {large}={values[large]}"
    return None


def part(config: Config, which: str) -> dict[str, int]:
    """The options of one kernel (`fwd` or `bwd`) of a config; empty where it has none."""
    return {name: config.number(name) for name in config if name in PARTS[which]}


def fits(options: Mapping[str, int], block_size: Sequence[int]) -> bool:
    """True where these options suit a mask with blocks of this many queries and keys."""
    return all(block_size[side] % options.get(name, 1) == 0 for side, names in _OF_MASK.items() for name in names)


def extent(problem: Problem) -> tuple[int, float]:
    """Keys of one batch as FlexAttention sees a problem, all packed sequences together, and the share of pairs that are visible."""
    together = 1 if problem.lengths is None else problem.batch
    return problem.n_kv * together, max(1, problem.visible_pairs()) / (problem.n_q * problem.n_kv * together)
