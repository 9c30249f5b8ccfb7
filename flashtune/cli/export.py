"""`flashtune export`: a compact database to ship with a model, or a folder of kernels for Hugging Face's `kernels`."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.console import console, messages, print_json
from flashtune.cli.options import db_option_beside, json_option, record_filters
from flashtune.cli.records import predicted_only, servable
from flashtune.cli.signing import TRUST_CONFIG, file_at
from flashtune.core.system.errors import InputError, NoKernelFound
from flashtune.core.system.secrets import mask_url
from flashtune.core.system.words import counted

if TYPE_CHECKING:
    from flashtune.db.store import KeyFilter


@click.command()
@click.argument("destination", metavar="PATH", required=False)
@click.option("--hub", "folder", metavar="DIR", help="Write a folder for Hugging Face's kernels package instead: kernels and a launcher.")
@db_option_beside("your own")
@record_filters("gpu_name", "d", "dtype")
@click.option("--all-trials", is_flag=True, help="Keep every trial, not only the winners.")
@click.option("--predicted", is_flag=True, help="With --hub: write predicted records, too.")
@click.option(
    "--licence", "--license", "licence", metavar="SPDX", help="Write a metadata file beside it: licence, hash, origin of its records."
)
@click.option("--sign", "signed", is_flag=True, help="Sign the file as yourself by Sigstore, in PATH.sigstore.json beside it.")
@TRUST_CONFIG
@click.option("--force", is_flag=True, help="Replace the file where it exists.")
@json_option
def export(
    *,
    destination: str | None,
    folder: str | None,
    location: str | None,
    filters: "KeyFilter",
    all_trials: bool,
    predicted: bool,
    licence: str | None,
    signed: bool,
    trust_config: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the winners of a database (default: your own) to PATH, a small file to ship beside a model's weights. Where a winner isn't
    bitwise repeatable, the best record of a repeatable kernel is kept beside it, for deterministic calls.

    Users load it over their own database with dispatch.use(PATH) or FLASHTUNE_DB=PATH; it holds values only, nothing that is executed.
    Winners that this version can't use are named and left out. `flashtune verify --db PATH --identity ID` checks a signature.

    With --hub DIR in place of PATH, the winning forwards become a folder that kernels.get_local_kernel loads, and get_kernel once it is
    uploaded: their text, a table, and a launcher that needs torch and triton alone. DIR must be empty, or of an earlier export.
    """
    if (destination is None) == (folder is None):
        raise InputError("export writes one thing: give PATH for a database, or --hub DIR for a folder of kernels")
    if folder is not None:
        for option, given in {"--all-trials": all_trials, "--force": force, "--sign": signed, "--trust-config": trust_config}.items():
            if given:
                raise InputError(f"{option} is for databases: leave it out with --hub")
        export_hub(folder, location, filters, predicted=predicted, licence=licence, as_json=as_json)
        return
    if predicted:
        raise InputError("--predicted is for --hub: a database keeps its predicted records, marked as such")
    assert destination is not None, "one of both is given"
    from flashtune.db.library import overlay_path
    from flashtune.db.signature import sign
    from flashtune.db.store import Store
    from flashtune.templates import BITS, unservable

    if trust_config is not None and not signed:
        raise InputError("--trust-config says by which Sigstore to sign: give --sign, too")
    wanted = licence_for(destination, licence, force=force, signed=signed)
    with Store.open(location or overlay_path(), writable=False) as store:
        if not all_trials:
            servable(store.records(passed_over=unservable, **filters))
        rows = store.export(destination, winners_only=not all_trials, replace=force, passed_over=unservable, bits=BITS, **filters)
    found, words = written(destination, wanted, rows)
    if signed:
        signature = sign(file_at(destination), trust_config)
        found, words = found | {"signature": str(signature)}, f"{words}, signed in {signature.name}"
    if as_json:
        print_json(found)
    else:
        console().print(f"{counted(rows, 'record')} in {words}", soft_wrap=True)


def export_hub(folder: str, location: str | None, filters: "KeyFilter", *, predicted: bool, licence: str | None, as_json: bool) -> None:
    """Write a folder for Hugging Face's kernels package, and print its summary."""
    from flashtune.db.card import checked_licence
    from flashtune.db.library import overlay_path
    from flashtune.db.store import Store
    from flashtune.templates import without_kernel
    from flashtune.tuner.publish.hub import write_hub

    checked = None if licence is None else checked_licence(licence)
    with Store.open(location or overlay_path(), writable=False) as store:
        records = servable(store.records(passed_over=without_kernel, **filters), without_kernel)
    kept = [record for record in records if predicted or record.outcome.source == "measured"]
    if not kept:
        holds = "only predicted records, which --predicted exports" if records else "no record"
        raise NoKernelFound(f"{mask_url(location or 'your own database')} has {holds}: search on the GPU, or loosen the filters")
    made = write_hub(Path(folder), kept, licence=checked)
    if as_json:
        print_json({"path": folder, **asdict(made), "predicted_left_out": len(records) - len(kept)})
        return
    parts = [counted(made.records, "record"), counted(made.kernels, "kernel")]
    parts += [f"PyTorch runs {made.torch}"] if made.torch else []
    parts += [f"{made.predicted} predicted"] if made.predicted else []
    console().print(f"{', '.join(parts)} in {folder} ({made.bytes / 1024:.0f} KiB), a folder for kernels.get_local_kernel", soft_wrap=True)
    if made.inexpressible:
        why = "backwards, or features that scaled_dot_product_attention's arguments don't express"
        messages().print(f"left out: {counted(made.inexpressible, 'record')} ({why})")
    if made.by_name:
        messages().print(f"unknown here: {', '.join(made.by_name)}, whose records are used only on GPUs of that name")
    if len(kept) < len(records):
        messages().print(f"left out: {counted(len(records) - len(kept), 'predicted record')} (--predicted writes them, too)")


def licence_for(destination: str, licence: str | None, *, force: bool, signed: bool = False) -> str | None:
    """The checked licence of the card to write beside a file; raises InputError where there is none and an older card would stay, or an
    older signature. An existing file is refused later, without `force`."""
    from flashtune.db.card import checked_licence, refuse_stale_card, refuse_taken_card
    from flashtune.db.signature import refuse_stale_signature
    from flashtune.db.store import sqlite_path

    path = sqlite_path(destination)
    if path is not None and (force or not os.path.exists(path) or os.path.getsize(path) == 0):
        refuse_stale_signature(path, replace=signed and force)
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
    size = path.stat().st_size
    winners = Library.of(path).winners()
    card = None if licence is None else write_card(path, licence, winners)
    predicted = sum(record.outcome.source == "predicted" for record in winners)
    found = {"path": str(path), "rows": rows, "bytes": size, "sha256": digest(path), "card": None if card is None else str(card)}
    found["predicted"] = predicted
    words = f"{path} ({size / 1024:.0f} KiB)" + ("" if card is None else f", metadata in {card.name}")
    return found, words + (f"; {predicted} of them predicted. {predicted_only(str(path))}" if predicted else "")
