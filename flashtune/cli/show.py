"""`flashtune show`: the best known configuration of every problem."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from flashtune.cli.console import console, print_json
from flashtune.cli.functions import FUNCTIONS, register_functions
from flashtune.cli.options import db_option, json_option, record_filters, using
from flashtune.cli.records import FALLING, RISING, ordered, print_records, record_row
from flashtune.core.records.models import Model, ModelAttention, models
from flashtune.core.records.results import TuningRecord
from flashtune.core.system.errors import InputError

if TYPE_CHECKING:
    from flashtune.db.store import KeyFilter


@click.command()
@db_option
@record_filters("gpu_name", "d", "n", "dtype")
@click.option("--source", type=click.Choice(["measured", "predicted"]), help="Only records of this kind.")
@click.option(
    "--models",
    "list_models",
    is_flag=True,
    help="Models for --model in place of records, all or those of --d and --n; with --gpu-name, the records that their calls use there.",
)
@click.option("--kernel", metavar="ID", help="Print the source of a record's kernel or fallback kernel, by the id that explain prints.")
@FUNCTIONS[0]
@FUNCTIONS[1]
@click.option("--wide", is_flag=True, help="All columns, including the config, in lines of any length.")
@click.option(
    "--sort",
    "column",
    type=click.Choice([*RISING, *FALLING], case_sensitive=False),
    help="Order by this column: names and times rise, rates and ratios fall.",
)
@click.option("--limit", "most", type=click.IntRange(min=1), metavar="N", help="At most so many records, the first ones.")
@json_option
def show(
    *,
    location: str | None,
    filters: "KeyFilter",
    source: str | None,
    list_models: bool,
    kernel: str | None,
    wide: bool,
    score_mod: str | None,
    mask_mod: str | None,
    column: str | None,
    most: int | None,
    as_json: bool,
) -> None:
    """List the best records: your own database over the shipped one, or only that of --db.

    us is the kernel's time in microseconds (~: predicted), call us that of a whole call, and vs PyTorch PyTorch's time over the kernel's,
    with PyTorch's backend. as calls is the same ratio for whole calls, by which the dispatcher chooses. problem is N, D, the element type
    and the features; B x H are batch and query heads. A database holds only the hash of functions: --score-mod and --mask-mod name them.

    \b
    flashtune show
    flashtune show --gpu-name h200 --sort "as calls" --limit 20
    flashtune show --db my-model.sqlite --gpu-name h200 --json
    flashtune show --models
    flashtune show --models --gpu-name h200
    flashtune show --kernel dcef29cbf240d7c1 > kernel.py
    """
    if list_models:
        given = {"--source": source, "--dtype": filters.get("dtype"), "--kernel": kernel, "--wide": wide, "--sort": column, "--limit": most}
        given |= {"--score-mod": score_mod, "--mask-mod": mask_mod}
        if refused := next((name for name, value in given.items() if value), None):
            raise InputError(f"{refused} was given together with --models, which lists no records: leave one of them out")
        if location is not None and filters.get("gpu") is None:
            raise InputError("--db was given together with --models but without a GPU: name the GPU of its records with --gpu-name")
        show_models(listed(d=filters.get("d"), n=filters.get("n")), filters.get("gpu"), location, as_json=as_json)
        return
    register_functions(score_mod, mask_mod)
    from flashtune.db.library import Library
    from flashtune.templates import unservable

    library = Library.of(location) if location else Library.default()
    every = [r for r in library.records(passed_over=unservable, **filters) if source in (None, r.outcome.source)]
    # A kernel is looked for among all records.
    records = every if kernel is not None else ordered(every, column, most)
    if kernel is not None:
        click.echo(source_of(kernel, records), nl=False)
    elif as_json:
        print_json([record_row(r) for r in records])
    elif records:
        print_records(records, wide=wide, explained=True)
        if len(records) < len(every):
            console().print(f"{len(records)} of {len(every)} records: --limit leaves out the others")
    else:
        console().print("no records match: run flashtune search, or loosen the filters")


def source_of(variant_id: str, records: Sequence[TuningRecord]) -> str:
    """Rendered source of the kernel with this id, which is a record's kernel or one beside it."""
    from flashtune.templates import without_kernel, written_here
    from flashtune.tuner.publish.winners import source_for, variant_for

    for record in records:
        for one in (record, *record.beside()):
            # A record of an earlier version may hold another id than its kernel has today, which is what explain prints.
            if without_kernel(one) is not None or not written_here(one.problem.spec()):
                continue
            if variant_id in (one.outcome.variant_id, variant_for(one).id):
                return source_for(one).text
    raise InputError(f"no record's kernel has the id {variant_id!r}: take one that flashtune explain prints")


