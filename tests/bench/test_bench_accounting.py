"""Counts and floors: the published figures to the byte, and what must hold for every size."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.bench.accounting import (
    ELEMENTWISE,
    Elementwise,
    Roofline,
    Step,
    fused_step,
    standard_steps,
    strategies,
    tensor_bytes,
    total,
    windowed,
)
from flashtune.bench.profiling import Profile
from flashtune.core.gpu.target import Target, find_target, targets
from flashtune.core.problems.dtypes import DTYPES, ITEMSIZE, DType, output_dtype
from flashtune.core.problems.problem import Problem
from flashtune.core.system.errors import InputError

MIB = 2**20


def plain(batch: int, heads: int, n: int, d: int, dtype: DType = "fp16") -> Problem:
    return Problem(batch=batch, heads=heads, kv_heads=heads, n_q=n, n_kv=n, d=d, d_v=d, dtype=dtype)


problems = st.builds(plain, st.integers(1, 4), st.integers(1, 32), st.integers(1, 3000), st.integers(1, 256), st.sampled_from(DTYPES))
passes = st.sampled_from(ELEMENTWISE)


def test_twelve_heads_of_1024_by_64_in_fp16_move_these_bytes() -> None:
    problem = plain(1, 12, 1024, 64)
    assert tensor_bytes(problem) == {name: int(size * MIB) for name, size in {"Q": 1.5, "K": 1.5, "V": 1.5, "S": 24, "O": 1.5}.items()}
    assert {step.name: step.bytes for step in standard_steps(problem, "fused")} == {"qk": 27 * MIB, "elementwise": 48 * MIB, "pv": 27 * MIB}
    qk, elementwise, pv = standard_steps(problem, "fused")
    assert (qk.read_bytes, qk.write_bytes) == (3 * MIB, 24 * MIB)
    assert (elementwise.read_bytes, elementwise.write_bytes) == (24 * MIB, 24 * MIB)
    assert (pv.read_bytes, pv.write_bytes) == (int(25.5 * MIB), int(1.5 * MIB))


def test_one_head_of_4096_by_128_in_fp16_moves_138_megabytes_of_which_97_percent_are_scores() -> None:
    problem = plain(1, 1, 4096, 128)
    whole = total("standard", standard_steps(problem, "fused"))
    assert tensor_bytes(problem)["S"] == 33_554_432  # 33.5 MB
    assert whole.bytes == 138_412_032  # 138 MB
    assert whole.score_bytes == 4 * 33_554_432
    assert round(100 * whole.score_share) == 97


def test_a_backward_of_twelve_heads_of_1024_by_64_in_fp16_moves_these_bytes() -> None:
    problem = replace(plain(1, 12, 1024, 64), direction="bwd")
    steps = {
        step.name: (step.read_bytes / MIB, step.write_bytes / MIB, step.score_bytes / MIB) for step in standard_steps(problem, "fused")
    }
    assert steps == {
        "dv": (25.5, 1.5, 24),
        "dp": (3, 24, 24),
        "elementwise": (48, 24, 72),
        "dq": (25.5, 1.5, 24),
        "dk": (25.5, 1.5, 24),
    }
    assert [step.name for step in standard_steps(problem, "separate")] == ["dv", "dp", "dropout", "softmax", "scale", "dq", "dk"]
    assert [step.bytes / MIB for step in standard_steps(problem, "separate")[2:5]] == [48, 72, 48]
    whole, fused = total("standard", standard_steps(problem, "fused")), fused_step(problem)
    # Four products where the fused kernel makes S anew for a fifth.
    assert fused.matmul_flops == 5 / 4 * whole.matmul_flops == problem.flops()
    assert fused.bytes == problem.io_bytes() and fused.score_bytes == 0
    assert [strategy.name for strategy in strategies(problem, "fused", 128, 64)] == ["standard", "fused", "window"]


def test_separate_steps_cross_memory_once_each() -> None:
    steps = standard_steps(plain(1, 12, 1024, 64), "separate")
    assert [step.name for step in steps] == ["qk", "scale_mask", "softmax", "dropout", "pv"]
    assert [step.bytes for step in steps] == [27 * MIB, 48 * MIB, 48 * MIB, 48 * MIB, 27 * MIB]


def test_the_intensity_of_the_first_product_follows_from_its_own_formula() -> None:
    """2 N^2 D / (4 N D + 2 N^2) in fp16: it tends to D as N grows; write-ups that say 2.8 have another formula or an error."""
    for n, d in ((1024, 64), (4096, 128), (777, 80)):
        qk = standard_steps(plain(2, 3, n, d), "fused")[0]
        assert qk.intensity == pytest.approx(2 * n * n * d / (4 * n * d + 2 * n * n), rel=1e-12)
    near_limit = [standard_steps(plain(1, 1, n, 128), "fused")[0].intensity for n in (1 << 10, 1 << 14, 1 << 18, 1 << 22)]
    assert near_limit == sorted(near_limit)
    assert near_limit[-1] == pytest.approx(128, rel=1e-3)


@given(problems, passes)
def test_every_byte_belongs_to_a_tensor(problem: Problem, elementwise: Elementwise) -> None:
    size = tensor_bytes(problem)
    whole = total("standard", standard_steps(problem, elementwise))
    crossings = {"fused": 4, "separate": 8}[elementwise]
    assert whole.score_bytes == crossings * size["S"]
    assert whole.bytes - whole.score_bytes == size["Q"] + size["K"] + size["V"] + size["O"]
    assert whole.bytes == whole.read_bytes + whole.write_bytes
    itemsize, out_itemsize = ITEMSIZE[problem.dtype], ITEMSIZE[output_dtype(problem.dtype)]
    assert sum(size.values()) - size["S"] == problem.batch * problem.heads * problem.n_q * problem.d * (3 * itemsize + out_itemsize)


@given(problems, passes)
def test_fusing_changes_no_operation_and_moves_no_score(problem: Problem, elementwise: Elementwise) -> None:
    standard, fused = total("standard", standard_steps(problem, elementwise)), fused_step(problem)
    assert (fused.matmul_flops, fused.vector_flops, fused.exps) == (standard.matmul_flops, standard.vector_flops, standard.exps)
    assert fused.matmul_flops == problem.flops()
    assert fused.exps == problem.batch * problem.heads * problem.n_q**2
    assert fused.score_bytes == 0
    assert fused.bytes == problem.io_bytes()


@given(problems)
def test_how_elementwise_steps_run_changes_bytes_but_no_operations(problem: Problem) -> None:
    together, apart = (total("standard", standard_steps(problem, elementwise)) for elementwise in ELEMENTWISE)
    assert together.flops == apart.flops
    assert apart.bytes - together.bytes == 4 * tensor_bytes(problem)["S"]


@given(problems, st.integers(0, 4000))
def test_a_window_counts_the_keys_that_each_query_sees(problem: Problem, window: int) -> None:
    n = problem.n_q
    outside = max(0, n - 1 - window)
    local = fused_step(windowed(problem, window))
    assert local.exps == problem.batch * problem.heads * (n * n - outside * (outside + 1))
    assert local.bytes == fused_step(problem).bytes
    assert (local.exps == fused_step(problem).exps) == (window >= n - 1)


@given(problems, st.data())
def test_low_rank_pays_for_its_projections_and_then_attends_to_fewer_keys(problem: Problem, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, problem.n_kv))
    size, rows = ITEMSIZE[problem.dtype], problem.batch * problem.heads
    *projections, attention = strategies(problem, "fused", 8, rank)[3].steps
    assert [step.name for step in projections] == ["project_k", "project_v"]
    for step in projections:
        assert step.matmul_flops == 2 * rows * rank * problem.n_kv * problem.d
        assert step.read_bytes == size * (rank * problem.n_kv + rows * problem.n_kv * problem.d)
        assert step.write_bytes == size * rows * rank * problem.d
    assert attention.matmul_flops == replace(problem, n_kv=rank).flops() == 4 * rows * problem.n_q * rank * problem.d


def test_only_standard_and_fused_are_exact_and_so_is_a_window_that_hides_nothing() -> None:
    problem = plain(1, 1, 64, 16)
    assert [s.name for s in strategies(problem, "fused", 8, 4)] == ["standard", "fused", "window", "low_rank"]
    assert [s.exact for s in strategies(problem, "fused", 8, 4)] == [True, True, False, False]
    assert strategies(problem, "fused", 63, 4)[2].exact


each_target = pytest.mark.parametrize("target", list(targets().values()), ids=lambda target: target.slug)


def twelve_heads(n: int, d: int) -> Problem:
    return plain(1, 12, n, d)


def test_the_v100_balances_at_about_125_operations_per_byte() -> None:
    assert Roofline(find_target("v100"), "fp16").crossover == pytest.approx(125, abs=1)


@each_target
def test_the_crossover_is_where_a_step_takes_as_long_in_memory_as_in_the_matrix_units(target: Target) -> None:
    roofline, flops = Roofline(target, "fp16"), 10**12
    units = roofline.units_us(Step(name="balanced", read_bytes=round(flops / roofline.crossover), write_bytes=0, matmul_flops=flops))
    assert units["compute"] == pytest.approx(units["memory"], rel=1e-6)


@each_target
def test_the_standard_pipeline_is_memory_bound_and_the_fused_kernel_is_not(target: Target) -> None:
    """At D = 64 every product's intensity stays below 64, under the crossover of all of these GPUs but the RTX 3090."""
    problem, roofline = twelve_heads(4096, 64), Roofline(target, "fp16")
    bounds = {step.name: roofline.floor(step)[1] for step in standard_steps(problem, "separate")}
    assert {bounds[name] for name in ("scale_mask", "softmax", "dropout")} == {"memory"}
    assert bounds["qk"] == bounds["pv"] == ("memory" if roofline.crossover > 64 else "compute")
    assert roofline.floor(fused_step(problem))[1] != "memory"


