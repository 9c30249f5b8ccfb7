"""The cases `check_gate` and `racecheck` without a GPU: lines of rendered kernels, and the sanitizer's words."""

import pytest

from benchmarks.cases import check_gate, racecheck

SAID = """========= Warning: (Warp Level Programming) Potential WAW hazard detected at __shared__ 0x34000 in block (0,0,0) :
=========     Write Thread (127,0,0) at flash_fwd_hopper+0x6870 in kernel.py:432
=========     Write Thread (160,0,0) at flash_fwd_hopper+0x93c0 in kernel.py:496
=========     Current Value : 0, Incoming Value : 1
========= Error: Race reported between Write access at flash_fwd_hopper+0x6870 in kernel.py:432
=========     and Read access at flash_fwd_hopper+0x7000 in kernel.py:433 [16 hazards]
=========     and Write access at flash_fwd_hopper+0x93c0 in kernel.py:496 [1 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


@pytest.mark.parametrize("fault", check_gate.FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_planted_in_a_line_that_kernels_have(fault: check_gate.Fault) -> None:
    right, planted = fault.text(planted=False).splitlines(), fault.text(planted=True).splitlines()
    assert sum(one != other for one, other in zip(right, planted, strict=True)) == 1


def test_a_fault_whose_line_is_gone_is_told() -> None:
    with pytest.raises(ValueError, match="0 times"):
        check_gate.Fault(name="gone", old="no such line", new="", says="").text(planted=True)


def test_races_are_read_with_their_instructions_and_counts() -> None:
    first = ("Write", 0x6870)
    assert racecheck.races(SAID) == [([first, ("Read", 0x7000)], 16), ([first, ("Write", 0x93C0)], 1)]
    assert racecheck.hazards(SAID) == {("WAW", "Write 0x6870", "warp 3"): 1, ("WAW", "Write 0x93c0", "warp 5"): 1}
    assert racecheck.addresses(SAID) == {"0x34000": 1}


@pytest.mark.parametrize("name", racecheck.KERNELS)
def test_kernels_under_racecheck_go_from_tile_to_tile(name: str) -> None:
    assert ("while work_index < tiles" in racecheck.text_of(name, None)) == (name != "one")
