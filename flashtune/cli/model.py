"""`flashtune model`: tune the attention of one model, and say what the whole model gains."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from flashtune.cli.console import console, fitted, messages, print_json
from flashtune.cli.export import written
from flashtune.cli.options import GPU, ListCommand, gpu_of, json_option, seconds_of
from flashtune.cli.problems import searchable, stored
from flashtune.cli.records import PREDICTED_NOTE, predicted_only
from flashtune.cli.search import SearchOptions, choose_source, run_search
from flashtune.core.system.errors import FlashtuneError, InputError, NoKernelFound
from flashtune.core.system.words import counted
from flashtune.templates import BITS, unservable

if TYPE_CHECKING:
    from flashtune.core.gpu.target import Target
    from flashtune.core.problems.dtypes import DType
    from flashtune.core.problems.problem import Problem
    from flashtune.core.records.results import Source, TuningRecord
    from flashtune.model.tuning import ModelReport

DTYPES: tuple["DType", ...] = ("bf16", "fp16")


@click.command(cls=ListCommand)
@click.argument("path", metavar="PATH")
@click.option("--gpu-name", type=GPU, metavar="NAME", help="The GPU to tune for (default: the one in this machine).")
@click.option(
    "--workload",
    "named",
    multiple=True,
    metavar="KIND:BxN",
    help="A way of running the model: forward, padded, decode or train, with B sequences of N tokens; repeatable (default: by model).",
)
@click.option("--dtype", type=click.Choice(DTYPES), default="bf16", show_default=True, help="Element type of the model.")
@click.option("--layers", type=click.IntRange(min=1), metavar="L", help="Build the model with L layers at most.")
@click.option("--budget", metavar="TIME", default="5m", show_default=True, help="Wall time of the search: 90s, 10m, 1h.")
@click.option("--trials", type=click.IntRange(min=1), default=40, show_default=True, metavar="K", help="Candidates per problem.")
@click.option("--out", metavar="FILE", help="The database to write (default: tuned.sqlite in the model's folder, else in this one).")
@click.option(
    "--licence", "--license", "licence", default="Apache-2.0", show_default=True, metavar="SPDX", help="Licence in its metadata file."
)
@click.option("--predict", is_flag=True, help="Rank by the cost model even where a GPU is present.")
@json_option
def model(
    path: str,
    gpu_name: str | None,
    named: tuple[str, ...],
    dtype: "DType",
    layers: int | None,
    budget: str,
    trials: int,
    out: str | None,
    licence: str,
    predict: bool,
    as_json: bool,
) -> None:
    """Tune the attention of the model at PATH: a folder of transformers or diffusers, or its config.json.

    The model is built, with random weights where the folder has none. Its attention calls are recorded for each workload, and those
    without a record are searched. The best record for each kind of call and GPU goes to one file beside the weights, with a metadata file.

    On the GPU the whole model is then checked against eager attention in float32. It is timed with PyTorch's attention, with each of its
    backends, and with ours. On a machine without a GPU the records are predicted, and nothing is checked or timed.

    \b
    flashtune model ./llama-3-8b
    flashtune model ./llama-3-8b --workload forward:1x8192 --workload decode:16x8192
    flashtune model config.json --layers 4 --dtype fp16 --budget 2m
    """
    from flashtune.model import places, workloads

    # Mistakes that need no model are told before the libraries are loaded, which takes most of half a minute.
    places.find_place(path)
    named_workloads = tuple(map(workloads.parse, named))
    destination, wanted = _destination(path, out, licence)
    options = SearchOptions(trials=trials, budget_s=seconds_of(budget), predict=predict)
    target = gpu_of(gpu_name)
    source = choose_source(target, predict)
    import torch

    from flashtune import dispatch
    from flashtune.core.pytorch.dtypes import TORCH_DTYPES
    from flashtune.model import tuning
    from flashtune.model.finding import find_subject

    subject = find_subject(path, layers=layers)
    chosen = named_workloads or subject.defaults
    device = f"cuda:{torch.cuda.current_device()}" if source == "measured" else None
    kind: torch.dtype = TORCH_DTYPES[dtype]
    judged = tuning.record_calls(subject, chosen, dtype=kind, device=device)
    report = tuning.ModelReport(subject.name, target, dtype, judged)
    for one in judged:
        messages().print(f"{one.workload}: {counted(one.counts.total(), 'attention call')} of {counted(len(one.counts), 'kind')}")
    report.records = _tuned(report.problems(), target, source, options, quiet=as_json)
    rows = _write(destination, report, wanted)
    if device is not None:
        with dispatch.use(destination):
            tuning.judge(subject, judged, device=device, dtype=kind, say=lambda text: messages().print(text))
    if as_json:
        print_json(report.as_json())
    else:
        _print(report, rows, predicted=source == "predicted")
    wrong = [str(one.workload) for one in judged if one.check is not None and not one.check.right]
    if wrong:
        raise FlashtuneError(f"outputs of {', '.join(wrong)} are further from float32 than allowed: don't use {destination}, and report it")


def _destination(path: str, out: str | None, licence: str) -> tuple[Path, str | None]:
    """The database to write, and the checked licence; raises an error where the file can't be written or added to."""
    from flashtune.cli.export import licence_for
    from flashtune.db.card import check_card
    from flashtune.db.merging import held

    folder = Path(path) if Path(path).is_dir() else Path()
    found = Path(out) if out is not None else folder / "tuned.sqlite"
    if not found.parent.is_dir():
        raise InputError(f"there is no folder {found.parent}: make it, or name another file with --out")
    wanted = licence_for(str(found), licence, force=True)
    stated = check_card(found) if held(found) else None
    if stated not in (None, wanted):
        raise InputError(
            f"the metadata file of {found} states {stated!r}, not {wanted!r}: give it as --licence, or name another file with --out"
        )
    return found, wanted


