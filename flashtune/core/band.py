"""Which keys a query sees (`Band`), and how callers write it (`parse_window`)."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast, get_args

from flashtune.core.errors import InputError, InputTypeError

Alignment = Literal["top_left", "bottom_right"]
ALIGNMENTS: tuple[Alignment, ...] = get_args(Alignment)
Window = tuple[int | None, int | None]
"""(left, right) as in `Band`, before sizes say where the diagonal lies."""

UNBOUNDED = -1
"""What kernels take for a side without a bound, as flash-attn does."""


def parse_window(window: object) -> Window:
    """A caller's `window` as (left, right): a size for both, or a pair, with None or -1 for unbounded.

    Raises InputTypeError or InputError where it is none of these.
    """
    given: list[object] = list(window) if isinstance(window, (tuple, list)) else [window, window]
    sides: list[int] = []
    for side in given:
        if side is None:
            sides.append(UNBOUNDED)
        elif isinstance(side, numbers.Integral) and not isinstance(side, bool):
            sides.append(int(side))
    if len(given) != 2 or len(sides) != 2:
        raise InputTypeError(f"window={window!r} is not a window: give a size or (left, right), with None or -1 for unbounded")
    if min(sides) < UNBOUNDED:
        raise InputError(f"window={window!r} is out of range: give sizes of 0 or more, with None or -1 for unbounded")
    left, right = (None if side == UNBOUNDED else side for side in sides)
    return left, right


def diagonal_of(alignment: Alignment, n_q: int, n_kv: int) -> int:
    """The key that query 0 stands over: the first (top_left, as torch's `is_causal`), or the one that puts the last query over the last
    key (bottom_right, as flash-attn)."""
    return n_kv - n_q if alignment == "bottom_right" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Query i sees keys i + diagonal - left .. i + diagonal + right; None is unbounded. Causal attention has right = 0."""

    left: int | None = None
    right: int | None = None
    diagonal: int = 0

    @property
    def bounded(self) -> bool:
        """Whether a side hides keys."""
        return self.left is not None or self.right is not None

    def trimmed(self, n_q: int, n_kv: int, surely: Callable[[bool], bool] = bool) -> "Band":
        """Without the sides that hide no pair at these sizes: one query over the last key isn't causal. `surely` is asked whether a
        comparison of sizes holds, for they may be symbolic."""
        left = None if self.left is not None and surely(self.left >= n_q - 1 + self.diagonal) else self.left
        right = None if self.right is not None and surely(self.right >= n_kv - 1 - self.diagonal) else self.right
        return Band(left=left, right=right, diagonal=self.diagonal)

    def from_row(self, first: int) -> "Band":
        """The same band for rows counted from `first`."""
        return replace(self, diagonal=self.diagonal + first)

    @property
    def turned(self) -> "Band":
        """Which queries a key is seen by: the same band with rows and columns exchanged."""
        return Band(left=self.right, right=self.left, diagonal=-self.diagonal)

    def keys(self, first: int, last: int, n_kv: int) -> range:
        """The keys that any of the queries first .. last sees."""
        start = 0 if self.left is None else max(0, first + self.diagonal - self.left)
        stop = n_kv if self.right is None else min(n_kv, last + self.diagonal + self.right + 1)
        return range(start, max(start, stop))

    def pairs(self, n_q: int, n_kv: int) -> int:
        """How many (query, key) pairs are seen."""
        upper = n_q * n_kv if self.right is None else _pairs_up_to(n_q, n_kv, self.diagonal + self.right)
        return upper - (0 if self.left is None else _pairs_up_to(n_q, n_kv, self.diagonal - self.left - 1))

    def keywords(self) -> dict[str, int]:
        """As arguments of a rendered module's `launch`."""
        left, right = (UNBOUNDED if side is None else side for side in (self.left, self.right))
        return {"diagonal": self.diagonal, "window_left": left, "window_right": right}


class Sides(NamedTuple):
    """The band that a call asks for, before sizes say where its diagonal lies and what it hides."""

    window: Window
    alignment: Alignment

    @classmethod
    def of(cls, window: object, is_causal: bool, alignment: str) -> "Sides":
        """As callers write them; `alignment` is one of ALIGNMENTS."""
        left, right = parse_window(window)
        return cls(window=(left, 0 if is_causal else right), alignment=cast(Alignment, alignment))

    def band(self, n_q: int, n_kv: int, surely: Callable[[bool], bool] = bool) -> Band:
        """The band at these sizes, without sides that hide nothing (`Band.trimmed`)."""
        left, right = self.window
        return Band(left=left, right=right, diagonal=diagonal_of(self.alignment, n_q, n_kv)).trimmed(n_q, n_kv, surely)


def _pairs_up_to(n_q: int, n_kv: int, shift: int) -> int:
    """How many pairs (i, j) have j <= i + shift: the sum over rows of i + shift + 1, held between 0 and n_kv."""
    first = min(n_q, max(0, -shift))
    full = min(n_q, max(first, n_kv - shift - 1))
    rising = full - first
    return rising * (first + shift + 1) + rising * (rising - 1) // 2 + (n_q - full) * n_kv
