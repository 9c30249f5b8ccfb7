"""`flashtune profile`: time and bytes of attention's steps, for these shapes on this GPU."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import click
from click.core import ParameterSource

from flashtune.cli.console import messages, print_json
from flashtune.cli.options import DTYPE, GPU, MODEL, json_option
from flashtune.cli.profile_text import render
from flashtune.core.config import Direction
from flashtune.core.dtypes import DTYPES, parse_dtype
from flashtune.core.errors import InputError
from flashtune.core.models import find_model
from flashtune.core.problem import DIRECTIONS, Features, Problem
from flashtune.core.target import Target, find_target
from flashtune.profiler.accounting import ELEMENTWISE, Elementwise
from flashtune.profiler.paths import check_plot_path, require_matplotlib
from flashtune.profiler.strategies import DEFAULT_RANK, DEFAULT_WINDOW, check_rank, check_window
from flashtune.profiler.summary import ChosenBy, Profile
from flashtune.tuner.machine import gpu_may_be_present, local_gpu

DEFAULT_GPU = "h200"
"""GPU of the roofline where none is named and none is present: the one that the shipped kernels were tuned on."""


@click.command()
@click.option(
    "--model", type=MODEL, metavar="NAME", help="Heads, D and N of this model's first attention, without its windows and soft caps."
)
@click.option("--batch", "--b", "b", type=int, default=1, show_default=True, help="Batch.")
@click.option("--heads", "--h", "h", type=int, default=16, show_default=True, help="Query heads.")
@click.option("--kv-heads", type=int, help="Key and value heads (default: as many as query heads).")
@click.option("--n", "n", type=int, default=4096, show_default=True, help="Sequence length.")
@click.option("--n-q", type=int, help="Number of queries, when it differs from --n: 1 is a step of decoding.")
@click.option("--causal", is_flag=True, help="Causal attention; the last query sees the last key.")
@click.option(
    "--direction",
    type=click.Choice(DIRECTIONS),
    default="fwd",
    show_default=True,
    help="Forward or backward pass; a backward is only counted.",
)
@click.option("--d", "d", type=int, default=128, show_default=True, help="Head size, up to 256.")
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
    "--window", type=int, default=DEFAULT_WINDOW, show_default=True, metavar="W", help="Keys on either side in the local strategy."
)
@click.option(
    "--rank",
    type=int,
    metavar="R",
    help=f"Rows that K and V are projected to in the low-rank strategy (default {DEFAULT_RANK}, at most N).",
)
@click.option(
    "--plot", "plots", multiple=True, metavar="FILE", help="Write pictures: a report (.html) or one figure (.png, .svg). Repeatable."
)
@json_option
def profile(
    model: str | None,
    b: int,
    h: int,
    kv_heads: int | None,
    n: int,
    n_q: int | None,
    causal: bool,
    direction: Direction,
    d: int,
    dtype: str,
    gpu_name: str | None,
    elementwise: Elementwise,
    window: int,
    rank: int | None,
    plots: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show where attention's time and bytes go: each step of the standard pipeline and the fused kernel against a GPU's roofline.

    Counting needs no GPU. On the named GPU (or any, without a name) everything is measured as well: each step, whole attentions, latency
    against N, attention's share of a transformer layer, and four strategies with their errors.

    \b
    flashtune profile --b 1 --h 12 --n 1024 --d 64 --dtype fp16 --gpu-name v100
    flashtune profile --batch 4 --heads 16 --n 4096 --d 128 --dtype bf16 --plot report.html
    flashtune profile --batch 8 --heads 32 --kv-heads 8 --n 16384 --n-q 1 --d 128 --dtype bf16
    """
    if model is not None:
        kind = find_model(model).attentions[0]
        if kind.d_v is not None:
            raise InputError(f"--model {model} has values of another size than its keys, which profile doesn't count: give --d and --heads")
        context = click.get_current_context()
        h, kv_heads, d, causal = kind.heads, kind.kv_heads, kind.d, kind.causal
        n = n if context.get_parameter_source("n") is ParameterSource.COMMANDLINE else kind.n[0]
    kv_heads, n_q = (h if kv_heads is None else kv_heads), (n if n_q is None else n_q)
    for option, value in (("--batch", b), ("--heads", h), ("--kv-heads", kv_heads), ("--n", n), ("--n-q", n_q), ("--d", d)):
        if value < 1:
            raise InputError(f"{option} {value} is out of range: give at least 1")
    if causal and n_q > n:
        raise InputError(f"--n-q {n_q} with --causal and --n {n} leaves queries without a key: give at most {n} queries")
    features = Features(causal=causal, alignment="top_left" if n_q == n else "bottom_right")
    problem = Problem(
        batch=b, heads=h, kv_heads=kv_heads, n_q=n_q, n_kv=n, d=d, d_v=d, dtype=parse_dtype(dtype), features=features, direction=direction
    )
    named = find_target(gpu_name) if gpu_name else None
    files = [check_plot_path(Path(path)) for path in plots]
    if files and direction == "bwd":
        raise InputError("--plot draws the forward's steps: leave it out with --direction bwd")
    if files:
        require_matplotlib()
    here, why_not = _local(named)
    if problem.dtype == "fp8":
        why_not = "torch's own operations, which the steps are timed with, take no fp8"
    elif direction == "bwd":
        why_not = "a backward's steps aren't timed one by one; `flashtune bench --direction bwd` times it whole"
    target, chosen_by = _choose(named, here)
    found = Profile(
        problem=problem,
        target=target,
        chosen_by=chosen_by,
        elementwise=elementwise,
        window=check_window(window),
        rank=check_rank(rank, n),
        not_measured=why_not,
    )
    if not why_not:
        # Imported here: torch and dispatch cost seconds that a profile without a GPU doesn't need.
        from flashtune.profiler.timing import Bench, measure

        messages().print(f"measuring on {target.name}, under a minute")
        found = replace(found, measured=measure(found, Bench.on_gpu(found)))
    for path in files:
        from flashtune.profiler.report import write

        write(found, path)
        messages().print(f"wrote {path}")
    if as_json:
        print_json(found.as_json())
    else:
        # Files and pipes get all columns.
        click.echo(render(found, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def _choose(named: Target | None, here: Target | None) -> tuple[Target, ChosenBy]:
    if named is not None:
        return named, "name"
    return (here, "device") if here is not None else (find_target(DEFAULT_GPU), "default")


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
