"""Calls whose gradient is needed: by kernels in Triton's interpreter; where torch serves, that is said and its backends are sound."""

import os
from typing import Any

import pytest
import torch
from interpreting import interpreted

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.plans import gradients
from flashtune.dispatch.plans.gradients import BackwardInputs, ReferencePlan


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Findings of the interpreter."""
    found: dict[str, Any] = interpreted("interpret_training")
    return found


@pytest.mark.parametrize("case", [
    "causal and lse", "mask and dropout", "by the formula", "by the formula under autocast", "unpacked with gaps",
    "everything by the formula",
])  # fmt: skip
def test_gradients_are_those_of_the_reference(report: dict[str, Any], case: str) -> None:
    assert report[case] < 1e-5


@pytest.mark.parametrize("case", [
    "laid out as inputs", "dropout checkpointed", "dropout checkpointed reentrantly", "gradients batched",
    "compiled backward", "dropout checkpointed reentrantly where torch trains",
    "gradients that are marked as negative",
])  # fmt: skip
def test_it_composes_with_what_trains_models(report: dict[str, Any], case: str) -> None:
    assert report[case]


def test_explain_names_both_kernels_and_says_why_torch_serves_where_it_does(report: dict[str, Any]) -> None:
    assert report["explained"] == ["flash_fwd", "flash_bwd"]
    assert "no backward kernel for such calls was measured" in report["unasked"] and "PyTorch's own attention" in report["unasked"]
    assert report["of a mask"].startswith(
        "a gradient of attn_mask is needed, and no backward kernel for such calls with dbias was measured"
    )


@pytest.mark.parametrize("case", [
    "compiled", "checkpointed", "torch.func.grad", "bias alone", "slopes alone", "sinks alone", "gradcheck", "type",
])  # fmt: skip
def test_bias_slopes_and_sinks_get_their_gradients_from_kernels(report: dict[str, Any], case: str) -> None:
    assert report["more"]["explained"] == "flash_bwd" and report["more"]["gap"] < 1e-5
    assert report["more"][case]


def test_torch_draws_dropouts_mask_in_every_mode_where_it_alone_trains(report: dict[str, Any]) -> None:
    assert report["of dropout"] == [["framework", True, False]] * 3


def test_dropout_without_gradients_drops_what_it_drops_with_them(report: dict[str, Any]) -> None:
    wrong = [case for case, right in report["recomputed"].items() if not right]
    assert not wrong and len(report["recomputed"]) == 16


def test_only_inputs_that_ask_get_gradients_and_nothing_of_the_scores_size_is_kept(report: dict[str, Any]) -> None:
    assert report["of the query alone"] == [True, False, False]
    largest, query = report["saved"]
    assert largest == query


def test_what_computes_gradients_is_chosen_once_for_calls_that_are_alike(report: dict[str, Any]) -> None:
    assert report["asked once"] == [1, True]


def test_whole_steps_are_timed_with_the_backward_that_is_pinned_and_with_torchs(report: dict[str, Any]) -> None:
    assert report["whole steps"] == [2, True]


def test_a_second_derivative_is_refused_in_one_sentence(report: dict[str, Any]) -> None:
    assert report["twice"].startswith("attention was differentiated twice") and "MATH" in report["twice"]


def test_the_reference_is_differentiated_rows_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, heads, rows, 8) for heads, rows in ((2, 10), (1, 12), (1, 12)))
    options = Options(enable_gqa=True, window=(3, 2), return_lse=True, dropout_p=0.2, softcap=3.0)
    for bias in (torch.randn(1, 2, 10, 12), torch.randn(12)):
        mask = bias.view(1, -1, 10, 12) if bias.dim() == 4 else bias.view(1, 1, 1, 12)
        call = parse(Arguments(q, k, v, bias, seed=5), options)
        out, lse = torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10)
        inputs = BackwardInputs(q, k, v, out, lse, out, lse, mask, torch.rand(2, 2), None, 5, True, True, True, True)
        plan = ReferencePlan(call, inputs)
        whole = plan.run(inputs)
        monkeypatch.setattr(gradients, "ROWS", 3)
        for found, wanted in zip(plan.run(inputs), whole, strict=True):
            torch.testing.assert_close(found, wanted)


def test_deterministic_is_a_flag_and_changes_nothing_on_the_cpu() -> None:
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with pytest.raises(TypeError, match="deterministic"):
        dispatch.attention(q, q, q, deterministic=1)  # type: ignore[arg-type]
    [plain] = torch.autograd.grad(dispatch.attention(q, q, q).sum(), q)
    [asked] = torch.autograd.grad(dispatch.attention(q, q, q, deterministic=True).sum(), q)
    torch.testing.assert_close(asked, plain)


DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cpu")


@pytest.mark.parametrize("n", [192, 320])
def test_gradients_under_a_mask_are_finite_and_right_where_cudnns_are_nan(n: int) -> None:
    """By kernels on a GPU (FLASHTUNE_TEST_DEVICE=cuda): N that is no multiple of 128, rows whose LSE is below -89 (pytorch #196678)."""
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator) for _ in range(3))
    shift = (150 / 64**0.5) ** 0.5
    mask = torch.rand(n, n, generator=generator) > 0.3
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (q - shift, k + shift, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    with dispatch.use(unmeasured=True):
        out, lse = dispatch.attention(*leaves, attn_mask=mask.to(DEVICE), return_lse=True)
        assert float(lse.detach().max()) < -89
        found = torch.autograd.grad(dispatch.attention(*leaves, attn_mask=mask.to(DEVICE)).float().square().sum(), leaves)
    wanted = torch.autograd.grad(reference.attention(*wide, mask=mask.to(DEVICE), scale=1 / 8)[0].square().sum(), wide)
    for grad, exact in zip(found, wanted, strict=True):
        assert torch.isfinite(grad).all()
        assert (grad.double() - exact).norm() <= (2e-3 if DEVICE == "cpu" else 5e-2) * exact.norm()
    assert out.shape == (1, 2, n, 64)
