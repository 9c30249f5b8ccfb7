"""Tracing of a user's `score_mod` or `mask_mod` to a graph of scalar operations (torch.fx.experimental.proxy_tensor.make_fx)."""

import linecache
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flashtune.core.pytorch.private import FakeTensor, decompositions, is_functorch_wrapped_tensor
from flashtune.core.system.errors import InputError
from flashtune.templates.mods.graph import FLOATS, INDICES, INTEGERS, Node, loads, numbered, ordered
from flashtune.templates.mods.operations import DECOMPOSED
from flashtune.templates.mods.reader import LINE, UNRECORDED, Reader, Unsupported, Untraceable, input_node

aten = torch.ops.aten

_TRACING = threading.RLock()
"""Held by the thread that traces: make_fx patches functions of the process."""

_CONVERTED = frozenset(
    (
        "item",
        "tolist",
        "numpy",
        "__int__",
        "__float__",
        "__bool__",
        "__index__",
        "__complex__",
        "__array__",
        "equal",
        "allclose",
        "is_nonzero",
    )
)
"""Names of PyTorch's functions that read a tensor's value into Python."""

_OWN_GRADIENTS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "grad", "backward"))
"""Names of PyTorch's functions by which a function changes gradients or computes some itself."""


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
        self.differentiates = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.line = self._line_here() or self.line
        if _tracing() is not None and any(isinstance(x, torch.Tensor) and is_functorch_wrapped_tensor(x) for x in args):
            raise Unsupported(f"{self.name} uses a transform of torch.func ({self.line})")
        if func is torch.Tensor.__getitem__:
            return self._noted(self._item(*args))
        called = getattr(func, "__name__", "")
        if called in _OWN_GRADIENTS and _tracing() is not None and not self.differentiates:
            raise Unsupported(f"{self.name} has gradients of its own by {called} ({self.line}), which kernels don't have")
        if called in _CONVERTED and any(map(_captured, args)):
            raise Untraceable(
                f"{self.name} converts a captured tensor's value ({self.line}): use operations on tensors, or convert it before"
            )
        if func is torch.Tensor.__setitem__ or (_in_place(func, kwargs) and _captured(args[0] if args else None)):
            raise Untraceable(f"{self.name} changes a captured tensor ({self.line}): it must return a value and change nothing")
        return self._noted(func(*args, **(kwargs or {})))

    def _noted(self, result: Any) -> Any:
        """The result, once the operations that it took have the user's line."""
        if (tracing := _tracing()) is not None:
            for node in reversed(tracing.tracer.graph.nodes):
                if LINE in node.meta:
                    break
                node.meta[LINE], node.meta[UNRECORDED] = self.line, not torch.is_grad_enabled()
        return result

    def _line_here(self) -> str:
        """The line of the function that is being traced, where it is on the stack."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if self.code is not None and frame.f_code is self.code:
                return f"line {frame.f_lineno}: {linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}"
            frame = frame.f_back
        return ""

    def _item(self, x: torch.Tensor, index: Any) -> torch.Tensor:
        places = index if isinstance(index, tuple) else (index,)
        if any(place is None or place is Ellipsis for place in places):
            without = tuple(place for place in places if place is not Ellipsis)
            if None in without or len(places) - len(without) != 1 or len(without) != x.dim():
                raise Unsupported(f"{self.name} indexes with {index} ({self.line}); kernels take integers alone")
            places = without
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


def _tracing() -> Any:
    """PyTorch's mode of the trace that is under way; None where a function is only called."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode()


def _in_place(func: Any, keywords: Mapping[str, Any] | None) -> bool:
    name = getattr(func, "__name__", "")
    augmented = name.startswith("__i") and f"__{name[3:]}" in dir(torch.Tensor)
    return (name.endswith("_") and not name.endswith("__")) or augmented or "out" in (keywords or {})


def _captured(x: Any) -> bool:
    """True for a tensor that the trace didn't make: it would be changed in earnest."""
    return isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)


def traced(function: Callable[..., Any], *, score: bool, device: torch.device) -> Traced:
    """The graph of a `score_mod` (with `score`) or a `mask_mod`.

    Raises Untraceable where the function has side effects, branches on values or returns no scalar, and Unsupported where it has an
    operation that kernels lack.
    """
    # As the wrapper that torch.compile makes has it.
    function = getattr(function, "_torchdynamo_orig_callable", function)
    name = getattr(function, "__name__", type(function).__name__)
    inputs = [torch.zeros((), dtype=torch.int32, device=device) for _ in INDICES]
    if score:
        # A result of autograd, and no leaf, which nothing may change in place.
        inputs.insert(0, torch.zeros((), dtype=torch.float32, device=device, requires_grad=True).clone())

    own: str | None = None

    # make_fx counts parameters with defaults and a method's `self`, too.
    def evaluated(given: tuple[torch.Tensor, ...]) -> Any:
        nonlocal own
        found = function(*given)
        own = _own_backward(found) if isinstance(found, torch.Tensor) else None
        return found

    called = (lambda s, b, h, q, k: evaluated((s, b, h, q, k))) if score else (lambda b, h, q, k: evaluated((b, h, q, k)))
    mode = _Indexing(name, getattr(function, "__code__", None))
    graph = _graph(called, inputs, name, mode)
    # An autograd.Function computes its forward without gradients, which then are its own.
    read = Reader(name, graph, trained=score and own is None)
    output, *others = read.all(["score"] * score + list(INDICES))
    if others or not isinstance(output, Node) or (not score and output.dtype is not torch.bool):
        found = f"{1 + len(others)} values" if others else output.dtype if isinstance(output, Node) else "no tensor"
        raise Untraceable(f"{name} returns {found}: it must return {'a number' if score else 'a bool'}")
    if output.dtype not in FLOATS and score:
        words: Any = {"arguments": (output,), "keywords": {"dtype": torch.float32}, "reads": output.reads}
        output = Node("operation", torch.float32, aten._to_copy.default, **words)
    if own is not None and score:
        if any(x.requires_grad for x in read.captured):
            raise Unsupported(f"{name} applies an autograd.Function ({own}) beside captured tensors that are trained")
        own_gradient, [plain] = _own_gradient(function, name, mode, read, inputs[1:]), gradients(output)[:1]
        numbers = numbered([own_gradient, plain])
        # A function that says what autograd would find, for the sake of its own forward, is as any other.
        output = replace(output, own_gradient=None if numbers[own_gradient] == numbers[plain] else own_gradient)
    return Traced(output, tuple(read.captured))


