"""The backward for Hopper without a GPU: gradients of the float64 reference, and the machine code that it is meant to be."""

import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hopper_kernels import H200, Array, accesses, are_sixteen_bytes, count, key_loops, machine_code, on_numpy
from interpreting import interpreted

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.problems.reference import dropout_keep_rows
from flashtune.templates import family
from flashtune.templates.backward.hopper.layout import BackwardLayout, divisions_of
from flashtune.templates.cost import predict_us
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiled_kernels, read_facts
from flashtune.tuner.verify.inputs import make_inputs

FAMILY = family("flash_bwd_hopper")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Findings of the emulator."""
    found: dict[str, Any] = interpreted("interpret_backward_hopper")
    return found


CASES = ["full", "causal", "window", "left", "dynamic", "everything", "bias", "pieces", "pieces of keys", "narrow pieces", "three pieces"]
CASES += ["small heads", "smallest heads", "wider values", "divided", "divided window", "divided bias"]
CASES += ["stored", "stored masked", "stored divided", "stored unseen", "stored of more"]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_reference(report: dict[str, Any], case: str) -> None:
    assert report[case] == ""


def test_each_case_is_looked_at(report: dict[str, Any]) -> None:
    assert {name for name in report if ":" not in name} - {"strided bias", "no gradient of the lse"} == set(CASES)


@pytest.mark.parametrize("case", ["dynamic", "pieces", "divided", "stored"])
def test_only_the_gradients_that_are_asked_for_are_made(report: dict[str, Any], case: str) -> None:
    assert report[f"{case}: dq alone"] and report[f"{case}: dk and dv alone"]


def test_no_gradient_of_the_lse_is_one_of_zeros(report: dict[str, Any]) -> None:
    """Its reader is the same kernel for every config."""
    assert report["no gradient of the lse"]


@pytest.mark.parametrize("case", ["dynamic", "pieces", "divided", "stored"])
def test_large_scores_leave_no_nan(report: dict[str, Any], case: str) -> None:
    assert report[f"{case}: extreme"] == ""


def test_a_bias_may_have_any_strides(report: dict[str, Any]) -> None:
    assert report["strided bias"] == [True] * 5


def problem(features: Features, **changes: Any) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "n_q": 1000, "n_kv": 1100, "d": 128, "d_v": 128, "dtype": "bf16"} | changes
    return Problem(**sizes, features=features, direction="bwd")


@pytest.mark.parametrize(
    ("d", "changes", "adds"),
    [
        (64, {"BLOCK_M": 64, "num_stages": 3, "dq_sums": "registers", "exp_poly": True, "wait_early": True}, 4),
        (128, {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "persistent": "dynamic"}, 8),
        (72, {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "held": "both", "divided_queries": True}, 8),
    ],
    ids=str,
)
def test_it_compiles_to_products_in_flight_without_spills(d: int, changes: dict[str, Any], adds: int) -> None:
    wanted = problem(Features(causal=True), d=d, d_v=d)
    spec = wanted.spec()
    config = FAMILY.default(spec, H200).replace(**changes)
    assert FAMILY.violated(config, spec, H200) is None
    kernels = dict(compiled_kernels(render(FAMILY, variant_of(FAMILY, spec, config)), "backward", wanted, H200))
    behind = ["add_divisions"] * bool(config.get("divided_queries", False)) + ["finish_dq"]
    assert list(kernels) == ["preprocess", "flash_bwd_hopper", *behind]
    facts, layout = read_facts(kernels["flash_bwd_hopper"], H200), BackwardLayout.of(spec, config)
    assert facts.shared_bytes <= layout.shared_bytes
    expected = FAMILY.expected(config, spec, H200)
    assert expected is not None and (facts.registers, facts.threads) == (expected.registers, expected.threads)
    code = machine_code(kernels["flash_bwd_hopper"])
    # Each warpgroup has a loop for blocks at the diagonal and one for those past it.
    loops = key_loops(code)
    assert len(loops) == 4
    for loop in loops:
        assert loop["STL"] + loop["LDL"] <= (8 if loop["FSEL"] else 0)
        # Descriptors that don't change aren't kept in registers.
        assert loop["R2UR"] == 0
        # An instruction takes 16 columns or keys: S, dP, each piece of dV and dK, and 128 keys for this warpgroup's part of dQ.
        assert loop["HGMMA"] == 2 * layout.columns_d // 16 + 2 * len(layout.pieces) * 64 // 16 + 128 // 16
    assert [loop["REDG"] for loop in loops] in [[*[few] * 2, *[adds] * 2] for few in {adds, adds * layout.last_part_d // layout.part_d}]
    for loop in loops:
        assert loop["MUFU"] == (64 // 2 if config.get("exp_poly", False) is False else 24)
    # ptxas waits after each product where it can't prove that they may overlap.
    assert sum("WARPGROUP.DEPBAR" in line for line in code) <= count(code)["HGMMA"] / 3
    are_sixteen_bytes(accesses(kernels))


@pytest.mark.parametrize(
    ("d", "changes"),
    [
        (80, {"BLOCK_M": 64, "num_stages": 2, "held": "both", "divided_queries": True}),
    ],
    ids=str,
)
def test_a_tile_with_all_keys_writes_dq_without_sums(d: int, changes: dict[str, Any]) -> None:
    wanted = problem(Features(causal=True), d=d, d_v=d, n_kv=77)
    spec = wanted.spec()
    config = FAMILY.default(spec, H200).replace(dq_sums="own", **changes)
    assert FAMILY.violated(config, spec, H200) is None
    every = compiled_kernels(render(FAMILY, variant_of(FAMILY, spec, config)), "stored", wanted, H200)
    # Those of the cases that candidates are checked on, of more keys than a tile has, come last.
    kernels = dict(reversed(every))
    assert list(dict(every)) == [
        "preprocess",
        "flash_bwd_hopper",
        *["add_divisions"] * bool(config.get("divided_queries", False)),
        "finish_dq",
    ]
    assert read_facts(kernels["flash_bwd_hopper"], H200).shared_bytes <= BackwardLayout.of(spec, config).shared_bytes
    loops = key_loops(machine_code(kernels["flash_bwd_hopper"]))
    assert len(loops) == 4 and all(loop["STL"] + loop["LDL"] <= 8 and loop["REDG"] == 0 < loop["STG"] for loop in loops)


@pytest.mark.parametrize(
    ("sizes", "features", "stored"),
    [
        ({"n_q": 77, "n_kv": 77}, Features(causal=True), True),
        ({"n_q": 4096, "n_kv": 77}, Features(), True),
        ({"n_q": 128, "n_kv": 128}, Features(mask="bias"), True),
        # More keys than a tile has.
        ({"n_q": 512, "n_kv": 512}, Features(causal=True), False),
        ({"n_q": 129, "n_kv": 129}, Features(), False),
        # The first queries, or the last, see no key.
        ({"n_q": 200, "n_kv": 100}, Features(causal=True, alignment="bottom_right"), False),
        ({"n_q": 200, "n_kv": 100}, Features(window=(30, 0)), False),
    ],
    ids=str,
)
def test_dq_is_exclusive_where_one_tile_has_all_keys(sizes: dict[str, int], features: Features, stored: bool) -> None:
    wanted = problem(features, batch=64, heads=16, kv_heads=16, d=64, d_v=64, **sizes)
    for dq_sums, persistent in (("registers", "dynamic"), ("registers", False), ("own", "dynamic")):
        config = FAMILY.default(wanted.spec(), H200).replace(
            dq_sums=dq_sums, persistent=persistent if wanted.features.mask == "none" else False
        )
        moved = FAMILY.resized(config, wanted, H200)
        assert FAMILY.violated(moved, wanted.spec(), H200) is None
        assert (moved["dq_sums"] == "own") == stored and FAMILY.resized(moved, wanted, H200) == moved
        assert not stored or bool(moved["persistent"]) == (wanted.features.mask != "bias")


@pytest.mark.parametrize("name", ["flash_bwd_hopper", "flash_bwd_hopper_split"])
@pytest.mark.parametrize(("batch", "n"), [(4, 1024), (64, 77)], ids=["few tiles", "one tile"])
def test_packed_sequences_are_neither_divided_nor_stored(name: str, batch: int, n: int) -> None:
    kind = family(name)
    wanted = problem(Features(causal=True, packed=True), batch=batch, heads=8, kv_heads=2, n_q=n, n_kv=n, d=64, d_v=64)
    found = [kind.resized(config, wanted, H200) for config in kind.starts(wanted.spec(), H200)]
    assert found and [kind.violated(config, wanted.spec(), H200) for config in found] == [None] * len(found)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "features", "divided"),
    [
        # Measured to gain: benchmarks/results/2026-11-26-h100-divided.
        (32, 8, 1024, Features(causal=True), 3),
        (32, 8, 2048, Features(causal=True), 2),
        (28, 4, 2048, Features(causal=True), 4),
        (16, 4, 2048, Features(mask="bool"), 2),
        # And what wasn't.
        (32, 8, 4096, Features(causal=True), 1),
        (16, 16, 577, Features(), 1),
        (12, 12, 1024, Features(causal=True), 1),
        (32, 8, 2048, Features(causal=True, window=(1024, 0)), 1),
    ],
)
def test_queries_are_divided_where_tiles_of_keys_are_few(heads: int, kv_heads: int, n: int, features: Features, divided: int) -> None:
    wanted = problem(features, batch=1, heads=heads, kv_heads=kv_heads, n_q=n, n_kv=n)
    dynamic = FAMILY.default(wanted.spec(), H200).replace(persistent="dynamic", dq_sums="registers")
    moved = FAMILY.resized(dynamic, wanted, H200)
    assert FAMILY.violated(moved, wanted.spec(), H200) is None
    assert moved == (dynamic if divided == 1 else dynamic.replace(persistent=False, divided_queries=True))
    assert FAMILY.resized(dynamic.replace(persistent=False, divided_queries=True), wanted, H200).get("divided_queries", False) == (
        divided > 1
    )
    assert divisions_of(moved, wanted, H200) == divided
    module = load_kernel(render(FAMILY, variant_of(FAMILY, wanted.spec(), moved)), "flash_bwd_hopper")
    inputs = make_inputs(wanted, device="meta", seed=0)
    launches = module.launches(*inputs.arguments, **inputs.keywords | {"sms": H200.sms, "counts": None})
    grids = {kernel.__name__: grid for kernel, grid, *_ in launches}
    assert grids["flash_bwd_hopper"] == (min(-(-n // 128) * kv_heads, H200.sms if divided == 1 else 2**30) * divided,)
    assert ("add_divisions" in grids) == (divided > 1)


def test_the_cost_model_knows_what_division_is_worth() -> None:
    wanted = problem(Features(), batch=1, heads=28, kv_heads=4, n_q=1024, n_kv=1024)
    config = FAMILY.default(wanted.spec(), H200)
    times = []
    for divided in (True, False):
        one = config.replace(divided_queries=divided)
        facts = FAMILY.expected(one, wanted.spec(), H200)
        assert facts is not None
        times.append(predict_us(one, facts, wanted, H200))
    assert times[0] < 0.6 * times[1]


def test_exponentials_by_a_polynomial_are_exact_to_bf16_and_fp16() -> None:
    spec = problem(Features()).spec()
    config = FAMILY.default(spec, H200).replace(exp_poly=True)
    parts = on_numpy(load_kernel(render(FAMILY, variant_of(FAMILY, spec, config)), "flash_bwd_hopper"), "exp2")
    x = np.linspace(-126, 2, 4 * 10_001, dtype=np.float32)
    found = parts.exp2(x.view(Array)).astype(np.float64)
    assert abs(found / np.exp2(x.astype(np.float64)) - 1).max() < 8e-5
    # Three of four are the special unit's, and the fourth ends where normal numbers do.
    lowest = parts.exp2(np.full(4, -np.inf, np.float32).view(Array))
    assert lowest[:3].tolist() == [0, 0, 0] and 0 < lowest[3] < 1.2e-38


def test_dropout_takes_few_instructions_for_each_pair() -> None:
    wanted = problem(Features(dropout=True), d=64, d_v=64)
    config = FAMILY.default(wanted.spec(), H200)
    source = render(FAMILY, variant_of(FAMILY, wanted.spec(), config))
    kernel = dict(compiled_kernels(source, "backward", wanted, H200))["flash_bwd_hopper"]
    assert read_facts(kernel, H200).shared_bytes <= BackwardLayout.of(wanted.spec(), config).shared_bytes
    # Of a block's 32 pairs: two comparisons at once, a choice each, and seven rounds of two wide products for each of two calls.
    loop = min(key_loops(machine_code(kernel)), key=Counter.total)
    assert (loop["HSETP2"], loop["FSEL"]) == (16, 32) and loop["IMAD"] <= 2 * 14 + 16
    assert loop.total() <= 490


@pytest.mark.parametrize(("row", "key", "p"), [(0, 0, 0.1), (192, 1088, 0.7), (64, 64, 0.5), (64, 0, 0.99), (0, 64, 1.0)])
def test_dropout_keeps_what_the_forward_kept(row: int, key: int, p: float) -> None:
    spec = problem(Features(dropout=True)).spec()
    module = load_kernel(render(FAMILY, variant_of(FAMILY, spec, FAMILY.default(spec, H200))), "flash_bwd_hopper")
    parts = on_numpy(module, "philox", "byte_selectors", "apply_dropout")
    seed, offset, index = 2**63 + 12345, 7, 5
    params = {name: 0 for name in module.Params._fields} | {"seed": seed, "offset": offset, "threshold": round(p * 32768)}
    numbers, zero = parts.scalars(module.Params(**params)), np.zeros((64, 64), np.uint32).view(Array)
    # The pairs that each call draws for are the emulator's to check.
    column, query = (zero + np.arange(key, key + 64)[:, None]).view(Array), (zero + np.arange(row, row + 64)[None, :]).view(Array)
    counters = (column // 32 * 4 + column // 2 % 4).to(np.uint32), (query // 16 * 8 + query % 8).to(np.uint32)
    words = np.choose(column // 8 % 4, parts.philox(*counters, zero, parts.scalars(module.Head(index)), numbers)).view(Array)
    found = parts.apply_dropout(np.full(words.shape, 0.25, np.float32).view(Array), words, parts.byte_selectors(), numbers)
    wanted = dropout_keep_rows(seed, offset, index, row, 64, key + 64, p)[:, key:].T
    assert torch.equal(torch.from_numpy(np.array(found)), wanted * 0.25)


def test_it_says_what_it_cant_serve() -> None:
    def why(features: Features, gpu: str = "h200", **changes: Any) -> str:
        return FAMILY.supports(problem(features, **changes).spec(), find_target(gpu)) or ""

    assert why(Features(causal=True)) == "" == why(Features(window=(3, 4), sinks=True), d=40, d_v=64, dtype="fp16")
    assert "9.0" in why(Features(), "b200")
    assert "fp32" in why(Features(), dtype="fp32")
    assert "multiples of 8" in why(Features(), d=100, d_v=100)
    assert why(Features(), d=8, d_v=32) == "" == why(Features(), d=64, d_v=128)
    assert "up to 128" in why(Features(), d=256, d_v=256) and "up to 128" in why(Features(), d=64, d_v=136)


def test_every_variant_is_formatted_and_lints_clean(tmp_path: Path) -> None:
    features = [Features(), Features(causal=True, mask="bias"), Features(window=(3, 4), mask="bool", softcap=True)]
    features += [Features(causal=True, window=(3, 0), sinks=True), Features(alibi=True), Features(dropout=True)]
    for index, (chosen, dynamic, dtype) in enumerate(product(features, (False, True), ("bf16", "fp16"))):
        spec = problem(chosen, dtype=dtype, **({}, {"d": 96, "d_v": 40}, {"d": 64, "d_v": 40})[index % 3]).spec()
        config = FAMILY.default(spec, H200)
        if dtype == "fp16":
            config = config.replace(held="both" if spec.d == 64 else "none")
            if spec.mask != "bias":
                config = config.replace(persistent="dynamic" if dynamic else True)
        (tmp_path / f"{index}.py").write_text(render(FAMILY, variant_of(FAMILY, spec, config)))
    settings = ["--config", str(Path(__file__).parents[2] / "pyproject.toml"), "--quiet", str(tmp_path)]
    for words in (["format", "--diff"], ["check", "--ignore", "D1"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, *settings], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
