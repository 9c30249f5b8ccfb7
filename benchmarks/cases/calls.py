"""Calls: host time, an eager loop at models' shapes, decoding steps, training calls, and a new process's first result, beside torch's.

Ours and torch's take turns on the same tensors; figures are medians of rounds, and every output is compared with torch's first. `host` are
calls that leave the GPU idle, `grid` models' shapes back to back, where the slower of host and GPU decides, `process` seconds of a new
process beyond importing torch, `training` a causal forward and its gradients by our kernels, chosen or not. `steps` are decoding steps by
all of torch's backends as well: first calls at new numbers of keys, each of which cuDNN builds a plan for, host time, and back to back.

Prints a line for each figure, writes calls.json after each, and exits with 1 where one could not be measured.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.shared.environment import argument_parser, names_of, this_gpu
from benchmarks.shared.turns import DEVICE, Call, guarded, host_in_turns, medians, report, served_by, tensors, timed_in_turns
from flashtune import dispatch


def host_cases() -> dict[str, tuple[Call, Call | None]]:
    """Calls that leave the GPU idle: ours, and torch's where it has the feature."""
    q, k, v = tensors(1, 8, 512, 128)
    gq, gk, gv = tensors(1, 32, 256, 128, kv_heads=8)
    dq, dk, dv = tensors(1, 32, 1, 128, kv_heads=8, n_kv=512)
    mask = torch.rand(1, 1, 512, 512, device=DEVICE) > 0.3
    window = torch.ones(512, 512, device=DEVICE, dtype=torch.bool).tril().triu(-128)
    attend = dispatch.attention
    return {
        "plain": (lambda: attend(q, k, v), lambda: sdpa(q, k, v)),
        "causal": (lambda: attend(q, k, v, is_causal=True), lambda: sdpa(q, k, v, is_causal=True)),
        "gqa": (lambda: attend(gq, gk, gv, enable_gqa=True), lambda: sdpa(gq, gk, gv, enable_gqa=True)),
        "boolean mask": (lambda: attend(q, k, v, mask), lambda: sdpa(q, k, v, mask)),
        "window": (lambda: attend(q, k, v, is_causal=True, window=128), lambda: sdpa(q, k, v, window)),
        "softcap": (lambda: attend(q, k, v, softcap=30.0), lambda: sdpa(q, k, v)),
        "dropout": (lambda: attend(q, k, v, dropout_p=0.1), lambda: sdpa(q, k, v, dropout_p=0.1)),
        "dropout, inference mode": (lambda: attend(q, k, v, dropout_p=0.1), lambda: sdpa(q, k, v, dropout_p=0.1)),
        "dropout, seeded": (lambda: attend(q, k, v, dropout_p=0.1, seed=7), lambda: sdpa(q, k, v, dropout_p=0.1)),
        "decoding": (lambda: attend(dq, dk, dv, enable_gqa=True), lambda: sdpa(dq, dk, dv, enable_gqa=True)),
    }


def host_part() -> Iterator[dict[str, Any]]:
    """Host time of calls that leave the GPU idle."""

    def measured(name: str, ours: Call, theirs: Call | None) -> dict[str, Any]:
        times = medians(host_in_turns({"ours": ours, "torch": theirs or ours}))
        row = {"case": name, "ours_us": times["ours"], "torch_us": times["torch"], "ratio": times["ours"] / times["torch"]}
        return row | {"served_by": served_by(ours)}

    for name, (ours, theirs) in host_cases().items():
        with torch.inference_mode() if name.endswith("inference mode") else torch.no_grad():
            yield from guarded({"case": name}, partial(measured, name, ours, theirs))


