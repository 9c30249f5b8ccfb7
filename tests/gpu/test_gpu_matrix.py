"""Features, types, layouts and gradients in all pairs (tests/support/matrix.py) on a GPU: each call once by torch and once by kernels."""

import os
from collections.abc import Callable

import pytest
from branches import BRANCHES, Branch, forced, served
from matrix import CASES, LARGE, Case, check

DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_meaning_are_those_of_the_reference(case: Case, branch: Branch, record_property: Callable[[str, str], None]) -> None:
    with forced(branch):
        check(case, DEVICE, LARGE)
        by = served()
    record_property("served", by)
    # What has nothing to compute needs no kernel, and kernels take columns of 8-bit values in no order but one after the other.
    refused = case.rows == "empty" or (case.dtype == "fp8" and case.layout == "columns")
    assert (by == "torch") == (branch == "torch" or refused), f"{by} served"
