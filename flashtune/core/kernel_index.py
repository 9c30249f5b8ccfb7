"""The index of a folder of generated kernels: which file is which kernel, and which files were written."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from flashtune.core.errors import EnvironmentProblem
from flashtune.core.files import read_json
from flashtune.core.unpacking import unpacked

INDEX = "index.json"
FORMAT = 1
"""Version of the index's layout; another one is not read."""
MOST_BYTES = 1 << 26
"""No larger index is read: that of some hundred kernels has a fortieth of it."""

_PATH = re.compile(r"(?:[A-Za-z0-9_]+/)*[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)+")
_MODULE = re.compile(r"(?:[A-Za-z0-9_]+/)*[A-Za-z0-9_]+\.py")
"""Paths that an index may name, as files and as modules: below its folder, with `/`, nothing hidden, no way up."""


class GeneratedKernel(NamedTuple):
    """A rendered module: the variant that it is, the architecture of its rows' GPUs, and its path below the index's folder.

    `sibling` is the variant of the other 16-bit type that its machine code also serves (flashtune.core.binaries), empty where none is.
    """

    variant_id: str
    template: str
    arch: str
    path: str
    sibling: str = ""

    @property
    def module(self) -> str:
        """The name of the module within the package that the folder is."""
        return self.path.removesuffix(".py").replace("/", ".")

    @property
    def manifest(self) -> str:
        """Where the manifest of its machine code lies, below the index's folder (flashtune.core.binaries)."""
        return f"{self.path.removesuffix('.py')}.json"


class Index(NamedTuple):
    """The kernels of a folder, and the digest (see `digest`) of every file that was written there beside the index itself."""

    kernels: tuple[GeneratedKernel, ...] = ()
    files: Mapping[str, str] = MappingProxyType({})

    def find(self, variant_id: str, arch: str | None = None) -> GeneratedKernel | None:
        """The kernel with this id: the one for `arch` where there is one, else any, whose text is the same."""
        found = [kernel for kernel in self.kernels if kernel.variant_id == variant_id]
        return next((kernel for kernel in found if kernel.arch == arch), found[0] if found else None)

    def find_sibling(self, variant_id: str, arch: str) -> GeneratedKernel | None:
        """The kernel for `arch` whose machine code also serves the variant with this id."""
        return next((kernel for kernel in self.kernels if kernel.sibling == variant_id and kernel.arch == arch), None)


def read_index(folder: Path) -> Index:
    """The index of this folder, empty where there is none; raises EnvironmentProblem for a file that `flashtune generate` didn't write."""
    path = folder / INDEX
    try:
        fields = read_json(path, MOST_BYTES)
        if fields["format"] != FORMAT:
            raise ValueError("another format")
        kernels = [
            GeneratedKernel(kernel["variant_id"], kernel["template"], kernel["arch"], kernel["path"], kernel.get("sibling", ""))
            for kernel in fields["kernels"]
        ]
        files = dict(fields["files"])
        strange = [name for name in files if not _PATH.fullmatch(name)]
        strange += [kernel.path for kernel in kernels if not _MODULE.fullmatch(kernel.path)]
        if strange:
            raise ValueError(f"path {strange[0][:80]!r}")
    except FileNotFoundError:
        return Index()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(f"{path} is no index of generated kernels ({error}): choose another folder, or install again") from error
    return Index(kernels=tuple(kernels), files=files)


def digest(name: str, content: bytes) -> str:
    """SHA-256 of a generated file's content; of what a compressed one holds, for compressors differ."""
    return hashlib.sha256(unpacked(content) if name.endswith(".gz") else content).hexdigest()
