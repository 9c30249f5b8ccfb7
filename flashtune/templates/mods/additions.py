"""Triton source that adds a tile's gradients to those of captured tensors, in as few atomic additions as their places allow."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashtune.templates.mods.graph import INDICES, MOST_FACTOR, Node, numbered, ordered
from flashtune.templates.mods.operations import COMPARISONS
from flashtune.templates.mods.writer import Writer, as_mask

aten = torch.ops.aten

PAIR = frozenset({"q_idx", "kv_idx"})
"""Inputs that differ within a tile of scores, as a score does."""

MOST_SUMS = 3
"""Most sums of a kernel; further ones are added tile by tile."""

MOST_TILES = 4
"""Most sums and values that a kernel keeps from tile to tile, each of which takes 32 registers of a thread (64 x 64 numbers, 4 warps)."""


class Additions(NamedTuple):
    """Definitions of functions, and the numbers of the sums and values that a kernel keeps from tile to tile."""

    texts: tuple[str, ...] = ()
    sums: int = 0
    values: int = 0


def additions(score: Node, gradients: Sequence[tuple[Node, Node]], tensors: Sequence[str], outputs: Sequence[str]) -> Additions:
    """Functions for the kernel of gradients of captured tensors, which walks diagonals of tiles.

    `gradients` are loads of captured tensors, each with its gradient. A load whose index depends on the distance of query and key alone has
    a sum: `captured_gradient_0` gives a tile's part of it, which a kernel adds up over tiles with equal distances, and `add_sum_0` adds the
    sum to the captured tensor's gradient. `add_gradients` adds the gradients of other loads.

    Values that are read by the distance alone are alike in all tiles of a diagonal: `values_by_distance` computes them once from the first
    tile's places, and the other functions, `diagonal_score` for the score among them, take them as `value_0` and so on. Functions of
    gradients have the score's as `grad`, and `keep`, True for the pairs that count. `tensors` are the parameters of captured tensors,
    `outputs` those of their gradients.
    """
    alike = list(_alike(gradients))
    summed = [load for load, _ in alike if varies(load) == PAIR and by_distance(load.arguments)][:MOST_SUMS]
    kept = kept_values([score, *(part for _, parts in alike for part in parts)], MOST_TILES - len(summed))
    values = [f"value_{number}" for number in range(len(set(kept.values())))]
    inputs = ["score", *INDICES, *values]
    texts = _value_functions(score, kept, inputs, tensors) if kept else []
    rest, parameters = Writer(kept), [*inputs, "grad", "keep", *tensors, *outputs]
    for load, parts in alike:
        writer = Writer(kept) if load in summed else rest
        value = " + ".join(f"{writer.value(part)}.to(tl.float32)" for part in parts)
        value = writer.line(f"tl.where(keep, {value} + tl.zeros_like(grad), 0.0)")
        if load in summed:
            number = summed.index(load)
            texts += [writer.function(f"captured_gradient_{number}", parameters, value), _of_sum(number, load, [*tensors, *outputs])]
        else:
            _add_tile(writer, load, value)
    return Additions((*texts, _ADD, rest.function("add_gradients", parameters)), len(summed), len(values))


def _value_functions(score: Node, kept: Mapping[Node, str], inputs: Sequence[str], tensors: Sequence[str]) -> list[str]:
    """`values_by_distance`, which returns the kept values in order, and `diagonal_score`, which takes them."""
    found, scores, values = Writer(), Writer(kept), dict[str, str]()
    for node, name in kept.items():
        if name not in values:
            values[name] = found.value(node)
    result = f"{scores.value(score)}.to(tl.float32)"
    return [
        found.function("values_by_distance", (*INDICES, *tensors), ", ".join(values.values())),
        scores.function("diagonal_score", (*inputs, *tensors), result),
    ]


def kept_values(outputs: Sequence[Node], most: int) -> dict[Node, str]:
    """Loads of captured tensors by the distance alone, with names that are equal where the loads are; of at most so many different ones.

    Of a load at an index from another load, the outer one.
    """
    known, numbers = _distances(outputs), numbered(outputs)
    found, names, seen = dict[Node, str](), dict[int, str](), set[Node]()
    waiting = list(reversed(outputs))
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        read = node.kind == "load" and known[node] and PAIR <= node.reads <= {*INDICES}
        if read and (numbers[node] in names or len(names) < most):
            found[node] = names.setdefault(numbers[node], f"value_{len(names)}")
        else:
            waiting += reversed(node.operands)
    return found


def _alike(gradients: Sequence[tuple[Node, Node]]) -> Iterable[tuple[Node, list[Node]]]:
    """Loads at different places, each with the gradients that aren't known to be 0 of all loads at its place."""
    numbers, found = numbered(load for load, _ in gradients), dict[int, tuple[Node, list[Node]]]()
    for load, gradient in gradients:
        if gradient.kind != "number" or gradient.arguments[0] != 0:
            found.setdefault(numbers[load], (load, []))[1].append(gradient)
    return found.values()


def varies(load: Node) -> frozenset[str]:
    """Inputs by which a load's place differs within a tile; both places, and the score, where it depends on that."""
    return load.reads & PAIR if "score" not in load.reads else PAIR | {"score"}


