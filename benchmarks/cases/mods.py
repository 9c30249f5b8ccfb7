"""Masks and scores as code beside PyTorch's FlexAttention, compiled with its defaults and, on request, with max-autotune.

Functions as in attention-gym (causal, window, document, prefix-LM, NATTEN, dilated, global + window, tree, block diffusion, soft cap,
ALiBi, signed ALiBi, relative bias, learned bias with its gradient). All run interleaved on the same inputs, as whole calls; a backward is
that of output and captured tensors alone, without the forward. Our lists of blocks are kept with the BlockMask, as FlexAttention's are in
it; `lists_us` is the time of the forward's lists when they are made anew. Documents are beside `attention_varlen`, too, to which they are
packed sequences.

FlexAttention fails on an H100 with its defaults for the two biases, and has one pipeline stage there.

Prints a line for each cell and writes mods.json after each.
"""

import functools
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.shared.environment import argument_parser, made_by, names_of, output_folder, this_gpu
from flashtune import dispatch
from flashtune.dispatch import varlen_flex
from flashtune.dispatch.functions import blocks as flex_blocks
from flashtune.dispatch.functions import decided as flex_decided
from flashtune.dispatch.functions import kept as flex_kept
from flashtune.tuner.timing.stopwatch import Stopwatch

Mods = tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]


def _mask(function: Callable[..., Tensor]) -> tuple[Mods, list[Tensor]]:
    return (None, function), []


def _documents(n: int) -> Tensor:
    """Sequences of about 1/8 of N, one after the other."""
    generator = torch.Generator().manual_seed(1)
    ends = torch.randperm(n - 1, generator=generator)[:7].sort().values + 1
    return torch.bucketize(torch.arange(n), ends, right=True).int().cuda()


def _document(n: int, heads: int) -> tuple[Mods, list[Tensor]]:
    document = _documents(n)
    return _mask(lambda b, h, q, k: (document[q] == document[k]) & (q >= k))


