"""The examples run as they are, and what they print is what they promise.

They run in this process, as `python examples/NAME.py` would, but for the one whose worker processes import it.
"""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As small as these are, threads would only wait for each other.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("FLASHTUNE_CACHE", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_listed(path: Path) -> None:
    # The masks are a list to choose from, no program.
    assert len(path.read_text().splitlines()) < (60 if path.name != "masks.py" else 130)
    assert f"({path.relative_to(ROOT / 'examples')})" in (ROOT / "examples" / "README.md").read_text()


def test_an_llm_of_transformers_writes_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the same text: True" in run("llm_transformers.py", capsys)


def test_padding_free_steps_have_the_loss_of_each_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("padding_free_training.py", capsys)
    assert "57% of the batch would be empty" in printed and "the loss of each text alone: True" in printed
    first, *_, last = (float(found) for found in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE))
    assert last < first


def test_latents_decode_as_keys_and_values_of_each_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert "3 sequences decode over latents" in run("latent_decode.py", capsys)


def test_steps_of_routed_blocks_learn(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_, last = (
        float(found) for found in re.findall(r"3 of 8 blocks, loss ([\d.]+)$", run("routed_blocks.py", capsys), re.MULTILINE)
    )
    assert last < first


def test_a_diffusion_block_says_what_runs_its_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert "runs the call" in run("diffusion_block.py", capsys)


def test_a_model_ships_its_rows_and_is_served_them(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("ship_with_weights.py", capsys)
    assert "output (1, 64, 2048)" in printed
    assert re.search(r"^exact flash_fwd_hopper measured for exactly this problem on h200", printed, re.MULTILINE)


@pytest.mark.usefixtures("quick")
def test_a_database_is_prepared_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    # The compiler and the interpreter are stood in for: tests/cli/test_cli.py has searches with the real ones.
    printed = run("prepare_without_gpu.py", capsys)
    assert "predicted" in printed.splitlines()[-1] and "a100" in printed.splitlines()[-1]


def test_a_template_of_ones_own_compiles_and_is_correct() -> None:
    command = [sys.executable, ROOT / "examples" / "own_template" / "search.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    *candidates, verdict = printed.splitlines()
    assert len(candidates) == 4 and all("us predicted" in line for line in candidates)
    assert verdict.startswith("correct, error ")