GRID: list[tuple[str, int, int, int, int, int, bool]] = [
    ("ViT-B/16", 64, 12, 12, 197, 64, False),
    ("ViT-L/14", 16, 16, 16, 257, 64, False),
    ("SigLIP", 8, 16, 16, 577, 64, False),
    ("CLIP text", 64, 12, 12, 77, 64, True),
    ("Bert", 1, 12, 12, 128, 64, False),
    ("Bert", 32, 12, 12, 384, 64, False),
    ("Bert", 64, 12, 12, 512, 64, False),
    ("GPT-2", 1, 12, 12, 1024, 64, True),
    ("GPT-2", 8, 12, 12, 1024, 64, True),
    ("Whisper encoder", 1, 20, 20, 1500, 64, False),
    ("Whisper encoder", 8, 20, 20, 1500, 64, False),
    ("odd", 1, 4, 4, 700, 128, False),
    ("Llama 3 8B", 1, 32, 8, 128, 128, True),
    ("Llama 3 8B", 1, 32, 8, 512, 128, True),
    ("Llama 3 8B", 4, 32, 8, 512, 128, True),
    ("Llama 3 8B", 1, 32, 8, 2048, 128, True),
    ("Llama 3 8B", 8, 32, 8, 2048, 128, True),
    ("Qwen3 0.6B", 1, 16, 8, 300, 128, True),
    ("Qwen3 0.6B", 4, 16, 8, 2048, 128, True),
    ("plain 2048", 8, 16, 16, 2048, 128, True),
    ("Gemma", 1, 8, 4, 1024, 256, True),
    ("Gemma", 4, 8, 4, 2048, 256, True),
]
"""Model, batch, query heads, key heads, tokens, head size, causal."""


def grid_part() -> Iterator[dict[str, Any]]:
    """Back-to-back throughput: the slower of host and GPU decides."""
    with torch.no_grad():
        for cell in GRID:
            sizes: dict[str, Any] = dict(zip(("cell", "b", "h", "kv_heads", "n", "d", "causal"), cell, strict=True))
            yield from guarded(sizes, partial(grid_row, sizes))


def grid_row(cell: dict[str, Any]) -> dict[str, Any]:
    """One cell: both ways compared, then timed in turns."""
    q, k, v = tensors(cell["b"], cell["h"], cell["n"], cell["d"], kv_heads=cell["kv_heads"])
    words = {"is_causal": cell["causal"], "enable_gqa": cell["h"] != cell["kv_heads"]}
    calls: dict[str, Call] = {"ours": lambda: dispatch.attention(q, k, v, **words), "torch": lambda: sdpa(q, k, v, **words)}
    error = float((calls["ours"]().float() - calls["torch"]().float()).abs().max())
    explained = dispatch.explain(q, k, v, **words)
    first = timed_in_turns(calls, rounds=1, repeats=20)
    repeats = max(20, min(400, int(15_000 / max(first["torch"][0], 1))))
    times = medians(timed_in_turns(calls, rounds=9, repeats=repeats))
    found = {"error": error, "served": explained.kind, "template": explained.template, "served_by": served_by(calls["ours"])}
    return cell | found | {"ours_us": times["ours"], "torch_us": times["torch"], "speedup": times["torch"] / times["ours"]}


