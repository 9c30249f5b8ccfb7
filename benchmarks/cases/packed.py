"""Packed sequences, forward and backward, beside torch's varlen_attn, FlashAttention-4, FlexAttention with a document mask and our dense.

Lengths are drawn from laws: `equal`, `uniform`, `lognormal` and `one_long` (half of all tokens in one sequence). Times are wall times until
the GPU is done, the host's part among them, of calls back to back in turns. The dense kernel runs at equal lengths alone.
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

MEAN = 1024
"""Mean length of a sequence."""

ROUNDS, ROUND_S = 7, 0.02
"""Rounds of a cell, and about how long each way takes in one."""

LAWS = ("equal", "uniform", "lognormal", "one_long")


def lengths_of(law: str, tokens: int, seed: int = 0) -> list[int]:
    """Lengths of sequences that add up to `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    count = tokens // MEAN
    if law == "equal":
        return [MEAN] * count
    if law == "one_long":
        return [tokens // 2, *lengths_of("uniform", tokens - tokens // 2, seed)]
    drawn = torch.rand(count, generator=generator) * 2 if law == "uniform" else torch.randn(count, generator=generator).exp()
    cuts = (drawn.cumsum(0) / drawn.sum() * tokens).round().long().tolist()
    return [stop - start for start, stop in itertools.pairwise([0, *cuts])]


class Cell:
    """Tensors of one cell."""

    def __init__(self, law: str, tokens: int, heads: int, kv_heads: int, d: int, causal: bool) -> None:
        self.lengths = lengths_of(law, tokens)
        self.causal, self.shared, self.law = causal, heads != kv_heads, law
        bounds = [0, *itertools.accumulate(self.lengths)]
        self.bounds = torch.tensor(bounds, dtype=torch.int32, device=turns.DEVICE)
        self.longest = max(self.lengths)
        made = [torch.randn(tokens, of, d, device=turns.DEVICE, dtype=torch.bfloat16) for of in (heads, kv_heads, kv_heads)]
        self.tensors = [x.requires_grad_() for x in made]
        self.dout = torch.randn_like(made[0])
        pairs = sum(n * (n + 1) // 2 if causal else n * n for n in self.lengths)
        self.flops = 4 * pairs * heads * d

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Positional arguments of a packed call."""
        return (*self.tensors, self.bounds, self.bounds, self.longest, self.longest)

    @property
    def window(self) -> tuple[int, int]:
        """Sides of the band, as torch takes them."""
        return -1, 0 if self.causal else -1

    def ours(self) -> torch.Tensor:
        """Our packed call."""
        found: torch.Tensor = dispatch.attention_varlen(*self.arguments, window_size=self.window, enable_gqa=self.shared)
        return found

    def torchs(self) -> torch.Tensor:
        """PyTorch's packed call."""
        from torch.nn.attention.varlen import varlen_attn

        # Earlier versions share key heads without being told.
        told = self.shared and "enable_gqa" in inspect.signature(varlen_attn).parameters
        words: dict[str, Any] = {"window_size": self.window} | ({"enable_gqa": True} if told else {})
        found: torch.Tensor = varlen_attn(*self.arguments, **words)
        return found

    def fa4(self) -> torch.Tensor:
        """FlashAttention-4's packed call."""
        from flash_attn.cute.interface import flash_attn_varlen_func  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

        words = {"cu_seqlens_q": self.bounds, "cu_seqlens_k": self.bounds, "max_seqlen_q": self.longest, "max_seqlen_k": self.longest}
        found = flash_attn_varlen_func(*self.tensors, causal=self.causal, **words)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out

    @functools.cached_property
    def _mask(self) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        lengths = torch.tensor(self.lengths, device=turns.DEVICE)
        document = torch.repeat_interleave(torch.arange(len(self.lengths), device=turns.DEVICE), lengths)
        causal, tokens = self.causal, len(document)

        def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
            same = document[i] == document[j]
            return same & (i >= j) if causal else same

        return create_block_mask(seen, None, None, tokens, tokens, device=turns.DEVICE, _compile=True)

    def flex(self) -> torch.Tensor:
        """FlexAttention with a document mask that was made ahead."""
        q, k, v = (x.transpose(0, 1)[None] for x in self.tensors)
        return _flex()(q, k, v, block_mask=self._mask, enable_gqa=self.shared)[0].transpose(0, 1)  # type: ignore[no-any-return]

    def dense(self) -> torch.Tensor | None:
        """Our dense call, where all lengths are equal."""
        if self.law != "equal":
            return None
        q, k, v = (x.unflatten(0, (-1, MEAN)).transpose(1, 2) for x in self.tensors)
        found: torch.Tensor = dispatch.attention(q, k, v, is_causal=self.causal, enable_gqa=self.shared)
        return found.transpose(1, 2).flatten(0, 1)


@functools.cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def peers(cell: Cell, *, flex: bool) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Ways that ran, by name, and the reasons of the others."""

    def without(call: Callable[[], torch.Tensor | None]) -> Callable[[], Any] | None:
        def run() -> Any:
            with torch.no_grad():
                return call()

        return None if run() is None else run

    ways = {"ours": cell.ours, "torch": cell.torchs, "fa4": cell.fa4, "dense": cell.dense} | ({"flex": cell.flex} if flex else {})
    return runnable({name: functools.partial(without, call) for name, call in ways.items()})


def gradients(cell: Cell, names: dict[str, Any]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Backwards of these ways, of outputs that are computed once."""

    def made(name: str) -> Callable[[], Any]:
        out = {"ours": cell.ours, "torch": cell.torchs, "fa4": cell.fa4, "flex": cell.flex, "dense": cell.dense}[name]()
        return functools.partial(torch.autograd.grad, out, cell.tensors, cell.dout, retain_graph=True)

    return runnable({name: functools.partial(made, name) for name in names})


def rows(of: dict[str, Any], *, flex: bool, backward: bool) -> dict[str, Any]:
    """Microseconds of every way of a cell, the ratio of the best peer's to ours, and our rate."""
    cell = Cell(**of)
    found: dict[str, Any] = dict(of)
    ways, notes = peers(cell, flex=flex)
    right = ways["torch"]() if "torch" in ways else None
    if right is not None:
        error = float((ways["ours"]().float() - right.float()).norm() / right.float().norm())
        found["apart"] = error
        if error > 2e-2:
            raise ValueError(f"ours and torch's are {error:.3g} apart")
    for part, calls in (("fwd", ways), *((("bwd", gradients(cell, ways)[0]),) if backward else ())):
        one = turns.timed_in_turns(calls, rounds=1, repeats=2)
        slowest = max(statistics.median(times) for times in one.values())
        repeats = max(1, int(ROUND_S * 1e6 / slowest))
        times = turns.medians(turns.timed_in_turns(calls, rounds=ROUNDS, repeats=repeats))
        others = [time for name, time in times.items() if name not in ("ours", "dense")]
        found[part] = times
        found[f"{part} ratio"] = min(others) / times["ours"] if others else None
        found[f"{part} tflops"] = cell.flops * (1.0 if part == "fwd" else 2.5) / times["ours"] / 1e6
    found["notes"] = {name: note for name, note in notes.items() if note != "can't express it"}
    return found


def main() -> None:
    """Time cells by laws, head sizes, groups, bands and tokens."""
    parser = argument_parser(__doc__)
    parser.add_argument("--d", type=numbers_of, default=[64, 128], help="head sizes, with commas between them")
    parser.add_argument("--tokens", type=numbers_of, default=[16384, 65536], help="tokens in all, with commas between them")
    parser.add_argument("--group", type=numbers_of, default=[1, 4], help="query heads of a key head, with commas between them")
    parser.add_argument("--law", choices=LAWS, nargs="+", default=list(LAWS), help="laws of lengths")
    parser.add_argument("--heads", type=int, default=16, help="query heads (default: %(default)s)")
    parser.add_argument("--causal", choices=("both", "yes", "no"), default="both", help="bands (default: %(default)s)")
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out, which takes seconds to compile")
    parser.add_argument("--no-backward", action="store_true", help="time forwards alone")
    given = parser.parse_args()
    bands = {"both": (False, True), "yes": (True,), "no": (False,)}[given.causal]

    def cells() -> Iterator[dict[str, Any]]:
        for tokens, d, group, causal, law in itertools.product(given.tokens, given.d, given.group, bands, given.law):
            of = {"law": law, "tokens": tokens, "heads": given.heads, "kv_heads": given.heads // group, "d": d, "causal": causal}
            yield from turns.guarded(of, functools.partial(rows, of, flex=not given.no_flex, backward=not given.no_backward))

    turns.report("packed", {"packed": cells})
