"""Search of a problem without a record: wall time of the command, and how far its pick is behind the best kernel (regret).

`flashtune search` runs as a user runs it, in a process of its own with empty caches; its wall time is of the whole command, its lines
with FLASHTUNE_TRACE=1 say where the time went, and nvidia-smi in how much of it the GPU was busy. Then every candidate of the families
named by `--all` is compiled, checked and timed, and of the other families, for the time that is left, those that a search without end
would try. At the end the fastest of all this and the pick race, interleaved, in one process.

Prints the regret and the number of valid candidates that were tried, and writes unseen.json. A sweep that `--sweep-s` ends isn't called
exhaustive.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna

from benchmarks.shared.environment import argument_parser, command, made_by, output_folder, this_gpu
from benchmarks.shared.searches import shipped, text_of
from flashtune.cli.console import messages
from flashtune.cli.progress import SearchProgress
from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Outcome, SearchResult
from flashtune.core.system.errors import NoKernelFound
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.tuner.children import tasks
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.machine import cores, provenance
from flashtune.tuner.propose.space import Candidate, SearchSpace
from flashtune.tuner.replies import Failed
from flashtune.tuner.search.plan import SearchPlan
from flashtune.tuner.searching import Search
from flashtune.tuner.timing.racing import Contest

FEW_S = 15.0
"""Least time in which other families are begun with."""

RACERS = 12
"""Number of the fastest candidates that race against the pick."""


def command_of(problem: Problem, target: Target, db: Path, extra: Sequence[str]) -> list[str]:
    """The command that searches a plain problem, in this interpreter."""
    sizes = {"--d": problem.d, "--n": problem.n_kv, "--batch": problem.batch, "--heads": problem.heads, "--kv-heads": problem.kv_heads}
    words = [word for name, size in sizes.items() for word in (name, str(size))]
    band = "--causal" if problem.features.causal else "--full"
    command = [sys.executable, "-m", "flashtune", "search", "--gpu-name", target.slug, *words, "--dtype", problem.dtype, band]
    return [*command, "--db", str(db), *extra]


def search(problem: Problem, target: Target, scratch: Path, extra: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run the command with empty caches. Returns its seconds, in all and by purpose, its trace, and the share of time with a busy GPU; its
    result is in the database found.sqlite of `scratch`."""
    empty = {name: str(scratch / name.lower()) for name in ("TRITON_CACHE_DIR", "FLASHTUNE_CACHE")}
    environment = {**os.environ, **empty, "FLASHTUNE_TRACE": "1", "XDG_DATA_HOME": str(scratch / "data")}
    words = command_of(problem, target, scratch / "found.sqlite", extra)
    with (scratch / "said.txt").open("w") as log, watched() as readings:
        began = time.monotonic()
        done = subprocess.run(words, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s, check=False)
        took = time.monotonic() - began
    busy = round(sum(readings) / len(readings) / 100, 3) if readings else None
    text = (scratch / "said.txt").read_text()
    said = [line for line in text.splitlines() if re.match(r"\d+ ms: ", line)]
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(words)} ended with {done.returncode}: {text[-2000:]}")
    at = {name: int(found[1]) / 1000 for name in ("planned", "searched", "done") if (found := re.search(rf"(\d+) ms: {name}", text))}
    return {"seconds": round(took, 2), "at_s": at, "spent_s": spent(said), "busy": busy, "trace": said}


def spent(said: Sequence[str]) -> dict[str, dict[str, float]]:
    """Seconds by purpose that a search's trace has, of the searching process (`here`) and of the GPU's (`on the GPU`)."""
    found: dict[str, dict[str, float]] = {}
    for place, purposes in (part for line in said for part in re.findall(r"; (here|on the GPU): ([^;]*)", line)):
        for purpose, seconds in re.findall(r"([a-z][a-z ]*) ([0-9.]+)", purposes):
            of = found.setdefault(place, {})
            of[purpose] = round(of.get(purpose, 0.0) + float(seconds), 2)
    return found


@contextmanager
def watched() -> Iterator[list[int]]:
    """Percentages of time in which the GPU ran kernels during the block, one for each of the tool's periods."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=100"]
    readings: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tool:
        try:
            yield readings
        finally:
            tool.terminate()
            assert tool.stdout is not None
            readings += [int(line) for line in tool.stdout if line.strip().isdecimal()]


def swept(
    problem: Problem, target: Target, wholly: Sequence[str], budget_s: float, *, workers: Workers, jobs: int
) -> tuple[list[SearchResult], dict[str, tuple[int, int]]]:
    """Outcomes of every candidate of `wholly` and of some of the rest; and by family the numbers of tried and of valid candidates."""
    began, found = time.monotonic(), list[SearchResult]()
    origin = provenance(command=command(), seed=0, measured=True)
    space = SearchSpace(families(), problem, target)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for sampler in ("exhaustive", "gp"):
        group = {name: family for name, family in space.families.items() if (name in wholly) == (sampler == "exhaustive")}
        left = began + budget_s - time.monotonic()
        if not group or left < FEW_S:
            continue
        # The race that follows the trials takes a while, too.
        how: dict[str, Any] = {"trials": 100_000, "budget_s": left - 2, "until": None, "race_s": 0.1, "known": ()}
        plan = SearchPlan(
            target=target, problems=(problem,), families=group, source="measured", sampler=sampler, seed=0, jobs=jobs, **how
        )  # fmt: skip
        storage = optuna.storages.InMemoryStorage()
        with SearchProgress(messages(), problems=[problem], trials=None, budget_s=left, quiet=False) as progress:
            try:
                found += Search(plan, storage=storage, provenance=origin, save=lambda _: None, listener=progress).run(workers)
            except NoKernelFound as error:
                print(error, file=sys.stderr, flush=True)
    tried = [(outcome.template, outcome.config) for result in found for outcome in result.outcomes]
    valid = [(candidate.family.name, candidate.config) for candidate in space.every()]
    counts = {name: (len({t for t in tried if t[0] == name}), sum(v[0] == name for v in valid)) for name in space.families}
    return found, counts


def raced(problem: Problem, target: Target, outcomes: Sequence[Outcome], seconds: float, workers: Workers) -> tuple[list[float], str]:
    """Distances behind the fastest in races until these are decided; nothing, and the reason, where they couldn't race."""
    known = families()
    candidates = [Candidate(family=known[outcome.template], config=outcome.config) for outcome in outcomes]
    sources = [text_of(candidate, problem) for candidate in candidates]
    contest = Contest(len(sources))
    while racers := contest.racers():
        racing = [sources[place] for place in racers]
        # In the process that has the inputs already.
        answer = workers.submit("device", tasks.race_finalists, racing, problem, target, 0, seconds, limit_s=60.0 + 20 * seconds).reply()
        if isinstance(answer, Failed):
            return [], answer.reason
        contest.add(racers, answer.times[: len(racers)])
    return list(contest.behind()), ""


