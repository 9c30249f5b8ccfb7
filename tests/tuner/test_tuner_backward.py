"""The backward pass in the tuner: the framework's gradients as its yardstick, predicted times, and where its kernels would lie."""

from dataclasses import replace

import pytest
import torch

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.pytorch.dtypes import TORCH_DTYPES
from flashtune.core.records.results import CompileFacts
from flashtune.templates import families, family
from flashtune.templates.cost import predict_us
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.propose.space import SearchSpace
from flashtune.tuner.publish import generated, machine_code
from flashtune.tuner.timing.baseline import pytorch_call
from flashtune.tuner.verify.cases import make_extreme, small_problems
from flashtune.tuner.verify.correctness import check, everywhere, oracle
from flashtune.tuner.verify.inputs import make_inputs

H200 = find_target("h200")
SMALL = Problem(batch=1, heads=4, kv_heads=2, n_q=20, n_kv=28, d=16, d_v=16, dtype="fp32", direction="bwd")
BIG = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", direction="bwd")
FACTS = CompileFacts(registers=200, spills=0, shared_bytes=100_000, threads=256)


TIMED = [Features(causal=True), Features(mask="bool"), Features(alibi=True), Features(causal=True, mask="bias", dbias=True)]


@pytest.mark.parametrize("features", TIMED, ids=lambda f: f.label())
def test_the_framework_is_timed_at_the_gradients_alone(features: Features) -> None:
    inputs = make_inputs(replace(SMALL, features=features), device="cpu", seed=2)
    inputs.operands["dlse"].zero_()
    call = pytorch_call(inputs)
    assert call is not None
    for _ in range(2):
        found = call()
        assert isinstance(found, tuple)
        for want in oracle(inputs, everywhere(inputs.problem)):
            for operand, grad in zip(inputs.problem.contract.written, found, strict=True):
                wanted, grad = want.values[operand.name], grad.expand(operand.shape(inputs.problem))
                torch.testing.assert_close(grad[operand.at(want.place, inputs.problem)].double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("dtype", "features"), [("bf16", Features()), ("fp16", Features(causal=True))], ids=str)
def test_gradients_that_are_rounded_as_every_kernel_does_pass_on_extreme_inputs(dtype: DType, features: Features) -> None:
    """Scores around 150 and -150: of what the forward rounded, only what the backward rounds again counts as its error."""
    rounded = TORCH_DTYPES[dtype]
    inputs = make_inputs(small_problems(replace(BIG, d=64, d_v=64, dtype=dtype, features=features), batch=1)[0], device="cpu", seed=1)
    make_extreme(inputs)

    def launch(*operands: torch.Tensor, **_: object) -> None:
        q, k, v, out, lse, dout, dlse = (x.double() for x in operands[:7])
        scores = q @ k.mT * inputs.parameters.scale
        if features.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        probs = torch.exp(scores - lse[..., None])
        delta = (dout * out).sum(-1) - dlse
        dscores = (probs * (dout @ v.mT - delta[..., None])).to(rounded).double()
        operands[7].copy_(dscores @ k * inputs.parameters.scale)
        operands[8].copy_(dscores.mT @ q * inputs.parameters.scale)
        operands[9].copy_(probs.to(rounded).double().mT @ dout)

    found = check(launch, inputs, oracle(inputs, everywhere(inputs.problem)))
    assert found.reason == "" and found.error < 0.7


def predicted(problem: Problem, facts: CompileFacts = FACTS, **changes: int) -> float:
    chosen = family("flash_bwd")
    return predict_us(chosen.default(problem.spec(), H200).replace(**changes), facts, problem, H200)


