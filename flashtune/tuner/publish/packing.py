"""Packing of kernels into an architecture's archive (flashtune.core.code.archive): the same bytes for the same kernels."""

import hashlib
import lzma
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from flashtune.core.code.archive import HEADER_BYTES, Archive, Group, Place, archive_bytes, pack
from flashtune.core.code.index import ArchiveFacts, Piece
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.tuner.publish.machine_code import Built

CODE_BYTES = 4_800_000
"""Unpacked bytes of machine code per group, about 17 ms to unpack: half as many make archives 7 % larger."""

SAMPLED = 8
"""One pair of neighbouring instructions of so many, by their hashes, is compared between kernels."""

MANIFEST_BYTES = 600_000
"""Unpacked bytes of manifests per group, of which a first call may read a dozen."""


class Packed(NamedTuple):
    """Archive's bytes, its entry in the index, and the place of each variant's manifest."""

    content: bytes
    facts: ArchiveFacts
    manifests: dict[str, Piece]


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """Kernel to be packed; `name` is its module's path, by which kernels are ordered."""

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
    codes = {
        binary.sha256: (binary.kernel, kernel.name, code)
        for kernel in kernels
        for binary, code in zip(kernel.built.manifest.binaries, kernel.built.codes, strict=True)
    }
    ordered = sorted(codes, key=lambda sha256: (codes[sha256][0], _alike(codes[sha256][1]), sha256))
    alike = alike_groups([codes[sha256][2] for sha256 in ordered], CODE_BYTES)
    groups, places = _joined([[codes[ordered[place]][2] for place in group] for group in alike], 0)
    place_of = dict(zip((ordered[place] for group in alike for place in group), places, strict=True))
    named = sorted(kernels, key=lambda kernel: (_alike(kernel.name), kernel.built.manifest.variant_id))
    texts = [_manifest(kernel, place_of) for kernel in named]
    more, places = _joined(_filled(texts, MANIFEST_BYTES), len(groups))
    manifests = {
        kernel.built.manifest.variant_id: Piece(place, hashlib.sha256(text).hexdigest())
        for kernel, text, place in zip(named, texts, places, strict=True)
    }
    known = {} if before is None else _packed_groups(before)
    packed = [known.get(hashlib.sha256(group).hexdigest()) or pack(group) for group in (*groups, *more)]
    content, sha256 = archive_bytes(packed)
    facts = ArchiveFacts(sha256, tuple(Group(len(one), len(group)) for one, group in zip(packed, (*groups, *more), strict=True)))
    return Packed(content, facts, manifests)


def _manifest(kernel: Shipped, place_of: dict[str, Place]) -> bytes:
    binaries = tuple(replace(binary, file=place_of[binary.sha256].label()) for binary in kernel.built.manifest.binaries)
    return replace(kernel.built.manifest, binaries=binaries).as_json().encode()


def _alike(name: str) -> tuple[str, str]:
    """Sort key of a path: without its 16-bit type, then with it."""
    return re.sub(r"_(bf16|fp16)", "", name), name


def alike_groups(pieces: Sequence[bytes], most: int) -> list[list[int]]:
    """Groups of these pieces' indices, of at most `most` bytes each (but for a larger piece).

    A group begins with the first piece that is left, and takes the piece that shares the largest part of its instructions with one of
    the group, until none fits.
    """
    sizes = numpy.array([_padded(piece) for piece in pieces])
    sampled = [_sampled(piece) for piece in pieces]
    owners = numpy.repeat(numpy.arange(len(pieces)), [len(one) for one in sampled])
    hashes = numpy.concatenate(sampled) if pieces else numpy.empty(0)
    order = numpy.argsort(hashes, kind="stable")
    shared = numpy.zeros((len(pieces), len(pieces)), numpy.float32)
    for same in numpy.split(owners[order], numpy.flatnonzero(numpy.diff(hashes[order])) + 1):
        shared[same[:, None], same] += 1
    shared /= numpy.maximum(shared.diagonal(), 1)
    left = numpy.ones(len(pieces), bool)
    groups: list[list[int]] = []
    while left.any():
        group, held, nearest = [int(left.argmax())], 0, numpy.zeros(len(pieces), numpy.float32)
        while group[-1] >= 0:
            left[group[-1]] = False
            held += sizes[group[-1]]
            nearest = numpy.maximum(nearest, shared[group[-1]])
            fitting = left & (sizes <= most - held)
            group.append(int(numpy.where(fitting, nearest, -1).argmax()) if fitting.any() else -1)
        groups.append(group[:-1])
    return groups


def _sampled(code: bytes) -> NDArray[numpy.uint64]:
    """Hashes of a sample of the pairs of neighbouring 16-byte instructions."""
    words = numpy.frombuffer(code[: len(code) // 16 * 16], numpy.uint64).reshape(-1, 2)
    single = words[:, 0] * numpy.uint64(0x9E3779B97F4A7C15) ^ words[:, 1] * numpy.uint64(0xC2B2AE3D27D4EB4F)
    pairs = (single[:-1] * numpy.uint64(31) + single[1:]) * numpy.uint64(0xBF58476D1CE4E5B9)
    pairs ^= pairs >> numpy.uint64(32)
    return numpy.unique(pairs[pairs % numpy.uint64(SAMPLED) == 0])


def _padded(piece: bytes) -> int:
    """Size of a piece that is 16-byte aligned, as instructions are."""
    return -(-len(piece) // 16) * 16


def _filled(pieces: Sequence[bytes], most: int) -> list[list[bytes]]:
    """Groups of at most `most` bytes (but for a larger piece) with these pieces in order."""
    groups: list[list[bytes]] = []
    for piece in pieces:
        if not groups or sum(map(_padded, groups[-1])) + len(piece) > most:
            groups.append([])
        groups[-1].append(piece)
    return groups


def _joined(groups: Sequence[Sequence[bytes]], first: int) -> tuple[list[bytes], list[Place]]:
    """Bytes of each group, and the place of each piece; groups are numbered from `first`."""
    places: list[Place] = []
    for number, group in enumerate(groups, first):
        offset = 0
        for piece in group:
            places.append(Place(number, offset, len(piece)))
            offset += _padded(piece)
    return [b"".join(piece.ljust(_padded(piece), b"\0") for piece in group) for group in groups], places


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
