"""docs/background.md: every console block is what its command prints, and every figure in the prose stands in one of them."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

BACKGROUND = Path(__file__).resolve().parents[2] / "docs" / "background.md"
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```", re.DOTALL)
FIGURE = re.compile(r"(\d[\d.,]*)(?:\s*%|\s+(?:MiB|MB|GB/s|TFLOP/s|T exp/s|GFLOP|FLOP/byte|us|times)\b)")
REFUTED = "2.8"
"""An intensity that write-ups quote and that the text says is wrong; no command prints it."""


@cache
def printed_by(command: str) -> str:
    """Output of a shell for `command` without blanks at line ends, on a machine whose GPUs are hidden."""
    script = f'set -o pipefail; flashtune() {{ "{sys.executable}" -m flashtune.cli.main "$@"; }}; {command}'
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env={**os.environ, **hidden})
    return re.sub(" +$", "", found.stdout, flags=re.MULTILINE)


def regenerated(text: str) -> str:
    return BLOCK.sub(lambda block: f"```console\n$ {block['command']}\n{printed_by(block['command'])}```", text)


def test_every_block_is_what_its_command_prints(request: pytest.FixtureRequest) -> None:
    text = BACKGROUND.read_text()
    now = regenerated(text)
    if request.config.getoption("--update-golden"):
        BACKGROUND.write_text(now)
    else:
        assert now == text, "run `make golden`, and review what changed in docs/background.md"
    assert len(BLOCK.findall(text)) >= 6
    assert text.count("```") == 2 * len(BLOCK.findall(text)), "a block without its command can't be checked"


def unproven(text: str) -> list[str]:
    """Figures of the prose that no block prints."""
    printed = set(re.findall(r"\d[\d.]*\d|\d", " ".join(block["output"] for block in BLOCK.finditer(text))))
    figures = [found.rstrip(".,") for found in FIGURE.findall(BLOCK.sub("", text))]
    assert len(figures) >= 20
    return [figure for figure in figures if figure not in printed]


def test_every_figure_of_the_prose_stands_in_a_block() -> None:
    assert unproven(BACKGROUND.read_text()) == [REFUTED]


def test_a_wrong_figure_would_be_noticed() -> None:
    text = BACKGROUND.read_text()
    block = BLOCK.search(text)
    assert block is not None
    start = block.start("output")
    assert regenerated(f"{text[:start]}wrong{text[start:]}") == regenerated(text)
    assert unproven(text.replace("94.1% are S", "94.2% are S")) == ["94.2", REFUTED]
