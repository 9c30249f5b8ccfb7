"""Packed sequences on a GPU, by kernels and by a call for each: against float64, without waiting for the device, and under CUDA graphs."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from branches import BRANCHES, Branch
from click.testing import CliRunner
from packed_steps import follows_lengths, step
from varlen_cases import CASES, RAGGED, SQUARE, agrees, forced, inputs

from flashtune import dispatch
from flashtune.cli.main import main
from flashtune.core.problems.config import Direction
from flashtune.core.problems.lengths import Lengths

DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")
LONG = ((300, 0, 129, 1, 777, 64, 0), (300, 5, 128, 1, 1000, 1, 0))
UNEQUAL = ((300, 129, 1, 777, 64), (300, 128, 1, 1000, 80))


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_each_sequence_is_as_if_it_were_alone(case: str, kind: str, branch: Branch) -> None:
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    with forced(branch):
        agrees(inputs(CASES[case], RAGGED, dtype=dtype, device=DEVICE, d=64), RAGGED, kind=kind)


@pytest.mark.parametrize("d", [32, 80, 128, 256])
@pytest.mark.parametrize("case", ["full", "causal", "window", "sinks", "dropout"])
def test_head_sizes_and_longer_sequences(case: str, d: int) -> None:
    with forced("kernels"):
        agrees(inputs(CASES[case], LONG, dtype=torch.bfloat16, device=DEVICE, d=d), LONG, kind="bf16")


@pytest.mark.parametrize("case", ["full", "causal", "window", "everything", "causal used keys"])
def test_tensors_that_begin_anywhere_are_read_by_plain_pointers(case: str) -> None:
    lengths = RAGGED if "used" in case else LONG
    given = inputs(CASES[case], lengths, dtype=torch.bfloat16, device=DEVICE, d=64)
    moved = []
    for x in given.tensors:
        memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape)
        moved.append(memory.copy_(x.detach()).requires_grad_())
    with forced("kernels"):
        given = given._replace(tensors=moved)
        agrees(given, lengths, kind="bf16")
        said = dispatch.explain_varlen(*given.arguments, enable_gqa=True, **given.words)
    assert said.template == "flash_fwd" and said.backward is not None and said.backward.template == "flash_bwd"


def test_gradients_of_the_output_may_begin_anywhere() -> None:
    given = inputs({"is_causal": True}, LONG, dtype=torch.bfloat16, device=DEVICE, d=64)
    memory = torch.empty(given.dout.numel() + 1, dtype=given.dout.dtype, device=DEVICE)[1:].view(given.dout.shape)
    with forced("kernels"):
        agrees(given._replace(dout=memory.copy_(given.dout)), LONG, kind="bf16")


@pytest.mark.skipif(DEVICE != "cuda", reason="only kernels on a GPU may vary")
def test_deterministic_gradients_repeat_their_bits() -> None:
    given = inputs({"is_causal": True, "deterministic": True}, LONG, dtype=torch.bfloat16, device=DEVICE, d=64, heads=16)
    first, *others = (step(given) for _ in range(4))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (8, 128), (128, 8)])
def test_float32_is_exact(d: int, d_v: int) -> None:
    with forced("kernels"):
        agrees(inputs({"is_causal": True, "d_v": d_v}, LONG, device=DEVICE, d=d), LONG)


def test_hundreds_of_sequences() -> None:
    lengths = (tuple(i * 7 % 40 for i in range(700)),) * 2
    with forced("kernels"):
        agrees(inputs({"is_causal": True}, lengths, dtype=torch.float16, device=DEVICE, d=64), lengths, kind="fp16")


@pytest.mark.skipif(DEVICE != "cuda", reason="only a GPU can be waited for")
def test_nothing_waits_for_the_device() -> None:
    given = inputs({"is_causal": True}, SQUARE, dtype=torch.bfloat16, device=DEVICE, d=64)
    step(given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on a GPU")
@pytest.mark.parametrize("case", ["full", "causal", "window", "causal used keys"])
def test_a_graph_is_right_when_lengths_change(case: str) -> None:
    capacity, rows = 7, 900
    given = inputs(CASES[case] | {"deterministic": True}, ((rows,), (rows,)), dtype=torch.bfloat16, device=DEVICE, d=64, padding=0)
    words = dict(given.words)
    if "seqused_k" in words:
        words["seqused_k"] = torch.full((capacity,), 50, dtype=torch.int32, device=DEVICE)
    bounds = tuple(torch.tensor([0, *[rows] * capacity], dtype=torch.int32, device=DEVICE) for _ in range(2))
    static = given._replace(bounds=bounds, words=words, longest=(rows, rows))  # type: ignore[arg-type]
    follows_lengths(static, bounds, rows, replays=10)


@pytest.mark.skipif(DEVICE != "cuda", reason="torch's own needs a GPU")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 0)])
def test_it_means_what_torch_means(window: tuple[int, int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    given = inputs({}, UNEQUAL, dtype=torch.bfloat16, device=DEVICE, d=64, padding=0)
    given = given._replace(
        tensors=[x if i == 0 else x.detach().repeat_interleave(2, 1).requires_grad_() for i, x in enumerate(given.tensors)]
    )
    arguments: tuple[Any, ...] = (*given.tensors, *given.bounds, *given.longest)
    theirs = varlen.varlen_attn(*arguments, window_size=window)
    ours = dispatch.attention_varlen(*arguments, window_size=window)
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    pairs = [torch.autograd.grad(out, given.tensors, given.dout) for out in (ours, theirs)]
    for mine, other in zip(*pairs, strict=True):
        assert float((mine - other).norm()) <= 2e-2 * float(other.norm())


@pytest.mark.skipif(DEVICE != "cuda", reason="it compiles for a GPU")
def test_a_compiled_step_computes_the_same() -> None:
    def loss(*x: Any) -> torch.Tensor:
        found: torch.Tensor = dispatch.attention_varlen(*x, 128, 128, enable_gqa=True, is_causal=True).float().square().sum()
        return found

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for lengths in (SQUARE, (tuple(itertools.repeat(50, 4)),) * 2):
        given = inputs({}, lengths, dtype=torch.bfloat16, device=DEVICE, d=64, padding=0)
        eager, traced = (torch.autograd.grad(one(*given.tensors, *given.bounds), given.tensors) for one in (loss, compiled))
        for ours, theirs in zip(traced, eager, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)


@pytest.mark.skipif(DEVICE != "cuda", reason="only a GPU measures")
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_packed_search_measures_and_its_record_serves(direction: Direction, tmp_path: Path) -> None:
    path, lengths = str(tmp_path / "packed.sqlite"), Lengths.of("uniform", 8, 8 * 512)
    words = ("--packed", "uniform", "--n", "512", "--batch", "8", "--heads", "4", "--d", "64", "--causal", "--dtype", "bf16")
    result = CliRunner().invoke(main, ["search", *words, "--direction", direction, "--trials", "4", "--db", path, "--json"])
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)
    assert (row["source"], row["fate"], row["law"]) == ("measured", "correct", "uniform") and row["framework"] == "varlen"
    assert row["call_us"] > 0 and row["framework_call_us"] > 0, "whole calls, of a backward training steps"
    of_each = lengths.drawn(8, 8 * 512)
    given = inputs({"is_causal": True}, (of_each, of_each), dtype=torch.bfloat16, device=DEVICE, d=64, padding=0)
    tensors = [torch.randn_like(x[:, :1].expand(-1, 4, -1)).requires_grad_(direction == "bwd") for x in given.tensors]
    with dispatch.use(path, alone=True):
        call = (*tensors, *given.bounds, *given.longest)
        found = dispatch.explain_varlen(*call, is_causal=True)
        said = found.backward if direction == "bwd" else found
        assert said is not None and said.kind == "exact" and said.variant_id == row["variant"]
