"""Options and lines of signatures: `export --sign`, `verify --identity` and `merge --trust`."""

from collections.abc import Sequence
from pathlib import Path

import click

from flashtune.cli.console import console, messages, print_json
from flashtune.core.system.errors import DatabaseError, InputError

TRUST_CONFIG = click.option(
    "--trust-config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Trust configuration of another Sigstore than the public one (JSON).",
)


def file_at(location: str) -> Path:
    """Path of a database that is a file; raises InputError for one on a server, which has no bytes to sign."""
    from flashtune.db.store import sqlite_path

    path = sqlite_path(location)
    if path is None:
        raise InputError("a database on a server has no signature: export it to a file with --sign")
    return path


def verified(location: str | None, identity: str, *, issuer: str | None, config: Path | None, as_json: bool) -> None:
    """Check a file's signature and print the result; its records aren't read."""
    from flashtune.db.card import digest
    from flashtune.db.signature import check_signature

    if location is None:
        raise InputError("--identity checks one file's signature: name the file with --db")
    path = file_at(location)
    check_signature(path, identity, issuer=issuer, config=config)
    if as_json:
        print_json({"path": str(path), "identity": identity, "issuer": issuer, "signed": True, "sha256": digest(path)})
    else:
        console().print(f"{path} is what {identity} signed; its kernels aren't checked by this", soft_wrap=True)


def strangers(locations: Sequence[str], trusted: Sequence[str], config: Path | None) -> tuple[str, ...]:
    """Those of the databases that are neither trusted by name nor signed by a trusted identity; none where nothing is trusted.

    Raises InputError for an identity that signed none of them.
    """
    if not trusted:
        return ()
    identities = [one for one in trusted if one not in locations]
    found, signers = [], set[str]()
    for location in dict.fromkeys(locations):
        if location in trusted:
            continue
        signer = _signer_of(location, identities, config)
        if signer is None:
            found.append(location)
        else:
            signers.add(signer)
    if unknown := [one for one in identities if one not in signers]:
        raise InputError(
            f"--trust {unknown[0]} names none of the databases, and it signed none: give a path as it stands here, or a signer"
        )
    return tuple(found)


def _signer_of(location: str, identities: Sequence[str], config: Path | None) -> str | None:
    """The identity among these that signed a database; None where none did, with the reason on standard error if there is a signature."""
    from flashtune.db.signature import bundle_path, check_signature
    from flashtune.db.store import sqlite_path

    path = sqlite_path(location)
    if path is None or not bundle_path(path).is_file():
        return None
    why = ""
    for identity in identities:
        try:
            check_signature(path, identity, config=config)
        except DatabaseError as error:
            why = str(error)
        else:
            return identity
    if why:
        messages().print(f"a stranger's: {why}", soft_wrap=True)
    return None
