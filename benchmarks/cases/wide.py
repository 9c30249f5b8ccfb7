"""Heads beyond 256: forwards and gradients beside PyTorch, cuDNN's frontend and FFPA where these are installed; latent decoding over pages.

Times are wall times until the GPU is done, the host's part among them, of calls back to back in turns. Latent steps (576 columns of a key,
of which 512 are the values) count each byte of the keys once. Rates of gradients count five products.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.shared import turns
from benchmarks.shared.environment import argument_parser, numbers_of
from flashtune import dispatch
from flashtune.core.system.errors import InputError

ROUNDS, REPEATS = 9, 5
BESIDE = ("torch", "cudnn_fe", "ffpa")
LATENT, VALUES = 576, 512


def _calls(of: dict[str, Any], *, trained: bool = False) -> tuple[list[torch.Tensor], dict[str, turns.Call]]:
    """Tensors of a cell, and its calls: ours, and each other implementation that takes it."""
    heads = of["heads"], of["kv_heads"], of["kv_heads"]
    sizes = [(1, count, of["n"], of["d"]) for count in heads]
    tensors = [torch.randn(size, device=turns.DEVICE, dtype=torch.bfloat16, requires_grad=trained) for size in sizes]
    calls: dict[str, turns.Call] = {}
    for name in ("flashtune", *BESIDE):
        call = functools.partial(
            dispatch.attention, *tensors, is_causal=of["causal"], enable_gqa=of["heads"] != of["kv_heads"], implementation=name
        )
        try:
            call()
        except InputError:
            if name == "flashtune":
                raise
            continue
        calls["ours" if name == "flashtune" else name] = call
    return tensors, calls


def _of_gradients(of: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of a forward with its backward and of the backward alone by each that takes it, and TFLOP/s of our backward."""
    tensors, calls = _calls(of, trained=True)
    outs = {name: call() for name, call in calls.items()}
    dout = torch.randn_like(outs["ours"])
    backwards = {name: functools.partial(torch.autograd.grad, out, tensors, dout, retain_graph=True) for name, out in outs.items()}
    steps = {name: functools.partial(_step, call, tensors, dout) for name, call in calls.items()}
    of_steps, of_backwards = (turns.medians(turns.timed_in_turns(one, rounds=ROUNDS, repeats=REPEATS)) for one in (steps, backwards))
    work = 10 * of["heads"] * of["n"] ** 2 * of["d"] / (2 if of["causal"] else 1)
    ratios = (min(us for name, us in times.items() if name != "ours") / times["ours"] for times in (of_steps, of_backwards))
    found = {f"step {name}": us for name, us in of_steps.items()} | {f"backward {name}": us for name, us in of_backwards.items()}
    return of | found | {"TFLOP/s": work / of_backwards["ours"] / 1e6} | dict(zip(("step ratio", "backward ratio"), ratios, strict=True))


def _step(call: turns.Call, tensors: list[torch.Tensor], dout: torch.Tensor) -> None:
    """A forward and its backward."""
    torch.autograd.grad(call(), tensors, dout)


def _of_forward(of: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of a forward by each that takes it, and TFLOP/s of ours."""
    with torch.no_grad():
        _, calls = _calls(of)
        times = turns.medians(turns.timed_in_turns(calls, rounds=ROUNDS, repeats=REPEATS))
    work = 4 * of["heads"] * of["n"] ** 2 * of["d"] / (2 if of["causal"] else 1)
    beside = min(us for name, us in times.items() if name != "ours")
    return of | times | {"TFLOP/s": work / times["ours"] / 1e6, "ratio": beside / times["ours"]}


def _of_latent(of: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of a step over latent pages, and over separate keys and values; TB/s and TFLOP/s of the first."""
    requests, keys, page = of["requests"], of["keys"], of["page"]
    pages = keys // page
    cache = torch.randn(requests * pages, page, 1, LATENT, device=turns.DEVICE, dtype=torch.bfloat16)
    query = torch.randn(requests, of["heads"], LATENT, device=turns.DEVICE, dtype=torch.bfloat16)
    bounds = torch.arange(requests + 1, dtype=torch.int32, device=turns.DEVICE)
    table = torch.randperm(requests * pages, device=turns.DEVICE, dtype=torch.int32).view(requests, pages)
    words = {"seqused_k": torch.full((requests,), keys, dtype=torch.int32, device=turns.DEVICE), "block_table": table, "enable_gqa": True}
    values = {"latent": cache[..., :VALUES], "apart": cache[..., :VALUES].clone()}
    calls = {
        name: functools.partial(dispatch.attention_varlen, query, cache, x, bounds, None, 1, keys, **words) for name, x in values.items()
    }
    with torch.no_grad():
        times = turns.medians(turns.timed_in_turns(calls, rounds=ROUNDS, repeats=REPEATS))
    work = 2 * requests * keys * of["heads"] * (LATENT + VALUES)
    moved = requests * keys * LATENT * cache.element_size()
    return of | times | {"TB/s": moved / times["latent"] / 1e6, "TFLOP/s": work / times["latent"] / 1e6}


def main() -> None:
    """Time forwards and gradients over head sizes, lengths and groups, and latent steps over heads and pages."""
    parser = argument_parser(__doc__)
    parser.add_argument("--d", type=numbers_of, default=[320, 384, 512], help="head sizes, with commas between them")
    parser.add_argument("--n", type=numbers_of, default=[2048, 8192, 32768], help="lengths, with commas between them")
    parser.add_argument("--heads", type=numbers_of, default=[16, 128], help="heads of latent steps, with commas between them")
    parser.add_argument("--backward", action="store_true", help="gradients alone")
    given = parser.parse_args()

    def dense(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for d, n, kv_heads, causal in itertools.product(given.d, given.n, (8, 1), (True, False)):
            of = {"d": d, "n": n, "heads": 8, "kv_heads": kv_heads, "causal": causal}
            yield from turns.guarded(of, functools.partial(measure, of), limit_s=60.0)

    def steps() -> Iterator[dict[str, Any]]:
        for heads, page in itertools.product(given.heads, (64, 16)):
            of = {"requests": 64, "keys": 8192, "heads": heads, "page": page}
            yield from turns.guarded(of, functools.partial(_of_latent, of), limit_s=60.0)

    parts = {"gradients": functools.partial(dense, _of_gradients)}
    turns.report("wide", parts if given.backward else {"forwards": functools.partial(dense, _of_forward)} | parts | {"latent steps": steps})
