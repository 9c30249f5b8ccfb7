"""Conversion of a traced function, a graph of torch.fx, to nodes."""

from collections.abc import Sequence
from typing import Any

import torch

from flashtune.core.system.errors import InputError
from flashtune.templates.mods.graph import FLOATS, MOST_NODES, TYPES, Node, ordered
from flashtune.templates.mods.operations import FILLS, POINTWISE, SAME

aten = torch.ops.aten

LINE = "line of the function"
"""Key of a traced operation's line."""

UNRECORDED = "under no_grad"
"""Key that an operation has which the function computes without gradients."""

NAMED_ALIKE = {"approx.tanh.default": aten.tanh.default}
"""Operators that users define for what an operation does exactly: the soft cap of attention-gym, which names the GPU's own tanh."""

_VALUE_READ = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default)


class Untraceable(InputError):
    """A function that no kernel can express and FlexAttention can't either, with the operation and the line."""


class Unsupported(Exception):
    """A function with an operation that kernels lack; FlexAttention may have it."""


class Reader:
    """Conversion of a traced graph to nodes; `trained` is True for one whose gradients are wanted."""

    def __init__(self, name: str, graph: torch.fx.GraphModule, *, trained: bool = False) -> None:
        self.name, self.graph, self.trained, self.captured = name, graph, trained, list[torch.Tensor]()
        self._known: dict[torch.fx.Node, Any] = {}

    def all(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs; `inputs` are names or nodes for the placeholders."""
        if sum(node.op == "call_function" for node in self.graph.graph.nodes) > MOST_NODES:
            raise Untraceable(f"{self.name} has more than {MOST_NODES} operations: simplify it, or precompute a tensor and index that")
        waiting = list(inputs)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                given = waiting.pop(0)
                self._known[node] = input_node(given, node.meta["val"].dtype) if isinstance(given, str) else given
            elif node.op == "get_attr":
                self._known[node] = self._view(getattr(self.graph, node.target))
            elif node.op == "output":
                found = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
                return tuple(self._scalar(self._known[x], self._where(x)) if isinstance(x, torch.fx.Node) else x for x in found) or (None,)
            else:
                self._known[node] = self._operation(node)
        raise AssertionError("a graph has an output")

    def _view(self, x: torch.Tensor) -> Any:
        found = next((place for place, known in enumerate(self.captured) if known is x), None)
        if found is None:
            found = len(self.captured)
            self.captured.append(x)
        return found, (), False

    def _detached(self, x: Any) -> Any:
        """A value as a constant of differentiation, where it would have a gradient; a captured tensor with this mark."""
        if isinstance(x, tuple):
            return *x[:2], True
        if not self.trained or not isinstance(x, Node) or x.dtype not in FLOATS:
            return x
        learned = any(node.kind == "load" and self.captured[node.captured].requires_grad for node in ordered([x]))
        if not learned and "score" not in x.reads:
            return x
        return Node("operation", x.dtype, aten.detach.default, arguments=(x,), line=x.line, reads=x.reads)

    def _where(self, node: torch.fx.Node) -> str:
        return str(node.meta.get(LINE, ""))

    def _scalar(self, x: Any, where: str) -> Any:
        """A node for a value: a captured tensor with all its indices becomes a load."""
        if not isinstance(x, tuple):
            return x
        place, indices, detached = x
        tensor = self.captured[place]
        if tensor.dim() != len(indices):
            raise Unsupported(f"{self.name} uses a captured tensor of {tensor.dim()} dimensions with {len(indices)} indices ({where})")
        if tensor.dtype not in TYPES:
            raise Unsupported(f"{self.name} captures a tensor of {tensor.dtype} ({where})")
        reads = frozenset[str]().union(*(index.reads for index in indices))
        load = Node("load", tensor.dtype, captured=place, arguments=indices, line=where, reads=reads)
        return self._detached(load) if detached else load

    def _in_place(self, node: Any, where: str, name: str) -> Any:
        """The new value of a function's own intermediate result, which later operations see under both names."""
        changed = node.args[0] if node.args else None
        if not isinstance(changed, torch.fx.Node) or isinstance(self._known[changed], tuple):
            raise Untraceable(f"{self.name} changes a captured tensor by {name} ({where}): it must return a value and change nothing")
        without = getattr(aten, node.target.__name__.partition(".")[0].removesuffix("_"), None)
        overload = node.target._overloadname
        views = changed.target in SAME or any(user.target in SAME for user in changed.users)
        if without is None or overload not in without.overloads() or views:
            raise Unsupported(f"{self.name} uses {name} ({where}), which kernels don't have")
        self._known[changed] = self._operation(node, getattr(without, overload))
        return self._known[changed]

    def _operation(self, node: Any, instead: Any = None) -> Any:
        found = self._computed(node, instead)
        unrecorded = node.meta.get(UNRECORDED, False) or node.target is aten.detach.default
        return self._detached(found) if unrecorded else found

    def _computed(self, node: Any, instead: Any) -> Any:
        target: Any
        target, where, name = instead or NAMED_ALIKE.get(str(node.target), node.target), self._where(node), str(node.target)
        if target in _VALUE_READ:
            raise Untraceable(
                f"{self.name} reads a tensor's value by {name} ({where}): branch by torch.where, and convert nothing to numbers"
            )
        schema = getattr(target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return self._in_place(node, where, name)
        given = [self._known[x] if isinstance(x, torch.fx.Node) else x for x in node.args]
        if target is aten.index.Tensor and isinstance(given[0], tuple):
            place, before, detached = given[0]
            return place, (*before, *(self._scalar(self._known[x], where) for x in node.args[1])), detached
        if target in SAME and isinstance(given[0], tuple):
            if self.captured[given[0][0]].shape[len(given[0][1]) :] != node.meta["val"].shape:
                raise Unsupported(f"{self.name} reshapes a captured tensor ({where})")
            return given[0]
        given = [self._scalar(x, where) for x in given]
        keywords = {key: self._scalar(self._known[x], where) if isinstance(x, torch.fx.Node) else x for key, x in node.kwargs.items()}
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim():
            raise Unsupported(f"{self.name} uses {name}, whose result is no scalar ({where})")
        if value.dtype not in TYPES:
            raise Unsupported(f"{self.name} computes in {value.dtype} by {name} ({where})")
        if target in SAME:
            return given[0]
        if target in FILLS:
            # As the dtype has it: whole, or rounded.
            return Node("number", value.dtype, arguments=(torch.full((), FILLS[target](given), dtype=value.dtype).item(),), line=where)
        if target not in POINTWISE:
            raise Unsupported(f"{self.name} uses {name} ({where}), which kernels don't have")
        if target.overloadpacket in (aten.add, aten.sub, aten.rsub) and len(given) > 2:
            keywords["alpha"] = given.pop()
        operands = [x for x in (*given, *keywords.values()) if isinstance(x, Node)]
        reads = frozenset[str]().union(*(x.reads for x in operands))
        return Node("operation", value.dtype, target, arguments=tuple(given), keywords=keywords, line=where, reads=reads)


def input_node(name: str, dtype: torch.dtype) -> Node:
    """The node of an input."""
    return Node("input", dtype, name=name, reads=frozenset((name,)))
