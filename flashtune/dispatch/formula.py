"""Gradients of attention in torch operations, by the formula and some rows at a time, for calls that no backward kernel takes."""

import torch

from flashtune.core import reference
from flashtune.core.passes import CallParameters

ROWS = 256
"""Query rows whose scores are held at a time."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    given: CallParameters,
) -> Gradients:
    """dQ, dK and dV in their inputs' types, of the output and LSE (None: of the output alone) that a forward left.

    Shapes as in flashtune.templates.family; `given` with its mask expanded. FlashAttention-2 (arXiv 2307.08691), section 2.3.2, in float32.
    """
    ratio = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(ratio, 1) for x in (k, v))
    dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for first in range(0, q.shape[2], ROWS):
        rows = slice(first, min(first + ROWS, q.shape[2]))
        q_rows, dout_rows = q[:, :, rows].float(), dout[:, :, rows].float()
        delta = (out[:, :, rows].float() * dout_rows).sum(-1)
        row_lse = lse[:, :, rows]
        empty = row_lse == float("-inf")
        if dlse is not None:
            delta = delta - dlse[:, :, rows].masked_fill(empty, 0.0)
        probs, slope = _probabilities(q_rows, wide_k, row_lse.masked_fill(empty, float("inf")), given, first)
        dprobs = dout_rows @ wide_v.mT
        dropped = probs
        if given.dropout_p:
            kept = _kept(given, q.shape, first, rows.stop - first, k.shape[2], q.device)
            dropped, dprobs = probs * kept, dprobs * kept
        dv += dropped.mT @ dout_rows
        dscores = probs * (dprobs - delta[..., None]) * given.scale
        if slope is not None:
            dscores = dscores * slope
        dq[:, :, rows] = dscores @ wide_k
        dk += dscores.mT @ q_rows
    dk, dv = (x.view(k.shape[0], -1, ratio, *x.shape[2:]).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, given: CallParameters, first: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The softmax's probabilities of rows from `first` on, and what a soft cap multiplies a score's gradient by."""
    n_q, n_kv, slope = q.shape[2], k.shape[2], None
    band = given.band.from_row(first)
    scores = given.scale * (q @ k.mT)
    if given.softcap:
        capped = torch.tanh(scores / given.softcap)
        scores, slope = given.softcap * capped, 1.0 - capped * capped
    if given.slopes is not None:
        scores = scores + reference.alibi(given.slopes, n_q, n_kv, band.diagonal)
    hidden = ~reference.visible(band, n_q, n_kv, q.device)
    if given.mask is not None:
        mask = given.mask[:, :, first : first + n_q]
        if mask.dtype == torch.bool:
            hidden = hidden | ~mask
        else:
            scores = scores + mask.float()
    return torch.exp(scores - lse[..., None]).masked_fill(hidden, 0.0), slope


def _kept(given: CallParameters, shape: torch.Size, first: int, count: int, n_kv: int, device: torch.device) -> torch.Tensor:
    """Dropout's factor of each pair of these rows: 0, or what makes up for those that are dropped."""
    keep = reference.dropout_keep(given.seed, given.offset, shape[0], shape[1], count, n_kv, given.dropout_p, device, first=first)
    return keep / (1.0 - given.dropout_p) if given.dropout_p < 1.0 else keep * 0.0
