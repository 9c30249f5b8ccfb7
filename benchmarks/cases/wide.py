"""Heads beyond 256: forwards beside PyTorch, cuDNN's frontend and FFPA where these are installed; steps of latent decoding over pages.

Times are wall times until the GPU is done, the host's part among them, of calls back to back in turns. Latent steps (576 columns of a key,
of which 512 are the values) count each byte of the keys once.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.shared import turns
from benchmarks.shared.environment import argument_parser, numbers_of
from flashtune import dispatch
from flashtune.core.system.errors import InputError

ROUNDS, REPEATS = 9, 5
BESIDE = ("torch", "cudnn_fe", "ffpa")
LATENT, VALUES = 576, 512


def _of_forward(of: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of a forward by each that takes it, and TFLOP/s of ours."""
    heads = of["heads"], of["kv_heads"], of["kv_heads"]
    tensors = [torch.randn(1, count, of["n"], of["d"], device=turns.DEVICE, dtype=torch.bfloat16) for count in heads]
    words = {"is_causal": of["causal"], "enable_gqa": True}
    calls = {"ours": functools.partial(dispatch.attention, *tensors, **words, implementation="flashtune")}
    for name in BESIDE:
        call = functools.partial(dispatch.attention, *tensors, **words, implementation=name)
        try:
            call()
        except InputError:
            continue
        calls[name] = call
    with torch.no_grad():
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
    """Time forwards over head sizes, lengths and groups, and latent steps over heads and pages."""
    parser = argument_parser(__doc__)
    parser.add_argument("--d", type=numbers_of, default=[320, 384, 512], help="head sizes, with commas between them")
    parser.add_argument("--n", type=numbers_of, default=[2048, 8192, 32768], help="lengths, with commas between them")
    parser.add_argument("--heads", type=numbers_of, default=[16, 128], help="heads of latent steps, with commas between them")
    given = parser.parse_args()

    def forwards() -> Iterator[dict[str, Any]]:
        for d, n, kv_heads, causal in itertools.product(given.d, given.n, (8, 1), (True, False)):
            of = {"d": d, "n": n, "heads": 8, "kv_heads": kv_heads, "causal": causal}
            yield from turns.guarded(of, functools.partial(_of_forward, of), limit_s=60.0)

    def steps() -> Iterator[dict[str, Any]]:
        for heads, page in itertools.product(given.heads, (64, 16)):
            of = {"requests": 64, "keys": 8192, "heads": heads, "page": page}
            yield from turns.guarded(of, functools.partial(_of_latent, of), limit_s=60.0)

    turns.report("wide", {"forwards": forwards, "latent steps": steps})
