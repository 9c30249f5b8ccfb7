"""`flashtune export`: a compact database to ship with a model."""

import os
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.console import console, print_json
from flashtune.cli.options import db_option, json_option, record_filters
from flashtune.cli.records import servable
from flashtune.core.words import counted

if TYPE_CHECKING:
    from flashtune.db.store import KeyFilter


@click.command()
@click.argument("destination", metavar="PATH")
@db_option
@record_filters("gpu_name", "d", "dtype")
@click.option("--all-trials", is_flag=True, help="Keep every trial, not only the winners.")
@click.option("--licence", "--license", "licence", metavar="SPDX", help="Write a card beside it: licence, hash, origin of its records.")
@click.option("--force", is_flag=True, help="Replace the file where it exists.")
@json_option
def export(
    *,
    destination: str,
    location: str | None,
    filters: "KeyFilter",
    all_trials: bool,
    licence: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the winners of a database (default: your own) to PATH, a small file to ship beside a model's weights. Where a winner isn't
    bitwise repeatable, the best record of a repeatable kernel is kept beside it, for deterministic calls.

    Users load it over their own database with dispatch.use(PATH) or FLASHTUNE_DB=PATH; it holds values only, nothing that is executed.
    Winners that this version can't serve are named and left out.
    """
    from flashtune.db.library import overlay_path
    from flashtune.db.store import Store
    from flashtune.templates import BITS, unservable

    wanted = licence_for(destination, licence, force=force)
    with Store.open(location or overlay_path(), writable=False) as store:
        if not all_trials:
            servable(store.records(passed_over=unservable, **filters))
        rows = store.export(destination, winners_only=not all_trials, replace=force, passed_over=unservable, bits=BITS, **filters)
    found, words = written(destination, wanted, rows)
    if as_json:
        print_json(found)
    else:
        console().print(f"{counted(rows, 'record')} in {words}")


def licence_for(destination: str, licence: str | None, *, force: bool) -> str | None:
    """The checked licence of the card to write beside a file; raises InputError where there is none and an older card would stay. An
    existing file is refused later, without `force`."""
    from flashtune.db.card import checked_licence, refuse_stale_card, refuse_taken_card
    from flashtune.db.store import sqlite_path

    path = sqlite_path(destination)
    if path is not None and (force or not os.path.exists(path) or os.path.getsize(path) == 0):
        if licence is None:
            refuse_stale_card(path)
        else:
            refuse_taken_card(path, replace=force)
    return None if licence is None else checked_licence(licence)


def written(destination: str, licence: str | None, rows: int) -> tuple[dict[str, Any], str]:
    """Summary of a file with so many records that was just written, as JSON and in words; writes its card if there is a licence."""
    from flashtune.db.card import digest, write_card
    from flashtune.db.library import Library
    from flashtune.db.store import sqlite_path

    path = sqlite_path(destination)
    assert path is not None, "a server is no destination, and was refused"
    card = None if licence is None else write_card(path, licence, Library.of(path).winners())
    size = path.stat().st_size
    found = {"path": str(path), "rows": rows, "bytes": size, "sha256": digest(path), "card": None if card is None else str(card)}
    return found, f"{path} ({size / 1024:.0f} KiB)" + ("" if card is None else f", card in {card.name}")
