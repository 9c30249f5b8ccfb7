"""Races stored rows' configs again on this machine's GPU, after their kernels' text changed: `python benchmarks/race_again.py --db FILE`.

For every problem of a database: the best configs that were found for it, and each with the other ways to hold row maxima or to add up
splits; beside kernels that settle maxima also the best with running ones (race_twins.py), which serve where scores mislead the winner.
They are checked against the float64 oracle in several processes at once, then one process alone times them, as a search's closing race
does: interleaved, L2 flushed, the framework's attention among them, the GPU's state read meanwhile, and whole calls in an eager loop. A
tenth of a search's time.

`--sizes`, `--models`, `--short`, `--sparse`, `--steps`, `--few`, `--brief`, `--covering`, `--ragged`, `--backward`, `--backward-sizes`,
`--divided`, `--own-sums` race problems without rows: their candidates are other rows' configs, what the cost model thinks best, and the
family's starts; `--twins` races rows whose twin is far behind, `--units` rows whose products could have fewer columns, `--rescale` plain
and masked rows with other ways to rescale what came before a maximum that grew, `--older` all other rows that were raced before there were
any, and `--changed` those whose text has changed since, each with its best configs alone. Where it costs hardly anything, a kernel that has
less to lose on a model's scores wins over others, and one that already ships (race_twins.py).
`--rows-of h200` races the rows of that GPU on this one, the most important first. With `--budget-s` the first problems that fit are
checked and raced:

    python benchmarks/race_again.py --rows-of h200 --db h100.sqlite --budget-s 150           # on an H100
"""

import argparse
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from children import Children
from covering import of_covering, of_ragged
from forward import until
from forward_report import NO_TIME
from race_backwards import REPEATABLE, backwards_of, backwards_of_sizes, of_divided, of_own_sums
from race_steps import of_steps
from race_twins import ARCHIVED, Archive, has_settling_winner, measured, read_archive, shipped_first, with_twins
from race_work import (
    Candidates,
    Work,
    of_another_gpu,
    of_brief,
    of_changed,
    of_chunks,
    of_few,
    of_models,
    of_older,
    of_rescaled,
    of_short,
    of_sizes,
    of_sparse,
    of_twins,
    of_units,
)
from random_inputs import random_inputs

from flashtune.core.config import Config, KernelSpec, Value
from flashtune.core.problem import Problem
from flashtune.core.results import Baseline, CompileFacts, Fate, Measurement, Outcome, SearchResult
from flashtune.core.shipped_kernels import PACKAGE, shipped_index
from flashtune.core.target import Target, find_target
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates import family
from flashtune.templates.rendering import variant_of
from flashtune.tuner.children import tasks
from flashtune.tuner.machine import local_gpu, provenance
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Failed
from flashtune.tuner.timing.conditions import GpuWatch, gpu_id
from flashtune.tuner.timing.finalists import first_by_calls, ranked

TWINS: dict[str, tuple[Value, ...]] = {
    "maximum": ("first", "running"),
    "combine": ("kernel", "last", "rows"),
    "persistent": (False, True, "drawn", "taken"),
    "held": ("none", "k", "v", "both"),
    "exp_early": (False, True),
    "exp_poly": (False, True),
    "wait_early": (False, True),
}
"""Axes whose every value races."""

CHECKING = 0.9
"""The share of a run's time after which no more problems are checked in any case."""

BESIDE_S = 1.1
"""What a race takes beside its timing: inputs, loading, whole calls."""

BACKENDS: dict[KernelSpec, str] = {}
"""Which of torch's backends serves a spec, of those that this process has raced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A candidate that may race: its error in tolerances and what the compiler made of it."""

    candidate: Candidate
    error: float
    facts: CompileFacts | None


def candidates_of(result: SearchResult, target: Target, *, most: int, archive: Archive) -> list[Candidate]:
    """The stored configs to race, the best first, completed and valid today; beside those that settle maxima the best that don't."""
    spec = result.problem.spec()
    known = measured([result])
    found: dict[Candidate, None] = {}
    for outcome in known[:most]:
        kind = family(outcome.template)
        config = kind.completed(outcome.config)
        twins: list[Config] = [config, kind.successor(config)]
        for axis, values in TWINS.items():
            if axis in config.as_dict() and not (axis == "maximum" and result.problem.dtype == "fp8"):
                twins += [config.replace(**{axis: value}) for value in values]
        for twin in twins:
            if kind.violated(twin, spec, target) is None:
                found[Candidate(family=kind, config=twin)] = None
    if result.problem.direction == "bwd":
        # Few were tried of each, and what was best may not fit the kernel of today.
        kinds = {family(outcome.template) for outcome in known[:most]}
        starts = [Candidate(family=kind, config=config) for kind in kinds for config in kind.starts(spec, target)[:7]]
        return list(dict.fromkeys([*list(found)[: 4 * most + 3], *starts]))
    # Decoding kernels are checked and timed in no time, and each way to add up has configs that suit it.
    chosen = list(found)[: 3 * most if any("combine" in candidate.config for candidate in found) else most + 1]
    return with_twins(chosen, result, archive, target)


