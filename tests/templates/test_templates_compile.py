"""Rendered kernels compile for every kind of GPU on a machine that has none, into the code that they are meant to be."""

import re
from dataclasses import replace
from typing import Any

import pytest
from compiling import cross_compile

from flashtune.core.code.launching import provided
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.predicates import shared_bytes
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiling_for
from flashtune.tuner.verify.inputs import make_inputs


def problem(features: Features | None = None, *, n: int = 1024, heads: int = 4, d: int = 64, d_v: int = 0) -> Problem:
    f = features or Features()
    return Problem(batch=2, heads=heads, kv_heads=2, n_q=n, n_kv=n, d=d, d_v=d_v or d, dtype="bf16", features=f)


def source(name: str, wanted: Problem, target: Target, **changes: int | str | bool) -> str:
    chosen = family(name)
    config = chosen.default(wanted.spec(), target).replace(**{"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2} | changes)
    return render(chosen, variant_of(chosen, wanted.spec(), config))


def compiled(text: str, wanted: Problem, target: Target) -> Any:
    module = load_kernel(text, "compiled")
    inputs = make_inputs(wanted, device="meta", seed=0)
    with compiling_for(target):
        [(kernel, grid, args, options)] = module.launches(*inputs.arguments, **inputs.keywords | provided(module, inputs.q, inputs.k))
        return kernel.warmup(*args, grid=grid, **options)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *(("flash_fwd", gpu) for gpu in ("a100", "h200", "b200", "rtx5090", "mi300x")),
        ("flash_decode", "b200"),
    ],
)
def test_it_compiles_to_tensor_core_code_that_doesnt_spill(name: str, gpu: str) -> None:
    target, wanted = find_target(gpu), problem(Features(causal=True))
    facts = cross_compile(source(name, wanted, target), "compiled", wanted, target)
    assert facts.tensor_core_ops > 0
    # An empty stack frame counts 8 bytes.
    assert facts.spills <= 8
    assert 0 < facts.shared_bytes <= target.shared_bytes_per_block


@pytest.mark.parametrize(
    "features", [Features(window=(64, 0), mask="bool", dropout=True), Features(causal=True, mask="bias", softcap=True)], ids=Features.label
)
def test_features_compile_together_at_padded_head_sizes(features: Features) -> None:
    target, wanted = find_target("h200"), problem(features, d=80, d_v=40)
    assert cross_compile(source("flash_fwd", wanted, target), "compiled", wanted, target).tensor_core_ops > 0


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_wide_heads_stay_in_registers_and_take_the_expected_memory(gpu: str) -> None:
    target, wanted, chosen = find_target(gpu), problem(Features(causal=True), d=512), family("flash_fwd")
    config = chosen.default(wanted.spec(), target)
    facts = cross_compile(render(chosen, variant_of(chosen, wanted.spec(), config)), "compiled", wanted, target)
    # The output alone is 512 bytes a thread.
    assert facts.tensor_core_ops > 0 and facts.spills <= 192
    assert 0 <= facts.shared_bytes - shared_bytes(config, wanted.spec(), target) <= 2048


@pytest.mark.parametrize("gpu", ["l4", "rtx5090"])
def test_fp8_with_alibi_compiles_for_every_gpu_that_has_e4m3(gpu: str) -> None:
    target, wanted = find_target(gpu), replace(problem(Features(causal=True, alibi=True, sinks=True)), dtype="fp8")
    facts = cross_compile(source("flash_fwd", wanted, target), "compiled", wanted, target)
    assert facts.tensor_core_ops > 0 and facts.spills <= 8


@pytest.mark.parametrize(("gpu", "num_stages", "within"), [("h200", 2, 0), ("l4", 3, 0), ("b200", 2, 2048)])
def test_shared_memory_of_fp8_is_what_the_compiler_takes(gpu: str, num_stages: int, within: int) -> None:
    target, wanted = find_target(gpu), replace(problem(), dtype="fp8")
    spec = wanted.spec()
    config = family("flash_fwd").default(spec, target).replace(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=num_stages)
    text = render(family("flash_fwd"), variant_of(family("flash_fwd"), spec, config))
    taken = cross_compile(text, "compiled", wanted, target).shared_bytes
    assert 0 <= taken - shared_bytes(config, spec, target) <= within


def test_one_compile_serves_every_n_batch_and_head_count() -> None:
    target = find_target("a100")
    text = source("flash_fwd", problem(Features(causal=True)), target)
    first = compiled(text, problem(Features(causal=True), n=1024), target)
    for n, heads in ((4096, 4), (1000, 4), (1, 2), (17, 32)):
        assert compiled(text, problem(Features(causal=True), n=n, heads=heads), target) is first


def test_one_philox_call_serves_sixteen_pairs() -> None:
    # 64 x 64 pairs over 128 threads are 32 a thread: 2 calls of 7 rounds with 2 wide products, in each of two loops.
    target, wanted = find_target("h200"), problem(Features(dropout=True))
    ptx = compiled(source("flash_fwd", wanted, target, BLOCK_N=64), wanted, target).asm["ptx"]
    products = len(re.findall(r"mul\.wide\.u32|mul\.hi\.u32", ptx))
    assert 2 * 2 * 7 * 2 * 0.7 < products < 2 * 2 * 7 * 2 * 1.5
    # A choice is made of whole registers, before the weights are rounded.
    assert "selp.b16" not in ptx


def test_scores_take_one_multiply_add_and_one_exponential_each() -> None:
    target, wanted = find_target("a100"), problem()
    ptx = compiled(source("flash_fwd", wanted, target), wanted, target).asm["ptx"]
    exponentials = len(re.findall(r"ex2\.approx", ptx))
    # 64 x 32 pairs over 128 threads are 16 a thread, and 2 rows to rescale, in each of two loops.
    assert exponentials == 2 * (16 + 2)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_candidates_share_the_kernel_that_packs_masks(direction: str) -> None:
    """Whatever comes before it in their texts: it is compiled for each kind of sizes of the small checks, 2 s a candidate."""
    name = "flash_fwd_hopper" if direction == "fwd" else "flash_bwd_hopper"
    target, chosen = find_target("h100"), family(name)
    problem = Problem(
        batch=1, heads=1, kv_heads=1, n_q=128, n_kv=128, d=64, d_v=64, dtype="bf16", features=Features(mask="bool"), direction=direction
    )
    variants = [variant_of(chosen, problem.spec(), config) for config in chosen.starts(problem.spec(), target)]
    texts = [render(chosen, variant) for variant in variants]
    lines = {text.splitlines().index(next(line for line in text.splitlines() if line.startswith("def pack_mask"))) for text in texts}
    keys = {load_kernel(text, f"packing_{place}").pack_mask.cache_key for place, text in enumerate(texts)}
    assert len(lines) > 1 and len(keys) == 1
