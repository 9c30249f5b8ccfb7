"""`flashtune referee`: who is right and how fast, of flashtune, PyTorch and other libraries, for some 200 shapes or named ones."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.bench.referee import Bench, served, versions_here
from flashtune.bench.referee_report import LOUD, cell, findings, html, times, totals
from flashtune.bench.rulings import NAMES, Results, Ruled, read
from flashtune.cli.console import console, fitted, messages, print_json
from flashtune.cli.options import Known, ListCommand, json_option, seconds_of
from flashtune.cli.outputs import PICTURES, refuse_foreign, refuse_shared
from flashtune.cli.problem_options import ProblemOptions, problem_options
from flashtune.core.problems.problem import Problem
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.core.system.files import write_whole
from flashtune.core.system.secrets import command_line
from flashtune.core.system.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashtune.tuner.children.workers import Workers

CHOOSING = frozenset({"--d", "--n", "--dtype", "--direction"})
"""Options that choose among the default shapes where no other describes some."""


@click.command(cls=ListCommand)
@problem_options(many=True)
@click.option(
    "--providers",
    type=Known("names", lambda: ("all", *NAMES)),
    metavar="NAMES",
    default="all",
    show_default=True,
    help=f"Who is judged, with commas: {', '.join(NAMES)}. FlexAttention of calls without functions only by its name.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.json", help="Write results there, or continue them.")
@click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write them as a page, too.")
@click.option("--budget", metavar="TIME", help="Wall time after which no further shape is begun: 90s, 10m, 1h.")
@click.option(
    "--jobs", type=click.IntRange(1, 256), metavar="N", help="Shapes that are checked at the same time (default: half of the cores)."
)
@click.option("--seconds", type=click.FloatRange(min=0.05), default=0.5, show_default=True, help="Timing per shape.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of the random inputs.")
@json_option
def referee(
    *,
    requested: ProblemOptions,
    providers: str,
    out: Path | None,
    page: Path | None,
    budget: str | None,
    jobs: int | None,
    seconds: float,
    seed: int,
    as_json: bool,
) -> None:
    """Check who is right and how fast on this GPU: flashtune, PyTorch's own choice, its backends, and libraries that are installed.

    Each passes what a kernel passes in a search. Several shapes are checked at the same time, each by a process of its own. Then those
    that are right are timed in turns, while nothing else runs. A crash or a hang costs one verdict.

    Without options some 200 shapes are judged, of which --d, --n, --dtype and --direction choose. Others describe shapes, as in bench.

    A file --out is written after each shape that was timed. The same command continues it: what was judged with the versions that are
    installed isn't judged again. Exit code 1 where one is wrong, 4 without a GPU.

    \b
    flashtune referee --out referee.json --html referee.html
    flashtune referee --providers flashtune,torch,cudnn --d 128 --direction bwd
    flashtune referee --d 128 --n 4096 --causal --dtype bf16 --heads 32 --kv-heads 8
    """
    names, budget_s = _named(providers), None if budget is None else seconds_of(budget)
    refuse_shared({"--out": out, "--html": page, "--calls": requested.calls})
    if page is not None:
        refuse_foreign("--html", page, PICTURES[".html"], "HTML file")
        if not os.access(page.parent, os.W_OK):
            raise InputError(f"--html {page} can't be written: name a file in an existing folder that you may write to")
    problems = _problems(requested)
    from flashtune.tuner.machine import cores, local_gpu, provenance

    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise EnvironmentProblem("referee found no GPU here that flashtune knows: run it on a machine with one")
    target = gpu.target
    line = command_line(["flashtune", *sys.argv[1:]])
    before = {} if out is None else {one.problem: one for one in read(out, target.slug)}
    run = Results(gpu=target.slug, provenance=provenance(command=line, seed=seed, measured=True, target=target).as_json())
    judging = _Judging(names, run, before, out, named=providers != "all")
    ends = None if budget_s is None else time.monotonic() + budget_s
    found = judging.all(
        problems,
        lambda workers: Bench(workers=workers, target=target, versions=versions_here(NAMES), seed=seed, seconds=seconds),
        jobs=jobs or max(1, cores() // 2),
        enough=lambda: ends is not None and time.monotonic() > ends,
    )
    if page is not None:
        write_whole(page, html(found).encode())
        messages().print(f"wrote {page}")
    left = len(problems) - len(found.ruled)
    if as_json:
        print_json(found.as_json() | {"left": left})
    else:
        _print(found, left)
    verdicts = {one.verdict for row in found.ruled for one in row.rulings.values()}
    if "wrong" in verdicts:
        raise SystemExit(1)
    if verdicts == {"undecided"}:
        raise EnvironmentProblem("the machine left no verdict on anybody, for the reasons above: free the GPU's memory, and run it again")


def _named(text: str) -> list[str]:
    """Names of `--providers`; raises InputError for unknown ones."""
    names = NAMES if text == "all" else tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in NAMES]:
        raise InputError(f"--providers has no {unknown[0]!r}: use all, or some of {', '.join(NAMES)}")
    return list(names)


def _problems(requested: ProblemOptions) -> list[Problem]:
    """The default shapes that the options choose, or those that they describe; raises InputError for what can't be judged."""
    if CHOOSING.issuperset(requested.given):
        from flashtune.bench.shapes import shapes

        directions = {requested.direction} if "--direction" in requested.given else {"fwd", "bwd"}
        found = [
            one
            for one in shapes()
            if (not requested.d or one.d in requested.d)
            and (not requested.n or one.n_kv in requested.n)
            and (not requested.dtypes or one.dtype in requested.dtypes)
            and one.direction in directions
        ]
        if found:
            return found
    found = requested.problems()
    for one in found:
        if one.features.dropout:
            raise InputError(f"{one.label()} has dropout, whose masks differ between providers: leave --dropout out")
        if one.features.mods and one.features.packed:
            raise InputError(f"{one.label()} is of packed sequences with functions, which aren't judged: leave --packed out")
        if one.features.page:
            raise InputError(f"{one.label()} reads pages, which no other provider is given: leave --paged out")
    return found


