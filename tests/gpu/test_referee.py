"""`flashtune referee` on a GPU: its child processes judge every kind of shape, and a file is continued without judging anew."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import flashtune

SHAPES = {
    "dense": ("--d", "64", "--n", "1000", "--causal"),
    "gradients": ("--d", "64", "--n", "1000", "--causal", "--direction", "bwd", "--heads", "8", "--kv-heads", "2"),
    "decoding": ("--d", "128", "--n", "2048", "--n-q", "1", "--full", "--batch", "8"),
    "large heads": ("--d", "512", "--n", "1000", "--causal", "--batch", "2"),
    "packed": ("--d", "64", "--n", "500", "--causal", "--packed", "lognormal", "--batch", "8"),
    "packed gradients": ("--d", "64", "--n", "500", "--causal", "--packed", "lognormal", "--batch", "8", "--direction", "bwd"),
    "functions": ("--d", "64", "--n", "1024", "--mask-mod", "flashtune/bench/shape_functions.py:dilated", "--batch", "2"),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_each_kind_of_shape_is_judged_and_timed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    out = tmp_path / "a.json"
    words = ("referee", *SHAPES[kind], "--dtype", "bf16", "--seconds", "0.1", "--out", str(out), "--json")
    done = flashtune(*words)
    # A library may be wrong here, which is what the command is for.
    assert done.exit_code in (0, 1), done.output
    [row] = json.loads(done.stdout)["rows"]
    ours: dict[str, Any] = row["providers"]["flashtune"]
    assert ours["verdict"] == "right" and ours["time"]["median_us"] > 0 and row["untimed"] == ""
    assert row["providers"]["torch"]["verdict"] in ("right", "wrong")
    assert ("flex" in row["providers"]) is (kind == "functions")
    assert json.loads(flashtune(*words).stdout)["rows"] == [row]
