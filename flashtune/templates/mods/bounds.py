"""Bounds of the indices that a function reads captured tensors by, from the sizes of a call."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashtune.core.system.errors import InputError
from flashtune.templates.mods.graph import INTEGERS, Node, loads

aten = torch.ops.aten


_REMEDIES = {frozenset("h"): "give it a value for each head", frozenset("b"): "give it a value for each sequence of the batch"}
"""Remedies for a captured tensor that is too small, by what its index reads."""


class Range(NamedTuple):
    """Least and greatest value; `exact` is True if some query and key have each of them."""

    low: int
    high: int
    exact: bool


def check(name: str, output: Node, captured: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> None:
    """Raise InputError for an index that leaves a captured tensor at some query and key; `sizes` are the numbers of values of indices.

    Where bounds aren't certain nothing is raised: kernels read NaN (integers 0) outside of a tensor.
    """
    for load in loads([output, *([] if output.own_gradient is None else [output.own_gradient])]):
        tensor = captured[load.captured]
        for axis, index in enumerate(load.arguments):
            found, size = _range(index, sizes), tensor.shape[axis]
            if found is not None and found.exact and (found.high >= size or found.low < -size):
                worst = found.high if found.high >= size else found.low
                raise InputError(
                    f"{name} reads index {worst} of dimension {axis} of a captured tensor, whose size is {size} ({load.line}): "
                    + _REMEDIES.get(index.reads, "make it as large as the sequences are")
                )


def _range(x: Any, sizes: Mapping[str, int]) -> Range | None:
    if not isinstance(x, Node):
        return Range(x, x, True) if isinstance(x, int) else None
    if x.kind == "input":
        return Range(0, sizes[x.name] - 1, True) if x.name in sizes else None
    if x.kind == "number":
        number = x.arguments[0]
        return Range(int(number), int(number), True) if float(number).is_integer() else None
    if x.kind != "operation":
        return None
    given = [_range(y, sizes) for y in x.arguments]
    if None in given or not given:
        return None
    found = _combined(x, given)  # type: ignore[arg-type]
    # Other types wrap, round or are truth values.
    least, most = _WHOLE.get(x.dtype, (0, 0))
    return None if found is None or found.low < least or found.high > most else found


_WHOLE = {dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in INTEGERS} | {torch.float32: (-(1 << 24), 1 << 24)}
"""Least and greatest number of types between which they have every integer."""


def _combined(x: Node, given: list[Range]) -> Range | None:
    packet, a, b = x.target.overloadpacket, given[0], given[-1]
    # Each input once: else the bounds of parts need not meet.
    reads = [y.reads for y in x.arguments if isinstance(y, Node)]
    exact = all(y.exact for y in given) and sum(map(len, reads)) == len(frozenset[str]().union(*reads))
    if packet is aten._to_copy:
        return a
    if packet is aten.neg:
        return Range(-a.high, -a.low, exact)
    if len(given) != 2:
        return None
    alpha = x.keywords.get("alpha", 1)
    if packet in (aten.add, aten.sub):
        ends = [alpha * end for end in (b.low, b.high)]
        low, high = (min(ends), max(ends)) if packet is aten.add else (-max(ends), -min(ends))
        return Range(a.low + low, a.high + high, exact)
    if packet is aten.mul:
        ends = [p * q for p in a[:2] for q in b[:2]]
        return Range(min(ends), max(ends), exact)
    floors = packet is aten.floor_divide or (packet is aten.div and (a.low >= 0 or x.keywords.get("rounding_mode") == "floor"))
    if floors and b.low == b.high and b.low > 0:
        return Range(a.low // b.low, a.high // b.low, exact)
    if packet is aten.remainder and b.low == b.high and b.low > 0:
        if a.low >= 0 and a.high < b.low:
            return Range(a.low, a.high, exact)
        return Range(0, b.low - 1, False)
    return None