def check_problem(problem: Problem, candidates: Candidates, target: Target, seed: int) -> list[Checked]:
    """In a child process: those that are right on this GPU."""
    found = []
    for candidate in candidates() if callable(candidates) else candidates:
        source = tasks.Source.of(candidate.family, candidate.variant(problem.spec()))
        reply = tasks.recheck_on_device(source, problem, target, seed)
        if isinstance(reply, Failed):
            print(f"{problem.label()} {candidate.config.label()}: {reply.fate} {reply.reason}", file=sys.stderr, flush=True)
            continue
        facts = tasks.compile_candidate(source, problem, target).facts
        if problem.features.dropout:
            compile_as_called(source, problem, target)
        found.append(Checked(candidate=candidate, error=reply.error, facts=facts))
    return found


def compile_as_called(source: tasks.Source, problem: Problem, target: Target) -> None:
    """Compiles for the wide seeds and offsets that calls draw, another type than a check's: here, where many processes do, and not in
    the one that times, of which it took 20 seconds for each problem."""
    from flashtune.core.launching import compiler_options, provided
    from flashtune.core.modules import load_source
    from flashtune.tuner.children.compile import compiling_for
    from flashtune.tuner.verify.inputs import make_inputs

    module, inputs = load_source(source.text, source.stem), make_inputs(problem, device="meta", seed=0)
    words = inputs.keywords | provided(module, inputs.q, inputs.k) | {"sms": target.sms, "seed": 2**64 - 1, "offset": 2**32 - 1}
    with compiling_for(target):
        for kernel, grid, args, options in module.launches(*inputs.arguments, **words):
            kernel.warmup(*args, grid=grid, **compiler_options(options))


def race_problem(problem: Problem, checked: list[Checked], target: Target, seed: int, seconds: float) -> dict[str, Any]:
    """In a child process that times alone: GPU times and whole calls of the candidates and last of the framework."""
    import torch

    from flashtune.core.launching import launcher
    from flashtune.core.modules import load_source
    from flashtune.profiler.whole_calls import call_times
    from flashtune.tuner.timing.baseline import backend_name, framework_call

    marks = [time.perf_counter()]
    inputs = random_inputs(problem, seed=seed)
    marks.append(time.perf_counter())
    stopwatch = tasks._stopwatch(target.l2_bytes)
    modules = []
    for one in checked:
        source = tasks.Source.of(one.candidate.family, one.candidate.variant(problem.spec()))
        modules.append(load_source(source.text, source.stem))
    launches = [launcher(module) for module in modules]
    runs: list[Any] = [partial(launch, *inputs.arguments, **inputs.keywords) for launch in launches]
    # Torch's default gradients aren't the same bits every time: no yardstick for kernels that are there because theirs are.
    deterministic = checked[0].candidate.family.name == REPEATABLE and problem.d <= 128
    framework = None if deterministic else framework_call(inputs)
    backend = None
    if framework is not None:
        runs.append(framework)
        # A profiler takes a second or more. Torch chooses by what is asked of it far more than by sizes.
        if problem.spec() not in BACKENDS:
            BACKENDS[problem.spec()] = backend_name(framework)
        backend = BACKENDS[problem.spec()]
    for run in runs:
        run()
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    began = time.time()
    times = stopwatch.race(runs, budget_s=seconds, least=15)
    ended = time.time()
    marks.append(time.perf_counter())
    # Three rounds at least: of whole training steps, that is what there is time for.
    calls = call_times(modules, inputs, budget_s=0.0 if problem.direction == "bwd" else seconds / 9 * max(3, len(modules)))
    marks.append(time.perf_counter())
    spent = "inputs {:.1f} s, until the race {:.1f}, race {:.1f}, calls {:.1f}".format(*(b - a for a, b in pairwise(marks)))
    print(f"{problem.label()}: {spent}", file=sys.stderr, flush=True)
    del inputs
    torch.cuda.empty_cache()
    return {"times": times, "calls": calls, "backend": backend, "began": began, "ended": ended, "pid": os.getpid()}


