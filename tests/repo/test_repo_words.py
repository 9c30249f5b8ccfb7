"""Words of the tree's docstrings: their first line names the thing with a noun."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def openings(text: str) -> list[str]:
    """First words of the docstrings of a Python text."""
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED))
    return [docstring.split()[0] for docstring in found if docstring]


@pytest.mark.parametrize("folder", ["flashtune", "benchmarks", "guard", "examples", "tests", "kernels"])
def test_no_docstring_begins_with_what_or_whether(folder: str) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and "kernels_generated" not in name and "golden" not in name]
    assert files, "git lists no file of this folder"
    wrong = [f"{path}: {word}" for path in files for word in openings(path.read_text()) if word in ("What", "Whether")]
    assert not wrong, "\n".join(wrong)


def test_an_opening_is_found_wherever_a_docstring_stands() -> None:
    text = '"""Words."""\nclass A:\n    """What it is."""\n    async def f(self):\n        """\n        Whether so."""\n'
    assert sorted(openings(text)) == ["What", "Whether", "Words."]
