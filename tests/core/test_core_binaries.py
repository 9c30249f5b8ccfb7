"""Binaries: what Triton compiled is described as its driver launches it, and nothing runs that isn't what the manifest names."""

import gzip
import hashlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtune.core.code.binaries import Binary, Condition, Manifest, Parameter, TensorMap, parse_manifest
from flashtune.core.code.compiled import from_compiled
from flashtune.core.code.launches import Operand
from flashtune.core.code.launching import keyword_plan, provided
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.dispatch.parts.kernel import merge_kernel
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiling_for
from flashtune.tuner.verify.inputs import make_inputs

H200 = find_target("h200")
CODE = b"\x7fELF, said the cubin"
PLAIN = Binary(
    kernel="copy",
    specialization="aligned",
    entry="copy",
    arch="sm_90a",
    triton="3.6.0",
    threads=384,
    shared_bytes=1024,
    cluster=1,
    launch_pdl=True,
    cooperative=False,
    global_scratch_bytes=0,
    profile_scratch_bytes=0,
    parameters=(
        Parameter(name="q_ptr", position=0, kind="pointer", element="bf16"),
        Parameter(
            name="k_desc",
            position=1,
            kind="tensor_map",
            element="bf16",
            tensor_map=TensorMap(element_type=9, element_bytes=2, box=(1, 1, 64, 64), swizzle=3),
        ),
        Parameter(name="stride", position=2, kind="i32"),
        Parameter(name="seed", position=4, kind="u64"),
        Parameter(name="scale", position=6, kind="fp32"),
    ),
    conditions=(
        Condition(name="q_ptr", position=0, rule="multiple_of", value=16),
        Condition(name="stride", position=2, rule="multiple_of", value=16),
        Condition(name="unit", position=3, rule="equals", value=1),
        Condition(name="WIDE", position=5, rule="equals", value=False),
    ),
    sha256=hashlib.sha256(CODE).hexdigest(),
    file="copy.cubin.gz",
)


def arguments(**changes: Any) -> list[Any]:
    values = {
        "q_ptr": Operand(0, (64,), (1,), "bf16"),
        "k_desc": object(),
        "stride": 128,
        "unit": 1,
        "seed": 2**64 - 1,
        "WIDE": False,
        "scale": 0.5,
    }
    assert changes.keys() <= values.keys()
    return list({**values, **changes}.values())


def saved(folder: Path, code: bytes = CODE) -> Path:
    (folder / PLAIN.file).write_bytes(gzip.compress(code))
    (folder / "copy.json").write_text(Manifest(variant_id="0123456789abcdef", binaries=(PLAIN,)).as_json())
    return folder / "copy.json"


def read(path: Path) -> Manifest:
    return parse_manifest(path.read_bytes(), path)


def test_a_manifest_is_read_as_it_was_written_and_gives_the_code(tmp_path: Path) -> None:
    found = read(saved(tmp_path))
    assert found.binaries == (PLAIN,)
    assert found.variant_id == "0123456789abcdef"
    assert found.code(found.binaries[0]) == CODE


def test_code_that_the_manifest_does_not_name_is_refused(tmp_path: Path) -> None:
    found = read(saved(tmp_path, CODE + b"!"))
    with pytest.raises(EnvironmentProblem, match="isn't the machine code that its manifest names"):
        found.code(found.binaries[0])


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-9])], ids=["gone", "cut"])
def test_missing_and_damaged_code_is_one_sentence(tmp_path: Path, damage: Any) -> None:
    found = read(saved(tmp_path))
    damage(tmp_path / PLAIN.file)
    with pytest.raises(EnvironmentProblem, match="can't read machine code"):
        found.code(found.binaries[0])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1, "variant_id": "", "binaries": [{}]}', '{"format": 99, "variant_id": "", "binaries": []}']
)
def test_a_manifest_of_another_shape_or_format_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "copy.json").write_text(text)
    with pytest.raises(EnvironmentProblem):
        read(tmp_path / "copy.json")


OUTSIDE = ["../copy.cubin.gz", "/etc/passwd", "", ".hidden", "a/b.gz", "../../code/b.gz"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "copy.json"
    path.write_text(Manifest(variant_id="", binaries=(replace(PLAIN, file=name),)).as_json())
    with pytest.raises(EnvironmentProblem, match="is no manifest of machine code"):
        read(path)


def test_arguments_that_meet_every_condition_match() -> None:
    manifest = Manifest(variant_id="", binaries=(PLAIN,))
    assert manifest.matching("copy", arguments()) is PLAIN
    assert manifest.matching("other", arguments()) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"q_ptr": Operand(0, (63,), (1,), "bf16", aligned=False)},
        {"q_ptr": Operand(0, (64,), (1,), "fp16")},
        {"q_ptr": None},
        {"stride": 24},
        {"stride": 2**31},
        {"stride": -(2**31) - 16},
        {"unit": 2},
        {"seed": -1},
        {"seed": 2**64},
        {"WIDE": True},
        {"WIDE": 0},
    ],
    ids=str,
)
def test_arguments_that_the_code_was_not_made_for_are_refused(changes: dict[str, Any]) -> None:
    assert PLAIN.refusal(arguments(**changes)) is not None


