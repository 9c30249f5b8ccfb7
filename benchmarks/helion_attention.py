"""Our search and Helion's autotuner on one problem, then both kernels in one race: `python benchmarks/helion_attention.py`.

Needs `pip install helion`. The problem is a plain forward (D = 128, N = 4096, B = 4, H = 16, bf16, full). Both begin with nothing
compiled, in a running interpreter; ours knows the shipped rows of all other problems, and none of this one. Helion tunes the kernel of
helion_kernel.py at its default effort, with no cache of earlier runs, until its own end or `--helion-s` (its own budget, so that it returns
its best by then). Then both kernels, cuDNN and torch's default are timed interleaved, and Helion's output is compared with ours.

Prints the times and writes helion.json to the folder named by OUT (default: the current one). Each stage is a process of its own with a
time limit; if Helion's hangs, it is killed, and the rest is kept.
"""

import argparse
import csv
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates import families
from flashtune.tuner.machine import cores, local_gpu, provenance
from flashtune.tuner.propose.space import Candidate

PROBLEM = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16")

LATE_S = 60.0
"""So long after its time Helion may take to end by itself."""


def ours(target: Target, given: dict[str, Any]) -> dict[str, Any]:
    """Search as if for the first time."""
    from searches import searched, shipped

    made_by = provenance(command="helion_attention.py", seed=0, measured=True)
    known = [row for row in shipped() if row.key != PROBLEM.key(target.slug)]
    began = time.monotonic()
    [result] = searched([PROBLEM], target, made_by=made_by, known=known, trials=60, seed=0, jobs=given["jobs"])
    took = time.monotonic() - began
    assert result.best is not None, "the search found a kernel"
    return {
        "seconds": round(took, 1),
        "trials": len(result.outcomes),
        "template": result.best.template,
        "config": result.best.config.as_dict(),
    }


def helions(target: Target, given: dict[str, Any]) -> dict[str, Any]:
    """Let Helion tune."""
    import torch
    from helion_kernel import attend

    from flashtune.tuner.verify.inputs import make_inputs

    inputs = make_inputs(PROBLEM, device="cuda", seed=0)
    arguments = tuple(x.reshape(-1, PROBLEM.n_kv, PROBLEM.d).contiguous() for x in (inputs.q, inputs.k, inputs.v))
    bound = attend.bind(arguments)
    torch.cuda.synchronize()
    began = time.monotonic()
    config = bound.autotune(arguments, force=True)
    torch.cuda.synchronize()
    return {"seconds": round(time.monotonic() - began, 1), "config": json.loads(config.to_json())}


