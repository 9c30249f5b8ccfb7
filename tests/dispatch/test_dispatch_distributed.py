"""Distributed tensors: PyTorch's own attention serves those that it takes, `explain` says so, and the others are refused in a sentence."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from flashtune import dispatch
from flashtune.core.system.errors import InputTypeError

BOUNDS = torch.tensor([0, 7, 16], dtype=torch.int32)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def q(mesh: Any) -> Any:
    return distribute_tensor(torch.randn(2, 4, 16, 32, generator=torch.Generator().manual_seed(1)), mesh, [Shard(1)])


def test_what_torch_serves_is_explained(q: Any, mesh: Any) -> None:
    # Explained alone: on a CPU PyTorch takes a minute to find out how its operation shards.
    mask = distribute_tensor(torch.ones(16, 16, dtype=torch.bool), mesh, [Replicate()])
    for given, words in (((q, q, q), {}), ((q, q, q, mask), {}), ((q, q, q), {"allow_tf32": True}), ((q, q, q), {"window": 99})):
        assert dispatch.explain(*given, **words).kind == "framework"


BEYOND = [{"window": 3}, {"softcap": 2.0}, {"return_lse": True}, {"seed": 3, "dropout_p": 0.5}, {"sinks": torch.zeros(4)}]


@pytest.mark.parametrize("words", BEYOND, ids=lambda words: next(iter(words)))
def test_what_torch_lacks_is_refused_in_a_sentence(q: Any, words: dict[str, Any]) -> None:
    plain = q.to_local()
    dispatch.attention(plain, plain, plain, **words)
    for call in (dispatch.attention, dispatch.explain):
        with pytest.raises(InputTypeError, match=f"query is a DTensor, .* without {next(iter(words))}: call with to_local"):
            call(q, q, q, **words)


def test_distributed_tensors_beside_others_are_refused_in_a_sentence(q: Any) -> None:
    plain = q.to_local()
    for given, name in (((q, plain, plain), "key"), ((plain, q, plain), "query"), ((q, q, q, torch.ones(16, 16)), "attn_mask")):
        dispatch.attention(plain, plain, plain)
        for call in (dispatch.attention, dispatch.explain):
            with pytest.raises(InputTypeError, match=f"is a DTensor and {name} isn't: distribute both"):
                call(*given)


@pytest.mark.parametrize(
    "words", [{}, {"is_causal": True}, {"score_mod": lambda score, b, h, i, j: score * 2}], ids=["plain", "causal", "score"]
)
def test_packed_and_paged_calls_name_the_tensor(q: Any, mesh: Any, words: dict[str, Any]) -> None:
    rows = distribute_tensor(torch.zeros(16, 4, 32), mesh, [Shard(1)])
    bounds, plain = distribute_tensor(BOUNDS, mesh, [Replicate()]), torch.zeros(16, 4, 32)
    for call in (dispatch.attention_varlen, dispatch.explain_varlen):
        for given, name in (((rows, rows, rows, BOUNDS, BOUNDS), "query"), ((plain, plain, plain, bounds, BOUNDS), "cu_seqlens_q")):
            with pytest.raises(InputTypeError, match=f"{name} is a DTensor, and packed sequences are of one rank"):
                call(*given, 9, 9, **words)
    cache, table = distribute_tensor(torch.zeros(8, 16, 4, 32), mesh, [Shard(2)]), torch.arange(8, dtype=torch.int32).view(2, 4)
    for call in (dispatch.attention_varlen, dispatch.explain_varlen):
        with pytest.raises(InputTypeError, match="key is a DTensor, and paged caches are of one rank"), torch.no_grad():
            call(plain, cache, cache, BOUNDS, None, 9, 50, seqused_k=torch.tensor([50, 20]), block_table=table)
