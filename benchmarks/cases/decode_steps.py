"""Decoding steps of short sequences beside torch's backends: first calls at new numbers of keys, host time, and back to back.

torch's cuDNN builds a plan for each number of keys that it meets, for each shape; a sequence that grows meets a new one with each token.

Prints a line for each step and writes decode_steps.json after each.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.shared.environment import argument_parser, this_gpu
from benchmarks.shared.turns import Call, guarded, host_in_turns, medians, report, served_by, tensors, timed_in_turns
from flashtune import dispatch

STEPS = [
    (1, 32, 8, 512, 128),
    (4, 16, 4, 512, 128),
    (4, 12, 12, 512, 64),
    (4, 8, 4, 512, 256),
    (4, 16, 4, 128, 128),
    (4, 12, 12, 128, 64),
    (8, 32, 8, 2048, 128),
    (16, 12, 12, 1024, 64),
    (64, 32, 8, 1024, 128),
    (4, 16, 8, 32768, 128),
    (1, 32, 8, 131072, 128),
    (64, 32, 8, 4096, 128),
    (1, 12, 12, 8192, 64),
]
"""Batch, query heads, key heads, keys, head size: those whose host time shows first."""

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

NEW_LENGTHS = 6
"""Numbers of keys that are new to each way."""


def ways(q: torch.Tensor, words: dict[str, Any]) -> dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]:
    """Ours and torch's, by default and by each backend that takes these."""

    def by(backend: SDPBackend, k: torch.Tensor, v: torch.Tensor) -> Any:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, **words)

    return {
        "ours": lambda k, v: dispatch.attention(q, k, v, **words),
        "torch": lambda k, v: sdpa(q, k, v, **words),
        **{name: partial(by, backend) for name, backend in BACKENDS.items()},
    }


def row(step: dict[str, Any]) -> dict[str, Any]:
    """One step: seconds of first calls at new numbers of keys, each way's own, then microseconds of known ones."""
    b, h, kv_heads, n, d = step.values()
    words = {"enable_gqa": h != kv_heads}
    found: dict[str, Any] = dict(step)
    q, k, v = tensors(b, h, 1, d, kv_heads=kv_heads, n_kv=n)
    calls: dict[str, Call] = {}
    for place, (name, way) in enumerate(ways(q, words).items(), start=1):
        try:
            error = float((way(k, v).float() - sdpa(q, k, v, **words).float()).abs().max())
        except RuntimeError as refusal:
            found[f"{name}_refused"] = str(refusal).splitlines()[0][:120]
            continue
        firsts = []
        for more in range(NEW_LENGTHS):
            _, new_k, new_v = tensors(b, h, 1, d, kv_heads=kv_heads, n_kv=n + place * NEW_LENGTHS + more)
            torch.cuda.synchronize()
            start = time.perf_counter()
            way(new_k, new_v)
            firsts.append(round((time.perf_counter() - start) * 1e3, 2))
        found |= {f"{name}_error": error, f"{name}_new_ms": firsts}
        calls[name] = partial(way, k, v)
    host = medians(host_in_turns(calls, rounds=20))
    times = medians(timed_in_turns(calls, rounds=5, repeats=100))
    found |= {f"{name}_host_us": us for name, us in host.items()} | {f"{name}_us": us for name, us in times.items()}
    return found | {"served_by": served_by(calls["ours"])}


def rows() -> Iterator[dict[str, Any]]:
    """STEPS, one after the other."""
    for step in STEPS:
        named = dict(zip(("b", "h", "kv_heads", "n_kv", "d"), step, strict=True))
        yield from guarded(named, partial(row, named), limit_s=40.0)


def main() -> None:
    """Time the steps."""
    parser = argument_parser(__doc__)
    parser.add_argument("--use", metavar="DB", help="a database whose records count before the shipped ones")
    options = parser.parse_args()
    this_gpu()
    with torch.no_grad(), contextlib.nullcontext() if options.use is None else dispatch.use(options.use):
        report("decode_steps", {"steps": rows})
