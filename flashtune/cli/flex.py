"""`flashtune search --implementation flex`: tune FlexAttention's own kernels by measuring, and store their options."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashtune.cli.console import console, print_json
from flashtune.core.errors import EnvironmentProblem, InputError, NoKernelFound
from flashtune.core.problem import Problem
from flashtune.core.secrets import command_line
from flashtune.core.target import Target
from flashtune.core.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from flashtune.cli.search import SearchOptions
    from flashtune.tuner.search.flex import FlexFound

BESIDE = ("templates", "storage", "pruner", "predict")
"""Options of a search for kernels that mean nothing here."""

PROCESS_LIMIT = 16
"""Most processes that compile side by side: each holds the problem's tensors on the GPU."""


def require_gpu() -> None:
    """Raise EnvironmentProblem on a machine without a GPU."""
    from flashtune.tuner.machine import gpu_may_be_present, local_gpus

    if not gpu_may_be_present() or not local_gpus():
        raise EnvironmentProblem("FlexAttention is tuned only by measuring, and this machine has no GPU: run the search where the GPU is")


def search_flex(
    target: Target, problems: Sequence[Problem], options: "SearchOptions", *, notes: "Console", out: bool, as_json: bool
) -> None:
    """Tune FlexAttention for each problem, and store the options that gain."""
    from flashtune.cli.search import choose_source
    from flashtune.tuner.propose.flex import refuse_untunable

    if given := [name for name in BESIDE if getattr(options, name)]:
        raise InputError(
            f"--{given[0].removesuffix('s')} is for kernels of flashtune, and --implementation flex tunes others: leave it out"
        )
    choose_source(target, predict=False)
    for problem in problems:
        refuse_untunable(problem)
    found = tuned(target, problems, options, notes=notes)
    if as_json:
        print_json([row(one, target) for one in found])
    elif out:
        _print(found, target)


def tuned(target: Target, problems: Sequence[Problem], options: "SearchOptions", *, notes: "Console") -> "list[FlexFound]":
    """Results of the problems, each stored once it is there; `notes` gets a line for each wave, and for a problem without a result.

    Raises NoKernelFound where none has one.
    """
    from flashtune.db.library import overlay_path
    from flashtune.db.store import Store
    from flashtune.tuner.children.workers import Workers
    from flashtune.tuner.machine import cores, provenance
    from flashtune.tuner.search.flex import FlexProcesses, tune

    ends = None if options.budget_s is None else time.monotonic() + options.budget_s
    most = min(PROCESS_LIMIT, options.jobs or max(1, cores() - 1))
    command = command_line(["flashtune", *sys.argv[1:]])
    made_by = provenance(command=command, seed=options.seed, measured=True, target=target)
    found: list[FlexFound] = []
    failed: NoKernelFound | None = None
    with Store.open(options.location or overlay_path(), writable=True) as store, Workers(jobs=1) as workers:
        for place, problem in enumerate(problems):
            now = time.monotonic()
            deadline = None if ends is None else now + (ends - now) / (len(problems) - place)
            said = lambda tried, best, problem=problem: notes.print(progress_line(problem, tried, best), soft_wrap=True)  # noqa: E731
            try:
                processes = FlexProcesses(workers, problem, target, options.seed or 0, most)
                one = tune(processes, problem, target, made_by, trials=options.trials, deadline=deadline, listener=said)
            except NoKernelFound as error:
                notes.print(str(error), soft_wrap=True)
                failed = error
                continue
            found.append(one)
            if one.result is not None:
                store.save(one.result)
    if failed is not None and not found:
        raise failed
    return found


def progress_line(problem: Problem, tried: int, best: float | None) -> str:
    """Line of progress: candidates so far and the best ratio of times."""
    gain = "none works yet" if best is None else f"the best takes {best:.2f} of the default's time in its kernel"
    return f"{problem.label()}: {counted(tried, 'candidate')} of FlexAttention's options, {gain}"


def row(one: "FlexFound", target: Target) -> dict[str, Any]:
    """JSON of a result: gains are the defaults' time over the tuned one."""
    times = {} if one.result is None else {outcome.rank: outcome.call_us for outcome in one.result.outcomes}
    return {
        "gpu": target.slug,
        "problem": one.problem.label(),
        "direction": one.problem.direction,
        "options": dict(one.options or {}),
        "stored": one.result is not None,
        "call_us": times.get(1),
        "default_call_us": times.get(None),
        "gain": {which: round(1.0 / ratio, 4) for which, ratio in one.ratios.items()},
        "tried": one.tried,
        "failed": len(one.failures),
        "first_failure": one.failures[0] if one.failures else None,
    }


def _print(found: "Sequence[FlexFound]", target: Target) -> None:
    names = {"fwd": "forward", "bwd": "backward", "call": "whole calls"}
    for one in found:
        gains = ", ".join(f"{names[which]} {1.0 / ratio:.2f}x" for which, ratio in one.ratios.items())
        stored = "stored" if one.result is not None else "not stored, since the defaults are as fast"
        line = f"{one.problem.label()} on {target.slug}: FlexAttention's defaults over tuned options: {gains} ({stored})"
        console().print(line, soft_wrap=True)
        console().print("  " + " ".join(f"{name}={value}" for name, value in (one.options or {}).items()), soft_wrap=True)
