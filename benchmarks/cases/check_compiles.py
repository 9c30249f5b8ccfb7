"""Compilation of every template family for every kind of GPU with the Triton that is installed.

Needs no GPU. The specs are those of the case `check_numerics`. For Hopper, which every family serves, configs that show every tile size and
code path are compiled; for the other architectures each family's default. Says which Triton it was and how many compiled, with a line
for each that failed and for what this Triton is known not to compile, and exits with 1 where one failed. With --sample one kernel of each
family and architecture is compiled, as `make newest` does under the newest Triton.
"""

import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterator

from benchmarks.cases.check_numerics import every_problem, paths
from benchmarks.shared.environment import argument_parser
from flashtune.core.gpu.target import Target, find_target, targets
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Fate
from flashtune.templates import families
from flashtune.templates.family import Family
from flashtune.templates.rendering import variant_of
from flashtune.tuner.children import tasks
from flashtune.tuner.children.tasks import Source
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.replies import Failed

THOROUGH = "h200"
"""Every code path is compiled for this GPU."""


def gpus() -> list[Target]:
    """One GPU of every architecture that Triton compiles for, the thorough one first."""
    thorough = find_target(THOROUGH)
    found = {thorough.arch: thorough}
    for target in targets().values():
        if target.compilable:
            found.setdefault(target.arch, target)
    return list(found.values())


def candidates(chosen: list[Family], on: list[Target]) -> Iterator[tuple[Problem, Target, Source]]:
    """Every kernel that is to compile, rendered."""
    for target in on:
        for problem in every_problem():
            spec = problem.spec()
            for family in chosen:
                if family.supports(spec, target) is None:
                    thorough = target.slug == THOROUGH
                    for config in paths(family, problem, target) if thorough else [family.default(spec, target)]:
                        yield problem, target, Source.of(family, variant_of(family, spec, config))


def sample(chosen: list[Family], on: list[Target]) -> Iterator[tuple[Problem, Target, Source]]:
    """The first kernel of each family and GPU that this Triton may compile; where it may compile none, the first."""
    for target in on:
        for family in chosen:
            first = None
            for one in candidates([family], [target]):
                first = first or one
                if one[2].uncompilable is None:
                    first = one
                    break
            if first is not None:
                yield first


def main() -> None:
    """Compile in parallel, and report."""
    parser = argument_parser(__doc__)
    parser.add_argument("--template", choices=list(families()), help="only this family")
    parser.add_argument("--gpu-name", type=find_target, help="only for this GPU")
    parser.add_argument("--sample", action="store_true", help="one kernel of each family and GPU")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = [family for family in families().values() if options.template in (None, family.name)]
    compiled = failed = 0
    left_out = Counter[str]()
    listed = sample if options.sample else candidates
    with Workers(jobs=options.jobs) as workers:
        limit_s = workers.limits.compile_s
        waiting = [
            (problem, target, source, workers.submit("compile", tasks.compile_candidate, source, problem, target, limit_s=limit_s))
            for problem, target, source in listed(chosen, [options.gpu_name] if options.gpu_name else gpus())
        ]
        for problem, target, source, compiling in waiting:
            reply = compiling.reply()
            if source.uncompilable is not None:
                left_out[source.uncompilable] += 1
                continue
            # One that compiles into more shared memory than the GPU has is the search's business.
            if isinstance(reply, Failed) and reply.fate is not Fate.CONSTRAINT:
                failed += 1
                print(f"{target.slug} {problem.label()} {source.stem}: {reply.fate}: {reply.reason}", flush=True)
            else:
                compiled += 1
    for why, count in left_out.items():
        print(f"{count} left out: {why}")
    print(f"Triton {importlib.metadata.version('triton')}: {compiled} compiled, {failed} failed")
    if failed:
        raise SystemExit(1)
