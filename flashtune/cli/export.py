"""`flashtune export`: a compact database to ship with a model."""

from pathlib import Path

import click

from flashtune.cli.console import console, messages, print_json
from flashtune.cli.options import db_option, filters_of, json_option


@click.command()
@click.argument("destination", type=click.Path(dir_okay=False, path_type=Path))
@db_option
@click.option("--gpu-name", metavar="NAME", help="Only rows of this GPU.")
@click.option("--d", type=int, help="Only this head size.")
@click.option("--dtype", help="Only this element type.")
@click.option("--all-trials", is_flag=True, help="Keep every trial, not only the winners.")
@click.option("--force", is_flag=True, help="Replace DESTINATION where it exists.")
@json_option
def export(
    destination: Path,
    location: str | None,
    gpu_name: str | None,
    d: int | None,
    dtype: str | None,
    all_trials: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the winners of a database (default: your overlay) to DESTINATION, a small file to ship beside a model's weights.

    Users point FLASHTUNE_DB at it, or open it with --db; it holds values only, nothing that is executed. Winners that this version
    can't serve are named and left out.
    """
    from flashtune.db.library import overlay_path
    from flashtune.db.store import Store
    from flashtune.templates import unservable

    with Store.open(location or overlay_path(), writable=False) as store:
        filters = filters_of(gpu_name=gpu_name, d=d, dtype=dtype)
        if not all_trials:
            for record in store.records(passed_over=unservable, **filters):
                if why := unservable(record):
                    messages().print(f"left out: {record.key.gpu} {record.problem.label()}: {why}")
        rows = store.export(destination, winners_only=not all_trials, replace=force, passed_over=unservable, **filters)
    if as_json:
        print_json({"path": str(destination), "rows": rows, "bytes": destination.stat().st_size})
    else:
        console().print(f"{rows} rows in {destination} ({destination.stat().st_size / 1024:.0f} KiB)")
