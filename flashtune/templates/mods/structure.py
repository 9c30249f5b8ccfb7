"""Known structures of a traced mask: a band of keys around each query, for which there are kernels of their own."""

from typing import Any, NamedTuple

import torch

from flashtune.templates.mods.graph import INTEGERS, Node

aten = torch.ops.aten


class Line(NamedTuple):
    """of_query * q_idx + of_key * kv_idx + constant."""

    of_query: int
    of_key: int
    constant: int


def band(mask: Node, *, within: bool = False) -> tuple[int | None, int | None] | None:
    """(left, right) of a mask that shows query q the keys from q - left to q + right, None for an open side; None for any other mask. With
    `within`, a band beside other conditions, joined by `&`, counts, too."""
    packet = mask.target.overloadpacket if mask.kind == "operation" else None
    if packet in (aten.bitwise_and, aten.logical_and):
        both = [band(x, within=within) if isinstance(x, Node) and x.dtype is torch.bool else None for x in mask.arguments]
        found = [sides for sides in both if sides is not None]
        if not found or (len(found) < 2 and not within):
            return None
        left, right = (min((side for side in sides if side is not None), default=None) for sides in zip(*found, strict=True))
        return left, right
    if packet not in (aten.ge, aten.gt, aten.le, aten.lt):
        return None
    greater, strict = packet in (aten.ge, aten.gt), packet in (aten.gt, aten.lt)
    smaller, larger = mask.arguments[::-1] if greater else mask.arguments
    return _side(smaller, larger, 1 if strict else 0)


def split(mask: Node) -> tuple[tuple[int | None, int | None] | None, Node | None]:
    """The band by which kernels of packed sequences narrow the keys that they walk, if there is one, and the mask that it leaves."""
    return band(mask, within=True), mask if band(mask) is None else None


def _side(smaller: Any, larger: Any, apart: int) -> tuple[int | None, int | None] | None:
    """The band of `smaller` + apart <= `larger`."""
    if isinstance(smaller, Node) and smaller.kind == "operation" and smaller.target.overloadpacket is aten.abs:
        inner, most = _line(smaller.arguments[0]), _line(larger)
        if inner is None or most is None or inner not in ((1, -1, 0), (-1, 1, 0)) or most[:2] != (0, 0):
            return None
        width = most.constant - apart
        return None if width < 0 else (width, width)
    less, more = _line(smaller), _line(larger)
    if less is None or more is None:
        return None
    of_query, of_key, room = (y - x for x, y in zip(less, more, strict=True))
    room -= apart
    if room < 0:
        return None
    return {(1, -1): (None, room), (-1, 1): (room, None)}.get((of_query, of_key))


def _line(x: Any) -> Line | None:
    if isinstance(x, int) and not isinstance(x, bool):
        return Line(0, 0, x)
    if not isinstance(x, Node) or x.dtype not in INTEGERS:
        return None
    if x.kind == "input":
        return {"q_idx": Line(1, 0, 0), "kv_idx": Line(0, 1, 0)}.get(x.name)
    if x.kind == "number":
        return Line(0, 0, int(x.arguments[0]))
    if x.kind != "operation":
        return None
    given = [_line(y) for y in x.arguments]
    if x.target.overloadpacket in (aten.add, aten.sub) and len(given) == 2 and given[0] is not None and given[1] is not None:
        factor = x.keywords.get("alpha", 1) * (1 if x.target.overloadpacket is aten.add else -1)
        return Line(*(y + factor * z for y, z in zip(given[0], given[1], strict=True)))
    return None
