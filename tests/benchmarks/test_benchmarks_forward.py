"""The case `forward` without a GPU: cells, figures, verdicts, and peers and cells that fail."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import forward
from benchmarks.shared import peers as forward_peers
from benchmarks.shared.cells import CUDNN_FP8, GROUPS, LENGTHS, RANDOM, Cell, cells
from benchmarks.shared.peers import OURS, Checked, Error
from benchmarks.shared.report import Row, geometric_mean, summary, tables
from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.records.results import Measurement
from flashtune.templates import family
from flashtune.tuner.timing.baseline import pytorch_call
from flashtune.tuner.timing.stopwatch import Run
from flashtune.tuner.verify.distributions import PRESENT

GOOD = Error(max_abs=1e-3, relative_norm=1e-3, tolerances=0.1)


def find(group: str, case: str, **sizes: int) -> Cell:
    [cell] = [c for c in cells() if (c.group, c.case) == (group, case) and all(getattr(c.problem, name) == v for name, v in sizes.items())]
    return cell


def small(cell: Cell) -> Cell:
    """The same call at a size for a CPU."""
    p = cell.problem
    # Rows at the end of a sequence stay fewer than its keys.
    rows = 80 if p.n_q == p.n_kv else min(p.n_q, 40)
    heads = max(4, p.gqa_ratio)
    sizes = {"batch": 2, "heads": heads, "kv_heads": heads // p.gqa_ratio, "n_q": rows, "n_kv": 80, "d": 16, "d_v": 16}
    return replace(cell, problem=replace(p, **sizes))


def row(cell: Cell, us: dict[str, float], **errors: Error) -> Row:
    times = {name: Measurement.of([time_us]) for name, time_us in us.items()}
    return Row(cell=cell, checked=Checked(kind="exact", template="flash_fwd", errors={OURS: GOOD, **errors}), times=times)


def test_cells_have_names_and_keys_of_their_own_and_the_sizes_that_the_page_names() -> None:
    every = cells()
    assert len({cell.name for cell in every}) == len({cell.problem.key("h200") for cell in every}) == len(every)
    plain = [cell.problem for cell in cells(("plain",))]
    assert {(p.d, p.n_kv, p.features.causal) for p in plain} == {(d, n, c) for d in (64, 128, 256) for n in LENGTHS for c in (False, True)}
    for p in [*plain, *(cell.problem for cell in cells(("features",)))]:
        assert (p.batch * p.n_kv, p.heads * p.d, p.dtype) == (16384, 2048, "bf16") and p.n_q == p.n_kv
    assert find("features", "gqa", d=64).problem.gqa_ratio == 4
    # Small cells are to say where the rule of families for few rows should change.
    small, h200 = [cell.problem for cell in cells(("small",))], find_target("h200")
    assert {family("flash_decode").suits(p, h200) is None for p in small} == {False, True}
    assert all(p.batch == 1 and (p.n_q == p.n_kv or p.band.diagonal == p.n_kv - p.n_q) for p in small)


def test_cells_can_be_chosen_and_peers_left_out() -> None:
    named = [cell.name for cell in cells(("scores",), n=[4096], only=r"causal \w+ sink\+30 D=64")]
    assert named == [f"scores causal {dtype} sink+30 D=64 N=4096" for dtype in ("bf16", "fp16")]
    chosen = cells(("plain", "decode"), d=[64], n=[4096], without=("flex",))
    assert [(c.group, c.case) for c in chosen] == [("plain", "full"), ("plain", "causal"), ("decode", "one row")]
    assert all("flex" not in c.peers for c in chosen)


def test_ratios_are_the_peers_time_over_ours() -> None:
    cell = find("plain", "causal", d=128, n_kv=16384)
    found = row(cell, {OURS: 100.0, "cudnn": 120.0, "flash": 90.0})
    assert found.ratio("cudnn") == pytest.approx(1.2)
    assert found.ratio("flex") is None
    assert found.best_peer == "flash"
    assert found.rate(OURS) == pytest.approx(cell.problem.flops() / 100.0 / 1e6)


def test_the_summary_is_the_least_and_the_geometric_mean_of_plain_and_of_feature_cells() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    rows = [
        row(find("plain", "full", d=256, n_kv=512), {OURS: 100.0, "cudnn": 100.0, "flash": 50.0}),
        row(find("plain", "full", d=256, n_kv=1024), {OURS: 100.0, "cudnn": 400.0}),
        row(find("features", "mask", d=64), {OURS: 100.0, "cudnn": 900.0}),
        row(find("features", "alibi", d=64), {OURS: 100.0, "cudnn": 500.0, "flex": 400.0}),
        Row(cell=find("plain", "full", d=256, n_kv=2048), failed="killed after 120 s"),
    ]
    found = summary(rows)
    assert found["cudnn"] == {"min": pytest.approx(1.0), "geometric_mean": pytest.approx(2.0), "cells": 2}
    assert found["best peer"]["min"] == pytest.approx(0.5)
    assert "FlashAttention-4" not in found
    assert found["features, best peer"] == {"min": pytest.approx(4.0), "geometric_mean": pytest.approx(6.0), "cells": 2}
    assert "features, ours / best peer: min 4.00, geometric mean 6.00 over 2 cells" in tables(rows)


def test_decode_is_rated_by_the_bytes_of_the_cache() -> None:
    cell = find("decode", "one row", d=128, batch=16)
    found = row(cell, {OURS: 100.0, "cudnn": 110.0, "copy": 500.0})
    assert found.rate(OURS) == pytest.approx(2 * 2 * 16 * 8 * 4096 * 128 / 100.0 / 1e6)
    assert found.rate("copy") == pytest.approx(2 * 2**30 / 500.0 / 1e6)
    assert found.best_peer == "cudnn", "the copy is no peer"
    assert f"{found.rate(OURS) / found.rate('copy'):.0%}" in tables([found])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("ours", "theirs", "wrong"),
    [
        (GOOD, {"cudnn": GOOD}, False),
        (replace(GOOD, max_abs=1.9e-3), {"cudnn": GOOD}, False),
        (replace(GOOD, max_abs=2.1e-3), {"cudnn": GOOD}, True),
        (replace(GOOD, relative_norm=2.1e-3), {"cudnn": GOOD}, True),
        (replace(GOOD, max_abs=2.1e-3), {"cudnn": GOOD, "flash": replace(GOOD, max_abs=2e-2)}, True),
        (replace(GOOD, max_abs=float("nan")), {"cudnn": GOOD}, True),
        (GOOD, {"cudnn": replace(GOOD, max_abs=float("nan"))}, False),
        (GOOD, {}, False),
        (replace(GOOD, tolerances=1.1), {}, True),
        (replace(GOOD, tolerances=float("nan")), {}, True),
    ],
)
def test_an_error_of_more_than_twice_the_frameworks_is_wrong(ours: Error, theirs: dict[str, Error], wrong: bool) -> None:
    found = row(find("plain", "full", d=64, n_kv=512), {OURS: 1.0}, **theirs)
    found = replace(found, checked=replace(found.checked, errors={OURS: ours, **theirs}))
    assert bool(found.wrong) is wrong
    assert ("WRONG" in tables([found])) is wrong


def test_tables_and_json_tell_of_every_cell_whatever_became_of_it() -> None:
    timed = row(find("plain", "full", d=64, n_kv=4096), {OURS: 100.0, "cudnn": 120.0}, cudnn=GOOD)
    timed = replace(timed, checked=replace(timed.checked, notes={"flex": "RuntimeError: no"}))
    failed = Row(cell=find("plain", "full", d=64, n_kv=512), failed="killed after 120 s")
    text = tables([timed, failed])
    assert "exact flash_fwd" in text
    assert "1.20" in text
    assert "FAILED: killed after 120 s" in text
    assert "plain full D=64 N=4096: flex: RuntimeError: no" in text
    assert "min 1.20, geometric mean 1.20 over 1 cells" in text
    found = [r.as_json() for r in (timed, failed)]
    json.dumps(found, allow_nan=False)
    assert found[0]["times"][OURS]["median_us"] == 100.0
    assert found[0]["ratio_to"] == {"cudnn": pytest.approx(1.2)}
    assert [r["failed"] for r in found] == ["", "killed after 120 s"]


class Clock:
    """A stopwatch for the CPU, which runs everything once."""

    def race(self, runs: Sequence[Run], *, budget_s: float, least: int) -> list[Measurement]:
        for run in runs:
            run()
        return [Measurement.of([1.0])] * len(runs)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_peers, "stopwatch", lambda device: Clock())
    monkeypatch.setattr(forward_peers, "COPY_BYTES", 1 << 10)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


# Of fp8 the lone heads: shared ones have a test of their own.
CASES = [cell for cell in cells() if (cell.group != "plain" or cell.problem.n_kv == 512) and "64/8" not in cell.case]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", CASES, ids=lambda cell: cell.name)
def test_every_peer_that_runs_computes_the_cell(cell: Cell) -> None:
    little = small(cell)
    checked = forward_peers.check_cell(little, "cpu", 0)
    assert checked.kind == "framework"
    assert not Row(cell=little, checked=checked).wrong
    assert "cudnn" in checked.notes, "which no CPU has"
    assert all(error.tolerances <= 1 for error in checked.errors.values()), checked.errors
    if cell.problem.features.dropout:
        assert checked.notes["flex"] == "can't express it"
    compared = {"flash" if cell.group == "small" else "flex"}
    assert set(checked.errors) >= ({OURS} if cell.problem.features.dropout or cell.group == "fp8" else {OURS, *compared})
    times = forward_peers.time_cell(little, "cpu", 0, 0.1)
    assert set(times) == {OURS, *(set(cell.peers) - set(checked.notes))}


def test_every_feature_reaches_our_call() -> None:
    words = {cell.case: forward_peers.data_of(small(cell), "cpu", 5).words for cell in CASES}
    assert words["mask"]["attn_mask"].shape == (80, 80)
    assert words["bias"]["attn_mask"].shape == (1, 4, 80, 80)
    assert words["dropout"]["dropout_p"] == 0.1 and words["dropout"]["seed"] == 5
    assert words["window"]["window"] == (1024, 0) and words["window"]["is_causal"]
    assert words["alibi"]["alibi_slopes"][0].tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    assert words["softcap"]["softcap"] == 30.0
    assert words["gqa"]["enable_gqa"]
    assert words["16 rows"]["causal_alignment"] == "bottom_right" and words["16 rows"]["is_causal"]
    fp8 = forward_peers.data_of(small(find("fp8", "causal")), "cpu", 5)
    assert fp8.inputs.q.dtype == torch.float8_e4m3fn and fp8.framework.q.dtype == torch.bfloat16
    assert fp8.words["v_descale"].shape == (2, 4) and fp8.words["v_descale"].unique().numel() == 1


def test_a_cell_that_our_dispatch_refuses_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(*_: object, **__: object) -> None:
        raise TypeError("no such keyword")

    monkeypatch.setattr(dispatch, "attention", attention)
    with pytest.raises(TypeError, match="no such keyword"):
        forward_peers.check_cell(small(find("fp8", "full")), "cpu", 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cells", "plain,fp4"), f"unknown cells fp4: use {', '.join(GROUPS)}"),
        (("--d", "64,x"), "'64,x' is not a number, nor numbers with commas between them"),
        (("--n", ""), "'' is not a number"),
        (("--without", "flex,foo"), "unknown peers foo"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_words_that_are_no_cells_or_numbers_are_refused(
    words: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py case", *words])
    with pytest.raises(SystemExit):
        forward.main()
    assert said in capsys.readouterr().err


SCORES = [cell for cell in cells(("scores",)) if cell.problem.n_kv == 4096 and cell.problem.d == 64]


def scores_cell(case: str) -> Cell:
    [cell] = [cell for cell in SCORES if cell.case == case]
    return small(cell)


def test_scores_are_every_distribution_on_every_plain_shape_those_that_say_the_most_first() -> None:
    every = cells(("scores",))
    shapes = {(d, causal, dtype) for d in (64, 128, 256) for causal in (False, True) for dtype in ("bf16", "fp16")}

    def of(name: str, n: int, mask: str) -> set[tuple[int, bool, str]]:
        chosen = [cell.problem for cell in every if (cell.scores, cell.problem.n_kv, cell.problem.features.mask) == (name, n, mask)]
        return {(p.d, p.features.causal, p.dtype) for p in chosen}

    for name in PRESENT:
        lengths = (1024, 4096, 16384) if name.startswith(("sink", "drift")) else (4096,)
        assert all(of(name, n, "none") == shapes for n in lengths)
    assert all(of(name, 4096, "bool") == shapes for name in ("random", "sink+30", "drift-60"))
    assert len({cell.name for cell in every}) == len(every)
    assert {cell.scores.rstrip("-+%0123456789") for cell in every[:96]} == {"random", "sink", "needle", "deviation", "drift", "misled"}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", ["full bf16 sink+8", "causal fp16 padded drift-60"])
def test_a_cell_of_scores_is_compared_in_output_and_lse_and_timed_beside_random_numbers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = scores_cell(case)
    data = forward_peers.data_of(cell, "cpu", 0)
    raised = (data.inputs.q.float() @ data.inputs.k.float().mT).abs().amax() * data.inputs.parameters.scale
    assert raised > 7 > (data.normal.q.float() @ data.normal.k.float().mT).abs().amax() * data.inputs.parameters.scale
    wanted = dispatch.attention(*data.tensors, **data.words, return_lse=True)[1]
    monkeypatch.setattr(forward_peers, "cudnn_lse", lambda inputs: wanted + 1e-3)
    monkeypatch.setattr(
        forward_peers, "_peer", lambda name, cell, data, real=forward_peers._peer: real({"cudnn": "math"}.get(name, name), cell, data)
    )
    checked = forward_peers.check_cell(cell, "cpu", 0)
    ours, theirs = checked.errors[OURS].lse, checked.errors["cudnn"].lse
    assert ours is not None and theirs is not None and ours < 1e-6 < theirs < 2e-3
    assert RANDOM not in checked.errors
    found = Row(cell=cell, checked=checked, times=forward_peers.time_cell(cell, "cpu", 0, 0.1))
    assert not found.wrong and found.ratio(RANDOM) == 1.0 and found.best_peer != RANDOM
    assert found.as_json()["scores"] == cell.scores


@pytest.mark.usefixtures("on_cpu")
def test_errors_that_are_large_beside_a_peers_are_told_by_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(*words: Any) -> dict[str, forward_peers.Error]:
        asked.append(words[-1])
        return {OURS: replace(GOOD, max_abs=1.9e-3), "cudnn": replace(GOOD, max_abs=1e-3 * len(asked))}

    monkeypatch.setattr(forward_peers, "_errors", counted)
    checked = forward_peers.check_cell(scores_cell("full bf16 sink+8"), "cpu", 0)
    assert asked == [forward_peers.DRAWS, forward_peers.MORE_DRAWS] and checked.errors["cudnn"].max_abs == 2e-3
    assert forward_peers.check_cell(scores_cell("full bf16 sink+8"), "cpu", 0).errors and len(asked) == 3


def test_padding_hides_half_of_the_keys_from_every_peer() -> None:
    data = forward_peers.data_of(scores_cell("full bf16 padded sink+8"), "cpu", 0)
    assert data.words["attn_mask"].shape == (1, 1, 1, 80)
    out = data.ours()
    data.inputs.v[:, :, 40:] = 100.0
    assert torch.equal(out, data.ours())
    call = pytorch_call(data.framework, "math")
    assert call is not None and torch.allclose(out, call(), atol=2e-2)  # type: ignore[arg-type]


def test_an_lse_that_is_further_off_than_twice_the_frameworks_is_wrong() -> None:
    cell = scores_cell("full bf16 sink+8")
    for ours, theirs, wrong in ((1e-7, 1e-9, False), (2.1e-3, 1e-3, True), (1.9e-3, 1e-3, False), (float("nan"), 1e-3, True)):
        checked = Checked(errors={OURS: replace(GOOD, lse=ours), "cudnn": replace(GOOD, lse=theirs)})
        assert bool(Row(cell=cell, checked=checked).wrong) is wrong


def test_a_run_that_is_ended_leaves_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = cells(("plain",), d=[64], n=[512])
    kept: list[int] = []

    def run(cells: list[Cell], *, keep: Callable[[list[Row]], object], **_: object) -> list[Row]:
        for count in (1, 2):
            keep([row(cell, {OURS: 1.0}) for cell in cells[:count]])
            kept.append(len(json.loads((tmp_path / "forward.json").read_text())["rows"]))
        return [row(cell, {OURS: 1.0}) for cell in cells]

    monkeypatch.setattr(forward, "run", run)
    monkeypatch.setattr(forward, "this_gpu", lambda: find_target("h200"))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["run.py forward", "--cells", "plain", "--d", "64", "--n", "512"])
    forward.main()
    # The second came within WRITING_S of the first.
    assert kept == [1, 1]
    assert len(json.loads((tmp_path / "forward.json").read_text())["rows"]) == len(chosen) == 2


@pytest.mark.usefixtures("on_cpu")
def test_why_cudnns_fp8_did_not_run_is_told() -> None:
    checked = forward_peers.check_cell(small(find("fp8", "full")), "cpu", 0)
    assert "cudnn" in checked.notes[CUDNN_FP8] and CUDNN_FP8 not in checked.errors
