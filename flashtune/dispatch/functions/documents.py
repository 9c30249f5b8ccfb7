"""Masks of documents that lie one after the other: packed sequences, which `attention_varlen` computes without lists of blocks."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flashtune.dispatch.call.inspection import flash_attention_on
from flashtune.dispatch.call.parse import Options
from flashtune.dispatch.call.sequences import Packed
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.functions.blocks import FOREIGN, agrees_with_band
from flashtune.dispatch.functions.kept import MOST_LISTS, versions_of
from flashtune.dispatch.plans.plan import capturing
from flashtune.dispatch.policy.offers import OURS
from flashtune.dispatch.policy.orders import BUILT_FOR_IT
from flashtune.dispatch.rows.kernel import layout
from flashtune.dispatch.rows.read import cast, parsed
from flashtune.dispatch.rows.run import attend, explanation_of
from flashtune.dispatch.state.context import current
from flashtune.templates.mods.documents import SHORTEST_MEAN, Documents, bounds_of
from flashtune.templates.mods.scores import slopes_of


class Read(NamedTuple):
    """Numbers of documents as the host read them, and of which tensor."""

    ids: "weakref.ref[Tensor]"
    numbers: Tensor

    def holds(self) -> bool:
        """True if the tensor has these numbers now, for which the host waits: memory may be written unseen."""
        ids = self.ids()
        return ids is not None and ids.dtype is self.numbers.dtype and torch.equal(ids, self.numbers)


class Decided(NamedTuple):
    """Decisions by numbers of documents, by all else that they depend on."""

    read: Read
    found: dict[Hashable, Any]

    def get(self, place: Hashable, make: Callable[[], Any]) -> Any:
        """The decision at a place, made now where there is none."""
        if place not in self.found:
            found = make()
            if len(self.found) >= MOST_LISTS:
                self.found.clear()
            self.found[place] = found
        return self.found[place]


DECISIONS: Any = WeakIdKeyDictionary()
"""By the tensor whose numbers were read last, for as long as it lives."""


def _decided_by(ids: Tensor) -> Decided:
    found: Decided | None = DECISIONS.get(ids)
    if found is None or not found.read.holds():
        # Kept for calls with gradients, which refuse tensors of inference mode.
        with torch.inference_mode(False):
            DECISIONS[ids] = found = Decided(Read(weakref.ref(ids), ids.detach().clone()), {})
    return found


class Runs(NamedTuple):
    """Rows where documents begin, with the number of rows at the end, int32 (documents + 1,), and most rows of one."""

    bounds: Tensor
    longest: int


class PackedCall(NamedTuple):
    """A call as packed sequences: batches are folded into heads, or into rows. `options` are those of
    `attention`, in their order, and `slopes` those of all heads, None without ALiBi."""

    read: Read
    runs: Runs
    into_heads: bool
    options: tuple[Any, ...]
    slopes: Tensor | None = None


def packed_call(
    documents: Documents,
    captured: Sequence[Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: float,
    block_mask: Any,
    *,
    ours: bool = False,
) -> PackedCall | str | None:
    """The call of packed sequences that means the same, the reason why PyTorch serves, or None where lists of blocks serve.

    The host reads the numbers of documents, and compares them at every call, for which it waits: whoever wrote them since. A CUDA graph
    that is captured, whose replays may see other numbers, takes lists of blocks, which wait for nothing. With `ours` kernels serve
    measured or not.
    """
    query, ids, score, memo = tensors[0], captured[documents.captured], documents.score, current()
    if capturing(query.device):
        return None
    trains = torch.is_grad_enabled()
    slopes = slopes_of(score, captured, query.shape[0], query.shape[1], query.device)
    if slopes is not None and slopes.requires_grad and trains:
        # Kernels have no gradients of packed sequences' slopes.
        return None
    trains = trains and any(x.requires_grad for x in tensors)
    # Weakly, since a BlockMask holds the numbers, with which the decision is kept.
    owners = weakref.ref(memo), None if block_mask is None else (weakref.ref(block_mask), versions_of(block_mask))
    place = documents, layout((*tensors, slopes)), scale, trains, memo.unmeasured, flash_attention_on(), owners, ours
    by = _decided_by(ids)
    found: PackedCall | str | None = by.get(place, lambda: _decided(documents, by, slopes, tensors, scale, block_mask, ours=ours))
    return found if slopes is None or not isinstance(found, PackedCall) else found._replace(slopes=_of_heads(slopes, found, query))


def _decided(
    documents: Documents,
    by: Decided,
    slopes: Tensor | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: float,
    block_mask: Any,
    *,
    ours: bool,
) -> PackedCall | str | None:
    (query, key, _), ids = tensors, by.read.numbers
    (batch, _, n, _), score = query.shape, documents.score
    into_heads = not all(_view(x, 0, 2) for x in tensors)
    if key.shape[2] != n or (into_heads and (documents.by_batch or not all(_view(x, 0, 1) for x in tensors))):
        return None
    rows = 1 if into_heads else batch
    # Slopes of a batch's rows belong to sequences.
    if rows > 1 and score.by_batch:
        return None
    runs: Runs | None = by.get(("runs", rows, n), lambda: _runs(ids, rows, n))
    if runs is None or rows * n < SHORTEST_MEAN * (len(runs.bounds) - 1):
        return None
    if block_mask is not None and not agrees_with_band(block_mask, documents.band, query, key, ids):
        return FOREIGN
    window = tuple(-1 if side is None else side for side in documents.band)
    options = Options(enable_gqa=True, window=window, return_lse=True, implementation=OURS if ours else None, **score.words(scale))  # type: ignore[arg-type]
    call = PackedCall(by.read, runs, into_heads, tuple(options) if ours else options[:-1])
    said = _explained(call if slopes is None else call._replace(slopes=_of_heads(slopes, call, query)), tensors)
    free = ours or current().unmeasured or not query.is_cuda
    for one in (said, said.backward):
        # Measured on this GPU, or of families that serve functions unmeasured, too.
        if one is not None and (one.template is None or not (free or one.template in BUILT_FOR_IT or one.kind in ("exact", "near_n"))):
            return None
    return call


def _view(x: Tensor, outer: int, inner: int) -> bool:
    """True if two dimensions are one without a copy."""
    return 1 in (x.shape[outer], x.shape[inner]) or x.stride(outer) == x.shape[inner] * x.stride(inner)


def _of_heads(slopes: Tensor, call: PackedCall, query: Tensor) -> Tensor:
    slopes = slopes.expand(*query.shape[:2])
    return slopes.flatten() if call.into_heads else slopes[0]


def _runs(ids: Tensor, rows: int, n: int) -> Runs | None:
    """The runs of equal numbers in so many rows of n; None where a number comes back after another one."""
    # Kept for calls with gradients, which refuse tensors of inference mode.
    with torch.inference_mode(False):
        bounds = bounds_of(ids, rows, n)
        return None if bounds is None else Runs(bounds.to(ids.device, non_blocking=True), int(bounds.diff().max()))


def _folded(call: PackedCall, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of the tensors as packed rows (T, H, D)."""
    if call.into_heads:
        return [x.flatten(0, 1).transpose(0, 1) for x in tensors]
    return [x.transpose(1, 2).flatten(0, 1) for x in tensors]


