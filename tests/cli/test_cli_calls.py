"""`flashtune search --calls`: from a model's calls to rows that serve them; what is refused beside it, left out, and put first."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import flashtune
from db_samples import outcome, result

from flashtune import dispatch
from flashtune.cli.problem_options import ProblemOptions
from flashtune.cli.problems import worth_searching
from flashtune.cli.search import search
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.calls import add
from flashtune.core.system.errors import InputError
from flashtune.db.store import Store
from flashtune.dispatch.state.recorded import CALLS
from flashtune.integrations import torchs_place

A100, H200 = find_target("a100"), find_target("h200")
CAUSAL = Problem(batch=1, heads=2, kv_heads=1, n_q=64, n_kv=64, d=16, d_v=16, dtype="fp16", features=Features(causal=True))
FULL, FP8 = replace(CAUSAL, features=Features()), replace(CAUSAL, dtype="fp8")


def written(folder: Path, *problems: Problem) -> Path:
    add(folder / "calls.json", problems)
    return folder / "calls.json"


def problems(*words: str) -> list[Problem]:
    context = search.make_context("search", ["--gpu-name", "a100", *words])
    return ProblemOptions.of(context, dict(context.params)).problems()


def test_what_a_model_called_is_searched_and_then_serves_it(tmp_path: Path) -> None:
    CALLS.forget()
    model = torch.nn.TransformerEncoderLayer(32, 2, 16, batch_first=True, dropout=0.0).half()
    dispatch.reload()
    with torchs_place():
        model(torch.randn(1, 64, 32).half())
    dispatch.save_calls(tmp_path / "calls.json")
    CALLS.forget()
    database = tmp_path / "model.sqlite"
    words = ("search", "--gpu-name", "a100", "--calls", str(tmp_path / "calls.json"), "--db", str(database), "--trials", "1", "--seed", "1")
    # In a process of its own: what a search has its children forked off stays, and other tests want another.
    found = subprocess.run([sys.executable, "-m", "flashtune", *words, "--json"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    rows = {row["direction"]: row for row in json.loads(found.stdout)}
    assert rows.keys() == {"fwd", "bwd"}, "its gradients were asked for"
    for row in rows.values():
        assert (row["n"], row["d"], row["dtype"], row["features"], row["source"]) == (64, 16, "fp16", {}, "predicted")
    with dispatch.use(database, unmeasured=True):
        called = replace(FULL, kv_heads=2)
        assert dispatch.explain_problem(called, "a100").variant_id == rows["fwd"]["variant"]


def test_calls_with_functions_are_searched_where_these_are_named(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("import torch\n\ndef waved(score, b, h, i, j):\n    return score * torch.cos(i - j)\n")
    named = f"{tmp_path / 'scores.py'}:waved"
    coded = replace(FULL, features=Features(mods="0123456789abcdef"))
    of_waved = problems("--d", "16", "--n", "64", "--dtype", "fp16", "--heads", "2", "--batch", "1", "--score-mod", named)
    path = written(tmp_path, coded, *of_waved)
    found = problems("--calls", str(path), "--score-mod", named)
    assert set(found) == {coded, *of_waved}
    said: list[str] = []
    notes: Any = type("Notes", (), {"print": lambda self, line: said.append(line)})()
    assert worth_searching(found, A100, templates=(), location=str(tmp_path / "none.sqlite"), notes=notes) == of_waved
    assert len(said) == 1 and "0123456789abcdef aren't those of this process: name them by --score-mod and --mask-mod" in said[0]


def test_a_search_of_calls_is_of_what_the_file_holds(tmp_path: Path) -> None:
    path = written(tmp_path, CAUSAL, FULL, replace(FULL, direction="bwd"))
    assert set(problems("--calls", str(path))) == {CAUSAL, FULL, replace(FULL, direction="bwd")}


def test_what_hides_nothing_is_left_out_as_calls_do(tmp_path: Path) -> None:
    assert problems("--calls", str(written(tmp_path, replace(FULL, features=Features(window=(64, 64)))))) == [FULL]


BESIDE: list[tuple[str, ...]] = [
    *(("--d", "64"), ("--d-v", "64"), ("--n", "64"), ("--n-q", "1"), ("--dtype", "bf16"), ("--direction", "bwd"), ("--mask", "bias")),
    *(("--dropout", "0.1"), ("--window", "0"), ("--alignment", "bottom-right"), ("--softcap", "3"), ("--heads", "2"), ("--batch", "2")),
    *(("--kv-heads", "2"), ("--model", "gpt2"), ("--alibi",), ("--tf32",), ("--causal",), ("--full",)),
]


@pytest.mark.parametrize("words", BESIDE, ids=lambda words: words[0])
def test_an_option_that_describes_problems_is_refused_beside_it(words: tuple[str, ...], tmp_path: Path) -> None:
    path = written(tmp_path, CAUSAL)
    with pytest.raises(
        InputError, match=re.escape(f"{words[0]} was given together with --calls {path}, which already describes the attention")
    ):
        problems("--calls", str(path), *words)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "holds no calls: run the model before dispatch.save_calls"),
        ([replace(CAUSAL, batch=2**31)], "has a call of sizes that are out of range (n64-d16-fp16-causal-gqa2, batch 2147483648, heads 2)"),
        ([replace(CAUSAL, n_kv=2**25)], "has a call of sizes that are out of range (n64x33554432-d16-fp16-causal-gqa2"),
    ],
)
def test_a_file_that_names_nothing_to_search_is_said(given: list[Problem], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        problems("--calls", str(written(tmp_path, *given)))


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1, "calls": [7]}'])
def test_a_file_that_is_none_ends_in_a_line_and_exit_code_2(text: str, tmp_path: Path) -> None:
    (tmp_path / "calls.json").write_text(text)
    for path in (tmp_path / "calls.json", tmp_path / "none.json"):
        refused = flashtune("search", "--gpu-name", "a100", "--calls", str(path))
        assert refused.exit_code == 2 and refused.stdout == "" and len(refused.stderr.splitlines()) == 1
        assert path.name in refused.stderr


def test_what_no_template_serves_there_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words: dict[str, Any] = {"templates": (), "location": str(tmp_path / "x.sqlite")}
    assert worth_searching([FP8, CAUSAL], A100, **words) == [CAUSAL]
    assert "left out n64-d16-fp8-causal-gqa2: no template takes" in capsys.readouterr().err.replace("\n", " ")
    assert set(worth_searching([FP8, CAUSAL], H200, **words)) == {FP8, CAUSAL} and capsys.readouterr().err == ""
    with pytest.raises(InputError, match=r"none of the calls can be searched for .*A100.*: n64-d16-fp8-causal-gqa2: no template takes"):
        worth_searching([FP8], A100, **words)
    assert worth_searching([CAUSAL, replace(CAUSAL, direction="bwd")], A100, **{**words, "templates": ("flash_fwd",)}) == [CAUSAL]


def test_problems_without_a_row_of_their_own_come_first(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    measured, predicted = replace(CAUSAL, n_kv=128, n_q=128), replace(CAUSAL, n_kv=256, n_q=256)
    with Store.open(path, writable=True) as store:
        store.save(result(outcome("a" * 16, finalist=True, rank=1), gpu="a100", of=measured))
        store.save(result(outcome("b" * 16, source="predicted", rank=1), framework_us=None, gpu="a100", of=predicted))
        store.save(result(outcome("c" * 16, finalist=True, rank=1), gpu="h200", of=CAUSAL))
    ordered = worth_searching([measured, predicted, CAUSAL, FULL], A100, templates=(), location=str(path))
    assert ordered == [CAUSAL, FULL, predicted, measured]


def test_a_command_of_ours_writes_no_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_CALLS", str(tmp_path / "calls.json"))
    assert flashtune("show", "--models").exit_code == 0 and "FLASHTUNE_CALLS" not in os.environ
