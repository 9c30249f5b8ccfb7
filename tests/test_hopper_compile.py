"""The Hopper family without a GPU: its space is sound, its text is stable, and its variants compile to the code they are meant to be."""

import ast
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs

from flashtune.core.config import Config, KernelSpec
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.core.target import find_target
from flashtune.templates.flash_fwd_hopper import FAMILY
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.compile import compiling_for, read_facts
from flashtune.tuner.inputs import make_inputs

H200 = find_target("h200")
EVERYTHING = Features(causal=True, window=(100, 0), mask="bias", dropout=True, softcap=True)
FEATURES = [
    Features(),
    Features(causal=True),
    Features(window=(64, 32)),
    Features(mask="bool"),
    Features(mask="bias"),
    Features(causal=True, dropout=True),
    Features(softcap=True),
    EVERYTHING,
]


def problem(d: int = 128, features: Features | None = None, d_v: int | None = None) -> Problem:
    return Problem(batch=2, heads=4, kv_heads=2, n_q=1000, n_kv=1100, d=d, d_v=d_v or d, dtype="bf16", features=features or Features())


def config(spec: KernelSpec, **changes: int | str | bool) -> Config:
    chosen = FAMILY.default(spec, H200).replace(**changes)
    assert FAMILY.violated(chosen, spec, H200) is None
    return chosen


def compiled(wanted: Problem, chosen: Config) -> Any:
    module = load_source(render(FAMILY, variant_of(FAMILY, wanted.spec(), chosen)), "hopper")
    inputs = make_inputs(wanted, device="meta", seed=0)
    with compiling_for(H200):
        [(kernel, grid, args, options)] = module.launches(*inputs.arguments, **inputs.keywords)
        return kernel.warmup(*args, grid=grid, **options)


def machine_code(kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        return subprocess.run([knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("d", "features", "changes"),
    [
        (128, Features(), {}),
        (128, Features(causal=True), {"pingpong": True}),
        (128, Features(causal=True), {"tiles": "one", "lookahead": 0, "pingpong": True}),
        (64, Features(causal=True), {}),
        (64, Features(), {"BLOCK_M": 128, "lookahead": 2}),
        (64, Features(causal=True), {"BLOCK_M": 128, "lookahead": 2, "pingpong": True}),
        (256, Features(causal=True), {}),
        (64, Features(window=(64, 32)), {"BLOCK_M": 64, "BLOCK_N": 64, "tiles": "one"}),
    ],
    ids=str,
)
def test_it_compiles_to_warpgroup_instructions_in_flight_without_spills(d: int, features: Features, changes: dict[str, Any]) -> None:
    wanted = problem(d, features)
    kernel = compiled(wanted, config(wanted.spec(), **changes))
    facts = read_facts(kernel, H200)
    assert facts.spills <= 8
    assert facts.shared_bytes <= H200.shared_bytes_per_block
    assert facts.registers * facts.threads <= H200.registers_per_sm
    text = machine_code(kernel)
    products = len(re.findall(r"\bHGMMA\b", text))
    waits = len(re.findall(r"WARPGROUP\.DEPBAR", text))
    assert products > 0
    # ptxas waits after each product where it can't prove that they may overlap.
    assert waits <= products / 3


@pytest.mark.parametrize(("d", "d_v", "features"), [(96, 64, EVERYTHING), (64, 64, Features(mask="bool"))], ids=str)
def test_features_and_uneven_head_sizes_compile(d: int, d_v: int, features: Features) -> None:
    wanted = problem(d, features, d_v)
    chosen = config(wanted.spec(), BLOCK_M=64, BLOCK_N=64, tiles="one", lookahead=0, pingpong=False)
    facts = read_facts(compiled(wanted, chosen), H200)
    assert facts.tensor_core_ops > 0
    assert facts.spills <= 8


@pytest.mark.parametrize("features", FEATURES, ids=lambda f: f.label())
@pytest.mark.parametrize(("d", "d_v"), [(16, 16), (64, 64), (96, 96), (128, 128), (192, 128), (64, 256), (256, 256)])
def test_every_spec_has_starts_that_break_no_constraint(d: int, d_v: int, features: Features) -> None:
    spec = problem(d, features, d_v).spec()
    assert FAMILY.supports(spec, H200) is None
    found = FAMILY.starts(spec, H200)
    assert found
    assert found[0] == FAMILY.default(spec, H200)
    for chosen in found:
        FAMILY.validate(chosen)
        assert FAMILY.violated(chosen, spec, H200) is None


@pytest.mark.parametrize(
    ("gpu", "changes"), [("a100", {}), ("b200", {}), ("h200", {"dtype": "fp32"}), ("h200", {"d": 36}), ("h200", {"d_v": 100})], ids=str
)
def test_it_says_why_it_refuses(gpu: str, changes: dict[str, Any]) -> None:
    spec = KernelSpec(**{**problem().spec().as_dict(), **changes})
    assert FAMILY.supports(spec, find_target(gpu))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_feasible_config_renders_to_the_same_python_twice(data: st.DataObject) -> None:
    wanted = problem(data.draw(st.sampled_from([32, 64, 96, 128, 256])), data.draw(st.sampled_from(FEATURES)))
    chosen = Config.of({axis.name: data.draw(st.sampled_from(axis.values)) for axis in FAMILY.axes})
    if FAMILY.violated(chosen, wanted.spec(), H200) is not None:
        chosen = data.draw(st.sampled_from(FAMILY.starts(wanted.spec(), H200)))
    variant = variant_of(FAMILY, wanted.spec(), chosen)
    text = render(FAMILY, variant)
    assert text == render(FAMILY, variant)
    assert max(map(len, text.splitlines())) <= 140
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)
    tree = ast.parse(text)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"accepts", "launches", "launch"} <= functions
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} | {"torch"}
    assert {(name or "").split(".")[0] for name in modules} == {"torch", "triton"}


@pytest.mark.parametrize(("columns", "copied"), [(64, False), (48, False), (50, True), (1, True)])
def test_a_mask_reaches_the_copy_engine_without_its_repeats(columns: int, copied: bool) -> None:
    wanted = problem(64, Features(mask="bool"))
    module = load_source(render(FAMILY, variant_of(FAMILY, wanted.spec(), FAMILY.default(wanted.spec(), H200))), "hopper")
    mask = torch.rand(1, 3, 5, columns) < 0.5
    compact = module.without_repeats(mask.expand(2, 3, 5, columns))
    assert compact.shape == mask.shape
    assert torch.equal(compact.bool(), mask)
    assert all(stride % 16 == 0 for stride in compact.stride()[:3])
    assert (compact.data_ptr() != mask.data_ptr()) == copied


def test_strides_that_the_copy_engine_cant_take_are_refused() -> None:
    wanted = problem(64)
    module = load_source(render(FAMILY, variant_of(FAMILY, wanted.spec(), FAMILY.default(wanted.spec(), H200))), "hopper")
    good = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16)
    inside = torch.empty(2, 16, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert module.accepts(good, inside, good, None)
    wide = torch.empty(2, 4, 16, 68, dtype=torch.bfloat16)[..., :64]
    shifted = torch.empty(2 * 4 * 16 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 4, 16, 64)
    for bad in (wide, shifted, good.transpose(2, 3).contiguous().transpose(2, 3), good[:, :1].expand(2, 4, 16, 64)):
        assert not module.accepts(good, bad, good, None)
