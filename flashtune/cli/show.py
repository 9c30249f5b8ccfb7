"""`flashtune show`: the best known configuration of every problem."""

from dataclasses import asdict

import click
from rich.table import Table

from flashtune.cli.console import console, print_json
from flashtune.cli.options import DTYPE, GPU, db_option, filters_of, json_option
from flashtune.cli.records import print_records, record_row
from flashtune.core.models import models


@click.command()
@db_option
@click.option("--gpu-name", type=GPU, metavar="NAME", help="Only this GPU.")
@click.option("--d", type=int, help="Only this head size.")
@click.option("--n", type=int, help="Only this sequence length.")
@click.option("--dtype", type=DTYPE, help="Only this element type.")
@click.option("--source", type=click.Choice(["measured", "predicted"]), help="Only rows of this kind.")
@click.option("--models", "list_models", is_flag=True, help="The models that --model knows and their attentions, in place of rows.")
@click.option("--wide", is_flag=True, help="All columns, the config among them, however long the lines become.")
@json_option
def show(
    location: str | None,
    gpu_name: str | None,
    d: int | None,
    n: int | None,
    dtype: str | None,
    source: str | None,
    list_models: bool,
    wide: bool,
    as_json: bool,
) -> None:
    """List the best known configuration of every problem: your overlay over the shipped database, or one given with --db.

    \b
    flashtune show
    flashtune show --db my-model.sqlite --gpu-name h200 --json
    flashtune show --models
    """
    if list_models:
        show_models(as_json)
        return
    from flashtune.db.library import Library
    from flashtune.templates import unservable

    library = Library.of(location) if location else Library.default()
    records = [
        r
        for r in library.records(passed_over=unservable, **filters_of(gpu_name=gpu_name, d=d, n=n, dtype=dtype))
        if source is None or r.outcome.source == source
    ]
    if as_json:
        print_json([record_row(r) for r in records])
        return
    if not records:
        console().print("no rows match: run flashtune search, or loosen the filters")
        return
    print_records(records, wide=wide)


def show_models(as_json: bool) -> None:
    """The models of the table, a line for each kind of attention."""
    if as_json:
        print_json([asdict(model) for model in models().values()])
        return
    table = Table(title="Models by their attentions (sources: --json)", title_justify="left")
    for heading in ("model", "attention", "heads", "D", "N", "features"):
        table.add_column(heading)
    for model in models().values():
        for kind in model.attentions:
            heads = str(kind.heads) if kind.heads == kind.kv_heads else f"{kind.heads}/{kind.kv_heads}"
            lengths = ", ".join(str(n) if kind.n_q is None else f"{kind.n_q} x {n}" for n in kind.n)
            features = kind.problem(n=kind.n[0], dtype="bf16").features.label()
            table.add_row(model.slug, kind.what, heads, str(kind.d) if kind.d_v is None else f"{kind.d}/{kind.d_v}", lengths, features)
    console().print(table)