def test_a_less_specialised_binary_takes_what_the_first_refuses() -> None:
    general = replace(PLAIN, specialization="any", conditions=PLAIN.conditions[2:])
    manifest = Manifest(variant_id="", binaries=(PLAIN, general))
    assert manifest.matching("copy", arguments()) is PLAIN
    assert manifest.matching("copy", arguments(stride=24)) is general


def test_reading_a_manifest_loads_neither_torch_nor_triton(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from flashtune.core.code.binaries import parse_manifest
path = Path({str(saved(tmp_path))!r})
found = parse_manifest(path.read_bytes(), path)
found.code(found.binaries[0])
print(*sorted({{"torch", "triton", "numpy", "sqlalchemy", "jinja2"}} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


PTX_TYPES = {"tensor_map": ".align 64 .b8", "pointer": ".u64", "fp32": ".f32", "i64": ".u64", "u64": ".u64", "i32": ".u32", "u32": ".u32"}


def layout(parameter: Parameter) -> list[str]:
    """The kernel's parameters that one becomes: itself, and behind a tensor map the shape and the strides."""
    rank = 0 if parameter.tensor_map is None else parameter.tensor_map.rank
    return [parameter.kind, *["i32"] * rank, *["i64"] * rank]


@pytest.mark.parametrize("name", ["flash_fwd", "flash_fwd_hopper"])
def test_parameters_are_those_of_the_ptx_in_order_then_two_scratch_pointers(name: str) -> None:
    chosen = family(name)
    problem = Problem(
        batch=1, heads=2, kv_heads=1, n_q=16, n_kv=512, d=64, d_v=64, dtype="fp16", features=Features(causal=True, dropout=True)
    )
    if chosen.supports(problem.spec(), H200) is not None:
        problem = replace(problem, features=Features(causal=True))
    variant = variant_of(chosen, problem.spec(), chosen.default(problem.spec(), H200))
    module = load_kernel(render(chosen, variant), f"{name}_{variant.id}")
    inputs = make_inputs(problem, device="meta", seed=2**40)
    with compiling_for(H200):
        words = inputs.keywords | provided(module, inputs.q, inputs.k)
        planned = keyword_plan(module.host, inputs.arguments, words).launches
        for (kernel, grid, args, options), launch in zip(module.launches(*inputs.arguments, **words), planned, strict=True):
            compiled = kernel.warmup(*args, grid=grid, **options)
            binary, code = from_compiled(compiled)
            entry = compiled.asm["ptx"].split(".visible .entry ")[1].split(")")[0]
            assert entry.startswith(f"{binary.entry}(")
            declared = [
                re.sub(r" \.ptr .*", "", kind).strip() for kind in re.findall(r"\.param (.+?) \w+_param_\d+", entry.replace("\t", " "))
            ]
            expected = [PTX_TYPES[kind] for parameter in binary.parameters for kind in layout(parameter)]
            assert declared == [*expected, ".u64", ".u64"]
            assert f".reqntid {binary.threads}" in compiled.asm["ptx"]
            assert binary.sha256 == hashlib.sha256(code).hexdigest()
            assert binary.kernel == kernel.__name__
            assert binary.launch_pdl == options.get("launch_pdl", False)
            assert binary.arch == "sm_90a"
            assert (binary.global_scratch_bytes, binary.profile_scratch_bytes) == (0, 0)
            # Meta tensors have the address 0 and lie where the JIT's own conditions hold.
            assert binary.refusal(launch.arguments) is None


def test_elements_of_tuples_are_parameters_of_their_own() -> None:
    outs, lses = ([torch.empty(size, dtype=dtype, device="meta") for _ in range(3)] for size, dtype in (((8, 64), torch.half), (8, None)))
    arguments = (tuple(outs[:2]), tuple(lses[:2]), outs[2], lses[2], 8, 1, 8, 512, 512, 64, 64, 16, 32, 64)
    with compiling_for(H200):
        binary, _ = from_compiled(merge_kernel.warmup(*arguments, grid=(1,), num_warps=4))
    names = ["outs.0", "outs.1", "lses.0", "lses.1", "out", "lse", "rows", "heads", "per_head", "stride_b", "stride_h", "stride_n"]
    assert [(x.name, x.position) for x in binary.parameters] == [(name, at) for at, name in enumerate(names)]
    assert [x.kind for x in binary.parameters] == ["pointer"] * 6 + ["i32"] * 6
    assert {(x.name, x.position): x.value for x in binary.conditions if x.rule == "equals"} == {
        ("D", 12): 64, ("ALIGNED", 13): 16, ("ROWS", 14): 32, ("COLUMNS", 15): 64,
    }  # fmt: skip
