"""flash_decode: splits cover the keys once, are added up right whoever does it, and compete only where rows are few."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from compiling import cross_compile
from hopper_kernels import launches
from hypothesis import given
from hypothesis import strategies as st
from interpreting import interpreted

from flashtune.core.code.launching import sms_of
from flashtune.core.gpu.target import find_target, targets
from flashtune.core.problems.config import Config
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import DECODE_ROWS, Features, Problem
from flashtune.templates.decode.flash_decode import FAMILY
from flashtune.templates.family import wave_efficiency
from flashtune.templates.launches.pointers import split_count
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiling_for, read_facts
from flashtune.tuner.verify.inputs import make_inputs

H200 = find_target("h200")
SMS = sms_of(torch.device("cpu"))
STEP = Problem(batch=16, heads=32, kv_heads=8, n_q=1, n_kv=4096, d=128, d_v=128, dtype="bf16")

EVERYTHING = Features(causal=True, window=(100, 0), mask="bias", softcap=True, alibi=True, sinks=True)


def module(problem: Problem = STEP, **changes: int | str | bool) -> Any:
    config = FAMILY.default(problem.spec(), H200).replace(**changes)
    return load_kernel(render(FAMILY, variant_of(FAMILY, problem.spec(), config)), "decode")


def launched(problem: Problem, **changes: int | str | bool) -> list[Any]:
    """The kernels of a launch, compiled for the H200."""
    with compiling_for(H200):
        found = launches(module(problem, **changes), make_inputs(problem, device="meta", seed=0))
        return [kernel.warmup(*args, grid=grid, **options) for kernel, grid, args, options in found]


def test_random_decoding_steps_agree_with_the_reference_at_any_split_count() -> None:
    """Shared heads, ragged keys, bands, masks, rows that see nothing, and more splits than there are blocks; both ways to add up."""
    taken = [report for report in interpreted("interpret_decode", 12, 7) if not report["refused"]]
    assert len(taken) >= 9
    assert [report for report in taken if any(report["reasons"])] == []
    assert [report for report in taken if report["counts"]] == [], "counts are zero again after a launch"
    assert sum(report["empty_rows"] for report in taken) > 0
    for word in ("combine=kernel", "combine=last", "combine=rows", "loads=tma", "splits=40", "splits=1 "):
        assert any(word in report["label"] for report in taken)


@given(tiles=st.integers(1, 5000), keys=st.integers(-5, 200_000), programs=st.sampled_from([1, 2, 8]), block_n=st.sampled_from([32, 64]))
def test_splits_are_the_fewest_with_the_shortest_longest_share_that_the_programs_allow(
    tiles: int, keys: int, programs: int, block_n: int
) -> None:
    blocks = max(1, -(-keys // block_n))
    splits = split_count(blocks, tiles, programs * SMS)
    assert 1 <= splits <= blocks
    assert splits == 1 or tiles * splits <= programs * SMS
    share = -(-blocks // splits)
    most = min(blocks, max(1, programs * SMS // tiles))
    assert share == -(-blocks // most)
    assert splits == 1 or -(-blocks // (splits - 1)) > share


@given(blocks=st.integers(0, 500), splits=st.integers(1, 600))
def test_every_block_of_keys_is_in_exactly_one_split(blocks: int, splits: int) -> None:
    # The arithmetic of _key_range.jinja in units of blocks.
    share = -(-blocks // splits)
    visited = [block for split in range(splits) for block in range(split * share, min(split * share + share, blocks))]
    assert visited == list(range(blocks))


@pytest.mark.parametrize(
    ("features", "n_q", "visible"),
    [
        (Features(), 4, 4000),
        (Features(causal=True), 4, 4),
        (Features(causal=True, alignment="bottom_right"), 4, 4000),
        (Features(causal=True, window=(500, 0), alignment="bottom_right"), 4, 504),
        (Features(window=(100, 50)), 4, 54),
    ],
    ids=str,
)
def test_splits_are_counted_over_the_keys_that_rows_see(features: Features, n_q: int, visible: int) -> None:
    problem = replace(STEP, batch=1, n_q=n_q, n_kv=4000, features=features)
    inputs = make_inputs(problem, device="meta", seed=0)
    found = module(problem, BLOCK_N=32, BLOCK_M=16, programs=8)
    (_, (tiles, splits), _, _) = launches(found, inputs)[0]
    assert tiles == 8
    # A tile's rows may see a few keys fewer than the bound.
    assert splits in {split_count(-(-(visible + more) // 32), tiles, 8 * SMS) for more in (0, 1, 2)}


def test_a_tile_that_isnt_split_writes_its_output_itself() -> None:
    inputs = make_inputs(replace(STEP, batch=64), device="meta", seed=0)
    for combine in ("kernel", "last", "rows"):
        [(_, grid, args, _)] = launches(module(programs=1, combine=combine), inputs)
        assert grid == (64 * 8, 1)
        assert args[5] is args[6] is inputs.lse, "no memory is taken for parts"


def test_heads_that_share_keys_are_rows_of_one_tile() -> None:
    inputs = make_inputs(replace(STEP, n_q=5), device="meta", seed=0)
    (_, grid, _, _) = launches(module(BLOCK_M=16), inputs)[0]
    assert grid[0] == 16 * 8 * 2, "5 queries of 4 heads take two tiles of 16 rows"


def test_one_compile_serves_every_number_of_keys_rows_heads_and_splits() -> None:
    for combine, count in (("kernel", 2), ("last", 1), ("rows", 1)):
        first = launched(replace(STEP, batch=1), combine=combine, BLOCK_M=16)
        assert len(first) == count
        for changes in ({"n_kv": 100}, {"n_kv": 70_000}, {"batch": 200}, {"n_q": 16, "batch": 1}, {"heads": 8}):
            others = launched(replace(STEP, **changes), combine=combine, BLOCK_M=16)
            assert all(other is known for other, known in zip(others, first, strict=False))


@pytest.mark.parametrize(
    ("d", "changes"),
    [
        (128, {"BLOCK_M": 16, "combine": "last"}),
        (64, {"BLOCK_M": 16, "combine": "rows", "loads": "tma", "num_stages": 4}),
        (128, {"loads": "tma", "combine": "last"}),
        (128, {"BLOCK_M": 16, "BLOCK_N": 128, "num_warps": 8, "loads": "tma"}),
    ],
    ids=str,
)
def test_fast_configs_keep_loads_in_flight_without_spills(d: int, changes: dict[str, Any]) -> None:
    problem = replace(STEP, batch=1, d=d, d_v=d)
    assert FAMILY.violated(FAMILY.default(problem.spec(), H200).replace(**changes), problem.spec(), H200) is None
    kernels = launched(problem, **changes)
    for kernel in kernels:
        assert read_facts(kernel, H200).spills <= 8
    word = "cp.async.bulk.tensor" if changes.get("loads") == "tma" else "cp.async.cg.shared.global"
    assert word in kernels[0].asm["ptx"]
    # Two programs of them fit on an SM.
    assert 2 * (read_facts(kernels[0], H200).shared_bytes + 1024) <= H200.shared_bytes_per_sm or changes.get("BLOCK_N") == 128


@pytest.mark.parametrize(
    ("gpu", "dtype", "loads", "combine", "features"),
    [
        ("h200", "bf16", "tma", "rows", EVERYTHING),
        ("h200", "fp8", "tma", "kernel", Features(alibi=True, mask="bool")),
        ("h200", "fp32", "pointer", "rows", Features(window=(20, 10), softcap=True)),
        ("a100", "bf16", "pointer", "kernel", Features(mask="bias", causal=True)),
        ("mi300x", "fp16", "pointer", "rows", EVERYTHING),
    ],
    ids=str,
)
def test_features_compile_together_whoever_adds_up(gpu: str, dtype: DType, loads: str, combine: str, features: Features) -> None:
    target, problem = find_target(gpu), replace(STEP, n_kv=1000, d=80, d_v=48, features=features, dtype=dtype)
    config = FAMILY.default(problem.spec(), target).replace(BLOCK_M=16, BLOCK_N=32, combine=combine, loads=loads)
    assert FAMILY.violated(config, problem.spec(), target) is None
    text = render(FAMILY, variant_of(FAMILY, problem.spec(), config))
    assert cross_compile(text, "decode", problem, target).spills <= 8


def test_it_competes_for_decoding_steps_and_for_rows_too_few_to_fill_the_gpu() -> None:
    for n_q in (1, DECODE_ROWS):
        for batch in (1, 512):
            assert FAMILY.suits(replace(STEP, n_q=n_q, batch=batch), H200) is None
    assert FAMILY.suits(replace(STEP, n_q=128, batch=1, n_kv=8192), H200) is None
    assert "fill" in (FAMILY.suits(replace(STEP, n_q=128, batch=16), H200) or "")
    assert "few" in (FAMILY.suits(replace(STEP, n_q=128, batch=1, n_kv=512), H200) or "")
    # 132 SMs: 65 tiles leave more than half of them idle, 66 don't, nor does a second wave of one tile.
    rows = replace(STEP, batch=1, heads=1, kv_heads=1)
    assert FAMILY.suits(replace(rows, n_q=65 * 64), H200) is None
    for tiles in (66, 132, 133, 1000):
        assert "fill" in (FAMILY.suits(replace(rows, n_q=tiles * 64), H200) or "")


@given(tiles=st.integers(1, 10_000), sms=st.integers(1, 200))
def test_waves_are_as_efficient_as_their_last_one_is_full(tiles: int, sms: int) -> None:
    waves = -(-tiles // sms)
    assert wave_efficiency(tiles, sms) == pytest.approx(tiles / waves / sms)
    assert (wave_efficiency(tiles, sms) == 1) is (tiles % sms == 0)
    assert wave_efficiency(tiles, sms) > (waves - 1) / waves


def test_dropout_is_left_to_others() -> None:
    assert "dropout" in (FAMILY.supports(replace(STEP, features=Features(dropout=True)).spec(), H200) or "")


@pytest.mark.parametrize("slug", [slug for slug, target in targets().items() if target.compilable])
def test_descriptors_are_for_gpus_that_have_the_copy_engine(slug: str) -> None:
    target, spec = targets()[slug], STEP.spec()
    found = {config["loads"] for config in FAMILY.configs(spec, target)}
    assert found == ({"pointer", "tma"} if target.has_tma else {"pointer"})
    default: Config = FAMILY.default(spec, target)
    assert default["loads"] == "pointer", "an untuned call may have any strides"
