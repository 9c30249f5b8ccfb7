"""What a second GPU gains a search, with simulated GPUs and compilers and everything else real: `python benchmarks/lanes.py --gpus 1,2`.

Processes that stand in for GPUs and compilers sleep for as long as the committed log of a cold grid says that these took, all by `--slower`
times as much, so that this machine's few cores are to the sleeps what the cores of a GPU's host are to kernels. What is left is the search
itself: its threads, its record, its processes, and who waits for whom. A kernel's time is the cost model's, off by some.

Compilers are started ahead of the clock, as many as a GPU's host has cores: that takes such a host a second, and two cores eight and more.

Prints for each number of GPUs the seconds (divided by `--slower`), those of this process's interpreter, and what the lanes waited for.
"""

import argparse
import json
import logging
import math
import os
import random
import re
import sys
import tempfile
import time
import zlib
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from archived import folder

from flashtune.core.config import Config
from flashtune.core.problem import Features, Problem
from flashtune.core.results import CompileFacts, Measurement, Provenance
from flashtune.core.target import Target
from flashtune.tuner.replies import Called, Compiled, Launched, MachineCode, Ready, Rounds, Timed

LOG = folder() / "2026-11-23-h200-search" / "grid_cold.txt"
FACTS = CompileFacts(registers=128, spills=0, shared_bytes=65536, threads=128, tensor_core_ops=8)
"""Of kernels of which nothing is expected."""
STARTS_S, AT_HAND_S, CALLS_S = 1.1, 0.4, 0.27
"""What a GPU's process takes to start, machine code that is at hand, and whole calls."""
ERROR, NOISE = 0.08, 0.002
"""How far the cost model is off, and a time in a race."""
STARTING_S = 12.0
"""In which all compilers start: each gets a task of so many seconds."""
MARK = "\n# simulated: "

_begun: list[bool] = []


def costs_of(log: str) -> dict[str, dict[str, float]]:
    """Seconds of a trial, of a race and of the oracles, by problem, of a search that ran with FLASHTUNE_TRACE=1."""
    found = {}
    for label, trials, said in re.findall(r"^\d+ ms: (\S+): (\d+) trials, .*; on the GPU: (.*)$", log, re.MULTILINE):
        spent = {what: float(seconds) for what, seconds in re.findall(r"([a-z ]+?) ([\d.]+)(?:, |$)", said)}
        trial = sum(spent.get(what, 0.0) for what in ("load", "check", "time")) / int(trials)
        found[label] = {"trial": trial, "race": spent["rounds"] / 2, "oracles": spent["oracles"]}
    return found


def wait(seconds: float) -> None:
    """Be at work for so long."""
    time.sleep(seconds * float(os.environ["SIMULATED_SLOWER"]))


def _cost(problem: Problem, what: str) -> float:
    costs: dict[str, dict[str, float]] = json.loads(os.environ["SIMULATED_COSTS"])
    return costs[problem.label()][what]


def _drawn(text: str) -> float:
    return random.Random(zlib.crc32(text.encode())).gauss(0.0, 1.0)


def _said(source: Any) -> tuple[Config, CompileFacts]:
    said = json.loads(source.text.rpartition(MARK)[2])
    return Config.of(said["config"]), CompileFacts(**said["facts"])


def time_us(source: Any, problem: Problem, target: Target) -> float:
    """A kernel's time."""
    from flashtune.templates.cost import predict_us

    return predict_us(*_said(source), problem, target) * math.exp(ERROR * _drawn(source.text))


def ready(problem: Problem, target: Target, *_: object) -> Ready:
    """In place of inputs and oracles."""
    wait(_cost(problem, "oracles") + (0.0 if _begun else STARTS_S))
    _begun.append(True)
    return Ready()


def timed(source: Any, incumbent: Any, problem: Problem, target: Target, *_: object) -> Timed:
    """In place of a trial."""
    wait(_cost(problem, "trial"))
    own, other = (None if one is None else Measurement.of([time_us(one, problem, target)]) for one in (source, incumbent))
    assert own is not None, "there is a candidate"
    return Timed(time=own, error=0.5, incumbent=other)


def raced(sources: list[Any], problem: Problem, target: Target, *_: object) -> Rounds:
    """In place of a race."""
    wait(_cost(problem, "race"))
    rng = random.Random(0)
    times = tuple(tuple(time_us(source, problem, target) * math.exp(rng.gauss(0.0, NOISE)) for _ in range(100)) for source in sources)
    return Rounds(times=times, backend=None, began=1.0, ended=2.0, pid=os.getpid())


def compiled(source: Any, problem: Problem, target: Target, known: CompileFacts | None = None) -> Compiled:
    """In place of a compiler."""
    wait(float(os.environ["SIMULATED_COMPILE"]) * math.exp(0.35 * _drawn("c" + source.text)) if known is None else AT_HAND_S)
    return Compiled(facts=_said(source)[1], code=source.stem)


def launched(source: Any, *_: object) -> Launched:
    """In place of the description of launches."""
    return Launched(launches=source.stem)


def called(sources: list[Any], problem: Problem, target: Target, *_: object) -> Called:
    """In place of whole calls."""
    wait(CALLS_S)
    return Called(times=tuple(time_us(source, problem, target) for source in sources), framework=None)


