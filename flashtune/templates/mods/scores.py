"""Known structures of a traced score: a factor, a soft cap and ALiBi, for which there are kernels of their own."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashtune.templates.mods import structure
from flashtune.templates.mods.graph import INDICES, INTEGERS, Node, loads, numbered, ordered

aten = torch.ops.aten

Heads = tuple[int, ...]
"""Sorted numbers of the values, each constant within a batch and a head, that a product multiplies."""
Form = dict[tuple[Heads, Any], float]
"""A sum of products: the coefficient of each `Heads` and basis (1, "score", "q", "k", "distance" or ("tanh", factor))."""

MOST_TERMS = 16
"""Most terms of a sum: known structures have few."""


@dataclass(frozen=True, slots=True)
class Score:
    """softcap tanh(factor score / softcap) - slope |q - k|, without the cap where it is 0; the slope is the sum of coefficients times
    products of values of a batch and a head."""

    factor: float = 1.0
    softcap: float = 0.0
    slope: tuple[tuple[float, tuple[Node, ...]], ...] = ()

    def words(self, scale: float) -> dict[str, float]:
        """Arguments of `attention` that mean the same beside ALiBi, of scores with this scale."""
        return {"scale": scale * self.factor} | ({"softcap": self.softcap} if self.softcap else {})

    @property
    def by_batch(self) -> bool:
        """True if slopes differ between batches, which are packed sequences' numbers."""
        return any("b" in x.reads for _, values in self.slope for x in values)


def known_structure(score: Node | None, mask: Node | None) -> tuple[structure.Band, Score] | None:
    """The band that a mask is, and the structure of the score in it; None where either isn't known."""
    band = (None, None) if mask is None else structure.band(mask)
    known = Score() if score is None else None if band is None else known_score(score, band)
    return None if band is None or known is None else (band, known)


def known_score(score: Node, band: structure.Band) -> Score | None:
    """The structure of a score where a query sees a band (left, right) of keys; None for any other score, and for one with a derivative of
    its own.

    Up to float32's rounding it is equal: graphs are compared as sums of products, whatever their spelling.
    """
    if score.own_gradient is not None:
        return None
    reader = _Reader()
    form = reader.form(score)
    if form is None:
        return None
    base = {basis: form.pop(((), basis)) for heads, basis in list(form) if not heads and basis not in ("q", "k", "distance")}
    if len(base) != 1:
        return None
    [(basis, factor)] = base.items()
    softcap = 0.0
    if isinstance(basis, tuple):
        softcap, factor = abs(factor), factor * basis[1]
    slope = _slope(form, band)
    if factor <= 0 or basis == 1 or slope is None:
        return None
    return Score(factor, softcap, tuple((number, tuple(reader.heads[key] for key in keys)) for keys, number in slope.items()))


def _slope(form: Form, band: structure.Band) -> dict[Heads, float] | None:
    """Coefficients of -|q - k|, which is k - q where no key is behind its query; None where other terms are left."""
    found: dict[Heads, float] = {}
    for heads in dict.fromkeys(heads for heads, _ in form):
        terms = {basis: number for (keys, basis), number in form.items() if keys == heads}
        ahead = terms.pop("k", 0.0)
        slope = -terms.pop("distance", 0.0)
        if terms.pop("q", 0.0) != -ahead or terms or (ahead and 0 not in band):
            return None
        found[heads] = slope + (ahead if band[1] == 0 else -ahead)
    return {heads: number for heads, number in found.items() if number}


@dataclass
class _Reader:
    """Sums of products of nodes, and the values of a head by their numbers."""

    heads: dict[int, Node] = field(default_factory=dict)
    _numbers: dict[Node, int] = field(default_factory=dict)
    _forms: dict[Node, Form | None] = field(default_factory=dict)

    def form(self, output: Node) -> Form | None:
        """The node as a sum of products; None where it has terms of other kinds."""
        self._numbers = numbered([output])
        for node in self._numbers:
            self._forms[node] = self._of(node)
        return self._forms[output]

    def _of(self, node: Node) -> Form | None:
        if node.kind == "number":
            return _number(node.arguments[0])
        if node.kind == "input" and node.name in ("score", "q_idx", "kv_idx"):
            return {((), {"score": "score", "q_idx": "q", "kv_idx": "k"}[node.name]): 1.0}
        found = None
        # Integers of a head may overflow, so that the order of their products counts.
        whole = node.dtype in (torch.int32, torch.int64) and not node.reads <= {"b", "h"}
        if node.kind == "operation" and (node.dtype is torch.float32 or whole):
            found = self._operation(node)
        if found is None and node.reads <= {"b", "h"} and all(map(_by_head, loads([node]))):
            self.heads[self._numbers[node]] = node
            return {((self._numbers[node],), 1): 1.0}
        return found if found is None or len(found) <= MOST_TERMS else None

    def _operation(self, node: Node) -> Form | None:
        packet = node.target.overloadpacket
        given = [self._forms[x] if isinstance(x, Node) else _number(x) for x in node.arguments]
        if any(x is None for x in given):
            return None
        a, b = given[0], given[-1]
        assert a is not None and b is not None
        if packet is aten._to_copy:
            source = node.arguments[0]
            return a if node.dtype is torch.float32 or (isinstance(source, Node) and source.dtype in INTEGERS) else None
        if packet is aten.neg:
            return _times(a, _number(-1))
        if packet in (aten.add, aten.sub, aten.rsub) and len(given) == 2:
            alpha = node.keywords.get("alpha", 1)
            first, second = (b, a) if packet is aten.rsub else (a, b)
            return None if packet is aten.rsub and alpha != 1 else _plus(first, second, alpha if packet is aten.add else -alpha)
        if packet is aten.mul:
            return _times(a, b)
        if packet is aten.div and not node.keywords.get("rounding_mode") and list(b) == [((), 1)] and b[(), 1]:
            return _times(a, _number(1 / b[(), 1]))
        if packet is aten.abs:
            return _distance(a)
        if packet in (aten.tanh, aten.sigmoid) and list(a) == [((), "score")]:
            return _tanh(a[(), "score"]) if packet is aten.tanh else _sigmoid(a[(), "score"])
        return None


