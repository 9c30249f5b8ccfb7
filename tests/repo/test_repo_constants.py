"""The table of constants: what counts as one, and that those of the modules which choose are in it."""

import re
from pathlib import Path

from tools import constants

ROOT = Path(__file__).resolve().parents[2]
TEXT = '''
A = 3
"""Three
of them (benchmarks/run.py fit_cost)."""
B, C = 0.5, -2**3
"""Two."""
D: dict[str, float] = {"x": 1.5}
"""By name."""
SILENT = 4
WORDS = ("a", "b")
"""No numbers."""
YES = True
"""Nor this."""
small = 5
"""Nor this."""
'''


def test_documented_numbers_are_constants_and_nothing_else_is() -> None:
    found = list(constants.constants_of(TEXT))
    assert [one.name for one in found] == ["A", "B, C", "D"]
    assert found[0] == ("A", "3", "Three of them (benchmarks/run.py fit_cost).")
    assert found[1].value == "0.5, -2 ** 3"


def test_the_page_gets_the_table_in_place_of_its_marker() -> None:
    page = (ROOT / "docs" / constants.PAGE).read_text()
    assert page.count(constants.MARKER) == 1 and f"hooks: [{Path('tools/constants.py')}, " in (ROOT / "mkdocs.yml").read_text()
    rows = re.findall(r"^\| `([\w/]+)` \| `([A-Z0-9_, ]+)` \|", constants.table(), re.MULTILINE)
    assert len(rows) > 60 and {module.split("/")[0] for module, _ in rows} == set(constants.PARTS)
    assert ("templates/decode/flash_decode", "BUSY") in rows
