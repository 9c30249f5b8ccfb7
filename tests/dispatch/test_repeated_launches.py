"""Repeated calls that are found again by their arguments alone, against a stand-in for the driver: their launches get their own tensors."""

import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from driven import Driven, drive
from test_alike import TAKES
from test_dispatch_gradient_plans import Decoding, library  # noqa: F401
from torch.nn.attention.flex_attention import BlockMask
from ways import WAYS, doubled, tensors

from flashtune import dispatch
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.functions.kept import kept
from flashtune.dispatch.rows.kernel import Kernel
from flashtune.dispatch.state import context


@pytest.fixture
def driven(library: Decoding, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:  # noqa: F811
    yield drive(library, monkeypatch)
    monkeypatch.undo()
    context.current().forget()


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).half()


def packed_rows(rows: int) -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    bounds = torch.tensor([0, 100, 230]).int()
    given = {"q": halves(rows, 4, 64), "k": halves(240, 2, 64), "v": halves(240, 2, 64), "cu_q": bounds, "cu_k": bounds}
    return given, partial(dispatch.attention_varlen, *given.values(), 130, 130, enable_gqa=True)


def pages(rows: int) -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    given = {"q": halves(rows, 4, 64), "k": halves(9, 16, 2, 64), "v": halves(9, 16, 2, 64), "cu_q": torch.arange(rows + 1).int()}
    given |= {"used_k": torch.full((rows,), 99).int(), "table": torch.zeros(rows, 8).int()}
    tensors = [given[name] for name in ("q", "k", "v", "cu_q")]
    words = {"seqused_k": given["used_k"], "block_table": given["table"], "enable_gqa": True}
    return given, lambda longest=120, **more: dispatch.attention_varlen(*tensors, None, 1, longest, **words, **more)


@pytest.mark.parametrize("made", [packed_rows, pages])
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_repeated_call_parses_nothing_and_writes_its_own_tensors(driven: Driven, monkeypatch: Any, made: Any, with_lse: bool) -> None:
    planned: list[Any] = []
    launch = Kernel.launch
    monkeypatch.setattr(Kernel, "launch", lambda kernel, *given: planned.append(kernel) or launch(kernel, *given))
    held: list[torch.Tensor] = []
    for repeat, rows in enumerate((8, 8, 8, 12, 12, 12, 8)):
        given, call = made(rows)
        held += given.values()
        before = len(planned)
        with torch.no_grad():
            found, launches = driven.since(partial(call, return_lse=with_lse))
        out, lse = found if with_lse else (found, None)
        # Launches are planned at the first call of each number of rows.
        assert len(planned) == before + (repeat in (0, 3))
        known = {name: x.data_ptr() for name, x in given.items()}
        got = {name.removesuffix("_ptr").removesuffix("_desc"): at for _, one in launches for name, at in one.items()}
        assert {name: got[name] for name in known} == known and got["out"] == out.data_ptr()
        assert got["lse"] == lse.data_ptr() if lse is not None else got["lse"] not in (0, *(x.data_ptr() for x in (*held, out)))
        assert (out.shape, out.stride()) == (given["q"].shape, given["q"].stride())


EQUALS: dict[str, tuple[Any, ...]] = {
    "is_causal": (False, 0, 0.0, Decimal(0), np.bool_(False)),
    "allow_tf32": (True, 1),
    "deterministic": (False, 0, 0.0),
    "return_lse": (True, 1, np.bool_(True)),
    "enable_gqa": (True, 1, Decimal(1)),
    "scale": (2.0, Decimal(2), 2 + 0j),
    "softcap": (2.0, Decimal(2)),
    "dropout_p": (0.0, Decimal(0)),
}
"""A value of each argument, and others that are equal to it and aren't of its type."""


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in EQUALS for way in TAKES[name]])
def test_what_equals_an_argument_of_a_repeated_call_and_is_of_another_type_is_refused_as_at_a_first_call(
    driven: Driven, name: str, way: str
) -> None:
    right, *wrong = EQUALS[name]
    faces = {"dense": dispatch.attention, "functions": dispatch.flex_attention}
    face = faces.get(way, dispatch.attention_varlen)

    def call(value: Any) -> None:
        # Ways set enable_gqa themselves.
        with pytest.MonkeyPatch.context() as patch, torch.no_grad(), dispatch.use(unmeasured=True):
            patch.setattr(dispatch, face.__name__, lambda *x, **words: face(*x, **{**words, name: value}))
            WAYS[way](given)

    given = tensors()
    for _ in range(3):
        call(right)
    for value in wrong:
        with pytest.raises(InputTypeError, match=rf"^{name} must be "):
            call(value)
    call(right)


@pytest.mark.parametrize("way", ["dense", "packed", "paged"])
def test_a_window_of_a_repeated_call_that_is_none_is_refused_again(driven: Driven, way: str) -> None:
    given, name = tensors(), "window" if way == "dense" else "window_size"
    with torch.no_grad():
        for window in ((3, 0), (3, 0), (3, 0), [3, 0]):
            WAYS[way](given, **{name: window})
        for window in ((3.0, 0), (3, False), (3, 0, 1)):
            with pytest.raises(InputTypeError, match=r"^window="):
                WAYS[way](given, **{name: window})