DECODING = [
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
    (1, 32, 8, 4096, 128),
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


def steps_row(step: dict[str, Any]) -> dict[str, Any]:
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
    return found | {"speedup": times["torch"] / times["ours"], "served_by": served_by(calls["ours"])}


def steps_part() -> Iterator[dict[str, Any]]:
    """Decoding steps, one after the other."""
    with torch.no_grad():
        for step in DECODING:
            named = dict(zip(("b", "h", "kv_heads", "n_kv", "d"), step, strict=True))
            yield from guarded(named, partial(steps_row, named), limit_s=40.0)


FIRST_CALL = """
import os, sys, time
if {hidden}:
    # As where there is neither Triton nor a C compiler.
    sys.modules["triton"] = None
    os.environ["PATH"] = "/nowhere"
start = time.perf_counter()
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
q = torch.ones({sizes}, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
ready = time.perf_counter()
if {ours}:
    from flashtune import dispatch
    imported = time.perf_counter()
    dispatch.attention(q, q, q, is_causal=True)
else:
    imported = time.perf_counter()
    sdpa(q, q, q, is_causal=True)
torch.cuda.synchronize()
called = time.perf_counter()
if {ours}:
    assert dispatch.explain(q, q, q, is_causal=True).kind != "framework"
print(ready - start, imported - ready, called - imported)
"""


USUAL, OF_A_ROW, APART = "4, 16, 1024, 128", "4, 16, 2048, 128", "4, 16, 900, 80"
"""Sizes of a new process's call: of another number of heads than the nearest row has, a row's own, and far from all rows."""

WAYS = (
    ("torch", False, False, USUAL),
    ("ours", True, False, USUAL),
    ("ours, no Triton, no compiler", True, True, USUAL),
    ("torch, at a row's sizes", False, False, OF_A_ROW),
    ("ours, at a row's sizes", True, False, OF_A_ROW),
    ("torch, far from rows", False, False, APART),
    ("ours, far from rows", True, False, APART),
)
"""Kinds of new process: name, ours or torch's attention, Triton and compilers hidden or not, and the sizes."""


def process_part() -> Iterator[dict[str, Any]]:
    """Seconds of a new process beyond importing torch: importing us, and the first result; for ours also beyond torch's own first result
    of the same sizes.

    Bytecode is written as for an installed package, by the first run of each, which meets cold caches and has a row of its own.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs: dict[str, list[list[float]]] = {name: [] for name, *_ in WAYS}
    failed: dict[str, str] = {}
    # In turns, since the machine's load drifts.
    for _ in range(6):
        for name, ours, hidden, sizes in WAYS:
            if name not in failed:
                command = [sys.executable, "-c", FIRST_CALL.format(ours=ours, hidden=hidden, sizes=sizes)]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
                except subprocess.TimeoutExpired:
                    failed[name] = "no result within 120 s"
                    continue
                if done.returncode:
                    failed[name] = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
                else:
                    runs[name].append([float(x) for x in done.stdout.split()])
    of_torch: dict[tuple[str, str], float] = {}
    for name, ours, _, sizes in WAYS:
        if name in failed:
            yield {"process": name, "failed": failed[name]}
        for label, some in (("first run", runs[name][:1]), ("later runs", runs[name][1:])):
            if some:
                imported, called = (statistics.median(run[place] for run in some) for place in (1, 2))
                row: dict[str, Any] = {"process": name, "runs": label, "import_s": round(imported, 4), "first_call_s": round(called, 4)}
                if ours and (sizes, label) in of_torch:
                    row["beyond_torch_s"] = round(imported + called - of_torch[sizes, label], 4)
                elif not ours:
                    of_torch[sizes, label] = called
                yield row


STEPS = [
    (1, 8, 512, 128),
    (4, 16, 512, 64),
    (4, 16, 1024, 128),
    (8, 16, 1024, 64),
    (2, 16, 2048, 128),
    (4, 16, 4096, 128),
    (4, 32, 4096, 64),
]
"""(B, H, N, D) of attention's part of training steps."""


def training_part() -> Iterator[dict[str, Any]]:
    """A causal forward and its gradients, with dropout and without, back to back: by our kernels, whether they would serve or not, and by
    torch's."""
    for dropout_p in (0.1, 0.0):
        for sizes in STEPS:
            cell = dict(zip(("b", "h", "n", "d"), sizes, strict=True))
            yield from guarded(cell | {"dropout_p": dropout_p}, partial(training_row, cell, dropout_p))


def training_row(cell: dict[str, Any], dropout_p: float) -> dict[str, Any]:
    """One size: both ways compared, then timed in turns. Masks of dropout differ from torch's, so that
    norms of gradients are compared there and not the gradients."""
    q, k, v = (x.requires_grad_() for x in tensors(**cell))
    grad = torch.randn_like(q)

    def step(attend: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v, dropout_p=dropout_p, is_causal=True), (q, k, v), grad)

    def gap(ours: torch.Tensor, of_torch: torch.Tensor) -> float:
        if dropout_p:
            return (ours.float().norm() / of_torch.float().norm() - 1).abs().item()
        return (ours.float() - of_torch.float()).abs().max().item()

    serves = dispatch.explain(q, k, v, dropout_p=dropout_p, is_causal=True).backward is not None
    with dispatch.use(unmeasured=True):
        gaps = [gap(a, b) for a, b in zip(step(dispatch.attention), step(sdpa), strict=True)]
        calls = {"ours": partial(step, dispatch.attention), "torch": partial(step, sdpa)}
        host = medians(host_in_turns(calls, rounds=12, repeats=8))
        times = medians(timed_in_turns(calls, rounds=8, repeats=30))
    words = {"serves": serves, "difference": max(gaps), "speedup": times["torch"] / times["ours"]}
    timed = {f"{name}_us": us for name, us in times.items()} | {f"{name}_host_us": us for name, us in host.items()}
    return cell | {"dropout_p": dropout_p} | words | timed


PARTS = {"host": host_part, "grid": grid_part, "steps": steps_part, "process": process_part, "training": training_part}


def main() -> None:
    """Run the parts that are named."""
    parser = argument_parser(__doc__)
    names = tuple(PARTS)
    parser.add_argument("--parts", type=lambda text: names_of(text, names, "parts"), default=",".join(names), help="parts (%(default)s)")
    options = parser.parse_args()
    this_gpu()
    report("calls", {name: PARTS[name] for name in options.parts})