def run(problem: Problem, target: Target, folder: Path, options: argparse.Namespace) -> None:
    """Search, sweep, race, and report."""
    if any(row.key == problem.key(target.slug) for row in shipped()):
        raise SystemExit(f"{problem.label()} has a record: name another problem")
    found: dict[str, Any] = {"problem": problem.label(), "b_h_hkv": [problem.batch, problem.heads, problem.kv_heads]}
    found["provenance"] = made_by()
    file = folder / "unseen.json"
    with tempfile.TemporaryDirectory(prefix="flashtune-unseen-") as name:
        scratch = Path(name)
        found["search"] = search(problem, target, scratch, shlex.split(options.search), options.search_s)
        with Store.open(str(scratch / "found.sqlite"), writable=False) as store:
            [result] = store.results()
        pick = result.best
        assert pick is not None, "the command found a kernel"
        found |= {"pick": pick.config.label(), "template": pick.template, "trials": len(result.outcomes)}
        took, busy = found["search"]["seconds"], found["search"]["busy"]
        print(f"{problem.label()}: searched in {took:.1f} s, {len(result.outcomes)} trials, GPU busy {busy}", flush=True)
        print(*found["search"]["trace"], sep="\n", flush=True)
        file.write_text(json.dumps(found, indent=1, allow_nan=False))
        # The sweep tests the pick: kernels that the search compiled needn't be compiled again.
        os.environ["TRITON_CACHE_DIR"] = str(scratch / "triton_cache_dir")
        found |= regret(problem, target, pick, options)
    file.write_text(json.dumps(found, indent=1, allow_nan=False))


def regret(problem: Problem, target: Target, pick: Outcome, options: argparse.Namespace) -> dict[str, Any]:
    """Sweep, then race the pick with the fastest of all; prints the result."""
    began, found = time.monotonic(), dict[str, Any]()
    with Workers(jobs=options.jobs) as workers:
        results, counts = swept(problem, target, options.all.split(","), options.sweep_s, workers=workers, jobs=options.jobs)
        found["sweep"] = {"seconds": round(time.monotonic() - began, 1), "tried_of": counts}
        found["untimed"] = Counter(f"{o.fate}: {o.reason}" for one in results for o in one.outcomes if not o.fate.timed)
        every = [outcome for one in results for outcome in one.outcomes if outcome.fate.timed and outcome.measurement is not None]
        every.sort(key=lambda outcome: outcome.measurement.median_us if outcome.measurement else 0.0)
        others = [outcome for outcome in every if outcome.variant_id != pick.variant_id][:RACERS]
        behind, found["failed"] = raced(problem, target, [pick, *others], options.seconds, workers)
    tried = ", ".join(f"{name} {tried} of {valid}" for name, (tried, valid) in counts.items())
    whole = all(tried >= valid for tried, valid in counts.values())
    print(f"swept {'all' if whole else 'not all'} candidates: {tried}; {len(every)} have a time")
    if behind:
        best = [pick, *others][behind.index(0.0)]
        found |= {"regret": behind[0], "best": f"{best.template} {best.config.label()}"}
        print(f"the pick is {behind[0]:.2%} behind the best of these: {found['best']}")
    else:
        print(f"no race: {found['failed']}")
    return found


def main() -> None:
    """Run and print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--d", type=int, default=256, help="head size (%(default)s)")
    parser.add_argument("--n", type=int, default=3001, help="length (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--heads", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--kv-heads", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    parser.add_argument(
        "--all", default="flash_fwd_hopper", help="families all of whose candidates are tried, commas between them (%(default)s)"
    )
    parser.add_argument("--search", default="", help="further words for `flashtune search`, such as '--budget 8s'")
    parser.add_argument("--search-s", type=float, default=60.0, help="seconds after which the search is given up (default: %(default)s)")
    parser.add_argument("--sweep-s", type=float, default=60.0, help="seconds for the sweep (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each closing race (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=max(1, cores() - 1), help="the sweep's compilers (default: %(default)s)")
    options = parser.parse_args()
    target = this_gpu()
    problem = Problem(
        batch=options.batch,
        heads=options.heads,
        kv_heads=options.kv_heads,
        n_q=options.n,
        n_kv=options.n,
        d=options.d,
        d_v=options.d,
        dtype="bf16",
        features=Features(causal=not options.full),
    )
    run(problem, target, output_folder(), options)