def _graph(called: Callable[..., Any], inputs: Sequence[torch.Tensor], name: str, mode: _Indexing) -> Any:
    """The operations of a function, as make_fx records them."""
    # Imported here, since it brings the compiler.
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        # Recording gradients, so that parts under no_grad are told from others.
        with _TRACING, torch.enable_grad(), mode:
            table = decompositions(DECOMPOSED)
            graph = make_fx(called, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    except (InputError, Unsupported):
        raise
    except (Exception, SystemExit) as error:
        raise Untraceable(_reason(name, mode, error)) from None
    for node in reversed(graph.graph.nodes):
        # What autograd keeps for its backward.
        if not node.users and node.target in (aten.detach.default, aten.alias.default):
            graph.graph.erase_node(node)
    return graph


def _own_gradient(function: Callable[..., Any], name: str, mode: _Indexing, read: Reader, places: Sequence[torch.Tensor]) -> Node:
    """The gradient of a score through autograd.Functions, whose own backward is traced; its captured tensors join those of `read`."""

    def backward(grad: torch.Tensor, score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
        leaf = score.detach().requires_grad_()
        # No leaf, as in the forward's trace.
        [found] = torch.autograd.grad(function(leaf.clone(), b, h, q, k), leaf, grad.float(), allow_unused=True)
        return torch.zeros_like(score) if found is None else found

    numbers = [torch.zeros((), dtype=torch.float32, device=places[0].device) for _ in range(2)]
    # The function itself was looked at before.
    mode.differentiates = True
    graph = _graph(backward, [*numbers, *places], name, mode)
    graph.graph.eliminate_dead_code()
    of_gradient = Reader(f"the gradient of {name}", graph)
    of_gradient.captured = read.captured
    [gradient] = of_gradient.all(["grad", "score", *INDICES])
    assert isinstance(gradient, Node), "a gradient is a tensor"
    return gradient


def _own_backward(result: torch.Tensor) -> str | None:
    """The autograd.Function whose backward is in a result's gradient, by the name of its node; None where there is none.

    Some versions of PyTorch have no frame of its `apply`, and one that returns its input has no operation.
    """
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return type(node).__name__
        seen.add(node)
        waiting += [found for found, _ in node.next_functions]
    return None


def _reason(name: str, mode: _Indexing, error: BaseException) -> str:
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


def gradients(output: Node) -> tuple[Node, list[tuple[Node, Node]]]:
    """The gradient of a score, by autograd of its graph, and those of loads of floating-point numbers, as (load, gradient).

    All are multiples of the input `grad`, the gradient of the output. A score that the output doesn't depend on has the gradient 0.
    """
    if output.own_gradient is not None:
        return output.own_gradient, []
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

    from torch.fx.experimental.proxy_tensor import make_fx

    table = decompositions(DECOMPOSED)
    values = [torch.ones((), dtype=node.dtype) for node in [*leaves, *others]]
    with _TRACING:
        graph = make_fx(backward, decomposition_table=table, tracing_mode="fake")(torch.ones((), dtype=output.dtype), *values)
    graph.graph.eliminate_dead_code()
    read = Reader("the gradient of score_mod", graph)
    of_score, *of_loads = read.all(["grad", *leaves, *others])
    return of_score, list(zip(leaves[1:], _widened(of_loads), strict=True))


def _widened(of_loads: Sequence[Node]) -> list[Node]:
    """Gradients of loads in float32: those of many pairs are added up, and rounded to a load's type once."""
    made: dict[Node, Node] = {}
    for node in ordered(of_loads):
        given = tuple(made[x] if isinstance(x, Node) else x for x in node.arguments)
        narrow = "grad" in node.reads and node.dtype in FLOATS and node.dtype is not torch.float32
        same = not narrow and all(x is y for x, y in zip(given, node.arguments, strict=True))
        made[node] = node if same else replace(node, arguments=given, dtype=torch.float32 if narrow else node.dtype)
    return [made[x] for x in of_loads]


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
    name = getattr(function, "__name__", "a function")
    try:
        with _Indexing(name, None):
            found: torch.Tensor = torch.vmap(over_keys, in_dims=(*first, None, None, 0, None))(*before, *places)
    except SystemExit as end:
        raise Untraceable(f"{name} can't be called: SystemExit: {end.code}: it must return a value") from None
    return found


def recaptured(output: Node, places: Sequence[int]) -> Node:
    """The graph with its captured tensors at other places, for functions that share a kernel's list of them."""
    made: dict[Node, Node] = {}
    for node in ordered([output]):
        given = tuple(made.get(x, x) if isinstance(x, Node) else x for x in node.arguments)
        keywords = {name: made.get(x, x) if isinstance(x, Node) else x for name, x in node.keywords.items()}
        moved = places[node.captured] if node.kind == "load" else node.captured
        made[node] = replace(node, arguments=given, keywords=keywords, captured=moved)
    own = None if output.own_gradient is None else recaptured(output.own_gradient, places)
    return replace(made[output], own_gradient=own)
