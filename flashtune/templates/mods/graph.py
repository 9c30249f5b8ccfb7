"""Graphs of scalar operations: what a traced `score_mod` or `mask_mod` computes for one query and one key."""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

INDICES = ("b", "h", "q_idx", "kv_idx")
"""Names of the inputs that place a score; a `score_mod` has `score` before them."""

MOST_NODES = 1000
"""Most operations of a function: a kernel evaluates them for each query and key."""

MOST_FACTOR = 1024
"""Largest number by which a place is multiplied without a wrap of int32: there are fewer than 2^21 places."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TYPES = {
    torch.float32: "tl.float32", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.bool: "tl.int1",
    torch.int64: "tl.int64", torch.int32: "tl.int32", torch.int16: "tl.int16", torch.int8: "tl.int8", torch.uint8: "tl.uint8",
}  # fmt: skip
"""Triton's names of the element types that kernels compute with."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One scalar value: an input by `name`, a load of a captured tensor at indices, a number, or an operation (`target`) on others.

    `captured` is the place of a load's tensor among the captured ones. `line` is where the user's function has it, empty where unknown.
    """

    kind: str
    dtype: torch.dtype
    target: Any = None
    name: str = ""
    captured: int = -1
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    line: str = ""
    reads: frozenset[str] = frozenset()
    """Names of the inputs that the value depends on."""
    own_gradient: "Node | None" = None
    """Of a score with a derivative of its own: the gradient of the score, a multiple of the input `grad`."""

    @property
    def operands(self) -> tuple["Node", ...]:
        """The values that this one is computed from."""
        return tuple(x for x in (*self.arguments, *self.keywords.values()) if isinstance(x, Node))


def ordered(outputs: Iterable[Node], known: Container[Node] = ()) -> list[Node]:
    """The nodes that outputs need, each after its operands, without `known` ones and what these alone need."""
    found: dict[Node, None] = {}

    def visit(root: Node) -> None:
        waiting: list[tuple[Node, Iterator[Node]]] = [(root, iter(root.operands))]
        while waiting:
            node, rest = waiting[-1]
            following = next((x for x in rest if x not in found and x not in known), None)
            if following is None:
                found.setdefault(node)
                waiting.pop()
            else:
                waiting.append((following, iter(following.operands)))

    for output in outputs:
        if output not in known:
            visit(output)
    return list(found)


def loads(outputs: Iterable[Node]) -> list[Node]:
    """The loads among the nodes of outputs."""
    return [node for node in ordered(outputs) if node.kind == "load"]


def numbered(outputs: Iterable[Node], alike: Collection[Node] = ()) -> dict[Node, int]:
    """A number for each node that outputs need, equal where nodes compute the same; those of `alike` are taken for equal."""
    found: dict[Node, int] = {}
    numbers: dict[Any, int] = {}
    for node in ordered(outputs):
        given = tuple(found[x] if isinstance(x, Node) else repr(x) for x in (*node.arguments, *node.keywords.values()))
        whole = node.kind, node.target, node.name, node.captured, node.dtype, tuple(node.keywords), given
        found[node] = numbers.setdefault("alike" if node in alike else whole, len(numbers))
    return found
