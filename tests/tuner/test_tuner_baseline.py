"""The framework's attention as the yardstick: it computes the same problem, by its own means where it has them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import bias

from flashtune.core.problems.problem import Features, Problem
from flashtune.core.pytorch.private import sdpa
from flashtune.tuner.timing import baseline
from flashtune.tuner.timing.baseline import pytorch_call
from flashtune.tuner.verify import correctness
from flashtune.tuner.verify.inputs import Inputs, make_inputs

PROBLEM = Problem(batch=2, heads=4, kv_heads=2, n_q=100, n_kv=140, d=16, d_v=16, dtype="fp32")


def compare(inputs: Inputs, backend: str | None = None) -> None:
    """Run the framework and the oracle."""
    call = pytorch_call(inputs, backend)
    assert call is not None
    out = call()
    for want in correctness.oracle(inputs, correctness.everywhere(inputs.problem)):
        torch.testing.assert_close(out[want.place.batch, want.place.head].double(), want.values["out"], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "features",
    [
        Features(alibi=True),
        Features(alibi=True, causal=True),
        Features(alibi=True, mask="bool", alignment="bottom_right"),
        Features(alibi=True, mask="bias", window=(9, 9)),
    ],
    ids=lambda f: f.label(),
)
def test_the_framework_computes_alibi_from_a_bias(features: Features) -> None:
    compare(make_inputs(replace(PROBLEM, features=features), device="cpu", seed=3))


@pytest.mark.parametrize("changes", [{"dtype": "fp8"}, {"features": Features(softcap=True)}, {"features": Features(sinks=True)}], ids=str)
def test_the_framework_has_no_fp8_soft_cap_or_sinks(changes: dict[str, Any]) -> None:
    assert pytorch_call(make_inputs(replace(PROBLEM, **changes), device="cpu", seed=0)) is None


def test_what_a_model_is_measured_against_is_torchs_own_whatever_stands_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("the yardstick is measured with what it is held against")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    compare(make_inputs(PROBLEM, device="cpu", seed=0))


LOWER_RIGHT = Features(causal=True, alignment="bottom_right")


def test_torchs_own_diagonal_is_known_whatever_stands_in_the_place_of_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *given, **words: sdpa(*given, **words))
    monkeypatch.setattr(baseline, "can_use_flash_attention", lambda params: True)
    compare(make_inputs(replace(PROBLEM, n_q=100, features=LOWER_RIGHT), device="cpu", seed=3))


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(
    ("features", "n_q", "backend", "native"),
    [
        (LOWER_RIGHT, 100, None, True),
        (LOWER_RIGHT, 100, "flash", True),
        # Torch would write the diagonal out on each call.
        (LOWER_RIGHT, 100, "math", False),
        (replace(LOWER_RIGHT, window=(9, 0)), 100, None, False),
        (replace(LOWER_RIGHT, alibi=True), 100, None, False),
        (Features(causal=True), 100, None, False),
        # The diagonal starts at the first key.
        (LOWER_RIGHT, 140, None, False),
    ],
    ids=str,
)
def test_a_diagonal_at_the_last_key_is_torchs_own_where_flash_attention_takes_it(
    features: Features, n_q: int, backend: str | None, native: bool, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    def recorded(n_q: int, n_kv: int) -> torch.Tensor:
        made.append((n_q, n_kv))
        return diagonal(n_q, n_kv)

    diagonal = bias.causal_lower_right
    monkeypatch.setattr(bias, "causal_lower_right", recorded)
    monkeypatch.setattr(baseline, "can_use_flash_attention", lambda params: flash)
    compare(make_inputs(replace(PROBLEM, n_q=n_q, features=features), device="cpu", seed=3), backend)
    assert made == ([(100, 140)] if native and flash else [])
