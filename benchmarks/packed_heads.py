"""Kernels whose tiles hold several heads that share keys: checked by the gate on this GPU, and timed beside the same without.

    python benchmarks/packed_heads.py

Prints the gate's verdict of each, then microseconds by how many heads are packed, in turns.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from forward_peers import stopwatch
from searches import text_of

from flashtune.core.config import Config, Value
from flashtune.core.dtypes import DType
from flashtune.core.problem import Features, Problem
from flashtune.templates import family
from flashtune.tuner.children import tasks
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Failed
from flashtune.tuner.timing.stopwatch import Run
from flashtune.tuner.verify.inputs import make_inputs

FAMILY = family("flash_fwd_hopper")
PLAIN: dict[str, Value] = {
    "BLOCK_M": 128,
    "BLOCK_N": 64,
    "num_stages": 2,
    "intra_wg_overlap": 1,
    "pingpong": False,
    "tiles": "one",
    "section": 1,
    "order": "fixed",
    "ctas_per_sm": 1,
    "v_columns": "padded",
    "smem_columns": "padded",
    "column_unit": 32,
    "maximum": "first",
    "rescale": "grown",
}
CHUNKS: dict[str, Value] = {"v_columns": "pieces", "smem_columns": "chunks"}
CAUSAL: dict[str, Any] = {"causal": True, "alignment": "bottom_right"}
WINDOW: dict[str, Any] = CAUSAL | {"window": (1024, 0)}


def _of(batch: int, heads: tuple[int, int], n: tuple[int, int], d: int, d_v: int = 0, dtype: DType = "bf16", **features: Any) -> Problem:
    sizes: dict[str, Any] = {"batch": batch, "heads": heads[0], "kv_heads": heads[1], "n_q": n[0], "n_kv": n[1], "d": d, "d_v": d_v or d}
    return Problem(**sizes, dtype=dtype, features=Features(**features)).seen()


CASES: tuple[tuple[Problem, int, dict[str, Value]], ...] = (
    (_of(2, (32, 4), (25, 2610), 64, **CAUSAL, sinks=True), 4, {}),
    (_of(12, (32, 4), (25, 2610), 40, **CAUSAL), 8, {"intra_wg_overlap": 0, "BLOCK_M": 64, "ctas_per_sm": 4}),
    (_of(12, (32, 4), (100, 2610), 128), 8, {"BLOCK_N": 128, "tiles": "chained", "pingpong": True}),
    (_of(12, (28, 4), (100, 2610), 128, **CAUSAL), 8, {"BLOCK_N": 128, "tiles": "chained", "order": "drawn", "section": 8}),
    (_of(4, (40, 8), (70, 1700), 128, **CAUSAL, softcap=True), 4, {"maximum": "running", "rescale": "outgrown"}),
    (_of(4, (32, 8), (33, 3000), 192, **CAUSAL), 4, CHUNKS | {"tiles": "loop", "num_stages": 3, "pingpong": True}),
    (_of(4, (16, 8), (33, 3000), 256, dtype="fp16"), 2, {"tiles": "loop", "maximum": "running", "rescale": "always"}),
    (_of(4, (32, 8), (152, 5248), 160, **WINDOW), 4, CHUNKS | {"BLOCK_M": 192}),
    (_of(4, (64, 16), (26, 4000), 112, dtype="fp16", **WINDOW), 4, {}),
    (_of(4, (64, 8), (9, 4000), 192, 128, **CAUSAL), 8, {"BLOCK_M": 64}),
    (_of(16, (64, 8), (1, 4000), 128), 8, {"BLOCK_M": 64, "intra_wg_overlap": 0, "maximum": "running"}),
)
"""Problems, how many heads are packed, and what of PLAIN is otherwise."""

SECONDS = 0.1
"""Of timing for each."""


def _candidate(packed: int, changes: dict[str, Value]) -> Candidate:
    return Candidate(family=FAMILY, config=Config.of(PLAIN | changes, packed_heads=packed))


def check(place: int) -> str:
    """In a child process: what the gate says of a case."""
    gpu = local_gpu()
    assert gpu is not None and gpu.target is not None
    problem, packed, changes = CASES[place]
    reply = tasks.recheck_on_device(text_of(_candidate(packed, changes), problem), problem, gpu.target, place)
    return f"{reply.fate} {reply.reason}" if isinstance(reply, Failed) else f"right, {reply.error:.2f} of the tolerance at most"


def main() -> None:
    """Check, time, print."""
    gpu = local_gpu()
    if gpu is None or gpu.target is None or not gpu.target.is_hopper:
        raise SystemExit("packed_heads.py runs kernels for Hopper and found no such GPU: run it on an H100 or H200")
    with ProcessPoolExecutor(len(CASES), mp_context=multiprocessing.get_context("spawn")) as pool:
        for (problem, packed, _), said in zip(CASES, pool.map(check, range(len(CASES))), strict=True):
            print(f"{problem.label()} packed_heads={packed}: {said}", flush=True)
    watch = stopwatch("cuda:0")
    for problem, packed, changes in CASES:
        inputs = make_inputs(problem, device="cuda:0", seed=0)
        runs: dict[int, Run] = {}
        for heads in (1, packed):
            runs[heads] = tasks.launch_of(text_of(_candidate(heads, changes), problem), inputs)
            runs[heads]()
        times = watch.race(list(runs.values()), budget_s=SECONDS)
        found = {heads: one.median_us for heads, one in zip(runs, times, strict=True)}
        print(f"{problem.label()}: " + ", ".join(f"packed_heads={heads} {us:.1f} us" for heads, us in found.items()), flush=True)


if __name__ == "__main__":
    main()
