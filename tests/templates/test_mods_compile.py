"""Masks and scores as code, compiled for a GPU that isn't here: the code is kept, and another process finds it for other lengths."""

from pathlib import Path
from typing import Any

import mod_compiling
import pytest
from forked import python

from flashtune.dispatch.flex_kernels import added, kept


def found_by_another_process(name: str, direction: str, *numbers: int) -> list[str]:
    return python("import sys, mod_compiling; mod_compiling.main(*sys.argv[1:])", name, direction, *numbers).splitlines()


@pytest.mark.parametrize(("name", "direction"), [("padding", "fwd"), ("signed_alibi", "bwd")])
def test_another_process_finds_the_code_for_other_lengths(
    name: str, direction: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE", str(tmp_path))
    variant, text, module, plans = mod_compiling.planned(name, direction)
    launches = sum(len(plan.launches) for plan in plans)
    assert found_by_another_process(name, direction, 1056) == [f"0 {launches}"]
    manifest, codes = None, {}
    for binary, code in mod_compiling.compiled(module, plans):
        manifest = added(manifest, variant, text, binary)
        codes[binary.sha256] = code
    assert manifest is not None
    written = kept(text, manifest, codes)
    assert [written.code(binary) for binary in written.binaries] == [codes[binary.sha256] for binary in written.binaries]
    assert found_by_another_process(name, direction, 1056, 1059, 131) == [f"{launches} {launches}"] * 3


@pytest.mark.parametrize("template", ["", "hopper"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["gated", "dilated", "pairs", "shifted"])
def test_functions_compile(name: str, direction: str, template: str) -> None:
    _, _, module, plans = mod_compiling.planned(name, direction, template=template and f"flash_{direction}_{template}")
    assert all(code for _, code in mod_compiling.compiled(module, plans))
