"""Head sizes that are no multiples of 16: kernels with plain pointers load as many bytes at once as for others, on whatever strides."""

import functools
import re
from collections import Counter
from typing import Any

import pytest
from hopper_kernels import machine_code
from interpreting import interpreted

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Value
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiled_kernels


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Findings of the interpreter."""
    found: dict[str, Any] = interpreted("interpret_strides")
    return found


@pytest.mark.parametrize("case", ["forward", "forward of 20", "few queries", "backward"])
@pytest.mark.parametrize(("strides", "aligned"), [("usual", True), ("odd", False)])
def test_numbers_are_right_on_strides_of_either_kind(report: dict[str, Any], case: str, strides: str, aligned: bool) -> None:
    assert report[f"{case}, {strides}"] == ""
    assert report[f"{case}, {strides}: told"] == [aligned]


@pytest.mark.parametrize(
    ("gpu", "template", "d", "changed"),
    [
        ("a100", "flash_fwd", 72, {}),
        ("a100", "flash_bwd", 72, {}),
        ("a100", "flash_decode", 72, {}),
        ("h200", "flash_bwd_hopper", 72, {"persistent": "dynamic"}),
        ("h200", "flash_bwd_hopper_split", 136, {}),
    ],
)
def test_sixteen_bytes_are_loaded_and_stored_at_once(gpu: str, template: str, d: int, changed: dict[str, Value]) -> None:
    found = accesses(gpu, template, d, **changed)
    # What adds up the parts of few queries stores a row a program; products that the copy engine serves have no accesses of their own.
    narrow = [name for name, widths in found.items() if any("U16" in width for width in widths) and name != "combine_splits"]
    assert not narrow
    assert any("128" in width for widths in found.values() for width in widths)


def test_they_are_loaded_and_stored_as_those_that_16_divides() -> None:
    assert accesses("a100", "flash_fwd", 72) == accesses("a100", "flash_fwd", 80)


@functools.cache
def accesses(gpu: str, template: str, d: int, **changed: Value) -> dict[str, Counter[str]]:
    """How often the machine code of each kernel of the default config but for `changed` loads and stores, by how much at once."""
    target, kind = find_target(gpu), family(template)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 4, "n_q": 1 if template == "flash_decode" else 1024, "n_kv": 1024, "d": d, "d_v": d}
    backward = kind.direction == "bwd"
    problem = Problem(**sizes, dtype="bf16", features=Features(), direction="bwd" if backward else "fwd")
    source = render(kind, variant_of(kind, problem.spec(), kind.default(problem.spec(), target).replace(**changed)))
    kernels = dict(compiled_kernels(source, "backward" if backward else "forward", problem, target))
    access = re.compile(r"\b(?:LDGSTS|LDG|STG)\.E\S*")
    return {name: Counter(access.findall("\n".join(machine_code(kernel)))) for name, kernel in kernels.items()}


@pytest.mark.parametrize(
    ("d", "d_v", "unit"), [(64, 64, 0), (80, 80, 0), (40, 40, 8), (72, 64, 8), (20, 36, 4), (18, 20, 2), (33, 40, 0), (192, 128, 0)]
)
def test_a_unit_is_what_divides_both_head_sizes(d: int, d_v: int, unit: int) -> None:
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "n_q": 8, "n_kv": 8}
    spec = Problem(**sizes, d=d, d_v=d_v, dtype="bf16", features=Features()).spec()
    assert spec.stride_unit == unit
    kind = family("flash_fwd")
    text = render(kind, variant_of(kind, spec, kind.default(spec, find_target("a100"))))
    # Texts of other head sizes are what they were.
    assert ("ALIGNED" in text) == (unit > 0)
