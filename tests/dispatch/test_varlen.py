"""Packed sequences: each is as if it were alone, by kernels in Triton's interpreter and by a call for each sequence."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from interpreting import interpreted
from torch.nn.attention import flex_attention as flex_module
from varlen_cases import CASES, RAGGED, SQUARE, agrees, forced, inputs, wanted

from flashtune import dispatch
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.rows import run as packed_run

WITHIN_OTHERS = {"causal", "window from the first", "slopes", "dropout", "used keys"}
"""Cases whose code is that of others; kernels compute them on a GPU alone (tests/gpu/test_packed.py)."""


@pytest.mark.parametrize("half", [0, 1])
def test_kernels_compute_each_sequence_alone(half: int) -> None:
    names = [name for name in CASES if name not in WITHIN_OTHERS][half::2]
    report = interpreted("interpret_varlen", *names)
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) == len(names) > 5


def test_kernels_keep_the_promises_of_packed_calls() -> None:
    report = interpreted("interpret_varlen")
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) > 8


@pytest.mark.parametrize("case", CASES)
def test_without_kernels_each_sequence_is_a_call(case: str) -> None:
    with forced("torch"):
        agrees(inputs(CASES[case]), RAGGED)


def test_gradients_are_right_to_float64() -> None:
    given = inputs({"window_size": (3, 0), "sinks": True}, ((3, 0, 2), (4, 1, 0)), dtype=torch.float64, d=2, heads=2, padding=0)

    def call(*x: torch.Tensor) -> Any:
        return given._replace(tensors=list(x[:3]), words=given.words | {"sinks": x[3]}).call()[0]

    sinks = given.words["sinks"].detach().double().requires_grad_()
    assert torch.autograd.gradcheck(call, (*given.tensors, sinks))


@pytest.mark.parametrize("slopes", ["heads", "sequences"])
def test_slopes_have_gradients_without_kernels_and_in_a_graph(slopes: str) -> None:
    given = inputs({"slopes": slopes}, SQUARE)
    asked = given.words["alibi_slopes"].requires_grad_(), *given.tensors
    found = []
    for backend in (None, "aot_eager"):
        out, _ = given.call(backend)
        found.append(torch.autograd.grad(out[:9].square().sum(), asked))
    assert found[0][0].abs().sum() > 0
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("bounds", [(0,), (0, 0), (0, 0, 0)], ids=str)
def test_an_output_without_sequences_is_part_of_the_graph(bounds: tuple[int, ...]) -> None:
    query, key = torch.randn(3, 2, 16).requires_grad_(), torch.randn(5, 2, 16).requires_grad_()
    of_q, of_k = torch.tensor(bounds), torch.tensor([0, *[5] * (len(bounds) - 1)])
    out, lse = dispatch.attention_varlen(query, key, key, of_q, of_k, 3, 5, return_lse=True)
    assert not out.any() and bool((lse == -torch.inf).all())
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), (query, key)))


def test_the_lse_has_a_row_for_each_head_and_comes_on_request() -> None:
    from torch.nn.attention.varlen import AuxRequest

    given = inputs({}, SQUARE)
    out = dispatch.attention_varlen(*given.arguments, enable_gqa=True)
    both = dispatch.attention_varlen(*given.arguments, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert torch.equal(both[0], out) and both[1].shape == (4, len(out)) and both[1].dtype == torch.float32
    torch.testing.assert_close(both[1].double(), wanted(given, SQUARE)[1], atol=1e-5, rtol=1e-5)


def test_autocast_brings_queries_keys_and_values_to_one_dtype() -> None:
    given = inputs({"sinks": True}, SQUARE)
    query, key, value = given.tensors
    mixed = given._replace(tensors=[query, key, value.detach().bfloat16().requires_grad_()])
    with pytest.raises(InputTypeError, match="give them one"):
        mixed.call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, lse = mixed.call()
        wide = mixed._replace(tensors=[query.double(), *mixed.tensors[1:]])
        narrow = mixed._replace(tensors=[query, key, value.to(torch.float8_e5m2)])
        with pytest.raises(InputTypeError, match="float8_e5m2: give them one"):
            narrow.call()
        with pytest.raises(InputTypeError, match=r"float64, torch\.bfloat16"):
            wide.call()
    out, sums = given._replace(tensors=[x.bfloat16() for x in given.tensors]).call()
    assert found.dtype == torch.bfloat16 and torch.equal(found, out) and torch.equal(lse, sums)
    for x, gradient in zip(mixed.tensors, torch.autograd.grad(found.sum(), mixed.tensors), strict=True):
        assert gradient.dtype == x.dtype and gradient.isfinite().all()


def test_a_window_that_ends_at_the_diagonal_is_causal() -> None:
    given = inputs({}, RAGGED)
    outs = [
        dispatch.attention_varlen(*given.arguments, enable_gqa=True, **words) for words in ({"window_size": (-1, 0)}, {"is_causal": True})
    ]
    assert torch.equal(outs[0], outs[1])


def test_without_kernels_a_compiler_traces_one_operator() -> None:
    given = inputs({}, RAGGED)

    def loss(*x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = dispatch.attention_varlen(*x, *given.longest, enable_gqa=True)[:9].square().sum()
        return found

    eager = torch.autograd.grad(loss(*given.tensors, *given.bounds), given.tensors)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(*given.tensors, *given.bounds)
    for ours, theirs in zip(torch.autograd.grad(compiled, given.tensors), eager, strict=True):
        torch.testing.assert_close(ours, theirs)


TRACED: list[dict[str, Any]] = [
    {"softcap": 2.0, "slopes": "heads", "is_causal": True},
    {"sinks": True, "slopes": "sequences", "window_size": (3, 4), "causal_alignment": "top_left"},
]


@pytest.mark.parametrize("words", TRACED, ids=str)
def test_a_compiler_traces_pytorch_where_it_is_named(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(words, RAGGED)
    given.words["implementation"] = "torch"
    monkeypatch.setattr(dispatch, "attention_varlen", torch.compile(dispatch.attention_varlen, backend="eager", fullgraph=True))
    agrees(given, RAGGED)


def test_dropout_of_pytorch_that_is_named_leaves_a_compilers_graph_and_is_refused_in_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each sequence leaves the graph by itself.
    lengths = (5, 0), (20, 3)
    given = inputs(CASES["dropout"], lengths)
    given.words["implementation"] = "torch"
    agrees(given, lengths)
    plain = dispatch.attention_varlen
    monkeypatch.setattr(dispatch, "attention_varlen", torch.compile(plain, backend="eager"))
    agrees(given, lengths)
    # It remembers what it left.
    torch._dynamo.reset()
    monkeypatch.setattr(dispatch, "attention_varlen", torch.compile(plain, backend="eager", fullgraph=True))
    with pytest.raises(Exception, match="implementation='torch' can't run this call, since a compiler can't trace its dropout"):
        given.call()


@pytest.mark.parametrize(
    "words", [{}, {"is_causal": True}, {"is_causal": True, "sinks": torch.zeros(4)}, {"implementation": "torch"}], ids=str
)
def test_jagged_nested_tensors_are_packed_ones(words: dict[str, Any]) -> None:
    given = inputs({}, SQUARE, padding=0)
    leaves = [x.detach().requires_grad_() for x in given.tensors]
    nested = [torch.nested.nested_tensor_from_jagged(x, given.bounds[0]).transpose(1, 2) for x in leaves]
    out = dispatch.attention_jagged(*nested, enable_gqa=True, **words)
    packed = dispatch.attention_varlen(*given.arguments, enable_gqa=True, **words)
    assert out.is_nested and out.shape == nested[0].shape
    torch.testing.assert_close(out.values().transpose(0, 1), packed)
    found = torch.autograd.grad(out.values().square().sum(), leaves)
    for ours, theirs in zip(found, torch.autograd.grad(packed.square().sum(), given.tensors), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("paged", [False, True])
def test_tensors_without_data_have_outputs_without_data(paged: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    query, cache, bounds = torch.zeros(6, 4, 16), torch.zeros(9, 5, 4, 16), torch.tensor([0, 3, 6], dtype=torch.int32)
    key = cache if paged else query
    more = {"block_table": torch.zeros(2, 2, dtype=torch.int32)} if paged else {}
    for bare in (FakeTensorMode().from_tensor, lambda x: x.to("meta")):
        tensors = [bare(x) for x in (query, key, key, bounds, bounds)]
        out, lse = dispatch.attention_varlen(*tensors, 3, 3, return_lse=True, **{name: bare(x) for name, x in more.items()})
        assert out.shape == query.shape and lse.shape == (4, 6) and type(out) is type(tensors[0]) and out.device == tensors[0].device


def test_fake_tensors_have_fake_outputs_beside_functions() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        query, bounds = mode.from_tensor(torch.zeros(6, 4, 16)), mode.from_tensor(torch.tensor([0, 3, 6], dtype=torch.int32))
        words: dict[str, Any] = {"mask_mod": lambda b, h, q, k: (q >= k) & (k % 2 == 0), "return_lse": True}
        out, lse = dispatch.attention_varlen(query, query, query, bounds, bounds, 3, 3, **words)
    assert out.shape == query.shape and lse.shape == (4, 6) and type(out) is type(query)


@pytest.mark.parametrize("functions", [{}, {"mask_mod": lambda b, h, q, k: (q >= k) & (k % 2 == 0)}])
def test_longest_sequences_may_be_integers_of_numpy(functions: dict[str, Any]) -> None:
    q, cu = torch.randn(12, 2, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 5, 12], dtype=torch.int32)
    found, wanted = (dispatch.attention_varlen(q, q, q, cu, cu, n, n, **functions) for n in (np.int64(7), 7))
    assert torch.equal(found, wanted)


def test_an_lse_of_functions_uses_nothing_that_pytorch_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # It warns once in a process.
    monkeypatch.setattr(flex_module, "_WARNINGS_SHOWN", set())
    x, bounds = torch.randn(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    dense = [x.transpose(0, 1)[None]] * 3
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FutureWarning)
        out, lse = dispatch.flex_attention(*dense, score_mod=lambda score, b, h, q, k: score * 2, return_lse=True)
        packed = dispatch.attention_varlen(x, x, x, bounds, bounds, 8, 8, score_mod=lambda score, b, h, q, k: score * 2)
    wanted, wanted_lse = dispatch.attention(*dense, scale=0.5, return_lse=True)
    torch.testing.assert_close((out, lse, packed.transpose(0, 1)[None]), (wanted, wanted_lse, wanted))


def test_jagged_tensors_of_other_kinds_are_refused() -> None:
    given = inputs({}, SQUARE, padding=0)
    nested = [torch.nested.nested_tensor_from_jagged(x.detach(), given.bounds[0]) for x in given.tensors]
    with pytest.raises(InputError, match="transpose"):
        dispatch.attention_jagged(*nested, enable_gqa=True)
    with pytest.raises(InputTypeError, match="jagged"):
        dispatch.attention_jagged(*given.tensors)
    query, key, value = (x.transpose(1, 2) for x in nested)
    for words in ({"return_lse": True}, {"seqused_k": torch.tensor([1, 0, 2])}):
        with pytest.raises(InputError, match="is no argument of attention_jagged: call attention_varlen"):
            dispatch.attention_jagged(query, key, value, enable_gqa=True, **words)
    other = torch.nested.nested_tensor_from_jagged(given.tensors[2].detach(), given.bounds[0].clone()).transpose(1, 2)
    with pytest.raises(InputError, match="key and value have offsets of their own"):
        dispatch.attention_jagged(query, key, other, enable_gqa=True)


def test_the_operator_keeps_torchs_rules_of_operators() -> None:
    given = inputs({}, SQUARE, padding=0)
    arguments = (*given.tensors, *given.bounds, *[None] * 7, *given.longest, 0.25, -1, 0, True, 0.0, 0.0, False, False, None)
    found = torch.library.opcheck(torch.ops.flashtune_packed.attention.default, arguments)
    assert set(found.values()) == {"SUCCESS"}


def test_it_says_who_serves() -> None:
    given = inputs({}, RAGGED)
    said = dispatch.explain_varlen(*given.arguments, enable_gqa=True)
    assert said.kind == "framework" and "each sequence is a call of its own" in said.reason


def changed(**words: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with some of them changed."""
    given = inputs({}, SQUARE)
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    arguments = dict(zip(names, (*given.tensors, *given.bounds, *given.longest), strict=True))
    return [words.pop(name, x) for name, x in arguments.items()], {"enable_gqa": True} | words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"enable_gqa": False}, "enable_gqa"),
        ({"query": torch.zeros(2, 4, 5, 16)}, "dimensions"),
        ({"query": torch.zeros(5, 3, 16)}, "multiple"),
        ({"key": torch.zeros(5, 2, 16)}, "sizes"),
        ({"cu_seqlens_q": torch.zeros(9)}, "int32"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, "bounds"),
        ({"seqused_k": torch.zeros(9, dtype=torch.int32)}, "bounds"),
        ({"cu_seqlens_k": [0, 5]}, "tensor"),
        ({"block_table": torch.zeros(1, dtype=torch.int32)}, "caches"),
        ({"num_splits": -1}, "num_splits"),
        ({"max_seqlen_k": torch.tensor(99)}, "max_seqlen_k must be an integer"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k must be a tensor"),
        ({"seqused_k": [1, 2]}, "seqused_k must be a tensor"),
        ({"alibi_slopes": [0.5] * 4}, "alibi_slopes must be a tensor"),
        ({"value": torch.zeros(241, 2, 16, device="meta")}, "one device"),
        ({"sinks": torch.zeros(4, device="meta")}, "one device"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes"),
        ({"causal_alignment": "middle"}, "causal_alignment"),
        ({"softcap": -1.0}, "softcap"),
        ({"dropout_p": 1.5}, "dropout_p"),
        ({"window_size": (-2, 0)}, "window"),
        ({"query": torch.zeros(241, 4, 16, dtype=torch.float16)}, "dtypes"),
        ({"query": torch.zeros(241, 4, 16).to(torch.float8_e4m3fn)}, "alone may be float8"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused_in_a_sentence(words: dict[str, Any], said: str) -> None:
    arguments, others = changed(**words)
    with pytest.raises((InputError, InputTypeError), match=said):
        dispatch.attention_varlen(*arguments, **others)


@pytest.mark.parametrize("bounds", [[0, 4, 10], [1, 4, 8], [0, 6, 4, 8], [0, -3, 8]])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_bounds_that_make_no_sequences_are_refused_where_they_are_read(name: str, bounds: list[int]) -> None:
    x, right = torch.randn(8, 2, 16), torch.arange(0, 4 * len(bounds), 4, dtype=torch.int32).clamp(max=8)
    given = {"cu_seqlens_q": right, "cu_seqlens_k": right, name: torch.tensor(bounds, dtype=torch.int32)}
    with pytest.raises(InputError, match=f"{name} has bounds that don't rise from 0 to at most the 8 rows"):
        dispatch.attention_varlen(x, x, x, **given, max_seqlen_q=8, max_seqlen_k=8)


def test_used_keys_with_a_stride_are_read_with_it_at_every_call() -> None:
    given = inputs({}, ((6, 6, 6), (10, 10, 10)), padding=0)
    wide = torch.tensor([3, 9, 7, 9, 10, 9], dtype=torch.int32)
    with torch.no_grad():
        right = given._replace(words=given.words | {"seqused_k": wide[::2].contiguous()}).call()[0]
        for _ in range(3):
            found = given._replace(words=given.words | {"seqused_k": wide[::2]}).call()[0]
            torch.testing.assert_close(found, right, atol=0, rtol=0)


@pytest.mark.parametrize("functions", [{}, {"mask_mod": lambda b, h, q, k: (q >= k) & (k % 2 == 0)}], ids=["plain", "functions"])
def test_fewer_used_keys_than_none_are_none(functions: dict[str, Any]) -> None:
    bounds, used = torch.tensor([0, 6, 10], dtype=torch.int32), torch.tensor([-3, 4], dtype=torch.int32)
    x = torch.randn(10, 2, 16, requires_grad=True)
    out = dispatch.attention_varlen(x, x, x, bounds, bounds, 6, 6, seqused_k=used, **functions)
    wanted = dispatch.attention_varlen(x, x, x, bounds, bounds, 6, 6, seqused_k=used.clamp(min=0), **functions)
    torch.testing.assert_close(out, wanted, atol=0, rtol=0)
    assert (out[:6] == 0).all()


@pytest.mark.parametrize("sequences", [1, 127, 128, 129])
def test_rows_behind_the_last_sequence_are_empty_for_any_number_of_sequences(sequences: int) -> None:
    bounds = torch.arange(0, 2 * sequences + 1, 2, dtype=torch.int32)
    query, key, value = (torch.randn(2 * sequences + more, 1, 16) for more in (300, 0, 0))
    with torch.no_grad():
        out, lse = dispatch.attention_varlen(query, key, value, bounds, bounds, 2, 2, return_lse=True)
    assert (out[2 * sequences :] == 0).all() and (lse[:, 2 * sequences :] == -float("inf")).all()
    assert lse[:, : 2 * sequences].isfinite().all()


def test_kernels_that_are_named_and_cannot_be_built_are_no_reason_for_pytorch_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs({}, RAGGED)

    def fails(plan: Any, packed: Any, seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        plan.forward = None
        return packed.query, packed.query

    dispatch.reload()
    monkeypatch.setattr(packed_run, "torch_only", lambda packed: None)
    monkeypatch.setattr(packed_run, "served", lambda *given: object())
    monkeypatch.setattr(packed_run, "_planned", fails)
    named = {"enable_gqa": True, "implementation": "flashtune"}
    for _ in range(2):
        with pytest.raises(InputError, match="implementation='flashtune' can't run this call, since no kernel takes packed sequences"):
            dispatch.attention_varlen(*given.arguments, **named)
