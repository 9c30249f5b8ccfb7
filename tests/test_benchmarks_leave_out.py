"""What leave_out.py times: each variant leaves out what it says, and compiles for the GPU that it is for."""

import sys
from pathlib import Path

import pytest
from compiling import cross_compile

from flashtune.core.dtypes import DType
from flashtune.core.problem import Features
from flashtune.core.target import find_target

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import leave_out
from forward_cells import problem_of

H200 = find_target("h200")


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_every_variant_of_every_start_is_another_kernel(dtype: DType) -> None:
    spec = problem_of(128, 16384, Features(), dtype=dtype).spec()
    for config in leave_out.FAMILY.starts(spec, H200)[:3]:
        found = leave_out.variants(spec, config)
        assert len(set(found.values())) == len(found) == 6


@pytest.mark.parametrize("maximum", ["running", "first"])
def test_a_stage_is_left_out_of_every_block_and_no_row_is_looked_at_for_it(maximum: str) -> None:
    spec = problem_of(128, 16384, Features(causal=True)).spec()
    config = next(config for config in leave_out.FAMILY.starts(spec, H200) if config["maximum"] == maximum)
    found = leave_out.variants(spec, config)
    stages = {"no exponentials": "gl.exp2(scores", "no maxima": "gl.max(scores", "no sums": "+ quarter_sums(probs)"}
    for name, stage in stages.items():
        assert stage in found["whole"]
        assert stage not in found[name]
        assert stage not in found["none of these"]
    asking = {name for name, text in found.items() if "if vote_outgrown(part, row_sum, W) != 0:" in text}
    assert asking == ({"whole"} if maximum == "first" else set())


def test_variants_compile() -> None:
    problem = problem_of(128, 16384, Features(), dtype="fp8")
    config = leave_out.FAMILY.starts(problem.spec(), H200)[0]
    for name, text in leave_out.variants(problem.spec(), config).items():
        assert cross_compile(text, "leave_out", problem, H200).tensor_core_ops > 0, name
