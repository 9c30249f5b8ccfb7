"""Floors, bounds and crossovers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.errors import InputError
from flashtune.core.problem import Problem
from flashtune.core.target import Target, find_target, targets
from flashtune.profiler.accounting import Step, fused_step, standard_steps
from flashtune.profiler.measured import FITTED_POINTS, Layer, Series
from flashtune.profiler.roofline import Floor, crossover, floor, serial
from flashtune.profiler.summary import Profile

each_target = pytest.mark.parametrize("target", list(targets().values()), ids=lambda target: target.slug)


def plain(n: int, d: int) -> Problem:
    return Problem(batch=1, heads=12, kv_heads=12, n_q=n, n_kv=n, d=d, d_v=d, dtype="fp16")


def test_the_v100_balances_at_about_125_operations_per_byte() -> None:
    assert crossover(find_target("v100"), "fp16") == pytest.approx(125, abs=1)


def test_the_crossover_is_where_a_step_takes_as_long_in_memory_as_in_the_matrix_units() -> None:
    for target in targets().values():
        flops = 10**12
        step = Step(
            name="balanced",
            read_bytes=round(flops / crossover(target, "fp16")),
            write_bytes=0,
            score_bytes=0,
            matmul_flops=flops,
            vector_flops=0,
            exps=0,
        )
        found = floor(step, target, "fp16")
        assert found.compute_us == pytest.approx(found.memory_us, rel=1e-6)


@each_target
def test_the_standard_pipeline_is_memory_bound_and_the_fused_kernel_is_not(target: Target) -> None:
    """At D = 64 every product's intensity stays below 64, under the crossover of all of these GPUs but the RTX 3090."""
    problem = plain(4096, 64)
    bounds = {step.name: floor(step, target, "fp16").bound for step in standard_steps(problem, "separate")}
    assert {bounds[name] for name in ("scale_mask", "softmax", "dropout")} == {"memory"}
    assert bounds["qk"] == bounds["pv"] == ("memory" if crossover(target, "fp16") > 64 else "compute")
    assert floor(fused_step(problem), target, "fp16").bound != "memory"


def test_small_heads_are_bound_by_the_exponential_unit() -> None:
    target = find_target("h200")
    assert floor(fused_step(plain(4096, 32)), target, "fp16").bound == "exp"
    assert floor(fused_step(plain(4096, 128)), target, "fp16").bound == "compute"
    assert floor(fused_step(plain(16, 128)), target, "fp16").bound == "memory"


def test_a_dtype_without_matrix_units_is_refused_with_those_that_have_them() -> None:
    with pytest.raises(InputError, match="v100 has no bf16 matrix products: use --dtype fp16 or fp32"):
        crossover(find_target("v100"), "bf16")


floors = st.builds(Floor, compute_us=st.floats(0, 1e6), memory_us=st.floats(0, 1e6), exp_us=st.floats(0, 1e6))


@given(st.lists(floors, min_size=1, max_size=6))
def test_steps_in_a_row_take_the_sum_of_their_floors(found: list[Floor]) -> None:
    time_us, bound = serial(tuple(found))
    assert time_us == pytest.approx(sum(one.time_us for one in found))
    parts = {unit: sum(one.time_us for one in found if one.bound == unit) for unit in ("compute", "memory", "exp")}
    assert parts[bound] == max(parts.values())


@given(st.floats(0.2, 3), st.floats(1e-6, 1e3), st.lists(st.integers(5, 16), min_size=FITTED_POINTS, max_size=6, unique=True))
def test_the_fit_finds_the_exponent_of_a_power_law(exponent: float, factor: float, powers: list[int]) -> None:
    points = tuple((2**power, factor * (2**power) ** exponent) for power in powers)
    assert Series(name="eager", points=points).exponent == pytest.approx(exponent, abs=1e-6)


def test_the_exponent_is_fitted_to_the_largest_n_alone() -> None:
    flat_then_quadratic = tuple((n, max(100.0, n * n / 1e4)) for n in (64, 128, 256, 2048, 4096, 8192))
    assert Series(name="x", points=flat_then_quadratic).exponent == pytest.approx(2)
    assert Series(name="x", points=flat_then_quadratic[-FITTED_POINTS + 1 :]).exponent is None


def test_attentions_share_of_a_layer_counts_projections_and_mlp() -> None:
    layer = Layer(projections_us=10, mlp_us=30, attention_us={"eager": 60, "tuned": 10})
    assert layer.share("eager") == 0.6
    assert layer.share("tuned") == 0.2


@each_target
def test_a_profile_holds_for_every_target(target: Target) -> None:
    found = Profile(
        problem=plain(1024, 64), target=target, chosen_by="name", elementwise="fused", window=128, rank=64, not_measured="no GPU"
    ).as_json()
    assert found["target"]["slug"] == target.slug
    assert found["fused"]["floor_us"] < found["standard"]["floor_us"]
    assert found["standard"]["floor_us"] == pytest.approx(sum(step["floor_us"] for step in found["steps"]))