@pytest.mark.parametrize("way", ["dense", "packed", "paged"])
def test_a_seed_that_is_none_is_refused_where_nothing_is_dropped_too(driven: Driven, way: str) -> None:
    given = tensors()
    with torch.no_grad():
        for seed in (3, 3, 3, 4):
            WAYS[way](given, seed=seed)
        with pytest.raises(InputTypeError, match="seed must be an integer"):
            WAYS[way](given, seed="3")


def operations(call: Callable[[], Any]) -> int:
    """Functions that a repeated call calls, Python's and C's."""
    for _ in range(3):
        call()
    met: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: met.append(event) if event in ("call", "c_call") else None)
    try:
        call()
    finally:
        sys.setprofile(before)
    return len(met)


def test_repeated_calls_take_little_more_operations_than_a_dense_one(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driven.library, "cuLaunchKernelEx", lambda *_: 0)
    q, k, v = halves(1, 4, 240, 64), halves(1, 4, 240, 64), halves(1, 4, 240, 64)
    calls = {"dense": partial(dispatch.attention, q, k, v), "functions": partial(dispatch.flex_attention, q, k, v, doubled)}
    calls |= {"packed": packed_rows(240)[1], "paged": pages(8)[1]}
    calls["packed functions"] = partial(calls["packed"], score_mod=doubled)
    with torch.no_grad(), dispatch.use(unmeasured=True):
        found = {name: operations(call) for name, call in calls.items()}
    most = {"dense": 1.0, "packed": 1.2, "paged": 1.3, "functions": 2.0, "packed functions": 2.2}
    assert {name: count for name, count in found.items() if count > most[name] * found["dense"]} == {}


def test_growing_lengths_share_a_plan_and_a_wrong_bound_is_refused_again(driven: Driven) -> None:
    _, call = pages(8)
    plans = context.current().plans
    for longest in (120, 121, 122, 122, 100):
        call(longest)
    assert len(plans) == 1
    given, _ = packed_rows(240)
    coded = lambda longest: dispatch.attention_varlen(*given.values(), 130, longest, enable_gqa=True, score_mod=doubled)  # noqa: E731
    with torch.no_grad():
        for _ in range(3):
            coded(122)
        for wrong in (-1, "8", 122.0):
            for one in (call, coded):
                with pytest.raises((InputError, InputTypeError), match="max_seqlen_k"):
                    one(wrong)


def test_numpys_bounds_find_the_plan_of_equal_ones(driven: Driven) -> None:
    plans = context.current().plans
    for made in (packed_rows, pages):
        given, call = made(8)
        plans.clear()
        with torch.no_grad():
            for _ in range(3):
                if made is packed_rows:
                    dispatch.attention_varlen(*given.values(), np.int64(130), np.int64(130), enable_gqa=True)
                else:
                    call(np.int64(120))
        assert len(plans) == 1


def test_lists_that_replace_a_masks_own_are_read_anew() -> None:
    mask = BlockMask.from_kv_blocks(torch.ones(1, 1, 2).int(), torch.tensor([[[[0, 1], [0, 1]]]]).int())
    made: list[int] = []

    def count() -> int:
        made.append(len(made))
        return len(made)

    for _ in range(3):
        kept(mask, "place", count)
    assert len(made) == 1
    for index in range(4):
        # Memory and versions may be those of lists that are gone.
        mask.kv_num_blocks = torch.ones(1, 1, 2).int()
        kept(mask, "place", count)
        kept(mask, "place", count)
        assert len(made) == 2 + index
    mask.kv_num_blocks.fill_(2)
    kept(mask, "place", count)
    assert len(made) == 6


def captured_row(rows: int, table: torch.Tensor) -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    given = {"q": halves(1, 4, rows, 64), "k": halves(1, 4, 240, 64), "v": halves(1, 4, 240, 64)}
    return given, lambda score_mod: dispatch.flex_attention(*given.values(), score_mod=score_mod)


def test_repeated_calls_with_functions_get_their_own_tensors_whatever_these_are_aligned_to(driven: Driven) -> None:
    table, memory = torch.zeros(240), torch.zeros(300)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[k]

    compiled = []
    for offset in (0, 0, 4, 1, 1, 0):
        # Other memory under the same tensor, which a kernel for multiples of 16 bytes may not read.
        table.set_(memory.untyped_storage(), offset, (240,), (1,))
        given, call = captured_row(200, table)
        before = len(driven.tried)
        with torch.no_grad(), dispatch.use(unmeasured=True):
            out, launches = driven.since(partial(call, score))
        got = {name.removesuffix("_ptr").removesuffix("_desc"): at for _, one in launches for name, at in one.items()}
        assert {name: got[name] for name in given} == {name: x.data_ptr() for name, x in given.items()} and got["out"] == out.data_ptr()
        assert table.data_ptr() in got.values()
        compiled.append(len(driven.tried) > before)
    assert compiled == [True, False, False, True, False, False]
