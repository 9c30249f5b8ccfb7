"""The cases `backward` and `models` without a GPU: cells, verdicts, tables, and that the small model trains."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import backward, models
from benchmarks.cases.race import random_inputs
from benchmarks.shared import backward_cells, children
from benchmarks.shared.children import NO_TIME
from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Measurement
from flashtune.dispatch import Explanation
from flashtune.tuner.timing.baseline import pytorch_call
from flashtune.tuner.verify.inputs import make_inputs


def test_the_cells_are_backwards_of_every_size_and_feature() -> None:
    found = backward_cells.cells(backward_cells.GROUPS)
    assert len({cell.name for cell in found}) == len(found)
    plain = {(cell.problem.d, cell.problem.n_kv, cell.case) for cell in found if cell.group == "plain"}
    assert plain == {(d, n, case) for d in (64, 128, 256) for n in (512, 1024, 4096, 16384) for case in ("full", "causal")}
    assert {cell.case for cell in found if cell.group == "features"} == set(backward_cells.FEATURES)
    repeatable = {(cell.problem.d, cell.problem.n_kv, cell.case) for cell in found if cell.group == "deterministic"}
    assert repeatable == {(d, n, case) for d, n, case in plain if n > 512}
    assert all(cell.problem.direction == "bwd" for cell in found)
    assert {cell.group for cell in backward_cells.cells(("scores",))} == {"scores"}


def test_an_error_twice_the_frameworks_or_not_finite_is_wrong() -> None:
    def said(ours: list[float], theirs: list[float]) -> str:
        return backward.wrong(backward_cells.Checked(errors={"flashtune": ours, "cudnn": theirs}), 0.04)

    assert said([0.01, 0.01, 0.01], [0.006, 0.006, 0.006]) == ""
    assert "twice" in said([0.01, 0.01, 0.02], [0.006, 0.006, 0.006])
    assert said([float("nan"), 0.0, 0.0], [1.0, 1.0, 1.0]) == "not finite"
    both = {"flashtune": [0.5] * 3, "cudnn": [float("nan")] * 3, "flash": [0.01] * 3}
    assert "twice" in backward.wrong(backward_cells.Checked(errors=both), 0.04), "a peer without numbers is no yardstick"
    assert said([0.01, 0.01, 0.01, 0.03], [0.006, 0.006, 0.006]) == "", "torch's sum over rows isn't ours"
    assert "tolerance" in said([0.01, 0.01, 0.01, 0.05], [0.006, 0.006, 0.006])
    alone = backward_cells.Checked(errors={"flashtune": [0.05] * 3, "fa4": [0.0] * 3})
    assert "tolerance" in backward.wrong(alone, 0.04), "no backend of torch's to hold them against"
    step = backward_cells.Checked(errors={"flashtune": [0.01] * 3, "training step": [0.01, 0.03, 0.01], "cudnn": [0.01] * 3})
    assert "twice" in backward.wrong(step, 0.04), "a whole step's gradients count, too"


def test_the_table_holds_ours_against_the_best_peer() -> None:
    cell = backward_cells.cells(("plain",))[0]
    times = {name: Measurement.of([us]) for name, us in (("flashtune", 100.0), ("cudnn", 120.0), ("fa4", 130.0))}
    row = backward.row_of(cell, backward_cells.Checked(kind="default"), times, "")
    assert (row["best_peer"], row["over_best"]) == ("cudnn", pytest.approx(1.2))
    ahead = backward.row_of(cell, backward_cells.Checked(), times | {"fa4 deterministic": Measurement.of([50.0])}, "")
    assert (ahead["best_peer"], ahead["over_best"]) == ("fa4 deterministic", 0.5), "its other mode may be its faster one"
    shown = backward.table([row, backward.row_of(cell, backward_cells.Checked(), {}, "killed after 3 s")])
    assert "1.20x" in shown and "killed after 3 s" in shown and "geometric mean" in shown


def test_deterministic_cells_are_held_against_each_peer_that_writes_the_same_bits() -> None:
    plain, repeatable = backward_cells.cells(("plain",))[0], backward_cells.cells(("deterministic",))[0]
    times = {name: Measurement.of([us]) for name, us in (("flashtune", 100.0), ("fa4 deterministic", 105.0), ("fa2 deterministic", 130.0))}
    row = backward.row_of(repeatable, backward_cells.Checked(kind="exact"), times, "")
    shown = backward.table([row, backward.row_of(plain, backward_cells.Checked(), {"flashtune": Measurement.of([50.0])}, "")])
    last = shown.split("\n\n| cell")[-1]
    assert "| 1.30x | 1.05x |" in last and "geometric mean over fa4 deterministic: 1.05x" in last and plain.name not in last
    assert "over the best" in shown and row["over"] == {"fa4 deterministic": 1.05, "fa2 deterministic": 1.3}


def test_what_serves_deterministic_cells_writes_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_cells, "here", lambda: "h200")
    [cell] = [c for c in backward_cells.cells(("deterministic",)) if c.name == "deterministic full D=64 N=4096"]
    served = backward_cells.served_by(cell)
    assert served.template == "flash_bwd_hopper_split"
    assert backward_cells.served_by(replace(cell, group="plain")).template == "flash_bwd_hopper"


def test_inputs_for_timing_are_a_backwards_operands_without_its_forward() -> None:
    problem = replace(backward_cells.cells(("features",))[1].problem, batch=1, heads=2, kv_heads=2, n_q=24, n_kv=24)
    inputs = random_inputs(problem, seed=0, device="cpu")
    assert list(inputs.operands) == [operand.name for operand in problem.contract.operands]
    assert all(inputs.operands[operand.name].shape == operand.shape(problem) for operand in problem.contract.operands)
    assert inputs.keywords["mask"] is not None and bool((inputs.lse >= 9.0).all())


def test_cells_for_which_there_is_no_time_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(jobs: list[Any], **_: object) -> Iterator[tuple[Any, str]]:
        for task, _words in jobs:
            yield (backward_cells.Checked() if task is backward_cells.check_cell else {"flashtune": Measurement.of([9.0])}), ""

    monkeypatch.setattr(children, "in_children", answers)
    monkeypatch.setattr(backward, "this_gpu", lambda: find_target("h200"))
    monkeypatch.setattr(sys, "argv", ["backward.py", "--cells", "plain", "--d", "64", "--n", "512", "--budget-s", "0"])
    monkeypatch.setenv("OUT", str(tmp_path))
    with pytest.raises(SystemExit):
        backward.main()
    rows = json.loads((tmp_path / "backward.json").read_text())["rows"]
    assert [(row["cell"], row["failed"]) for row in rows] == [("plain full D=64 N=512", ""), ("plain causal D=64 N=512", NO_TIME)]


def test_where_torch_serves_its_gradients_are_what_is_timed_as_ours() -> None:
    cell = backward_cells.cells(("plain",))[0]
    problem = replace(cell.problem, batch=1, heads=1, kv_heads=1, n_q=8, n_kv=8)
    inputs = make_inputs(problem, device="cpu", seed=0)
    run = backward_cells.ours(Explanation(kind="framework", reason="it was faster", gpu="h200", key=problem.key("h200")), inputs)
    assert run is not None and [x.shape for x in run()] == [inputs.q.shape, inputs.k.shape, inputs.v.shape]


def test_a_random_cells_whole_step_has_the_gradients_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each feature reaches the call; torch's default has no soft cap, and drops other pairs."""
    monkeypatch.setattr(backward_cells, "here", lambda: "h200")
    [cell, *_] = backward_cells.random_cells(3, seed=5, gpu="h200")
    assert cell.group == backward_cells.RANDOM
    for features in (Features(causal=True), Features(mask="bool"), Features(mask="bias"), Features(causal=True, window=(3, 0))):
        sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "n_q": 20, "n_kv": 20, "d": 16, "d_v": 16}
        inputs = make_inputs(Problem(**sizes, dtype="fp32", features=features, direction="bwd"), device="cpu", seed=1)
        theirs = pytorch_call(inputs, step=True)
        assert theirs is not None
        for mine, other in zip(backward_cells.step(inputs)(), theirs(), strict=True):  # type: ignore[arg-type, call-overload]
            torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)


