"""The kernel path for real, on the CPU: Triton's interpreter is switched on at import, so each test starts a process of its own."""

import pytest
from interpreting import interpreted, output_of_tests

QUIET = ("-q", "-W", "ignore", "-p", "no:cacheprovider")


def test_kernels_agree_with_the_float64_reference_in_the_interpreter() -> None:
    """The table of test_dispatch_numbers.py, with fewer examples; FLASHTUNE_TEST_EXAMPLES=100 runs more by hand."""
    said = output_of_tests(*QUIET, "tests/dispatch/test_dispatch_numbers.py", FLASHTUNE_TEST_EXAMPLES="6")
    assert " passed" in said and "failed" not in said


@pytest.mark.parametrize("share", ["1/2", "2/2"])
def test_kernels_serve_every_pair_of_features_types_layouts_and_gradients(share: str) -> None:
    """The other branch of test_dispatch_matrix.py, whose tests fail where torch serves in a kernel's place."""
    said = output_of_tests(*QUIET, "tests/dispatch/test_dispatch_matrix.py", FLASHTUNE_TEST_SHARE=share)
    assert " passed" in said and "failed" not in said


def test_tracers_and_transforms_compose_where_kernels_serve() -> None:
    # How operators are made has nothing to do with who serves.
    said = output_of_tests(*QUIET, "tests/dispatch/test_dispatch_tracers.py", "-k", "not operators")
    assert " passed" in said and "failed" not in said


def test_the_interpreter_says_that_it_serves_and_leaves_bf16_to_the_framework() -> None:
    bf16 = "Triton's interpreter can't multiply bfloat16, so PyTorch's own attention runs the call"
    assert interpreted("interpret_dispatch") == ["default", "flash_fwd", "cpu", None, True, "framework", "cpu", bf16, *[True] * 5]