def attend_packed(query: Tensor, key: Tensor, value: Tensor, call: PackedCall) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, N, D_v), whose heads lie in memory as the query's do, and LSE (B, Hq, N)."""
    batch, heads, n, _ = query.shape
    _, (bounds, longest), into_heads, options, slopes = call
    given = (*_folded(call, (query, key, value)), bounds, bounds, None, slopes, *[None] * 4)
    out, lse = attend(given, options, longest, longest, None, heads_outside=into_heads or query.stride(1) > query.stride(2))
    assert lse is not None, "the options want it"
    if into_heads:
        return out.transpose(0, 1).view(batch, heads, n, -1), lse.view(batch, heads, n)
    return out.view(batch, n, heads, -1).transpose(1, 2), lse.view(heads, batch, n).transpose(0, 1)


def _explained(call: PackedCall, tensors: Sequence[Tensor]) -> Explanation:
    _, (bounds, longest), _, options, slopes = call
    packed = Packed(*cast(*_folded(call, tensors)), bounds, bounds, None, slopes)
    return explanation_of(*parsed(packed, Options(*options), longest, longest))


def explained_packed(call: PackedCall, *tensors: Tensor) -> Explanation:
    """Explanation of the call."""
    said = _explained(call, [x.expand(len(tensors[0]), -1, -1, -1) for x in tensors])
    return replace(said, reason=f"packed sequences of {len(call.runs.bounds) - 1} documents: {said.template}, {said.reason}")