def _tuned(
    problems: list["Problem"], target: "Target", source: "Source", options: SearchOptions, *, quiet: bool
) -> dict["Problem", "TuningRecord"]:
    """The record of each problem, after a search of those that have none yet of this source or a better one."""

    from flashtune.db.merging import best_of_each, merged

    def known() -> dict["Problem", "TuningRecord"]:
        kept = merged((one for one in stored(None) if one.key.gpu == target.slug), unservable, BITS).kept
        usable = best_of_each(kept)
        return {problem: usable[key] for problem in problems if (key := problem.key(target.slug)) in usable}

    served = {problem for problem, record in known().items() if source == "predicted" or record.outcome.source == "measured"}
    missing, others = searchable([problem for problem in problems if problem not in served], target)
    for sentence in others:
        messages().print(f"left to PyTorch: {sentence}")
    messages().print(f"{counted(len(problems), 'kind')} of calls: {len(missing)} to search, {len(served)} with a record")
    if missing:
        run_search(target, missing, options, quiet=quiet)
    return known()


def _write(destination: Path, report: "ModelReport", licence: str | None) -> int:
    """Add the report's records to the model's database, with a card beside it, and take over what the file had better; returns its number
    of records. Raises NoKernelFound where there are none to add."""
    from flashtune.db.library import Library
    from flashtune.db.merging import add, best_of_each

    if not report.records:
        raise NoKernelFound("no kernel was found for any of the model's calls: PyTorch runs them all")
    added = {record.key: record for record in report.records.values()}
    wrong = [one for same in Library.default().wrong.values() for one in same]
    merged = add(added.values(), destination, passed_over=unservable, bits=BITS, wrong=wrong)
    best = best_of_each(merged.kept)
    report.records = {problem: best[record.key] for problem, record in report.records.items()}
    report.database = destination
    rows = len(merged.kept) + len(merged.passed_over)
    written(str(destination), licence, rows)
    return rows


def _print(report: "ModelReport", rows: int, *, predicted: bool) -> None:
    """Tables of the calls and of the workloads."""
    out, lines = console(), []
    for row in report.calls():
        us, gain = row["median_us"], row["speedup"]
        us_shown = "" if us is None else f"{us:.1f}" + ("*" if row["source"] == "predicted" else "")
        server = f"PyTorch {row['provider'] or ''}".strip() if row["served"] == "PyTorch" else row["served"]
        gained = "" if gain is None else f"{gain:.2f}x"
        lines.append((row["problem"], row["workload"], str(row["calls"]), f"{row['share']:.0%}", server, us_shown, gained))
    columns = ("call", "workload", "calls", "share", "run by", "us", "vs PyTorch")
    title = f"Attention of {report.model} on {report.target.name}"
    out.print(fitted(title, columns, lines, width=out.width, words=("workload", "run by")))
    if predicted:
        out.print(f"* {PREDICTED_NOTE}")
    else:
        out.print(_whole_models(report, out.width))
    own = len({one.key for one in report.records.values()})
    records = counted(rows, "record") + (f", {own} of these calls" if rows != own else "")
    load = predicted_only(str(report.database)) if predicted else f"Load it with dispatch.use({str(report.database)!r})."
    out.print(f"{report.database} holds {records}. {load}", soft_wrap=True)


def _whole_models(report: "ModelReport", width: int) -> Table:
    lines = []
    for one in report.workloads:
        times, found = one.times, one.check
        ms = ("",) * 4
        if times is not None:
            best = f"{times.against_best:.3f}x {times.best_backend}"
            ms = (f"{times.torch_ms:.3f}", f"{times.tuned_ms:.3f}", f"{times.speedup:.3f}x", best)
        errors = ("", "") if found is None else (f"{found.tuned:.1e}", f"{found.allowed:.1e}")
        lines.append((str(one.workload), *ms, *errors, one.why))
    columns = ("workload", "PyTorch ms", "tuned ms", "speed-up", "vs best backend", "error", "allowed", "")
    return fitted("Whole model", columns, lines, width=width, words=("",))
