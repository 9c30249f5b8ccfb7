"""The backward family: gradients of the float64 reference, the same bits every time, and code for every kind of GPU."""

from typing import Any

import pytest
from interpreting import interpreted

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import families, family
from flashtune.templates.backward.flash_bwd import key_config, key_shared_bytes, query_config, query_shared_bytes
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiled_kernels, read_facts


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Findings of the interpreter."""
    found: dict[str, Any] = interpreted("interpret_backward")
    return found


@pytest.mark.parametrize("case", ["causal", "everything", "left", "full", "lse"])
def test_gradients_are_those_of_the_reference(report: dict[str, Any], case: str) -> None:
    assert report[case] == ""


@pytest.mark.parametrize("mask", ["none", "bool", "bias", "causal"])
def test_gradients_are_right_where_the_lse_is_so_negative_that_padding_overflows(report: dict[str, Any], mask: str) -> None:
    assert report[f"very negative: {mask}"] == ""


def test_rows_that_a_bias_hides_whole_have_zeros_as_gradients(report: dict[str, Any]) -> None:
    assert report["unseen"] and report["rows hidden by a bias"] == ""


def test_errors_are_at_most_twice_the_frameworks(report: dict[str, Any]) -> None:
    assert all(ours <= 2 * theirs for ours, theirs in zip(report["ours"], report["framework"], strict=True)), report


def test_only_the_gradients_that_are_asked_for_are_made_and_always_of_the_same_bits(report: dict[str, Any]) -> None:
    assert report["repeated"] and report["dq alone"] and report["dk and dv alone"]


@pytest.mark.parametrize("over", ["rows of all batches", "columns of all heads", "all"])
def test_a_bias_gets_the_sum_of_what_it_repeats_over_alone_and_always_of_the_same_bits(report: dict[str, Any], over: str) -> None:
    assert report["repeated biases"][over] < 1e-5


def problem(features: Features, d: int = 32) -> Problem:
    return Problem(batch=1, heads=2, kv_heads=1, n_q=512, n_kv=512, d=d, d_v=d, dtype="bf16", features=features, direction="bwd")


@pytest.mark.parametrize("gpu", ["a100", "b200", "mi300x"])
def test_it_compiles_to_tensor_core_code(gpu: str) -> None:
    target, wanted, chosen = find_target(gpu), problem(Features(causal=True)), family("flash_bwd")
    tile = {"BLOCK_M": 32, "BLOCK_N": 64, "DQ_BLOCK_M": 64, "DQ_BLOCK_N": 32}
    config = chosen.default(wanted.spec(), target).replace(**tile, num_warps=4, num_stages=1, DQ_num_warps=4, DQ_num_stages=1)
    assert chosen.violated(config, wanted.spec(), target) is None
    found = compiled_kernels(render(chosen, variant_of(chosen, wanted.spec(), config)), "backward", wanted, target)
    facts = {name: read_facts(compiled, target) for name, compiled in found}
    assert list(facts) == ["row_deltas", "key_gradients", "query_gradients"]
    bounds = {
        "key_gradients": key_shared_bytes(key_config(config), wanted.spec(), target),
        "query_gradients": query_shared_bytes(query_config(config), wanted.spec(), target),
    }
    for name, bound in bounds.items():
        assert facts[name].tensor_core_ops > 0 and facts[name].spills <= 8
        assert facts[name].shared_bytes <= bound + 1024


def test_only_backward_families_serve_the_backward() -> None:
    target = find_target("h200")
    serving = [name for name, chosen in families().items() if chosen.supports(problem(Features()).spec(), target) is None]
    assert serving == ["flash_bwd_hopper", "flash_bwd_hopper_split", "flash_bwd"]
    assert {families()[name].direction for name in serving} == {"bwd"}
    forward = Problem(batch=1, heads=2, kv_heads=1, n_q=512, n_kv=512, d=64, d_v=64, dtype="bf16")
    assert "backward" in (family("flash_bwd").supports(forward.spec(), target) or "")
