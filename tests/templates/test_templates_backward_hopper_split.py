"""The two-kernel backward for Hopper without a GPU: gradients of the float64 reference, and the machine code that it is meant to be."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hopper_kernels import H200, Array, accesses, are_sixteen_bytes, key_loops, machine_code, on_numpy
from interpreting import interpreted
from test_templates_backward_hopper import problem

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features
from flashtune.core.problems.reference import dropout_keep_rows
from flashtune.templates import family
from flashtune.templates.backward.hopper.layout import SplitLayout
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiled_kernels, read_facts

FAMILY = family("flash_bwd_hopper_split")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Findings of the emulator."""
    found: dict[str, Any] = interpreted("interpret_backward_hopper_split")
    return found


CASES = ["full", "extreme", "causal", "window", "everything", "everything narrow", "bias", "pieces", "three stages"]


@pytest.mark.parametrize("case", [*CASES, "divided", "divided narrow", "small heads", "small values"])
def test_gradients_are_those_of_the_reference(report: dict[str, Any], case: str) -> None:
    assert report[case] == ""


def test_each_kernel_writes_the_same_bits_by_itself(report: dict[str, Any]) -> None:
    assert report["each gradient alone"]


@pytest.mark.parametrize(("d", "d_v", "held"), [(248, 248, 0)])
def test_it_compiles_to_products_in_flight_without_spills(d: int, d_v: int, held: int) -> None:
    wanted = problem(Features(causal=True), d=d, d_v=d_v)
    spec = wanted.spec()
    config = FAMILY.default(spec, H200).replace(held_columns=held)
    assert FAMILY.violated(config, spec, H200) is None
    kernels = dict(compiled_kernels(render(FAMILY, variant_of(FAMILY, spec, config)), "backward", wanted, H200))
    assert list(kernels) == ["preprocess", "key_gradients", "query_gradients"]
    layout, expected = SplitLayout.of(spec, config), FAMILY.expected(config, spec, H200)
    for name, shared_bytes in (("key_gradients", layout.key_shared_bytes), ("query_gradients", layout.query_shared_bytes)):
        facts = read_facts(kernels[name], H200)
        assert facts.shared_bytes <= shared_bytes
        assert expected is not None and (facts.registers, facts.threads) == (expected.registers, expected.threads)
    # An instruction takes 16 columns or keys: S with dV, and dP with dK, of which each piece has its own; one warpgroup takes the other's
    # exponentials. Where there is something to hide, each loop comes a second time, for blocks at the diagonal.
    keys, queries = (key_loops(machine_code(kernels[name])) for name in ("key_gradients", "query_gradients"))
    pieces, v_pieces = len(layout.pieces), len(layout.v_pieces)
    s_dv, dp_dk = layout.columns_d // 16 + v_pieces * 64 // 16, layout.columns_dv // 16 + pieces * 64 // 16
    assert sorted((loop["MUFU"], loop["HGMMA"]) for loop in keys) == [(0, dp_dk), (32, s_dv), (32, s_dv)]
    # S, dP, and dQ.
    assert [loop["HGMMA"] for loop in queries] == [(layout.columns_d + layout.columns_dv) // 16 + pieces * 64 // 16] * 4
    # Nor are descriptors kept in registers.
    assert not any(loop["STL"] + loop["LDL"] + loop["R2UR"] for loop in [*keys, *queries])
    are_sixteen_bytes(accesses(kernels))


@pytest.mark.parametrize(("row", "key", "p"), [(0, 0, 0.1), (192, 1088, 0.7), (64, 0, 1.0)])
def test_dropout_keeps_what_the_forward_kept(row: int, key: int, p: float) -> None:
    spec = problem(Features(dropout=True), d=256, d_v=256).spec()
    module = load_kernel(render(FAMILY, variant_of(FAMILY, spec, FAMILY.default(spec, H200))), "flash_bwd_hopper_split")
    parts = on_numpy(module, "philox", "random_words_dq", "byte_selectors_dq", "apply_dropout")
    seed, offset, index = 2**63 + 12345, 7, 5
    params = {name: 0 for name in module.Params._fields} | {"seed": seed, "offset": offset, "threshold": round(p * 32768)}
    numbers = parts.scalars(module.Params(**params))
    words = parts.random_words_dq(parts.scalar(key), parts.scalar(row), parts.scalars(module.Head(index)), numbers)
    probs = np.full(words.shape, 0.25, np.float32).view(Array)
    found = parts.apply_dropout(probs, words, parts.byte_selectors_dq(), numbers)
    wanted = dropout_keep_rows(seed, offset, index, row, 64, key + 64, p)[:, key:]
    assert torch.equal(torch.from_numpy(np.array(found)), wanted * 0.25)


def test_it_says_what_it_cant_serve() -> None:
    def why(features: Features, gpu: str = "h200", **changes: Any) -> str:
        return FAMILY.supports(problem(features, **changes).spec(), find_target(gpu)) or ""

    assert why(Features(causal=True), d=256, d_v=256) == "" == why(Features(window=(3, 4), sinks=True), d=40, d_v=64, dtype="fp16")
    assert "9.0" in why(Features(), "b200")
    assert "fp32" in why(Features(), dtype="fp32")
    assert "multiples of 8" in why(Features(), d=100, d_v=100)
    assert why(Features(), d=8, d_v=32) == "" == why(Features(), d=64, d_v=128)
    assert "up to 256" in why(Features(), d=128, d_v=256)


def test_every_config_of_its_starts_is_inside_its_space() -> None:
    for d, d_v in ((256, 256), (192, 128), (160, 160), (128, 128), (96, 80), (64, 64)):
        spec = problem(Features(causal=True), d=d, d_v=d_v).spec()
        allowed = set(FAMILY.configs(spec, H200))
        assert len(FAMILY.starts(spec, H200)) >= 3 and set(FAMILY.starts(spec, H200)) <= allowed


def test_every_variant_is_formatted_and_lints_clean(tmp_path: Path) -> None:
    features = [Features(), Features(causal=True, mask="bias"), Features(window=(3, 4), mask="bool", softcap=True)]
    features += [Features(causal=True, window=(3, 0), sinks=True), Features(alibi=True), Features(dropout=True)]
    for index, (chosen, d) in enumerate((chosen, d) for chosen in features for d in (64, 128, 256)):
        spec = problem(chosen, dtype=("bf16", "fp16")[index % 2], d=d - 8 * (index % 3), d_v=d - 8 * (index % 3)).spec()
        (tmp_path / f"{index}.py").write_text(render(FAMILY, variant_of(FAMILY, spec, FAMILY.starts(spec, H200)[index % 3])))
    settings = ["--config", str(Path(__file__).parents[2] / "pyproject.toml"), "--quiet", str(tmp_path)]
    for words in (["format", "--diff"], ["check", "--ignore", "D1"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, *settings], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
