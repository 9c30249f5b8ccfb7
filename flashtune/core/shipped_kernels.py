"""The kernels that a package ships: its index, and the machine code of a variant."""

import functools
import importlib
from pathlib import Path

from flashtune.core.binaries import Manifest, read_manifest
from flashtune.core.collector import held_off
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.kernel_index import Index, read_index

PACKAGE = "flashtune.kernels_generated"
"""Flashtune's own."""


def folder_of(package: str) -> Path:
    """Where a package of generated kernels lies."""
    [folder] = importlib.import_module(package).__path__
    return Path(folder)


@functools.cache
def shipped_index(package: str) -> Index:
    """The index of a package of generated kernels."""
    with held_off():
        return read_index(folder_of(package))


def shipped_manifest(package: str, variant_id: str, arch: str) -> Manifest | None:
    """The machine code that a package has of a variant for an architecture (Target.arch), its own or by a kernel of the other 16-bit
    type; None where there is none.

    Raises EnvironmentProblem where the package's files aren't those that its index names.
    """
    index = shipped_index(package)
    own = index.find(variant_id, arch)
    found = index.find_sibling(variant_id, arch) if own is None else own
    if found is None or found.arch != arch or found.manifest not in index.files:
        return None
    path = folder_of(package) / found.manifest
    read = read_manifest(path, sha256=index.files[found.manifest])
    manifest = read.of_sibling() if own is None else read
    if manifest is None or manifest.variant_id != variant_id:
        raise EnvironmentProblem(f"{path} is the manifest of another kernel than its index says: install flashtune again")
    return manifest
