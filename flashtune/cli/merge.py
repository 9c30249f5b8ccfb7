"""`flashtune merge`: several databases into one."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.console import console, print_json
from flashtune.cli.export import licence_for, written
from flashtune.cli.options import json_option
from flashtune.cli.records import servable
from flashtune.cli.signing import TRUST_CONFIG, strangers
from flashtune.core.system.words import counted

if TYPE_CHECKING:
    from flashtune.core.records.results import TuningRecord


@click.command()
@click.argument("locations", metavar="PATH|URL...", nargs=-1, required=True)
@click.option("--out", "destination", metavar="PATH", required=True, help="The file to write.")
@click.option(
    "--licence", "--license", "licence", metavar="SPDX", help="Write a metadata file beside it: licence, hash, origin of its records."
)
@click.option(
    "--trust", "trusted", metavar="PATH|ID", multiple=True, help="Only these databases win, by path or by who signed them (repeatable)."
)
@TRUST_CONFIG
@click.option("--force", is_flag=True, help="Replace the file where it exists.")
@json_option
def merge(
    locations: tuple[str, ...],
    destination: str,
    licence: str | None,
    trusted: tuple[str, ...],
    trust_config: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the best records of every key in these databases to one small file.

    Of the records of one key the first in the order of docs/shipping.md is kept: measured before predicted, the newest PyTorch and Triton,
    then the larger speedup over PyTorch in its own run. Where its kernel isn't bitwise repeatable, the best record of a repeatable one is
    kept beside it, for deterministic calls. Records that lost are listed, and so are those that this version can't use.

    With --trust the records of all other databases are candidates: they run no call until `flashtune verify --requalify` has timed them on
    their GPU against yours and PyTorch.

    \b
    flashtune merge alice.sqlite bob.sqlite --out model/tuned.sqlite --licence Apache-2.0
    """
    from flashtune.db.merging import merge as merged_into
    from flashtune.templates import BITS, unservable

    wanted = licence_for(destination, licence, force=force)
    others = strangers(locations, trusted, trust_config)
    merged = merged_into(locations, destination, replace=force, passed_over=unservable, bits=BITS, strangers=others)
    found, words = written(destination, wanted, len(merged.kept) + len(merged.candidates))
    if as_json:
        lost = [{"lost": _row(record), "kept": _row(best)} for record, best in merged.lost]
        left_out = [{**_row(record), "why": unservable(record)} for record in merged.passed_over]
        print_json({**found, "lost": lost, "left_out": left_out, "candidates": [_row(record) for record in merged.candidates]})
        return
    for record, best in merged.lost:
        console().print(f"lost: {record.key.gpu} {record.problem.label()}: {_described(record)} to {_described(best)}", soft_wrap=True)
    servable(merged.passed_over)
    if merged.candidates:
        waiting = f"{counted(len(merged.candidates), 'candidate')} of strangers"
        console().print(f"{waiting}: `flashtune verify --requalify --db {destination}` on their GPU races them", soft_wrap=True)
    console().print(f"{counted(len(merged.kept), 'record')} of {counted(len(locations), 'database')} in {words}", soft_wrap=True)


def _described(record: "TuningRecord") -> str:
    """A record's speedup and origin, in words."""
    relative = record.relative_time
    gain = record.outcome.source if relative is None else f"{1 / relative:.2f}x of PyTorch"
    return f"{gain} ({record.origin})"


def _row(record: "TuningRecord") -> dict[str, Any]:
    return {
        "gpu": record.key.gpu,
        "problem": record.problem.label(),
        "origin": record.origin,
        "variant_id": record.outcome.variant_id,
        "source": record.outcome.source,
        "median_us": record.median_us,
        "relative_time": record.relative_time,
    }