def kept(*_: object) -> MachineCode:
    """In place of a winner's compilation."""
    wait(0.5 * float(os.environ["SIMULATED_COMPILE"]))
    return MachineCode()


def pause(seconds: float) -> Launched:
    """Of each compiler, so that all of them start."""
    time.sleep(seconds)
    return Launched(launches="")


class Quiet:
    """Hears of a search and says nothing; a GPU that nobody watches."""

    def __init__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def __enter__(self) -> "Quiet":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def search(gpus: int, jobs: int, problems: list[Problem], log: Path, trials: int | None = None) -> tuple[float, float]:
    """Seconds and interpreter's seconds of one search, in a storage of its own; of so many trials a problem, or until it knows enough."""
    from flashtune.cli.search import SWITCH_S
    from flashtune.cli.storage import study_storage
    from flashtune.core.target import find_target
    from flashtune.db.library import Layer, Library, shipped_path
    from flashtune.templates import families
    from flashtune.tuner.children import tasks
    from flashtune.tuner.children.workers import Workers
    from flashtune.tuner.publish.winners import Keeping
    from flashtune.tuner.search import evaluation
    from flashtune.tuner.search.plan import SearchPlan
    from flashtune.tuner.searching import Search
    from flashtune.tuner.spent import logger

    target, of = find_target("h200"), tasks.Source.of

    def marked(family: Any, variant: Any) -> Any:
        facts = family.expected(variant.config, variant.spec, target) or FACTS
        source = of(family, variant)
        return replace(source, text=source.text + MARK + json.dumps({"config": variant.config.as_dict(), "facts": asdict(facts)}))

    in_place = {"prepare_device": ready, "evaluate_candidate": timed, "race_finalists": raced, "compile_candidate": compiled}
    for name, stand_in in {**in_place, "describe_launches": launched}.items():
        setattr(tasks, name, stand_in)
    tasks.Source.of, evaluation.GpuWatch = marked, Quiet  # type: ignore[method-assign, assignment, misc]
    plan = SearchPlan(
        target=target,
        problems=tuple(problems),
        families=families(),
        source="measured",
        until=0.005 if trials is None else None,
        trials=60 if trials is None else trials,
        jobs=jobs,
        known=tuple(Library([Layer(location=shipped_path(), optional=True)]).winners()),
        devices=tuple(map(str, range(gpus))) if gpus > 1 else (),
        calls=called,
        keep=Keeping(compile=kept, put=lambda code: None),
    )
    logger.setLevel(logging.DEBUG)
    handler = logging.FileHandler(log, mode="w")
    logger.addHandler(handler)
    sys.setswitchinterval(SWITCH_S)
    provenance = Provenance(flashtune="0", torch="0", triton="0")
    with (
        tempfile.TemporaryDirectory() as folder,
        study_storage(f"sqlite:///{folder}/studies.sqlite") as storage,
        Workers(jobs=jobs, limits=plan.limits, devices=plan.devices) as workers,
    ):
        for pending in [workers.submit("compile", pause, STARTING_S, limit_s=10 * STARTING_S) for _ in range(jobs)]:
            pending.reply()
        began, cpu = time.monotonic(), time.process_time()
        Search(plan, storage=storage, provenance=provenance, save=partial(lambda result: None), listener=Quiet()).run(workers)
        took = time.monotonic() - began, time.process_time() - cpu
    logger.removeHandler(handler)
    return took


def main() -> None:
    """Search with each number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1,2")
    parser.add_argument("--jobs", type=int, default=15, help="compilers to a GPU (default: %(default)s)")
    parser.add_argument("--compile-s", type=float, default=3.0, help="what one compilation takes (default: %(default)s)")
    parser.add_argument(
        "--slower", type=float, default=3.0, help="how many times as long everything simulated takes (default: %(default)s)"
    )
    parser.add_argument("--most", type=int, default=16384, help="the longest of the grid's lengths (default: %(default)s)")
    parser.add_argument("--dtypes", default="bf16,fp16")
    parser.add_argument(
        "--trials", type=int, help="of each problem, so that every search has as many (default: what each search asks for, which varies)"
    )
    options = parser.parse_args()
    os.environ["SIMULATED_COSTS"] = json.dumps(costs_of(LOG.read_text()))
    os.environ |= {"SIMULATED_COMPILE": str(options.compile_s), "SIMULATED_SLOWER": str(options.slower)}
    from flashtune.cli.search import GRID
    from flashtune.tuner.children.forkserver import start_server

    start_server()
    problems = [
        Problem(batch=max(1, 16384 // n), heads=32, kv_heads=32, n_q=n, n_kv=n, d=64, d_v=64, dtype=dtype, features=Features(causal=causal))
        for dtype in options.dtypes.split(",")
        for causal in (False, True)
        for n in GRID
        if n <= options.most
    ]
    for gpus in map(int, options.gpus.split(",")):
        log = Path(os.environ.get("OUT", ".")) / f"lanes_{gpus}.txt"
        seconds, cpu = search(gpus, options.jobs * gpus, problems, log, options.trials)
        waited = sum(map(float, re.findall(r"wait for compilers ([\d.]+)", log.read_text()))) / options.slower
        print(f"{gpus} GPUs: {seconds / options.slower:.1f} s; waited for compilers {waited:.1f} s; interpreter {cpu:.1f} s", flush=True)


if __name__ == "__main__":
    main()
