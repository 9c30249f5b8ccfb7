"""Repeated calls that are found again by their arguments alone, against a stand-in for the driver: their launches get their own tensors."""

import inspect
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from driven import Driven, drive
from test_alike import TAKES
from test_dispatch_gradient_plans import Decoding, library  # noqa: F401
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from ways import WAYS, doubled, tensors

from flashtune import dispatch
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch import api, flex
from flashtune.dispatch.functions import blocks, recent
from flashtune.dispatch.functions.kept import Lists, kept
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


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


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
    mask = create_block_mask(causal, None, None, 240, 240, "cpu")
    calls["a score of attention"] = partial(dispatch.attention, q, k, v, score_mod=doubled)
    calls |= {"a window": partial(dispatch.attention, q, k, v, block_mask=mask), "lists": partial(calls["functions"], mask)}
    with torch.no_grad(), dispatch.use(unmeasured=True):
        found = {name: operations(call) for name, call in calls.items()}
    most = {"dense": 1.0, "packed": 1.2, "paged": 1.2, "functions": 1.6, "packed functions": 1.8}
    most |= {"a score of attention": 1.6, "a window": 1.6, "lists": 1.8}
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments with which masks that are windows called `attention` so far."""
    found: list[dict[str, Any]] = []
    attention = api.attention
    monkeypatch.setattr(api, "attention", wraps(attention)(lambda *x, **words: found.append(words) or attention(*x, **words)))
    return found


def rows_of(*, heads: int = 4, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (torch.zeros(1, heads, 256, 64, dtype=dtype) for _ in range(3))
    return query, key, value


def test_a_repeated_call_whose_mask_is_a_window_goes_by_the_plan_of_attention(driven: Driven, asked: list[Any]) -> None:
    mask = create_block_mask(causal, None, None, 256, 256, "cpu")
    with torch.no_grad(), dispatch.use(unmeasured=True):
        for with_lse in (False, False, False, True, True, True, False):
            given = rows_of()
            # A plan that served another call last isn't this one's.
            dispatch.attention(*rows_of(), window=(3, 0), return_lse=with_lse)
            found, launches = driven.since(partial(dispatch.attention, *given, block_mask=mask, return_lse=with_lse))
            out, lse = found if with_lse else (found, None)
            [(_, got)] = launches
            got = {name.removesuffix("_ptr").removesuffix("_desc"): at for name, at in got.items()}
            assert [got[name] for name in "qkv"] == [x.data_ptr() for x in given] and got["out"] == out.data_ptr()
            assert lse is None or got["lse"] == lse.data_ptr()
    # One mask's calls are kept for the options of the last.
    assert [words["return_lse"] for words in asked] == [False, True, False]


def written(mask: BlockMask) -> None:
    mask.kv_num_blocks.zero_()


def replaced(mask: BlockMask) -> None:
    mask.kv_indices = mask.kv_indices.clone()


def other_function(mask: BlockMask) -> None:
    mask.mask_mod = lambda b, h, q, k: q > k


CHANGES: dict[str, Callable[[BlockMask], Any]] = {
    "lists that are written": written,
    "a list in the place of another": replaced,
    "another function": other_function,
    "another dtype": lambda _: rows_of(dtype=torch.float32),
    "more heads": lambda _: rows_of(heads=8),
    "other strides": lambda _: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows_of()],
    "keys of all batches": lambda _: [torch.zeros(2, 4, 256, 64).half(), *rows_of()[1:]],
    "a gradient": lambda _: [x.requires_grad_() for x in rows_of()],
}


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An item for each call with functions that was decided so far."""
    found: list[int] = []
    call_of = flex.call_of
    monkeypatch.setattr(flex, "call_of", lambda *given: found.append(len(given)) or call_of(*given))
    # Lists that are written make such lists strangers to their function.
    monkeypatch.setattr(blocks, "_FOREIGN", set())
    return found


@pytest.mark.parametrize(("mask", "score", "anew"), [(False, True, False), (True, False, False), (True, True, True)])
def test_another_stream_has_lists_of_blocks_of_its_own(
    driven: Driven, decided: list[int], monkeypatch: pytest.MonkeyPatch, mask: bool, score: bool, anew: bool
) -> None:
    words: dict[str, Any] = {"score_mod": doubled} if score else {}
    words |= {"block_mask": create_block_mask(causal, None, None, 256, 256, "cpu")} if mask else {}
    with torch.no_grad(), dispatch.use(unmeasured=True):
        for stream in ((5, False), (6, False), (6, True)):
            monkeypatch.setattr(recent, "stream_of", lambda stream=stream: stream)
            before = len(decided)
            for _ in range(4):
                dispatch.attention(*rows_of(), **words)
            assert len(decided) - before == (anew or stream == (5, False))


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_a_mask_that_is_a_window_or_its_tensors_is_decided_anew(
    driven: Driven, asked: list[Any], decided: list[int], change: str
) -> None:
    mask = create_block_mask(causal, None, None, 256, 256, "cpu")
    with dispatch.use(unmeasured=True):
        for _ in range(5):
            dispatch.attention(*rows_of(), block_mask=mask)
        assert len(decided) == len(asked) == 1
        given: Any = CHANGES[change](mask) or rows_of()
        dispatch.attention(*given, block_mask=mask)
        assert len(decided) == 2


def test_lists_of_queries_count_where_gradients_are_computed() -> None:
    for trains in (False, True):
        mask = create_block_mask(causal, None, None, 256, 256, "cpu")
        lists = Lists.of(mask, trains=trains)
        assert lists.same(mask) and mask.q_num_blocks is not None
        mask.q_num_blocks.zero_()
        assert lists.same(mask) is not trains
        mask.kv_num_blocks.zero_()
        assert not lists.same(mask)
        mask.full_kv_indices = None
        lists = Lists.of(mask, trains=trains)
        assert lists.same(mask)
        mask.full_kv_indices = mask.kv_indices
        assert not lists.same(mask)


BESIDE: dict[str, Any] = {
    name: one.default for name, one in inspect.signature(dispatch.attention).parameters.items() if name not in flex._TAKEN
}
OTHERS: dict[str, Any] = {"seed": 3, "window": 3, "softcap": 2.0, "dropout_p": 0.5, "causal_alignment": "bottom_right", "q_descale": 2.0}
OTHERS |= {"k_descale": 2.0, "v_descale": 2.0, "alibi_slopes": torch.ones(4), "sinks": torch.ones(4), "attn_mask": torch.zeros(256, 256)}


@pytest.mark.parametrize("name", BESIDE)
def test_an_argument_of_attention_is_refused_beside_functions_at_a_repeated_call_too(driven: Driven, name: str) -> None:
    given = rows_of()
    with torch.no_grad(), dispatch.use(unmeasured=True):
        for _ in range(3):
            dispatch.attention(*given, score_mod=doubled, **{name: BESIDE[name]})
        with pytest.raises(InputError, match=f"^{name} is no argument beside score_mod and block_mask"):
            dispatch.attention(*given, score_mod=doubled, **{name: OTHERS.get(name, True)})


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