class _Judging:
    """Results of a run while they are made, with those of earlier runs in the file `out`."""

    def __init__(self, names: list[str], run: Results, before: dict[Problem, Ruled], out: Path | None, *, named: bool) -> None:
        self._names, self._run, self._known, self._out, self._explicit = names, run, before, out, named

    def all(self, problems: list[Problem], bench: "Callable[[Workers], Bench]", *, jobs: int, enough: "Callable[[], bool]") -> Results:
        """Judge each shape that isn't known, until `enough`, and return the results of those that are."""
        from flashtune.tuner.children.workers import Workers

        # What can't be written is said at once.
        self._keep()
        with Workers(jobs=1) as workers:
            judging = bench(workers)
            asked = {problem: names for problem in problems if (names := self._left(problem, judging))}
            stand = {problem: self._known[problem] for problem in problems if problem not in asked}
            for one in judging.ruled(list(asked.items()), jobs=min(jobs, len(asked)), enough=enough) if asked else ():
                stand[one.problem] = self._known[one.problem] = one
                self._keep()
                messages().print(f"[{len(stand)}/{len(problems)}] {one.title}: {_line(one)}")
        return self._with([stand[problem] for problem in problems if problem in stand])

    def _left(self, problem: Problem, judging: "Bench") -> list[str]:
        """Those to be judged for a shape; none where all of them are."""
        asked = [name for name in self._names if served(name, problem, named=self._explicit)]
        known = self._known.get(problem)
        if known is not None and known.stands(asked, judging.versions, judging.seed):
            return []
        # Others that the file has are judged, too: all times of a shape are of one race.
        return [name for name in NAMES if name in asked or (known is not None and name in known.rulings)]

    def _with(self, found: list[Ruled]) -> Results:
        return Results(gpu=self._run.gpu, provenance=self._run.provenance, ruled=found)

    def _keep(self) -> None:
        if self._out is not None:
            self._with(list(self._known.values())).write(self._out)


def _line(one: Ruled) -> str:
    """A shape's result in a line, without those that refuse it."""
    parts = [f"{name} {cell(one, name)}" for name, ruling in one.rulings.items() if ruling.verdict != "refused"]
    return ", ".join(parts) + (f" (not timed: {one.untimed})" if one.untimed else "")


def _print(found: Results, left: int) -> None:
    out = console()
    table = times(found)
    names = tuple(reversed(table.columns[3:-1]))
    out.print(
        fitted(table.title, table.columns, table.rows, width=out.width, spared=names, words=("fastest",), marked=LOUD, note=table.note)
    )
    table = totals(found)
    out.print(fitted(table.title, table.columns, table.rows, width=out.width, words=("why not",)))
    for name, shape, verdict, reason, versions in findings(found).rows:
        out.print(f"{name} {verdict}: {shape}: {reason} ({versions})", soft_wrap=True)
    if left:
        out.print(f"{counted(left, 'shape')} left by --budget")
