"""Tracing of a user's `score_mod` or `mask_mod` to a graph of scalar operations (torch.fx.experimental.proxy_tensor.make_fx)."""

import linecache
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flashtune.core.errors import InputError
from flashtune.templates.mods.graph import FLOATS, INDICES, INTEGERS, MOST_NODES, TYPES, Node, loads, ordered
from flashtune.templates.mods.operations import DECOMPOSED, FILLS, POINTWISE, SAME

aten = torch.ops.aten

_LINE = "line of the function"
"""Key of a traced operation's line."""

_VALUE_READ = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default)


class Untraceable(InputError):
    """A function that no kernel can express and FlexAttention can't either, with the operation and the line."""


class Unsupported(Exception):
    """A function with an operation that kernels lack; FlexAttention may have it."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A function as a graph: its output, and the captured tensors that it loads from."""

    output: Node
    captured: tuple[torch.Tensor, ...]


class _Indexing(TorchFunctionMode):
    """Indexing by scalar tensors as one operation on the whole tensor, where PyTorch would read the indices' values."""

    def __init__(self, name: str, code: CodeType | None) -> None:
        super().__init__()
        self.name, self.code, self.line = name, code, ""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.line = _line_here(self.code) or self.line
        if func is torch.Tensor.__getitem__:
            return self._noted(self._item(*args))
        if func is torch.Tensor.__setitem__ or (_in_place(func, kwargs) and _captured(args[0] if args else None)):
            raise Untraceable(f"{self.name} changes a captured tensor ({self.line}): it must return a value and change nothing")
        return self._noted(func(*args, **(kwargs or {})))

    def _noted(self, result: Any) -> Any:
        """The result, once the operations that it took have the user's line."""
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        if (tracing := get_proxy_mode()) is not None:
            for node in reversed(tracing.tracer.graph.nodes):
                if _LINE in node.meta:
                    break
                node.meta[_LINE] = self.line
        return result

    def _item(self, x: torch.Tensor, index: Any) -> torch.Tensor:
        places = index if isinstance(index, tuple) else (index,)
        if len(places) > x.dim():
            raise Untraceable(f"{self.name} has {len(places)} indices for a tensor of {x.dim()} dimensions ({self.line}): drop some")
        found = []
        for place in places:
            if isinstance(place, int) and not isinstance(place, bool):
                place = torch.full((), place, dtype=torch.int64, device=x.device)
            if not isinstance(place, torch.Tensor) or place.dim() or place.dtype not in INTEGERS:
                raise Unsupported(f"{self.name} indexes with {type(place).__name__} ({self.line}); kernels take integers alone")
            found.append(place)
        result: torch.Tensor = aten.index.Tensor(x, found)
        return result


def _in_place(func: Any, keywords: Mapping[str, Any] | None) -> bool:
    name = getattr(func, "__name__", "")
    augmented = name.startswith("__i") and f"__{name[3:]}" in dir(torch.Tensor)
    return (name.endswith("_") and not name.endswith("__")) or augmented or "out" in (keywords or {})


