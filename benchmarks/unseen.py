"""How long a search of a problem that no row knows takes, and how far its pick is from the best: `python benchmarks/unseen.py`.

`flashtune search` is run as a user runs it, in a process of its own with empty caches; its wall time is of the whole command, from the
interpreter's start to its end, and what it says with FLASHTUNE_TRACE=1 tells where it went. Then every candidate of the families named by
`--all` is compiled, checked and timed, and of the other families, for the time that is left, those that a search tries that doesn't stop.
At the end the fastest of all this and the search's pick race, interleaved, in one process: the regret is what the pick is behind.

Prints what was found, with how many of the valid candidates were tried, and writes unseen.json to the folder named by OUT (default: the
current one). What was tried so far is kept when the time (`--sweep-s`) ends a sweep, and then it isn't said to be exhaustive.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from searches import searched, shipped

from flashtune.core.problem import Features, Problem
from flashtune.core.results import Outcome, SearchResult
from flashtune.core.target import Target
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.tuner.children import tasks
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.machine import cores, local_gpu, provenance
from flashtune.tuner.propose.space import Candidate, SearchSpace
from flashtune.tuner.replies import Failed
from flashtune.tuner.timing.racing import Contest

FEW_S = 15.0
"""With less time than this no other families are begun with."""

RACERS = 12
"""Of all that was tried, so many of the fastest race against the pick."""


def command_of(problem: Problem, target: Target, db: Path, extra: Sequence[str]) -> list[str]:
    """The command that searches a plain problem, in this interpreter."""
    sizes = {"--d": problem.d, "--n": problem.n_kv, "--batch": problem.batch, "--heads": problem.heads, "--kv-heads": problem.kv_heads}
    words = [word for name, size in sizes.items() for word in (name, str(size))]
    band = "--causal" if problem.features.causal else "--full"
    return [
        sys.executable,
        "-m",
        "flashtune",
        "search",
        "--gpu-name",
        target.slug,
        *words,
        "--dtype",
        problem.dtype,
        band,
        "--db",
        str(db),
        *extra,
    ]


def search(problem: Problem, target: Target, scratch: Path, extra: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run the command with empty caches; its seconds and what it said. What it found is in the database found.sqlite of `scratch`."""
    empty = {name: str(scratch / name.lower()) for name in ("TRITON_CACHE_DIR", "FLASHTUNE_CACHE")}
    environment = {**os.environ, **empty, "FLASHTUNE_TRACE": "1", "XDG_DATA_HOME": str(scratch / "data")}
    words = command_of(problem, target, scratch / "found.sqlite", extra)
    with (scratch / "said.txt").open("w") as log:
        began = time.monotonic()
        done = subprocess.run(words, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s, check=False)
        took = time.monotonic() - began
    text = (scratch / "said.txt").read_text()
    said = [line for line in text.splitlines() if re.match(r"\d+ ms: ", line)]
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(words)} ended with {done.returncode}: {text[-2000:]}")
    at = {name: int(found[1]) / 1000 for name in ("planned", "searched", "done") if (found := re.search(rf"(\d+) ms: {name}", text))}
    return {"seconds": round(took, 2), "at_s": at, "trace": said}


def swept(
    problem: Problem, target: Target, wholly: Sequence[str], budget_s: float, *, workers: Workers, jobs: int, command: str
) -> tuple[list[SearchResult], dict[str, tuple[int, int]]]:
    """What became of every candidate of `wholly` and of some of the rest; of each family how many were tried, of how many."""
    began, found = time.monotonic(), list[SearchResult]()
    made_by = provenance(command=command, seed=0, measured=True)
    space = SearchSpace(families(), problem, target)
    groups = [{name: family for name, family in space.families.items() if (name in wholly) == first} for first in (True, False)]
    for number, group in enumerate(groups):
        left = began + budget_s - time.monotonic()
        if not group or left < FEW_S:
            continue
        kinds: dict[str, Any] = {"sampler": "exhaustive"} if number == 0 else {"sampler": "gp"}
        found += searched(
            [problem],
            target,
            made_by=made_by,
            known=(),
            trials=100_000,
            seed=0,
            jobs=jobs,
            race_s=0.1,
            # The race that follows the trials takes a while, too.
            budget_s=left - 2,
            until=None,
            only=group,
            workers=workers,
            **kinds,
        )
    tried = [(outcome.template, outcome.config) for result in found for outcome in result.outcomes]
    valid = [(candidate.family.name, candidate.config) for candidate in space.every()]
    counts = {name: (len({t for t in tried if t[0] == name}), sum(v[0] == name for v in valid)) for name in space.families}
    return found, counts


