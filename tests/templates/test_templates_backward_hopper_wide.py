"""The backward for Hopper of heads beyond 256 without a GPU: gradients of the float64 reference, its chunks, and its machine code."""

import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hopper_kernels import H200, key_loops, launches, machine_code
from interpreting import interpreted
from test_templates_backward_hopper import problem

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features
from flashtune.templates import family
from flashtune.templates.backward.hopper.wide import MOST_SCRATCH, WideBackwardLayout, chunks
from flashtune.templates.expected import log_us
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiled_kernels, read_facts
from flashtune.tuner.verify.inputs import make_inputs

FAMILY = family("flash_bwd_hopper_wide")
CAUSAL = Features(causal=True, alignment="bottom_right")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Findings of the emulator."""
    found: dict[str, Any] = interpreted("interpret_backward_hopper_wide")
    return found


CASES = ["full", "extreme", "causal", "causal, few queries", "causal from the top", "window", "small values", "small keys", "everything"]
CHUNKED = ["chunks of key heads", "chunks of query heads", "chunks of queries", "chunks of a tile", "chunks of a window"]


@pytest.mark.parametrize("case", [*CASES, "groups", *CHUNKED])
def test_gradients_are_those_of_the_reference(report: dict[str, Any], case: str) -> None:
    assert report[case] == ""


def test_each_gradient_has_the_same_bits_by_itself(report: dict[str, Any]) -> None:
    assert report["each gradient alone"]


@pytest.mark.parametrize(("places", "group", "m_tiles", "most"), list(product((1, 6), (1, 5), (1, 7), (1, 8, 17, 60, 10**6))))
def test_chunks_are_all_tiles_once_and_end_each_key_head_once(places: int, group: int, m_tiles: int, most: int) -> None:
    tile_bytes = 8
    seen, open_heads = [], set[int]()
    for one in chunks(places, group, m_tiles, tile_bytes, most):
        tiles = one.places * one.members * one.m_tiles
        assert tiles == 1 or tiles * tile_bytes <= most
        heads = set(range(one.place, one.place + one.places))
        # Sums are in memory for one key head at a time, from its first chunk to its last.
        assert open_heads == (set() if one.starts else heads) and (len(heads) == 1 or (one.starts and one.ends))
        open_heads = set() if one.ends else heads
        ranges = (range(first, first + count) for first, count in zip(one[0::2], one[1::2], strict=False))
        seen += list(product(*list(ranges)[:3]))
    assert not open_heads and sorted(seen) == list(product(range(places), range(group), range(m_tiles)))


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "n"), [(1, 1, 1, 300_000), (2, 64, 1, 8192), (64, 16, 16, 2048)])
def test_scratch_memory_is_bounded_whatever_the_lengths_and_heads(batch: int, heads: int, kv_heads: int, n: int) -> None:
    wanted = replace(problem(CAUSAL, d=512, d_v=512), batch=batch, heads=heads, kv_heads=kv_heads, n_q=n, n_kv=n)
    spec = wanted.spec()
    module = load_kernel(render(FAMILY, variant_of(FAMILY, spec, FAMILY.default(spec, H200))), "flash_bwd_hopper_wide")
    inputs = make_inputs(wanted, device="meta", seed=0)
    given = {id(x) for x in inputs.operands.values() if x is not None}
    scratch: dict[int, torch.Tensor] = {}
    for _, _, arguments, _ in launches(module, inputs):
        for one in arguments:
            tensor = getattr(one, "base", one)
            if isinstance(tensor, torch.Tensor) and id(tensor) not in given:
                scratch[id(tensor)] = tensor
    rows = wanted.batch * wanted.heads * (wanted.n_q + 256)
    sums = (wanted.n_kv + 128) * 4 * (wanted.d + wanted.d_v)
    found = sum(x.numel() * x.element_size() for x in scratch.values())
    # LSE and delta are two float32 of a row.
    assert 0.4 * MOST_SCRATCH <= found <= MOST_SCRATCH + 2 * 4 * rows + sums


def test_it_compiles_to_products_in_flight_without_spills() -> None:
    wanted = problem(CAUSAL, d=512, d_v=512)
    spec = wanted.spec()
    config = FAMILY.default(spec, H200)
    kernels = dict(compiled_kernels(render(FAMILY, variant_of(FAMILY, spec, config)), "backward", wanted, H200))
    assert list(kernels) == ["preprocess", "score_gradients", "key_gradients", "query_gradients"]
    layout, expected = WideBackwardLayout.of(spec, config), FAMILY.expected(config, spec, H200)
    facts = read_facts(kernels["score_gradients"], H200)
    assert expected is not None and (facts.registers, facts.threads) == (expected.registers, expected.threads)
    assert facts.shared_bytes <= layout.shared_bytes <= H200.shared_bytes_per_block
    scores, *products = (key_loops(machine_code(kernels[f"{name}_gradients"])) for name in ("score", "key", "query"))
    # An instruction takes 16 columns of heads, or 16 keys or queries of 128.
    columns = layout.part * (layout.parts + layout.v_parts)
    assert scores and all(loop["HGMMA"] == columns // 16 for loop in scores)
    assert all(loop["HGMMA"] == 128 // 16 for loops in products for loop in loops if loop["HGMMA"])
    assert not any(loop["STL"] + loop["LDL"] for loops in (scores, *products) for loop in loops)


def test_it_says_what_it_cant_serve() -> None:
    def why(features: Features, gpu: str = "h200", **changes: Any) -> str:
        return FAMILY.supports(problem(features, **changes).spec(), find_target(gpu)) or ""

    assert why(CAUSAL, d=512, d_v=512) == "" == why(Features(window=(3, 4), sinks=True, mask="bool"), d=40, d_v=264, dtype="fp16")
    assert "9.0" in why(Features(), "b200", d=512, d_v=512)
    assert "not fp32" in why(Features(), d=512, d_v=512, dtype="fp32")
    assert "multiples of 8" in why(Features(), d=300, d_v=300)
    assert "beyond 256" in why(Features(), d=256, d_v=256)
    assert "takes no bias" in why(Features(mask="bias"), d=512, d_v=512)
    assert "1 to 512" in why(Features(), d=520, d_v=520)


def test_calls_without_a_record_are_those_that_were_timed() -> None:
    plain = replace(problem(CAUSAL, d=512, d_v=512), n_q=4096, n_kv=4096)
    for changes in ({}, {"heads": 8, "kv_heads": 1}, {"features": Features()}, {"dtype": "fp16"}):
        assert FAMILY.outruns_torch(replace(plain, **changes), H200) == "2026-11-30-h200-libraries"
    untimed = [Features(alibi=True), Features(dropout=True), Features(mask="bool"), Features(window=(90, 0)), Features(softcap=True)]
    for one in (*(replace(plain, features=features) for features in untimed), replace(plain, n_q=1000), replace(plain, n_kv=1000)):
        assert FAMILY.outruns_torch(one, H200) is None


def test_a_search_expects_what_was_timed() -> None:
    """8 heads of 8,192 queries on an H200: 4.09 ms and causal 2.32 ms by tiles of 256 columns, 4.43 and 2.48 ms by tiles of 128."""
    for features, times in ((Features(), (4086, 4431)), (CAUSAL, (2320, 2480))):
        wanted = replace(problem(features, d=512, d_v=512), batch=1, heads=8, kv_heads=8, n_q=8192, n_kv=8192)
        found = [math.exp(log_us(FAMILY, config, wanted, H200) or 0.0) for config in FAMILY.starts(wanted.spec(), H200)]
        assert found == pytest.approx(times, rel=0.25)
        assert found == sorted(found)


def test_starts_are_the_whole_space_the_least_padding_first() -> None:
    for d, columns in ((512, 256), (448, 256), (384, 128), (320, 128), (264, 128)):
        spec = problem(CAUSAL, d=d, d_v=d).spec()
        assert set(FAMILY.starts(spec, H200)) == set(FAMILY.configs(spec, H200))
        assert FAMILY.default(spec, H200)["COLUMNS"] == columns


def test_every_variant_is_formatted_and_lints_clean(tmp_path: Path) -> None:
    features = [Features(), Features(causal=True, mask="bool"), Features(window=(3, 4), softcap=True), Features(dropout=True)]
    features += [Features(causal=True, window=(3, 0), sinks=True), Features(alibi=True)]
    for index, (chosen, d) in enumerate((chosen, d) for chosen in features for d in (264, 512)):
        spec = problem(chosen, dtype=("bf16", "fp16")[index % 2], d=d, d_v=d).spec()
        (tmp_path / f"{index}.py").write_text(render(FAMILY, variant_of(FAMILY, spec, FAMILY.starts(spec, H200)[index % 2])))
    settings = ["--config", str(Path(__file__).parents[2] / "pyproject.toml"), "--quiet", str(tmp_path)]
    for words in (["format", "--diff"], ["check", "--ignore", "D1"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, *settings], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
