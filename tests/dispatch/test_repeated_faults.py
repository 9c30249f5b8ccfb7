"""Repeated calls that fail, by their arguments, an allocation or a launch, against a stand-in for the driver: they end as first ones do."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from driven import Driven, drive
from test_dispatch_gradient_plans import Decoding, library  # noqa: F401
from ways import doubled

from flashtune import dispatch
from flashtune.dispatch.plans.program import Program
from flashtune.dispatch.state import context
from flashtune.dispatch.state.context import Memo
from flashtune.dispatch.state.settings import Settings


@pytest.fixture
def driven(library: Decoding, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:  # noqa: F811
    # A state of its own, since it remembers kernels that failed.
    with context.serving(Memo(Settings(unmeasured=True))), torch.no_grad():
        yield drive(library, monkeypatch)
    monkeypatch.undo()
    context.current().forget()


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).half()


def rows() -> list[Any]:
    bounds = torch.tensor([0, 100, 230]).int()
    return [halves(240, 4, 64), halves(240, 2, 64), halves(240, 2, 64), bounds, bounds]


def paged(q: Any, k: Any, v: Any, cu: Any, used: Any) -> Any:
    table = torch.zeros(8, 8).int()
    return dispatch.attention_varlen(q, k, v, cu, None, 1, 120, seqused_k=used, block_table=table, enable_gqa=True)


WAYS: dict[str, tuple[Callable[[], list[Any]], Callable[..., Any]]] = {
    "dense": (lambda: [halves(1, 4, 256, 64) for _ in range(3)], dispatch.attention),
    "score": (lambda: [halves(1, 4, 256, 64) for _ in range(3)], lambda *x: dispatch.flex_attention(*x, score_mod=doubled)),
    "packed": (rows, lambda *x: dispatch.attention_varlen(*x, 130, 130, enable_gqa=True)),
    "packed score": (rows, lambda *x: dispatch.attention_varlen(*x, 130, 130, enable_gqa=True, score_mod=doubled)),
    "paged": (
        lambda: [halves(8, 4, 64), halves(9, 16, 2, 64), halves(9, 16, 2, 64), torch.arange(9).int(), torch.full((8,), 99).int()],
        paged,
    ),
}

WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "q",
    "array": lambda: np.zeros((1, 4, 256, 64)),
    "sparse": lambda: halves(1, 4, 256, 64).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([halves(4, 256, 64)]),
}


def outcome(call: Callable[..., Any], given: list[Any]) -> object:
    try:
        return call(*given).shape
    except Exception as error:
        return type(error), str(error)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("way", WAYS)
def test_a_repeated_call_refuses_a_query_as_a_first_one_does(driven: Driven, way: str, wrong: str) -> None:
    made, call = WAYS[way]
    first = outcome(call, [WRONG[wrong](), *made()[1:]])
    for _ in range(4):
        call(*made())
    assert outcome(call, [WRONG[wrong](), *made()[1:]]) == first


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_allocation_of_a_repeated_call_is_raised_and_forgotten(driven: Driven, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    made, call = WAYS[way]
    for _ in range(4):
        call(*made())

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    given = made()
    with monkeypatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, full)
        with pytest.raises(torch.OutOfMemoryError):
            call(*given)
    _, launches = driven.since(lambda: call(*given))
    assert len(launches) == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_launch_of_a_repeated_call_is_raised_and_not_repeated(driven: Driven, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    made, call = WAYS[way]
    for _ in range(4):
        call(*made())
    launched: list[int] = []

    def failing(*_: Any) -> None:
        launched.append(1)
        raise RuntimeError("launch failed")

    with monkeypatch.context() as patch:
        patch.setattr(Program, "launch", failing)
        with pytest.raises(RuntimeError, match="launch failed"):
            call(*made())
    assert launched == [1]
