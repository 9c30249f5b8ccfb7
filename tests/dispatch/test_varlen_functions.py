"""Packed sequences with a mask and a score as code: kernels without a GPU, a call of flex_attention for each sequence, and refusals."""

from typing import Any

import pytest
import torch
from hopper_kernels import config
from interpreting import interpreted
from mods_machine import Coded
from packed_machine import Ragged, numbers_of
from test_hopper_pieces import Masked
from varlen_cases import inputs
from varlen_functions import CASES, LENGTHS, agrees, explained, kernel_call, made, wanted

from flashtune import dispatch
from flashtune.core.system.errors import InputError
from flashtune.dispatch import flex, varlen_flex
from flashtune.dispatch.call.sequences import Packed
from flashtune.dispatch.functions import by_torch as flex_torch
from flashtune.templates.hopper.flash_fwd_hopper import FAMILY

WITHIN_OTHERS = {"relative", "causal relative", "both", "both, causal from the first", "built-in band", "built-in cap"}
"""Cases whose code is that of others; kernels compute them on a GPU alone (tests/gpu/test_packed_functions.py)."""


def test_kernels_compute_the_functions_of_each_sequence() -> None:
    report = interpreted("interpret_varlen_functions", *(name for name in CASES if name not in WITHIN_OTHERS))
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) > 5


def test_kernels_keep_the_promises_of_packed_calls_and_hoppers_gradients_are_right() -> None:
    report = interpreted("interpret_varlen_functions")
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) > 5


class Sequences(Coded, Ragged, Masked):
    """The forward's stand-in for packed sequences with functions."""


HOPPERS: list[tuple[str, dict[str, Any]]] = [
    ("relative", {}),
    ("prefix", {"BLOCK_M": 64}),
    ("both", {"BLOCK_M": 64, "intra_wg_overlap": 0, "rescale": "grown"}),
    ("both, causal from the first", {}),
    ("causal relative", {"BLOCK_M": 64, "intra_wg_overlap": 0, "rescale": "grown"}),
    ("both in a window", {"tiles": "chained", "order": "drawn"}),
    ("hidden", {}),
]


@pytest.mark.parametrize(("name", "changes"), HOPPERS, ids=str)
def test_hoppers_forward_computes_the_functions_of_each_sequence(name: str, changes: dict[str, Any]) -> None:
    call = kernel_call(name, FAMILY, lambda spec: config(spec, **changes), ((5, 0, 130, 64, 1, 0), (70, 3, 130, 0, 200, 0)))
    module, [launch] = next(call)
    Sequences(module, launch, seed=1).run()
    assert max(next(call)) < 4e-3


