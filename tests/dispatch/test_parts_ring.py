"""Rings of processes over gloo: against attention of one process over all tokens, with gradients; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import python, started

from flashtune import dispatch
from flashtune.core.system.errors import InputError, InputTypeError

CASES: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "sinks": True, "dtype": "float32"},
    {"softcap": 4.0, "scale": 0.2, "dtype": "float16"},
    {"is_causal": True, "dtype": "bfloat16"},
]
WORLD_OF = {2: CASES[:2] + CASES[3:], 4: CASES[:3]}
CODE = """
import json, sys
import torch, torch.distributed as dist
from flashtune import dispatch
from test_parts_ring import check

torch.set_num_threads(1)
rank, count = int(sys.argv[1]), int(sys.argv[2])
# The ring is of the last ranks: places in a group aren't ranks of all.
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], count + 1), rank=rank, world_size=count + 1)
group = dist.new_group(list(range(1, count + 1)))
if rank:
    for index, case in enumerate(json.loads(sys.argv[4])):
        check(index, dict(case), rank - 1, count, group)
dist.barrier()
dist.destroy_process_group()
"""


def pieces(x: torch.Tensor, rank: int, count: int, causal: bool) -> torch.Tensor:
    """A rank's tokens."""
    if not causal:
        return x.chunk(count, 2)[rank]
    halves = x.chunk(2 * count, 2)
    return torch.cat([halves[rank], halves[2 * count - 1 - rank]], 2)


def check(seed: int, words: dict[str, Any], rank: int, count: int, group: Any) -> None:
    """This rank's outputs and gradients are its part of those of one process."""
    generator = torch.Generator().manual_seed(seed)
    dtype, causal = getattr(torch, words.pop("dtype", "float64")), words.get("is_causal", False)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tokens = 6 * count
    tensors = [normal(2, 4, tokens, 16), *(normal(2, 2, tokens, 16) for _ in range(2))]
    dout, dlse = normal(2, 4, tokens, 16), normal(2, 4, tokens).float()
    of_heads = [normal(4)] if words.pop("sinks", False) else []
    words |= {"enable_gqa": True, "return_lse": True}
    # One process in float64: the ring's own rounding is what remains.
    exact = [x.double().requires_grad_() for x in (*tensors, *of_heads)]
    out, lse = dispatch.attention(*exact[:3], sinks=exact[3] if of_heads else None, **words)
    wanted = [out, lse, *torch.autograd.grad((out, lse), exact, (dout.double(), dlse))]

    def here(x: torch.Tensor) -> torch.Tensor:
        return pieces(x, rank, count, causal)

    mine = [x.requires_grad_() for x in (*map(here, tensors), *(x.clone() for x in of_heads))]
    out, lse = dispatch.ring(*mine[:3], group, sinks=mine[3] if of_heads else None, **words)
    found = [out, lse, *torch.autograd.grad((out, lse), mine, (here(dout), here(dlse[..., None])[..., 0]))]
    if of_heads:
        dist.all_reduce(found[-1], group=group)
    unit = {torch.float64: 1e-6, torch.float32: 5e-6, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for place, (x, y) in enumerate(zip(found, wanted, strict=True)):
        part = y if place == 5 else here(y[..., None])[..., 0] if place == 1 else here(y)
        torch.testing.assert_close(x.double(), part.double(), atol=unit, rtol=unit)


@pytest.mark.parametrize("count", WORLD_OF)
def test_each_rank_has_its_part_of_one_process_and_its_gradients(count: int, tmp_path: Path) -> None:
    words = count, tmp_path / "store", json.dumps(WORLD_OF[count])
    ended = [one.ended() for one in [started(CODE, rank, *words) for rank in range(count + 1)]]
    assert not any(one.returncode for one in ended), "\n".join(one.stderr[-1500:] for one in ended)


def test_a_ring_of_one_and_what_is_refused() -> None:
    q = torch.randn(1, 2, 6, 16, requires_grad=True)
    with pytest.raises(InputError, match=r"ring has no ranks: call torch\.distributed\.init_process_group first"):
        dispatch.ring(q, q, q)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found, wanted = dispatch.ring(q, q, q, is_causal=True), dispatch.attention(q, q, q, is_causal=True)
        torch.testing.assert_close(found, wanted)
        for x, y in zip(torch.autograd.grad(found.sum(), q), torch.autograd.grad(wanted.sum(), q), strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
        with pytest.raises(InputTypeError, match="key must be a tensor, not int: pass this rank's part"):
            dispatch.ring(q, 3, q)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="value has 3 dimensions: give this rank's part"):
            dispatch.ring(q, q, q[0])
        with pytest.raises(InputError, match="5 queries and 6 keys have no zigzag order: give each rank of a causal ring"):
            dispatch.ring(q[:, :, :5], q, q, is_causal=True)
    finally:
        dist.destroy_process_group()


def test_nothing_of_it_is_imported_before_it_is_called() -> None:
    code = "import sys; from flashtune import dispatch; print([x for x in sys.modules if 'dispatch.parts' in x]); dispatch.ring"
    assert python(code) == "[]\n"
