"""Passes as values: what the forward declares, and that a backward is a second value which inputs and checks take as they are."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import band_of

from flashtune.core import passes, problem, reference
from flashtune.core.config import KernelSpec
from flashtune.core.passes import FORWARD, PER_HEAD, CallParameters, Operand, Pass, Place, per_head_words
from flashtune.core.problem import Features, Problem
from flashtune.core.tolerances import Bound
from flashtune.tuner.correctness import Verifier, check, everywhere, oracle
from flashtune.tuner.inputs import make_inputs

PROBLEM = Problem(batch=2, heads=4, kv_heads=2, n_q=100, n_kv=140, d=16, d_v=24, dtype="fp32", features=Features(causal=True))
Q_AXES, K_AXES, V_AXES = ("batch", "heads", "n_q", "d"), ("batch", "kv_heads", "n_kv", "d"), ("batch", "kv_heads", "n_kv", "d_v")


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = reference.attention(*wide, **given)
    return torch.autograd.grad(out, wide, dout.double())


def backward_oracle(p: Problem, operands: Mapping[str, torch.Tensor], parameters: CallParameters, place: Place) -> dict[str, torch.Tensor]:
    found = gradients(*(operands[name] for name in ("q", "k", "v", "dout")), scale=parameters.scale, band=parameters.band)
    grads = dict(zip(("dq", "dk", "dv"), found, strict=True))
    return {operand.name: grads[operand.name][operand.at(place, p)] for operand in BACKWARD.written}


def backward_bounds(spec: KernelSpec) -> dict[str, Bound]:
    return dict.fromkeys(("dq", "dk", "dv"), Bound(atol=1e-4, rtol=1e-4, relative_norm=1e-5))


BACKWARD = Pass(
    operands=(
        *FORWARD.operands[:3],
        Operand(name="dout", title="output's gradient", axes=("batch", "heads", "n_q", "d_v"), element="output"),
        Operand(name="dq", title="query's gradient", axes=Q_AXES, element="input", written=True),
        Operand(name="dk", title="key's gradient", axes=K_AXES, element="input", written=True),
        Operand(name="dv", title="value's gradient", axes=V_AXES, element="input", written=True),
    ),
    products=("d", "d_v", "d_v", "d", "d"),
    oracle=backward_oracle,
    bounds=backward_bounds,
)


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Problem:
    """The problem of a backward, once it is declared."""
    monkeypatch.setitem(passes.PASSES, "bwd", BACKWARD)
    monkeypatch.setattr(problem, "DIRECTIONS", tuple(passes.PASSES))
    return replace(PROBLEM, direction="bwd")  # type: ignore[arg-type]


def launch(*operands: torch.Tensor, spoil: str = "", **words: Any) -> None:
    q, k, v, dout, *written = operands
    for operand, tensor, grad in zip(
        BACKWARD.written, written, gradients(q, k, v, dout, scale=words["scale"], band=band_of(words)), strict=True
    ):
        tensor.copy_(grad)
        if operand.name == spoil:
            tensor[-1, -1, -1] += 1.0


def test_the_forward_costs_two_products_and_each_operand_once() -> None:
    pairs = PROBLEM.batch * PROBLEM.heads * PROBLEM.visible_pairs()
    assert FORWARD.flops(PROBLEM) == PROBLEM.flops() == 2 * pairs * (16 + 24)
    q_rows, kv_rows = 2 * 4 * 100, 2 * 2 * 140
    assert PROBLEM.io_bytes() == 4 * (q_rows * (16 + 24 + 1) + kv_rows * (16 + 24))


def test_keywords_are_those_of_a_launch() -> None:
    inputs = make_inputs(PROBLEM, device="meta", seed=3)
    plain = {"mask", "scale", "diagonal", "window_left", "window_right", "softcap", "dropout_p", "seed", "offset"}
    assert set(inputs.keywords) == plain and inputs.keywords["mask"] is None
    fp8 = make_inputs(replace(PROBLEM, dtype="fp8", features=Features(alibi=True, sinks=True)), device="meta", seed=3)
    assert set(fp8.keywords) == plain | {"slopes", "descale", "sinks"}
    given = fp8.parameters.per_head()
    assert list(given) == list(PER_HEAD)
    assert replace(fp8.parameters, **per_head_words(given)).keywords() == fp8.keywords


def test_a_backward_is_drawn_costed_and_checked_as_a_value(backward: Problem) -> None:
    inputs = make_inputs(backward, device="cpu", seed=1)
    assert list(inputs.operands) == ["q", "k", "v", "dout", "dq", "dk", "dv"]
    assert backward.flops() == backward.batch * backward.heads * backward.visible_pairs() * 2 * (3 * 16 + 2 * 24)
    assert backward.key("h200").direction == backward.spec().direction == "bwd"
    verifier = Verifier(backward, device="cpu", seed=2, full_size=inputs)
    assert verifier.verdict(launch).reason == ""


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_a_wrong_gradient_is_named(backward: Problem, name: str) -> None:
    inputs = make_inputs(backward, device="cpu", seed=1)
    verdict = check(lambda *operands, **words: launch(*operands, spoil=name, **words), inputs, oracle(inputs, everywhere(backward)))
    assert {"dq": "query's", "dk": "key's", "dv": "value's"}[name] in verdict.reason and verdict.error > 1
