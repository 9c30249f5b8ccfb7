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
@click.option("--source", type=click.Choice(["measured", "predicted"]), help="Only rows of this kind.")
@click.option(
    "--models",
    "list_models",
    is_flag=True,
    help="The models that --model knows, in place of rows, all or those of --d and --n; with --gpu-name, what is measured there.",
)
@click.option("--kernel", metavar="ID", help="The source of a record's kernel, or of its fallback's, by the id that explain prints.")
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
    kernel: str | None,
    wide: bool,
    as_json: bool,
) -> None:
    """List the best known configuration of every problem: your overlay over the shipped database, or one given with --db.

    \b
    flashtune show
    flashtune show --db my-model.sqlite --gpu-name h200 --json
    flashtune show --models
    flashtune show --models --gpu-name h200
    flashtune show --kernel 461cfd82b42bdeb6 > kernel.py
    """
    if list_models:
        given = {"--source": source, "--dtype": dtype, "--kernel": kernel, "--wide": wide}
        if refused := next((name for name, value in given.items() if value), None):
            raise InputError(f"{refused} was given together with --models, which lists no rows: leave one of them out")
        if location is not None and gpu_name is None:
            raise InputError("--db was given together with --models alone: name the GPU whose rows count with --gpu-name, too")
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
        console().print("no rows match: run flashtune search, or loosen the filters")
        return
    print_records(records, wide=wide)


def source_of(variant_id: str, records: Sequence[TuningRecord]) -> str:
    """The source that the template makes of the kernel with this id, which serves one of these records or is its fallback."""
    from flashtune.tuner.publish.sources import source_for

    for record in records:
        for one in (record, record.as_twin()):
            if one is not None and one.outcome.variant_id == variant_id:
                return source_for(one).text
    raise InputError(f"no record's kernel has the id {variant_id!r}: take one that flashtune explain prints")


STANDING = {
    "exact": "measured",
    "near_n": "near",
    "stand_in": "stand-in",
    "near_gpu": "other GPU",
    "predicted": "predicted",
    "default": "untuned",
    "framework": "torch",
}
"""What tables say of the steps of the policy (flashtune.dispatch.policy.rank)."""

Standing = Callable[[Problem], dict[str, Any]]
"""What serves a problem: `kind` of choice; `estimated_loss` against a search of its own is None, since no estimate is calibrated."""


def standing_on(gpu_name: str, location: str | None) -> Standing:
    """What the rows in use, or those of a database, mean for problems on this GPU."""
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
    """The models of the table, those with attentions of this head size and usual length, and only these of each."""
    found = []
    for model in models().values():
        kinds = [replace(kind, n=tuple(length for length in kind.n if n in (None, length))) for kind in model.attentions]
        if kinds := [kind for kind in kinds if kind.n and d in (None, kind.d)]:
            found.append(replace(model, attentions=tuple(kinds)))
    return found


def show_models(models: Sequence[Model], standing: Standing | None, *, as_json: bool) -> None:
    """These models, a line for each kind of attention, with what serves each where that is asked for."""
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
    """A model's facts, and of each attention what serves it."""
    found = asdict(model)
    if standing is not None:
        for kind, fields in zip(model.attentions, found["attentions"], strict=True):
            fields["served"] = _served(kind, standing)
    return found


STEP_BATCH = 8
"""Sequences of the decoding steps that are asked about."""


def _served(kind: ModelAttention, standing: Standing) -> list[dict[str, Any]]:
    """What serves an attention in bf16 at its usual lengths; where it is causal and over itself, a decoding step of that many keys, too."""
    problems = [kind.problem(n=n, dtype="bf16") for n in kind.n]
    if kind.causal and kind.n_q is None:
        problems += [kind.problem(n=n, dtype="bf16", batch=STEP_BATCH, n_q=1) for n in kind.n]
    return [{"n": p.n_kv, "n_q": p.n_q, "batch": p.batch, **standing(p)} for p in problems]


def _words(served: dict[str, Any]) -> str:
    return STANDING[served["kind"]]
