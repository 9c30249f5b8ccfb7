"""Masks of documents that lie one after the other: packed sequences, which `attention_varlen` computes without lists of blocks."""

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.lengths import spread
from flashtune.dispatch.context import Memo, current
from flashtune.dispatch.flex_blocks import FOREIGN, agrees_with_band, kept
from flashtune.dispatch.flex_configs import BUILT_FOR_IT
from flashtune.dispatch.flex_kernels import layout
from flashtune.dispatch.inspection import flash_attention_on
from flashtune.dispatch.plan import capturing
from flashtune.dispatch.resolve import Explanation
from flashtune.templates.mods.documents import Documents
from flashtune.templates.mods.scores import slopes_of

SHORTEST_MEAN = 64
"""Mean tokens of documents from which they are packed sequences: half a tile of queries. Not measured: each document begins a tile of its
own, which shorter ones leave empty for the most part."""

MOST_DECISIONS = 1024
"""Most decisions about packed calls that are remembered."""


class Runs(NamedTuple):
    """Rows where documents begin, with the number of rows at the end, int32 (documents + 1,), and most rows of one."""

    bounds: Tensor
    longest: int


class PackedCall(NamedTuple):
    """A call as packed sequences: batches are folded into heads, or into rows; `words` are those of `attention_varlen`."""

    runs: Runs
    into_heads: bool
    words: dict[str, Any]


Tensors = tuple[Tensor, Tensor, Tensor]


def packed_call(
    documents: Documents, captured: Sequence[Tensor], tensors: Tensors, scale: float, block_mask: Any
) -> PackedCall | str | None:
    """The call of `attention_varlen` that means the same, the reason why PyTorch serves, or None where lists of blocks serve.

    Numbers of documents are read once for a tensor and a version of it, for which the host waits. A CUDA graph that is captured, whose
    replays may see other numbers, and tensors of inference mode, which have no version, take lists of blocks: these wait for nothing.
    """
    query, key, _ = tensors
    (batch, heads, n, _), ids = query.shape, captured[documents.captured]
    if key.shape[2] != n or ids.is_inference() or capturing(query.device):
        return None
    into_heads = not all(_view(x, 0, 2) for x in tensors)
    if into_heads and (documents.by_batch or not all(_view(x, 0, 1) for x in tensors)):
        return None
    rows = 1 if into_heads else batch
    runs: Runs | None = kept(ids, (ids,), ("runs", rows, n), lambda: _runs(ids, rows, n))
    if runs is None or rows * n < SHORTEST_MEAN * (len(runs.bounds) - 1):
        return None
    if block_mask is not None and not agrees_with_band(block_mask, documents.band, query, key, ids):
        return FOREIGN
    score = documents.score
    slopes = slopes_of(score, captured, batch, heads, query.device)
    if slopes is not None:
        # Kernels have no gradients of packed sequences' slopes, and those of rows belong to sequences.
        by_batch = any("b" in x.reads for _, values in score.slope for x in values)
        if (slopes.requires_grad and torch.is_grad_enabled()) or (by_batch and rows > 1):
            return None
        slopes = slopes.expand(batch, heads).flatten() if into_heads else slopes.expand(batch, heads)[0]
    words = {"scale": scale * score.factor, "softcap": score.softcap, "enable_gqa": True, "causal_alignment": "top_left"}
    words["window_size"] = tuple(-1 if side is None else side for side in documents.band)
    call = PackedCall(runs, into_heads, {**words, "alibi_slopes": slopes})
    return call if _serves(call, tensors, tuple(words.values())) else None


def _view(x: Tensor, outer: int, inner: int) -> bool:
    """True if two dimensions are one without a copy."""
    return 1 in (x.shape[outer], x.shape[inner]) or x.stride(outer) == x.shape[inner] * x.stride(inner)


