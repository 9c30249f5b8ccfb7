"""Paged caches, decoding and chunks of prompts, beside our dense and packed kernels, varlen_attn and FlashAttention-4; candidate configs.

Times are wall times until the GPU is done, the host's part among them, of calls back to back in turns; `host` is the host's part alone.
Tables are shuffled, lengths equal. Rates count the keys and values once; `tokens` are new tokens a second.
"""

import functools
import inspect
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.shared import turns
from benchmarks.shared.environment import argument_parser, numbers_of
from benchmarks.shared.peers import runnable
from flashtune import dispatch
from flashtune.core.problems.config import Config
from flashtune.dispatch.call.parse import Options
from flashtune.dispatch.call.sequences import Packed
from flashtune.dispatch.rows import packed, paged
from flashtune.dispatch.rows import read as packed_read
from flashtune.dispatch.state import context
from flashtune.templates.paged import flash_paged

ROUNDS, ROUND_S = 9, 0.01
"""Rounds of a cell, and about how long each way takes in one."""

NAMES = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "programs", "unmasked")

STEPS = (
    *((16, 32, 4, stages, programs, False) for stages in (3, 5) for programs in (2, 3)),
    *((16, 64, 4, stages, programs, False) for stages in (2, 3, 4) for programs in (1, 2, 3)),
    *((16, 128, warps, 3, programs, False) for warps in (4, 8) for programs in (1, 2)),
    (16, 128, 4, 2, 2, False), (16, 64, 2, 3, 3, False), (64, 64, 4, 3, 2, False), (64, 128, 4, 3, 1, False),
)  # fmt: skip
"""Candidate configs for decoding."""

