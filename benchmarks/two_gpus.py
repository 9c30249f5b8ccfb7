"""How much faster `flashtune search --gpus all` is than one GPU of the same machine: `python benchmarks/two_gpus.py --runs all,one`.

Each run is the command as a user runs it, in a process of its own with empty caches and a database of its own. `one` is given one GPU and
the cores that fall to it, `all` every GPU and every core, as if a second machine were added. `--words` are the command's.

Prints the seconds of each run and their ratio, and writes two_gpus.json, after each run, to the folder named by OUT (default: the current
one), and beside it what each run said with FLASHTUNE_TRACE=1. What is there of the other run is kept, so that `--runs one` and `--runs all`
may be two calls. A run that meets `--limit-s` is ended; then what both took for as many problems is compared.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from flashtune.tuner.machine import local_gpu, provenance

RUNS = ("one", "all")

GRACE_S = 10.0
"""How long a search that met its limit may take to end its own processes."""


def cores_of(run: str, gpus: int, first: int) -> list[int]:
    """The cores of a run, of those that this process may use: all of them, or the part of the GPU `first`."""
    mine = sorted(os.sched_getaffinity(0))
    share = len(mine) // gpus
    return mine if run == "all" else mine[first * share : (first + 1) * share]


def searched(run: str, words: list[str], folder: Path, *, gpus: int, first: int, limit_s: float) -> dict[str, Any]:
    """Run the command; its seconds from start to end, those of the search in it, and how many problems have a row. `rc` is None where
    it met its limit."""
    cores = cores_of(run, gpus, first)
    # A compiler that outlives its search for a moment may still write there.
    with tempfile.TemporaryDirectory(prefix="flashtune-gpus-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        empty = {key: str(scratch / key.lower()) for key in ("TRITON_CACHE_DIR", "FLASHTUNE_CACHE", "XDG_DATA_HOME")}
        environment = {**os.environ, **empty, "FLASHTUNE_TRACE": "1"} | ({} if run == "all" else {"CUDA_VISIBLE_DEVICES": str(first)})
        lanes = ["--gpus", "all"] if run == "all" else []
        command = [sys.executable, "-m", "flashtune", "search", *words, *lanes, "--db", str(scratch / "found.sqlite")]
        began = time.monotonic()
        with (folder / f"{run}.txt").open("w") as log:
            ended = ended_within(limit_s, ["taskset", "-c", ",".join(map(str, cores)), *command], environment, log)
        took = time.monotonic() - began
    said = (folder / f"{run}.txt").read_text()
    done = re.findall(r"^(\d+) ms: (\S+): (\d+) trials", said, re.MULTILINE)
    at = {
        word: int(found[1]) / 1000 for word in ("planned", "searched") if (found := re.search(rf"^(\d+) ms: {word}$", said, re.MULTILINE))
    }
    return {
        "command": shlex.join(["flashtune", *command[3:-2]]),
        "cores": len(cores),
        "rc": ended,
        "seconds": round(took, 1),
        "search_s": round(at["searched"] - at["planned"], 1) if len(at) == 2 else None,
        "problems": len(done),
        "trials": sum(int(trials) for _, _, trials in done),
        "done_at_s": {label: int(at) / 1000 for at, label, _ in done},
    }


def compared(one: Mapping[str, Any], every: Mapping[str, Any]) -> dict[str, Any]:
    """How many times as fast all GPUs are: by the seconds of both runs, where both came to their ends; else by when each had done as many
    problems as both did, which needn't be the same ones. What a run was at when it met its limit counts for nothing."""
    whole, count = one["rc"] == every["rc"] == 0, min(one["problems"], every["problems"])
    if not whole and not count:
        return {"problems": 0, "whole": False, "one_s": None, "all_s": None, "ratio": None}
    one_s, all_s = (run["seconds"] if whole else sorted(run["done_at_s"].values())[count - 1] for run in (one, every))
    return {"problems": count, "whole": whole, "one_s": one_s, "all_s": all_s, "ratio": round(one_s / all_s, 3)}


def ended_within(limit_s: float, command: list[str], environment: dict[str, str], log: IO[str]) -> int | None:
    """A command's exit status, or None where it met its limit; it and its process group are gone then."""
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        # Its children are of groups of their own, which a search ends when it is asked to end.
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="all,one", help="which to make, in this order (default: %(default)s)")
    parser.add_argument("--words", default="--gpu-name h200 --d 64", help="of the command (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the GPU of the run of one (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds after which a run is given up (default: %(default)s)")
    options = parser.parse_args()
    if local_gpu() is None:
        raise SystemExit("two_gpus.py measures kernels and found no GPU: run it on the GPUs' machine")
    import torch

    gpus = torch.cuda.device_count()
    folder = Path(os.environ.get("OUT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "two_gpus.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    found["provenance"] = provenance(command=shlex.join(["python", *sys.argv]), seed=None, measured=True).as_json()
    found["gpus"] = gpus
    for run in options.runs.split(","):
        if run not in RUNS:
            parser.error(f"--runs {run!r} is none of {', '.join(RUNS)}")
        found[run] = searched(run, shlex.split(options.words), folder, gpus=gpus, first=options.first, limit_s=options.limit_s)
        kept.write_text(json.dumps(found, indent=1))
        print(run, json.dumps(found[run]), flush=True)
    if all(run in found for run in RUNS):
        found["compared"] = told = compared(found["one"], found["all"])
        kept.write_text(json.dumps(found, indent=1))
        what = "the whole command" if told["whole"] else f"as many as {told['problems']} problems (not both runs came to their end)"
        print(f"{gpus} GPUs: {what} in {told['all_s']} s, by one in {told['one_s']} s: {told['ratio']} times as fast")


if __name__ == "__main__":
    main()
