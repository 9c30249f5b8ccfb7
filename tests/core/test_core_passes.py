"""Passes as values: what the forward and the backward declare, and that inputs and checks take both as they are."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import band_of

from flashtune.core.problems import oracles, reference
from flashtune.core.problems.parameters import PER_HEAD, PER_HEAD_FLAGS, per_head_words
from flashtune.core.problems.passes import BACKWARD, Place
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.errors import InputError
from flashtune.tuner.verify.correctness import Verifier, check, everywhere, oracle
from flashtune.tuner.verify.distributions import redistribute
from flashtune.tuner.verify.inputs import make_inputs, without_repeats

PROBLEM = Problem(batch=2, heads=4, kv_heads=2, n_q=100, n_kv=140, d=16, d_v=24, dtype="fp32", features=Features(causal=True))
TRAINED = replace(PROBLEM, direction="bwd")


def launch(*operands: torch.Tensor, spoil: str = "", **words: Any) -> None:
    """Gradients by the formula of FlashAttention-2 (arXiv 2307.08691, section 2.3.2), which the oracle's autograd knows nothing of."""
    q, k, v, out, lse, dout, dlse = (x.double() for x in operands[:7])
    ratio = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    seen = reference.visible(band_of(words), q.shape[2], k.shape[2])
    probs = torch.exp(words["scale"] * q @ wide_k.mT - lse[..., None]).masked_fill(~seen, 0.0)
    dscores = probs * (dout @ wide_v.mT - (out * dout).sum(-1, keepdim=True) + dlse[..., None]) * words["scale"]
    found = dscores @ wide_k, dscores.mT @ q, probs.mT @ dout
    for operand, tensor, grad in zip(BACKWARD.written, operands[7:], found, strict=True):
        tensor.copy_(grad if operand.name == "dq" else grad.unflatten(1, (-1, ratio)).sum(2))
        if operand.name == spoil:
            tensor[-1, -1, -1] += 1.0


def test_the_forward_costs_two_products_and_each_operand_once() -> None:
    pairs = PROBLEM.batch * PROBLEM.heads * PROBLEM.visible_pairs()
    assert PROBLEM.flops() == 2 * pairs * (16 + 24)
    # Under the diagonal 100 queries see the first 100 of 140 keys.
    q_rows, seen_rows = 2 * 4 * 100, 2 * 2 * 100
    assert PROBLEM.io_bytes() == 4 * (q_rows * (16 + 24 + 1) + seen_rows * (16 + 24))


def test_keywords_are_those_of_a_launch() -> None:
    inputs = make_inputs(PROBLEM, device="meta", seed=3)
    plain = {"mask", "scale", "diagonal", "window_left", "window_right", "softcap", "dropout_p", "seed", "offset"}
    assert set(inputs.keywords) == plain and inputs.keywords["mask"] is None
    fp8 = make_inputs(
        replace(PROBLEM, dtype="fp8", features=Features(**dict.fromkeys(PER_HEAD_FLAGS.values(), True))), device="meta", seed=3
    )
    assert set(fp8.keywords) == plain | set(per_head_words(dict.fromkeys(PER_HEAD))) >= plain | {"slopes", "descale", "sinks"}
    given = fp8.parameters.per_head()
    assert list(given) == list(PER_HEAD)
    assert replace(fp8.parameters, **per_head_words(given)).keywords() == fp8.keywords


def test_a_backward_takes_what_the_forward_wrote_and_costs_five_products() -> None:
    inputs = make_inputs(TRAINED, device="cpu", seed=1)
    assert list(inputs.operands) == ["q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv"]
    out, lse = reference.attention(inputs.q, inputs.k, inputs.v, scale=inputs.parameters.scale, band=inputs.parameters.band)
    assert torch.equal(inputs.out, out.float()) and torch.equal(inputs.lse, lse.float())
    pairs = TRAINED.batch * TRAINED.heads * TRAINED.visible_pairs()
    assert TRAINED.flops() == pairs * 2 * (3 * 16 + 2 * 24)
    square = replace(TRAINED, d_v=16)
    assert square.flops() == 2.5 * replace(square, direction="fwd").flops()
    q_rows, kv_rows, seen_rows = 2 * 4 * 100, 2 * 2 * 140, 2 * 2 * 100
    assert TRAINED.io_bytes() == 4 * (q_rows * (2 * 16 + 2 * 24 + 2) + (seen_rows + kv_rows) * (16 + 24))
    assert TRAINED.key("h200").direction == TRAINED.spec().direction == "bwd"
    verifier = Verifier(TRAINED, device="cpu", seed=2, full_size=inputs)
    assert verifier.verdict(launch).reason == ""


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_a_wrong_gradient_is_named(name: str) -> None:
    inputs = make_inputs(TRAINED, device="cpu", seed=1)
    verdict = check(lambda *operands, **words: launch(*operands, spoil=name, **words), inputs, oracle(inputs, everywhere(TRAINED)))
    assert {"dq": "query's", "dk": "key's", "dv": "value's"}[name] in verdict.reason and verdict.error > 1


