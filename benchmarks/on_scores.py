"""Times the kernels that may serve a plain row on scores as models make them: `python benchmarks/on_scores.py [--n 4096] [--d 64,128]`.

Of each row of a plain problem that settles row maxima: its kernel, its twin, the kernel's tiles with running maxima, and all of these with
each of the `--ways` to rescale what came before a new maximum. All are checked first as a search's candidates are, in several processes;
then one process alone times them, interleaved, on random numbers and on a few distributions (flashtune.tuner.verify.distributions), and
compares outputs with float64.

One line a kernel: microseconds on each distribution, then the largest error of any of these over the online softmax's (the best of the
kernels whose maxima run and are always rescaled, or where they grew).
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from children import Children
from forward import until
from forward_cells import SCORE_DTYPES, dtypes_of, names_of, numbers_of, problem_of
from forward_peers import DRAWS, error_of, stopwatch
from race_again import Checked, check_problem

from flashtune.core.config import settles
from flashtune.core.launching import launcher
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.core.target import Target
from flashtune.core.tolerances import tolerance
from flashtune.db.library import Library, shipped_path
from flashtune.templates import family
from flashtune.tuner.children import tasks
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.verify.correctness import oracle, places
from flashtune.tuner.verify.distributions import redistribute
from flashtune.tuner.verify.inputs import make_inputs

SCORES = ("random", "sink+8", "needle+30", "deviation-3", "deviation-8", "drift-60", "misled-100%")
"""Distributions: those that settled maxima are made for, and those that mislead them most."""

WAYS = ("always", "grown", "outgrown")


def ways_of(text: str) -> tuple[str, ...]:
    """Some of WAYS from the command line (see `names_of`)."""
    return names_of(text, WAYS, "ways to rescale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What was found of one kernel: microseconds and largest errors, each on the distributions in their order."""

    candidate: Candidate
    times: tuple[float, ...]
    errors: tuple[float, ...]


def kernels_of(problem: Problem, target: Target, ways: Sequence[str]) -> list[Candidate]:
    """The row's kernel, its twin, and with each of the `ways` to rescale these and the kernel's tiles with running maxima; none where no
    row is of the problem, or where its kernel doesn't settle maxima."""
    row = next((row for row in Library.of(shipped_path()).winners() if row.key == problem.key(target.slug)), None)
    if row is None or not settles(row.outcome.config):
        return []
    kind = family(row.outcome.template)
    own = kind.completed(row.outcome.config)
    twin = [kind.completed(row.twin.config)] if row.twin is not None and row.twin.template == kind.name else []
    configs = [own, *twin]
    configs += [config.replace(rescale=way) for config in (own, own.replace(maximum="running"), *twin) for way in ways]
    valid = (config for config in dict.fromkeys(configs) if kind.violated(config, problem.spec(), target) is None)
    return [Candidate(family=kind, config=config) for config in valid]


def time_kernels(problem: Problem, checked: Sequence[Checked], seed: int, seconds: float) -> list[Timed]:
    """In a child process that times alone."""
    launches = []
    for one in checked:
        source = tasks.Source.of(one.candidate.family, one.candidate.variant(problem.spec()))
        launches.append(launcher(load_source(source.text, source.stem)))
    watch = stopwatch("cuda:0")
    times: list[list[float]] = [[] for _ in checked]
    errors: list[list[float]] = [[] for _ in checked]
    for name in SCORES:
        inputs = make_inputs(problem, device="cuda:0", seed=seed)
        redistribute(inputs, name)
        expected = oracle(inputs, [place for draw in range(DRAWS) for place in places(problem, seed + draw)])
        for place, launch in enumerate(launches):
            launch(*inputs.arguments, **inputs.keywords)
            error = error_of(inputs.operands["out"], expected, tolerance(problem.spec()))
            errors[place].append(error.max_abs)
        runs = [partial(launch, *inputs.arguments, **inputs.keywords) for launch in launches]
        for place, found in enumerate(watch.race(runs, budget_s=seconds, least=9)):
            times[place].append(found.median_us)
    return [Timed(candidate=one.candidate, times=tuple(t), errors=tuple(e)) for one, t, e in zip(checked, times, errors, strict=True)]


def lines(problem: Problem, found: Sequence[Timed]) -> Iterator[str]:
    """A heading, and a line for each kernel."""
    plain = [one for one in found if not settles(one.candidate.config) and one.candidate.config["rescale"] != "outgrown"]
    least = [min((one.errors[place] for one in plain), default=math.nan) for place in range(len(SCORES))]
    yield problem.label()
    for one in found:
        over = max((error / best if best else 0.0) for error, best in zip(one.errors, least, strict=True))
        figures = " ".join(f"{name} {us:.1f}" for name, us in zip(SCORES, one.times, strict=True))
        yield f"  {figures} | errors {over:.2f} | {one.candidate.config.label()}"


def main() -> None:
    """Check all in parallel, then time one problem after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=numbers_of, default=(64, 128, 256), help="head sizes, with commas between them (default: all three)")
    parser.add_argument("--n", type=numbers_of, default=(4096,), help="numbers of keys, with commas between them (default: 4096)")
    parser.add_argument("--dtypes", type=dtypes_of, default=SCORE_DTYPES, help="element types, with commas between them (default: both)")
    parser.add_argument("--ways", type=ways_of, default=WAYS, help="to rescale, with commas between them (default: all)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that check (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.1, help="of timing for each distribution (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for everything; what doesn't fit is left out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise SystemExit("on_scores.py times kernels and found no GPU that flashtune knows: run it on the GPU's machine")
    started = time.monotonic()
    bands = (Features(), Features(causal=True))
    problems = [problem_of(d, n, f, dtype=dtype) for n in options.n for d in options.d for dtype in options.dtypes for f in bands]
    work = [(problem, found) for problem in problems if (found := kernels_of(problem, gpu.target, options.ways))]
    # One kernel a job: they are far fewer than a search's, and each takes its time to be compiled.
    jobs = [(check_problem, (problem, [one], gpu.target, options.seed)) for problem, found in work for one in found]
    with Children(count=options.jobs, limit_s=120.0) as many:
        answers = iter(many.by(started + 0.6 * options.budget_s, jobs, late="time was up"))
    ready: list[tuple[Problem, list[Checked]]] = []
    for problem, found in work:
        sound = []
        for one, (checked, failed) in zip(found, answers, strict=False):
            sound += checked or []
            if failed or not checked:
                print(f"{problem.label()} {one.config.label()}: {failed or 'wrong'}", flush=True)
        ready.append((problem, sound))
    print(f"checked {len(jobs)} kernels in {time.monotonic() - started:.0f} s", flush=True)
    with Children(limit_s=120.0) as alone:
        timed = alone.each([(time_kernels, (problem, checked, options.seed, options.seconds)) for problem, checked in ready if checked])
        for (problem, _), (found, failed) in until(started + options.budget_s, zip([r for r in ready if r[1]], timed, strict=True)):
            print(f"{problem.label()}: {failed}" if failed else "\n".join(lines(problem, found)), flush=True)
    print(f"end {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
