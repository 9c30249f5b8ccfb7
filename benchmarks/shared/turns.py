"""Timing of two ways of a call in turns, and the description of what serves ours: for cases that compare whole calls with torch's."""

import json
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.shared.environment import made_by, output_folder
from flashtune import dispatch
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.state import context

Call = Callable[[], Any]

DEVICE = "cuda"

MOST_SHOWN = 10
"""Numbers of a list that is printed."""


def timed_in_turns(calls: dict[str, Call], *, rounds: int, repeats: int, warm: bool = True, device: str = DEVICE) -> dict[str, list[float]]:
    """Microseconds a call, of `repeats` back to back, for each of `rounds` and each of `calls`: wall time until the device is done.

    A round before these isn't counted, unless they are not to be `warm`.
    """
    return _in_turns(calls, rounds, repeats, uncounted=1 if warm else 0, until_done=True, device=device)


def host_in_turns(calls: dict[str, Call], *, rounds: int = 40, repeats: int = 48) -> dict[str, list[float]]:
    """Microseconds of host time a call: the GPU catches up between groups of calls that its queue holds."""
    return _in_turns(calls, rounds, repeats, uncounted=2, until_done=False, device=DEVICE)


def _in_turns(
    calls: dict[str, Call], rounds: int, repeats: int, *, uncounted: int, until_done: bool, device: str
) -> dict[str, list[float]]:
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(uncounted + rounds):
        for name in sorted(calls, reverse=turn % 2 == 1):
            call = calls[name]
            wait()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            if until_done:
                wait()
            spent = time.perf_counter() - start
            if turn >= uncounted:
                found[name].append(spent / repeats * 1e6)
    wait()
    return found


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


def guarded(cell: dict[str, Any], measure: Callable[[], dict[str, Any]], *, limit_s: float = 90.0) -> Iterator[dict[str, Any]]:
    """The row that `measure` returns; where it fails or takes longer than `limit_s`, the cell with the reason."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no result within {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield measure()
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        yield cell | {"failed": f"{type(error).__name__}: {lines[0][:300]}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def tensors(
    b: int, h: int, n: int, d: int, *, kv_heads: int | None = None, n_kv: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Random q, k, v."""
    q = torch.randn(b, h, n, d, device=DEVICE, dtype=dtype)
    k, v = (torch.randn(b, kv_heads or h, n_kv or n, d, device=DEVICE, dtype=dtype) for _ in range(2))
    return q, k, v


def described(plan: Any) -> str:
    """Description of a plan: `framework`, or a kernel's module, its launches a call and where its machine code is from."""
    if not isinstance(plan, KernelPlan):
        return "framework" if isinstance(plan, TorchPlan) else "kernels with gradients"
    name = plan.code.module.name
    if plan.program is None:
        return f"{name} by Triton's launcher"
    source = "compiled here"
    if plan.code.manifest is not None and (plan.code.manifest.archive or plan.code.manifest.folder) is not None:
        source = "cache" if plan.code.manifest.archive is None else "package"
    return f"{name}, {len(plan.program.planned)} launches, {source}"


def served_by(call: Call) -> str:
    """Description of the plans that serve a call of ours, chosen anew."""
    dispatch.reload()
    call()
    return "; ".join(sorted({described(plan) for plan in context.current().plans.values()}))


def report(name: str, parts: dict[str, Callable[[], Iterator[dict[str, Any]]]]) -> None:
    """Run parts, print their rows as they come, and write NAME.json after each; raises SystemExit where one failed."""
    results: dict[str, Any] = {"provenance": made_by(None)}
    failed = 0
    for part, rows in parts.items():
        started = time.perf_counter()
        results[part] = []
        print(part, flush=True)
        for row in rows():
            results[part].append(row)
            failed += "failed" in row
            short = ((key, value) for key, value in row.items() if not (isinstance(value, list) and len(value) > MOST_SHOWN))
            shown = "  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in short)
            print(f"  {shown}", flush=True)
            (output_folder() / f"{name}.json").write_text(json.dumps(results, indent=1))
        print(f"  ({time.perf_counter() - started:.0f} s)", flush=True)
    if failed:
        raise SystemExit(f"{failed} of the figures could not be measured")