CHUNKS = (
    *((128, 64, 8, stages, 1, unmasked) for stages in (2, 3) for unmasked in (False, True)),
    (128, 128, 8, 2, 1, True), (64, 64, 4, 3, 2, True), (64, 64, 4, 2, 2, True), (64, 128, 4, 2, 1, True), (128, 32, 8, 3, 1, True),
)  # fmt: skip
"""Candidate configs for chunks of prompts."""

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class Cell:
    """Tensors of one cell: sequences of equal length, `rows` queries at the end of each."""

    def __init__(self, sequences: int, rows: int, keys: int, heads: int, kv_heads: int, d: int, page: int, cache: str) -> None:
        self.sequences, self.rows, self.keys, self.page = sequences, rows, keys, page
        self.shared = heads != kv_heads
        pages = -(-keys // page)
        blocks = sequences * pages
        self.query = torch.randn(sequences * rows, heads, d, device=turns.DEVICE, dtype=torch.bfloat16)
        made = [torch.randn(blocks, page, kv_heads, d, device=turns.DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        self.caches = [x.to(DTYPES[cache]) for x in made]
        self.table = torch.randperm(blocks, device=turns.DEVICE, dtype=torch.int32).view(sequences, pages)
        self.used = torch.full((sequences,), keys, dtype=torch.int32, device=turns.DEVICE)
        self.bounds = torch.arange(sequences + 1, dtype=torch.int32, device=turns.DEVICE) * rows
        self.bounds_k = torch.arange(sequences + 1, dtype=torch.int32, device=turns.DEVICE) * keys
        self.bytes = 2 * sequences * keys * kv_heads * d * self.caches[0].itemsize
        seen = rows * keys - rows * (rows - 1) // 2
        self.flops = 4 * sequences * seen * heads * d
        factors = torch.ones(kv_heads, device=turns.DEVICE)
        self.words = {"k_descale": factors, "v_descale": factors} if cache == "fp8" else {}

    @functools.cached_property
    def gathered(self) -> list[torch.Tensor]:
        """Keys and values in a row, (sequences, keys, Hkv, D), bf16."""
        return [x[self.table.long()].flatten(1, 2)[:, : self.keys].to(torch.bfloat16) for x in self.caches]

    @property
    def paged_words(self) -> dict[str, Any]:
        """Keywords of a paged call."""
        return self.words | {"block_table": self.table, "seqused_k": self.used, "is_causal": True, "enable_gqa": self.shared}

    def ours(self, splits: int | None = None) -> torch.Tensor:
        """Our paged call."""
        found: torch.Tensor = dispatch.attention_varlen(
            self.query, *self.caches, self.bounds, None, self.rows, self.keys, num_splits=splits, **self.paged_words
        )
        return found

    def configured(self, config: Config) -> Callable[[], Any]:
        """Our kernel with a config: its plan, launched."""
        factors = (self.words.get("k_descale"), self.words.get("v_descale"))
        given = Packed(self.query, *self.caches, self.bounds, self.bounds, self.used, None, None, self.table, *factors)  # type: ignore[arg-type]
        options = Options(0.0, True, None, self.shared, (-1, -1), 0.0, "bottom_right", False, False, False)
        parsed, numbers = packed_read.parsed(given, options, self.rows, self.keys)
        kernel = paged.kernel_of_pages(memo := context.current(), parsed, numbers, config)
        if isinstance(kernel, str):
            raise ValueError(kernel)
        plan = packed.PackedPlan(memo, kernel, numbers)
        return lambda: packed.forward(memo, parsed, numbers, 0, plan)

    def dense(self) -> Callable[[], Any]:
        """Our call on keys and values in a row: dense for one query to a sequence, else packed."""
        if self.rows == 1:
            q, (k, v) = self.query[:, :, None], (x.transpose(1, 2).contiguous() for x in self.gathered)
            return lambda: dispatch.attention(q, k, v, enable_gqa=self.shared)
        k, v = (x.flatten(0, 1) for x in self.gathered)
        words = {"is_causal": True, "enable_gqa": self.shared}
        return lambda: dispatch.attention_varlen(self.query, k, v, self.bounds, self.bounds_k, self.rows, self.keys, **words)

    def torchs(self) -> Callable[[], Any]:
        """PyTorch's paged call."""
        from torch.nn.attention.varlen import varlen_attn

        words: dict[str, Any] = {"block_table": self.table, "seqused_k": self.used, "window_size": (-1, 0)}
        if self.shared and "enable_gqa" in inspect.signature(varlen_attn).parameters:
            words["enable_gqa"] = True
        return lambda: varlen_attn(self.query, *self.caches, self.bounds, self.bounds_k, self.rows, self.keys, **words)

    def fa4(self) -> Callable[[], Any]:
        """FlashAttention-4's paged call."""
        from flash_attn.cute.interface import flash_attn_varlen_func  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

        words = {
            "cu_seqlens_q": self.bounds,
            "max_seqlen_q": self.rows,
            "seqused_k": self.used,
            "page_table": self.table,
            "causal": True,
            "num_splits": 0,
        }
        return lambda: flash_attn_varlen_func(self.query, *self.caches, **words)[0]


def ways(cell: Cell, cache: str, *, configs: bool) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Ways that ran, by name, and the reasons of the others."""
    makers: dict[str, Callable[[], Any]] = {"ours": lambda: cell.ours, "dense": cell.dense}
    makers |= {f"splits={n}": functools.partial(lambda n: lambda: cell.ours(n), n) for n in (1, 8)}
    if cache == "bf16":
        makers |= {"torch": cell.torchs, "fa4": cell.fa4}
    if configs:
        for values in STEPS if cell.rows == 1 else CHUNKS:
            config = Config.of(dict(zip(NAMES, values, strict=True)))
            flash_paged.FAMILY.validate(config)
            makers[config.label()] = functools.partial(cell.configured, config)
    with torch.no_grad():
        return runnable(makers)


def rows(of: dict[str, Any], *, configs: bool) -> dict[str, Any]:
    """Microseconds of every way of a cell, the best config, rates of ours, and its distance from the dense output."""
    cell = Cell(**of)
    with torch.no_grad():
        calls, notes = ways(cell, of["cache"], configs=configs)
        right = calls["dense"]().float().reshape(cell.query.shape)
        apart = float((calls["ours"]().float() - right).norm() / right.norm())
        if apart > 2e-2:
            raise ValueError(f"ours and dense are {apart:.3g} apart")
        one = turns.timed_in_turns(calls, rounds=1, repeats=2)
        slowest = max(statistics.median(times) for times in one.values())
        times = turns.medians(turns.timed_in_turns(calls, rounds=ROUNDS, repeats=max(1, int(ROUND_S * 1e6 / slowest))))
        hosts = {name: calls[name] for name in ("ours", "dense", "torch") if name in calls}
        host = turns.medians(turns.host_in_turns(hosts, rounds=10, repeats=24))
    plain = {name: time for name, time in times.items() if "BLOCK" not in name}
    tried = sorted((time, name) for name, time in times.items() if "BLOCK" in name)
    found = (
        of | plain | {"host": host, "apart": apart, "best config": tried[0] if tried else None, "configs": dict((n, t) for t, n in tried)}
    )
    found |= {"GB/s": cell.bytes / times["ours"] / 1e3, "tflops": cell.flops / times["ours"] / 1e6}
    found |= {"tokens": len(cell.query) / times["ours"] * 1e6, "notes": notes}
    return found


def main() -> None:
    """Time decoding and chunks over page sizes, groups, lengths and types of caches."""
    parser = argument_parser(__doc__)
    parser.add_argument("--d", type=numbers_of, default=[128], help="head sizes, with commas between them")
    parser.add_argument("--page", type=numbers_of, default=[16, 64, 256], help="keys of a page, with commas between them")
    parser.add_argument("--group", type=numbers_of, default=[4, 8], help="query heads of a key head, with commas between them")
    parser.add_argument("--kv-heads", type=int, default=8, help="key heads (default: %(default)s)")
    parser.add_argument("--keys", type=numbers_of, default=[2048, 32768], help="keys of a sequence, with commas between them")
    parser.add_argument("--sequences", type=numbers_of, default=[1, 16, 64], help="sequences, with commas between them")
    parser.add_argument("--chunk", type=numbers_of, default=[1, 512], help="queries of a sequence: 1 decodes; with commas between them")
    parser.add_argument("--cache", choices=DTYPES, nargs="+", default=list(DTYPES), help="types of caches")
    parser.add_argument("--no-configs", action="store_true", help="time the default config alone")
    given = parser.parse_args()

    def cells(chunk: int) -> Iterator[dict[str, Any]]:
        lists = (given.d, given.group, given.sequences, given.keys, given.page, given.cache)
        for d, group, sequences, keys, page, cache in itertools.product(*lists):
            of = {"sequences": sequences, "rows": chunk, "keys": keys, "heads": group * given.kv_heads, "kv_heads": given.kv_heads}
            of |= {"d": d, "page": page, "cache": cache}
            yield from turns.guarded(of, functools.partial(rows, of, configs=not given.no_configs), limit_s=240.0)

    turns.report("paged", {f"{chunk} queries": functools.partial(cells, chunk) for chunk in given.chunk})
