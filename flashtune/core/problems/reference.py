"""Reference attention in float64 and the dropout mask as plain arithmetic, the definition of correct results.

Nothing here is fast. Kernels, tests, `flashtune verify` and the CPU path of features that PyTorch lacks use it or compare with it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from flashtune.core.problems.band import Band
from flashtune.core.problems.parameters import dropout_threshold

PHILOX_ROUNDS = 7
"""Philox4x32-7 passes BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, table 2)."""

_PHILOX_M = (0xD2511F53, 0xCD9E8D57)
_PHILOX_W = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF


def philox(seed: int, counter: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-7: four words of 32 random bits (in int64) for each counter, which is four int64 tensors of 32-bit words that broadcast.

    `seed` is 64 bits; its low half is the first key word, as in `tl.philox`.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(PHILOX_ROUNDS):
        a, b = _wide_product(c0, _PHILOX_M[0]), _wide_product(c2, _PHILOX_M[1])
        c0, c1, c2, c3 = b[0] ^ c1 ^ k0, b[1], a[0] ^ c3 ^ k1, a[1]
        k0, k1 = (k0 + _PHILOX_W[0]) & _MASK32, (k1 + _PHILOX_W[1]) & _MASK32
    return c0, c1, c2, c3


def _wide_product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in int64 halves that can't overflow."""
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor
    total = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (total >> 32)) & _MASK32, total & _MASK32


def dropout_keep_rows(
    seed: int, offset: int, index: int, first: int, rows: int, n_kv: int, p: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Mask of the pairs that dropout keeps in rows [first, first + rows) of one head: bool (rows, n_kv).

    A function of the seed (64 bits), the offset (32 bits) and absolute indices alone; `index` is batch * heads + head.
    One Philox call yields sixteen draws, for the pairs (row, row + 8) x (col, col + 1) x (columns + 0, 8, 16, 24): those sit in
    one thread's registers in the accumulator of a tensor-core product. Its counter is (col / 32 * 4 + col % 8 / 2,
    row / 16 * 8 + row % 8, index, offset), and the pair's word is col / 8 % 4, rotated left by 8 where row / 8 is odd. A draw is the
    lower 15 bits of the word's low half for an even col, of its high half for an odd one.
    A pair is kept when its draw is >= dropout_threshold(p); where that is above 2^14, 2^15 - 1 less the draw takes the draw's place.
    """
    first_group = first // 16 * 8
    c0 = torch.arange((n_kv + 31) // 32 * 4, device=device)[None, :]
    c1 = torch.arange(first_group, (first + rows + 15) // 16 * 8, device=device)[:, None]
    c2, c3 = (torch.full((1, 1), number, device=device) for number in (index, offset & _MASK32))
    words = torch.stack(philox(seed, (c0, c1, c2, c3)))
    words = torch.stack((words, words << 8 | words >> 24))
    row = torch.arange(first, first + rows, device=device)[:, None]
    col = torch.arange(n_kv, device=device)[None, :]
    word = words[row // 8 % 2, col // 8 % 4, row // 16 * 8 + row % 8 - first_group, col // 32 * 4 + col % 8 // 2]
    draw = word >> (col % 2 * 16) & 0x7FFF
    threshold = dropout_threshold(p)
    return (draw if threshold <= 16384 else 32767 - draw) >= threshold


def dropout_keep(
    seed: int, offset: int, batch: int, heads: int, n_q: int, n_kv: int, p: float, device: torch.device | str = "cpu", *, first: int = 0
) -> Tensor:
    """`dropout_keep_rows` for `n_q` rows of every head, from `first` on: bool (batch, heads, n_q, n_kv)."""
    rows = [dropout_keep_rows(seed, offset, index, first, n_q, n_kv, p, device) for index in range(batch * heads)]
    return torch.stack(rows).view(batch, heads, n_q, n_kv) if rows else torch.ones(batch, heads, n_q, n_kv, dtype=torch.bool, device=device)


def distances(n_q: int, n_kv: int, diagonal: int, device: torch.device | str = "cpu") -> Tensor:
    """Distances of key j in row i to the right of the diagonal: j - i - diagonal, int64 (n_q, n_kv)."""
    return torch.arange(n_kv, device=device)[None, :] - torch.arange(n_q, device=device)[:, None] - diagonal


def visible(band: Band, n_q: int, n_kv: int, device: torch.device | str = "cpu") -> Tensor:
    """Mask of the pairs within a band: bool (n_q, n_kv), True where i + diagonal - left <= j <= i + diagonal + right."""
    distance = distances(n_q, n_kv, band.diagonal, device)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if band.left is not None:
        seen &= distance >= -band.left
    if band.right is not None:
        seen &= distance <= band.right
    return seen


def alibi(slopes: Tensor, n_q: int, n_kv: int, diagonal: int) -> Tensor:
    """ALiBi's bias on the scores: -slope |i + diagonal - j|, (B, H, n_q, n_kv) for slopes (B, H), in their dtype."""
    return -slopes[..., None, None] * distances(n_q, n_kv, diagonal, slopes.device).abs()


