"""Signature of a database: a Sigstore bundle beside it, which says whose file these bytes are. Nothing in the file is read to check it."""

import hashlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtune.core.system.errors import DatabaseError, EnvironmentProblem, FlashtuneError, InputError
from flashtune.core.system.files import write_whole
from flashtune.db.inspection import unfinished
from flashtune.db.values import tidy

if TYPE_CHECKING:
    from sigstore.hashes import Hashed

MOST_BYTES = 1 << 20
"""Largest bundle that is read, in bytes; they have some thousand."""


def bundle_path(database: Path) -> Path:
    """Path of a database's signature: the database's name followed by `.sigstore.json`."""
    return database.with_name(f"{database.name}.sigstore.json")


def refuse_stale_signature(database: Path, *, replace: bool) -> None:
    """Raise InputError where there is a signature beside this path, which a new file would contradict; `replace` allows a new one."""
    if not replace and os.path.lexists(path := bundle_path(database)):
        raise InputError(f"{path} is the signature of another file than this one would be: sign anew with --sign --force, or remove it")


def sign(database: Path, config: Path | None = None) -> Path:
    """Sign a database as the person or the workflow that runs this, and return the signature's path.

    Who that is says the service that runs it (a workflow's token), else a browser. `config` is the trust configuration of a Sigstore other
    than the public one. Raises EnvironmentProblem where sigstore isn't installed, or a service can't be reached or refuses.
    """
    _require()
    try:
        with _signer(config) as signer:
            text: str = signer.sign_artifact(_hashed(database)).to_json()
    except FlashtuneError:
        raise
    # Each of its clients has errors of its own, of no common class.
    except Exception as error:
        raise EnvironmentProblem(
            f"{database} can't be signed ({_cause(error)}): see that Sigstore can be reached, or leave --sign out"
        ) from error
    path = bundle_path(database)
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise EnvironmentProblem(f"the signature {path} can't be written ({error.strerror}): free space there, and export again") from error
    return path


def check_signature(database: Path, identity: str, *, issuer: str | None = None, config: Path | None = None) -> None:
    """Raise DatabaseError unless the file is, to the byte, what this identity signed; a sentence says what is wrong.

    `identity` is an e-mail address or a workflow's URI, confirmed by `issuer`, or by any that Sigstore trusts. Without a network the
    trusted keys are those that were fetched last, or came with sigstore. Raises EnvironmentProblem where sigstore isn't installed.
    """
    path = bundle_path(database)
    if not database.is_file() or not path.is_file():
        missing = path if database.is_file() else database
        raise DatabaseError(f"there is no {missing}: give a database that was exported with --sign, or don't ask for an identity")
    if beside := unfinished(database):
        raise DatabaseError(f"{database} has unfinished writes in {beside[0].name}, which nobody signed: remove that file, or export anew")
    _require()
    from sigstore.models import Bundle
    from sigstore.verify import Verifier
    from sigstore.verify.policy import Identity

    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError("it is too large")
        bundle = Bundle.from_json(path.read_bytes())
    # A stranger's text fails in sigstore's parts as it may, and a signature that can't be checked is none.
    except Exception as error:
        raise DatabaseError(f"{path} is no signature ({_cause(error)}): fetch both files again, or export with --sign") from error
    verifier = Verifier(trusted_root=_trust(config, fresh=True).trusted_root)
    try:
        verifier.verify_artifact(_hashed(database), bundle, Identity(identity=identity, issuer=issuer))
    except Exception as error:
        raise DatabaseError(
            f"{database} isn't what {identity} signed ({_cause(error)}): fetch both files again, or trust another"
        ) from error


def _cause(error: BaseException) -> str:
    """An error of another package in few words."""
    return tidy(str(error), 200).rstrip(". ") or type(error).__name__


def _require() -> None:
    try:
        import sigstore  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem("signatures need the package sigstore: pip install sigstore") from error


def _trust(config: Path | None, *, fresh: bool = False) -> Any:
    """Trust configuration in a file, or the public Sigstore's; a `fresh` one may be the last that was fetched where there is no network."""
    from sigstore.errors import Error
    from sigstore.models import ClientTrustConfig

    if config is not None:
        try:
            return ClientTrustConfig.from_json(config.read_text())
        except (OSError, ValueError, Error) as error:
            raise InputError(f"{config} is no trust configuration of Sigstore ({_cause(error)}): give another file") from error
    try:
        return ClientTrustConfig.production()
    except Error:
        if not fresh:
            raise
        return ClientTrustConfig.production(offline=True)


def _signer(config: Path | None) -> AbstractContextManager[Any]:
    """Sigstore's signer by the identity of a workflow's token, or of whoever answers in a browser."""
    from sigstore.oidc import IdentityToken, Issuer, detect_credential
    from sigstore.sign import SigningContext

    trust = _trust(config)
    token = detect_credential()
    identity = Issuer(trust.signing_config.get_oidc_url()).identity_token() if token is None else IdentityToken(token)
    found: AbstractContextManager[Any] = SigningContext.from_trust_config(trust).signer(identity)
    return found


def _hashed(database: Path) -> "Hashed":
    """The file's hash, as sigstore takes it."""
    from sigstore.hashes import Hashed
    from sigstore_models.common.v1 import HashAlgorithm

    with database.open("rb") as file:
        return Hashed(algorithm=HashAlgorithm.SHA2_256, digest=hashlib.file_digest(file, "sha256").digest())