@pytest.mark.parametrize("name", ["causal relative", "prefix", "both in a window", "used keys", "hidden", "built-in slopes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_kernels_each_sequence_is_a_call_of_flex_attention(name: str, dtype: torch.dtype) -> None:
    agrees(name, dtype=dtype)
    said = explained(name, dtype=dtype)
    assert said.kind == "framework" and "each sequence is a call of flex_attention" in said.reason


def test_functions_that_nobody_can_call_are_named_in_a_sentence() -> None:
    given, _, _ = made("prefix")
    words = {name: x for name, x in given.words.items() if name not in ("score_mod", "mask_mod")}

    def lacks_one(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return q > 0

    with pytest.raises(InputError, match="lacks_one can't be traced: TypeError: ") as caught:
        dispatch.attention_varlen(*given.arguments, enable_gqa=True, mask_mod=lacks_one, **words)
    assert "\n" not in str(caught.value)


def test_without_gradients_each_sequence_is_a_call_of_pytorchs_own() -> None:
    given, functions, _ = made("both in a window")
    given = given._replace(tensors=[x.detach() for x in given.tensors])
    with torch.no_grad():
        out, lse = given.call()
        right, right_lse, _, _ = wanted(given, LENGTHS, functions)
    torch.testing.assert_close(out.double(), right, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), right_lse, atol=2e-5, rtol=2e-5)


BY_COMPILERS = [
    ("both in a window", "aot_eager"),
    pytest.param("no derivative at 0", "inductor", marks=pytest.mark.newest),
]


@pytest.mark.parametrize(("name", "backend"), BY_COMPILERS)
def test_a_compiler_traces_a_call_without_a_break(name: str, backend: str) -> None:
    agrees(name, backend=backend)


@pytest.mark.parametrize("name", ["relative", "used keys", "hidden"])
def test_a_call_that_is_exported_without_the_compiler_serves_other_lengths(name: str) -> None:
    given, functions, captured = made(name)
    for x in captured:
        # Constants of a program ask for no gradients.
        x.requires_grad_(False)

    class Model(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return given._replace(tensors=list(tensors[:3]), bounds=tensors[3:]).call()  # type: ignore[arg-type]

    program = torch.export.export(Model(), (*given.tensors, *given.bounds), strict=False).module()
    for lengths in (LENGTHS, tuple(one[::-1] for one in LENGTHS)):
        other = made(name, lengths)[0]
        out, lse = program(*other.tensors, *other.bounds)
        right, right_lse, leaves, loss = wanted(other._replace(words=given.words), lengths, functions)
        torch.testing.assert_close(out.double(), right, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse.double(), right_lse, atol=2e-5, rtol=2e-5)
        visible = lse.isfinite()
        found = torch.autograd.grad((out * other.dout)[visible.T].sum() + (lse * other.dlse)[visible].sum(), other.tensors)
        for x, y in zip(found, torch.autograd.grad(loss, leaves), strict=True):
            torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["used keys", "both in a window"])
def test_a_compiler_for_a_gpu_has_one_call_of_flex_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, functions, _ = made(name)
    served: list[Any] = []
    by_torch = flex.flex_attention
    monkeypatch.setattr(flex, "flex_attention", lambda *x, **words: served.append(x) or by_torch(*x, **words))
    packed = Packed(*given.tensors, *given.bounds, given.words.get("seqused_k"))
    with torch.no_grad():
        out, lse = varlen_flex._at_once(packed, numbers_of(given), *functions)
        right, right_lse, _, _ = wanted(given, LENGTHS, functions)
    assert len(served) == 1
    torch.testing.assert_close(out.double(), right, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), right_lse, atol=2e-5, rtol=2e-5)


def test_a_compiler_numbers_rows_by_their_sequences() -> None:
    # For bounds[1:] PyTorch 2.11's compiler read a GPU's memory from the first bound on (bucketize).
    bounds = torch.tensor([0, 5, 5, 38, 54, 54], dtype=torch.int32)
    wanted = torch.tensor([0] * 5 + [2] * 33 + [3] * 16 + [5] * 6)
    assert torch.equal(varlen_flex._owners(60, bounds), wanted)
    assert torch.equal(varlen_flex._owners(40, bounds), wanted[:40])
    assert torch.equal(torch.compile(varlen_flex._owners, backend="eager", fullgraph=True)(60, bounds), wanted)


def test_the_lse_comes_on_request_with_functions_too() -> None:
    from torch.nn.attention.varlen import AuxRequest

    given, _, _ = made("prefix")
    tensors = [x.detach() for x in given.tensors]
    words = {"mask_mod": given.words["mask_mod"], "enable_gqa": True}
    out = dispatch.attention_varlen(*tensors, *given.bounds, *given.longest, **words)
    both = dispatch.attention_varlen(*tensors, *given.bounds, *given.longest, return_aux=AuxRequest(lse=True), **words)
    assert torch.equal(both[0], out) and both[1].shape == (4, len(out))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"softcap": 2.0}, "softcap is no argument beside score_mod and mask_mod: leave it out, and write it into these functions"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes is no argument beside score_mod and mask_mod"),
        ({"sinks": torch.ones(4)}, "sinks is no argument beside score_mod and mask_mod"),
        ({"dropout_p": 0.1}, "dropout_p is no argument beside score_mod and mask_mod: leave it out, and call without functions"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "block_table is no argument beside score_mod and mask_mod"),
        ({"num_splits": -1}, "num_splits=-1"),
    ],
    ids=str,
)
def test_what_functions_cannot_stand_beside_is_refused_in_a_sentence(words: dict[str, Any], said: str) -> None:
    given = inputs({}, LENGTHS)
    for call in (dispatch.attention_varlen, dispatch.explain_varlen):
        with pytest.raises(InputError, match=said):
            call(*given.arguments, enable_gqa=True, score_mod=lambda s, b, h, q, k: s, **words)


def _branches(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s if q > k else 2 * s


TABLE = torch.arange(9.0)


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ({"score_mod": _branches}, "branches on or converts a tensor's value"),
        ({"mask_mod": lambda b, h, q, k: q - k}, "it must return a bool"),
        ({"score_mod": lambda s, b, h, q, k: s + TABLE[q]}, "reads index 69 of dimension 0 of a captured tensor, whose size is 9"),
        ({"score_mod": lambda s, b, h, q, k: s + TABLE[b], "mask_mod": lambda b, h, q, k: TABLE[k] > 0}, "reads index 63 of dimension 0"),
    ],
    ids=["branch", "number", "queries", "keys"],
)
def test_hostile_functions_are_refused_in_a_sentence(functions: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_torch, "served_here", lambda device, dtype: True)
    given = inputs({}, LENGTHS)
    with pytest.raises(InputError, match=said):
        dispatch.attention_varlen(*given.arguments, enable_gqa=True, **functions)
