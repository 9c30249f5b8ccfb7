"""Training calls of heads beyond 256 as on an H200, through a stand-in for the driver: which kernels run, on which tensors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driven import Driven, drive
from test_dispatch_gradient_plans import Decoding, library  # noqa: F401

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Problem
from flashtune.dispatch.state import context
from flashtune.dispatch.state.context import Memo
from flashtune.templates import family


@pytest.fixture
def driven(library: Decoding, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:  # noqa: F811
    target, wide = find_target("h200"), {name: family(name) for name in ("flash_fwd_hopper_wide", "flash_bwd_hopper_wide")}

    def surroundings(memo: Memo, device: torch.device, problem: Problem) -> Any:
        return target, wide, memo.pool(problem.key(target.slug), target)

    # CPU tensors have the interpreter's families alone, whose defaults would go first.
    monkeypatch.setattr(Memo, "surroundings", surroundings)
    yield drive(library, monkeypatch)
    monkeypatch.undo()
    context.current().forget()


@pytest.mark.parametrize("implementation", [None, "flashtune"])
@pytest.mark.parametrize("d", [320, 512])
def test_a_step_of_wide_heads_runs_our_forward_with_its_lse_and_our_backward(driven: Driven, d: int, implementation: str | None) -> None:
    q, k, v = (torch.zeros(1, heads, 1024, d, dtype=torch.float16, requires_grad=True) for heads in (4, 2, 2))
    for _ in range(2):
        out, forward = driven.since(lambda: dispatch.attention(q, k, v, is_causal=True, enable_gqa=True, implementation=implementation))
        assert [name for name, _ in forward] == ["flash_fwd_hopper"]
        found, backward = driven.since(lambda out=out: torch.autograd.grad(out.float().sum(), (q, k, v)))
        assert [name for name, _ in backward] == ["preprocess", "score_gradients", "key_gradients", "query_gradients"]
        by_kernel = dict(backward)
        assert by_kernel["preprocess"]["out_ptr"] == out.data_ptr()
        keys, queries = by_kernel["key_gradients"], by_kernel["query_gradients"]
        assert [queries["dq_desc"], keys["dk_desc"], keys["dv_desc"]] == [x.data_ptr() for x in found]
        scores = by_kernel["score_gradients"]
        assert (scores["probs_desc"], scores["dscores_desc"]) == (keys["probs_desc"], keys["dscores_desc"])
        assert queries["dscores_desc"] == keys["dscores_desc"] != keys["probs_desc"]
