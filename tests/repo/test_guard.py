"""The frozen guards: what serves a sample of problems, and all machine code, are as they were frozen (guard/README.md)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "guard"))

import choices
import frozen
import machine_code

FEW = 37
"""Every so many-th problem is asked again here; `python guard/choices.py` asks all."""


def test_what_serves_a_sample_of_the_frozen_problems_is_what_served_them() -> None:
    kept = frozen.read("choices")
    assert len(kept) >= 4000
    names = sorted(kept)[::FEW]
    assert frozen.differences({name: kept[name] for name in names}, choices.served(names)) == []


def test_shipped_machine_code_and_its_launches_are_the_frozen_ones() -> None:
    assert frozen.differences(frozen.read("code"), machine_code.current()) == []


def test_another_entry_is_named_with_what_it_was() -> None:
    assert frozen.differences({"a": 1, "b": 2}, {"b": 3, "c": 4}) == ["a: 1 became None", "b: 2 became 3", "c: None became 4"]
