"""Types of the ways in: what a call returns follows from its keywords, and explanations have the parameters of their calls."""

import inspect
from collections.abc import Callable
from typing import Any, assert_type, get_overloads

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from flashtune import dispatch
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.typed import DenseKeywords, Keywords, PackedKeywords

WAYS = {
    dispatch.attention: dispatch.explain,
    dispatch.attention_varlen: dispatch.explain_varlen,
    dispatch.flex_attention: dispatch.explain_flex,
}
ways = pytest.mark.parametrize(("call", "explain"), WAYS.items(), ids=lambda one: one.__name__)


def test_what_is_returned_is_known_by_the_keywords() -> None:
    """mypy checks the types that are asserted."""
    q = torch.randn(1, 2, 8, 16)
    assert_type(dispatch.attention(q, q, q, None, 0.0, True, window=4), Tensor)
    out, lse = assert_type(dispatch.attention(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert out.shape == q.shape and lse.shape == (1, 2, 8)
    assert_type(dispatch.flex_attention(q, q, q, enable_gqa=True), Tensor)
    assert_type(dispatch.flex_attention(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    _, aux = assert_type(dispatch.flex_attention(q, q, q, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])
    assert aux.lse is not None
    rows, bounds = q[0].transpose(0, 1), torch.tensor([0, 8], dtype=torch.int32)
    packed = rows, rows, rows, bounds, bounds, 8, 8
    assert_type(dispatch.attention_varlen(*packed, is_causal=True), Tensor)
    assert_type(dispatch.attention_varlen(*packed, return_lse=True), tuple[Tensor, Tensor])
    assert_type(dispatch.explain(q, q, q, return_lse=True, window=4), Explanation)
    assert_type(dispatch.explain_varlen(*packed, return_lse=True, is_causal=True), Explanation)
    assert_type(dispatch.explain_flex(q, q, q, return_lse=True), Explanation)


@ways
def test_an_explanation_has_the_parameters_of_its_call(call: Callable[..., Any], explain: Callable[..., Explanation]) -> None:
    signature = inspect.signature(call)
    assert inspect.signature(explain) == signature.replace(return_annotation=Explanation)
    assert "Any" not in str(signature.return_annotation) and signature.return_annotation is not Any
    assert all("Any" not in str(one.annotation) for name, one in signature.parameters.items() if name != "kernel_options")


@ways
def test_overloads_take_what_the_function_takes(call: Callable[..., Any], explain: Callable[..., Explanation]) -> None:
    every = inspect.signature(call).parameters
    more = {"attention": DenseKeywords, "attention_varlen": PackedKeywords}.get(call.__name__)
    overloads = [inspect.signature(one) for one in get_overloads(call)]
    assert len({one.return_annotation for one in overloads}) >= 3
    for signature in overloads:
        own = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
        assert {*own, *(more.__annotations__ if more else ())} == set(every)
        places = [name for name in own if every[name].kind is not inspect.Parameter.KEYWORD_ONLY]
        assert places == [name for name, one in every.items() if one.kind is not one.KEYWORD_ONLY]


def test_shared_keywords_mean_the_same_in_both() -> None:
    dense, packed = (inspect.signature(one).parameters for one in (dispatch.attention, dispatch.attention_varlen))
    assert {name: dense[name].annotation for name in Keywords.__annotations__} == {
        name: packed[name].annotation for name in Keywords.__annotations__
    }


@ways
def test_an_unknown_keyword_is_refused_by_its_name(call: Callable[..., Any], explain: Callable[..., Explanation]) -> None:
    for one in (call, explain):
        with pytest.raises(TypeError, match="windo"):
            one(*[torch.zeros(1, 1, 1, 1)] * 7, windo=3)
