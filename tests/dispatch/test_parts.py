"""Parts of attention, merged: against float64, whatever the parts hold; their gradients; bits; compilers; and what is refused.

Under TRITON_INTERPRET=1 the kernels merge; test_kernels_merge_likewise runs these tests so.
"""

import math
from collections.abc import Callable
from typing import Any

import parts_cases as cases
import pytest
import torch
from branches import forced
from interpreting import output_of_tests
from torch import Tensor

from flashtune import dispatch
from flashtune.core.pytorch import devices
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.parts import merge as merging

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = [torch.float32, torch.float16] if devices.INTERPRETING else [torch.float32, torch.float16, torch.bfloat16]
HIDDEN = -math.inf


def parts(count: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Random parts, of which a third of the rows, and the first row of all, attended to nothing and hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        out, lse = torch.randn(shape, generator=generator).to(dtype), 4 * torch.randn(shape[:-1], generator=generator)
        lse[torch.rand(lse.shape, generator=generator) < 0.3] = HIDDEN
        lse[..., 0] = HIDDEN
        out[lse == HIDDEN] = math.nan
        found.append((out.requires_grad_(), lse.requires_grad_()))
    return found


def exact(given: list[tuple[Tensor, Tensor]], dout: Tensor, dlse: Tensor) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """The definition in float64, outputs averaged with weights exp(LSE), and its gradients."""
    levels = torch.stack([lse.detach().double() for _, lse in given])
    outs = torch.stack([torch.where((lse == HIDDEN)[..., None], 0.0, out.detach().double()) for out, lse in given])
    lse = levels.logsumexp(0)
    weights = torch.where(levels == HIDDEN, 0.0, torch.exp(levels - torch.where(lse == HIDDEN, 0.0, lse)))
    out = (weights[..., None] * outs).sum(0)
    of_lses = weights * (((outs - out) * dout.double()).sum(-1) + dlse.double())
    return (out, lse), [x for pair in zip(weights[..., None] * dout.double(), of_lses, strict=True) for x in pair]


def gradients(function: Callable[..., Any], given: list[tuple[Tensor, Tensor]], grads: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    leaves = [x for part in given for x in part]
    return torch.autograd.grad(function(given), leaves, grads, materialize_grads=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "count"), [((2, 3, 5, 7), 1), ((1, 2, 33, 64), 2), ((6, 16), 5), ((2, 2, 1, 3, 8), 40)], ids=str)
def test_parts_are_averaged_by_their_weights_and_gradients_are_those_of_float64(
    shape: tuple[int, ...], count: int, dtype: torch.dtype
) -> None:
    given = parts(count, shape, dtype)
    dout, dlse = torch.randn(shape).to(dtype), torch.randn(shape[:-1])
    found, (wanted, grads) = dispatch.merge(given), exact(given, dout, dlse)
    unit = max(4 * cases.ROUNDING[dtype], 1e-6)
    torch.testing.assert_close(found[0].double(), wanted[0], atol=4 * unit, rtol=unit)
    torch.testing.assert_close(found[1].double(), wanted[1], atol=2e-6, rtol=1e-6)
    assert (found[0][..., 0, :] == 0).all() and (found[1][..., 0] == HIDDEN).all()
    # Nothing flows into rows without keys, whatever comes back for them.
    dout[..., 0, :], dlse[..., 0] = math.nan, math.nan
    for mine, true in zip(gradients(dispatch.merge, given, (dout, dlse)), grads, strict=True):
        torch.testing.assert_close(mine.double(), true, atol=16 * unit, rtol=4 * unit)


def test_packed_parts_and_any_strides() -> None:
    given = parts(3, (4, 9, 16), torch.float32)
    out, lse = dispatch.merge(given)
    packed = [(x.transpose(0, 1), y) for x, y in given]
    found = dispatch.merge(packed, packed=True)
    assert torch.equal(found[0].transpose(0, 1), out) and torch.equal(found[1], lse)
    odd = [(torch.empty(4, 9, 33)[..., 1::2].copy_(x.detach()), torch.empty(9, 4).copy_(y.detach().mT).mT) for x, y in given]
    assert all(map(torch.equal, dispatch.merge(odd), (out, lse)))
    # As many tokens as heads: only the caller knows which is which.
    square = [(torch.randn(4, 4, 8), torch.randn(4, 4)) for _ in range(2)]
    turned = [(x.transpose(0, 1), y) for x, y in square]
    assert torch.equal(dispatch.merge(turned, packed=True)[0].transpose(0, 1), dispatch.merge(square)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_a_row_depend_on_no_other(dtype: torch.dtype) -> None:
    given = parts(4, (5, 3, 17, 24), dtype)
    grads = torch.randn(5, 3, 17, 24).to(dtype), torch.randn(5, 3, 17)
    found = (*dispatch.merge(given), *gradients(dispatch.merge, given, grads))
    for row in (slice(0, 1), slice(3, 5)):
        alone = [tuple(x.detach()[row].requires_grad_() for x in part) for part in given]
        again = (*dispatch.merge(alone), *gradients(dispatch.merge, alone, tuple(x[row] for x in grads)))  # type: ignore[arg-type]
        assert all(torch.equal(x[row].nan_to_num(), y.nan_to_num()) for x, y in zip(found, again, strict=True))


@pytest.mark.skipif(devices.INTERPRETING, reason="float64 is PyTorch's")
def test_first_and_second_derivatives_by_differences() -> None:
    given = [(torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)) for _ in range(3)]
    leaves = [x.requires_grad_() for part in given for x in part]

    def function(*x: Tensor) -> Any:
        return dispatch.merge(list(zip(x[::2], x[1::2], strict=True)))

    assert torch.autograd.gradcheck(function, leaves) and torch.autograd.gradgradcheck(function, leaves)


def test_second_derivatives_are_those_of_plain_operations() -> None:
    given = parts(2, (2, 3, 8), torch.float32)
    leaves = [x.detach().nan_to_num(0.0, 0.0, 0.0).requires_grad_() for part in given for x in part]

    def twice(function: Any) -> Any:
        out, lse = function(leaves[::2], leaves[1::2])
        first = torch.autograd.grad((out.square().sum() + lse.square().sum()), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    ours = twice(lambda outs, lses: dispatch.merge(list(zip(outs, lses, strict=True))))
    for mine, true in zip(ours, twice(merging._by_torch), strict=True):
        torch.testing.assert_close(mine, true, atol=1e-4, rtol=1e-4)


def test_transforms_and_compilers_look_into_it() -> None:
    given = [(x.nan_to_num().detach(), y.detach()) for x, y in parts(2, (3, 2, 5, 8), torch.float32)]
    plain = dispatch.merge(given)
    mapped = torch.vmap(lambda *x: dispatch.merge([(x[0], x[1]), (x[2], x[3])]))(*(x for part in given for x in part))
    traced = torch.compile(lambda x: dispatch.merge(x), backend="aot_eager", fullgraph=True)(given)
    for found in (mapped, traced):
        for x, y in zip(found, plain, strict=True):
            torch.testing.assert_close(x, y)
    exported = torch.export.export(_Module(), (given,)).module()(given)
    torch.testing.assert_close(exported[0], plain[0])


class _Module(torch.nn.Module):
    def forward(self, given: Any) -> Any:
        return dispatch.merge(given)


def test_attention_by_parts_is_that_of_all_keys() -> None:
    # Gradients of the LSE go through PyTorch's operations, or through kernels, where these serve.
    with forced("kernels" if devices.INTERPRETING else "torch"):
        for seed in range(4 if devices.INTERPRETING else 60):
            cases.agrees(cases.drawn(seed, DTYPES[seed % len(DTYPES)], most=12 if devices.INTERPRETING else 40))


WAYS: dict[str, Callable[..., Any]] = {
    "attention": lambda *x: dispatch.attention(*x, return_lse=True)[1],
    "mask": lambda *x: dispatch.attention(*x, torch.ones(9, 9, dtype=torch.bool), return_lse=True)[1],
    "torch": lambda *x: dispatch.attention(*x, return_lse=True, implementation="torch")[1],
    "score": lambda *x: dispatch.flex_attention(*x, score_mod=lambda score, b, h, i, j: score * 1.0, return_lse=True)[1],
    "packed": lambda *x: dispatch.attention_varlen(*_rows(x), BOUNDS, BOUNDS, 9, 9, return_lse=True)[1],
    "packed mask": lambda *x: dispatch.attention_varlen(
        *_rows(x), BOUNDS, BOUNDS, 9, 9, return_lse=True, mask_mod=lambda b, h, i, j: i + 99 > j
    )[1],
}
BOUNDS = torch.tensor([0, 9]).int()


def _rows(tensors: Any) -> list[Tensor]:
    return [x[0].transpose(0, 1) for x in tensors]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_gives_the_gradient_of_its_lse(way: str) -> None:
    q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
    with dispatch.use(unmeasured=True):
        found = torch.autograd.grad(WAYS[way](q, k, v).sin().sum(), (q, k))
    wanted = torch.autograd.grad((q.double() @ k.double().mT / 4).logsumexp(-1).sin().sum(), (q, k))
    for mine, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, true, atol=2e-6, rtol=1e-5)


def test_the_part_of_no_keys_changes_no_bit() -> None:
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    part = dispatch.attention(q, k, v, return_lse=True)
    empty = dispatch.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    for given in ([part], [empty, part], [part, empty, empty]):
        assert all(map(torch.equal, dispatch.merge(given), part))


X, LSE = torch.zeros(2, 3, 4), torch.zeros(2, 3)
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([], {}, InputError, "nothing to merge: give a list"),
    (None, {}, InputError, "nothing to merge: give a list"),
    ([(X, LSE)], {"packed": 1}, InputTypeError, "packed must be True or False, not 1"),
    ([(X, LSE), X], {}, InputTypeError, "part 1 is no pair of tensors: give"),
    ([(X, None)], {}, InputTypeError, "part 0 is no pair of tensors: give"),
    ([(X.int(), LSE)], {}, InputTypeError, "part 0 is torch.int32 with an LSE in torch.float32: give a floating"),
    ([(X, LSE.half())], {}, InputTypeError, "part 0 is torch.float32 with an LSE in torch.float16: give a floating"),
    ([(X, LSE), (X.half(), LSE)], {}, InputTypeError, "part 1 is torch.float16 .* part 0 torch.float32 torch.float32: cast it"),
    ([(X, LSE), (X[:1], LSE[:1])], {}, InputError, r"part 1 has the shapes \(1, 3, 4\) and \(1, 3\), and part 0"),
    ([(X, LSE.mT)], {}, InputError, r"outputs \(2, 3, 4\) don't fit to LSEs \(3, 2\): pass packed=True"),
    ([(X, LSE)], {"packed": True}, InputError, r"outputs \(2, 3, 4\) don't fit to LSEs \(2, 3\): without packed"),
    ([(X[0, 0], LSE[0, 0])], {}, InputError, r"outputs \(4,\) don't fit to LSEs \(\)"),
    ([(X, LSE), (X.to("meta"), LSE)], {}, InputError, "part 1 is on meta with an LSE on cpu, and part 0 on cpu: use one device"),
]


@pytest.mark.parametrize(("given", "words", "kind", "said"), REFUSED)
def test_what_makes_no_sense_is_refused_in_a_sentence(given: Any, words: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        dispatch.merge(given, **words)


@pytest.mark.skipif(devices.INTERPRETING, reason="runs this file so")
def test_kernels_merge_likewise() -> None:
    # Of what is built on it a part: the interpreter takes minutes for all, which pass, too.
    files = [f"tests/dispatch/test_parts{more}.py" for more in ("", "_shared")]
    some = "not shared or (padding and 11 and sinks)"
    said = output_of_tests("-q", "-W", "ignore", "-p", "no:cacheprovider", "-k", some, *files)
    assert " passed" in said and "failed" not in said
