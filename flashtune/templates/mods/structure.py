"""Known structures of a traced mask: a band of keys around each query, for which there are kernels of their own."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from flashtune.templates.mods.graph import INTEGERS, Node, numbered

aten = torch.ops.aten

Band = tuple[int | None, int | None]
"""(left, right): query q sees the keys from q - left to q + right, all to a side where that is None."""

WIDE = (torch.int32, torch.int64)
"""Types of places, whose sums don't overflow."""


class Line(NamedTuple):
    """of_query * q_idx + of_key * kv_idx + constant, and `others`: coefficients of other whole numbers, by those of their nodes."""

    of_query: int
    of_key: int
    constant: int
    others: Mapping[int, int]

    def plus(self, factor: int, line: "Line") -> "Line":
        """The sum with a multiple of a line."""
        sums = {key: self.others.get(key, 0) + factor * line.others.get(key, 0) for key in {**self.others, **line.others}}
        places = [x + factor * y for x, y in zip(self[:3], line[:3], strict=True)]
        return Line(places[0], places[1], places[2], {key: number for key, number in sums.items() if number})


def band(mask: Node, *, within: bool = False) -> Band | None:
    """The band that a mask is, None for any other mask. With `within`, a band beside other conditions, joined by `&`, counts, too."""
    return joined(conditions(mask), numbered([mask]), within=within)


def conditions(mask: Node) -> list[Any]:
    """The conditions that a mask joins by `&`."""
    found: dict[Any, bool] = {}
    waiting: list[Any] = [mask]
    while waiting:
        x = waiting.pop()
        if x not in found:
            both = isinstance(x, Node) and x.dtype is torch.bool and _packet(x) in (aten.bitwise_and, aten.logical_and)
            found[x] = not both
            waiting += x.arguments if both else ()
    return [x for x, alone in found.items() if alone]


def joined(terms: Iterable[Any], numbers: Mapping[Node, int], *, within: bool = False) -> Band | None:
    """The band of conditions that hold together, by numbers of their nodes; None where one isn't a band, or with `within` where none is."""
    every = [_sides(x, numbers) for x in terms]
    found = [sides for sides in every if sides is not None]
    if len(found) < len(every) and not (within and found):
        return None
    left, right = (min((sides[place] for sides in found if sides[place] is not None), default=None) for place in (0, 1))  # type: ignore[type-var]
    return left, right


def _packet(x: Any) -> Any:
    return x.target.overloadpacket if isinstance(x, Node) and x.kind == "operation" else None


def _sides(x: Any, numbers: Mapping[Node, int]) -> Band | None:
    """The band that a condition is."""
    if isinstance(x, Node) and x.kind == "number" and x.arguments[0] is True:
        return None, None
    packet = _packet(x)
    if packet not in (aten.ge, aten.gt, aten.le, aten.lt):
        return None
    greater, strict = packet in (aten.ge, aten.gt), packet in (aten.gt, aten.lt)
    smaller, larger = x.arguments[::-1] if greater else x.arguments
    return _side(smaller, larger, 1 if strict else 0, numbers)


def split(mask: Node) -> tuple[Band | None, Node | None]:
    """The band by which kernels of packed sequences narrow the keys that they walk, if there is one, and the mask that it leaves."""
    return band(mask, within=True), mask if band(mask) is None else None


def _side(smaller: Any, larger: Any, apart: int, numbers: Mapping[Node, int]) -> Band | None:
    """The band of `smaller` + apart <= `larger`."""
    far = _packet(smaller) is aten.abs
    less, more = _line(smaller.arguments[0] if far else smaller, numbers), _line(larger, numbers)
    if less is None or more is None:
        return None
    if far:
        width = more.constant - apart
        alone = less[:3] in ((1, -1, 0), (-1, 1, 0)) and more[:2] == (0, 0) and not less.others and not more.others
        return (width, width) if alone and width >= 0 else None
    of_query, of_key, room, others = more.plus(-1, less)
    room -= apart
    if room < 0 or others:
        return None
    return {(1, -1): (None, room), (-1, 1): (room, None)}.get((of_query, of_key))


def _line(x: Any, numbers: Mapping[Node, int]) -> Line | None:
    if isinstance(x, int) and not isinstance(x, bool):
        return Line(0, 0, x, {})
    if not isinstance(x, Node) or x.dtype not in INTEGERS:
        return None
    if x.kind == "input" and x.name in ("q_idx", "kv_idx"):
        return Line(int(x.name == "q_idx"), int(x.name == "kv_idx"), 0, {})
    if x.kind == "number":
        return Line(0, 0, int(x.arguments[0]), {})
    packet = _packet(x) if x.dtype in WIDE else None
    given = [_line(y, numbers) for y in x.arguments] if packet in (aten.add, aten.sub, aten._to_copy) else []
    if len(given) == 1 and given[0] is not None:
        return given[0]
    if len(given) == 2 and given[0] is not None and given[1] is not None:
        return given[0].plus(x.keywords.get("alpha", 1) * (1 if packet is aten.add else -1), given[1])
    return Line(0, 0, 0, {numbers[x]: 1})
