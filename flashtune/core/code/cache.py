"""Cache of the kernels that a user's searches compiled: machine code, its manifest, a digest of both, and for readers the source text.

Nothing comes here with a database. Folders and files that belong to another user, or that
another user could write to, are ignored. Only machine code is ever loaded from here; modules come from the package and its templates.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flashtune.core.code.binaries import MOST_BYTES, MOST_CODE_BYTES, Manifest, parse_manifest
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.core.system.files import aside_of, read_bounded
from flashtune.core.system.folders import cache_dir, wanted_cache_dir

_ID = re.compile(r"[0-9a-f]{16}")
_MANIFEST, _MODULE, _DIGEST = "manifest.json", "module.py", "digest"


def keep(text: str, manifest: Manifest, files: Mapping[str, bytes]) -> Path:
    """Store a module with its manifest and the manifest's files in the cache, replacing earlier ones; returns the folder.

    Raises EnvironmentProblem where the cache can't be written.
    """
    binary, described = manifest.binaries[0], manifest.as_json().encode()
    digest = _digest(described, [files[one.file] for one in manifest.binaries])
    folder = cache_dir() / "kernels" / f"{binary.arch}-triton-{binary.triton}" / manifest.variant_id
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Renamed when it is whole, so that no other process reads half a kernel.
        with aside_of(folder) as aside:
            aside.mkdir(mode=0o700)
            for name, content in {_MODULE: text.encode(), _MANIFEST: described, _DIGEST: digest, **files}.items():
                (aside / name).write_bytes(content)
                (aside / name).chmod(0o600)
            shutil.rmtree(folder, ignore_errors=True)
            # Where that fails, another process was faster, with the same kernel.
            with suppress(OSError):
                aside.rename(folder)
    except OSError as error:
        raise EnvironmentProblem(f"can't keep machine code in {folder} ({error.strerror}): point FLASHTUNE_CACHE elsewhere") from error
    return folder


def find(variant_id: str, arch: str, triton: str | None = None) -> Manifest | None:
    """The machine code of a variant for an architecture (`sm_90a`) in the user's cache; None where there is none to trust.

    Without `triton` the version that compiled it last counts. An entry whose digest isn't that of its manifest and machine code counts as
    none, so that the kernel is compiled anew.
    """
    if not _ID.fullmatch(variant_id):
        return None
    root = wanted_cache_dir().resolve() / "kernels"
    found = []
    with suppress(OSError):
        for place in root.iterdir():
            folder, (name, _, version) = place / variant_id, place.name.partition("-triton-")
            if name == arch and triton in (None, version) and all(map(_own, (root.parent, root, place, folder))):
                found.append((folder.stat().st_mtime_ns, folder))
    for _, folder in sorted(found, reverse=True):
        with suppress(OSError, ValueError, EnvironmentProblem):
            described = read_bounded(folder / _MANIFEST, MOST_BYTES)
            manifest = parse_manifest(described, folder / _MANIFEST)
            files = [folder / binary.file for binary in manifest.binaries]
            if manifest.variant_id != variant_id or not all(map(_own, (folder / _MANIFEST, folder / _DIGEST, *files))):
                continue
            if read_bounded(folder / _DIGEST, 64) == _digest(described, [read_bounded(file, MOST_CODE_BYTES) for file in files]):
                return manifest
    return None


def _digest(manifest: bytes, codes: Sequence[bytes]) -> bytes:
    """SHA-256 of a manifest's text and of its files in order, in hexadecimal digits."""
    parts = (hashlib.sha256(part).hexdigest() for part in (manifest, *codes))
    return hashlib.sha256("".join(parts).encode()).hexdigest().encode()


def _own(path: Path) -> bool:
    """True if this exists, is no link, and only this user can write to it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        status.st_uid == os.geteuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        and (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode))
    )
