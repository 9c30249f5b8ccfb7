"""FlexAttention's kernel options on a GPU: a small search, what it stored serves, and options that don't fit give way to the defaults."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flashtune import dispatch
from flashtune.cli.main import main
from flashtune.core import devices
from flashtune.core.config import Config
from flashtune.core.problem import Features, Problem
from flashtune.core.results import Measurement, Outcome, Provenance, SearchResult
from flashtune.db.library import Library
from flashtune.db.store import Store
from flashtune.tuner.search import flex

SMALL = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_warps": 4, "fwd_num_stages": 2}
TRAINED = {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32, "bwd_num_warps": 4, "bwd_num_stages": 2}
TOO_LARGE = {
    **dict.fromkeys(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 128),
    "bwd_num_warps": 8,
    "bwd_num_stages": 5,
}


def stored(path: Path, options: dict[str, int], d: int) -> None:
    """A record of these options for a causal training step, as a search writes it."""
    gpu = devices.target_of(torch.device("cuda", 0)).slug
    problem = Problem(
        batch=1, heads=2, kv_heads=2, n_q=512, n_kv=512, d=d, d_v=d, dtype="bf16", features=Features(causal=True), direction="bwd"
    )
    outcome = Outcome.of_provider("flex", "f" * 16, Measurement.of([1e5] * 12), config=Config.of(options), rank=1)
    with Store.open(path, writable=True) as store:
        provenance = Provenance(flashtune="0", torch=torch.__version__, triton="")
        store.save(SearchResult(gpu=gpu, problem=problem, outcomes=(outcome,), provenance=provenance))


def step(d: int, **words: Any) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(d)
    q, k, v = (torch.randn(1, 2, 512, d, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_() for _ in range(3))
    out = dispatch.attention(q, k, v, is_causal=True, **words)
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert float((one.double() - other.double()).norm() / other.double().norm()) < 0.01


def test_stored_options_serve_a_training_step(tmp_path: Path) -> None:
    stored(tmp_path / "own.sqlite", {**SMALL, **TRAINED}, 64)
    with dispatch.use(tmp_path / "own.sqlite", alone=True), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        close(step(64, implementation="flex"), step(64, implementation="torch"))
        q = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        reason = dispatch.explain(q, q, q, is_causal=True, implementation="flex").reason
    assert "kernel options fwd_BLOCK_M=64 fwd_BLOCK_N=32" in reason and "bwd_BLOCK_M1=32" in reason


def test_options_that_need_too_much_shared_memory_give_way_to_the_defaults(tmp_path: Path) -> None:
    stored(tmp_path / "own.sqlite", {**SMALL, **TOO_LARGE}, 128)
    with dispatch.use(tmp_path / "own.sqlite", alone=True):
        with pytest.warns(RuntimeWarning, match="so that its defaults serve such calls"):
            found = step(128, implementation="flex")
        close(found, step(128, implementation="torch"))


def test_a_small_search_ends_with_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether three candidates gain is the GPU's affair.
    monkeypatch.setattr(flex, "NO_GAIN", 100.0)
    words = ["--d", "64", "--n", "512", "--batch", "1", "--heads", "2", "--causal", "--dtype", "bf16", "--direction", "bwd", "--seed", "1"]
    command = ["search", "--implementation", "flex", *words, "--trials", "3", "--jobs", "3", "--json", "--db", str(tmp_path / "own.sqlite")]
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 0, found.stderr
    [row] = json.loads(found.stdout)
    assert row["tried"] == 3 and row["stored"] and len(row["options"]) == 10 and set(row["gain"]) == {"fwd", "bwd", "call"}
    [record] = Library.of(tmp_path / "own.sqlite").winners()
    assert record.tunes_flex and record.outcome.config.as_dict() == dict(sorted(row["options"].items()))