@pytest.mark.parametrize(("n", "d", "bound"), [(4096, 32, "exp"), (4096, 128, "compute"), (16, 128, "memory")])
def test_small_heads_are_bound_by_the_exponential_unit(n: int, d: int, bound: str) -> None:
    assert Roofline(find_target("h200"), "fp16").floor(fused_step(twelve_heads(n, d)))[1] == bound


def test_a_dtype_without_matrix_units_is_refused_with_those_that_have_them() -> None:
    with pytest.raises(InputError, match="v100 has no bf16 matrix products: use --dtype fp16 or fp32"):
        Roofline(find_target("v100"), "bf16")


counts = st.integers(1, 10**12)
steps = st.builds(Step, name=st.just("x"), read_bytes=counts, write_bytes=counts, matmul_flops=counts, vector_flops=counts, exps=counts)


@given(st.lists(steps, min_size=1, max_size=6))
def test_steps_in_a_row_take_the_sum_of_their_floors(found: list[Step]) -> None:
    roofline = Roofline(find_target("a100"), "bf16")
    time_us, bound = roofline.floor(*found)
    floors = [roofline.floor(step) for step in found]
    assert time_us == pytest.approx(sum(us for us, _ in floors))
    assert all(us == max(roofline.units_us(step).values()) for (us, _), step in zip(floors, found, strict=True))
    parts = {unit: sum(us for us, by in floors if by == unit) for unit in ("compute", "memory", "exp")}
    assert parts[bound] == max(parts.values())


@each_target
def test_a_profile_holds_for_every_target(target: Target) -> None:
    found = Profile(
        problem=twelve_heads(1024, 64), target=target, chosen_by="name", elementwise="fused", window=128, rank=64, not_measured="no GPU"
    ).document()
    assert found["target"]["slug"] == target.slug
    assert found["fused"]["floor_us"] < found["standard"]["floor_us"]
    assert found["standard"]["floor_us"] == pytest.approx(sum(step["floor_us"] for step in found["steps"]))
