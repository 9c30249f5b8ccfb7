"""Bounded decompression of machine code: a file of megabytes may unpack to gigabytes."""

import zlib
from pathlib import Path

MOST_BYTES = 16 << 20
"""Bytes of the largest kernel, packed or not, that is read; the largest shipped has 0.2 MiB."""
GZIP = 31
"""zlib's `wbits` for gzip's header."""


def unpacked(content: bytes) -> bytes:
    """The content of gzipped bytes; raises zlib.error where it is damaged or holds more than MOST_BYTES."""
    packer = zlib.decompressobj(wbits=GZIP)
    found = packer.decompress(content, MOST_BYTES)
    if not packer.eof:
        raise zlib.error(f"it is cut off or holds more than {MOST_BYTES >> 20} MiB")
    return found


def read_unpacked(path: Path) -> bytes:
    """The content of a gzipped file; raises OSError or zlib.error."""
    with path.open("rb") as file:
        return unpacked(file.read(MOST_BYTES + 1))
