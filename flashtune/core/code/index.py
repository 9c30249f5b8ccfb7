"""Index of a folder of generated kernels: the kernels, the places of their machine code, and the files that were written."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from flashtune.core.code.archive import Group, Place
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.core.system.files import read_json
from flashtune.core.system.words import shown

INDEX = "index.json"
FORMAT = 2
"""Version of the index's layout; another one is not read."""
MOST_BYTES = 1 << 26
"""Bytes of the largest index that is read; that of a thousand kernels has a hundredth of it."""

_PATH = re.compile(r"(?:[A-Za-z0-9_]+/)*[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)+")
_MODULE = re.compile(r"(?:[A-Za-z0-9_]+/)*[A-Za-z0-9_]+\.py")
"""Paths that an index may name, as files and as modules: below its folder, with `/`, nothing hidden, no way up."""


class Piece(NamedTuple):
    """A manifest in an archive: its place and its SHA-256."""

    place: Place
    sha256: str


class GeneratedKernel(NamedTuple):
    """A kernel: its variant, the architecture of its records' GPUs, and the path of its module, which names it and need not exist.

    `manifest` is that of its machine code (flashtune.core.code.binaries), None where there is none. `sibling` is the variant for the
    other 16-bit type, empty where none was compiled, and `sibling_manifest` is that one's.
    """

    variant_id: str
    template: str
    arch: str
    path: str
    manifest: Piece | None = None
    sibling: str = ""
    sibling_manifest: Piece | None = None


class ArchiveFacts(NamedTuple):
    """Facts about an architecture's archive: the digest in its header, and its groups."""

    sha256: str
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Index:
    """The kernels of a folder, the archives of their machine code by architecture, and the digest (see `digest`) of every file that was
    written there beside the index itself."""

    kernels: tuple[GeneratedKernel, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    archives: Mapping[str, ArchiveFacts] = field(default_factory=dict)

    def manifest_of(self, variant_id: str, arch: str) -> Piece | None:
        """The place of a variant's manifest for an architecture, be it a kernel or a sibling; None where there is none."""
        return self._manifests.get((variant_id, arch))

    @cached_property
    def _manifests(self) -> dict[tuple[str, str], Piece]:
        siblings = {(one.sibling, one.arch): one.sibling_manifest for one in self.kernels}
        found = siblings | {(one.variant_id, one.arch): one.manifest for one in self.kernels}
        return {name: piece for name, piece in found.items() if piece is not None}


def read_index(folder: Path) -> Index:
    """The index of this folder, empty where there is none; raises EnvironmentProblem for a file that `flashtune generate` didn't write."""
    path = folder / INDEX
    try:
        fields = read_json(path, MOST_BYTES)
        if fields["format"] != FORMAT:
            raise ValueError("another format")
        archives = {
            arch: ArchiveFacts(_digest(one["sha256"]), tuple(Group(*map(_number, group)) for group in one["groups"]))
            for arch, one in fields["archives"].items()
        }
        kernels = [
            GeneratedKernel(
                **{name: _text(kernel[name]) for name in ("variant_id", "template", "arch", "path")},
                manifest=_piece(kernel.get("manifest")),
                sibling=_text(kernel.get("sibling", "")),
                sibling_manifest=_piece(kernel.get("sibling_manifest")),
            )
            for kernel in fields["kernels"]
        ]
        files = {name: _digest(value) for name, value in fields["files"].items()}
        strange = [name for name in files if not _PATH.fullmatch(name)]
        strange += [kernel.path for kernel in kernels if not _MODULE.fullmatch(kernel.path)]
        if strange:
            raise ValueError(f"path {strange[0][:80]!r}")
    except FileNotFoundError:
        return Index()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(f"{path} is no index of generated kernels ({error}): choose another folder, or install again") from error
    return Index(kernels=tuple(kernels), files=files, archives=archives)


def _piece(fields: Any) -> Piece | None:
    if fields is None:
        return None
    sha256, *place = fields
    return Piece(Place(*map(_number, place)), _digest(sha256))


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"number {shown(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"name {shown(value)}")
    return value


def _digest(value: Any) -> str:
    if not re.fullmatch("[0-9a-f]{64}", _text(value)):
        raise ValueError(f"digest {shown(value)}")
    return str(value)


def digest(content: bytes) -> str:
    """SHA-256 of a generated file's content."""
    return hashlib.sha256(content).hexdigest()
