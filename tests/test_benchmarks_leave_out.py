"""What leave_out.py times: each variant leaves out what it says, and compiles for the GPU that it is for."""

import sys
from pathlib import Path

import pytest

from flashtune.core.target import find_target
from flashtune.tuner.compile import cross_compile

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import leave_out

H200 = find_target("h200")


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_every_variant_of_every_start_is_another_kernel(dtype: str) -> None:
    spec = leave_out.problem_of(dtype).spec()
    for config in leave_out.FAMILY.starts(spec, H200)[:3]:
        found = leave_out.variants(spec, config)
        assert len(set(found.values())) == len(found) == (6 if dtype == "fp8" else 5)


def test_variants_compile() -> None:
    problem = leave_out.problem_of("fp8")
    config = leave_out.FAMILY.starts(problem.spec(), H200)[0]
    for name, text in leave_out.variants(problem.spec(), config).items():
        assert cross_compile(text, "leave_out", problem, H200).tensor_core_ops > 0, name