def by_distance(indices: Iterable[Any]) -> bool:
    """True if integers depend on the query's and the key's place through their difference alone."""
    nodes = [x for x in indices if isinstance(x, Node)]
    known = _distances(nodes)
    return all(known[x] for x in nodes)


def _distances(outputs: Iterable[Node]) -> dict[Node, bool]:
    """The nodes that outputs need, each with True if it depends on the query's and the key's place through their difference alone."""
    known: dict[Node, bool] = {}
    steps: dict[Node, int | None] = {}
    for node in ordered(outputs):
        parts = [steps[x] if isinstance(x, Node) else 0 for x in node.arguments]
        steps[node] = _step(node, parts)
        compared = node.kind == "operation" and node.target.overloadpacket in COMPARISONS and None not in parts
        alike = steps[node] == 0 or (compared and parts[0] == parts[1])
        known[node] = alike or (node.kind != "input" and all(known[x] for x in node.operands))
    return known


def _step(x: Node, parts: list[int | None]) -> int | None:
    """Growth of a sum of places where query and key both advance by one, from that of its operands; None for anything else."""
    if not x.reads & PAIR:
        return 0
    if x.kind == "input":
        return 1
    if x.kind != "operation" or x.dtype not in (torch.int32, torch.int64) or None in parts:
        return None
    packet, alpha = x.target.overloadpacket, x.keywords.get("alpha", 1)
    signs = {aten.add: (1, alpha), aten.sub: (1, -alpha), aten.rsub: (-alpha, 1), aten.neg: (-1,), aten._to_copy: (1,)}.get(packet)
    if packet is aten.mul and any(isinstance(y, int) for y in x.arguments):
        [number] = [y for y in x.arguments if isinstance(y, int)]
        signs = number, number
    if signs is None or len(signs) != len(parts):
        return None
    found: int = sum(sign * part for sign, part in zip(signs, parts, strict=True) if part)
    return found if abs(found) <= MOST_FACTOR else None


def _of_sum(number: int, load: Node, parameters: Sequence[str]) -> str:
    """A function that adds a sum of tiles at a load: first along diagonals, which are columns once each row is rotated by its number."""
    inner, given = Writer(), ", ".join(parameters)
    _add(inner, load, "sums", "")
    at_distances = inner.function(f"add_distances_{number}", ("b", "h", "q_idx", "kv_idx", "sums", *parameters))
    return f"""{at_distances}


@triton.jit
def add_sum_{number}(b, h, distance, values, {given}):
    WIDTH: tl.constexpr = values.shape[1]
    columns = tl.arange(0, WIDTH)
    steps = tl.arange(0, WIDTH)[:, None] - columns[None, :]
    rotated = tl.gather(values, steps & (WIDTH - 1), 1)
    ahead = tl.sum(tl.where(steps >= 0, rotated, 0.0), 0)
    behind = tl.sum(tl.where(steps < 0, rotated, 0.0), 0)
    key = tl.full([], 0, tl.int32)
    add_distances_{number}(b, h, distance + columns, key, ahead, {given})
    add_distances_{number}(b, h, distance + columns - WIDTH, key, behind, {given})"""


def _add_tile(writer: Writer, load: Node, value: str) -> None:
    """Write the addition of a tile at a load, summed first over what its place doesn't depend on."""
    differs = varies(load)
    for axis, index in ((1, "kv_idx"), (0, "q_idx")):
        if differs and index not in differs:
            value = writer.line(f"tl.sum({value}, {axis}, keep_dims=True)")
    if not differs:
        value = writer.line(f"tl.sum(tl.sum({value}, 1), 0)")
    _add(writer, load, value, "keep" if differs >= PAIR else "")


def _add(writer: Writer, load: Node, value: str, keep: str) -> None:
    """Write the addition of a value, or a tensor of them, at a load's place in its tensor's gradient."""
    if varies(load):
        offset, inside = writer.offset(load, "g")
        condition = as_mask([inside, keep]) if keep else inside
        writer.lines.append(f"    add_at(g{load.captured}_ptr, {offset}, {value}, {condition})")
    else:
        place, inside = writer.place(load, "g")
        mask = f", mask={inside}" if inside else ""
        writer.lines.append(f'    tl.atomic_add({place}, {value}{mask}, sem="relaxed")')


_ADD = """@triton.jit
def add_at(pointer, offsets, values, inside):
    # Many pairs often share a place, such as the end of a clamped distance: those at the least and at the greatest are summed first.
    offsets = offsets + tl.zeros(values.shape, tl.int64)
    first = tl.min(tl.where(inside, offsets, 0x7FFFFFFFFFFFFFFF))
    last = tl.max(tl.where(inside, offsets, -1))
    at_first = inside & (offsets == first)
    at_last = inside & (offsets == last)
    tl.atomic_add(pointer + first, tl.sum(tl.where(at_first, values, 0.0)), mask=last >= 0, sem="relaxed")
    tl.atomic_add(pointer + last, tl.sum(tl.where(at_last, values, 0.0)), mask=last > first, sem="relaxed")
    tl.atomic_add(pointer + offsets, values, mask=(inside & (offsets != first) & (offsets != last)) != 0, sem="relaxed")"""
