"""Race of stored records' configs again on this machine's GPU, in a tenth of a search's time: `--db FILE` gets the results.

For every problem: the best stored configs and their near relatives (benchmarks/shared/racing.py). They are compared with the float64 oracle
in several processes at once, then one process alone times them as a search's closing race does: interleaved, L2 flushed, PyTorch among
them, the GPU's state read meanwhile, and whole calls in an eager loop.

Without further options all records of this GPU race. `--records-of h200` races another GPU's records here, the most important first;
`--changed` those whose kernel has changed since; `--models` models' attentions that have no record. With `--budget-s` the first problems
that fit are checked and raced.
"""

import argparse
import math
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from benchmarks.shared.children import NO_TIME, Children, Job, until
from benchmarks.shared.environment import argument_parser, command, this_gpu
from benchmarks.shared.racing import Candidates, Work, of_another_gpu, of_changed, of_models, of_records, shipped_first, ships
from benchmarks.shared.searches import results_in
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import KernelSpec
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch.dtypes import TORCH_DTYPES
from flashtune.core.records.results import Baseline, CompileFacts, Fate, Measurement, Outcome, SearchResult
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates.rendering import text_hash, variant_of
from flashtune.tuner.children import tasks
from flashtune.tuner.machine import local_gpu, provenance
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Failed
from flashtune.tuner.timing.conditions import GpuWatch, gpu_id
from flashtune.tuner.timing.racing import first_by_calls, ranked
from flashtune.tuner.verify.inputs import Inputs, make_inputs, without_repeats

CHECKING = 0.9
"""Share of a run's time after which no more problems are checked in any case."""

BESIDE_S = 1.1
"""Seconds of a race beside its timing: inputs, loading, whole calls."""

REPEATABLE = "flash_bwd_hopper_split"
"""Family of backwards that write the same bits each time."""

BACKENDS: dict[KernelSpec, str] = {}
"""Torch's backend for each spec that this process has raced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A candidate that may race: its error in tolerances and what the compiler made of it."""

    candidate: Candidate
    error: float
    facts: CompileFacts | None


def check_problem(problem: Problem, candidates: Candidates, target: Target, seed: int) -> list[Checked]:
    """In a child process: candidates that are right on this GPU."""
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
    """Compile for the wide seeds and offsets of calls, another type than a check's, here and not in the process that times."""
    from flashtune.core.code.launching import compiler_options, provided
    from flashtune.templates.loading import load_kernel
    from flashtune.tuner.children.compile import compiling_for

    module, inputs = load_kernel(source.text, source.stem), make_inputs(problem, device="meta", seed=0)
    words = inputs.keywords | provided(module, inputs.q, inputs.k) | {"sms": target.sms, "seed": 2**64 - 1, "offset": 2**32 - 1}
    with compiling_for(target):
        for kernel, grid, args, options in module.launches(*inputs.arguments, **words):
            kernel.warmup(*args, grid=grid, **compiler_options(options))


def random_inputs(problem: Problem, *, seed: int, device: str = "cuda") -> Inputs:
    """A problem's inputs. A backward's O, LSE and gradients are random like the rest: no kernel's time depends on them.

    The LSE is above 9, so that probabilities are below 1 and nothing becomes infinite.
    """
    inputs = make_inputs(problem.forward(), device=device, seed=seed)
    if problem.direction == "fwd":
        return inputs
    generator = torch.Generator(device).manual_seed(seed)
    operands = {}
    for operand in problem.contract.operands:
        kind, shape = TORCH_DTYPES[operand.dtype(problem)], operand.shape(problem)
        if operand.name == "dbias" and inputs.parameters.mask is not None:
            # The bias's own sizes, from which it is expanded.
            own = torch.empty(without_repeats(inputs.parameters.mask).shape, device=device, dtype=kind)
            operands[operand.name] = own.expand(shape)
        else:
            operands[operand.name] = torch.randn(shape, device=device, generator=generator).to(kind)
    operands |= {name: getattr(inputs, name) for name in ("q", "k", "v")}
    operands["lse"] = operands["lse"].abs() + 9.0
    return replace(inputs, problem=problem, operands=operands)


def race_problem(problem: Problem, checked: list[Checked], target: Target, seed: int, seconds: float) -> dict[str, Any]:
    """In a child process that times alone: GPU times and whole calls of the candidates and last of PyTorch."""
    from flashtune.bench.whole_calls import call_times
    from flashtune.core.code.launching import launcher
    from flashtune.templates.loading import load_kernel

    marks = [time.perf_counter()]
    inputs = random_inputs(problem, seed=seed)
    marks.append(time.perf_counter())
    modules = []
    for one in checked:
        source = tasks.Source.of(one.candidate.family, one.candidate.variant(problem.spec()))
        modules.append(load_kernel(source.text, source.stem))
    runs: list[Any] = [partial(launcher(module), *inputs.arguments, **inputs.keywords) for module in modules]
    torchs, backend = pytorch(inputs, checked[0].candidate)
    runs += [] if torchs is None else [torchs]
    for run in runs:
        run()
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    began = time.time()
    times = tasks.stopwatch(target.l2_bytes).race(runs, budget_s=seconds, least=15)
    ended = time.time()
    marks.append(time.perf_counter())
    # Three rounds at least: of whole training steps, that is what there is time for.
    called = call_times(modules, inputs, budget_s=0.0 if problem.direction == "bwd" else seconds / 9 * max(3, len(modules)))
    calls = [statistics.median(one) for one in called]
    marks.append(time.perf_counter())
    spent = "inputs {:.1f} s, until the race {:.1f}, race {:.1f}, calls {:.1f}".format(*(b - a for a, b in pairwise(marks)))
    print(f"{problem.label()}: {spent}", file=sys.stderr, flush=True)
    del inputs
    torch.cuda.empty_cache()
    return {"times": times, "calls": calls, "backend": backend, "began": began, "ended": ended, "pid": os.getpid()}


