"""Packing of kernels into an architecture's archive (flashtune.core.kernel_archive): the same bytes for the same kernels."""

import hashlib
import lzma
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from flashtune.core.binaries import Binary
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.kernel_archive import HEADER_BYTES, Archive, Group, Place, archive_bytes, pack
from flashtune.core.kernel_index import ArchiveFacts, Piece
from flashtune.tuner.publish.machine_code import Built

CODE_BYTES = 2_400_000
"""Unpacked bytes of machine code per group: twice as many make archives 8 % smaller, and take twice as long to unpack."""

MANIFEST_BYTES = 600_000
"""Unpacked bytes of manifests per group, of which a first call may read a dozen."""


class Packed(NamedTuple):
    """Archive's bytes, its entry in the index, and the place of each variant's manifest."""

    content: bytes
    facts: ArchiveFacts
    manifests: dict[str, Piece]


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """Kernel to be packed; `name` is its module's path, which puts similar ones next to each other."""

    name: str
    built: Built


class Unpacked(Archive):
    """Archive that caches its unpacked groups, for readers of all of it."""

    def unpacked(self, group: int, length: int) -> bytes:
        """See `Archive`."""
        return self._whole(group)[:length]

    @cache  # noqa: B019 - it lives as long as a command
    def _whole(self, group: int) -> bytes:
        return super().unpacked(group, self.groups[group].size)


def pack_kernels(kernels: Sequence[Shipped], before: Archive | None = None) -> Packed:
    """Archive of these kernels. Groups that `before` has are copied in packed form, since compressors differ."""
    codes = {binary.sha256: (binary.kernel, kernel.name, code) for kernel in kernels for binary, code in _codes(kernel.built)}
    ordered = sorted(codes, key=lambda sha256: (codes[sha256][0], _alike(codes[sha256][1]), sha256))
    groups, places = _grouped([(codes[sha256][0], codes[sha256][2]) for sha256 in ordered], CODE_BYTES, 0)
    place_of = dict(zip(ordered, places, strict=True))
    named = sorted(kernels, key=lambda kernel: (_alike(kernel.name), kernel.built.manifest.variant_id))
    texts = [_manifest(kernel, place_of) for kernel in named]
    more, places = _grouped([("", text) for text in texts], MANIFEST_BYTES, len(groups))
    manifests = {
        kernel.built.manifest.variant_id: Piece(place, hashlib.sha256(text).hexdigest())
        for kernel, text, place in zip(named, texts, places, strict=True)
    }
    known = {} if before is None else _packed_groups(before)
    packed = [known.get(hashlib.sha256(group).hexdigest()) or pack(group) for group in (*groups, *more)]
    content, sha256 = archive_bytes(packed)
    facts = ArchiveFacts(sha256, tuple(Group(len(one), len(group)) for one, group in zip(packed, (*groups, *more), strict=True)))
    return Packed(content, facts, manifests)


def _codes(built: Built) -> Iterable[tuple[Binary, bytes]]:
    return zip(built.manifest.binaries, built.codes, strict=True)


def _manifest(kernel: Shipped, place_of: dict[str, Place]) -> bytes:
    binaries = tuple(replace(binary, file=place_of[binary.sha256].label()) for binary in kernel.built.manifest.binaries)
    return replace(kernel.built.manifest, binaries=binaries).as_json().encode()


def _alike(name: str) -> tuple[str, str]:
    """Sort key of a path: without its 16-bit type, then with it."""
    return re.sub(r"_(bf16|fp16)", "", name), name


def _grouped(pieces: Sequence[tuple[str, bytes]], most: int, first: int) -> tuple[list[bytes], list[Place]]:
    """Groups of at most `most` bytes (but for a larger piece) with pieces of one kind, and the place of each piece; groups are numbered
    from `first`, and pieces are 16-byte aligned, as instructions are."""
    groups: list[bytearray] = []
    places: list[Place] = []
    kinds: list[str] = []
    for kind, content in pieces:
        if not groups or kinds[-1] != kind or len(groups[-1]) + len(content) > most:
            groups.append(bytearray())
            kinds.append(kind)
        places.append(Place(first + len(groups) - 1, len(groups[-1]), len(content)))
        groups[-1] += content + bytes(-len(content) % 16)
    return [bytes(group) for group in groups], places


def _packed_groups(archive: Archive) -> dict[str, bytes]:
    """Packed groups of an archive by the digest of their unpacked bytes; empty where it can't be read."""
    found, start = {}, HEADER_BYTES
    try:
        content = archive.path.read_bytes()
        for number, group in enumerate(archive.groups):
            packed = content[start : start + group.packed]
            found[hashlib.sha256(archive.unpacked(number, group.size)).hexdigest()] = packed
            start += group.packed
    except (OSError, EnvironmentProblem, lzma.LZMAError):
        return {}
    return found
