"""Masks and scores as code in Hopper's kernels without a GPU: a stand-in with the operations of functions, and their lists of blocks."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from hopper_emulator import Machine, Pointer, array
from hopper_machine import Number, quotient, remainder
from mod_cases import Functions
from torch import Tensor


class Coded(Machine):
    """Part of a stand-in: numbers of captured tensors and lists that are read by places, and the operations of functions."""

    def _stand_ins(self) -> dict[str, Any]:
        found = super()._stand_ins()
        gl = found["gl"]

        def load(place: Pointer, mask: Any = None, other: Any = 0) -> Any:
            offset = torch.as_tensor(place.offset).as_subclass(Tensor).long()
            if mask is not None:
                inside = torch.as_tensor(mask).as_subclass(Tensor).expand(offset.shape)
                offset = torch.where(inside, offset, 0)
            assert bool((offset >= 0).all()) and bool((offset < place.memory.numel()).all()), "a read outside of a tensor"
            values = place.memory[offset]
            if mask is not None:
                values = torch.where(inside, values, torch.tensor(other, dtype=values.dtype))
            return Number(int(values)) if values.dim() == 0 and not values.is_floating_point() else array(values)

        def both(name: str) -> Any:
            plain = getattr(gl, name)
            return lambda a, b, propagate_nan=None: plain(
                *(x.float() if isinstance(x, Tensor) and x.dtype is torch.bool else x for x in (a, b))
            )

        def where(condition: Any, one: Any, other: Any) -> Any:
            if not any(isinstance(x, Tensor) for x in (condition, one, other)):
                return one if condition else other
            return array(torch.where(torch.as_tensor(condition), one, other).as_subclass(Tensor))

        def of(name: str) -> Any:
            return lambda x: array(getattr(torch, name)(torch.as_tensor(x)))

        def whole(operation: Any, plain: Any) -> Any:
            return lambda a, b: (
                operation(torch.as_tensor(a), torch.as_tensor(b)) if isinstance(a, Tensor) or isinstance(b, Tensor) else plain(a, b)
            )

        def write(place: Pointer, values: Any, mask: Any = None) -> None:
            if mask is None:
                place.memory[place.offset] = values
            else:
                store(place, values, mask)

        store, gl.store = gl.store, write
        for name in ("exp", "exp2", "log", "log2", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "abs"):
            setattr(gl, name, of(name))
        gl.load, gl.where, gl.maximum, gl.minimum = load, where, both("maximum"), both("minimum")
        gl.sqrt_rn, gl.div_rn = of("sqrt"), lambda a, b: torch.as_tensor(a) / b
        gl.to_tensor = lambda x: array(torch.tensor(x)) if isinstance(x, (float, bool)) else Number(x)
        gl.int1, gl.int8, gl.int16, gl.uint8, gl.float16, gl.bfloat16 = (
            torch.bool, torch.int8, torch.int16, torch.uint8, torch.float16, torch.bfloat16,
        )  # fmt: skip
        return found | {
            "tl": SimpleNamespace(PropagateNan=SimpleNamespace(ALL=None)),
            "quotient": whole(lambda a, b: torch.div(a, b, rounding_mode="trunc"), quotient),
            "remainder": whole(torch.fmod, remainder),
        }


def seen_by(mask_mod: Any, batch: int, heads: int, n_q: int, n_kv: int) -> Tensor:
    """A mask_mod at all pairs, (B, H, N_q, N_kv)."""
    b, h, q, k = (torch.arange(size) for size in (batch, heads, n_q, n_kv))
    found: Tensor = mask_mod(b[:, None, None, None], h[None, :, None, None], q[None, None, :, None], k[None, None, None, :])
    return found.expand(batch, heads, n_q, n_kv)


def lists_of(seen: Tensor, tile: tuple[int, int], *, of_keys: bool = False) -> Tensor:
    """The lists of blocks of a mask, as `flex_blocks.blocks` makes them."""
    n_q, n_kv = seen.shape[2:]
    rows, columns = (-(-n // size) for n, size in zip((n_q, n_kv), tile, strict=True))
    kinds = torch.zeros((*seen.shape[:2], rows, columns), dtype=torch.int8)
    for i in range(rows):
        for j in range(columns):
            part = seen[:, :, i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]].flatten(2)
            whole = part.all(-1) & ((j + 1) * tile[1] <= n_kv)
            kinds[:, :, i, j] = torch.where(part.any(-1), whole.to(torch.int8), 2)
    kinds = kinds.transpose(2, 3) if of_keys else kinds
    numbers = [(kinds <= kind).sum(-1, keepdim=True, dtype=torch.int32) for kind in (0, 1)]
    return torch.cat((*numbers, torch.argsort(kinds, dim=-1, stable=True).to(torch.int32)), -1)


def batches_of(name: str) -> int:
    """Two batches for a mask by the batch, a mask that is the same for both, and a score; one for other functions."""
    return 2 if name in ("unseen", "document", "both") else 1


def shapes(device: str = "cpu") -> dict[str, Functions]:
    """Functions over 290 queries and 300 keys of `batches_of` batches and four heads."""
    document = torch.tensor([0] * 70 + [1] * 130 + [2] * 3 + [3] * 97, device=device)
    table = torch.randn(4, 65, generator=torch.Generator().manual_seed(3)).to(device)
    return {
        "causal": (None, lambda b, h, q, k: q >= k),
        "document": (None, lambda b, h, q, k: (document[q] == document[k]) & (q >= k)),
        "global_window": (None, lambda b, h, q, k: (k < 4) | ((q - k).abs() <= 70)),
        "heads": (None, lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, (q // 64) == (k // 64))),
        "unseen": (None, lambda b, h, q, k: (q >= 90) & (k < 200) & (b * 300 + h * 60 + q > k)),
        "nothing": (None, lambda b, h, q, k: (q < 64) & (k < 10)),
        "relative": (lambda s, b, h, q, k: s + table[h, (q - k).clamp(-32, 32) + 32], None),
        "both": (lambda s, b, h, q, k: torch.tanh(s) * 2 + table[h, q % 65], lambda b, h, q, k: q + 130 >= k),
        "hidden_by_score": (lambda s, b, h, q, k: torch.where((q + k) % 2 == 0, s, -math.inf), lambda b, h, q, k: q >= k),
        "alibi": (lambda s, b, h, q, k: s + table[h, 0] * (k - q), None),
    }