def test_a_backward_is_predicted_as_a_whole() -> None:
    full = predicted(BIG)
    # Never faster than the products of both kernels at the peak, seven for the five that are counted.
    assert full > 7 / 5 * BIG.flops() / H200.peak_tflops["bf16"] / 1e6
    assert 0.4 * full < predicted(replace(BIG, features=Features(causal=True))) < 0.75 * full
    assert predicted(replace(BIG, batch=8)) > 1.8 * full
    with_bias = predicted(replace(BIG, features=Features(mask="bias")))
    assert predicted(replace(BIG, features=Features(mask="bias", dbias=True))) > 1.2 * with_bias
    # Either kernel's own axes count, and so do the heads that share keys only where programs grow few.
    assert predicted(BIG, DQ_num_stages=1) > full and predicted(BIG, num_stages=1) > full
    assert predicted(replace(BIG, kv_heads=4)) < 1.2 * full
    assert predicted(BIG, replace(FACTS, spills=2000)) > full
    assert predicted(BIG, replace(FACTS, registers=255, threads=512)) == float("inf")


def test_a_search_orders_candidates_by_what_is_expected_of_them() -> None:
    space = SearchSpace(families(), BIG, H200)
    assert list(space.families) == ["flash_bwd_hopper", "flash_bwd_hopper_split", "flash_bwd"]
    times = {
        name: [
            predict_us(config, chosen.expected(config, space.spec, H200) or FACTS, BIG, H200) for config in chosen.starts(space.spec, H200)
        ]
        for name, chosen in space.families.items()
    }
    assert all(max(found) < float("inf") for found in times.values()) and len(set(times["flash_bwd"])) > 1
    # Five products for seven.
    assert (
        max(times["flash_bwd_hopper"])
        < min(times["flash_bwd_hopper_split"])
        <= max(times["flash_bwd_hopper_split"])
        < min(times["flash_bwd"])
    )
    fused = space.families["flash_bwd_hopper"]
    config = fused.default(space.spec, H200)
    facts = fused.expected(config, space.spec, H200) or FACTS
    us = predict_us(config, facts, BIG, H200)
    assert predict_us(config.replace(num_stages=1), facts, BIG, H200) > us
    assert predict_us(config, replace(facts, spills=2000), BIG, H200) > us
    assert predict_us(config, replace(facts, registers=255, threads=512), BIG, H200) == float("inf")
    assert 0.4 * us < predict_us(config, facts, replace(BIG, features=Features(causal=True)), H200) < 0.75 * us


def test_two_kernels_for_large_heads_are_predicted_as_a_whole() -> None:
    wide, chosen = replace(BIG, d=256, d_v=256, heads=8, kv_heads=8), family("flash_bwd_hopper_split")
    space = SearchSpace(families(), wide, H200)
    assert list(space.families) == ["flash_bwd_hopper_split", "flash_bwd"]
    config = chosen.default(space.spec, H200)
    facts = chosen.expected(config, space.spec, H200) or FACTS
    us = predict_us(config, facts, wide, H200)
    assert us > 7 / 5 * wide.flops() / H200.peak_tflops["bf16"] / 1e6
    assert 0.4 * us < predict_us(config, facts, replace(wide, features=Features(causal=True)), H200) < 0.75 * us
    assert predict_us(config.replace(num_stages=1), facts, wide, H200) > us < predict_us(config.replace(DQ_num_stages=1), facts, wide, H200)
    assert predict_us(config, replace(facts, spills=2000), wide, H200) > us
    assert predict_us(config, replace(facts, registers=255, threads=512), wide, H200) == float("inf")


def test_machine_code_is_built_from_launches_of_its_own_pass() -> None:
    chosen, spec = family("flash_bwd"), replace(BIG, features=Features(causal=True, dropout=True)).spec()
    module = load_kernel(render(chosen, variant_of(chosen, spec, chosen.default(spec, H200))), "backward")
    arguments, words = machine_code._typical_call(module, spec, H200, 336)
    assert [kernel.__name__ for kernel, *_ in module.launches(*arguments, **words)] == ["row_deltas", "key_gradients", "query_gradients"]


def test_a_backward_is_told_from_its_forward() -> None:
    assert BIG.label() == replace(BIG, direction="fwd").label() + "-bwd"


def test_generated_backward_kernels_have_a_folder_of_their_own() -> None:
    chosen = family("flash_bwd")
    variant = variant_of(chosen, BIG.spec(), chosen.default(BIG.spec(), H200))
    assert generated._folder("90", variant) == "sm90/backward/d128_bf16"
    assert generated._tile(variant).startswith("bwd_")
