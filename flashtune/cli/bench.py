"""`flashtune bench`: tuned kernels against PyTorch's attention backends on this GPU, in one run, on the same inputs."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from flashtune.cli.console import console, fitted, messages, print_json
from flashtune.cli.options import ListCommand, json_option
from flashtune.cli.plots import check_page, plot_option, write_bench
from flashtune.cli.problem_options import ProblemOptions, problem_options
from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.core.system.secrets import command_line

if TYPE_CHECKING:
    from flashtune.tuner.children.workers import Workers


@click.command(cls=ListCommand)
@problem_options(many=True)
@click.option("--seconds", type=click.FloatRange(min=0.05), default=1.0, show_default=True, help="Timing per problem.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random inputs.")
@plot_option
@json_option
def bench(*, requested: ProblemOptions, seconds: float, seed: int, plot: Path | None, as_json: bool) -> None:
    """Time the kernels that dispatch would use against PyTorch's backends: medians of interleaved launches, L2 flushed.

    Then time whole calls of both in an eager loop, host included: a model sees the slower of host and GPU.

    \b
    flashtune bench --d 128 --dtype bf16 --n 4096 --causal
    flashtune bench --model llama-3-8b --n 8192 --plot llama.html
    flashtune bench --d 128 --dtype bf16 --n 1024 --batch 16 --causal --packed lognormal --direction bwd
    flashtune bench --d 128 --n 4096 --mask-mod examples/masks.py:dilated
    """
    from flashtune.tuner.children.workers import Workers
    from flashtune.tuner.machine import local_gpu, provenance

    check_page(plot)
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise EnvironmentProblem("bench found no GPU here that flashtune knows: run it on a machine with one")
    rows: list[dict[str, Any]] = []
    with Workers(jobs=1) as workers:
        for problem in requested.problems():
            row = _timed(problem, gpu.target, workers, seed=seed, seconds=seconds)
            if isinstance(row, str):
                messages().print(f"{problem.label()}: {row}")
            else:
                rows.append(row)
    here = provenance(command=command_line(["flashtune", *sys.argv[1:]]), seed=seed, measured=True)
    if plot is not None:
        write_bench(plot, rows, here, gpu.name)
        messages().print(f"wrote {plot}")
    if as_json:
        print_json({"provenance": here.as_json(), "rows": rows})
    else:
        console().print(_table(rows, title=f"TFLOP/s on {gpu.name}"))


def _timed(problem: Problem, target: Target, workers: "Workers", *, seed: int, seconds: float) -> dict[str, Any] | str:
    """One entry of `rows` in `--json`, or the reason why the problem has none."""
    from flashtune.bench import bench_problem, time_calls
    from flashtune.dispatch import explain_problem
    from flashtune.templates import family
    from flashtune.templates.rendering import variant_of
    from flashtune.tuner.children import tasks
    from flashtune.tuner.replies import Called, Compared, Failed, Ready

    chosen = explain_problem(problem, target.slug)
    if chosen.template is None or chosen.config is None:
        return chosen.reason
    kernel = family(chosen.template)
    variant = variant_of(kernel, problem.spec(), chosen.config)
    source = tasks.Source.of(kernel, variant)
    reply: Ready | Compared | Failed = workers.prepare(problem, target, seed)
    # PyTorch's compiler, too, runs within it.
    limit_s = workers.limits.prepare_s + 20 * seconds
    if isinstance(reply, Ready):
        reply = workers.submit("device", bench_problem, source, problem, target, seed, seconds, limit_s=limit_s).reply()
    if isinstance(reply, Failed):
        return f"{reply.fate}: {reply.reason}"
    calls: dict[str, float] = {}
    # The whole calls that are timed are given no functions.
    if not problem.features.mods:
        called: Called | Failed
        called = workers.submit("device", time_calls, [source], problem, target, seed, seconds / 3, limit_s=limit_s).reply()
        if isinstance(called, Failed):
            messages().print(f"{problem.label()}: no whole calls: {called.reason}")
        else:
            calls = {"tuned": called.times[0], **({"default": called.pytorch.median_us} if called.pytorch is not None else {})}
    times = {name: time.median_us for name, time in reply.times.items()}
    return {
        "problem": problem.label(),
        "n": problem.n_kv,
        "d": problem.d,
        "dtype": problem.dtype,
        "direction": problem.direction,
        "features": problem.features.as_json(),
        "batch": problem.batch,
        "heads": problem.heads,
        "law": None if problem.lengths is None else problem.lengths.law,
        "longest": None if problem.lengths is None else problem.lengths.longest,
        "served": chosen.kind,
        "template": chosen.template,
        "variant": variant.id,
        "median_us": {name: round(time_us, 3) for name, time_us in times.items()},
        "tflops": {name: round(problem.flops() / time_us / 1e6, 1) for name, time_us in times.items()},
        "left_out": dict(reply.left_out),
        "call_us": {name: round(time_us, 3) for name, time_us in calls.items()},
    }


def _table(rows: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["median_us"]))
    lines = []
    for row in rows:
        us, rate, call = row["median_us"], row["tflops"], row["call_us"]
        lines.append(
            (
                row["problem"],
                f"{row['served']}: {row['template']}",
                *(f"{rate[n]:.0f}" if n in rate else "-" for n in names),
                f"{us['default'] / us['tuned']:.2f}x" if "default" in us else "",
                f"{call['tuned']:.1f}" if call else "-",
                f"{call['default'] / call['tuned']:.2f}x" if "default" in call else "",
            )
        )
    columns = ("problem", "run by", *names, "tuned / default", "call us", "as calls")
    return fitted(title, columns, lines, width=console().width, words=("run by",))
