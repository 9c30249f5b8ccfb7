"""The rendered text is what a person would have written, and the same every time."""

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from jinja2 import BaseLoader, Environment

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.errors import InputError
from flashtune.templates import families, family, rendering
from flashtune.templates.rendering import environment, render, sources_hash, variant_of

ROOT = Path(__file__).parents[2]
OURS = ("flash_bwd", "flash_decode", "flash_fwd")

FEATURES = (
    Features(),
    Features(causal=True),
    Features(window=(64, 32)),
    Features(causal=True, window=(64, 0)),
    Features(mask="bool"),
    Features(mask="bias", softcap=True),
    Features(dropout=True, causal=True, mask="bool"),
    Features(dropout=True, window=(64, 32), softcap=True, mask="bias"),
    Features(alibi=True),
    Features(alibi=True, causal=True, mask="bias", dropout=True),
    Features(sinks=True, causal=True, window=(64, 0)),
)


def spec_of(features: Features, *, d: int, d_v: int, dtype: DType) -> KernelSpec:
    return Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=64, d=d, d_v=d_v, dtype=dtype, features=features).spec()


def text_of(name: str, spec: KernelSpec, **changes: int | str | bool) -> str:
    chosen = family(name)
    spec = of_its_pass(name, spec)
    config = chosen.default(spec, find_target("h200")).replace(**changes)
    return render(chosen, variant_of(chosen, spec, config))


def of_its_pass(name: str, spec: KernelSpec) -> KernelSpec:
    return replace(spec, direction="bwd") if "_bwd" in name else spec


def golden_text(name: str, spec: KernelSpec, **more: int | str | bool) -> str:
    # Nothing is left to the default, so that a better default changes no golden file.
    sizes: dict[str, int | str | bool] = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2, "maxnreg": 0}
    return text_of(name, spec, **sizes | more)


DECODE: dict[str, int | str | bool] = {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "programs": 2}

BACKWARD: dict[str, int | str | bool] = {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}
BACKWARD |= {"DQ_BLOCK_M": 128, "DQ_BLOCK_N": 64, "DQ_num_warps": 8, "DQ_num_stages": 2}

