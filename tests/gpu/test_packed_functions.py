"""Packed sequences with a mask and a score as code on a GPU: against float64, without waiting for the device, and under CUDA graphs."""

import os
from pathlib import Path
from typing import Any

import db_samples as samples
import pytest
import torch
from packed_machine import numbers_of
from packed_steps import follows_lengths, step
from varlen_functions import CASES, LENGTHS, LONG, RECOGNISED, agrees, explained, made, sequences_are_alone

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.records.nearness import mods_in
from flashtune.dispatch.call.sequences import Packed, problem_of
from flashtune.templates import family

DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_functions_of_each_sequence(name: str, kind: str) -> None:
    agrees(name, LENGTHS, kind=kind, dtype=DTYPES[kind], device=DEVICE, d=64)


@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("name", ["causal relative", "relative in a window", "prefix", "both", "both in a window", "no derivative at 0"])
def test_head_sizes_and_longer_sequences(name: str, d: int) -> None:
    agrees(name, LONG, kind="bf16", dtype=torch.bfloat16, device=DEVICE, d=d)


def test_float32_is_exact() -> None:
    agrees("both in a window", LONG, device=DEVICE, d=64)


def test_neighbours_are_not_read() -> None:
    sequences_are_alone(DEVICE, dtype=torch.bfloat16, d=64)


@pytest.mark.parametrize("name", CASES)
def test_kernels_serve_measured_or_not(name: str) -> None:
    said = explained(name, device=DEVICE, dtype=torch.bfloat16, d=64)
    families = {"flash_fwd_hopper", "flash_fwd"} if name in RECOGNISED else {"flash_fwd_hopper" if HOPPER else "flash_fwd"}
    assert said.template in families, said
    assert said.backward is not None and said.backward.template.startswith("flash_bwd")


def test_a_record_of_the_functions_gives_the_configs(tmp_path: Path) -> None:
    words = {"device": DEVICE, "dtype": torch.bfloat16, "d": 64}
    bare, (given, _, _) = explained("prefix", **words), made("prefix", **words)
    results, configs = [], []
    for direction, said in (("fwd", bare), ("bwd", bare.backward)):
        assert (said.kind, said.record_key) == ("default", None)
        problem: Any = problem_of(Packed(*given.tensors, *given.bounds), numbers_of(given), direction, mods=mods_in(said.key.features))  # type: ignore[arg-type]
        starts = family(said.template).starts(problem.spec(), find_target(said.gpu))
        configs.append(next(config for config in reversed(starts) if config != said.config))
        outcome = samples.outcome("0" * 16, 300.0, template=said.template, config=configs[-1], finalist=True, rank=1)
        results.append(samples.result(outcome, framework_us=100.0, gpu=said.gpu, of=problem))
    with dispatch.use(samples.write(tmp_path / "a.sqlite", tuple(results)), alone=True):
        said = explained("prefix", **words)
        assert [(one.kind, one.config) for one in (said, said.backward)] == [("exact", config) for config in configs]
        agrees("prefix", kind="bf16", **words)


@pytest.mark.parametrize("name", ["both in a window", "prefix", "built-in slopes"])
def test_nothing_waits_for_the_device(name: str) -> None:
    given, _, _ = made(name, LENGTHS, dtype=torch.bfloat16, device=DEVICE, d=64)
    step(given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["both in a window", "prefix", "score of a causal mask"])
def test_a_graph_is_right_when_lengths_change(name: str) -> None:
    rows, capacity = 650, 7
    given, _, captured = made(name, ((rows,), (rows,)), dtype=torch.bfloat16, device=DEVICE, d=64, padding=0)
    for x in captured:
        # Gradients of captured tensors are added up in no fixed order.
        x.requires_grad_(False)
    bounds = tuple(torch.tensor([0, *[rows] * capacity], dtype=torch.int32, device=DEVICE) for _ in range(2))
    static: Any = given._replace(bounds=bounds, longest=(rows, rows), words=given.words | {"deterministic": True})
    follows_lengths(static, bounds, rows, replays=5)


@pytest.mark.parametrize("name", ["both in a window", "prefix", "causal relative"])
def test_a_compiled_call_computes_the_same(name: str) -> None:
    given, _, _ = made(name, LONG, dtype=torch.bfloat16, device=DEVICE, d=64, padding=0)
    tensors = [x.detach() for x in given.tensors]

    def call(*x: Any) -> Any:
        return dispatch.attention_varlen(*x, *given.longest, enable_gqa=True, **given.words)

    with torch.no_grad():
        eager, traced = (one(*tensors, *given.bounds) for one in (call, torch.compile(call, fullgraph=True)))
    torch.testing.assert_close(traced, eager, atol=2e-2, rtol=2e-2)


def test_what_kernels_lack_is_served_by_a_call_for_each_sequence() -> None:
    given, _, _ = made("prefix", LENGTHS, dtype=torch.bfloat16, device=DEVICE, d=64, padding=0)
    words = {"score_mod": lambda s, b, h, q, k: torch.lgamma(s.abs() + 1), "enable_gqa": True}
    tensors = [x.detach() for x in given.tensors]
    assert "lgamma" in dispatch.explain_varlen(*tensors, *given.bounds, *given.longest, **words).reason
    assert dispatch.attention_varlen(*tensors, *given.bounds, *given.longest, **words).isfinite().all()