def _natten(n: int, heads: int) -> tuple[Mods, list[Tensor]]:
    """A window of 13 x 13 on a canvas 64 wide, moved inwards at its edges."""
    width, half = 64, 6
    height = n // width

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        across = ((q % width).clamp(half, width - 1 - half) - k % width).abs() <= half
        return across & (((q // width).clamp(half, height - 1 - half) - k // width).abs() <= half)

    return _mask(seen)


def _tree(n: int, heads: int) -> tuple[Mods, list[Tensor]]:
    """A tree in depth-first order, whose tokens see themselves and their ancestors; a quarter of N is the trunk."""
    generator = torch.Generator().manual_seed(1)
    last, path = list(range(n)), list(range(n // 4))
    for token in range(n // 4, n):
        steps = int(torch.randint(0, 3, (), generator=generator)) if len(path) > n // 4 else 0
        del path[max(n // 4, len(path) - steps) :]
        path.append(token)
        for ancestor in path:
            last[ancestor] = token
    end = torch.tensor(last).int().cuda()
    return _mask(lambda b, h, q, k: (q >= k) & (q <= end[k]))


def _block_diffusion(n: int, heads: int) -> tuple[Mods, list[Tensor]]:
    """Noised tokens before clean ones, in blocks of 32: noised blocks see themselves and earlier clean ones, clean blocks are causal."""
    half, block = n // 2, 32

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        noised_q, noised_k = q < half, k < half
        block_q, block_k = (q % half) // block, (k % half) // block
        own = noised_q & noised_k & (block_q == block_k)
        before = noised_q & ~noised_k & (block_q > block_k)
        return own | before | (~noised_q & ~noised_k & (block_q >= block_k))

    return _mask(seen)


def _learned(*sizes: int) -> Tensor:
    return torch.randn(sizes, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).requires_grad_()


def _relative(n: int, heads: int) -> tuple[Mods, list[Tensor]]:
    table = _learned(heads, 257)
    return (lambda s, b, h, q, k: s + table[h, (q - k).clamp(-128, 128) + 128], None), [table]


def _bias(n: int, heads: int) -> tuple[Mods, list[Tensor]]:
    bias = _learned(heads, 2 * n)
    return (lambda s, b, h, q, k: s + bias[h, q - k + n], None), [bias]


def _alibi(n: int, heads: int, *, signed: bool) -> tuple[Mods, list[Tensor]]:
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)
    if signed:
        return (lambda s, b, h, q, k: s + slopes[h] * (k - q), lambda b, h, q, k: q >= k), []
    return (lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), None), []


CASES: dict[str, Callable[[int, int], tuple[Mods, list[Tensor]]]] = {
    "causal": lambda n, heads: _mask(lambda b, h, q, k: q >= k),
    "window": lambda n, heads: _mask(lambda b, h, q, k: (q >= k) & (q - k <= 1024)),
    "document": _document,
    "prefix": lambda n, heads: _mask(lambda b, h, q, k: (k < n // 4) | (q >= k)),
    "natten": _natten,
    "dilated": lambda n, heads: _mask(lambda b, h, q, k: ((q - k).abs() <= 1024) & ((q - k) % 2 == 0)),
    "global_window": lambda n, heads: _mask(lambda b, h, q, k: (k < 128) | (q < 128) | ((q - k).abs() <= 512)),
    "tree": _tree,
    "block_diffusion": _block_diffusion,
    "softcap": lambda n, heads: ((lambda s, b, h, q, k: 20 * torch.tanh(s / 20), lambda b, h, q, k: q >= k), []),
    "alibi": lambda n, heads: _alibi(n, heads, signed=False),
    "signed_alibi": lambda n, heads: _alibi(n, heads, signed=True),
    "relative": _relative,
    "bias": _bias,
}

BIASES = {"relative", "bias"}
"""Cases for which FlexAttention gets one pipeline stage; `varlen_flex._ONE_STAGE` says why."""

Run = Callable[[], object]


def packed_function(n: int) -> Callable[..., Tensor]:
    """Attention of `_documents` (N,) as packed causal sequences, of tensors (1, H, N, D)."""
    lengths = torch.unique_consecutive(_documents(n), return_counts=True)[1]
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    longest = int(lengths.max())

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        out = dispatch.attention_varlen(*rows, bounds, bounds, longest, longest, is_causal=True)
        return out.transpose(0, 1)[None]

    return attend


def whole_calls(function: Callable[..., Any], tensors: list[Tensor], trained: list[Tensor], mods: Mods, mask: Any) -> tuple[Run, Run]:
    """The forward and the backward of a call; both have run once."""
    out = function(*tensors, score_mod=mods[0], block_mask=mask)
    dout = torch.ones_like(out)
    given = [*tensors, *trained]
    torch.autograd.grad(out, given, dout, retain_graph=True)

    def forward() -> object:
        with torch.no_grad():
            return function(*tensors, score_mod=mods[0], block_mask=mask)

    forward()
    return forward, lambda: torch.autograd.grad(out, given, dout, retain_graph=True)


def row_of(name: str, n: int, d: int, options: Any, watch: Stopwatch) -> dict[str, Any]:
    """Median times in microseconds of each pass by each function, and our largest difference from FlexAttention over its largest number."""
    torch._dynamo.reset()
    heads = options.heads
    mods, trained = CASES[name](n, heads)
    generator = torch.Generator("cuda").manual_seed(options.seed)
    tensors = [torch.randn((1, heads, n, d), device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_() for _ in range(3)]
    mask = None if mods[1] is None else create_block_mask(mods[1], None, None, n, n, device="cuda")
    functions: dict[str, Callable[..., Any]] = {"ours": dispatch.flex_attention, "flex": torch.compile(flex_attention)}
    if name in BIASES:
        functions["flex"] = functools.partial(functions["flex"], kernel_options=dict(varlen_flex._ONE_STAGE))
    if options.autotune:
        functions["flex_autotuned"] = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")
    if name == "document":
        functions["packed"] = packed_function(n)
    calls = {key: whole_calls(function, tensors, trained, mods, mask) for key, function in functions.items()}
    found: dict[str, Any] = {
        "case": name,
        "n": n,
        "d": d,
        "served": dispatch.explain_flex(*tensors, score_mod=mods[0], block_mask=mask).reason,
    }
    theirs, mine = (calls[key][0]() for key in ("flex", "ours"))
    found["off"] = float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max())  # type: ignore[attr-defined]
    grads = [calls[key][1]() for key in ("flex", "ours")]
    found["gradients_off"] = [
        float((x.float() - y.float()).norm() / x.float().norm().clamp(min=1e-9))
        for x, y in zip(*grads, strict=True)  # type: ignore[call-overload]
    ]
    for place, which in enumerate(("forward", "backward")):
        times = watch.rounds([both[place] for both in calls.values()], options.rounds)
        found[which] = {key: statistics.median(one) for key, one in zip(calls, times, strict=True)}
    call = flex_decided.call_of(*tensors, mods[0], mask, None, False, None, False)
    assert not isinstance(call, str), call
    if mask is not None and isinstance(call, flex_blocks.FlexCall):
        tile = call.kernel.config.number("BLOCK_M"), call.kernel.config.number("BLOCK_N")

        def anew() -> object:
            flex_kept.LISTS.clear()
            return flex_blocks.blocks(call, call.kernel, tensors[0], tensors[1], tile)

        found["lists_us"] = statistics.median(watch.rounds([anew], options.rounds)[0])
    return found


def line_of(row: dict[str, Any]) -> str:
    """A row as a line: times, and theirs over ours."""
    words = [f"{row['case']:14s} N={row['n']:<6d} D={row['d']:<4d} off {row['off']:.1e} grads {max(row['gradients_off']):.1e}"]
    for which in ("forward", "backward"):
        times = row[which]
        ratios = " ".join(f"{key} {time:.0f} ({time / times['ours']:.2f}x)" for key, time in times.items() if key != "ours")
        words.append(f"{which} {times['ours']:.0f} us, {ratios}")
    if "lists_us" in row:
        words.append(f"lists {row['lists_us']:.0f} us")
    return "; ".join(words)


def main() -> None:
    """Run, print and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", type=lambda text: names_of(text, tuple(CASES), "cases"), default=tuple(CASES))
    parser.add_argument("--n", type=lambda text: [int(x) for x in text.split(",")], default=[4096])
    parser.add_argument("--d", type=lambda text: [int(x) for x in text.split(",")], default=[128])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--autotune", action="store_true", help="FlexAttention with max-autotune, too, which compiles for long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # What is to be measured serves.
    dispatch.use(unmeasured=True, everywhere=True)
    target = this_gpu()
    watch = Stopwatch(torch.device("cuda"), target.l2_bytes)
    provenance, rows = made_by(options.seed), list[dict[str, Any]]()
    for n in options.n:
        for d in options.d:
            for name in options.cases:
                try:
                    rows.append(row_of(name, n, d, options, watch))
                    print(line_of(rows[-1]), flush=True)
                except Exception as error:
                    rows.append({"case": name, "n": n, "d": d, "failed": f"{type(error).__name__}: {error}"[:500]})
                    print(f"{name} N={n} D={d}: {rows[-1]['failed']}", flush=True)
                (output_folder() / "mods.json").write_text(json.dumps({"provenance": provenance, "rows": rows}, indent=1))
    for which in ("forward", "backward"):
        for peer in ("flex", "flex_autotuned"):
            ratios = [row[which][peer] / row[which]["ours"] for row in rows if peer in row.get(which, {})]
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                print(f"{which}: geometric mean over {peer} {mean:.2f}x, least {min(ratios):.2f}x")
