"""Masks and scores as code of the calls that `guard/call_list.py` names, and what the host reads of a mask's tiles."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pretended import Launched
from torch import Tensor

Mods = tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]


class Case(NamedTuple):
    """Functions over captured tensors, which are made for batches, heads, queries and keys; `trained` are those that may get gradients."""

    functions: Callable[[dict[str, Tensor]], Mods]
    captured: Callable[[int, int, int, int], dict[str, Tensor]] = lambda b, h, q, k: {}
    trained: tuple[str, ...] = ()


def _table(b: int, h: int, q: int, k: int) -> dict[str, Tensor]:
    return {"table": torch.full((h, 129), 0.25)}


def _slopes(b: int, h: int, q: int, k: int) -> dict[str, Tensor]:
    return {"slopes": torch.full((h,), 0.25)}


def _prefix(b: int, h: int, q: int, k: int) -> dict[str, Tensor]:
    return {"prefix": torch.arange(1, b + 1, dtype=torch.int32) * 100}


FUNCTIONS: dict[str, Case] = {
    "causal mask": Case(lambda x: (None, lambda b, h, q, k: q >= k)),
    "window mask": Case(lambda x: (None, lambda b, h, q, k: (q >= k) & (q - k <= 200))),
    "global window": Case(lambda x: (None, lambda b, h, q, k: (k < 4) | ((q - k).abs() <= 70))),
    "dilated": Case(lambda x: (None, lambda b, h, q, k: ((q - k).abs() <= 96) & ((q - k) % 3 == 0))),
    "mask of heads": Case(lambda x: (None, lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, (q // 64) == (k // 64)))),
    "prefix": Case(lambda x: (None, lambda b, h, q, k: (k < x["prefix"][b]) | (q >= k)), _prefix),
    "cap": Case(lambda x: (lambda s, b, h, q, k: 15.0 * torch.tanh(s / 15.0), None)),
    "cap, causal": Case(lambda x: (lambda s, b, h, q, k: 15.0 * torch.tanh(s / 15.0), lambda b, h, q, k: q >= k)),
    "slopes, causal": Case(lambda x: (lambda s, b, h, q, k: s + x["slopes"][h] * (k - q), lambda b, h, q, k: q >= k), _slopes, ("slopes",)),
    "relative": Case(lambda x: (lambda s, b, h, q, k: s + x["table"][h, (q - k).clamp(-64, 64) + 64], None), _table, ("table",)),
    "relative, causal": Case(
        lambda x: (lambda s, b, h, q, k: s + x["table"][h, (q - k).clamp(-64, 64) + 64], lambda b, h, q, k: q >= k), _table, ("table",)
    ),
    "gated": Case(
        lambda x: (lambda s, b, h, q, k: torch.where(q >= k, s * torch.sigmoid(x["slopes"][h]), s - 1.0), None), _slopes, ("slopes",)
    ),
    "squared": Case(lambda x: (lambda s, b, h, q, k: s * s * 0.1 - (q - k).abs() * 0.01, None)),
    "squared, prefix": Case(lambda x: (lambda s, b, h, q, k: s * s * 0.1, lambda b, h, q, k: (k < x["prefix"][b]) | (q >= k)), _prefix),
}
"""Some are those that `attention` has built in; `captured` in a call's pass asks for gradients of captured tensors, too."""


def _documents(length: int, *, each: bool = False) -> Callable[[int, int, int, int], dict[str, Tensor]]:
    def made(b: int, h: int, q: int, k: int) -> dict[str, Tensor]:
        ids = torch.arange(max(q, k)) // length
        return {"document": torch.stack([ids + row * 10_000 for row in range(b)]) if each else ids, "slopes": torch.full((h,), 0.25)}

    return made


def _same(x: dict[str, Tensor]) -> Callable[..., Tensor]:
    document = x["document"]
    return lambda b, h, q, k: document[q] == document[k]


def _same_of_batch(x: dict[str, Tensor]) -> Callable[..., Tensor]:
    document = x["document"]
    return lambda b, h, q, k: document[b, q] == document[b, k]


def _and_causal(mask: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda b, h, q, k: mask(b, h, q, k) & (q >= k)


DOCUMENTS: dict[str, Case] = {
    "documents of 300": Case(lambda x: (None, _same(x)), _documents(300)),
    "causal documents of 300": Case(lambda x: (None, _and_causal(_same(x))), _documents(300)),
    "causal documents of 1000": Case(lambda x: (None, _and_causal(_same(x))), _documents(1000)),
    "causal documents of 20": Case(lambda x: (None, _and_causal(_same(x))), _documents(20)),
    "causal documents of each batch": Case(lambda x: (None, _and_causal(_same_of_batch(x))), _documents(300, each=True)),
    "windows in documents": Case(lambda x: (None, lambda b, h, q, k: _and_causal(_same(x))(b, h, q, k) & (q - k <= 63)), _documents(300)),
    "capped documents": Case(lambda x: (lambda s, b, h, q, k: 15.0 * torch.tanh(s / 15.0), _and_causal(_same(x))), _documents(300)),
    "documents with slopes": Case(lambda x: (lambda s, b, h, q, k: s + x["slopes"][h] * (k - q), _and_causal(_same(x))), _documents(300)),
    "documents and a score": Case(lambda x: (lambda s, b, h, q, k: s * s * 0.1, _and_causal(_same(x))), _documents(300)),
}


def kinds_of(mask: Any) -> Callable[[Launched], None]:
    """Writer of the kinds of a mask's tiles, as the kernel would write them: 0 some pairs are visible, 1 all, 2 none."""

    def write(launch: Launched) -> None:
        x = launch.values
        n_q, n_kv, heads, tile = x["n_q"], x["n_kv"], x["mask_heads"], (x["BLOCK_M"], x["BLOCK_N"])
        tiles = x["tiles_m"], x["tiles_n"]
        batch = launch.grid[0] // heads // tiles[0] // tiles[1]
        b, h, q, k = (torch.arange(size) for size in (batch, heads, tiles[0] * tile[0], tiles[1] * tile[1]))
        places = (
            b[:, None, None, None],
            h[None, :, None, None],
            q.clamp(max=n_q - 1)[None, None, :, None],
            k.clamp(max=n_kv - 1)[None, None, None],
        )
        seen = (mask(*places) & (k < n_kv)).expand(batch, heads, len(q), len(k))
        each = seen.reshape(batch, heads, tiles[0], tile[0], tiles[1], tile[1])
        kinds = torch.where(each.any(5).any(3), each.all(5).all(3).to(torch.int8), 2).to(torch.int8).contiguous()
        ctypes.memmove(x["kinds_ptr"].address, kinds.data_ptr(), kinds.numel())

    return write
