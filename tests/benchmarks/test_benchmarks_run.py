"""benchmarks/run.py: the list of cases, their options, and the size of their files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import run

ROOT = Path(__file__).resolve().parents[2]

FILES = [path for folder in ("", "cases", "fit", "shared") for path in (ROOT / "benchmarks" / folder).glob("*.py")]


@pytest.mark.parametrize("case", run.cases())
def test_every_case_describes_itself_and_its_options(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit) as left:
        run.main([case, "--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0 and f"usage: run.py {case}" in said and run.summary(run.cases()[case]).split()[0] in said


def test_the_command_lists_every_case_in_a_line_and_refuses_others() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py")]
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(run.cases())
    refused = subprocess.run([*command, "nothing"], capture_output=True, text=True)
    assert refused.returncode == 1 and "unknown case 'nothing': use archive, backward, " in refused.stderr


def test_files_and_functions_of_benchmarks_are_short() -> None:
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"
