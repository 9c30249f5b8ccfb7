"""Kernels of a user's own search are compiled into the user's cache, once, and served from there."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs

from flashtune import templates
from flashtune.cli import search
from flashtune.core.code import cache as kernel_cache
from flashtune.core.code import shipped as shipped_kernels
from flashtune.core.code.binaries import source_digest
from flashtune.core.code.launching import compiler_options
from flashtune.core.gpu.target import find_target
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch.plans import kernels
from flashtune.dispatch.state.context import Memo
from flashtune.templates import family
from flashtune.templates.rendering import render
from flashtune.tuner.publish import machine_code, winners
from flashtune.tuner.publish.machine_code import Built, triton_version, with_files
from flashtune.tuner.publish.winners import variant_for
from flashtune.tuner.replies import Failed, MachineCode

H200 = find_target("h200")
ROW = next(record for record in Library.of(shipped_path()).records() if record.outcome.template == "flash_decode")
VARIANT = variant_for(ROW)
SHIPPED = shipped_kernels.shipped_manifest(shipped_kernels.PACKAGE, VARIANT.id, "90")
assert SHIPPED is not None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are a user's own: the package ships no kernel of theirs."""
    (tmp_path / "no_kernels").mkdir()
    (tmp_path / "no_kernels" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "PACKAGE", "no_kernels")
    shipped_kernels.shipped_index.cache_clear()


@pytest.mark.usefixtures("nothing_shipped")
def test_a_winner_is_compiled_once_and_found_by_dispatch(cache: Path) -> None:
    assert kernels.manifest(VARIANT, "90") is None
    assert winners.compile_winners([ROW, ROW], H200, jobs=1) == {}
    found = kernels.manifest(VARIANT, "90")
    assert found is not None and found.folder is not None and found.folder.is_relative_to(cache)
    assert {binary.kernel for binary in found.binaries} >= {"attention_forward"}
    for binary in found.binaries:
        assert found.code(binary)[:4] == b"\x7fELF"
    assert kernels.manifest(VARIANT, "80") is None
    assert kernels.manifest(VARIANT, "gfx942") is None
    before = found.folder.stat().st_mtime_ns
    assert winners.compile_winners([ROW], H200, jobs=1) == {}
    assert found.folder.stat().st_mtime_ns == before
    if {binary.triton for binary in found.binaries} == {"3.6.0"}:
        assert [binary.sha256 for binary in found.binaries] == [binary.sha256 for binary in SHIPPED.binaries]


@pytest.mark.usefixtures("nothing_shipped", "cache")
def test_machine_code_of_an_earlier_text_serves_nothing_and_is_compiled_anew() -> None:
    """Its launches take other arguments than those of today's text."""
    binaries = tuple(replace(binary, triton=triton_version()) for binary in SHIPPED.binaries)
    for digest, found in (("0" * 64, False), (SHIPPED.source_sha256, True)):
        manifest = replace(SHIPPED, binaries=binaries, source_sha256=digest)
        kernel_cache.keep("", *with_files(Built(manifest=manifest, codes=tuple(map(SHIPPED.code, SHIPPED.binaries))), "kernel"))
        assert (kernels.manifest(VARIANT, "90") is not None) is found
        assert (Memo().kernels.machine_code(family(VARIANT.template), VARIANT, H200) is not None) is found
        assert [order.variant_id for order in winners._missing([ROW], H200)] == ([] if found else [VARIANT.id])


@pytest.mark.usefixtures("nothing_shipped", "cache")
def test_a_template_with_host_code_in_its_text_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    own_host = replace(family(VARIANT.template), host=None)
    monkeypatch.setattr(templates, "_found", lambda: (own_host,))
    manifest = replace(SHIPPED, source_sha256=source_digest(render(own_host, VARIANT)))
    kernel_cache.keep("", *with_files(Built(manifest=manifest, codes=tuple(map(SHIPPED.code, SHIPPED.binaries))), "kernel"))
    assert Memo().kernels.machine_code(own_host, VARIANT, H200) is None


@pytest.mark.usefixtures("nothing_shipped", "cache")
def test_a_winners_fallback_is_compiled_with_it() -> None:
    row = next(record for record in Library.of(shipped_path()).records() if record.fallback is not None)
    fallback = row.as_fallback()
    assert fallback is not None
    assert [order.variant_id for order in winners._missing([row, row], H200)] == [variant_for(row).id, variant_for(fallback).id]