def test_gradients_that_are_asked_for_are_written_and_checked_too() -> None:
    features = Features(mask="bias", alibi=True, dbias=True, dslopes=True)
    p = replace(TRAINED, n_q=20, n_kv=28, features=features)
    assert [operand.name for operand in p.contract.written] == ["dq", "dk", "dv", "dbias", "dslopes"]
    assert p.forward().features == Features(mask="bias", alibi=True) and p.key("h200") != replace(p, features=p.forward().features).key(
        "h200"
    )
    inputs = make_inputs(p, device="cpu", seed=1)
    # Some rows of a bias have all of its columns, whatever keys are asked for.
    some = Place(batch=1, head=2, queries=slice(3, 9), keys=slice(5, 8))
    values = oracles.expected_at(p, inputs.operands, inputs.parameters, [some])[0]
    assert {o.name: inputs.operands[o.name][o.at(some, p)].shape for o in p.contract.written} == {n: x.shape for n, x in values.items()}
    # The bias is one for both batches, and so is its gradient.
    assert p.io_bytes() - replace(p, features=p.forward().features).io_bytes() == 4 * (4 * 20 * 28 + 2 * 4 * 20)
    assert inputs.operands["dbias"].stride(0) == 0
    expected = oracle(inputs, everywhere(p))
    leaves = [x.double().requires_grad_() for x in (without_repeats(inputs.parameters.mask), inputs.parameters.slopes)]  # type: ignore[arg-type]
    q, k, v, dout = (inputs.operands[name].double() for name in ("q", "k", "v", "dout"))
    out, lse = reference.attention(q, k, v, mask=leaves[0], slopes=leaves[1], scale=inputs.parameters.scale)
    dbias, dslopes = torch.autograd.grad((out * dout).sum() + (lse * inputs.operands["dlse"]).sum(), leaves)

    def write(*operands: torch.Tensor, spoil: bool = False, **_: Any) -> None:
        for one in expected:
            for operand, tensor in zip(p.contract.written, operands[7:], strict=True):
                without_repeats(tensor)[operand.at(replace(one.place, batch=0) if operand.name == "dbias" else one.place, p)] = one.values[
                    operand.name
                ].to(tensor.dtype)
        without_repeats(operands[10])[0, 1, 5] *= 1 + 0.1 * spoil

    assert check(write, inputs, expected).reason == ""
    torch.testing.assert_close(inputs.operands["dbias"][1].double(), dbias[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inputs.operands["dslopes"].double().sum(-1), dslopes, atol=1e-4, rtol=1e-5)
    assert "bias's gradient" in check(lambda *x, **w: write(*x, spoil=True, **w), inputs, expected).reason
    for features in ({"dbias": True}, {"mask": "bool", "dbias": True}, {"dslopes": True}):
        with pytest.raises(InputError, match="requests the gradient"):
            Features(**features)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="can't be requested from a forward"):
        replace(p, direction="fwd")


def test_a_changed_input_changes_what_the_forward_wrote() -> None:
    inputs = make_inputs(TRAINED, device="cpu", seed=1)
    before = inputs.out.clone()
    redistribute(inputs, "sink+8")
    assert not torch.equal(inputs.out, before)
    assert check(launch, inputs, oracle(inputs, everywhere(TRAINED))).reason == ""


def test_each_head_is_computed_once_for_all_places_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    p = replace(TRAINED, features=Features())
    assert p.gqa_ratio > 1
    inputs = make_inputs(p, device="cpu", seed=1)
    computed: list[tuple[int, int]] = []
    attended = oracles._attended
    monkeypatch.setattr(oracles, "_attended", lambda *given: computed.append(given[3:5]) or attended(*given))
    found = oracle(inputs, everywhere(p))
    assert sorted(computed) == [(b, h) for b in range(p.batch) for h in range(p.heads)]
    alone = oracle(inputs, [Place(batch=1, head=p.heads - 1, queries=slice(2, 5), keys=slice(1, 4))])[0].values
    assert torch.equal(alone["dq"], found[-1].values["dq"][2:5]) and torch.equal(alone["dk"], found[-1].values["dk"][1:4])
