"""Decoding steps of short sequences: searches rows for them, and times what each way takes, for a number of keys that it never met, too.

    python benchmarks/steps.py --db FILE --seconds 120           # searches on this machine's GPU, the steps in the order of STEPS
    python benchmarks/steps.py --use FILE --out results.json     # times ours, by these rows over the shipped ones, and torch's backends

torch's cuDNN builds a plan for each number of keys that it meets, for each shape; a sequence that grows meets a new one with each token.
"""

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from calls import Call, guarded, host_in_turns, medians, served_by, tensors, timed_in_turns
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashtune import dispatch
from flashtune.cli.search import SearchOptions, run_search
from flashtune.core.problem import Problem
from flashtune.tuner.machine import local_gpu, provenance

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
"""Batch, query heads, key heads, keys, head size: the models' and the grid's of calls.py, those whose host time shows first."""

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

NEW_LENGTHS = 6
"""Numbers of keys that are new to each way."""


def problems() -> list[Problem]:
    """STEPS in bf16."""
    return [Problem(batch=b, heads=h, kv_heads=kv, n_q=1, n_kv=n, d=d, d_v=d, dtype="bf16") for b, h, kv, n, d in STEPS]


def search(location: str, seconds: float) -> None:
    """Rows of STEPS, each with its share of the time."""
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise SystemExit("steps.py measures kernels and found no GPU that flashtune knows: run it on the GPU's machine")
    how = SearchOptions(templates=("flash_decode",), trials=30, budget_s=seconds, location=location)
    for record in run_search(gpu.target, problems(), how, quiet=True, command=shlex.join(["python", *sys.argv])):
        calls = f"whole calls {record.outcome.call_us} us, torch's {record.framework_call_us}"
        print(record.problem.label(), f"{record.median_us:.1f} us, torch {record.framework_us} us;", calls, record.outcome.config.label())


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
    """Search or time, as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", help="search, and write the rows here")
    parser.add_argument("--seconds", type=float, default=120.0, help="for the search (default: %(default)g)")
    parser.add_argument("--use", help="a database over the shipped rows, to time with")
    parser.add_argument("--out", type=Path, help="time, and write all figures here as JSON")
    options = parser.parse_args()
    if options.db is not None:
        search(options.db, options.seconds)
    if options.out is None:
        return
    command = shlex.join(["python", *sys.argv])
    results: dict[str, Any] = {"command": command, "machine": asdict(provenance(command=command, seed=None, measured=True)), "steps": []}
    with torch.no_grad(), contextlib.nullcontext() if options.use is None else dispatch.use(options.use):
        for found in rows():
            results["steps"].append(found)
            print("  ".join(f"{name} {value}" for name, value in found.items()), flush=True)
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
