"""The case `padding_free` on the CPU at tiny sizes: every way trains on the same sequences, or there is no ratio."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import run

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = "--device cpu --d 16 --hidden 32 --heads 4 --kv-heads 2 --layers 1 --sequences 4 --longest 32 --vocabulary 61 --rounds 1 --repeats 1"


@pytest.fixture(scope="module")
def padding_free() -> ModuleType:
    """The case's module, which imports transformers, here and not where every worker collects this file."""
    from benchmarks.cases import padding_free

    return padding_free


def test_lengths_leave_the_share_of_padding_that_was_named(padding_free: ModuleType) -> None:
    for law in ("uniform", "lognormal", "one_long"):
        lengths = padding_free.lengths_of(law, 16, 2048, 0.43)
        assert len(lengths) == 16 and max(lengths) == 2048 and sum(lengths) == round(0.57 * 16 * 2048)
        assert lengths == padding_free.lengths_of(law, 16, 2048, 0.43), "drawn with a fixed seed"


def test_a_tiny_case_has_a_ratio_of_steps_on_the_same_sequences(
    padding_free: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    run.main(["padding_free", *TINY.split()])
    [row] = json.loads((tmp_path / "padding_free.json").read_text())["steps"]
    assert row["ratio"] == pytest.approx(row["ms"]["padded sdpa"] / row["ms"]["flattened ours"])
    assert abs(row["padding"] - 0.43) < 0.01 and row["law"] == "uniform"
    losses = [row["first"][way]["loss"] for way in padding_free.WAYS if way != "flattened torch"]
    assert len(losses) == 4 and max(losses) - min(losses) < 1e-5
    assert "flattened torch" in row["notes"], "a CPU has no varlen_attn"


def test_a_way_that_mixes_sequences_has_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtune.integrations import flattened

    def of_one(positions: torch.Tensor, _layer: int | None) -> flattened.Bounds:
        bounds, rows = torch.tensor([0, positions.numel()], dtype=torch.int32), positions.numel()
        return flattened.Bounds(bounds, bounds, rows, rows)

    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(flattened, "bounds_in_mask", of_one)
    with pytest.raises(SystemExit, match="1 of the figures"):
        run.main(["padding_free", *TINY.split()])
    assert "different losses" in json.loads((tmp_path / "padding_free.json").read_text())["steps"][0]["failed"]
