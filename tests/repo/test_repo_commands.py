"""Commands that documents, examples and help name: every one parses, and functions of files are ones that kernels take."""

import re
import shlex
from pathlib import Path

import click
import pytest

from flashtune.cli.main import COMMANDS, main
from flashtune.cli.problem_options import ProblemOptions

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py"), *(ROOT / "flashtune" / "cli").glob("*.py")]
)
COMMAND = re.compile(rf"(?:(?<=\s)|(?<=/)|(?<=^))flashtune ((?:{'|'.join(COMMANDS)})\b[^\n`#|>&]*)")
BLOCK = re.compile(r"^( *)```(?:sh|console|ini|bash)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def texts(page: Path) -> list[str]:
    """Whole commands of a page: lines of its blocks, or of a help text's part after \\b."""
    text = page.read_text()
    if page.suffix == ".md":
        found = [block for _, block in BLOCK.findall(text)]
    else:
        found = re.findall(r"\\b\n(.*?)\n\n", text, re.DOTALL) + re.findall(r"# In a shell: (.*)", text)
    return [command.rstrip() for block in found for command in COMMAND.findall(re.sub(r" \\\n\s*", " ", block))]


NAMED = sorted({command for page in PAGES for command in texts(page)})


def parsed(command: str) -> tuple[str, click.Context]:
    name, *words = shlex.split(re.sub(r"   .*|\$\w+", lambda found: "" if found[0].startswith(" ") else "64", command))
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return name, found.make_context(name, words)


def test_the_pages_name_many_commands() -> None:
    assert len(NAMED) > 40 and {command.split()[0] for command in NAMED} == set(COMMANDS)


@pytest.mark.parametrize("command", NAMED)
def test_a_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name, context = parsed(command)
    if name in ("search", "bench", "explain") and re.search("--(mask|score)-mod", command):
        with context:
            # Traced, and compared with the sizes of the tensors that the functions read.
            assert all(problem.features.mods for problem in ProblemOptions.of(context, dict(context.params)).problems())


def test_a_wrong_option_or_a_function_that_isnt_there_would_be_noticed() -> None:
    with pytest.raises(click.UsageError):
        parsed("search --d 64 --bugdet 10m")
    with pytest.raises(Exception, match="no function"):
        test_a_command_parses("search --d 64 --n 512 --mask-mod examples/masks.py:missing", pytest.MonkeyPatch())
