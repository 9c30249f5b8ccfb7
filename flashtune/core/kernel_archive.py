"""Archives of machine code: pieces in groups that are packed whole, each piece at a place and with a digest that the package's index pins.

An archive holds nothing that is believed: where a piece lies and how long it and its group are comes from the index, or from a manifest
whose own digest that names, and a piece is handed out only if its digest is the expected one.
"""

import hashlib
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flashtune.core.errors import EnvironmentProblem

MAGIC = b"flashtune kernels 1\n"
"""The first bytes of an archive; the SHA-256 of all that follows it comes next, by which a wrong archive is told without reading it."""

HEADER_BYTES = len(MAGIC) + 32
MEMORY_LIMIT = 64 << 20
"""More than any group takes to unpack."""

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 4 << 20, "lc": 0, "lp": 4, "pb": 4}]
"""How groups are packed: instructions are 16 bytes long."""


class Place(NamedTuple):
    """Where a piece lies: in which group, from which byte of what that unpacks to, and how many bytes it has."""

    group: int
    offset: int
    size: int

    def label(self) -> str:
        """The form in which a manifest names it."""
        return "/".join(map(str, self))

    @classmethod
    def of(cls, label: str) -> "Place":
        """The inverse of `label`; raises ValueError for another text."""
        group, offset, size = (int(word) if word.isdecimal() else -1 for word in label.split("/"))
        if min(group, offset, size) < 0:
            raise ValueError(f"place {label!r}")
        return cls(group, offset, size)


class Group(NamedTuple):
    """Bytes of a group as it is packed, and unpacked."""

    packed: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An archive as the index knows it: its file, the digest in its header, and its groups in their order."""

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
        """A piece, checked; raises EnvironmentProblem where it can't be read or hasn't this digest."""
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
        """The first bytes of a group, no more than this many; raises what reading and unpacking raise."""
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
    """A group as an archive holds it."""
    return lzma.compress(group, format=lzma.FORMAT_XZ, check=lzma.CHECK_NONE, filters=FILTERS)