STANDING = {
    "exact": "measured",
    "near_n": "near",
    "stand_in": "substitute",
    "near_gpu": "other GPU",
    "predicted": "predicted",
    "default": "untuned",
    "framework": "torch",
}
"""Table words of the policy's kinds of choice (flashtune.dispatch.policy.choose.rank)."""


def listed(*, d: int | None, n: int | None) -> list[Model]:
    """Models with attentions of this head size and usual length, and only these attentions of each."""
    found = []
    for model in models().values():
        kinds = [replace(kind, n=tuple(length for length in kind.n if n in (None, length))) for kind in model.attentions]
        if kinds := [kind for kind in kinds if kind.n and d in (None, kind.d)]:
            found.append(replace(model, attentions=tuple(kinds)))
    return found


def show_models(models: Sequence[Model], gpu: str | None, location: str | None, *, as_json: bool) -> None:
    """Print models, one line for each kind of attention, for a GPU with what runs it there, by the records in use or of one database."""
    with using(location):
        served = [[_served(kind, gpu) if gpu else [] for kind in model.attentions] for model in models]
    if as_json:
        rows = [asdict(model) for model in models]
        for row, of_kinds in zip(rows, served if gpu else [], strict=False):
            for attention, choices in zip(row["attentions"], of_kinds, strict=True):
                attention["served"] = choices
        print_json(rows)
        return
    if not models:
        console().print("no models match: loosen --d and --n")
        return
    table = Table(title="Models by their attentions (sources: --json)", title_justify="left")
    for heading in ("model", "attention", "heads", "D", "N", "features", *(("prefill", "one step") if gpu else ())):
        table.add_column(heading)
    for model, of_kinds in zip(models, served, strict=True):
        for kind, choices in zip(model.attentions, of_kinds, strict=True):
            heads = str(kind.heads) if kind.heads == kind.kv_heads else f"{kind.heads}/{kind.kv_heads}"
            lengths = ", ".join(str(n) if kind.n_q is None else f"{kind.n_q} x {n}" for n in kind.n)
            features = kind.problem(n=kind.n[0], dtype="bf16").features.label()
            cells = [model.slug, kind.what, heads, str(kind.d) if kind.d_v is None else f"{kind.d}/{kind.d_v}", lengths, features]
            if gpu:
                cells += [", ".join(STANDING[one["kind"]] for one in choices if (one["n_q"] == 1) is step) for step in (False, True)]
            table.add_row(*cells)
    console().print(table)


STEP_BATCH = 8
"""Batch of the decoding steps in the table of models."""


def _served(kind: ModelAttention, gpu: str) -> list[dict[str, Any]]:
    """Choices for an attention in bf16 at its usual lengths; for causal self-attention also for a decoding step of that many keys.

    `estimated_loss` is None, since no estimate is calibrated.
    """
    from flashtune.dispatch import explain_problem

    problems = [kind.problem(n=n, dtype="bf16") for n in kind.n]
    if kind.causal and kind.n_q is None:
        problems += [kind.problem(n=n, dtype="bf16", batch=STEP_BATCH, n_q=1) for n in kind.n]
    return [{"n": p.n_kv, "n_q": p.n_q, "batch": p.batch, "kind": explain_problem(p, gpu).kind, "estimated_loss": None} for p in problems]
