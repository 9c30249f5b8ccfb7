"""`flashtune export`: a compact database to ship with a model."""

import click

from flashtune.cli.console import console, messages, print_json
from flashtune.cli.options import DTYPE, GPU, db_option, filters_of, json_option


@click.command()
@click.argument("destination", metavar="PATH")
@db_option
@click.option("--gpu-name", type=GPU, metavar="NAME", help="Only rows of this GPU.")
@click.option("--d", type=int, help="Only this head size.")
@click.option("--dtype", type=DTYPE, help="Only this element type.")
@click.option("--all-trials", is_flag=True, help="Keep every trial, not only the winners.")
@click.option("--licence", "--license", "licence", metavar="SPDX", help="Write a card beside it: licence, hash, where its rows are from.")
@click.option("--force", is_flag=True, help="Replace the file where it exists.")
@json_option
def export(
    destination: str,
    location: str | None,
    gpu_name: str | None,
    d: int | None,
    dtype: str | None,
    all_trials: bool,
    licence: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the winners of a database (default: your own) to PATH, a small file to ship beside a model's weights.

    Users lay it over their own with dispatch.use(PATH) or FLASHTUNE_DB=PATH; it holds values only, nothing that is executed. Winners that
    this version can't serve are named and left out.
    """
    from flashtune.db.card import checked_licence, digest, write_card
    from flashtune.db.library import Library, overlay_path
    from flashtune.db.store import Store, sqlite_path
    from flashtune.templates import unservable

    wanted = None if licence is None else checked_licence(licence)
    with Store.open(location or overlay_path(), writable=False) as store:
        filters = filters_of(gpu_name=gpu_name, d=d, dtype=dtype)
        if not all_trials:
            for record in store.records(passed_over=unservable, **filters):
                if why := unservable(record):
                    messages().print(f"left out: {record.key.gpu} {record.problem.label()}: {why}")
        rows = store.export(destination, winners_only=not all_trials, replace=force, passed_over=unservable, **filters)
    path = sqlite_path(destination)
    assert path is not None, "a server is no destination, and was refused"
    card = None if wanted is None else write_card(path, wanted, Library.of(path).records())
    size = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "rows": rows, "bytes": size, "sha256": digest(path), "card": None if card is None else str(card)})
    else:
        console().print(f"{rows} rows in {path} ({size / 1024:.0f} KiB)" + ("" if card is None else f", card in {card.name}"))
