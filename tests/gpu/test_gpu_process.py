"""Effects of earlier calls of a process on later ones on a GPU: models with records of their own, the same bits for the same inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from call_checks import in_threads
from pretended_gpu import POINTERS, save

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.core.pytorch import devices

BOUND = TOLERANCES["fp16"]
PROBLEM = Problem(batch=2, heads=4, kv_heads=4, n_q=640, n_kv=640, d=64, d_v=64, dtype="fp16")
BLOCKS = (64, 128)

pytestmark = pytest.mark.filterwarnings("ignore:flashtune. rows of")


class Model(torch.nn.Module):
    """One layer of attention, by the database that ships with it."""

    def __init__(self, database: Path) -> None:
        super().__init__()
        self.database = database
        self.project = torch.nn.Linear(256, 3 * 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(2, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        with dispatch.use(self.database):
            self.served = dispatch.explain(q, k, v)
            out: torch.Tensor = dispatch.attention(q, k, v)
            return out


@pytest.fixture
def models(tmp_path: Path) -> list[Model]:
    target, made = devices.target_of(torch.device("cuda", 0)), []
    for block in BLOCKS:
        path = tmp_path / f"rows_{block}.sqlite"
        default: Config = POINTERS.default(PROBLEM.spec(), target)
        save(path, PROBLEM, gpu=target.slug, config=default.replace(BLOCK_M=block, BLOCK_N=64, num_warps=4, num_stages=2))
        torch.manual_seed(block)
        made.append(Model(path).cuda().half())
    return made


def right(model: Model, x: torch.Tensor) -> torch.Tensor:
    q, k, v = model.project(x).unflatten(2, (3, 4, 64)).permute(2, 0, 3, 1, 4)
    return reference.attention(q, k, v, scale=0.125)[0]


@torch.no_grad()
def test_two_models_in_turn_and_at_once_are_each_served_by_their_own_records(models: list[Model]) -> None:
    x = torch.randn(2, 640, 256, generator=torch.Generator().manual_seed(1)).cuda().half()
    wanted = [right(model, x) for model in models]
    first = [model(x) for model in models]
    for _ in range(5):
        for model, exact, out, block in zip(models, wanted, first, BLOCKS, strict=True):
            assert torch.equal(model(x), out)
            torch.testing.assert_close(out.double(), exact, atol=BOUND.atol, rtol=BOUND.rtol)
            found = model.served
            assert found.origin == str(model.database) and found.config is not None and found.config.number("BLOCK_M") == block
    assert not torch.equal(*first), "they have weights of their own"
    wrong: list[str] = []

    def many(model: Model, out: torch.Tensor) -> None:
        with torch.no_grad():
            wrong.extend(str(model.database) for _ in range(20) if not torch.equal(model(x), out))

    in_threads(2, lambda place: many(models[place], first[place]))
    assert not wrong


def tensors(n: int, d: int, dtype: torch.dtype, heads: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(2, heads, n, d, generator=generator).cuda().to(dtype) for _ in range(3)]


@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"is_causal": True, "window": 256}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize(("n", "d"), [(2048, 64), (2048, 128), (1000, 96)])
def test_the_same_inputs_give_the_same_bits_at_every_call(
    n: int, d: int, words: dict[str, Any], record_property: Callable[[str, str], None]
) -> None:
    q, k, v = tensors(n, d, torch.bfloat16)
    first = dispatch.attention(q, k, v, **words)
    assert all(torch.equal(dispatch.attention(q, k, v, **words), first) for _ in range(150))
    record_property("served", dispatch.explain(q, k, v, **words).template or "torch")


def rising(n: int, d: int) -> list[torch.Tensor]:
    """Scores that rise towards the keys that a causal row sees last: they mislead kernels that settle row maxima."""
    q, k, v = tensors(n, d, torch.bfloat16)
    q[..., 0], k[..., 0] = d**0.5, torch.linspace(0.0, 200.0, n, device="cuda").to(torch.bfloat16)
    return [q, k, v]


@pytest.mark.parametrize("words", [{}, {"is_causal": True}], ids=str)
def test_where_scores_mislead_a_kernel_another_serves_later_unless_the_same_bits_are_asked_for(
    words: dict[str, Any], record_property: Callable[[str, str], None]
) -> None:
    q, k, v = rising(2048, 128)
    same = dispatch.attention(q, k, v, deterministic=True, **words)
    assert all(torch.equal(dispatch.attention(q, k, v, deterministic=True, **words), same) for _ in range(200))
    found = [dispatch.attention(q, k, v, **words) for _ in range(200)]
    distinct = [out for place, out in enumerate(found) if not any(torch.equal(out, other) for other in found[:place])]
    assert len(distinct) <= 2, "the kernel and its fallback"
    explained = dispatch.explain(q, k, v, **words)
    record_property("served", f"{explained.template or 'torch'}, {len(distinct)} kernels")
    wide = [x.double() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, **words)
    bound = TOLERANCES["bf16"]
    for out in distinct:
        torch.testing.assert_close(out.double(), exact, atol=bound.atol, rtol=bound.rtol)
