"""From variant to module: shipped files first, without Jinja; what was not shipped is rendered."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashtune.core.config import Variant
from flashtune.core.errors import InputError
from flashtune.core.problem import Features, Problem
from flashtune.core.target import find_target
from flashtune.dispatch import kernels
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
    kernels._exists.cache_clear()
    yield package
    kernels._exists.cache_clear()
    for name in [name for name in sys.modules if name.startswith("pretended_kernels")]:
        del sys.modules[name]


def test_a_shipped_file_serves_and_needs_no_template(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Variant(template="flash_fwd", template_hash="5" * 16, spec=SPEC, config=CONFIG)
    (shipped / f"flash_fwd_{recorded.id}.py").write_text("SHIPPED = True\n")
    monkeypatch.setitem(sys.modules, "flashtune.templates.rendering", None)
    found = kernels.variant(POINTERS, SPEC, CONFIG, known_hash="5" * 16)
    assert found == recorded
    assert kernels.load(POINTERS, found).SHIPPED is True


def test_what_was_not_shipped_is_rendered_from_the_installed_template(shipped: Path) -> None:
    found = kernels.variant(POINTERS, SPEC, CONFIG, known_hash="5" * 16)
    assert found == variant_of(POINTERS, SPEC, CONFIG)
    module = kernels.load(POINTERS, found)
    assert module.accepts(*(torch.zeros(1, 1, 4, 32),) * 3, None)
    assert callable(module.launch) and kernels.load(POINTERS, found) is module


def test_a_config_outside_the_declared_space_names_no_module(shipped: Path) -> None:
    with pytest.raises(InputError, match="outside the declared space"):
        kernels.variant(POINTERS, SPEC, CONFIG.replace(BLOCK_M="../../etc"), known_hash="5" * 16)


def test_the_shipped_kernels_package_can_be_asked() -> None:
    found = kernels.variant(POINTERS, SPEC, CONFIG)
    code = f"from flashtune.dispatch import kernels; print(kernels._exists('flashtune.kernels_generated.flash_fwd_{'0' * 16}'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False" and len(found.id) == 16