def joined(bias: Tensor, mask: Tensor | None) -> Tensor:
    """A bias and a mask (bool: True attends, or another bias) as one bias, in the wider of their dtypes."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def hidden_outside(seen: Tensor, mask: Tensor | None) -> Tensor:
    """A mask or bias, if there is one, restricted to the pairs `seen` (bool)."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else joined(mask, seen)


def scores_of(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    band: Band,
    softcap: float,
    slopes: Tensor | None,
    mods: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Scores before the softmax, in the dtype of q and k, which have equally many heads (see `attention`), -inf where a pair is hidden."""
    scores = scale * (q @ k.transpose(-1, -2))
    scores = scores if mods is None else mods(scores)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + alibi(slopes.to(scores.dtype), q.shape[2], k.shape[2], band.diagonal)
    seen = visible(band, q.shape[2], k.shape[2], q.device)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    # A bias of -inf hides a pair like a mask; filling it in again stops gradients through -inf - -inf.
    return scores.masked_fill(~seen | (scores == float("-inf")), float("-inf"))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float,
    band: Band | None = None,
    softcap: float = 0.0,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    slopes: Tensor | None = None,
    descale: tuple[Tensor, Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    mods: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v with every feature, in `dtype`: output (B, Hq, N_q, D_v) and natural-log LSE (B, Hq, N_q).

    q (B, Hq, N_q, D), k (B, Hkv, N_kv, D), v (B, Hkv, N_kv, D_v); Hq a multiple of Hkv. Order of the score's steps: scale,
    soft cap c tanh(s / c), ALiBi, additive mask, then boolean mask (True attends) and `band` (None: all keys) as -inf. `keep` is
    dropout's bool mask; kept weights are divided by 1 - dropout_p and the LSE doesn't see dropout. A row without visible keys
    gives 0 and LSE -inf.
    `slopes` (B, Hq) are ALiBi's: each score loses slope |i + diagonal - j|. `descale` are factors by which q (B, Hq), k and v (B, Hkv)
    are multiplied. `sinks` (B, Hq) are logits of one more key for every row, whose value is 0: neither
    scaled nor masked, and in the LSE, so that rows without visible keys have the sink as theirs. `mods` is a mask and a score as code: a
    function of scaled scores to those of the softmax, -inf where a pair is hidden. Differentiable.
    """
    ratio = q.shape[1] // max(1, k.shape[1])
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if descale is not None:
        q, k, v = (x * factor.to(dtype)[..., None, None] for x, factor in zip((q, k, v), descale, strict=True))
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    found = scores_of(q, k, mask=mask, scale=scale, band=band or Band(), softcap=softcap, slopes=slopes, mods=mods)
    beside = []
    if sinks is not None:
        # As with biases, no gradient may flow through -inf - -inf.
        logits = sinks.to(dtype).masked_fill(sinks == float("-inf"), float("-inf"))
        beside = [logits[..., None, None].expand(*found.shape[:3], 1)]
    everything = torch.cat([found, *beside], -1)
    lse = torch.logsumexp(everything, -1)
    # By the maximum, not the LSE: beside a bias of -3e38 the logarithm of a sum is lost. On empty rows exp(-inf - -inf) would be NaN;
    # with a finite maximum it is exp(-inf) = 0.
    top = everything.detach().amax(-1, keepdim=True) if everything.shape[-1] else everything.new_zeros(*everything.shape[:-1], 1)
    top = top.masked_fill(top == float("-inf"), 0.0)
    total = torch.exp(everything - top).sum(-1, keepdim=True)
    weights = torch.exp(found - top) / total.masked_fill(total == 0.0, 1.0)
    if keep is not None:
        # At a rate of 1 no pair is kept, and 0 / 0 is NaN.
        weights = weights * keep / (1.0 - dropout_p if dropout_p < 1.0 else 1.0)
    return weights @ v, lse
