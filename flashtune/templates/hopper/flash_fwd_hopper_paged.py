"""`flash_fwd_hopper_paged`: the warp-specialised forward for Hopper over paged caches, for chunks of prompts that fill the GPU.

Only its producer differs from `flash_fwd_hopper`: a table says from which pages it copies the rows of a tile. It sees the tile's memory as
pieces of a page's rows and one swizzle width of columns, which products then read as ever. Copies end behind the last key, or begin with a
window's first one, by the descriptor of packed rows, so that nothing else is read; a page that may have both is left to `flash_paged`.
"""

from dataclasses import replace

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec, Value
from flashtune.core.problems.problem import Problem
from flashtune.templates.hopper import flash_fwd_hopper
from flashtune.templates.hopper.layout import tiles_of
from flashtune.templates.hopper.pages import PagedLayout
from flashtune.templates.launches.hopper_forward import LEAST_PAGE, PagedForwardHost

LARGEST_HEAD = 256
"""Largest head size with registers for an accumulator."""

FEWEST_QUERIES = 128
"""Mean number of a sequence's queries from which tiles of one head's queries are full enough: those of flash_paged hold all heads of a
key head. On an H200 (D = 128, 32 heads over 8, 8,000 keys) chunks of 64 queries ran at 0.82 to 0.94 of flash_paged's rate, of 128 queries
at 1.69."""

FEWEST_TILES = 1 / 3
"""Tiles to a multiprocessor from which keys needn't be split: on an H200 64 tiles ran at 1.28 to 1.30 of flash_paged's rate, 32 at 0.80."""


def refuses(spec: KernelSpec, target: Target) -> str | None:
    """The reason why this family can't serve `spec` on `target`, or None where it can."""
    if spec.dtype not in ("fp16", "bf16") or not spec.packed or spec.mask != "none" or max(spec.d, spec.d_v) > LARGEST_HEAD:
        return f"flash_fwd_hopper_paged takes sequences over pages in fp16 and bf16, without masks, of head sizes up to {LARGEST_HEAD}"
    return flash_fwd_hopper.refuses(spec, target)


def reads(problem: Problem) -> str | None:
    """The reason why copies can't be of a problem's pages, or None."""
    page = problem.features.page
    if page < LEAST_PAGE or page & (page - 1):
        return f"flash_fwd_hopper_paged copies pages of a power of two of keys from {LEAST_PAGE} on, not of {page}"
    return None if ends_apart(problem, page) else f"a page of {page} keys may have a window's first key and the last key of all"


def suits(problem: Problem, target: Target) -> str | None:
    """The reason why a problem's sizes are better left to flash_paged, which packs heads and splits keys; None where they aren't."""
    if problem.n_q < FEWEST_QUERIES:
        return f"fewer than {FEWEST_QUERIES} queries leave tiles of one head empty"
    tiles = tiles_of(Config.of(BLOCK_M=128), problem)
    return (
        None
        if tiles > FEWEST_TILES * target.sms
        else f"{tiles} tiles leave multiprocessors without work, between which keys are better split"
    )


def ends_apart(problem: Problem, page: int) -> bool:
    """True if no page has both a window's first key and the last key of all: a copy leaves out what is before one or behind the other."""
    left = None if problem.features.window is None else problem.features.window[0]
    return left is None or (left >= page and problem.features.alignment == "bottom_right")


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """Configs of packed forwards, with running maxima and rescales where a score exceeds all before it."""
    # Wide values have no room for two tiles of products, wide keys beside narrow values only with fewer keys a tile.
    sizes = [("chained", 128), ("chained", 64), ("loop", 64)]
    shared: dict[str, Value] = {
        "BLOCK_M": 128,
        "num_stages": 2,
        "intra_wg_overlap": 1,
        "pingpong": True,
        "section": 8 if spec.banded else 1,
    }
    shared |= {"order": "drawn", "ctas_per_sm": 1, "packed_heads": 1, "maximum": "running", "rescale": "outgrown", "v_columns": "padded"}
    return [Config.of(shared, BLOCK_N=columns, tiles=tiles) for tiles, columns in sizes]


FAMILY = replace(
    flash_fwd_hopper.FAMILY,
    name="flash_fwd_hopper_paged",
    functions=False,
    flags=flash_fwd_hopper.FAMILY.flags - {"dropout"},
    refuses=refuses,
    reads=reads,
    suits=suits,
    tried_first=tried_first,
    pick=lambda starts, spec, target: starts[0],
    layout=PagedLayout.of,
    host=PagedForwardHost,
    uncompilable=lambda spec, config: PagedLayout.of(spec, config).uncompilable,
)
"""Attention forward for Hopper over paged keys and values."""
