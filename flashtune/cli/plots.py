"""Pages of `flashtune search --plot` and `bench --plot`: pictures and tables of one run, with its command, GPU, versions and date."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from flashtune.bench.page import Bars, Points, Series, Table, origin, page
from flashtune.cli.outputs import refuse_plot
from flashtune.cli.records import COLUMNS, cells_of
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Outcome, Provenance, TuningRecord
from flashtune.core.system.files import write_whole
from flashtune.core.system.words import counted

plot_option = click.option(
    "--plot",
    "plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="Write a page with pictures of the results to this file.",
)


def check_page(path: Path | None) -> None:
    """Raise InputError for a page that can't be written, before any work for it."""
    if path is not None:
        refuse_plot(path, (".html",))


def write_search(
    path: Path,
    timeline: Mapping[Problem, Sequence[tuple[float, Outcome]]],
    records: Sequence[TuningRecord],
    provenance: Provenance,
    gpu: str,
) -> None:
    """Write the page of a search: its records, and for each problem the trials of this process with the seconds at which they ended."""
    names = tuple(name for name in COLUMNS if name != "config")
    rows = [tuple(cells_of(record)[name] for name in names) for record in records]
    best = Table(title="Best known", columns=names, rows=rows, note="vs PyTorch: PyTorch's time over the kernel's; ~: predicted")
    pictures = [_trials(problem, trials) for problem, trials in timeline.items()]
    none = [] if pictures else ["No trial was made: the problems were searched before."]
    _write(path, f"Search on {gpu}", [best, *none, *pictures], provenance)


def _trials(problem: Problem, trials: Sequence[tuple[float, Outcome]]) -> Points:
    """Picture of a problem's trials: candidates by family, and the best time so far."""
    best, steps = math.inf, list[tuple[float, float, str]]()
    families: dict[str, list[tuple[float, float, str]]] = {}
    for seconds, one in trials:
        if not one.fate.timed or one.measurement is None:
            continue
        time_us = one.measurement.median_us
        families.setdefault(one.template, []).append((seconds, time_us, f"{time_us:.1f} us {one.source}: {one.config.label()}"))
        steps += [] if best == math.inf else [(seconds, best, "")]
        best = min(best, time_us)
        steps.append((seconds, best, ""))
    last = max((seconds for seconds, _ in trials), default=0.0)
    steps += [(last, best, "")] if steps else []
    failed = len(trials) - sum(map(len, families.values()))
    series = [Series(name="best so far", points=steps, line=True)]
    series += [Series(name=name, points=points) for name, points in families.items()]
    note = f"{counted(failed, 'trial')} of {len(trials)} ended without a time." if failed else ""
    title = f"{problem.label()}, {problem.batch}x{problem.heads}"
    return Points(title=title, x_label="seconds since the start", y_label="Microseconds", series=series, note=note)


def write_bench(path: Path, rows: Sequence[Mapping[str, Any]], provenance: Provenance, gpu: str) -> None:
    """Write the page of a bench by its `rows` in --json."""
    _write(path, f"Attention on {gpu}", _benched(rows), provenance)


def _benched(rows: Sequence[Mapping[str, Any]]) -> Iterator[str | Bars | Table]:
    if not rows:
        yield "No problem has a kernel here, so nothing was timed."
        return
    yield "tuned is flashtune's kernel, default PyTorch's own choice; the others are PyTorch's backends by name."
    for title, field, note in (
        ("TFLOP/s on the GPU alone", "tflops", "longer is faster"),
        ("Microseconds of whole calls, host included", "call_us", "shorter is faster"),
    ):
        groups = [(f"{row['problem']}, {row['batch']}x{row['heads']}", list(row[field].items())) for row in rows if row[field]]
        if groups:
            yield Bars(title=title, groups=groups, note=note)
    times = [
        (row["problem"], f"{row['batch']}x{row['heads']}", name, f"{us:.1f}", f"{row['tflops'][name]:.0f}")
        for row in rows
        for name, us in row["median_us"].items()
    ]
    left_out = "\n".join(f"{row['problem']}: {name} left out, {why}" for row in rows for name, why in row["left_out"].items())
    yield Table(title="Medians", columns=("problem", "B x H", "attention", "us", "TFLOP/s"), rows=times, note=left_out)


def _write(path: Path, title: str, parts: Sequence[Any] | Iterator[Any], provenance: Provenance) -> None:
    write_whole(path, page(title, parts, origin(provenance.as_json())).encode())
