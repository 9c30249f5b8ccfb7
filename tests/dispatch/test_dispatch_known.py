"""The short way to the plan that served last: taken by calls like the one that it served, and by no other."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashtune import dispatch
from flashtune.core.pytorch import devices
from flashtune.dispatch import api
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.plans.plan import Plan, Plans
from flashtune.dispatch.plans.pytorch import TorchPlan

Q, K, V = torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 40, 16), torch.zeros(2, 2, 40, 16)


class Served(Plan):
    """Stands in for a plan: its output is its name."""

    def __init__(self, name: object) -> None:
        self.name = name

    def run(self, query: torch.Tensor, *_: object) -> tuple[Any, None]:
        return self.name, None


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    """The plans of this thread; every signature gets one of its own at its first call."""
    found = Plans()

    def first_call(signature: Any, *_: object) -> tuple[Any, None]:
        found[signature] = Served(signature)  # type: ignore[assignment]
        return signature, None

    monkeypatch.setattr(devices, "INTERPRETING", True)
    monkeypatch.setattr(api, "_first_call", first_call)
    monkeypatch.setattr(api.STACK.get(), "plans", found)
    return found


def attend(*tensors: Any, **words: Any) -> Any:
    given: Any = tensors or (Q, K, V)
    return dispatch.attention(*given, **{"enable_gqa": True, **words})


def test_like_calls_are_served_without_a_look_up(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    first = attend()
    assert plans.recent is None and attend() == first
    assert plans.recent is not None
    monkeypatch.setattr(Plans, "get", lambda *_: pytest.fail("looked up"))
    assert attend() is first and attend(Q + 1, K + 1, K + 2) is first


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return function(*arguments, **(keywords or {}))


def moved_by_a_number() -> torch.Tensor:
    return torch.zeros(Q.numel() + 1)[1:].view_as(Q)


OTHERS: dict[str, Callable[[], Any]] = {
    "sizes": lambda: attend(Q, K[:, :, :39].contiguous(), V[:, :, :39].contiguous()),
    "strides": lambda: attend(Q, K.mT.contiguous().mT, V),
    "dtype": lambda: attend(Q.half(), K.half(), K.half()),
    "options": lambda: attend(is_causal=True),
    "scale": lambda: attend(scale=0.5),
    "a seed": lambda: attend(seed=3),
    "a mask": lambda: attend(Q, K, V, torch.ones(1, 40, dtype=torch.bool)),
    "slopes": lambda: attend(alibi_slopes=torch.zeros(4)),
    "an address": lambda: attend(moved_by_a_number(), K, V),
    "a parameter": lambda: attend(torch.nn.Parameter(Q, requires_grad=False), K, V),
    "a gradient": lambda: attend(Q.clone().requires_grad_(), K, V),
    "a transform": lambda: torch.func.vmap(lambda x: (attend(), x)[1])(torch.zeros(1)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_call_that_differs_is_looked_up(plans: Plans, what: str) -> None:
    attend()
    attend()
    before = set(plans)
    OTHERS[what]()
    # Parameters are tensors like others, once they were looked at.
    assert len(plans) == len(before) + (what != "a parameter")


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a dispatch mode": Watch,
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_torchs_is_seen(plans: Plans, mode: str) -> None:
    first = attend()
    attend()
    with MODES[mode]():
        assert attend() != first
    assert attend() is first


def test_what_autocast_casts_to_is_seen(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = Q.half(), K.half(), V.half()
    with torch.autocast("cpu", dtype=torch.float16):
        first = attend(*halves)
        assert attend(*halves) is first
        with monkeypatch.context() as patch:
            patch.setattr(Plans, "get", lambda *_: pytest.fail("looked up"))
            assert attend(*halves) is first
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attend(*halves) != first
        assert attend(*halves) is first


class Vague:
    """Says, like an array, neither that it equals a number nor that it doesn't."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")


def test_what_cannot_be_compared_is_left_to_parsing(plans: Plans) -> None:
    attend()
    attend()
    assert plans.recent is not None and attend(causal_alignment=Vague()) is None


def test_prepared_launches_know_the_strides_of_what_is_given_per_head(plans: Plans) -> None:
    first = attend(alibi_slopes=torch.zeros(4))
    assert attend(alibi_slopes=torch.ones(4)) is first and attend(alibi_slopes=torch.zeros(8)[::2]) != first


