"""The case `calibration` counts how often estimates hold; its committed run is the reason that none is shown."""

import re

from benchmarks.cases import calibration
from benchmarks.cases.archive import folder

RESULT = folder() / "2026-11-27-calibration" / "coverage.txt"


def test_an_estimate_holds_where_what_was_lost_is_no_more() -> None:
    cases = [(0.01, 0.0), (0.01, 0.05), (0.02, None), (0.05, 0.05), (0.3, 0.2), (0.3, None)]
    found = calibration.coverage(cases)
    assert found == {"0% to 2%": (1, 2, 1), "2% to 10%": (1, 1, 0), "above 20%": (1, 1, 1), "all": (3, 4, 2)}


def test_the_committed_run_says_that_estimates_of_little_hold_too_seldom() -> None:
    shares = [float(share) / 100 for share in re.findall(r"([\d.]+)%  *\d+$", RESULT.read_text(), re.MULTILINE)]
    assert len(shares) == 5 and not all(0.85 <= share <= 0.95 for share in shares), "calibrated: explain may show them again"
