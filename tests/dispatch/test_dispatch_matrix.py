"""Features, types, layouts and gradients in all pairs (matrix.py), on both branches: torch by force, and in Triton's interpreter kernels.

FLASHTUNE_TEST_SHARE ("2/3": the second of three) takes a share of the cases.
"""

import os
from collections.abc import Callable

import pytest
import torch
from branches import Branch, forced, served
from matrix import CASES, LEVELS, TINY, Case, check

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
BRANCH: Branch = "kernels" if INTERPRETING else "torch"
PART, PARTS = map(int, os.environ.get("FLASHTUNE_TEST_SHARE", "1/1").split("/"))

pytestmark = pytest.mark.usefixtures("one_thread")


def runs_here(case: Case) -> bool:
    """The interpreter can't multiply bf16."""
    return not INTERPRETING or (case.dtype != "bf16" and case.index % PARTS == PART - 1)


@pytest.mark.parametrize("case", [case for case in CASES if runs_here(case)], ids=str)
def test_values_and_meaning_are_those_of_the_reference(case: Case, record_property: Callable[[str, str], None]) -> None:
    with forced(BRANCH):
        check(case, "cpu", TINY)
        by = served()
    record_property("served", by)
    assert (by == "torch") == (BRANCH == "torch" or case.rows == "empty"), f"{by} served"


def test_both_branches_of_every_level_are_among_the_cases() -> None:
    for name, levels in LEVELS.items():
        for level in levels:
            met = [case for case in CASES if getattr(case, name) == level]
            assert met, f"{name}={level}"
            assert level in ("bf16", "empty") or any(case.dtype != "bf16" and case.rows != "empty" for case in met), f"{name}={level}"
    assert torch.get_num_threads() == 1
