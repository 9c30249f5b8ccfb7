"""Snippets of the documents: every one runs on a machine without a GPU, and prints what the page says."""

import contextlib
import io
import json
import re
import shlex
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from test_repo_commands import parsed

from flashtune.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r'^```(python|text title="Output")\n(.*?)^```', re.MULTILINE | re.DOTALL)
ELSEWHERE = {"shipping.md", "README.md"}
"""Pages whose snippets take a model or a folder, which tests/repo/test_repo_docs.py gives them."""
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```python" in page.read_text() and page.name not in ELSEWHERE]


def run(text: str) -> list[tuple[str, str]]:
    """Texts that a page's snippets print, each beside what the page says; snippets share their variables, as on a console."""
    # PyTorch looks for the variables of functions in their module.
    module = sys.modules["snippets"] = ModuleType("snippets")
    printed, pairs, handler = "", [], signal.getsignal(signal.SIGTERM)
    try:
        for kind, block in BLOCK.findall(text):
            if kind == "python":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile(block, "<page>", "exec"), vars(module))
                printed += out.getvalue()
            else:
                pairs.append((printed, block))
                printed = ""
    finally:
        signal.signal(signal.SIGTERM, handler)
        del sys.modules["snippets"]
    return [*pairs, (printed, "")] if printed else pairs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
def test_a_pages_snippets_run_and_print_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FLASHTUNE_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pairs = run(page.read_text())
    assert pairs, "a page whose snippets show nothing proves little"
    assert [printed for printed, _ in pairs] == [said for _, said in pairs]


def test_the_notebook_prints_what_is_stored_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads((ROOT / "examples" / "first.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    blocks, commands = [], []
    for cell in cells:
        text, said = "".join(cell["source"]), "".join(line for output in cell["outputs"] for line in output["text"])
        if text.startswith("!flashtune "):
            # tests/cli has searches; here one takes half a minute.
            commands.append(text.removeprefix("!flashtune ").strip())
        else:
            blocks.append(f'```python\n{text}\n```\n```text title="Output"\n{said}```\n')
    pairs = run("".join(blocks))
    assert len(pairs) >= 3 and all(printed == said for printed, said in pairs)
    assert [parsed(command)[0] for command in commands] == ["search", "show"]


CONSOLE = [
    (page.name, command, said)
    for page in sorted((ROOT / "docs").rglob("*.md"))
    # tests/repo/test_repo_background.py has that page's.
    if page.name != "background.md"
    for command, said in re.findall(r"^```console\n\$ flashtune ([^\n]+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("page", "command", "said"), CONSOLE, ids=lambda given: given if given.endswith(".md") else "")
def test_a_command_prints_what_the_page_says(page: str, command: str, said: str) -> None:
    printed = CliRunner().invoke(main, shlex.split(command)).stdout
    lines = said.splitlines()
    assert lines[-1] != "..." or len(lines) > 2
    shown = lines[:-1] if lines[-1] == "..." else lines
    assert [line.rstrip() for line in printed.splitlines()][: len(shown)] == shown


def test_many_pages_have_snippets() -> None:
    assert len(PAGES) >= 9 and CONSOLE


def test_a_snippet_that_prints_something_else_or_fails_would_be_noticed() -> None:
    assert run('```python\nprint(1)\n```\n\n```text title="Output"\n2\n```\n') == [("1\n", "2\n")]
    assert run("```python\nprint(1)\n```\n") == [("1\n", "")]
    with pytest.raises(NameError):
        run("```python\nmissing\n```\n")
