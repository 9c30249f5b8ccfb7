"""Compressed machine code unpacked within bounds: a file of megabytes may hold gigabytes."""

import zlib
from pathlib import Path

MOST_BYTES = 16 << 20
"""So large is no kernel, packed or not: the largest shipped one has 0.2 MiB."""
GZIP = 31
"""How zlib is told of gzip's header."""


def unpacked(content: bytes) -> bytes:
    """What this gzipped content holds; raises zlib.error where it is damaged or holds more than MOST_BYTES."""
    packer = zlib.decompressobj(wbits=GZIP)
    found = packer.decompress(content, MOST_BYTES)
    if not packer.eof:
        raise zlib.error(f"it is cut off or holds more than {MOST_BYTES >> 20} MiB")
    return found


def read_unpacked(path: Path) -> bytes:
    """What this gzipped file holds; raises OSError or zlib.error."""
    with path.open("rb") as file:
        return unpacked(file.read(MOST_BYTES + 1))
