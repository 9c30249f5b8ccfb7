"""`flashtune profile`: time and bytes of attention's steps, for these shapes on this GPU."""

import importlib.util
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from flashtune.bench.accounting import DEFAULT_RANK, DEFAULT_WINDOW, ELEMENTWISE, Elementwise
from flashtune.bench.page import Table
from flashtune.bench.profiling import Document, Profile
from flashtune.bench.report import SUFFIXES, parts, write
from flashtune.cli.console import console, fitted, messages, print_json
from flashtune.cli.options import DTYPE, GPU, MODEL, SIZE, json_option
from flashtune.cli.outputs import refuse_plot
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import Direction
from flashtune.core.problems.dtypes import DTYPES, parse_dtype
from flashtune.core.problems.lengths import LAWS, Law, Lengths
from flashtune.core.problems.problem import DIRECTIONS, WIDEST_HEAD, Features, Problem
from flashtune.core.records.models import find_model
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.tuner.machine import gpu_may_be_present, local_gpu

DEFAULT_GPU = "h200"
"""GPU of the roofline where none is named and none is present: the one that the shipped kernels were tuned on."""

SPARED = (
    *("total MB", "MB", "write MiB", "read MiB", "GFLOP", "of peak", "TB/s", "of bandwidth"),
    *("MLP us", "projections us", "total MiB", "FLOP/byte"),
)
"""Columns left out in a narrow terminal, in this order; latencies then lose the smallest N first."""


@click.command()
@click.option(
    "--model", type=MODEL, metavar="NAME", help="Heads, D and N of this model's first attention, without its windows and soft caps."
)
@click.option("--batch", "--b", "b", type=SIZE, default=1, show_default=True, help="Batch.")
@click.option("--heads", "--h", "h", type=SIZE, default=16, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=SIZE, help="Key and value heads (default: as many as query heads).")
@click.option("--n", "n", type=SIZE, default=4096, show_default=True, help="Sequence length.")
@click.option("--n-q", type=SIZE, help="Number of queries, when it differs from --n: 1 is a step of decoding.")
@click.option("--causal", is_flag=True, help="Causal attention; the last query sees the last key.")
@click.option(
    "--direction",
    type=click.Choice(DIRECTIONS),
    default="fwd",
    show_default=True,
    help="Forward or backward pass; a backward is only counted.",
)
@click.option(
    "--packed",
    type=click.Choice(LAWS),
    help="Packed sequences, --batch many, of mean --n and of this law; steps of the standard pipeline are only counted.",
)
@click.option("--d", "d", type=click.IntRange(1, WIDEST_HEAD), default=128, show_default=True, help="Head size.")
@click.option("--dtype", type=DTYPE, default="fp16", show_default=True, help=f"Element type: {', '.join(DTYPES)}.")
@click.option("--gpu-name", type=GPU, metavar="NAME", help=f"GPU of the roofline (default: the one of this machine, else {DEFAULT_GPU}).")
@click.option(
    "--elementwise",
    type=click.Choice(ELEMENTWISE),
    default="fused",
    show_default=True,
    help="Count scale and mask, softmax and dropout as one pass over S, or as one pass each.",
)
@click.option(
    "--window",
    type=click.IntRange(min=0),
    default=DEFAULT_WINDOW,
    show_default=True,
    metavar="W",
    help="Keys on either side in the local strategy.",
)
@click.option(
    "--rank",
    type=SIZE,
    metavar="R",
    help=f"Rows that K and V are projected to in the low-rank strategy (default {DEFAULT_RANK}, at most N).",
)
@click.option(
    "--plot",
    "plots",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Write a report (.html) or its chart (.png, .svg). Repeatable.",
)
@json_option
def profile(
    *,
    gpu_name: str | None,
    elementwise: Elementwise,
    window: int,
    rank: int | None,
    plots: tuple[Path, ...],
    as_json: bool,
    **sizes: Any,
) -> None:
    """Show where attention's time and bytes go: each step of the standard pipeline and the fused kernel against a GPU's roofline.

    Counting needs no GPU. On the named GPU (or any, without a name) everything is measured as well: each step, whole attentions, latency
    against N, attention's share of a transformer layer, and four strategies with their errors.

    \b
    flashtune profile --b 1 --h 12 --n 1024 --d 64 --dtype fp16 --gpu-name v100
    flashtune profile --batch 4 --heads 16 --n 4096 --d 128 --dtype bf16 --plot report.html
    flashtune profile --batch 8 --heads 32 --kv-heads 8 --n 16384 --n-q 1 --d 128 --dtype bf16
    flashtune profile --batch 16 --heads 16 --n 1024 --d 128 --dtype bf16 --causal --packed lognormal
    """
    problem = _problem(**sizes)
    n = problem.n_kv
    if rank is not None and rank > n:
        raise InputError(f"--rank {rank} is more than --n {n}, the number of keys that K is projected from: give at most {n}")
    _check_plots(plots, problem)
    named = find_target(gpu_name) if gpu_name else None
    here, why_not = _local(named)
    if problem.dtype == "fp8":
        why_not = "torch's own operations, which the steps are timed with, take no fp8"
    elif problem.direction == "bwd":
        why_not = "a backward's steps aren't timed one by one; `flashtune bench --direction bwd` times it whole"
    wanted = Profile(
        problem=problem,
        target=named or here or find_target(DEFAULT_GPU),
        chosen_by="name" if named else "device" if here else "default",
        elementwise=elementwise,
        window=window,
        rank=min(DEFAULT_RANK, n) if rank is None else rank,
        not_measured=why_not,
    )
    found = wanted.document() if why_not else _measured(wanted)
    for path in plots:
        write(found, path)
        messages().print(f"wrote {path}")
    if as_json:
        print_json(found)
    else:
        print_report(found)


