"""Expected values of each pass's written operands at a place, by the reference; PyTorch is imported at use."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from flashtune.core.problems.parameters import PER_HEAD, CallParameters, per_head_words
from flashtune.core.problems.passes import Place
from flashtune.core.problems.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ORACLE_SCORES = 2**25
"""Scores that a forward's oracle has in memory at a time, in some ten tensors."""

ORACLE_ROWS = 512
"""Query rows whose scores a backward's oracle has in memory at a time, in some ten tensors of float64."""


def _attended(
    problem: Problem,
    tensors: "tuple[Tensor, Tensor, Tensor]",
    parameters: CallParameters,
    batch: int,
    head: int,
    first: int,
    dtype: "torch.dtype | None" = None,
    score_leaf: "Tensor | None" = None,
) -> "tuple[Tensor, Tensor]":
    """Output and LSE of one head's rows from `first` on, by the reference; `tensors` are these rows of q, and the head's k and v.

    `score_leaf` (rows, N_kv), all 0, is added to the scores, and receives a bias's gradient.
    """
    import torch

    from flashtune.core.problems import reference

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
    mods = parameters.mods
    out, lse = reference.attention(
        *(q, k, v),
        keep=keep,
        mods=None if mods is None else lambda x: mods(x[0, 0], batch, head, first)[None, None],
        dtype=dtype or torch.float64,
        **replace(parameters, mask=here, band=parameters.band.from_row(first), **per_head_words(per_head)).formula(),
    )
    return out[0, 0], lse[0, 0]


def expected_at(
    problem: Problem,
    operands: "Mapping[str, Tensor]",
    parameters: CallParameters,
    places: Sequence[Place],
    dtype: "torch.dtype | None" = None,
) -> "list[dict[str, Tensor]]":
    """The expected values of a pass's written operands at each place by name, from all operands, by default in float64."""
    found = forward_oracle if problem.direction == "fwd" else backward_oracle
    return found(problem, operands, parameters, places, dtype)


def forward_oracle(
    problem: Problem,
    operands: "Mapping[str, Tensor]",
    parameters: CallParameters,
    places: Sequence[Place],
    dtype: "torch.dtype | None" = None,
) -> "list[dict[str, Tensor]]":
    """Output and LSE at each place by the reference, some rows at a time."""
    return [_forward_at(problem, operands, parameters, place, dtype) for place in places]


def _forward_at(
    problem: Problem, operands: "Mapping[str, Tensor]", parameters: CallParameters, place: Place, dtype: "torch.dtype | None"
) -> "dict[str, Tensor]":
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


def backward_oracle(
    problem: Problem,
    operands: "Mapping[str, Tensor]",
    parameters: CallParameters,
    places: Sequence[Place],
    dtype: "torch.dtype | None" = None,
) -> "list[dict[str, Tensor]]":
    """Gradients at each place by autograd through the reference, some rows at a time; those of keys sum over all rows of a group's heads.

    They are taken at the forward's rounded output, which BACKWARD reads: rounding moves delta = rowsum(dO * O) as a gradient of the LSE
    would, as much as the tolerances allow where scores are large.
    """
    import torch

    kind = dtype or torch.float64
    ratio = problem.gqa_ratio
    found: list[dict[str, Tensor]] = [{} for _ in places]
    by_group: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, place in enumerate(places):
        by_group[place.batch, place.head // ratio].append(index)
    # All places of a group share the work, which is that of all its heads.
    for (batch, kv_head), some in by_group.items():
        wanted = {places[index].head for index in some}
        dq, dk, dv = _group_gradients(problem, operands, parameters, batch, kv_head, wanted, dtype)
        for index in some:
            place = places[index]
            found[index] = {"dq": dq[place.head][place.queries], "dk": dk[place.keys], "dv": dv[place.keys]}
    for place, values in zip(places, found, strict=True):
        if "dslopes" in operands:
            parts = _score_gradients(problem, operands, parameters, place, kind)
            values["dslopes"] = torch.cat([-(gradients * far).sum(-1) for gradients, far in parts])
        if "dbias" in operands:
            values["dbias"] = _bias_gradient(problem, operands, parameters, place, kind)
    return found


def _group_gradients(
    problem: Problem,
    operands: "Mapping[str, Tensor]",
    parameters: CallParameters,
    batch: int,
    kv_head: int,
    wanted: Set[int],
    dtype: "torch.dtype | None",
) -> "tuple[dict[int, Tensor], Tensor, Tensor]":
    """Gradients of the queries of the wanted heads of a group, by head, and of the group's keys and values, in all rows."""
    import torch

    kind = dtype or torch.float64
    k, v = (operands[name][batch, kv_head].to(kind) for name in ("k", "v"))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dq: dict[int, Tensor] = {}
    for head in range(kv_head * problem.gqa_ratio, (kv_head + 1) * problem.gqa_ratio):
        parts = []
        for start in range(0, problem.n_q, ORACLE_ROWS):
            rows = batch, head, slice(start, min(start + ORACLE_ROWS, problem.n_q))
            leaves = [x.detach().requires_grad_() for x in (operands["q"][rows].to(kind), k, v)]
            with torch.enable_grad():
                out, lse = _attended(problem, (leaves[0], leaves[1], leaves[2]), parameters, batch, head, start, dtype)
                gradients = torch.autograd.grad(_loss(operands, rows, out, lse), leaves)
            parts.append(gradients[0])
            dk.add_(gradients[1])
            dv.add_(gradients[2])
        if head in wanted:
            dq[head] = torch.cat(parts)
    return dq, dk, dv


def _loss(operands: "Mapping[str, Tensor]", rows: tuple[int, int, slice], out: "Tensor", lse: "Tensor") -> "Tensor":
    """A scalar whose gradients by these rows' output and LSE are the operands'; rows that see nothing add none by their LSE."""
    dout = operands["dout"][rows].to(out.dtype)
    dlse = operands["dlse"][rows] + ((out.detach() - operands["out"][rows]) * dout).sum(-1)
    return (out * dout).sum() + (lse * dlse)[lse.isfinite()].sum()


def _score_gradients(
    problem: Problem, operands: "Mapping[str, Tensor]", parameters: CallParameters, place: Place, kind: "torch.dtype"
) -> "Iterator[tuple[Tensor, Tensor]]":
    """Gradients of a bias on these rows' scores, and each key's distance from the diagonal, some rows at a time."""
    import torch

    from flashtune.core.problems import reference

    batch, head, n_kv = place.batch, place.head, problem.n_kv
    first, stop, _ = place.queries.indices(problem.n_q)
    k, v = (operands[name][batch, head // problem.gqa_ratio].to(kind) for name in ("k", "v"))
    for start in range(first, stop, ORACLE_ROWS):
        rows = batch, head, slice(start, min(start + ORACLE_ROWS, stop))
        q = operands["q"][rows].to(kind)
        leaf = q.new_zeros((len(q), n_kv)).requires_grad_()
        with torch.enable_grad():
            out, lse = _attended(problem, (q, k, v), parameters, batch, head, start, kind, leaf)
            [gradient] = torch.autograd.grad(_loss(operands, rows, out, lse), leaf)
        yield gradient, reference.distances(len(q), n_kv, parameters.band.diagonal + start, q.device).abs()


def _bias_gradient(
    problem: Problem, operands: "Mapping[str, Tensor]", parameters: CallParameters, place: Place, kind: "torch.dtype"
) -> "Tensor":
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
