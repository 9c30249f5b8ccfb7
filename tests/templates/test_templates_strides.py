"""Head sizes that are no multiples of 16: kernels with plain pointers load as many bytes at once as for others, on whatever strides."""

import functools
from collections import Counter
from typing import Any

import pytest
from hopper_kernels import accesses, are_sixteen_bytes
from interpreting import interpreted

from flashtune.core.gpu.target import find_target
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


@pytest.mark.parametrize("template", ["flash_fwd", "flash_bwd", "flash_decode"])
def test_sixteen_bytes_are_loaded_and_stored_at_once(template: str) -> None:
    """Of Hopper's backwards in the tests of what they compile to."""
    are_sixteen_bytes(accesses_of(template, 72))


def test_they_are_loaded_and_stored_as_those_that_16_divides() -> None:
    assert accesses_of("flash_fwd", 72) == accesses_of("flash_fwd", 80)


@functools.cache
def accesses_of(template: str, d: int) -> dict[str, Counter[str]]:
    """Accesses of the kernels of the default config for an A100."""
    target, kind = find_target("a100"), family(template)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 4, "n_q": 1 if template == "flash_decode" else 1024, "n_kv": 1024, "d": d, "d_v": d}
    backward = kind.direction == "bwd"
    problem = Problem(**sizes, dtype="bf16", features=Features(), direction="bwd" if backward else "fwd")
    source = render(kind, variant_of(kind, problem.spec(), kind.default(problem.spec(), target)))
    return accesses(dict(compiled_kernels(source, "backward" if backward else "forward", problem, target)))


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
