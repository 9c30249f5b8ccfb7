"""Calls with nothing to compute: an empty last batch, a prompt without tokens, a cache that holds none yet, rows that see no key. Served as
torch serves them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreting import interpreted
from varlen_cases import EMPTY, without_tokens

from flashtune import dispatch
from flashtune.core.problems import reference

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Of the query, and of key and value."""

SHAPES: dict[str, Shapes] = {
    "no batch": ((0, 4, 8, 16), (0, 4, 8, 16)),
    "no batch beside one": ((0, 4, 8, 16), (1, 4, 8, 16)),
    "no batch of several": ((3, 0, 4, 8, 16), (3, 0, 4, 8, 16)),
    "no heads": ((2, 0, 8, 16), (2, 0, 8, 16)),
    "no queries": ((2, 4, 0, 16), (2, 4, 8, 16)),
    "no keys": ((2, 4, 8, 16), (2, 4, 0, 16)),
    "no tokens": ((0, 16), (0, 16)),
}


def tensors(shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in (shapes[0], shapes[1], shapes[1])]


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **words: Any) -> torch.Tensor:
    """Torch's output; before 2.13 what that gives of no heads, by which torch 2.11 ends the process, and of two dimensions with shared
    heads, which it refuses."""
    odd = (q.ndim > 2 and q.shape[-3] == 0) or (q.ndim == 2 and "enable_gqa" in words)
    return torch.zeros_like(q) if odd and torch.__version__ < (2, 13) else F.scaled_dot_product_attention(q, k, v, *more, **words)


@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"enable_gqa": True}, {"dropout_p": 0.5}], ids=str)
@pytest.mark.parametrize("case", SHAPES)
def test_an_empty_call_gives_what_torch_gives(case: str, words: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = tensors(SHAPES[case], dtype)
        for _ in range(2):
            ours = dispatch.attention(q, k, v, **words)
            theirs = torchs(q, k, v, **words)
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        ours.sum().backward()
        assert all(x.grad is not None and not x.grad.any() for x in (q, k, v))


@pytest.mark.parametrize("case", SHAPES)
def test_a_mask_fits_an_empty_call(case: str) -> None:
    q, k, v = tensors(SHAPES[case])
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    assert torch.equal(dispatch.attention(q, k, v, mask, window=3), torchs(q, k, v, mask))


@pytest.mark.parametrize(
    "words", [{}, {"softcap": 2.0}, {"window": 3, "causal_alignment": "bottom_right"}, {"dropout_p": 0.5, "seed": 1}], ids=str
)
@pytest.mark.parametrize("case", SHAPES)
def test_what_torch_lacks_is_empty_too_and_the_lse_of_no_keys_is_minus_infinity(case: str, words: dict[str, Any]) -> None:
    q, k, v = tensors(SHAPES[case])
    out, lse = dispatch.attention(q, k, v, return_lse=True, **words)
    assert torch.equal(out, torch.zeros(q.shape))
    assert torch.equal(lse, torch.full(q.shape[:-1], float("-inf")))


@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"window": 2}], ids=str)
def test_no_queries_have_no_output_beside_sinks_either(words: dict[str, Any]) -> None:
    q, k, v = tensors(SHAPES["no queries"])
    assert dispatch.attention(q, k, v, sinks=torch.zeros(4), **words).shape == q.shape


def test_explain_says_that_there_is_nothing_to_compute() -> None:
    found = dispatch.explain(*tensors(SHAPES["no batch"]))
    assert found.kind == "framework"
    assert found.key is None


def test_an_empty_call_compiles() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: dispatch.attention(q, k, v), backend="aot_eager", fullgraph=True)
    for case in ("no batch", "no queries", "no keys"):
        q, k, v = tensors(SHAPES[case])
        assert torch.equal(compiled(q, k, v), dispatch.attention(q, k, v))


@pytest.mark.parametrize("return_lse", [False, True], ids=["fused", "composite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_a_bias_of_finfo_min_hides_altogether_gives_the_mean_of_the_values_as_in_torch(
    dtype: torch.dtype, return_lse: bool
) -> None:
    q, k, v = (torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3))
    bias = torch.zeros(5, 5, dtype=dtype)
    bias[2], bias[3] = torch.finfo(dtype).min, float("-inf")
    given = dispatch.attention(q, k, v, bias, return_lse=return_lse)
    out = given[0] if return_lse else given
    for served in (out, reference.attention(q, k, v, mask=bias, scale=0.25)[0]):
        torch.testing.assert_close(served[:, :, 2].double(), v.double().mean(2), atol=2e-2, rtol=2e-2)
        assert (served[:, :, 3] == 0).all(), "which -inf hides"


def biased(table: torch.Tensor, *, with_mask: bool = False) -> dict[str, Any]:
    """A score that captures a tensor."""
    found = {"score_mod": lambda score, b, h, i, j: score + table[h, (i - j).clamp(-2, 2) + 2].sqrt()}
    return found | {"block_mask": lambda b, h, i, j: i >= j} if with_mask else found


@pytest.mark.parametrize("case", ["no batch", "no queries", "no keys"])
def test_an_empty_call_has_gradients_of_what_is_given_per_head_and_of_a_bias(case: str) -> None:
    q, k, v = tensors(SHAPES[case])
    more = [torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True), torch.zeros(4, 1, 1, requires_grad=True)]
    out = dispatch.attention(q, k, v, sinks=more[0], alibi_slopes=more[1]) + dispatch.attention(q, k, v, more[2])
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), (q, k, v, *more)))


@pytest.mark.parametrize("alone", [False, True], ids=["all", "captured alone"])
@pytest.mark.parametrize("with_mask", [False, True], ids=["score", "score and mask"])
@pytest.mark.parametrize("case", ["no batch", "no queries", "no keys"])
def test_functions_of_an_empty_call_have_gradients_for_all_that_they_capture(case: str, with_mask: bool, alone: bool) -> None:
    q, k, v = tensors(SHAPES[case])
    table = torch.zeros(4, 5, requires_grad=True)
    asked = (table,) if alone else (table, q, k, v)
    given = [x.detach() for x in (q, k, v)] if alone else (q, k, v)
    out, lse = dispatch.attention(*given, **biased(table, with_mask=with_mask), return_lse=True)
    assert out.shape == q.shape and not out.any() and bool((lse == float("-inf")).all())
    for x, gradient in zip(asked, torch.autograd.grad(out.sum(), asked), strict=True):
        assert gradient.shape == x.shape and not gradient.any()


def test_functions_of_an_empty_call_compile() -> None:
    q, k, v = tensors(SHAPES["no keys"])
    table = torch.zeros(4, 5, requires_grad=True)
    out = torch.compile(dispatch.flex_attention, backend="aot_eager", fullgraph=True)(q, k, v, **biased(table))
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), (q, k, v, table)))


@pytest.mark.parametrize("case", EMPTY)
def test_a_rank_without_tokens_has_gradients_for_all_that_asks(case: str) -> None:
    without_tokens(case)


def test_a_rank_without_tokens_has_gradients_of_kernels_too() -> None:
    report = interpreted("interpret_varlen", "no sequences", "no queries", "no keys")
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) == 3