def result_of(problem: Problem, checked: list[Checked], raced: dict[str, Any], gpu: str, watch: GpuWatch, origin: Any) -> SearchResult:
    """What goes into the database."""
    times: list[Measurement] = raced["times"]
    outcomes: dict[Candidate, Outcome] = {}
    for one, measurement, call_us in zip(checked, times, raced["calls"], strict=False):
        variant = variant_of(one.candidate.family, problem.spec(), one.candidate.config)
        outcomes[one.candidate] = Outcome(
            template=variant.template,
            template_hash=variant.template_hash,
            variant_id=variant.id,
            config=one.candidate.config,
            fate=Fate.CORRECT,
            source="measured",
            measurement=measurement,
            facts=one.facts,
            max_error=one.error,
            finalist=True,
            call_us=call_us,
        )
    ranks = ranked(list(outcomes.items()))
    ranks.insert(0, ranks.pop(first_by_calls([outcomes[candidate].call_us for candidate in ranks])))
    spec, index = problem.spec(), shipped_index(PACKAGE)
    medians = {candidate: outcome.measurement.median_us for candidate, outcome in outcomes.items() if outcome.measurement is not None}
    ranks = shipped_first(ranks, medians, lambda one: index.find(one.variant(spec).id) is not None, d=max(problem.d, problem.d_v))
    for rank, candidate in enumerate(ranks, start=1):
        outcomes[candidate] = replace(outcomes[candidate], rank=rank)
    baseline = None
    if raced["backend"]:
        baseline = Baseline(backend=raced["backend"], measurement=times[-1], call_us=raced["calls"][-1])
    conditions = watch.between(raced["began"], raced["ended"], raced["pid"])
    return SearchResult(
        gpu=gpu,
        problem=problem,
        outcomes=tuple(sorted(outcomes.values(), key=lambda o: o.rank or 0)),
        provenance=replace(origin, conditions=conditions),
        baseline=baseline,
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", help="the database to write")
    parser.add_argument("--rows", default=str(shipped_path()), help="the database whose rows are raced (default: the shipped one)")
    parser.add_argument("--models", action="store_true", help="race attentions of models that no row is of, instead of rows")
    parser.add_argument("--sizes", action="store_true", help="race head sizes that few rows are of, instead of rows")
    parser.add_argument("--short", action="store_true", help="race shapes near which drawn ones were served worst, instead of rows")
    parser.add_argument("--sparse", action="store_true", help="race shapes of kinds that few rows are of, instead of rows")
    parser.add_argument("--older", action="store_true", help="race rows that no kernel with today's ways to rescale was tried for")
    parser.add_argument("--ragged", action="store_true", help="race biases that the copy engine doesn't take, instead of rows")
    parser.add_argument(
        "--covering", action="store_true", help="race shapes whose rows random calls are near to (covering.py), instead of rows"
    )
    parser.add_argument(
        "--twins", action="store_true", help="race rows whose best kernel with running maxima is far behind, instead of rows"
    )
    parser.add_argument("--rescale", action="store_true", help="race plain and masked rows with other ways to rescale, instead of rows")
    parser.add_argument(
        "--chunks", action="store_true", help="race rows of heads of 136 to 248 columns with their tiles in chunks, instead of rows"
    )
    parser.add_argument(
        "--units", action="store_true", help="race head sizes of which products of 16 columns leave out more, instead of rows"
    )
    parser.add_argument("--changed", action="store_true", help="race rows whose kernel's text has changed, with their best configs alone")
    parser.add_argument(
        "--divided", action="store_true", help="race gradients of one sequence of models, which divide queries, instead of rows"
    )
    parser.add_argument("--own-sums", action="store_true", help="race gradients of few keys with sums of dQ that are programs' own, too")
    parser.add_argument("--backward", action="store_true", help="race backward problems that no row is of, instead of rows")
    parser.add_argument("--backward-sizes", action="store_true", help="race backwards of head sizes that no row is of, instead of rows")
    parser.add_argument("--steps", action="store_true", help="race decoding steps of many kinds that no row is of, instead of rows")
    parser.add_argument("--few", action="store_true", help="race few queries over a cache that no row is of, instead of rows")
    parser.add_argument("--brief", action="store_true", help="race many sequences of few rows that no row is of, instead of rows")
    parser.add_argument("--rows-of", metavar="GPU", help="race the rows of this GPU that this machine's has none of, instead of its own")
    parser.add_argument("--only", default="", help="of all these problems those whose label this regular expression finds")
    parser.add_argument("--most", type=int, default=2, help="stored configs of each problem (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that check (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="of timing for each problem (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=90.0, help="for each problem (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for everything; what doesn't fit is left out")
    parser.add_argument("--list", action="store_true", help="print the problems in their order, with how many race, and end; needs no GPU")
    parser.add_argument("--archived", default=str(ARCHIVED), help="a database of trials whose best configs with running maxima race, too")
    parser.add_argument("--settling", action="store_true", help="only rows whose winner settles row maxima")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def work_of(options: argparse.Namespace, target: Target) -> Work:
    """What is asked for, in its order."""
    return [(problem, found) for problem, found in all_work(options, target) if re.search(options.only, problem.label())]


def all_work(options: argparse.Namespace, target: Target) -> Work:
    """The same, whatever its labels."""
    with Store.open(options.rows, writable=False) as store:
        results = store.results()
    mine = [result for result in results if result.gpu == target.slug]
    asked = [result for result in results if not options.settling or has_settling_winner(result)]
    measured_on = find_target(options.rows_of) if options.rows_of else target
    choose = partial(candidates_of, target=target, most=options.most, archive=read_archive(options.archived, measured_on))
    if options.rows_of:
        return of_another_gpu(asked, find_target(options.rows_of).slug, target, choose)
    first = {"most": 4 * options.most, "seed": options.seed}
    lists: dict[str, Callable[[], Work]] = {
        "backward": partial(backwards_of, mine, target),
        "backward_sizes": partial(backwards_of_sizes, results, target, most=4 * options.most),
        "divided": partial(of_divided, results, target, most=2 * options.most),
        "own_sums": partial(of_own_sums, results, target, most=2 * options.most),
        "twins": partial(of_twins, mine, target),
        "rescale": partial(of_rescaled, mine, target),
        "chunks": partial(of_chunks, mine, target),
        "sparse": partial(of_sparse, target, mine, **first),
        "units": partial(of_units, results, target),
        "changed": partial(of_changed, results, target, most=options.most),
        "steps": partial(of_steps, target, mine, **first),
        "few": partial(of_few, target, mine, **first),
        "brief": partial(of_brief, target, mine, **first),
        "older": partial(of_older, mine, target),
        "ragged": partial(of_ragged, target, **first),
        "covering": partial(of_covering, target, mine, **first),
        "short": partial(of_short, target, mine, **first),
        "sizes": partial(of_sizes, target, mine, **first),
        "models": partial(of_models, target, **first),
    }
    asked_for = [find for name, find in lists.items() if getattr(options, name)]
    if not asked_for:
        return [(result.problem, choose(result)) for result in asked if result.gpu == target.slug]
    return [one for find in asked_for for one in find()]


def main() -> None:
    """Check all in parallel, then race one after another; what is right is saved at once."""
    options = arguments()
    gpu = local_gpu()
    if options.list:
        here = gpu.target if gpu is not None else None
        for problem, found in work_of(options, here or find_target("h100" if options.rows_of else "h200")):
            racing = "the first of a search" if callable(found) else len(found)
            print(f"b{problem.batch} h{problem.heads}/{problem.kv_heads} {problem.label()}: {racing}")
        return
    if options.db is None:
        raise SystemExit("race_again.py writes a database: name it with --db")
    if gpu is None or gpu.target is None:
        raise SystemExit("race_again.py measures kernels and found no GPU that flashtune knows: run it on the GPU's machine")
    target = gpu.target
    started = time.monotonic()
    work = work_of(options, target)
    origin = provenance(command=shlex.join(["python", *sys.argv]), seed=options.seed, measured=True)
    jobs = [(check_problem, (problem, found, target, options.seed)) for problem, found in work]
    ready: list[tuple[Problem, list[Checked]]] = []
    with Children(limit_s=options.limit_s) as alone:
        # It takes seconds to start, in which the others have enough to do.
        alone.begin((local_gpu, ()))
        with Children(count=options.jobs, limit_s=options.limit_s) as many:
            ends = started + options.budget_s

            def enough(checked: int) -> bool:
                """Whether to race these takes all the time that is left."""
                return time.monotonic() + checked * (options.seconds + BESIDE_S) > ends

            answers = many.by(started + CHECKING * options.budget_s, jobs, late=NO_TIME, enough=enough)
        for (problem, _), (checked, failed) in zip(work, answers, strict=True):
            if failed:
                print(f"{problem.label()}: {failed}", file=sys.stderr, flush=True)
            elif checked:
                ready.append((problem, checked))
        print(f"checked {len(ready)} of {len(work)} problems in {time.monotonic() - started:.0f} s", flush=True)
        saved = 0
        with Store.open(options.db, writable=True) as store, GpuWatch(gpu_id()) as watch:
            races = alone.each([(race_problem, (problem, checked, target, options.seed, options.seconds)) for problem, checked in ready])
            for (problem, checked), (raced, failed) in until(started + options.budget_s, zip(ready, races, strict=True)):
                if failed:
                    print(f"{problem.label()}: {failed}", file=sys.stderr, flush=True)
                    continue
                result = result_of(problem, checked, raced, target.slug, watch, origin)
                store.save(result)
                saved += 1
                best = result.outcomes[0]
                us = best.measurement.median_us if best.measurement else 0.0
                gain = f"{result.baseline.measurement.median_us / us:.3f}x" if result.baseline else "-"
                print(f"{problem.label():60s} {us:8.1f} us {gain} call {best.call_us or math.nan:8.1f} {best.config.label()}", flush=True)
    print(f"raced {saved} of {len(ready)} problems in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