def _by_head(load: Node) -> bool:
    """True for a load at places of the batch and the head, of which it is known that they are in the tensor."""
    return all(x.kind == "input" if isinstance(x, Node) else isinstance(x, int) for x in load.arguments)


def _number(x: Any) -> Form | None:
    real = isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
    return {((), 1): float(x)} if real else None


def _plus(a: Form, b: Form, factor: float) -> Form:
    found = {key: a.get(key, 0.0) + factor * b.get(key, 0.0) for key in {**a, **b}}
    return {key: number for key, number in found.items() if number}


def _times(a: Form, b: Form | None) -> Form | None:
    """The product, of which one factor belongs to a head."""
    if b is None or (not all(basis == 1 for _, basis in a) and not all(basis == 1 for _, basis in b)):
        return None
    found: Form = {}
    for (one, of_a), x in a.items():
        for (other, of_b), y in b.items():
            key = tuple(sorted((*one, *other))), of_a if of_b == 1 else of_b
            found[key] = found.get(key, 0.0) + x * y
    return {key: number for key, number in found.items() if number}


def _distance(a: Form) -> Form | None:
    step = a.get(((), "q"), 0.0)
    return {((), "distance"): abs(step)} if a == {((), "q"): step, ((), "k"): -step} else None


def _tanh(factor: float) -> Form:
    return {((), ("tanh", abs(factor))): math.copysign(1.0, factor)}


def _sigmoid(factor: float) -> Form:
    """1 / (1 + exp(-x)) is half of tanh(x / 2), and 1/2."""
    return _plus({((), 1): 0.5}, _tanh(factor / 2), 0.5)


def slopes_of(score: Score, captured: Sequence[torch.Tensor], batch: int, heads: int, device: torch.device) -> torch.Tensor | None:
    """ALiBi's slopes, float32 (Hq,) or (B, Hq), of a call's captured tensors; None without ALiBi."""
    if not score.slope:
        return None
    [(number, values), *others] = score.slope
    if not others and number == 1.0 and len(values) == 1 and values[0].kind == "load":
        tensor = captured[values[0].captured]
        names = [x.name if isinstance(x, Node) else x for x in values[0].arguments]
        if tensor.dtype is torch.float32 and names in (["h"], ["b", "h"]):
            return tensor[..., :heads] if len(names) == 1 else tensor[:batch, :heads]
    # Of the functions' dtype, and all with two dimensions, since a tensor without any counts less for a result's dtype.
    b, h = (torch.arange(x, dtype=torch.int32, device=device) for x in (batch, heads))
    indices = {"b": b[:, None], "h": h[None, :]}
    total = torch.zeros((batch, heads), device=device)
    for number, values in score.slope:
        product = torch.full((), number, device=device)
        for value in values:
            product = product * _evaluated(value, captured, indices).float()
        total = total + product
    return total


def as_function(output: Node, captured: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A traced function as a caller's own was: of scalars, by position."""

    def function(*given: torch.Tensor) -> torch.Tensor:
        if output.own_gradient is not None:
            found: torch.Tensor = _WithOwnGradient.apply(output, captured, *given)  # type: ignore[no-untyped-call]
            return found
        inputs: dict[str, torch.Tensor] = dict(zip(INDICES if len(given) == len(INDICES) else ("score", *INDICES), given, strict=True))
        found = _evaluated(output, captured, inputs)
        return found.reshape(())

    return function


class _WithOwnGradient(torch.autograd.Function):
    """A traced score, differentiated by its own gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Node, captured: Sequence[torch.Tensor], score: torch.Tensor, *places: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The score of one pair."""
        named: dict[str, torch.Tensor] = dict(zip(("score", *INDICES), (score, *places), strict=True))
        found: torch.Tensor = _evaluated(output, captured, named)
        return found.reshape(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Keep the inputs."""
        ctx.of, ctx.captured = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient of the score alone."""
        named: dict[str, torch.Tensor] = dict(zip(("score", *INDICES, "grad"), (*ctx.saved_tensors, grad), strict=True))
        found: torch.Tensor = _evaluated(ctx.of.own_gradient, ctx.captured, named)
        return None, None, found.reshape(()), *(None,) * len(INDICES)


def _evaluated(output: Node, captured: Sequence[torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> Any:
    found: dict[Node, Any] = {}
    for node in ordered([output]):
        given = [found[x] if isinstance(x, Node) else x for x in node.arguments]
        keywords = {name: found[x] if isinstance(x, Node) else x for name, x in node.keywords.items() if name != "device"}
        if node.kind == "input":
            found[node] = inputs[node.name]
        elif node.kind == "number":
            found[node] = torch.full((1, 1), given[0], dtype=node.dtype, device=inputs["b"].device)
        elif node.kind == "load":
            loaded = captured[node.captured][tuple(given)]
            found[node] = loaded if loaded.dim() else loaded[None, None]
        else:
            found[node] = node.target(*given, **keywords)
    return found[output]
