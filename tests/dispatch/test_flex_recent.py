"""Calls with functions that were decided before: what is the same again, and what isn't."""

import gc
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask

from flashtune import dispatch
from flashtune.dispatch.functions import kept as flex_kept
from flashtune.dispatch.functions import recent as flex_recent
from flashtune.dispatch.functions.traced import Snapshot
from flashtune.dispatch.state.context import current
from flashtune.templates.mods.capture import Dependencies

limit = 3
OPTIONS = None, False, False, None


def capturing(*values: Any) -> Any:
    x, *others = values

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + limit >= x[k]) & (q >= torch.ops.aten.neg(k)) & (k >= len(others))

    return mask


def test_a_function_is_the_same_until_something_that_it_reads_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(8)
    mask = capturing(x)
    snapshot = Snapshot.make(mask)
    assert snapshot is None, "a list may change unseen"

    def other(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q + limit >= x[k]

    snapshot = Snapshot.make(other)
    assert snapshot is not None and snapshot.same(other) and not snapshot.same(mask)
    x[2] = 1
    assert snapshot.same(other), "no decision depends on values that aren't compared"
    x = torch.arange(8)
    assert not snapshot.same(other)
    snapshot = Snapshot.make(other)
    monkeypatch.setitem(globals(), "limit", 4)
    assert snapshot is not None and not snapshot.same(other)
    snapshot = Snapshot.make(other)
    monkeypatch.delitem(globals(), "limit")
    assert snapshot is not None and not snapshot.same(other)


def test_a_tensor_that_takes_the_place_of_a_freed_one_is_another() -> None:
    memory = numpy.arange(8)
    x = torch.from_numpy(memory)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + x[k]

    snapshot, address = Snapshot.make(score), x.data_ptr()
    assert snapshot is not None and snapshot.same(score)
    x = torch.from_numpy(memory)
    assert x.data_ptr() == address and not snapshot.same(score)


def test_what_is_kept_with_a_mask_is_made_anew_where_its_own_blocks_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, made = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu"), []
    make = lambda: made.append(1)  # noqa: E731
    for count in (1, 2):
        for _ in range(2):
            flex_kept.kept(mask, "lists", make)
        assert len(made) == count
        mask.kv_num_blocks[..., -1] = 0
    monkeypatch.setattr(flex_kept, "stream_of", lambda: (0, True))
    for _ in range(2):
        flex_kept.kept(mask, "lists", make)
    assert len(made) == 4, "a graph that is captured reads them at each replay"


def test_functions_that_a_function_calls_are_read_too() -> None:
    first, numbers = torch.arange(8), [2, 3]

    def inner(q: Tensor, k: Tensor) -> Tensor:
        return first[q] >= k

    def outer(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return inner(q, k)

    def itself(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return itself(b, h, q, k) if numbers else q >= k

    both = and_masks(outer, lambda b, h, q, k: q >= k)
    for mask in (outer, both):
        snapshot = Snapshot.make(mask)
        assert snapshot is not None and snapshot.same(mask)
        before, inner = inner, lambda q, k: q >= k
        assert snapshot is not None and not snapshot.same(mask)
        inner = before
    assert Snapshot.make(itself) is None


@pytest.mark.parametrize("what", ["default", "object"])
def test_functions_that_read_what_may_change_unseen_have_no_snapshot(what: str) -> None:
    settings = SimpleNamespace(factor=2.0)
    functions = {
        "default": lambda s, b, h, q, k, factors=[2.0]: s * factors[0],
        "object": lambda s, b, h, q, k: s * settings.factor,
    }
    assert Snapshot.make(functions[what]) is None


@pytest.fixture
def tensors() -> Iterator[list[Tensor]]:
    current().plans.flex.clear()
    yield [torch.randn(2, 4, 32, 16) for _ in range(3)]
    current().plans.flex.clear()


def test_a_decided_call_is_found_for_tensors_like_its_own_alone(tensors: list[Tensor]) -> None:
    mask, words = (lambda b, h, q, k: q >= k), {"window": (None, 0)}

    def found(*given: Tensor, options: tuple[Any, ...] = OPTIONS) -> Any:
        return flex_recent.recent_call(given, None, mask, options)

    assert found(*tensors) is None
    flex_recent.keep_recent(words, tensors, None, mask, OPTIONS)
    query, key, value = tensors
    assert found(query, key, value) is words and found(key, value, query.clone()) is words
    assert found(query.half(), key, value) is None and found(query[:1], key, value) is None
    assert found(query.transpose(1, 2).contiguous().transpose(1, 2), key, value) is None
    assert found(query.clone().requires_grad_(), key, value) is None and found(query, query, value) is None
    assert found(query, key, value, options=(2.0, *OPTIONS[1:])) is None
    with torch.no_grad():
        assert found(query, key, value) is None
    assert found(query, key, value) is words
    with dispatch.use(unmeasured=True):
        assert found(query, key, value) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert found(query, key, value) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.func.vmap(lambda x: torch.tensor(found(x, x, x) is None))(torch.zeros(3, 2, 4, 32, 16)).all()


def test_dense_and_packed_calls_of_one_function_are_kept_beside_each_other(tensors: list[Tensor]) -> None:
    mask, bounds = (lambda b, h, q, k: q >= k), torch.arange(3)
    kept: dict[int, dict[str, Any]] = {}
    for given in (tensors, [*tensors, bounds]):
        kept[len(given)] = {"scale": float(len(given))}
        flex_recent.keep_recent(kept[len(given)], given, None, mask, OPTIONS)
    for given in (tensors, [*tensors, bounds]):
        assert flex_recent.recent_call(given, None, mask, OPTIONS) is kept[len(given)]
    assert flex_recent.recent_call([*tensors, bounds, bounds.clone()], None, mask, OPTIONS) is None


def test_masks_are_held_weakly_and_reasons_of_torch_are_not_kept(tensors: list[Tensor]) -> None:
    made = create_block_mask(lambda b, h, q, k: q >= k, None, None, 32, 32, device="cpu")
    flex_recent.keep_recent("a reason", tensors, None, made, OPTIONS)
    assert not current().plans.flex
    flex_recent.keep_recent({}, tensors, None, made, OPTIONS)
    assert flex_recent.recent_call(tensors, None, made, OPTIONS) == {}
    [one] = current().plans.flex.values()
    del made
    gc.collect()
    assert one.mask is not None and one.mask[0]() is None
    for place in range(2 * flex_recent.MOST):
        flex_recent.keep_recent({}, tensors, None, lambda b, h, q, k, place=place: q >= k, OPTIONS)
        flex_recent.keep_recent({}, tensors, lambda s, b, h, q, k: s * 2, None, OPTIONS)
    assert len(current().plans.flex) <= flex_recent.MOST


def test_what_a_function_imports_or_its_helper_holds_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("settings_of_masks")
    module.width = 3
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def helper(q: Tensor, k: Tensor) -> Tensor:
        return q - k < helper.width  # type: ignore[attr-defined,no-any-return]

    def importing(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        from settings_of_masks import width  # type: ignore[import-not-found]

        return q - k < width  # type: ignore[no-any-return]

    helper.width = 3  # type: ignore[attr-defined]
    calling = lambda b, h, q, k: helper(q, k)  # noqa: E731
    for function in (importing, calling):
        assert Snapshot.make(function) is None
    key = Dependencies(calling).key
    helper.width = 4  # type: ignore[attr-defined]
    assert Dependencies(importing).key is None
    assert key is not None and key != Dependencies(calling).key


def test_a_tensor_with_other_strides_or_another_type_is_another() -> None:
    x = torch.arange(16).view(4, 4)

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return x[q, k] > 3

    for changed in (lambda: x.data.t(), lambda: x.data.view(torch.float64)):
        snapshot = Snapshot.make(mask)
        x.data = changed()
        assert snapshot is not None and not snapshot.same(mask)