def _captured(x: Any) -> bool:
    """True for a tensor that the trace didn't make: it would be changed in earnest."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)


def traced(function: Callable[..., Any], *, score: bool, device: torch.device) -> Traced:
    """The graph of a `score_mod` (with `score`) or a `mask_mod`.

    Raises Untraceable where the function has side effects, branches on values or returns no scalar, and Unsupported where it has an
    operation that kernels lack.
    """
    name = getattr(function, "__name__", type(function).__name__)
    inputs = [torch.zeros((), device=device)] * score + [torch.zeros((), dtype=torch.int32, device=device) for _ in INDICES]
    # make_fx counts parameters with defaults and a method's `self`, too.
    called = (lambda s, b, h, q, k: function(s, b, h, q, k)) if score else (lambda b, h, q, k: function(b, h, q, k))
    mode = _Indexing(name, getattr(function, "__code__", None))
    # Imported here, since it brings the compiler.
    from torch._decomp import get_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.no_grad(), mode:
            table: Any = get_decompositions(DECOMPOSED)
            graph = make_fx(called, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    except (InputError, Unsupported):
        raise
    except Exception as error:
        raise Untraceable(_reason(name, mode, error)) from None
    read = _Reader(name, graph)
    output = read.all(["score"] * score + list(INDICES))[0]
    wanted = "a bool" if not score else "a floating-point number"
    if not isinstance(output, Node) or (output.dtype is not torch.bool if not score else output.dtype not in FLOATS):
        raise Untraceable(f"{name} returns {'no tensor' if not isinstance(output, Node) else output.dtype}: it must return {wanted}")
    return Traced(output, tuple(read.captured))


def _reason(name: str, mode: _Indexing, error: Exception) -> str:
    here, file = mode.line, None if mode.code is None else mode.code.co_filename
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == file:
            here = f"line {frame.lineno}: {frame.line}" if frame.line else f"line {frame.lineno}"
            break
    kind = type(error).__name__
    if "DataDependent" in kind or "trying to get a value out of" in str(error) or "data-dependent" in str(error):
        return f"{name} branches on or converts a tensor's value ({here}): use torch.where and operations on tensors"
    said = next((line for line in str(error).splitlines() if line.strip()), "")
    where = f" ({here})" if here else ""
    return f"{name} can't be traced{where}: {kind}: {said[:200]}"


def _line_here(code: CodeType | None) -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if code is not None and frame.f_code is code:
            return f"line {frame.f_lineno}: {linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}"
        frame = frame.f_back
    return ""


class _Reader:
    """Conversion of a traced graph to nodes."""

    def __init__(self, name: str, graph: torch.fx.GraphModule) -> None:
        self.name, self.graph, self.captured = name, graph, list[torch.Tensor]()
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
                return tuple(self._scalar(self._known[x], self._where(x)) if isinstance(x, torch.fx.Node) else x for x in found)
            else:
                self._known[node] = self._operation(node)
        raise AssertionError("a graph has an output")

    def _view(self, x: torch.Tensor) -> Any:
        found = next((place for place, known in enumerate(self.captured) if known is x), None)
        if found is None:
            found = len(self.captured)
            self.captured.append(x)
        return found, ()

    def _where(self, node: torch.fx.Node) -> str:
        return str(node.meta.get(_LINE, ""))

    def _scalar(self, x: Any, where: str) -> Any:
        """A node for a value: a captured tensor with all its indices becomes a load."""
        if not isinstance(x, tuple):
            return x
        place, indices = x
        tensor = self.captured[place]
        if tensor.dim() != len(indices):
            raise Unsupported(f"{self.name} uses a captured tensor of {tensor.dim()} dimensions with {len(indices)} indices ({where})")
        if tensor.dtype not in TYPES:
            raise Unsupported(f"{self.name} captures a tensor of {tensor.dtype} ({where})")
        reads = frozenset[str]().union(*(index.reads for index in indices))
        return Node("load", tensor.dtype, captured=place, arguments=indices, line=where, reads=reads)

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
        target, where, name = instead or node.target, self._where(node), str(node.target)
        if target in _VALUE_READ:
            raise Untraceable(
                f"{self.name} reads a tensor's value by {name} ({where}): branch by torch.where, and convert nothing to numbers"
            )
        schema = getattr(target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return self._in_place(node, where, name)
        given = [self._known[x] if isinstance(x, torch.fx.Node) else x for x in node.args]
        if target is aten.index.Tensor and isinstance(given[0], tuple):
            place, before = given[0]
            return place, (*before, *(self._scalar(self._known[x], where) for x in node.args[1]))
        if target in SAME and isinstance(given[0], tuple):
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
        operands = [x for x in (*given, *keywords.values()) if isinstance(x, Node)]
        reads = frozenset[str]().union(*(x.reads for x in operands))
        return Node("operation", value.dtype, target, arguments=tuple(given), keywords=keywords, line=where, reads=reads)


def input_node(name: str, dtype: torch.dtype) -> Node:
    """The node of an input."""
    return Node("input", dtype, name=name, reads=frozenset((name,)))


def gradients(output: Node) -> tuple[Node, list[tuple[Node, Node]]]:
    """The gradient of a score, by autograd of its graph, and those of loads of floating-point numbers, as (load, gradient).

    All are multiples of the input `grad`, the gradient of the output. A score that the output doesn't depend on has the gradient 0.
    """
    order = ordered([output])
    found = {node.name: node for node in order if node.kind == "input"}
    score = found.get("score", input_node("score", torch.float32))
    leaves = [score, *(node for node in loads([output]) if node.dtype in FLOATS)]
    others = [node for node in order if node.kind in ("input", "load") and node not in leaves]

    def backward(grad: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        known = dict(zip([*leaves, *others], values, strict=True))
        wanted = [known[node].requires_grad_() for node in leaves]
        with torch.enable_grad():
            for node in order:
                if node not in known:
                    known[node] = _evaluated(node, known)
            if not known[output].requires_grad:
                return [torch.zeros_like(x) for x in wanted]
            grads = torch.autograd.grad(known[output], wanted, grad, allow_unused=True)
        return [torch.zeros_like(x) if y is None else y for x, y in zip(wanted, grads, strict=True)]

    from torch._decomp import get_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    table: Any = get_decompositions(DECOMPOSED)
    values = [torch.ones((), dtype=node.dtype) for node in [*leaves, *others]]
    graph = make_fx(backward, decomposition_table=table, tracing_mode="fake")(torch.ones((), dtype=output.dtype), *values)
    read = _Reader("the gradient of score_mod", graph)
    of_score, *of_loads = read.all(["grad", *leaves, *others])
    return of_score, list(zip(leaves[1:], of_loads, strict=True))


def _evaluated(node: Node, known: dict[Node, torch.Tensor]) -> torch.Tensor:
    if node.kind == "number":
        return torch.full((), node.arguments[0], dtype=node.dtype)
    given = [known[x] if isinstance(x, Node) else x for x in node.arguments]
    keywords = {name: known[x] if isinstance(x, Node) else x for name, x in node.keywords.items()}
    found: torch.Tensor = node.target(*given, **{name: torch.device("cpu") if name == "device" else x for name, x in keywords.items()})
    return found


def traced_together(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, device: torch.device
) -> tuple[Node | None, Node | None, tuple[torch.Tensor, ...]]:
    """The graphs of both functions over one list of captured tensors, and that list."""
    captured: list[torch.Tensor] = []
    outputs: list[Node | None] = []
    for function, score in ((score_mod, True), (mask_mod, False)):
        part = None if function is None else traced(function, score=score, device=device)
        places = []
        for x in () if part is None else part.captured:
            at = next((place for place, y in enumerate(captured) if y is x), len(captured))
            captured += [x] * (at == len(captured))
            places.append(at)
        outputs.append(None if part is None else recaptured(part.output, places))
    return outputs[0], outputs[1], tuple(captured)


def at_pairs(function: Callable[..., Any], score: torch.Tensor | None, *places: torch.Tensor) -> torch.Tensor:
    """The function itself at all pairs of queries and keys: (rows, columns), for scores of this shape or, of a mask_mod, None.

    `places` are int32: the batch and the head, scalars, and the numbers of the queries (rows,) and of the keys (columns,).
    """
    before = () if score is None else (score,)
    first = (0,) * len(before)
    over_keys = torch.vmap(lambda *given: function(*given), in_dims=(*first, None, None, None, 0))
    with _Indexing(getattr(function, "__name__", "a function"), None):
        found: torch.Tensor = torch.vmap(over_keys, in_dims=(*first, None, None, 0, None))(*before, *places)
    return found


def recaptured(output: Node, places: Sequence[int]) -> Node:
    """The graph with its captured tensors at other places, for functions that share a kernel's list of them."""
    made: dict[Node, Node] = {}
    for node in ordered([output]):
        given = tuple(made.get(x, x) if isinstance(x, Node) else x for x in node.arguments)
        keywords = {name: made.get(x, x) if isinstance(x, Node) else x for name, x in node.keywords.items()}
        moved = places[node.captured] if node.kind == "load" else node.captured
        made[node] = replace(node, arguments=given, keywords=keywords, captured=moved)
    return made[output]