GOLDEN: dict[str, Callable[[], str]] = {
    "flash_bwd-bwd-fp32-d80x64-window-bool-alibi-dropout-softcap.py": lambda: text_of(
        "flash_bwd",
        spec_of(Features(window=(9, 9), mask="bool", alibi=True, dropout=True, softcap=True), d=80, d_v=64, dtype="fp32"),
        **BACKWARD,
        ORDER="rows",
    ),
    "flash_bwd_hopper_wide-bwd-bf16-d512-causal.py": lambda: text_of(
        "flash_bwd_hopper_wide", spec_of(Features(causal=True), d=512, d_v=512, dtype="bf16"), BLOCK_M=128, BLOCK_N=128, COLUMNS=256
    ),
    "flash_decode-fwd-fp16-d80x64-window-bool.py": lambda: text_of(
        "flash_decode",
        spec_of(Features(window=(9, 9), mask="bool"), d=80, d_v=64, dtype="fp16"),
        **DECODE,
        combine="kernel",
        loads="tma",
    ),
    "flash_decode-fwd-bf16-d64-causal-window-sinks.py": lambda: text_of(
        "flash_decode",
        spec_of(Features(causal=True, window=(128, 0), sinks=True), d=64, d_v=64, dtype="bf16"),
        **DECODE,
        combine="rows",
        loads="pointer",
    ),
    "flash_fwd-fwd-fp32-d80x64-window-bool-dropout.py": lambda: golden_text(
        "flash_fwd",
        spec_of(Features(window=(9, 9), mask="bool", dropout=True), d=80, d_v=64, dtype="fp32"),
        num_stages=1,
        LOAD_V_EARLY=True,
        ORDER="heads",
    ),
    "flash_fwd-fwd-fp8-d64-alibi-softcap.py": lambda: golden_text(
        "flash_fwd", spec_of(Features(alibi=True, softcap=True), d=64, d_v=64, dtype="fp8"), LOAD_V_EARLY=False, ORDER="rows"
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_rendered_text_is_the_reviewed_one(name: str, golden: Callable[[str, str], None]) -> None:
    golden(name, GOLDEN[name]())


@pytest.mark.parametrize("name", GOLDEN)
def test_rendering_twice_gives_the_same_bytes(name: str) -> None:
    first = GOLDEN[name]()
    environment.cache_clear()
    rendering.text_hash.cache_clear()
    assert GOLDEN[name]() == first


def test_every_variant_is_formatted_lints_clean_and_compiles_without_warnings(tmp_path: Path) -> None:
    count = 0
    for name in OURS:
        chosen = family(name)
        paths = {axis.name: axis.values for axis in chosen.axes if axis.name in chosen.path_axes}
        for index, features in enumerate(FEATURES):
            sizes: tuple[tuple[int, int, DType], ...] = ((64, 64, "bf16"), (80, 40, "fp32"), (64, 80, "fp8"))
            for d, d_v, dtype in sizes:
                spec = spec_of(features, d=d, d_v=d_v, dtype=dtype)
                if (spec.dropout and name == "flash_decode") or (dtype == "fp8" and name == "flash_bwd"):
                    continue
                # Every choice of code path in turn, each at its own pace.
                turns = {axis: values[(index + place * (index // 2)) % len(values)] for place, (axis, values) in enumerate(paths.items())}
                text = text_of(name, spec, **turns)
                (tmp_path / f"{name}_{index}_{dtype}.py").write_text(text)
                count += 1
    settings = ["--config", str(ROOT / "pyproject.toml"), "--quiet"]
    ruff = [sys.executable, "-m", "ruff"]
    formatted = subprocess.run([*ruff, "format", "--diff", *settings, str(tmp_path)], capture_output=True, text=True)
    assert formatted.returncode == 0, formatted.stdout
    linted = subprocess.run([*ruff, "check", *settings, "--ignore", "D1", str(tmp_path)], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    for path in tmp_path.glob("*.py"):
        done = subprocess.run([sys.executable, "-W", "error", "-c", f"compile(open({str(path)!r}).read(), 'x', 'exec')"], check=False)
        assert done.returncode == 0
        break
    assert len(list(tmp_path.glob("*.py"))) == count == 79


@pytest.mark.parametrize("name", OURS)
def test_a_rendered_file_imports_only_torch_and_triton(name: str) -> None:
    for features in FEATURES:
        tree = ast.parse(text_of(name, spec_of(features, d=64, d_v=64, dtype="fp16")))
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {module.split(".")[0] for module in modules} <= {"torch", "triton"}


@pytest.mark.parametrize("name", OURS)
def test_the_header_names_template_variant_config_and_command(name: str) -> None:
    spec = spec_of(Features(causal=True), d=64, d_v=64, dtype="fp16")
    chosen, spec = family(name), of_its_pass(name, spec)
    variant = variant_of(chosen, spec, chosen.default(spec, find_target("h200")))
    header = ast.get_docstring(ast.parse(render(chosen, variant))) or ""
    for expected in (name, variant.id, variant.config.label(), spec.label(), "flashtune generate", "do not edit"):
        assert expected in header


@pytest.mark.parametrize("name", OURS)
def test_every_tile_line_ends_in_its_shape(name: str) -> None:
    tiles = {
        *("q_tile", "k_tile", "v_tile", "mask_tile", "scores", "probs", "acc", "row_max", "row_sum", "offs_m", "offs_n", "offs_d"),
        *("keep", "dout_tile", "dscores", "dprobs", "dq", "dk", "dv", "delta"),
    }
    found = 0
    for features in FEATURES:
        for line in text_of(name, spec_of(features, d=64, d_v=64, dtype="fp16")).splitlines():
            if line.startswith("    ") and line.split(" = ")[0].strip() in tiles:
                assert line.rstrip().endswith("]") and "# [" in line, line
                found += 1
    assert found > 100


def test_what_is_off_leaves_no_trace_in_the_text() -> None:
    plain = text_of("flash_fwd", spec_of(Features(), d=64, d_v=64, dtype="bf16"))
    for word in ("mask_ptr", "philox", "tanh", "diagonal:", "row_last", "in_d", "    if ", "slope", "descale", "float16"):
        body = plain[plain.index("def attention_forward") : plain.index("KERNEL = ")]
        assert word not in body


def test_the_hash_covers_every_partial() -> None:
    names = [family(name).template_file for name in OURS]
    sources = {name: environment().loader.get_source(environment(), name)[0] for name in environment().list_templates(["jinja"])}  # type: ignore[union-attr]
    used = {name for name in sources if "/_" in f"/{name}" and any(f'"{name}"' in text for text in sources.values())}
    partials = {name for name in sources if "/_" in f"/{name}"}
    assert partials == used, f"nothing includes {partials - used}"
    assert len({sources_hash(name) for name in names}) == len(names)


def test_the_hash_of_a_variant_changes_with_its_own_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    family = families()["flash_fwd"]
    plain, capped = (spec_of(Features(softcap=softcap), d=64, d_v=64, dtype="fp16") for softcap in (False, True))
    config = family.default(plain, find_target("h200"))
    variants = [variant_of(family, spec, config) for spec in (plain, capped)]
    before = [rendering.text_hash(family, variant) for variant in variants]
    assert before[0] != before[1]
    known = environment().loader
    assert known is not None

    class Changed(BaseLoader):
        def get_source(self, environment: Environment, template: str) -> tuple[str, str | None, Callable[[], bool] | None]:
            text, file, fresh = known.get_source(environment, template)
            return text.replace("tanh(", "tanh (") if template == "shared/_scores.jinja" else text, file, fresh

    changed = environment().overlay(loader=Changed(), cache_size=0)
    monkeypatch.setattr(rendering, "environment", lambda: changed)
    rendering.text_hash.cache_clear()
    try:
        after = [rendering.text_hash(family, variant) for variant in variants]
    finally:
        rendering.text_hash.cache_clear()
    assert after[0] == before[0] and after[1] != before[1]


@pytest.mark.parametrize(
    "change", [{"BLOCK_M": 96}, {"num_warps": "8"}, {"ORDER": "rows\nimport os"}, {"maxnreg": True}, {"num_stages": 2.0}, {"EXTRA": 1}]
)
@pytest.mark.parametrize("name", OURS)
def test_nothing_outside_the_declared_space_reaches_the_text(name: str, change: dict[str, int]) -> None:
    chosen = family(name)
    spec = spec_of(Features(), d=64, d_v=64, dtype="fp16")
    variant = variant_of(chosen, spec, chosen.default(spec, find_target("h200")))
    with pytest.raises(InputError, match=f"{next(iter(change))}"):
        render(chosen, replace(variant, config=variant.config.replace(**change)))


@pytest.mark.parametrize("name", OURS)
def test_a_config_that_lacks_an_axis_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="lacks the axis"):
        families()[name].validate(Config.of(BLOCK_M=64))
