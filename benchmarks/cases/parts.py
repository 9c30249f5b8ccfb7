"""Prefixes that requests share, attended in parts beside one call over pages for each request; merging beside a copy of as many bytes.

Times are wall times until the GPU is done, the host's part among them, of calls back to back in turns. In the one call each request's table
begins with the prefix's blocks. Rates of merging count what is read and written once.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.shared import turns
from benchmarks.shared.environment import argument_parser, numbers_of
from flashtune import dispatch

ROUNDS, REPEATS, PAGE = 9, 20, 16


def _of_prefix(of: dict[str, int]) -> dict[str, Any]:
    """Microseconds of a decoding step of requests over one prefix: in parts, and as one call."""
    requests, prefix, suffix, heads, kv_heads, d = (of[name] for name in ("requests", "prefix", "suffix", "heads", "kv_heads", "d"))
    first, own = prefix // PAGE, suffix // PAGE
    caches = [torch.randn(first + requests * own, PAGE, kv_heads, d, device=turns.DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    query = torch.randn(requests, heads, d, device=turns.DEVICE, dtype=torch.bfloat16)
    bounds = torch.arange(requests + 1, dtype=torch.int32, device=turns.DEVICE)
    blocks = torch.randperm(first + requests * own, device=turns.DEVICE, dtype=torch.int32)
    shared, suffixes = blocks[:first], blocks[first:].view(requests, own)
    table = torch.cat((shared.expand(requests, first), suffixes), 1).contiguous()
    of_suffix, of_all = (torch.full((requests,), count, dtype=torch.int32, device=turns.DEVICE) for count in (suffix, prefix + suffix))
    pair = caches[0], caches[1]

    def parts() -> Any:
        return dispatch.cascade(
            *(query, pair, pair, bounds, None, 1, suffix),
            prefix_table=shared,
            seqused_k=of_suffix,
            block_table=suffixes,
            enable_gqa=True,
        )

    def one() -> Any:
        return dispatch.attention_varlen(
            query, *pair, bounds, None, 1, prefix + suffix, seqused_k=of_all, block_table=table, enable_gqa=True
        )

    with torch.no_grad():
        apart = float((parts().float() - one().float()).norm() / one().float().norm())
        times = turns.medians(turns.timed_in_turns({"parts": parts, "one": one}, rounds=ROUNDS, repeats=REPEATS))
    return of | times | {"gain": times["one"] / times["parts"], "apart": apart}


def _of_merge(of: dict[str, int]) -> dict[str, Any]:
    """Microseconds and rates of merging parts, and of copying as many bytes."""
    shape = (1, of["heads"], of["n"], of["d"])
    parts = [
        (torch.randn(shape, device=turns.DEVICE, dtype=torch.bfloat16), torch.randn(shape[:-1], device=turns.DEVICE))
        for _ in range(of["parts"])
    ]
    moved = (of["parts"] + 1) * sum(x.numel() * x.element_size() for x in parts[0])
    source = torch.empty(moved // 2, dtype=torch.uint8, device=turns.DEVICE)
    goal = torch.empty_like(source)
    with torch.no_grad():
        calls = {"merge": lambda: dispatch.merge(parts), "copy": lambda: goal.copy_(source)}
        times = turns.medians(turns.timed_in_turns(calls, rounds=ROUNDS, repeats=REPEATS))
    return of | times | {"GB/s": moved / times["merge"] / 1e3, "of the copy": times["copy"] / times["merge"]}


def main() -> None:
    """Time shared prefixes over numbers of requests and lengths, and merges over numbers of parts."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=numbers_of, default=[8, 64, 256], help="requests, with commas between them")
    parser.add_argument("--prefix", type=numbers_of, default=[2048, 8192, 32768], help="keys of the prefix, with commas between them")
    parser.add_argument("--suffix", type=numbers_of, default=[256], help="keys of each suffix, with commas between them")
    parser.add_argument("--parts", type=numbers_of, default=[2, 4, 8], help="parts that are merged, with commas between them")
    given = parser.parse_args()

    def prefixes() -> Iterator[dict[str, Any]]:
        for requests, prefix, suffix in itertools.product(given.requests, given.prefix, given.suffix):
            of = {"requests": requests, "prefix": prefix, "suffix": suffix, "heads": 32, "kv_heads": 8, "d": 128}
            yield from turns.guarded(of, functools.partial(_of_prefix, of), limit_s=60.0)

    def merges() -> Iterator[dict[str, Any]]:
        for parts, d in itertools.product(given.parts, (64, 128)):
            of = {"parts": parts, "heads": 32, "n": 16384, "d": d}
            yield from turns.guarded(of, functools.partial(_of_merge, of), limit_s=60.0)

    turns.report("parts", {"prefixes": prefixes, "merges": merges})