def test_what_serves_a_random_cell_is_what_serves_its_very_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its seed: of dropout a problem alone tells what serves without one."""
    asked: list[dict[str, Any]] = []
    kernel = Explanation(kind="default", reason="", gpu="h200", template="flash_bwd")

    def explain(*_: torch.Tensor, **words: Any) -> Explanation:
        asked.append(words)
        return Explanation(kind="near_n", reason="", gpu="h200", template="flash_fwd", backward=kernel if len(asked) == 1 else None)

    monkeypatch.setattr(dispatch, "explain", explain)
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "n_q": 20, "n_kv": 20, "d": 16, "d_v": 16}
    inputs = make_inputs(Problem(**sizes, dtype="fp32", features=Features(dropout=True), direction="bwd"), device="cpu", seed=1)
    assert backward_cells.served_in_call(inputs) is kernel
    theirs = backward_cells.served_in_call(inputs)
    assert (theirs.kind, theirs.template) == ("framework", None)
    assert all(words["seed"] == inputs.parameters.seed and words["dropout_p"] > 0 for words in asked)


def test_the_small_model_trains_as_by_the_math_backend() -> None:
    words = {"device": "cpu", "steps": 6, "width": 32, "n": 16}
    ours = models.losses(dispatch.attention, 3, **words)  # type: ignore[arg-type]
    wanted = models.losses(models.math_attention, 3, **words)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(wanted), atol=0.05, rtol=0.0)
    assert ours[-1] < ours[0]
