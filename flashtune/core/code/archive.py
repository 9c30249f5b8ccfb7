"""Archives of machine code: entries in compressed groups, each entry's place and digest pinned by the package's index.

Nothing in an archive is trusted: places and lengths come from the index, or from a manifest whose digest the index holds, and an
entry is returned only if its digest is the expected one.
"""

import hashlib
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flashtune.core.system.errors import EnvironmentProblem

MAGIC = b"flashtune kernels 1\n"
"""The first bytes of an archive; the SHA-256 of the rest comes next, so that a wrong archive is detected without reading it."""

HEADER_BYTES = len(MAGIC) + 32
MEMORY_LIMIT = 64 << 20
"""Bytes that unpacking a group may take."""

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 4 << 20, "lc": 0, "lp": 4, "pb": 4}]
"""LZMA filters of a group; instructions are 16 bytes long."""


class Place(NamedTuple):
    """Place of an entry: its group, its offset in the unpacked group, and its size in bytes."""

    group: int
    offset: int
    size: int

    def label(self) -> str:
        """The place as a manifest writes it."""
        return "/".join(map(str, self))

    @classmethod
    def of(cls, label: str) -> "Place":
        """The inverse of `label`; raises ValueError for another text."""
        group, offset, size = (int(word) if word.isdecimal() else -1 for word in label.split("/"))
        if min(group, offset, size) < 0:
            raise ValueError(f"place {label!r}")
        return cls(group, offset, size)


class Group(NamedTuple):
    """Sizes of a group in bytes, packed and unpacked."""

    packed: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An archive as the index describes it: its file, the digest in its header, and its groups in order."""

    path: Path
    sha256: str
    groups: tuple[Group, ...]

    def check(self) -> None:
        """Raise EnvironmentProblem where the file can't be read or is another archive than the index names."""
        try:
            with self.path.open("rb") as file:
                header = file.read(HEADER_BYTES)
                length = file.seek(0, 2)
        except OSError as error:
            raise EnvironmentProblem(f"can't read machine code from {self.path} ({error.strerror}): {_REMEDY}") from error
        if header != MAGIC + bytes.fromhex(self.sha256) or length != HEADER_BYTES + sum(group.packed for group in self.groups):
            raise EnvironmentProblem(f"{self.path} isn't the machine code that flashtune's index names: {_REMEDY}")

    def read(self, place: Place, sha256: str) -> bytes:
        """An entry, checked; raises EnvironmentProblem where it can't be read or has another digest."""
        end = place.offset + place.size
        try:
            if place.group >= len(self.groups) or end > self.groups[place.group].size:
                raise ValueError(f"it has no place {place.label()}")
            piece = self.unpacked(place.group, end)[place.offset : end]
        except (OSError, ValueError, EOFError, lzma.LZMAError, MemoryError) as error:
            raise EnvironmentProblem(f"can't read machine code from {self.path} ({error}): {_REMEDY}") from error
        if len(piece) != place.size or hashlib.sha256(piece).hexdigest() != sha256:
            raise EnvironmentProblem(f"{self.path} isn't the machine code that flashtune's index names: {_REMEDY}")
        return piece

    def unpacked(self, group: int, length: int) -> bytes:
        """The first `length` bytes of a group; raises OSError, EOFError or LZMAError."""
        with self.path.open("rb") as file:
            file.seek(HEADER_BYTES + sum(one.packed for one in self.groups[:group]))
            packed = file.read(self.groups[group].packed)
        unpacker = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=MEMORY_LIMIT)
        found = unpacker.decompress(packed, max_length=length)
        while len(found) < length and not unpacker.eof and not unpacker.needs_input:
            found += unpacker.decompress(b"", max_length=length - len(found))
        return found


_REMEDY = "install flashtune and its kernels again, both of one version"


def archive_bytes(packed: Sequence[bytes]) -> tuple[bytes, str]:
    """The file of these packed groups, and the digest in its header."""
    body = b"".join(packed)
    digest = hashlib.sha256(body)
    return MAGIC + digest.digest() + body, digest.hexdigest()


def pack(group: bytes) -> bytes:
    """The compressed bytes of a group."""
    return lzma.compress(group, format=lzma.FORMAT_XZ, check=lzma.CHECK_NONE, filters=FILTERS)
