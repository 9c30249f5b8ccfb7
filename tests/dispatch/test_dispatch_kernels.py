"""From variant to module: shipped files first, without Jinja; what was not shipped is rendered."""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import python

from flashtune import dispatch
from flashtune.core.code import shipped as shipped_kernels
from flashtune.core.code.archive import archive_bytes, pack
from flashtune.core.code.binaries import Manifest
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Variant
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.dispatch.plans import kernels
from flashtune.dispatch.state.context import Memo
from flashtune.templates import family
from flashtune.templates.rendering import variant_of

H200 = find_target("h200")
POINTERS = family("flash_fwd")
SPEC = Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=64, d=32, d_v=32, dtype="fp16", features=Features(causal=True)).spec()
CONFIG = POINTERS.default(SPEC, H200)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package in the place of flashtune.kernels_generated."""
    package = tmp_path / "pretended_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "PACKAGE", "pretended_kernels")
    yield package
    shipped_kernels.shipped_index.cache_clear()
    shipped_kernels.shipped_archive.cache_clear()
    for name in [name for name in sys.modules if name.startswith("pretended_kernels")]:
        del sys.modules[name]


def ship(package: Path, variant: Variant) -> dict[str, Any]:
    """Put a kernel into the package and its archive as `flashtune generate` does, without a binary; returns the index's fields."""
    manifest = Manifest(variant_id=variant.id, binaries=()).as_json().encode()
    packed = pack(manifest)
    content, sha256 = archive_bytes([packed])
    (package / "sm90.kernels").write_bytes(content)
    kernel = {"variant_id": variant.id, "template": variant.template, "arch": "90", "path": "sm90/forward/pointers.py"}
    kernel |= {"manifest": [hashlib.sha256(manifest).hexdigest(), 0, 0, len(manifest)]}
    archives = {"90": {"sha256": sha256, "groups": [[len(packed), len(manifest)]]}}
    fields = {"format": 2, "archives": archives, "kernels": [kernel], "files": {}}
    (package / "index.json").write_text(json.dumps(fields))
    return fields


def test_a_shipped_kernel_serves_and_needs_no_template(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship(shipped, Variant(template="flash_fwd", spec=SPEC, config=CONFIG))
    monkeypatch.setitem(sys.modules, "flashtune.templates.rendering", None)
    found = kernels.variant(POINTERS, SPEC, CONFIG)
    assert kernels.manifest(found, "90") is not None
    host = kernels.host_code(POINTERS, found)
    assert host.module is None and host.accepts(*(torch.zeros(1, 1, 4, 32),) * 3, None)


def test_what_was_not_shipped_is_rendered_from_the_installed_template(shipped: Path) -> None:
    found = kernels.variant(POINTERS, SPEC, CONFIG)
    assert found == variant_of(POINTERS, SPEC, CONFIG)
    module = kernels.load(POINTERS, found)
    assert module.accepts(*(torch.zeros(1, 1, 4, 32),) * 3, None)
    assert kernels.load(POINTERS, found).module is module.module


def test_a_config_outside_the_declared_space_names_no_module(shipped: Path) -> None:
    with pytest.raises(InputError, match="outside the declared space"):
        kernels.variant(POINTERS, SPEC, CONFIG.replace(BLOCK_M="../../etc"))


def test_a_kernel_that_the_index_does_not_name_is_not_loaded(shipped: Path) -> None:
    found = variant_of(POINTERS, SPEC, CONFIG)
    ship(shipped, replace(found, config=CONFIG.replace(BLOCK_N=256)))
    assert kernels.manifest(found, "90") is None


@pytest.mark.parametrize("path", ["../../stranger.py", "/tmp/stranger.py", "sm90/.hidden.py", "os.path", "sm90//x.py", ""])
def test_an_index_that_names_a_file_elsewhere_is_refused(shipped: Path, path: str) -> None:
    found = variant_of(POINTERS, SPEC, CONFIG)
    ship(shipped, found)
    text = (shipped / "index.json").read_text().replace("sm90/forward/pointers.py", path)
    (shipped / "index.json").write_text(text)
    with pytest.raises(EnvironmentProblem, match="is no index of generated kernels"):
        kernels.manifest(found, "90")


@pytest.mark.parametrize("damage", ["another archive", "cut", "another manifest", "place outside"])
def test_a_damaged_archive_is_warned_of_once_and_leaves_the_kernel_to_triton(shipped: Path, damage: str) -> None:
    found = variant_of(POINTERS, SPEC, CONFIG)
    fields = ship(shipped, found)
    path = shipped / "sm90.kernels"
    if damage == "another archive":
        path.write_bytes(archive_bytes([pack(b"another")])[0])
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "another manifest":
        fields["kernels"][0]["manifest"][0] = "0" * 64
    else:
        fields["kernels"][0]["manifest"][3] += 1
    (shipped / "index.json").write_text(json.dumps(fields))
    memo = Memo()
    with pytest.warns(RuntimeWarning, match=r"sm90\.kernels.*install flashtune.*; until then Triton compiles flash_fwd") as warned:
        served = [memo.kernels.machine_code(POINTERS, found, H200) for _ in range(2)]
    assert served == [None] * 2 and len(warned) == 1
    assert kernels.load(POINTERS, found).module is not None


def test_a_kernel_whose_archive_is_not_installed_is_compiled_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features())
    monkeypatch.setattr(shipped_kernels, "find_archive", lambda *_: None)
    shipped_kernels.shipped_archive.cache_clear()
    dispatch.reload()
    found = dispatch.explain_problem(problem, "h200")
    shipped_kernels.shipped_archive.cache_clear()
    assert found.kind == "exact"
    assert "its machine code is in flashtune-kernels-sm90, which isn't installed, so Triton compiles it at the first call" in found.reason


def test_serving_one_shipped_kernel_imports_neither_triton_nor_sql_nor_jinja() -> None:
    code = """
import sys
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch.plans import kernels
from flashtune.templates import family
before = set(sys.modules)
record = next(r for r in Library.of(shipped_path()).records() if r.outcome.template == "flash_decode")
kinds = set(sys.modules) - before
for name in kinds: sys.modules.pop(name)
chosen = family(record.outcome.template)
found = kernels.variant(chosen, record.problem.spec(), record.outcome.config)
shipped, host = kernels.manifest(found, "90"), kernels.host_code(chosen, found)
new = set(sys.modules) - before
print(shipped is not None and host.host is not None and host.module is None)
print(*sorted(new & {"jinja2", "sqlalchemy", "triton", "flashtune.templates.rendering"}))
"""
    assert python(code).split("\n")[:2] == ["True", ""]
