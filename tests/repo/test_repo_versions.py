"""Versions that were run: the bounds of the metadata, the documents and the environment that `make` sets up agree with one table."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from flashtune.core.system.versions import LOWEST, LOWEST_TRANSFORMERS, RUNS, minor

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_bounds_of_the_metadata_are_those_of_the_table() -> None:
    bounds = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    for name, lowest in LOWEST.items():
        assert f">={lowest}" in map(str, bounds[name])
    for run in RUNS:
        assert bounds["torch"].contains(run.torch) and bounds["triton"].contains(run.triton)
    assert PROJECT["optional-dependencies"]["transformers"] == [f"transformers>={LOWEST_TRANSFORMERS}"]
    assert min(minor(run.transformers) for run in RUNS if run.transformers) == minor(LOWEST_TRANSFORMERS)
    lowest_python = min(tuple(map(int, run.python.split("."))) for run in RUNS)
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, lowest_python))


def test_the_page_has_the_table() -> None:
    text = (ROOT / "docs" / "support.md").read_text()
    rows = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in text.splitlines() if re.match(r"\| \d+\.\d+ \|", row)]
    assert rows == list(map(tuple, RUNS))
    assert f"PyTorch {LOWEST['torch']} or newer, which brings its own Triton ({LOWEST['triton']} or newer)" in text
    integration = (ROOT / "flashtune" / "integrations" / "transformers.py").read_text()
    assert f"transformers {LOWEST_TRANSFORMERS} or newer" in text and f"transformers ({LOWEST_TRANSFORMERS} or newer)" in integration


def test_the_environment_of_make_is_in_the_table() -> None:
    set_up = (ROOT / "tools" / "setup_venv.py").read_text()
    known = {minor(run.torch) for run in RUNS}
    for name in ("CPU_TORCH", "GPU_TORCH"):
        (found,) = re.findall(rf'^{name} = "torch==(.*)"$', set_up, re.MULTILINE)
        assert minor(found) in known


def test_tests_have_all_that_they_run() -> None:
    needed = {re.split(r"[^\w-]", one)[0] for one in PROJECT["optional-dependencies"]["test"]}
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    modules = {found for text in texts for found in re.findall(r'sys\.executable, "-m", "(\w+)"', text)}
    assert modules <= needed | {"pip", "flashtune"}