def _problem(
    *,
    model: str | None,
    b: int,
    h: int,
    kv_heads: int | None,
    n: int,
    n_q: int | None,
    causal: bool,
    direction: Direction,
    packed: Law | None,
    d: int,
    dtype: str,
) -> Problem:
    """The problem of these options; a model determines heads, head size and causality, and without --n the length."""
    if model is not None:
        kind = find_model(model).attentions[0]
        if kind.d_v is not None:
            raise InputError(f"--model {model} has values of another size than its keys, which profile doesn't count: give --d and --heads")
        h, kv_heads, d, causal = kind.heads, kind.kv_heads, kind.d, kind.causal
        if click.get_current_context().get_parameter_source("n") is not ParameterSource.COMMANDLINE:
            n = kind.n[0]
    kv_heads, n_q = kv_heads or h, n_q or n
    if causal and n_q > n:
        raise InputError(f"--n-q {n_q} with --causal and --n {n} leaves queries without a key: give at most {n} queries")
    features = Features(causal=causal, alignment="top_left" if n_q == n else "bottom_right", packed=packed is not None)
    sizes = {"batch": b, "heads": h, "kv_heads": kv_heads, "n_q": n_q, "n_kv": n, "d": d, "d_v": d}
    lengths = None if packed is None else Lengths.of(packed, b, b * n)
    return Problem(**sizes, dtype=parse_dtype(dtype), features=features, direction=direction, lengths=lengths)


def _check_plots(plots: tuple[Path, ...], problem: Problem) -> None:
    """Raise an error for files that couldn't be written, before any work for them."""
    for path in plots:
        refuse_plot(path, SUFFIXES)
    if plots and problem.direction == "bwd":
        raise InputError("--plot draws the forward's steps: leave it out with --direction bwd")
    drawn = [path for path in plots if path.suffix.lower() != ".html"]
    if drawn and importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentProblem(
            f"--plot {drawn[0]} needs matplotlib, which is not installed: write .html, or pip install 'flashtune[plot]'"
        )


def _local(named: Target | None) -> tuple[Target | None, str]:
    """The GPU of this machine if it is in the table of GPUs, and the reason why it can't measure (empty if it can)."""
    gpu = local_gpu() if gpu_may_be_present() else None
    if gpu is None:
        return None, "this machine has no GPU that torch can use"
    if gpu.target is None:
        return None, f"this machine's {gpu.name} is not in the table of GPUs"
    if named is not None and named is not gpu.target:
        return gpu.target, f"this machine has a {gpu.name}, not a {named.name}"
    return gpu.target, ""


def _measured(wanted: Profile) -> Document:
    # Imported here: torch and dispatch cost seconds that a profile without a GPU doesn't need.
    from flashtune.bench.steps import Bench, measure

    messages().print(f"measuring on {wanted.target.name}, under a minute")
    return measure(wanted, Bench(wanted.target.l2_bytes))


def print_report(found: Document, *, width: int | None = None) -> None:
    """Print a profile to standard output; a narrow terminal gets fewer columns."""
    out = console(width=width)
    for place, part in enumerate(parts(found)):
        if place:
            out.print()
        if isinstance(part, Table):
            spared = (*SPARED, *filter(str.isdigit, part.columns))
            out.print(fitted(part.title, part.columns, part.rows, width=out.width, spared=spared, note=part.note))
        else:
            out.print(part, soft_wrap=not out.is_terminal and width is None)
