"""Masks and scores as code on a CPU, with the gradients and the compiled LSE that PyTorch's flex_attention lacks there."""

from typing import Any

import pytest
import torch
from mod_cases import CASES, oracle
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flashtune import dispatch
from flashtune.core.problems.tolerances import LSE_RTOL, TOLERANCES
from flashtune.core.system.errors import InputError

SIZES = {"query": (2, 4, 50, 16), "key": (2, 2, 70, 16), "value": (2, 2, 70, 24)}


def tensors(dtype: torch.dtype, *, key_batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    sizes = [SIZES["query"], *((key_batch, *SIZES[name][1:]) for name in ("key", "value"))]
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


def agrees(name: str, kind: str, dtype: torch.dtype, *, backend: str | None = None, **changes: Any) -> None:
    """Output, LSE and gradients are those of the functions in float64."""
    case, given = CASES[name], tensors(dtype, **changes)
    captured = case.captured(torch.Generator().manual_seed(3))
    score_mod, mask_mod = case.functions(*captured)
    mask = mask_mod
    if mask_mod is not None and case.block_mask:
        mask = create_block_mask(mask_mod, 2, 4, 50, 70, device="cpu")

    def attend(*qkv: torch.Tensor) -> Any:
        return dispatch.attention(*qkv, score_mod=score_mod, block_mask=mask, enable_gqa=True, return_lse=True)

    out, lse = (attend if backend is None else torch.compile(attend, backend=backend, fullgraph=True))(*given)
    twins = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in captured]
    leaves = [x.detach().double().requires_grad_() for x in given]
    whole = [leaves[0], *(x.expand(2, -1, -1, -1) for x in leaves[1:])]
    right, right_lse = oracle(*whole, *case.functions(*twins))
    bound = TOLERANCES[kind]
    torch.testing.assert_close(out.double(), right, atol=bound.atol, rtol=bound.rtol)
    torch.testing.assert_close(lse.double(), right_lse, atol=bound.lse_atol, rtol=LSE_RTOL)
    asked = [(x, y) for x, y in zip([*given, *captured], [*leaves, *twins], strict=True) if x.requires_grad]
    found = torch.autograd.grad(out.double().square().sum(), [x for x, _ in asked], materialize_grads=True)
    wanted = torch.autograd.grad(right.square().sum(), [y for _, y in asked], materialize_grads=True)
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours.double() - theirs).norm()) <= bound.gradient_norm * float(theirs.norm()) + 1e-5


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_functions(name: str) -> None:
    agrees(name, "fp32", torch.float32)


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float64)])
def test_every_type_has_gradients(kind: str, dtype: torch.dtype) -> None:
    agrees("bias", kind, dtype, key_batch=1)


@pytest.mark.parametrize("name", ["document", "relative"])
def test_a_compiler_has_the_lse_and_gradients(name: str) -> None:
    agrees(name, "fp32", torch.float32, backend="aot_eager")


def test_parameters_serve_where_no_gradient_is_recorded() -> None:
    given = tensors(torch.float32)
    with torch.no_grad():
        out = dispatch.flex_attention(*given, lambda s, b, h, q, k: s * 0.5, enable_gqa=True)
    assert not out.requires_grad
    torch.testing.assert_close(out, oracle(*given, lambda s, b, h, q, k: s * 0.5, None)[0].detach())


WHOLE = torch.arange(4)
OTHER_TYPES: dict[str, Any] = {
    "whole": lambda s, b, h, q, k: q - k, "bool": lambda s, b, h, q, k: q >= k, "half": lambda s, b, h, q, k: s.half(),
    "double": lambda s, b, h, q, k: s.double() * 2, "captured": lambda s, b, h, q, k: WHOLE[h] * 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in OTHER_TYPES), ("whole", torch.float64), ("half", torch.bfloat16)]
)
def test_scores_of_any_type_are_taken_as_without_gradients(name: str, dtype: torch.dtype) -> None:
    given = tensors(dtype)
    out = dispatch.flex_attention(*given, OTHER_TYPES[name], enable_gqa=True)
    plain = dispatch.flex_attention(*(x.detach() for x in given), OTHER_TYPES[name], enable_gqa=True)
    assert out.requires_grad and out.dtype == dtype
    bound = TOLERANCES["bf16" if dtype is torch.bfloat16 else "fp16" if name == "half" else "fp32"]
    torch.testing.assert_close(out.detach(), plain, atol=bound.atol, rtol=bound.rtol)


def test_autocast_is_that_of_pytorchs_function() -> None:
    given = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = dispatch.flex_attention(*given, lambda s, b, h, q, k: s * 2, enable_gqa=True, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    right, right_lse = oracle(*(x.detach().bfloat16().double() for x in given), lambda s, b, h, q, k: s * 2, None)
    torch.testing.assert_close(out.double(), right, atol=TOLERANCES["bf16"].atol, rtol=TOLERANCES["bf16"].rtol)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-4, rtol=1e-4)


def test_explanations_name_the_matrices() -> None:
    said = dispatch.explain_flex(*tensors(torch.float32), lambda s, b, h, q, k: s * 0.5, enable_gqa=True).reason
    assert said.startswith("PyTorch by matrices of all scores: no kernel runs on cpu") and "no gradients on a CPU" in said


def test_what_pytorch_refuses_is_refused_with_gradients_too() -> None:
    query, key, value = tensors(torch.float32)
    with pytest.raises(ValueError, match="share 2 key heads: set enable_gqa"):
        dispatch.flex_attention(query, key, value, lambda s, b, h, q, k: s * 0.5)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, 4, 50, 64, device="cpu")
    with pytest.raises(ValueError, match=r"block_mask is for .* make a new one"):
        dispatch.flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("trained", [False, True])
def test_pytorchs_empty_block_mask_is_for_all_lengths(trained: bool) -> None:
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    query, key, value = (x.requires_grad_(trained) for x in (x.detach() for x in tensors(torch.float32)))
    mask = BlockMask.from_kv_blocks(one, one[..., None] - 1, BLOCK_SIZE=1 << 30, seq_lengths=(1, 1))
    out = dispatch.flex_attention(query, key, value, None, mask, enable_gqa=True)
    right, _ = oracle(query.double(), key.double(), value.double(), None, None)
    torch.testing.assert_close(out.double(), right, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("trained", [False, True])
def test_several_types_are_refused_in_a_sentence(which: int, trained: bool) -> None:
    given = [x.detach().requires_grad_(trained) for x in tensors(torch.float32)]
    given[which] = given[which].detach().half()
    words = {"enable_gqa": True, "score_mod": lambda s, b, h, q, k: s * 2}
    with pytest.raises(InputError, match=r"query, key and value have the dtypes .*torch\.float16.*: give them one"):
        dispatch.flex_attention(*given, **words)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert dispatch.flex_attention(*(x.detach() for x in given), **words).shape == (2, 4, 50, 24)