def raced(target: Target, given: dict[str, Any]) -> dict[str, Any]:
    """Medians in microseconds of one interleaved race, and how far Helion's output lies from ours."""
    import torch

    from flashtune.tuner.children import tasks
    from flashtune.tuner.timing.baseline import framework_call
    from flashtune.tuner.timing.stopwatch import Stopwatch
    from flashtune.tuner.verify.inputs import make_inputs

    inputs = make_inputs(PROBLEM, device="cuda", seed=0)
    found = given["ours"]
    candidate = Candidate(family=families()[found["template"]], config=Config.of(found["config"]))
    runs = {"flashtune": tasks.launch_of(tasks.Source.of(candidate.family, candidate.variant(PROBLEM.spec())), inputs)}
    error = None
    if given.get("helion", {}).get("config"):
        import helion  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
        from helion_kernel import attend

        arguments = tuple(x.reshape(-1, PROBLEM.n_kv, PROBLEM.d).contiguous() for x in (inputs.q, inputs.k, inputs.v))
        bound = attend.bind(arguments)
        bound.set_config(helion.Config.from_json(json.dumps(given["helion"]["config"])))
        runs["helion"] = lambda: bound(*arguments)
        out = bound(*arguments)
        runs["flashtune"]()
        error = float((out.view_as(inputs.operands["out"]).float() - inputs.operands["out"].float()).abs().max())
    for name, backend in (("cudnn", "cudnn"), ("torch", None)):
        call = framework_call(inputs, backend)
        if call is not None:
            runs[name] = call
    stopwatch = Stopwatch(torch.device("cuda"), target.l2_bytes)
    rounds = stopwatch.samples(list(runs.values()), budget_s=given["seconds"], least=15, most=400)
    base = rounds[0]
    medians = {name: sorted(row)[len(row) // 2] for name, row in zip(runs, rounds, strict=True)}
    ratios = {name: sorted(x / y for x, y in zip(row, base, strict=True))[len(row) // 2] for name, row in zip(runs, rounds, strict=True)}
    return {"median_us": medians, "over_ours": ratios, "rounds": len(base), "max_difference": error}


STAGES = {"ours": ours, "helion": helions, "race": raced}


def staged(name: str, given: dict[str, Any], folder: Path, limit_s: float, environment: dict[str, str]) -> dict[str, Any]:
    """Run a stage in a process of its own; what it answers, or why it doesn't."""
    asked, answer = folder / f"{name}.in.json", folder / f"{name}.out.json"
    asked.write_text(json.dumps(given))
    words = [sys.executable, __file__, "--stage", name, "--given", str(asked), "--answer", str(answer)]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(words, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        finally:
            # Its own children are of its group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if answer.exists():
        return dict(json.loads(answer.read_text()))
    last = (folder / f"{name}.log").read_text().strip().splitlines()[-5:]
    return {"failed": f"killed after {limit_s:g} s" if process.returncode == -signal.SIGKILL else " | ".join(last)}


def progress(log: Path, at_s: float) -> dict[str, Any]:
    """What Helion's own log says: how many configs it timed, and the best time, in microseconds, in all and after `at_s` seconds."""
    if not log.exists():
        return {}
    with log.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("perf_ms")]
    when = next((name for name in rows[0] if "timestamp" in name), None) if rows else None
    times = [(float(row[when] or math.inf) if when else math.inf, 1e3 * float(row["perf_ms"])) for row in rows]
    early = [time_us for at, time_us in times if at <= at_s]
    return {
        "timed": len(times),
        "best_us": min((time_us for _, time_us in times), default=None),
        "best_us_in_our_time": min(early, default=None),
    }


def share_of_time(ours: Mapping[str, Any], helion: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """What share of Helion's seconds our search took, and whether Helion ended by itself: cut off by its budget it would have taken longer,
    and the share is no more than an upper bound."""
    if "seconds" not in ours:
        return {"share_of_time": None, "ended": None}
    seconds, itself = helion.get("seconds", limit_s), helion.get("seconds", math.inf) < limit_s
    return {"share_of_time": round(ours["seconds"] / seconds, 3), "ended": "by itself" if itself else "by its budget"}


def run(target: Target, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All stages; helion.json grows with each."""
    found: dict[str, Any] = {"problem": PROBLEM.label(), "b_h": [PROBLEM.batch, PROBLEM.heads]}
    found["provenance"] = provenance(command=shlex.join(["python", *sys.argv]), seed=0, measured=True).as_json()

    def keep() -> None:
        (folder / "helion.json").write_text(json.dumps(found, indent=1, allow_nan=False))

    with tempfile.TemporaryDirectory(prefix="flashtune-helion-") as name:
        scratch = Path(name)
        found["ours"] = staged("ours", {"jobs": options.jobs}, scratch, options.ours_s, {"TRITON_CACHE_DIR": str(scratch / "triton-ours")})
        keep()
        print("ours:", json.dumps(found["ours"]), flush=True)
        settings = {
            "TRITON_CACHE_DIR": str(scratch / "triton-helion"),
            "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
            "HELION_CACHE_DIR": str(scratch / "helion"),
            "HELION_AUTOTUNE_BUDGET_SECONDS": str(int(options.helion_s)),
            "HELION_AUTOTUNE_PROGRESS_BAR": "0",
            "HELION_AUTOTUNE_LOG": str(scratch / "trials"),
            "HELION_AUTOTUNE_EFFORT": options.effort,
            "HELION_AUTOTUNE_IGNORE_ERRORS": "1",
        }
        found["helion"] = staged("helion", {}, scratch, options.helion_s + LATE_S, settings)
        found["helion"] |= progress(scratch / "trials.csv", found["ours"].get("seconds", math.inf))
        found["helion"] |= {"limit_s": options.helion_s, "effort": options.effort}
        found |= share_of_time(found["ours"], found["helion"], options.helion_s)
        keep()
        print("helion:", json.dumps(found["helion"]), flush=True)
        given = {"ours": found["ours"], "helion": found["helion"], "seconds": options.seconds}
        found["race"] = staged("race", given, scratch, 120.0, {"TRITON_CACHE_DIR": str(scratch / "triton-race")})
        keep()
        print("race:", json.dumps(found["race"]), flush=True)
    return found


def main() -> None:
    """Run and print, or be one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours-s", type=float, default=90.0, help="seconds after which our search is given up (default: %(default)s)")
    parser.add_argument("--helion-s", type=float, default=90.0, help="seconds that Helion is given (default: %(default)s)")
    parser.add_argument("--effort", choices=("quick", "full"), default="full", help="Helion's own setting (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of the race (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=max(1, cores() - 1), help="our compilers (default: %(default)s)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--given", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise SystemExit("helion_attention.py measures kernels and found no GPU that flashtune knows: run it on the GPU's machine")
    if options.stage:
        answer = STAGES[options.stage](gpu.target, json.loads(options.given.read_text()))
        options.answer.write_text(json.dumps(answer))
        return
    folder = Path(os.environ.get("OUT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    found = run(gpu.target, folder, options)
    if found["share_of_time"] is not None:
        least = "" if found["ended"] == "by itself" else "no more than "
        print(f"our search took {least}{found['share_of_time']:.3f} of Helion's time, which ended {found['ended']}")
    race = found["race"]
    for name, ratio in race.get("over_ours", {}).items():
        print(f"{name}: {race['median_us'][name]:.1f} us, {ratio:.3f} times ours")


if __name__ == "__main__":
    main()
