"""The band of keys that a query sees (`Band`), and the parser of a caller's window (`parse_window`)."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast, get_args

from flashtune.core.system.errors import InputError, InputTypeError

Alignment = Literal["top_left", "bottom_right"]
ALIGNMENTS: tuple[Alignment, ...] = get_args(Alignment)
Window = tuple[int | None, int | None]
"""(left, right) as in `Band`, before the sizes of a call place the diagonal."""

UNBOUNDED = -1
"""The value by which kernels denote a side without a bound, as in flash-attn."""


def parse_window(window: object) -> Window:
    """A caller's `window` as (left, right): a size for both, or a pair, with None or -1 for unbounded.

    Raises InputTypeError or InputError where it is none of these.
    """
    parts: list[object] = list(window) if isinstance(window, (tuple, list)) else [window, window]
    sides: list[int] = []
    for side in parts:
        if side is None:
            sides.append(UNBOUNDED)
        elif isinstance(side, numbers.Integral) and not isinstance(side, bool):
            sides.append(int(side))
    if len(parts) != 2 or len(sides) != 2:
        raise InputTypeError(f"window={window!r} is not a window: give a size or (left, right), with None or -1 for unbounded")
    if min(sides) < UNBOUNDED:
        raise InputError(f"window={window!r} is out of range: give sizes of 0 or more, with None or -1 for unbounded")
    left, right = (None if side == UNBOUNDED else side for side in sides)
    return left, right


def diagonal_of(alignment: Alignment, n_q: int, n_kv: int) -> int:
    """The key on the diagonal of query 0: the first (top_left, as torch's `is_causal`), or the one that aligns the last query with the last
    key (bottom_right, as flash-attn)."""
    return n_kv - n_q if alignment == "bottom_right" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The keys i + diagonal - left .. i + diagonal + right that query i sees; None is unbounded. Causal attention has right = 0."""

    left: int | None = None
    right: int | None = None
    diagonal: int = 0

    @property
    def bounded(self) -> bool:
        """True where a side hides keys."""
        return self.left is not None or self.right is not None

    def trimmed(self, n_q: int, n_kv: int, surely: Callable[[bool], bool] = bool) -> "Band":
        """The band without the sides that hide no pair at these sizes: one query on the last key isn't causal. `surely` decides
        comparisons of sizes, which may be symbolic."""
        left = None if self.left is not None and surely(self.left >= n_q - 1 + self.diagonal) else self.left
        right = None if self.right is not None and surely(self.right >= n_kv - 1 - self.diagonal) else self.right
        return Band(left=left, right=right, diagonal=self.diagonal)

    def from_row(self, first: int) -> "Band":
        """The band for rows counted from `first`."""
        return replace(self, diagonal=self.diagonal + first)

    @property
    def turned(self) -> "Band":
        """The transposed band: the queries that see a key."""
        return Band(left=self.right, right=self.left, diagonal=-self.diagonal)

    def keys(self, first: int, last: int, n_kv: int) -> range:
        """The keys that any of the queries first .. last sees."""
        start = 0 if self.left is None else max(0, first + self.diagonal - self.left)
        stop = n_kv if self.right is None else min(n_kv, last + self.diagonal + self.right + 1)
        return range(start, max(start, stop))

    def pairs(self, n_q: int, n_kv: int) -> int:
        """The number of visible (query, key) pairs."""
        upper = n_q * n_kv if self.right is None else _pairs_up_to(n_q, n_kv, self.diagonal + self.right)
        return upper - (0 if self.left is None else _pairs_up_to(n_q, n_kv, self.diagonal - self.left - 1))

    def keywords(self) -> dict[str, int]:
        """The band as keyword arguments of a kernel's launch."""
        left, right = (UNBOUNDED if side is None else side for side in (self.left, self.right))
        return {"diagonal": self.diagonal, "window_left": left, "window_right": right}


class Sides(NamedTuple):
    """The band that a call requests, before its sizes place the diagonal."""

    window: Window
    alignment: Alignment

    @classmethod
    def of(cls, window: object, is_causal: bool, alignment: str) -> "Sides":
        """The sides from a caller's arguments; `alignment` is one of ALIGNMENTS."""
        left, right = parse_window(window)
        return cls(window=(left, 0 if is_causal else right), alignment=cast(Alignment, alignment))

    def band(self, n_q: int, n_kv: int, surely: Callable[[bool], bool] = bool) -> Band:
        """The band at these sizes, without sides that hide nothing (`Band.trimmed`)."""
        left, right = self.window
        return Band(left=left, right=right, diagonal=diagonal_of(self.alignment, n_q, n_kv)).trimmed(n_q, n_kv, surely)


def _pairs_up_to(n_q: int, n_kv: int, shift: int) -> int:
    """The number of pairs (i, j) with j <= i + shift: the sum over rows of i + shift + 1, clamped to 0 .. n_kv."""
    first = min(n_q, max(0, -shift))
    full = min(n_q, max(first, n_kv - shift - 1))
    rising = full - first
    return rising * (first + shift + 1) + rising * (rising - 1) // 2 + (n_q - full) * n_kv