def test_what_is_given_per_head_is_negated_in_memory(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []
    monkeypatch.setattr(api, "_first_call", lambda _, given, options: (met.append(given.per_head), (None, None))[1])
    attend(alibi_slopes=torch.ops.aten._neg_view(torch.ones(4)))
    assert not met[0].alibi_slopes.is_neg() and met[0].alibi_slopes.tolist() == [-1.0] * 4


def test_negated_memory_is_looked_at(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    attend()
    attend()
    met: list[torch.Tensor] = []
    real = api.prepared
    monkeypatch.setattr(api, "prepared", lambda *tensors: (met.append(tensors[0]), real(*tensors))[1])
    attend(torch.ops.aten._neg_view(Q), K, V)
    assert len(met) == 1 and met[0].is_neg()


def test_inference_mode_has_a_short_way_of_its_own(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    first = attend()
    attend()
    with torch.inference_mode():
        assert attend() is first
        with monkeypatch.context() as patch:
            patch.setattr(Plans, "get", lambda *_: pytest.fail("looked up"))
            assert attend() is first


def test_training_steps_have_a_short_way_in_their_own_grad_mode(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    first = attend(*leaves)
    attend(*leaves)
    with torch.no_grad():
        without = attend(*leaves)
        assert without != first and attend(*leaves) is without
    assert attend(*leaves) is first and attend() != first
    assert attend(*leaves) is first
    with monkeypatch.context() as patch:
        patch.setattr(Plans, "get", lambda *_: pytest.fail("looked up"))
        assert attend(*leaves) is first and attend(*(x.detach().requires_grad_() for x in leaves)) is first


def test_two_signatures_in_turn_are_never_mixed_up(plans: Plans) -> None:
    others = Q, K[:, :, :24].contiguous(), V[:, :, :24].contiguous()
    long, short = attend(), attend(*others)
    assert long != short
    for _ in range(4):
        assert attend() is long and attend(*others) is short
        assert attend(*others) is short and attend() is long


def test_one_tensor_in_two_places_is_looked_up(plans: Plans) -> None:
    first = attend(Q, K, K)
    assert attend(Q, K, K) is first and plans.recent is None
    assert attend() is first and attend() is first and plans.recent is not None
    assert attend(Q, K, K) is first


def test_what_is_forgotten_has_no_short_way(plans: Plans) -> None:
    attend()
    attend()
    assert plans.recent is not None
    plans.clear()
    assert plans.recent is None
    attend()
    assert len(plans) == 1


def test_a_dict_that_another_thread_emptied_stays_empty(plans: Plans) -> None:
    attend()
    [(signature, plan)] = plans.items()
    thread = threading.Thread(target=plans.clear)
    thread.start()
    thread.join()
    plans.served(signature, plan, signature[12], seeded=False, tensors=(Q, K, V))  # type: ignore[index]
    assert plans.recent is None


def test_torch_without_guards_looks_every_call_up(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtune.dispatch.plans.plan.has_guards", False)
    first = attend()
    assert attend() is first and attend() is first and plans.recent is None


def test_torch_is_told_of_nothing_that_it_would_take_anyway() -> None:
    def told(**words: Any) -> Any:
        call = parse(Arguments(Q, K, V), Options(enable_gqa=True, **words))
        return TorchPlan.of(call, Q, K, V, None).direct.keywords  # type: ignore[union-attr]

    assert told() == told(scale=0.25) == {"enable_gqa": True}
    assert told(scale=0.5, dropout_p=0.1) == {"enable_gqa": True, "scale": 0.5, "dropout_p": 0.1}
    assert TorchPlan.of(parse(Arguments(K, K, K), Options(is_causal=True)), K, K, K, None).direct.keywords == {"is_causal": True}  # type: ignore[union-attr]


def test_seeded_dropout_is_decided_for_all_seeds_and_apart_from_unseeded(plans: Plans) -> None:
    first = attend(dropout_p=0.5)
    assert attend(dropout_p=0.5) is first and attend(dropout_p=0.5) is first
    assert attend(dropout_p=0.5, seed=3) is attend(dropout_p=0.5, seed=4) is not first
    assert attend(dropout_p=0.5) is first


def test_torchs_own_function_is_called_with_all_that_its_plan_would_tell_it(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_call(signature: Any, given: Any, _: object) -> tuple[Any, None]:
        q, k, v = given[:3]
        plans[signature] = plan = TorchPlan.of(parse(Arguments(q, k, v), Options(enable_gqa=True, scale=0.7)), q, k, v)
        return plan.run(q, k, v, None, None, None)

    monkeypatch.setattr(api, "_first_call", first_call)
    q, k, v = torch.randn_like(Q), torch.randn_like(K), torch.randn_like(V)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.7, enable_gqa=True)
    for _ in range(3):
        assert torch.equal(attend(q, k, v, scale=0.7), wanted)
    assert plans.recent is not None and plans.recent.plan.direct is not None
    monkeypatch.setattr(TorchPlan, "run", lambda *_: pytest.fail("ran"))
    assert torch.equal(attend(q, k, v, scale=0.7), wanted)