def test_what_is_shipped_comes_first(cache: Path) -> None:
    shipped = kernels.manifest(VARIANT, "90")
    assert shipped is not None and shipped.archive is not None and shipped.folder is None
    assert not cache.exists()


@pytest.mark.usefixtures("nothing_shipped")
def test_a_cache_that_others_can_write_to_serves_nothing(cache: Path) -> None:
    shipped = SHIPPED
    kernel_cache.keep("", *with_files(Built(manifest=shipped, codes=tuple(map(shipped.code, shipped.binaries))), "kernel"))
    assert kernels.manifest(VARIANT, "90") is not None
    cache.chmod(0o777)
    assert kernels.manifest(VARIANT, "90") is None


@pytest.mark.usefixtures("nothing_shipped")
def test_a_winner_that_a_search_kept_meanwhile_is_not_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = SHIPPED
    binaries = tuple(replace(binary, triton=triton_version()) for binary in shipped.binaries)
    built = Built(manifest=replace(shipped, binaries=binaries), codes=tuple(map(shipped.code, shipped.binaries)))
    monkeypatch.setattr(winners, "build", lambda order, **_: built)
    code = winners.compile_winner(ROW, H200)
    assert isinstance(code, MachineCode) and kernels.manifest(VARIANT, "90") is None
    winners.keep(code)
    found = kernels.manifest(VARIANT, "90")
    assert found is not None and found.folder is not None and found.folder.is_relative_to(cache)
    assert [found.code(binary) for binary in found.binaries] == list(built.codes)
    monkeypatch.setattr(winners, "build_all", lambda orders, *, jobs: iter([(order, "again") for order in orders]))
    assert winners.compile_winners([ROW], H200, jobs=1) == {}
    monkeypatch.setattr(winners, "build", lambda order, **_: 1 / 0)
    assert winners.compile_winner(ROW, H200) == MachineCode()
    winners.keep(MachineCode())


def test_a_search_keeps_what_its_trials_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's cache is asked for just what a trial's launch asks for; what ships is compiled anew."""
    asked: list[tuple[dict[str, Any], bool]] = []
    here: Any = knobs.cache

    def warmup(*_: object, grid: object, **words: Any) -> None:
        asked.append((words, here.dir == before))

    before, kernel = here.dir, SimpleNamespace(__name__="k", warmup=warmup)
    module = SimpleNamespace(launches=lambda: [(kernel, (1,), (), {"num_warps": 4})])
    binary = SimpleNamespace(kernel="k", specialization="any_size", sha256="s")
    monkeypatch.setattr("flashtune.templates.loading.load_kernel", lambda *_: module)
    monkeypatch.setattr("flashtune.core.code.compiled.from_compiled", lambda *_, **__: (binary, b""))
    monkeypatch.setattr(machine_code, "_typical_calls", lambda *_: iter([("any_size", (), {})]))
    order = machine_code.Order(text="", stem="s", variant_id="v", spec=VARIANT.spec, target=H200)
    for fresh in (False, True):
        machine_code.build(order, fresh=fresh)
    launched = compiler_options({"num_warps": 4})
    assert asked == [(launched, True), ({**launched, "ptx_options": "-suppress-debug-info"}, False)]


@pytest.mark.usefixtures("nothing_shipped", "cache")
def test_a_winner_that_cannot_be_kept_meanwhile_is_left_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "build", lambda order, **_: 1 / 0)
    failed = winners.compile_winner(ROW, H200)
    assert isinstance(failed, Failed) and failed.reason.startswith("ZeroDivisionError")

    def full(*_: object) -> None:
        raise EnvironmentProblem("no space left: free some")

    monkeypatch.setattr(kernel_cache, "keep", full)
    winners.keep(MachineCode(text="", manifest=SHIPPED))
    monkeypatch.setattr(winners, "build_all", lambda orders, *, jobs: iter([(order, "again") for order in orders]))
    assert list(winners.compile_winners([ROW], H200, jobs=1).values()) == ["again"]


def test_a_search_whose_code_cannot_be_kept_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> dict[str, str]:
        raise EnvironmentProblem("no space left: free some")

    monkeypatch.setattr(winners, "compile_winners", full)
    search.keep_machine_code([ROW], H200, jobs=1)
    assert "no space left" in capsys.readouterr().err
    monkeypatch.setattr(winners, "compile_winners", lambda *_, **__: {"flash_decode_1": "CompilationError: no"})
    search.keep_machine_code([ROW], H200, jobs=1)
    assert "no machine code cached of flash_decode_1: CompilationError: no" in capsys.readouterr().err
