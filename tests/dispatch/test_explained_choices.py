"""Explanations of problems by the records alone name who runs such calls: random ones, dense, packed and over pages."""

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch import devices
from flashtune.dispatch.call.call import PerHead, trained_as
from flashtune.dispatch.call.inspection import GRADIENT
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of
from flashtune.dispatch.decisions import resolve
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.plans import driver, kernels
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.rows import packed as rows
from flashtune.dispatch.rows import paged
from flashtune.dispatch.state.context import Memo, current

GPU = torch.device("cuda", 0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_DIMS = (16, 32, 40, 64, 64, 80, 96, 128, 128, 192, 256, 257, 320, 512, 512)
ROWS = (1, 1, 2, 15, 16, 17, 20, 64, 100, 300, 1000, 1024, 2048, 4096)
Served = tuple[str | None, Any, str | None]


class Taken(Code):
    """In place of a kernel's code: it takes all tensors."""

    def __init__(self, variant: Any) -> None:
        host = SimpleNamespace(spec=variant.spec, config=variant.config)
        self.module: Any = SimpleNamespace(accepts=lambda *_: True, counts_misses=False, host=host)
        self.keep = None


class Planned:
    """In place of a kernel's plan, which is never built."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


@pytest.fixture(params=["h200", "a100"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A GPU that isn't here, by the shipped records; its kernels are chosen, and never loaded."""
    target = find_target(request.param)
    monkeypatch.setattr(devices, "target_of", lambda device: target)
    monkeypatch.setattr(driver, "driven", lambda device: True)
    monkeypatch.setattr(kernels.Kernels, "code", lambda self, family, variant, device, target, **words: Taken(variant))
    monkeypatch.setattr(resolve, "KernelPlan", Planned)
    dispatch.reload(alone=True)
    yield str(request.param)
    monkeypatch.undo()
    dispatch.reload()


def told(found: Explanation) -> Served:
    return found.template, found.config, found.provider


def tensors(drawn: random.Random, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value of random sizes, without data."""
    d, n_q, kv_heads = drawn.choice(HEAD_DIMS), drawn.choice(ROWS), drawn.choice((1, 2, 8, 16))
    n_kv, d_v = (other if drawn.random() < share else same for other, same, share in ((drawn.choice(ROWS), n_q, 0.5), (64, d, 0.1)))
    batch, heads = drawn.choice((1, 4, 64)), kv_heads * drawn.choice((1, 1, 4, 16))
    sizes = (heads, n_q, d), (kv_heads, n_kv, d), (kv_heads, n_kv, d_v)
    return [torch.empty(batch, *size, dtype=dtype, device="meta") for size in sizes]


@pytest.mark.parametrize("trained", [False, True], ids=["forward", "gradients"])
def test_dense_problems_are_explained_as_their_calls_are_served(gpu: str, trained: bool) -> None:
    drawn = random.Random(20261130)
    for _ in range(25):
        q, k, v = tensors(drawn, drawn.choice(list(DTYPES.values())))
        causal, masked = drawn.choice(((True, None), (False, None), (False, torch.bool), (False, q.dtype)))
        mask = None if masked is None else torch.empty(q.shape[2], k.shape[2], dtype=masked, device="meta")
        per_head = PerHead(sinks=torch.empty(q.shape[1], device="meta")) if drawn.random() < 0.2 else PerHead()
        options = Options(
            dropout_p=drawn.choice((0.0, 0.0, 0.1)), is_causal=causal, enable_gqa=True, softcap=drawn.choice((0.0, 0.0, 9.0)),
            window=drawn.choice((None, None, (64, 0))), causal_alignment=drawn.choice(("top_left", "bottom_right")),
        )  # fmt: skip
        call = replace(parse(Arguments(q, k, v, mask, None, per_head), options), device=GPU)
        assert call.problem is not None
        why = GRADIENT if trained else None
        serving = next(resolve.candidates(current(), call, q, k, v, mask, why, per_head, by_bucket=True))
        found = serving.explanation.backward if serving.trains else serving.explanation
        problem = trained_as(call.problem) if trained else call.problem
        assert found is not None and told(dispatch.explain_problem(problem, gpu)) == told(found), problem.label()


def packed_call(drawn: random.Random) -> tuple[Packed, Numbers]:
    """Packed sequences of random lengths, or pages of them, without data."""
    q, k, v = (x[0].transpose(0, 1) for x in tensors(drawn, drawn.choice(list(DTYPES.values()))))
    sequences, mean = drawn.choice((1, 3, 16, 100)), drawn.choice((5, 16, 17, 100, 300, 512, 1000, 3000))
    longest, table = min(mean * sequences, round(mean * drawn.choice((1, 1.2, 2, 6)))), None
    bounds = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    if drawn.random() < 0.4:
        page = drawn.choice((1, 16, 128))
        table = torch.empty(sequences, -(-longest // page), dtype=torch.int32, device="meta")
        q, mean = q[:1].expand(sequences, *q.shape[1:]), page
        k, v = (x[:1].expand(sequences, mean, *x.shape[1:]) for x in (k, v))
    else:
        q, k, v = (x[:1].expand(sequences * mean, *x.shape[1:]) for x in (q, k, v))
    numbers = Numbers(
        max_q=1 if table is not None else longest, max_k=longest, scale=1.0, left=drawn.choice((-1, -1, 64)), right=drawn.choice((-1, 0)),
        bottom_right=True, softcap=0.0, dropout_p=0.0, tf32=False, deterministic=False,
    )  # fmt: skip
    return Packed(q, k, v, bounds, bounds, None if table is None else bounds[1:], table=table), numbers


@pytest.mark.parametrize("trained", [False, True], ids=["forward", "gradients"])
def test_packed_and_paged_problems_are_explained_as_their_calls_are_served(
    gpu: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = random.Random(20261130)
    target = find_target(gpu)
    monkeypatch.setattr(rows, "note", lambda *_, **__: None)
    monkeypatch.setattr(paged, "note", lambda *_, **__: None)
    monkeypatch.setattr(paged, "served_here", lambda *_: True)
    monkeypatch.setattr(devices, "INTERPRETING", True)
    monkeypatch.setattr(Memo, "surroundings", lambda memo, device, one: (target, {}, memo.pool(one.key(gpu), target)))
    for _ in range(25):
        packed, numbers = packed_call(drawn)
        if trained and packed.table is not None:
            continue
        problem = problem_of(packed, numbers, "bwd" if trained else "fwd", exact=True)
        assert problem is not None
        current().packed.clear()
        assert told(dispatch.explain_problem(problem, gpu)) == _served(packed, numbers, problem), problem.label()


def _served(packed: Packed, numbers: Numbers, problem: Problem) -> Served:
    """Who runs a call."""
    if packed.table is not None:
        found: Any = paged.kernel_of_pages(current(), packed, numbers)
    else:
        found = rows.served(packed, numbers, problem.direction, current())
    if not isinstance(found, rows.Kernel):
        return None, None, None
    assert found.variant is not None
    return found.variant.template, found.config, None
