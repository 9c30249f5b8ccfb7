"""Columns of a head's tiles where Triton lays them out: a power of two, or pieces of powers of two where padding would cost too much."""

from functools import lru_cache
from typing import NamedTuple

from flashtune.core.problems.config import KernelSpec
from flashtune.core.problems.problem import padded, wide_heads


class Piece(NamedTuple):
    """Columns of Q and K that are one operand of the product: the first one, their number, and how a kernel names them."""

    start: int
    width: int
    suffix: str
    block: str
    padded: bool
    """True if the last columns lie beyond the head."""


def key_pieces(spec: KernelSpec) -> tuple[Piece, ...]:
    """Pieces of Q and K: the whole tile, unless heads are wide or values are the first columns of keys, which then are a piece."""
    return _pieces(spec.d, spec.d_v, spec.latent)


def loaded_columns(d: int, d_v: int, *, latent: bool) -> tuple[int, int]:
    """Columns of K, and of V beside it, in a kernel's tiles, padding included."""
    return sum(piece.width for piece in _pieces(d, d_v, latent)), 0 if latent else padded(d_v)


@lru_cache(maxsize=1024)
def _pieces(d: int, d_v: int, latent: bool) -> tuple[Piece, ...]:
    widths = [padded(d)]
    if latent:
        values = min(padded(d_v), widths[0])
        widths = [values, *_widths(d - values)]
    elif wide_heads(d, d_v):
        widths = _widths(d)
    starts = [sum(widths[:place]) for place in range(len(widths))]
    if len(widths) == 1:
        return (Piece(0, widths[0], "", "BLOCK_D", widths[0] > d),)
    return tuple(
        Piece(start, width, f"_{place}", str(width), start + width > d)
        for place, (start, width) in enumerate(zip(starts, widths, strict=True))
    )


def _widths(columns: int) -> list[int]:
    """Powers of two for so many columns, of which padding is an eighth at most, or less than 64 columns."""
    if columns <= 0:
        return []
    whole = padded(columns)
    return [whole] if columns <= 64 or 8 * (whole - columns) <= whole else [whole // 2, *_widths(columns - whole // 2)]
