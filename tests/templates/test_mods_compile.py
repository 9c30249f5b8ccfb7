"""Masks and scores as code, compiled for a GPU that isn't here: the code is kept, and another process finds it for other lengths."""

from pathlib import Path

import mod_compiling
import pytest
from forked import python

from flashtune.dispatch.plans.kernels import _kept_binaries
from flashtune.templates import family

CASES = ("padding", "fwd"), ("relative under causal", "bwd")


def found_by_another_process(*numbers: int) -> list[str]:
    words = [word for name, direction in CASES for n in numbers for word in (name, direction, str(n))]
    return python("import sys, mod_compiling; mod_compiling.main(*sys.argv[1:])", *words).splitlines()


def test_another_process_finds_the_code_for_other_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE", str(tmp_path))
    planned = [mod_compiling.planned(*case) for case in CASES]
    launches = [sum(len(plan.launches) for plan in plans) for *_, plans in planned]
    assert found_by_another_process(1056) == [f"0 {number}" for number in launches]
    for variant, _, module, plans in planned:
        written, codes = None, {}
        for binary, code in mod_compiling.compiled(module, plans):
            codes[binary.sha256] = code
            written = _kept_binaries(family(variant.template), variant, written, [binary], lambda one, codes=codes: codes[one.sha256])
        assert written is not None
        assert [written.code(binary) for binary in written.binaries] == [codes[binary.sha256] for binary in written.binaries]
    assert found_by_another_process(1056, 1059, 131) == [f"{number} {number}" for number in launches for _ in range(3)]


@pytest.mark.parametrize(
    ("name", "direction", "template"),
    [
        ("gated", "fwd", ""),
        ("gated", "bwd", "hopper"),
    ],
)
def test_functions_compile(name: str, direction: str, template: str) -> None:
    _, _, module, plans = mod_compiling.planned(name, direction, template=template and f"flash_{direction}_{template}")
    assert all(code for _, code in mod_compiling.compiled(module, plans))
