"""The frozen guards: what serves a sample of problems, and all machine code, are as they were frozen (guard/README.md)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "guard"))

import bits
import calls
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


@pytest.mark.skipif(not torch.__version__.startswith(calls.TORCH), reason=f"calls were frozen with PyTorch {calls.TORCH}")
def test_a_sample_of_the_frozen_calls_is_launched_as_it_was() -> None:
    # In a process of its own, in which all tensors say that they are on a GPU.
    done = subprocess.run([sys.executable, frozen.FOLDER / "calls.py", "--sample"], capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines()[1:], done.returncode) == ([], 0), done.stdout + done.stderr
    assert done.stdout.startswith("calls: ") and f" of {len(frozen.read('calls'))} entries, 0 changed" in done.stdout


def test_frozen_calls_are_of_all_ways_in_and_most_are_launched() -> None:
    kept = frozen.read("calls")
    ways = ("dense", "packed", "paged", "functions", "packed functions", "documents")
    of_way = {way: [one for name, one in kept.items() if name.startswith(f"{way} ")] for way in ways}
    assert all(len(found) >= 100 and 2 * sum("forward" in one for one in found) > len(found) for found in of_way.values())
    assert sum(not name.startswith("dense ") for name in kept) >= 1000 and sum("backward" in one for one in kept.values()) >= 500


def test_another_entry_is_named_with_what_it_was() -> None:
    assert frozen.differences({"a": 1, "b": 2}, {"b": 3, "c": 4}) == ["a: 1 became None", "b: 2 became 3", "c: None became 4"]


def test_of_an_entry_of_many_parts_those_that_differ_are_named() -> None:
    before = {"choice": ["exact", "a"], "forward": ["attend, a, grid=1x2, q=query, k=key", "sum, b, grid=1, q=query, n=3"]}
    after = {"choice": ["exact", "a"], "forward": ["attend, a, grid=1x2, q=query, k=value", "sum, b, grid=2, q=query, n=3"]}
    assert frozen.differences({"a": before}, {"a": after}) == ["a: forward: attend k=key became k=value; forward: sum grid=1 became grid=2"]
    assert frozen.differences({"a": before}, {"a": before | {"forward": []}})[0].startswith("a: forward: ['attend, a")
    many = {str(place): place for place in range(5)}
    assert frozen.differences({"a": many}, {"a": dict.fromkeys(many, -1)}) == [
        "a: 0: 0 became -1; 1: 1 became -1; 2: 2 became -1; and 2 more"
    ]


def test_random_calls_are_the_same_for_every_revision_and_other_bits_are_told_apart() -> None:
    words = [bits.drawn(way, number) for way in bits.WAYS for number in range(20)]
    assert words == [bits.drawn(one["way"], one["number"]) for one in words] and any(one["grad"] for one in words)
    zero, negative = torch.zeros(2), -torch.zeros(2)
    one, other, wide = (bits.digest({}, lambda _, x=x: (x,)) for x in (zero, negative, zero.double()))  # type: ignore[misc]
    assert one == bits.digest({}, lambda _: (zero.clone(),)) and len({one, other, wide}) == 3

    def fails(_: object) -> None:
        raise ValueError("no such call")

    assert bits.digest({}, fails) == "ValueError: no such call"
