"""Card of a shipped database: a JSON file beside it with its licence, its hash and the origin of its records.

The hash is SHA-256 of the file, as by `sha256sum`.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from flashtune.core.records.results import TuningRecord
from flashtune.core.system.errors import DatabaseError, EnvironmentProblem, InputError
from flashtune.core.system.files import read_json, write_whole
from flashtune.core.system.words import shown
from flashtune.db.values import tidy

FORMAT = 1
LICENCE_LENGTH = 255
MOST_BYTES = 1 << 20
"""Largest card that is read, in bytes; ours have some hundred."""

LARGEST_DATABASE = 1 << 30
"""Largest database with a card, in bytes: every new process computes its hash; shipped ones have some megabytes."""


def card_path(database: Path) -> Path:
    """Path of a database's card: the database's name followed by `.json`."""
    return database.with_name(f"{database.name}.json")


def digest(database: Path) -> str:
    """SHA-256 of the file."""
    with database.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checked_licence(text: str) -> str:
    """The stripped text of a licence, such as an SPDX identifier; raises InputError unless it is a short printable line."""
    found = text.strip()
    if not found or found != tidy(found, LICENCE_LENGTH):
        raise InputError(f"{text!r} names no licence: give an SPDX identifier, such as Apache-2.0")
    return found


def refuse_stale_card(database: Path) -> None:
    """Raise InputError where there is a card beside this path, which a file written without a card would contradict."""
    if os.path.lexists(path := card_path(database)):
        raise InputError(
            f"{path} is the metadata file of another database than this one would be: give --licence for a new one, or remove it"
        )


def refuse_taken_card(database: Path, *, replace: bool) -> None:
    """Raise InputError where no card can be written beside this path: its name is too long, or is that of another file than a card, or
    exists without `replace`."""
    path = card_path(database)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        # A missing folder is reported for the database's own path.
        return
    except OSError as error:
        raise InputError(f"the metadata file {path} can't be written ({error.strerror}): choose another path") from error
    if not replace:
        raise InputError(f"{path} exists already, in the place of the metadata file: choose another path, or replace it with --force")
    try:
        ours = path.is_symlink() or not path.stat().st_size or {"format", "sha256"} <= read_json(path, MOST_BYTES).keys()
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise InputError(f"{path}, in the place of the metadata file, is another file: choose another path, or move it")


def write_card(database: Path, licence: str, records: Iterable[TuningRecord]) -> Path:
    """Write the card of a database with these records, and return its path; raises EnvironmentProblem where that fails."""
    records = list(records)

    def every(values: Iterable[str]) -> list[str]:
        return sorted(set(values) - {""})

    fields = {
        "format": FORMAT,
        "file": database.name,
        "sha256": digest(database),
        "licence": licence,
        "rows": len(records),
        "gpus": every(record.key.gpu for record in records),
        **{name: every(getattr(record.provenance, name) for record in records) for name in ("flashtune", "triton", "driver", "gpu_name")},
    }
    path = card_path(database)
    try:
        write_whole(path, (json.dumps(fields, indent=1) + "\n").encode())
    except OSError as error:
        raise EnvironmentProblem(
            f"the metadata file {path} can't be written ({error.strerror}): free space there, and export again"
        ) from error
    return path


def check_card(database: Path) -> str | None:
    """The licence that a card beside this file states, None without a card; raises DatabaseError where it has another hash, or is
    malformed."""
    path = card_path(database)
    if not os.path.lexists(path):
        return None
    if (size := database.stat().st_size) > LARGEST_DATABASE:
        raise DatabaseError(f"{database} has {size >> 20} MiB, too many for a file with metadata: remove {path.name} if you trust it")
    try:
        fields = read_json(path, MOST_BYTES)
        wanted = fields["sha256"] if fields["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatabaseError(
            f"{path} is no metadata file of a tuned database ({shown(error)}): export it again, or remove the metadata file"
        ) from error
    if wanted != digest(database):
        raise DatabaseError(f"{database} isn't the file that {path.name} beside it names: fetch both again, or export it again")
    return tidy(str(fields.get("licence", "")), LICENCE_LENGTH)
