"""`flashtune show`: the best known configuration of every problem."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import click
from rich.table import Table

from flashtune.cli.console import console, print_json
from flashtune.cli.options import DTYPE, GPU, db_option, filters_of, json_option
from flashtune.cli.records import print_records, record_row
from flashtune.core.errors import InputError
from flashtune.core.models import Model, ModelAttention, models
from flashtune.core.problem import Problem
from flashtune.core.results import TuningRecord
from flashtune.core.target import find_target


@click.command()
@db_option
@click.option("--gpu-name", type=GPU, metavar="NAME", help="Only this GPU.")
@click.option("--d", type=int, help="Only this head size.")
@click.option("--n", type=int, help="Only this sequence length.")
@click.option("--dtype", type=DTYPE, help="Only this element type.")
@click.option("--source", type=click.Choice(["measured", "predicted"]), help="Only records of this kind.")
@click.option(
    "--models",
    "list_models",
    is_flag=True,
    help="Models for --model in place of records, all or those of --d and --n; with --gpu-name, the records that serve them there.",
)
@click.option("--kernel", metavar="ID", help="Print the source of a record's kernel or fallback kernel, by the id that explain prints.")
@click.option("--wide", is_flag=True, help="All columns, including the config, in lines of any length.")
@json_option
def show(
    location: str | None,
    gpu_name: str | None,
    d: int | None,
    n: int | None,
    dtype: str | None,
    source: str | None,
    list_models: bool,
    kernel: str | None,
    wide: bool,
    as_json: bool,
) -> None:
    """List the best known configuration of every problem: your own database over the shipped one, or only that of --db.

    \b
    flashtune show
    flashtune show --db my-model.sqlite --gpu-name h200 --json
    flashtune show --models
    flashtune show --models --gpu-name h200
    flashtune show --kernel 0dbcca0f766ea749 > kernel.py
    """
    if list_models:
        given = {"--source": source, "--dtype": dtype, "--kernel": kernel, "--wide": wide}
        if refused := next((name for name, value in given.items() if value), None):
            raise InputError(f"{refused} was given together with --models, which lists no records: leave one of them out")
        if location is not None and gpu_name is None:
            raise InputError("--db was given together with --models but without a GPU: name the GPU of its records with --gpu-name")
        show_models(listed(d=d, n=n), None if gpu_name is None else standing_on(gpu_name, location), as_json=as_json)
        return
    from flashtune.db.library import Library
    from flashtune.templates import unservable

    library = Library.of(location) if location else Library.default()
    records = [
        r
        for r in library.records(passed_over=unservable, **filters_of(gpu_name=gpu_name, d=d, n=n, dtype=dtype))
        if source is None or r.outcome.source == source
    ]
    if kernel is not None:
        print(source_of(kernel, records), end="")
        return
    if as_json:
        print_json([record_row(r) for r in records])
        return
    if not records:
        console().print("no records match: run flashtune search, or loosen the filters")
        return
    print_records(records, wide=wide)


def source_of(variant_id: str, records: Sequence[TuningRecord]) -> str:
    """Rendered source of the kernel with this id, which is a record's kernel or its fallback kernel."""
    from flashtune.templates import unservable
    from flashtune.tuner.publish.sources import source_for, variant_for

    for record in records:
        for one in (record, record.as_fallback()):
            # A record of an earlier version may hold another id than its kernel has today, which is what explain prints.
            if one is not None and unservable(one) is None and variant_id in (one.outcome.variant_id, variant_for(one).id):
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
"""Table words of the policy's kinds of choice (flashtune.dispatch.policy.rank)."""

Standing = Callable[[Problem], dict[str, Any]]
"""Choice for a problem: its `kind`, and `estimated_loss`, which is None since no estimate is calibrated."""


def standing_on(gpu_name: str, location: str | None) -> Standing:
    """Function from a problem to its choice on this GPU, by the records in use or those of one database."""
    from flashtune.db.library import Library
    from flashtune.dispatch.policy import Pool, choose, group_of, torch_has
    from flashtune.templates import families, unservable

    target, known = find_target(gpu_name), families()
    library = Library.of(location) if location else Library.default()
    records = library.records(passed_over=unservable)
    pools: dict[object, Pool] = {}

    def standing(problem: Problem) -> dict[str, Any]:
        key = problem.key(target.slug)
        if (group := group_of(key)) not in pools:
            pools[group] = Pool(key, target, records, known)
        choice = choose(problem, target, pools[group], known, framework_serves=torch_has(problem))
        return {"kind": choice.kind, "estimated_loss": None}

    return standing


def listed(*, d: int | None, n: int | None) -> list[Model]:
    """Models with attentions of this head size and usual length, and only these attentions of each."""
    found = []
    for model in models().values():
        kinds = [replace(kind, n=tuple(length for length in kind.n if n in (None, length))) for kind in model.attentions]
        if kinds := [kind for kind in kinds if kind.n and d in (None, kind.d)]:
            found.append(replace(model, attentions=tuple(kinds)))
    return found


def show_models(models: Sequence[Model], standing: Standing | None, *, as_json: bool) -> None:
    """Print models, one line for each kind of attention, with its choices if `standing` is given."""
    if as_json:
        print_json([_model_json(model, standing) for model in models])
        return
    if not models:
        console().print("no models match: loosen --d and --n")
        return
    table = Table(title="Models by their attentions (sources: --json)", title_justify="left")
    for heading in ("model", "attention", "heads", "D", "N", "features", *(("prefill", "one step") if standing is not None else ())):
        table.add_column(heading)
    for model in models:
        for kind in model.attentions:
            heads = str(kind.heads) if kind.heads == kind.kv_heads else f"{kind.heads}/{kind.kv_heads}"
            lengths = ", ".join(str(n) if kind.n_q is None else f"{kind.n_q} x {n}" for n in kind.n)
            features = kind.problem(n=kind.n[0], dtype="bf16").features.label()
            cells = [model.slug, kind.what, heads, str(kind.d) if kind.d_v is None else f"{kind.d}/{kind.d_v}", lengths, features]
            if standing is not None:
                found = _served(kind, standing)
                prefill, step = (", ".join(_words(one) for one in found if (one["n_q"] == 1) is step) for step in (False, True))
                cells += [prefill, step]
            table.add_row(*cells)
    console().print(table)


def _model_json(model: Model, standing: Standing | None) -> dict[str, Any]:
    """A model's facts, and the choices for each attention."""
    found = asdict(model)
    if standing is not None:
        for kind, fields in zip(model.attentions, found["attentions"], strict=True):
            fields["served"] = _served(kind, standing)
    return found


STEP_BATCH = 8
"""Batch of the decoding steps in the table of models."""


def _served(kind: ModelAttention, standing: Standing) -> list[dict[str, Any]]:
    """Choices for an attention in bf16 at its usual lengths; for causal self-attention also for a decoding step of that many keys."""
    problems = [kind.problem(n=n, dtype="bf16") for n in kind.n]
    if kind.causal and kind.n_q is None:
        problems += [kind.problem(n=n, dtype="bf16", batch=STEP_BATCH, n_q=1) for n in kind.n]
    return [{"n": p.n_kv, "n_q": p.n_q, "batch": p.batch, **standing(p)} for p in problems]


def _words(served: dict[str, Any]) -> str:
    return STANDING[served["kind"]]
