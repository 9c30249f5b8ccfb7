"""A contract per pass: which tensors it reads and writes, what is right, how close is close enough, and what it costs.

The forward is the value `FORWARD`, the gradients of its inputs are `BACKWARD`. Whatever handles a pass (inputs, checks, times, the cost
model) looks it up by a problem's direction (decision 0016). Nothing here needs torch but to run.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flashtune.core.band import Band
from flashtune.core.config import Direction, KernelSpec
from flashtune.core.dtypes import ITEMSIZE, DType, output_dtype
from flashtune.core.tolerances import Bound, tolerance

if TYPE_CHECKING:
    import torch

    from flashtune.core.problem import Problem

PER_HEAD: dict[str, Literal["heads", "kv_heads"]] = {
    "alibi_slopes": "heads",
    "q_descale": "heads",
    "k_descale": "kv_heads",
    "v_descale": "kv_heads",
    "sinks": "heads",
}
"""What callers give per head, by their name for it, and the field of a problem that counts those heads."""

FACTORS = ("q_descale", "k_descale", "v_descale")
"""Those that belong to fp8 inputs; a launch takes them together, as `descale`."""

PER_HEAD_FLAGS = {"alibi_slopes": "alibi"} | {name: name for name in PER_HEAD if name not in (*FACTORS, "alibi_slopes")}
"""The feature that each of the others asks for; a launch calls them as callers do, but for `slopes`."""

Element = Literal["input", "output", "fp32"]
"""The element type of an operand: that of the problem's inputs, of its output, or float32 for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Rows of one head: some of its queries, and for what has a row for each key some of its keys."""

    batch: int
    head: int
    queries: slice = field(default_factory=lambda: slice(None))
    keys: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that every launch of a pass takes. `axes` are the fields of `Problem` that hold its sizes; `title` is for messages.

    `from_forward` marks what the forward wrote of the same problem, and an earlier launch hands on. `repeats` are axes over which it may be
    an expanded view, so that the fewest bytes are those of one.
    """

    name: str
    title: str
    axes: tuple[str, ...]
    element: Element
    written: bool = False
    from_forward: bool = False
    repeats: tuple[str, ...] = ()

    def shape(self, problem: "Problem") -> tuple[int, ...]:
        """Its sizes."""
        return tuple(getattr(problem, axis) for axis in self.axes)

    def dtype(self, problem: "Problem") -> DType:
        """Its element type."""
        types: dict[Element, DType] = {"input": problem.dtype, "output": output_dtype(problem.dtype), "fp32": "fp32"}
        return types[self.element]

    def nbytes(self, problem: "Problem") -> int:
        """What reading or writing all of it once moves."""
        count = ITEMSIZE[self.dtype(problem)]
        for axis, extent in zip(self.axes, self.shape(problem), strict=True):
            count *= 1 if axis in self.repeats else extent
        return count

    def at(self, place: Place, problem: "Problem") -> tuple[int | slice, ...]:
        """The index of this place's rows in the tensor; what has rows for queries has them whole."""
        index: dict[str, int | slice] = {
            "batch": place.batch,
            "heads": place.head,
            "kv_heads": place.head // problem.gqa_ratio,
            "n_q": place.queries,
            "n_kv": slice(None) if "n_q" in self.axes else place.keys,
        }
        return tuple(index.get(axis, slice(None)) for axis in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallParameters:
    """What a launch takes beside its operands, the same for every pass.

    `mask` is a view expanded to (B, Hq, N_q, N_kv); `slopes` (B, Hq) are ALiBi's; `descale` are the factors of q (B, Hq), k and v
    (B, Hkv) that fp8 inputs stand for a multiple of; `sinks` (B, Hq) are logits. `seed` (64 bits) and `offset` fix dropout's mask.
    """

    scale: float
    band: Band
    mask: "torch.Tensor | None" = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    slopes: "torch.Tensor | None" = None
    descale: "tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None" = None
    sinks: "torch.Tensor | None" = None

    def per_head(self) -> "dict[str, torch.Tensor]":
        """What is given per head, by the names of `PER_HEAD`."""
        given = dict(zip(FACTORS, self.descale or (), strict=False))
        given |= {name: getattr(self, _keyword(name)) for name in PER_HEAD_FLAGS}
        return {name: given[name] for name in PER_HEAD if given.get(name) is not None}

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of a rendered module's `launch`, which may leave out what is given per head."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "band"}
        return {name: value for name, value in found.items() if value is not None or name == "mask"} | self.band.keywords()


def per_head_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `CallParameters.per_head`: what is given per head, by the names of `CallParameters`."""
    found = {_keyword(name): given[name] for name in PER_HEAD_FLAGS if name in given}
    factors = tuple(given[name] for name in FACTORS if name in given)
    return found | {"descale": factors} if factors else found


def _keyword(name: str) -> str:
    return "slopes" if name == "alibi_slopes" else name


class Oracle(Protocol):
    """What the written operands, by name, should hold at a place; takes all operands, and computes in float64 unless told otherwise."""

    def __call__(
        self,
        problem: "Problem",
        operands: "Mapping[str, torch.Tensor]",
        parameters: CallParameters,
        place: Place,
        dtype: "torch.dtype | None" = None,
    ) -> "dict[str, torch.Tensor]":
        """Tensors of `dtype`, by name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One direction of attention. `operands` are in the order of a launch's positional arguments.

    `products` names, for each matrix product over the visible pairs, the head size that it runs along or spans.
    `bounds` says for each written operand of a kernel how far it may stray from the oracle.
    """

    operands: tuple[Operand, ...]
    products: tuple[Literal["d", "d_v"], ...]
    oracle: Oracle
    bounds: Callable[[KernelSpec], Mapping[str, Bound]]

    @property
    def written(self) -> tuple[Operand, ...]:
        """The operands that a launch writes."""
        return tuple(operand for operand in self.operands if operand.written)

    def product_sizes(self, problem: "Problem") -> list[int]:
        """The head size of each of `products`."""
        return [problem.d if size == "d" else problem.d_v for size in self.products]

    def flops(self, problem: "Problem") -> int:
        """Floating-point operations of the matrix products over the visible pairs, two for each pair and place in a head.

        The convention of the FlashAttention papers; an exactly causal square counts N (N + 1) / 2 pairs.
        """
        return 2 * problem.batch * problem.heads * problem.visible_pairs() * sum(self.product_sizes(problem))

    def io_bytes(self, problem: "Problem") -> int:
        """The fewest bytes a fused kernel moves: every operand once."""
        return sum(operand.nbytes(problem) for operand in self.operands)


def _attended(
    problem: "Problem",
    tensors: "tuple[torch.Tensor, torch.Tensor, torch.Tensor]",
    parameters: CallParameters,
    batch: int,
    head: int,
    first: int,
    dtype: "torch.dtype | None" = None,
    score_leaf: "torch.Tensor | None" = None,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Output and LSE of one head's rows from `first` on, by the reference; `tensors` are these rows of q, and the head's k and v.

    `score_leaf` (rows, N_kv), all 0, is added to the scores, and gets the gradient that a bias has.
    """
    import torch

    from flashtune.core import reference

    q, k, v = (x[None, None] for x in tensors)
    rows = slice(first, first + q.shape[2])
    head_index, kv_index = (slice(i, i + 1) for i in (head, head // problem.gqa_ratio))
    batch_index = slice(batch, batch + 1)
    keep = None
    if problem.features.dropout:
        index = batch * problem.heads + head
        seed, offset, p = parameters.seed, parameters.offset, parameters.dropout_p
        keep = reference.dropout_keep_rows(seed, offset, index, first, q.shape[2], problem.n_kv, p, q.device)
    mask = parameters.mask
    indices = {"heads": head_index, "kv_heads": kv_index}
    per_head = {name: x[batch_index, indices[PER_HEAD[name]]] for name, x in parameters.per_head().items()}
    here = None if mask is None else mask[batch_index, head_index, rows]
    if score_leaf is not None:
        here = reference.joined(score_leaf, here)
    out, lse = reference.attention(
        q,
        k,
        v,
        mask=here,
        scale=parameters.scale,
        band=parameters.band.from_row(first),
        softcap=parameters.softcap,
        keep=keep,
        dropout_p=parameters.dropout_p,
        dtype=dtype or torch.float64,
        **per_head_words(per_head),
    )
    return out[0, 0], lse[0, 0]


ORACLE_SCORES = 2**25
"""Scores that a forward's oracle holds at a time, in some ten tensors."""


def _forward_oracle(
    problem: "Problem",
    operands: "Mapping[str, torch.Tensor]",
    parameters: CallParameters,
    place: Place,
    dtype: "torch.dtype | None" = None,
) -> "dict[str, torch.Tensor]":
    import torch

    batch, head, kv_head = place.batch, place.head, place.head // problem.gqa_ratio
    first, stop, _ = place.queries.indices(problem.n_q)
    k, v = (operands[name][batch, kv_head] for name in ("k", "v"))
    step = max(1, ORACLE_SCORES // problem.n_kv)
    parts = [
        _attended(problem, (operands["q"][batch, head, start : min(start + step, stop)], k, v), parameters, batch, head, start, dtype)
        for start in range(first, stop, step)
    ]
    return {name: torch.cat(rows) for name, rows in zip(("out", "lse"), zip(*parts, strict=True), strict=True)}


def _forward_bounds(spec: KernelSpec) -> dict[str, Bound]:
    found = tolerance(spec)
    return {
        "out": Bound(atol=found.atol, rtol=found.rtol, relative_norm=found.relative_norm),
        "lse": Bound(atol=found.lse_atol),
    }


FORWARD = Pass(
    operands=(
        Operand(name="q", title="query", axes=("batch", "heads", "n_q", "d"), element="input"),
        Operand(name="k", title="key", axes=("batch", "kv_heads", "n_kv", "d"), element="input"),
        Operand(name="v", title="value", axes=("batch", "kv_heads", "n_kv", "d_v"), element="input"),
        Operand(name="out", title="output", axes=("batch", "heads", "n_q", "d_v"), element="output", written=True),
        Operand(name="lse", title="LSE", axes=("batch", "heads", "n_q"), element="fp32", written=True),
    ),
    products=("d", "d_v"),
    oracle=_forward_oracle,
    bounds=_forward_bounds,
)

ORACLE_ROWS = 512
"""Query rows whose scores a backward's oracle holds at a time, in some ten tensors of float64."""


def _backward_oracle(
    problem: "Problem",
    operands: "Mapping[str, torch.Tensor]",
    parameters: CallParameters,
    place: Place,
    dtype: "torch.dtype | None" = None,
) -> "dict[str, torch.Tensor]":
    """Gradients by torch's autograd through the reference, some rows at a time; those of keys add up all rows of all heads of a group.

    They are those at the output that was handed on: rounded by the forward, it moves delta = rowsum(dO * O) as a gradient of the LSE would,
    which is as much as the tolerances allow where scores are large (BACKWARD reads O, so that this is no error of its own).
    """
    import torch

    batch, kv_head, ratio = place.batch, place.head // problem.gqa_ratio, problem.gqa_ratio
    first, stop, _ = place.queries.indices(problem.n_q)
    kind = dtype or torch.float64
    k, v = (operands[name][batch, kv_head].to(kind) for name in ("k", "v"))
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)

    def add(head: int, start: int, end: int) -> "torch.Tensor":
        """Adds what these rows give to the keys; returns the gradient of the rows themselves."""
        rows = batch, head, slice(start, end)
        leaves = [x.detach().requires_grad_() for x in (operands["q"][rows].to(kind), k, v)]
        with torch.enable_grad():
            out, lse = _attended(problem, (leaves[0], leaves[1], leaves[2]), parameters, batch, head, start, dtype)
            dout = operands["dout"][rows].to(kind)
            dlse = operands["dlse"][rows] + ((out.detach() - operands["out"][rows]) * dout).sum(-1)
            # The LSE of a row that sees nothing is a constant.
            loss = (out * dout).sum() + (lse * dlse)[torch.isfinite(lse)].sum()
        found = torch.autograd.grad(loss, leaves)
        dk.add_(found[1])
        dv.add_(found[2])
        return found[0]

    edges = sorted({0, first, stop, problem.n_q, *range(0, problem.n_q, ORACLE_ROWS)})
    for head in range(kv_head * ratio, (kv_head + 1) * ratio):
        for start, end in pairwise(edges):
            rows = add(head, start, end)
            if head == place.head and first <= start < stop:
                dq.append(rows)
    found = {"dq": torch.cat(dq), "dk": dk[place.keys], "dv": dv[place.keys]}
    if "dslopes" in operands:
        found["dslopes"] = torch.cat([_slope_parts(*part) for part in _score_gradients(problem, operands, parameters, place, kind)])
    if "dbias" in operands:
        found["dbias"] = _bias_gradient(problem, operands, parameters, place, kind)
    return found


def _score_gradients(
    problem: "Problem", operands: "Mapping[str, torch.Tensor]", parameters: CallParameters, place: Place, kind: "torch.dtype"
) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    """Gradients of what is added to the scores of these rows, and how far each key is from the diagonal, some rows at a time."""
    import torch

    from flashtune.core import reference

    batch, head, n_kv = place.batch, place.head, problem.n_kv
    first, stop, _ = place.queries.indices(problem.n_q)
    k, v = (operands[name][batch, head // problem.gqa_ratio].to(kind) for name in ("k", "v"))
    for start in range(first, stop, ORACLE_ROWS):
        rows = batch, head, slice(start, min(start + ORACLE_ROWS, stop))
        q, dout = (operands[name][rows].to(kind) for name in ("q", "dout"))
        leaf = q.new_zeros((len(q), n_kv)).requires_grad_()
        with torch.enable_grad():
            out, lse = _attended(problem, (q, k, v), parameters, batch, head, start, kind, leaf)
            dlse = operands["dlse"][rows] + ((out.detach() - operands["out"][rows]) * dout).sum(-1)
            loss = (out * dout).sum() + (lse * dlse)[torch.isfinite(lse)].sum()
        yield torch.autograd.grad(loss, leaf)[0], reference.distances(len(q), n_kv, parameters.band.diagonal + start, q.device).abs()


def _slope_parts(gradients: "torch.Tensor", distances: "torch.Tensor") -> "torch.Tensor":
    return -(gradients * distances).sum(-1)


def _bias_gradient(
    problem: "Problem", operands: "Mapping[str, torch.Tensor]", parameters: CallParameters, place: Place, kind: "torch.dtype"
) -> "torch.Tensor":
    """The gradient of the bias at these rows, summed over the batches, heads, rows and columns that it repeats over."""
    import torch

    over = [stride == 0 and size > 1 for stride, size in zip(operands["dbias"].stride(), operands["dbias"].shape, strict=True)]
    batches = range(problem.batch) if over[0] else (place.batch,)
    heads = range(problem.heads) if over[1] else (place.head,)
    first, stop, _ = place.queries.indices(problem.n_q)
    total = torch.zeros(1 if over[2] else stop - first, problem.n_kv, dtype=kind, device=operands["q"].device)
    for batch, head in product(batches, heads):
        there = replace(place, batch=batch, head=head, queries=slice(None) if over[2] else place.queries)
        parts = (part for part, _ in _score_gradients(problem, operands, parameters, there, kind))
        total += sum(part.sum(0, keepdim=True) for part in parts) if over[2] else torch.cat(list(parts))
    if over[3]:
        total = total.sum(1, keepdim=True)
    return total.expand(stop - first, problem.n_kv)


def _backward_bounds(spec: KernelSpec) -> dict[str, Bound]:
    found = tolerance(spec)
    bound = Bound(atol=found.atol, rtol=found.rtol, relative_norm=found.gradient_norm)
    # Distances weigh what belongs to slopes, so that no number of its own says what is small.
    return dict.fromkeys(("dq", "dk", "dv", "dbias"), bound) | {"dslopes": Bound(atol=math.inf, relative_norm=found.gradient_norm)}


def _read(operand: Operand) -> Operand:
    """What the forward wrote, as an operand of the backward."""
    return replace(operand, written=False, from_forward=True)


BACKWARD = Pass(
    operands=(
        *FORWARD.operands[:3],
        *map(_read, FORWARD.operands[3:]),
        Operand(name="dout", title="output's gradient", axes=("batch", "heads", "n_q", "d_v"), element="output"),
        Operand(name="dlse", title="LSE's gradient", axes=("batch", "heads", "n_q"), element="fp32"),
        Operand(name="dq", title="query's gradient", axes=("batch", "heads", "n_q", "d"), element="input", written=True),
        Operand(name="dk", title="key's gradient", axes=("batch", "kv_heads", "n_kv", "d"), element="input", written=True),
        Operand(name="dv", title="value's gradient", axes=("batch", "kv_heads", "n_kv", "d_v"), element="input", written=True),
    ),
    # S and dP anew, then dV, dK and dQ.
    products=("d", "d_v", "d_v", "d", "d"),
    oracle=_backward_oracle,
    bounds=_backward_bounds,
)

MORE_GRADIENTS = (
    Operand(
        name="dbias", title="bias's gradient", axes=("batch", "heads", "n_q", "n_kv"), element="output", written=True, repeats=("batch",)
    ),
    Operand(name="dslopes", title="rows' parts of the slopes' gradient", axes=("batch", "heads", "n_q"), element="fp32", written=True),
)
"""What a backward writes beside that where it is asked to, by the feature that asks (`flashtune.core.problem.ASKED`).

`dbias` is a view expanded to its sizes, as masks are: with stride 0 where the bias repeats, over which it is the sum. A slope's gradient is
the sum of its rows' parts, which a launch leaves to the caller.
"""


@lru_cache
def backward_with(asked: tuple[str, ...]) -> Pass:
    """`BACKWARD`, with the gradients of `MORE_GRADIENTS` that are asked for."""
    return replace(BACKWARD, operands=(*BACKWARD.operands, *(operand for operand in MORE_GRADIENTS if operand.name in asked)))


PASSES: dict[Direction, Pass] = {"fwd": FORWARD, "bwd": BACKWARD}
"""Every pass by the direction that problems and keys name it with."""
