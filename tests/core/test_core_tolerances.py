"""The table of tolerances rests on the roundoffs that it names, and on a simulation that is committed."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.cases.archive import folder
from flashtune.core.problems import tolerances

ROOT = Path(__file__).parents[2]
TEXT = Path(tolerances.__file__).read_text()
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}


@pytest.mark.parametrize("name", TYPES)
def test_the_roundoffs_that_the_comments_name_are_those_of_the_types(name: str) -> None:
    named = re.search(rf"# {name}: unit roundoff 2\^-(\d+) = (\d\.\d+)", TEXT)
    assert named is not None
    # eps is the distance from 1 to the next number; rounding is off by half of it at most.
    assert 2.0 ** -int(named[1]) == torch.finfo(TYPES[name]).eps / 2 == pytest.approx(float(named[2]), rel=0.05)


def errors_of_e4m3_weights(n: int, d: int, spread: float, *, causal: bool) -> tuple[float, float]:
    """The relative norm and the largest |error| / (1 + |o|) for 256 rows of one head, with weights rounded as before PV in fp8."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.linspace(0, n - 1, min(n, 256)).long()
    scores = spread * torch.randn(len(rows), n, generator=generator, dtype=torch.float64)
    if causal:
        scores[torch.arange(n)[None, :] > rows[:, None]] = -torch.inf
    v = torch.randn(n, d, generator=generator, dtype=torch.float64)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    sums = weights.sum(-1, keepdim=True)
    exact = weights @ v / sums
    error = weights.float().to(torch.float8_e4m3fn).double() @ v / sums - exact
    return float(error.norm() / exact.norm()), float((error.abs() / (1 + exact.abs())).max())


def test_the_bounds_of_fp8_hold_what_the_committed_simulation_printed() -> None:
    printed = (folder() / "2026-11-22-fp8-weights" / "weights.txt").read_text()
    largest = re.search(r"largest: norm (\S+), element (\S+)", printed)
    assert largest is not None
    bound = tolerances.TOLERANCES["fp8"]
    assert float(largest[1]) < bound.relative_norm / 1.5 and float(largest[2]) < bound.atol / 1.5
    norm, element = errors_of_e4m3_weights(512, 64, 1.0, causal=True)
    line = re.search(r"causal N=512 +D=64 +sd=1.0 +norm (\S+) +element (\S+)", printed)
    assert line is not None
    assert (norm, element) == (pytest.approx(float(line[1]), abs=2e-3), pytest.approx(float(line[2]), abs=2e-3))


def test_no_figure_comes_from_a_script_that_nobody_has() -> None:
    """Comments, documents and results name what printed their figures, or say that it was not kept."""
    folders = ("flashtune", "benchmarks", "docs", "tests")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".txt", ".toml", ".jinja")]
    assert len(found) > 100
    said = "throw-" + "away"
    assert [path for path in found if said in path.read_text()] == []
