"""Among nearly equal kernels one whose machine code is at hand serves, so that no call waits for a compiler without need."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flashtune import dispatch
from flashtune.core.code import shipped as shipped_kernels
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch.plans import kernels
from flashtune.dispatch.policy.choose import choose
from flashtune.dispatch.policy.records import unaligned
from flashtune.dispatch.state.context import current
from flashtune.templates import families, family, rendering

H200 = find_target("h200")
PLAIN = Problem(batch=4, heads=16, kv_heads=4, n_q=512, n_kv=512, d=128, d_v=128, dtype="bf16")
WITH_ROWS = {
    "mask": Features(mask="bool"),
    "bias": Features(mask="bias"),
    "dropout": Features(causal=True, dropout=True),
    "softcap": Features(causal=True, softcap=True),
    "alibi": Features(causal=True, alibi=True),
}
"""Features that the shipped rows have at 4096 keys alone, with machine code."""


def shipped_ids() -> set[str]:
    return {kernel.variant_id for kernel in shipped_kernels.shipped_index(shipped_kernels.PACKAGE).kernels}


@pytest.fixture(autouse=True)
def shipped_rows_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dispatch.reload(alone=True)
    yield
    dispatch.reload()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("feature", WITH_ROWS)
def test_a_feature_that_ships_compiled_is_served_compiled_at_a_few_hundred_keys(feature: str, d: int) -> None:
    problem = replace(PLAIN, d=d, d_v=d, features=WITH_ROWS[feature])
    # As with a seed for dropout: without one such calls run as in training, where PyTorch is faster.
    records, words = (
        current().pool(problem.key("h200"), H200),
        {"framework_serves": False, "compiled": partial(kernels.has_code, arch=H200.arch)},
    )
    found = choose(problem, H200, records, families(), **words)
    assert found.variant is not None and found.variant.id in shipped_ids()


@pytest.mark.parametrize("d", [40, 96, 160, 192])
@pytest.mark.parametrize("feature", ["plain", "causal"])
def test_rows_of_bf16_serve_fp16_by_machine_code_of_its_own(feature: str, d: int) -> None:
    features = {"plain": Features(), "causal": Features(causal=True), **WITH_ROWS}[feature]
    problem = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=d, d_v=d, dtype="fp16", features=features)
    found = dispatch.explain_problem(problem, "h200")
    assert found.record_key is not None and found.record_key.dtype == "bf16"
    manifest = shipped_kernels.shipped_manifest(shipped_kernels.PACKAGE, str(found.variant_id), "90")
    assert manifest is not None and "Triton compiles it" not in found.reason
    assert {one.element for binary in manifest.binaries for one in binary.parameters if one.kind == "tensor_map"} == {"fp16"}


def test_what_has_no_machine_code_says_so() -> None:
    problem = replace(PLAIN, d=104, d_v=104)
    found = dispatch.explain_problem(problem, "h200")
    assert found.kind == "stand_in" and "there is no machine code of it, so Triton compiles it at the first call" in found.reason


def test_a_short_call_is_not_served_by_the_tiles_of_a_long_one_for_their_machine_code() -> None:
    features = Features(causal=True, window=(300, 0))
    short = Problem(batch=56, heads=40, kv_heads=40, n_q=623, n_kv=623, d=40, d_v=40, dtype="bf16", features=features)
    found = dispatch.explain_problem(short, "h200")
    assert found.config is not None and found.config.number("BLOCK_M") <= 128, found.reason


def test_nothing_is_rendered_to_be_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja takes longer than all else of a first call."""
    monkeypatch.setenv("FLASHTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(rendering, "render", lambda *_: pytest.fail("rendered"))
    spec = replace(PLAIN, d=104, d_v=104).spec()
    hopper, ready = family("flash_fwd_hopper"), partial(kernels.has_code, arch=H200.arch)
    assert not ready(hopper, spec, hopper.default(spec, H200))
    (tmp_path / "kernels" / "sm_90a-triton-3.6.0").mkdir(parents=True)
    assert not ready(hopper, spec, hopper.default(spec, H200))
    shipped = dispatch.explain_problem(replace(PLAIN, n_q=4096, n_kv=4096), "h200")
    assert str(shipped.variant_id) in shipped_ids()


@pytest.mark.parametrize(("n", "d"), [(5001, 128), (2226, 80)])
def test_machine_code_of_a_bias_that_is_read_otherwise_goes_before_nothing(n: int, d: int) -> None:
    problem = Problem(batch=2, heads=8, kv_heads=8, n_q=n, n_kv=n, d=d, d_v=d, dtype="bf16", features=Features(mask="bias"))
    rows = [row for row in Library.of(shipped_path()).records() if row.key.direction == "fwd"]
    found = choose(problem, H200, rows, families(), framework_serves=False, compiled=lambda *_: False).record
    assert found is not None and unaligned(found.key)


STEPS = {"gpt2": (12, 12, 64), "llama": (16, 4, 128), "qwen3": (16, 8, 128), "gemma2": (8, 4, 256)}
"""Query heads, key heads and head size of models in whose decoding steps of four sequences calls.py times tokens."""


@pytest.mark.parametrize("model", STEPS)
def test_a_models_decoding_steps_are_served_compiled_at_every_length_of_a_short_text(model: str) -> None:
    """Torch builds a plan at each, for 31 to 39 ms (benchmarks/results/2026-11-22-h200-steps/steps.json)."""
    heads, kv_heads, d = STEPS[model]
    for n in (1, 2, 31, 100, 200, 300, 511, 700, 1024):
        problem = Problem(batch=4, heads=heads, kv_heads=kv_heads, n_q=1, n_kv=n, d=d, d_v=d, dtype="bf16")
        found = dispatch.explain_problem(problem, "h200")
        assert found.template == "flash_decode" and "Triton compiles it" not in found.reason, (n, found.reason)
