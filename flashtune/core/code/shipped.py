"""The kernels that a package ships: its index, and the machine code of variants, from the archive that the index pins."""

import functools
import importlib
import importlib.util
from pathlib import Path

from flashtune.core.code.archive import Archive
from flashtune.core.code.binaries import Manifest, parse_manifest
from flashtune.core.code.index import Index, read_index
from flashtune.core.system.collector import held_off
from flashtune.core.system.errors import EnvironmentProblem

PACKAGE = "flashtune.kernels_generated"
"""Package of flashtune's own kernels."""


def folder_of(package: str) -> Path:
    """The folder of a package of generated kernels."""
    [folder] = importlib.import_module(package).__path__
    return Path(folder)


def archive_name(arch: str) -> str:
    """The file name of an architecture's archive."""
    return f"sm{arch}.kernels" if arch.isdigit() else f"{arch}.kernels"


def checkout_folder(generated: Path, arch: str) -> Path:
    """The folder of an architecture's archive in a checkout whose generated kernels lie in `generated`."""
    return generated.absolute().parent.parent / "kernels" / f"sm{arch}" / f"flashtune_kernels_sm{arch}"


def distribution(arch: str) -> str:
    """The name of the package that installs the archive of an architecture (Target.arch)."""
    return f"flashtune-kernels-sm{arch}"


@functools.cache
def shipped_index(package: str) -> Index:
    """The index of a package of generated kernels."""
    with held_off():
        return read_index(folder_of(package))


@functools.cache
def shipped_archive(package: str, arch: str) -> Archive | None:
    """The archive that a package's index names for an architecture; None where none is installed.

    Raises EnvironmentProblem where it differs from the index.
    """
    return find_archive(folder_of(package), shipped_index(package), arch)


def find_archive(folder: Path, index: Index, arch: str) -> Archive | None:
    """The archive that a folder's index names, in the folder itself, in the checkout, or in the installed package; None
    where there is none. Raises EnvironmentProblem where all of them differ from the index."""
    facts, problem = index.archives.get(arch), None
    if facts is None:
        return None
    for place in (folder, checkout_folder(folder, arch), _installed(arch)):
        if place is not None and (place / archive_name(arch)).is_file():
            found = Archive(path=place / archive_name(arch), sha256=facts.sha256, groups=facts.groups)
            try:
                found.check()
            except EnvironmentProblem as error:
                problem = problem or error
            else:
                return found
    if problem is not None:
        raise problem
    return None


def _installed(arch: str) -> Path | None:
    """The folder of the installed package of an architecture's archive, which isn't imported."""
    found = importlib.util.find_spec(distribution(arch).replace("-", "_"))
    return None if found is None or not found.submodule_search_locations else Path(next(iter(found.submodule_search_locations)))


def lacks_archive(package: str, variant_id: str, arch: str) -> bool:
    """True if a variant's machine code for an architecture ships in an archive that isn't installed."""
    return shipped_index(package).manifest_of(variant_id, arch) is not None and shipped_archive(package, arch) is None


def shipped_manifest(package: str, variant_id: str, arch: str) -> Manifest | None:
    """The machine code that a package has of a variant for an architecture (Target.arch); None where there is none.

    Raises EnvironmentProblem where the archive differs from the package's index.
    """
    index = shipped_index(package)
    return None if index.manifest_of(variant_id, arch) is None else manifest_in(shipped_archive(package, arch), index, variant_id, arch)


def manifest_in(archive: Archive | None, index: Index, variant_id: str, arch: str) -> Manifest | None:
    """The manifest of a variant in an archive of this index; None where there is none. Raises EnvironmentProblem where it can't be read."""
    piece = index.manifest_of(variant_id, arch)
    if piece is None or archive is None:
        return None
    manifest = parse_manifest(archive.read(piece.place, piece.sha256), archive.path, archive)
    if manifest.variant_id != variant_id:
        raise EnvironmentProblem(
            f"{archive.path} has another kernel's manifest where its index names {variant_id}: install flashtune again"
        )
    return manifest