def pytorch(inputs: Inputs, candidate: Candidate) -> tuple[Any, str | None]:
    """PyTorch's call and its backend; none beside backwards that repeat their bits, which torch's default doesn't."""
    from flashtune.tuner.timing.baseline import backend_name, pytorch_call

    if candidate.family.name == REPEATABLE and inputs.problem.d <= 128:
        return None, None
    call, spec = pytorch_call(inputs), inputs.problem.spec()
    # A profiler takes a second or more; torch chooses by features far more than by sizes.
    if call is not None and spec not in BACKENDS:
        BACKENDS[spec] = backend_name(call)
    return call, BACKENDS.get(spec)


def result_of(problem: Problem, checked: list[Checked], raced: dict[str, Any], gpu: str, watch: GpuWatch, origin: Any) -> SearchResult:
    """The race as a record of the database."""
    times: list[Measurement] = raced["times"]
    outcomes: dict[Candidate, Outcome] = {}
    for one, measurement, call_us in zip(checked, times, raced["calls"], strict=False):
        variant = variant_of(one.candidate.family, problem.spec(), one.candidate.config)
        outcomes[one.candidate] = Outcome(
            template=variant.template,
            template_hash=text_hash(one.candidate.family, variant),
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
    medians = {candidate: outcome.measurement.median_us for candidate, outcome in outcomes.items() if outcome.measurement is not None}
    ranks = shipped_first(ranks, medians, partial(ships, problem=problem), d=max(problem.d, problem.d_v))
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
    """Options of the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--db", help="the database to write")
    parser.add_argument("--records", default=str(shipped_path()), help="the database whose records race (default: the shipped one)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--records-of", metavar="GPU", help="race the problems of this GPU's records that this machine's has none of")
    which.add_argument("--changed", action="store_true", help="race records whose kernel has changed, with their best configs alone")
    which.add_argument("--models", action="store_true", help="race models' attentions that have no record")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only problems whose label this regular expression finds")
    parser.add_argument("--most", type=int, default=2, help="stored configs of each problem (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that check (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="of timing for each problem (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=90.0, help="for each problem (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for everything; problems beyond it are left out")
    parser.add_argument("--list", action="store_true", help="print the problems in their order and end; needs no GPU")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.db is None and not options.list:
        parser.error("the following arguments are required: --db")
    return options


def work_of(options: argparse.Namespace, target: Target) -> Work:
    """Problems and candidates that the options name."""
    results = results_in(options.records)
    if options.records_of:
        found = of_another_gpu(results, find_target(options.records_of).slug, target, most=options.most)
    elif options.changed:
        found = of_changed(results, target, most=options.most)
    elif options.models:
        found = of_models(target, most=4 * options.most, seed=options.seed)
    else:
        found = of_records(results, target, most=options.most)
    return [(problem, candidates) for problem, candidates in found if re.search(options.only, problem.label())]


def checked_problems(work: Work, target: Target, options: argparse.Namespace, ends: float) -> list[tuple[Problem, list[Checked]]]:
    """Problems with candidates that are right, as many as there is time to race until `ends`."""
    started = time.monotonic()

    def enough(checked: int) -> bool:
        """True where the races of these take all the time that is left."""
        return time.monotonic() + checked * (options.seconds + BESIDE_S) > ends

    jobs: list[Job] = [(check_problem, (problem, found, target, options.seed)) for problem, found in work]
    with Children(count=options.jobs, limit_s=options.limit_s) as many:
        answers = many.by(started + CHECKING * (ends - started), jobs, late=NO_TIME, enough=enough)
    for (problem, _), (_, failed) in zip(work, answers, strict=True):
        if failed:
            print(f"{problem.label()}: {failed}", file=sys.stderr, flush=True)
    ready = [(problem, checked) for (problem, _), (checked, _) in zip(work, answers, strict=True) if checked]
    print(f"checked {len(ready)} of {len(work)} problems in {time.monotonic() - started:.0f} s", flush=True)
    return ready


def main() -> None:
    """Check all in parallel, then race one after another; each result is saved at once."""
    options = arguments()
    if options.list:
        for problem, found in work_of(options, find_target("h100" if options.records_of else "h200")):
            racing = "the first of a search" if callable(found) else len(found)
            print(f"b{problem.batch} h{problem.heads}/{problem.kv_heads} {problem.label()}: {racing}")
        return
    target, started, saved = this_gpu(), time.monotonic(), 0
    ends = started + options.budget_s
    origin = provenance(command=command(), seed=options.seed, measured=True)
    with Children(limit_s=options.limit_s) as alone:
        # It takes seconds to start, in which the others have enough to do.
        alone.begin((local_gpu, ()))
        ready = checked_problems(work_of(options, target), target, options, ends)
        with Store.open(options.db, writable=True) as store, GpuWatch(gpu_id()) as watch:
            races = alone.each([(race_problem, (problem, checked, target, options.seed, options.seconds)) for problem, checked in ready])
            for (problem, checked), (raced, failed) in until(ends, zip(ready, races, strict=True)):
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