def _runs(ids: Tensor, rows: int, n: int) -> Runs | None:
    """The runs of equal numbers in so many rows of n; None where a number comes back after another one."""
    # Kept for calls with gradients, which refuse tensors of inference mode.
    with torch.inference_mode(False):
        host = ids.detach()[..., :n][: rows if ids.dim() == 2 else n].cpu().expand(rows, n)
        begins = torch.ones((rows, n), dtype=torch.bool)
        begins[:, 1:] = host[:, 1:] != host[:, :-1]
        ordered = host.sort(-1).values
        if not torch.equal((ordered[:, 1:] != ordered[:, :-1]).sum(-1), begins[:, 1:].sum(-1)):
            return None
        bounds = torch.cat((begins.flatten().nonzero().flatten(), torch.tensor([rows * n]))).int()
        return Runs(bounds.to(ids.device, non_blocking=True), int(bounds.diff().max()))


_SERVED: "weakref.WeakKeyDictionary[Memo, dict[Hashable, bool]]" = weakref.WeakKeyDictionary()


def _serves(call: PackedCall, tensors: Tensors, numbers: Hashable) -> bool:
    """True if kernels serve the packed call with its gradients: of families for such calls, measured on this GPU, or of any if allowed."""
    (bounds, longest), trained = call.runs, torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    tokens, count, memo = tensors[0].shape[0] * tensors[0].shape[2], len(bounds) - 1, current()
    lengths = spread(tokens, 1, count), spread(longest, count, tokens)
    of_slopes = call.words["alibi_slopes"]
    place = layout((*tensors, of_slopes)), tensors[0].device, numbers, trained, lengths, flash_attention_on(), memo.unmeasured
    known = _SERVED.setdefault(memo, {})
    if place not in known:
        if len(known) >= MOST_DECISIONS:
            known.clear()
        said = _explained(call, tensors)
        of_passes = [said, *([] if said.backward is None else [said.backward])]
        free = memo.unmeasured or not tensors[0].is_cuda
        known[place] = all(
            one.template is not None and (free or one.template in BUILT_FOR_IT or one.kind in ("exact", "near_n")) for one in of_passes
        )
    return known[place]


def _folded(call: PackedCall, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of the tensors as packed rows (T, H, D)."""
    if call.into_heads:
        return [x.flatten(0, 1).transpose(0, 1) for x in tensors]
    return [x.transpose(1, 2).flatten(0, 1) for x in tensors]


def attend_packed(query: Tensor, key: Tensor, value: Tensor, call: PackedCall) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, N, D_v), whose heads lie in memory as the query's do, and LSE (B, Hq, N)."""
    # Imported here, since calls of packed sequences with functions are above this module.
    from flashtune.dispatch.varlen import attend

    batch, heads, n, _ = query.shape
    bounds, longest = call.runs
    outside = call.into_heads or query.stride(1) > query.stride(2)
    words = call.words
    options = (0.0, False, words["scale"], True, words["window_size"], words["softcap"], words["causal_alignment"], False, False, False)
    given = (*_folded(call, (query, key, value)), bounds, bounds, None, words["alibi_slopes"], None)
    out, lse = attend(given, options, longest, longest, None, heads_outside=outside)
    if call.into_heads:
        return out.transpose(0, 1).view(batch, heads, n, -1), lse.view(batch, heads, n)
    return out.view(batch, n, heads, -1).transpose(1, 2), lse.view(heads, batch, n).transpose(0, 1)


def _explained(call: PackedCall, tensors: Sequence[Tensor]) -> Explanation:
    from flashtune.dispatch.varlen import explain_varlen

    bounds, longest = call.runs
    return explain_varlen(*_folded(call, tensors), bounds, bounds, longest, longest, **call.words)


def explained_packed(call: PackedCall, *tensors: Tensor) -> str:
    """Explanation of the call in a sentence."""
    said = _explained(call, [x.expand(len(tensors[0]), -1, -1, -1) for x in tensors])
    return f"packed sequences of {len(call.runs.bounds) - 1} documents: {said.template}, {said.reason}"