def raced(problem: Problem, target: Target, outcomes: Sequence[Outcome], seconds: float, workers: Workers) -> tuple[list[float], str]:
    """By how much each is behind the fastest in races of all of them, until it is decided; nothing, and why, where they couldn't race."""
    known = families()
    candidates = [Candidate(family=known[outcome.template], config=outcome.config) for outcome in outcomes]
    sources = [tasks.Source.of(candidate.family, candidate.variant(problem.spec())) for candidate in candidates]
    contest = Contest(len(sources))
    while racers := contest.racers():
        racing = [sources[place] for place in racers]
        # In the process that has the inputs already.
        answer = workers.submit("device", tasks.race_finalists, racing, problem, target, 0, seconds, limit_s=60.0 + 20 * seconds).reply()
        if isinstance(answer, Failed):
            return [], answer.reason
        contest.add(racers, answer.times[: len(racers)])
    return list(contest.standing().behind), ""


def run(problem: Problem, target: Target, folder: Path, options: argparse.Namespace) -> None:
    """Search, sweep, race, and say."""
    command = shlex.join(["python", *sys.argv])
    if any(row.key == problem.key(target.slug) for row in shipped()):
        raise SystemExit(f"{problem.label()} has a row: name another problem")
    found: dict[str, Any] = {"problem": problem.label(), "b_h_hkv": [problem.batch, problem.heads, problem.kv_heads]}
    found["provenance"] = provenance(command=command, seed=0, measured=True).as_json()

    def keep() -> None:
        (folder / "unseen.json").write_text(json.dumps(found, indent=1, allow_nan=False))

    with tempfile.TemporaryDirectory(prefix="flashtune-unseen-") as name:
        scratch = Path(name)
        found["search"] = search(problem, target, scratch, shlex.split(options.search), options.search_s)
        with Store.open(str(scratch / "found.sqlite"), writable=False) as store:
            [result] = store.results()
        pick = result.best
        assert pick is not None, "the command found a kernel"
        found |= {"pick": pick.config.label(), "template": pick.template, "trials": len(result.outcomes)}
        print(f"{problem.label()}: searched in {found['search']['seconds']:.1f} s, {len(result.outcomes)} trials", flush=True)
        print(*found["search"]["trace"], sep="\n", flush=True)
        keep()
        # What the search compiled needn't be compiled again: the sweep tests the pick.
        os.environ["TRITON_CACHE_DIR"] = str(scratch / "triton_cache_dir")
        began = time.monotonic()
        with Workers(jobs=options.jobs) as workers:
            how: dict[str, Any] = {"workers": workers, "jobs": options.jobs, "command": command}
            results, counts = swept(problem, target, options.all.split(","), options.sweep_s, **how)
            found["sweep"] = {"seconds": round(time.monotonic() - began, 1), "tried_of": counts}
            found["untimed"] = Counter(f"{o.fate}: {o.reason}" for one in results for o in one.outcomes if not o.fate.timed)
            every = [outcome for one in results for outcome in one.outcomes if outcome.fate.timed and outcome.measurement is not None]
            every.sort(key=lambda outcome: outcome.measurement.median_us if outcome.measurement else 0.0)
            others = [outcome for outcome in every if outcome.variant_id != pick.variant_id][:RACERS]
            behind, failed = raced(problem, target, [pick, *others], options.seconds, workers)
    found["failed"] = failed
    if behind:
        best = [pick, *others][behind.index(0.0)]
        found |= {"regret": behind[0], "best": f"{best.template} {best.config.label()}"}
    keep()
    said = ", ".join(f"{name} {tried} of {valid}" for name, (tried, valid) in counts.items())
    whole = all(tried >= valid for tried, valid in counts.values())
    print(f"swept {'all' if whole else 'not all'} candidates: {said}; {len(every)} have a time")
    print(f"the pick is {behind[0]:.2%} behind the best of these: {found['best']}" if behind else f"no race: {failed}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=256)
    parser.add_argument("--n", type=int, default=3001)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--kv-heads", type=int, default=4)
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
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise SystemExit("unseen.py measures kernels and found no GPU that flashtune knows: run it on the GPU's machine")
    folder = Path(os.environ.get("OUT", "."))
    folder.mkdir(parents=True, exist_ok=True)
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
    run(problem, gpu.target, folder, options)


if __name__ == "__main__":
    main()
