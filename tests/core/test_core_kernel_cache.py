"""The user's own kernels: kept whole, found by id and architecture, and never read where someone else could have written."""

import gzip
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from halted import halted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashtune.core.code import cache as kernel_cache
from flashtune.core.code.binaries import Binary, Condition, Manifest, Parameter, TensorMap
from flashtune.core.system.errors import EnvironmentProblem

CODE = b"\x7fELF, said the cubin"
TEXT = "LAUNCHED = True\n"
ID = "0123456789abcdef"
BINARY = Binary(
    kernel="copy",
    specialization="any_size",
    entry="copy",
    arch="sm_90a",
    triton="3.6.0",
    threads=128,
    shared_bytes=0,
    cluster=1,
    launch_pdl=False,
    cooperative=False,
    global_scratch_bytes=0,
    profile_scratch_bytes=0,
    parameters=(),
    conditions=(),
    sha256=hashlib.sha256(CODE).hexdigest(),
    file="copy.cubin.gz",
)
MANIFEST = Manifest(variant_id=ID, binaries=(BINARY,), source_sha256=hashlib.sha256(TEXT.encode()).hexdigest())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def keep(manifest: Manifest = MANIFEST, text: str = TEXT) -> Path:
    return kernel_cache.keep(text, manifest, {"copy.cubin.gz": gzip.compress(CODE, mtime=0)})


def test_what_is_kept_is_found_by_id_and_architecture(cache: Path) -> None:
    assert kernel_cache.find(ID, "sm_90a") is None
    folder = keep()
    assert folder.is_relative_to(cache)
    found = kernel_cache.find(ID, "sm_90a")
    assert found is not None
    assert found.binaries == (BINARY,)
    assert found.code(BINARY) == CODE
    assert (folder / "module.py").read_text() == TEXT
    assert kernel_cache.find(ID, "sm_80") is None
    assert kernel_cache.find("f" * 16, "sm_90a") is None
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}


@pytest.mark.parametrize("name", ["../../../etc", "", "0123", "*"])
def test_only_ids_are_looked_for(cache: Path, name: str) -> None:
    keep()
    assert kernel_cache.find(name, "sm_90a") is None


def test_keeping_anew_replaces_and_leaves_nothing_beside(cache: Path) -> None:
    keep()
    other = replace(MANIFEST, source_sha256=hashlib.sha256(b"other").hexdigest())
    folder = keep(other, "other")
    found = kernel_cache.find(ID, "sm_90a")
    assert found is not None and found.source_sha256 == other.source_sha256
    assert [path.name for path in folder.parent.iterdir()] == [ID]


def test_a_kernel_that_a_killed_search_was_keeping_goes_with_the_next_one(cache: Path) -> None:
    with halted(lambda *_: keep(), cache):
        (place,) = (cache / "kernels").iterdir()
        assert len(list(place.iterdir())) == 1
    assert [keep()] == list(place.iterdir())


def test_a_second_triton_has_a_place_of_its_own_and_the_last_counts(cache: Path) -> None:
    old = keep()
    os.utime(old, ns=(1, 1))
    newer = replace(MANIFEST, binaries=(replace(BINARY, triton="3.7.0"),))
    keep(newer)
    found = kernel_cache.find(ID, "sm_90a")
    assert found is not None and found.binaries[0].triton == "3.7.0"
    named = kernel_cache.find(ID, "sm_90a", "3.6.0")
    assert named is not None and named.binaries == (BINARY,)
    assert kernel_cache.find(ID, "sm_90a", "3.8.0") is None
    assert old.is_dir()


@pytest.mark.parametrize("version", ["3.5.0", "3.7.0"])
def test_another_place_without_it_changes_nothing(cache: Path, version: str) -> None:
    keep()
    keep(replace(MANIFEST, variant_id="f" * 16, binaries=(replace(BINARY, triton=version),)))
    assert kernel_cache.find(ID, "sm_90a") is not None


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bytes": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"),
    "manifest": lambda folder: (folder / "manifest.json").write_text("{}"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "no digest": lambda folder: (folder / "digest").unlink(),
    "open digest": lambda folder: (folder / "digest").chmod(0o666),
    "other code": lambda folder: (folder / "copy.cubin.gz").write_bytes(gzip.compress(CODE + b"!")),
    "no code": lambda folder: (folder / "copy.cubin.gz").unlink(),
    "open manifest": lambda folder: (folder / "manifest.json").chmod(0o666),
    "open code": lambda folder: (folder / "copy.cubin.gz").chmod(0o620),
    "open folder": lambda folder: folder.chmod(0o777),
    "open above": lambda folder: folder.parent.chmod(0o777),
    "open cache": lambda folder: folder.parent.parent.parent.chmod(0o777),
    "a link": lambda folder: (folder.rename(folder.with_name("elsewhere")), folder.symlink_to("elsewhere")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_others_could_have_written_and_what_is_not_whole_is_passed_over(cache: Path, damage: Callable[[Path], object]) -> None:
    damage(keep())
    assert kernel_cache.find(ID, "sm_90a") is None


def test_code_that_was_changed_after_it_was_found_is_refused_before_it_is_loaded(cache: Path) -> None:
    folder = keep()
    found = kernel_cache.find(ID, "sm_90a")
    assert found is not None
    (folder / "copy.cubin.gz").write_bytes(gzip.compress(CODE + b"!"))
    with pytest.raises(EnvironmentProblem, match="isn't the machine code"):
        found.code(BINARY)


PARAMETERS = (
    Parameter(name="q", position=0, kind="tensor_map", element="bf16", tensor_map=TensorMap(9, 2, (1, 1, 64, 128), 3)),
    Parameter(name="out", position=3, kind="pointer", element="bf16"),
    Parameter(name="n_q", position=17, kind="i32"),
)
CONDITIONS = (Condition(name="n_q", position=17, rule="multiple_of", value=16), Condition("BLOCK_M", 21, "equals", 128))
RICH = replace(MANIFEST, binaries=(replace(BINARY, parameters=PARAMETERS, conditions=CONDITIONS),))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_entry_with_any_changed_character_counts_as_none_until_it_is_kept_anew(cache: Path, data: st.DataObject) -> None:
    folder = keep(RICH)
    path = folder / data.draw(st.sampled_from(["manifest.json", "manifest.json", "digest", "copy.cubin.gz"]))
    content = bytearray(path.read_bytes())
    # Digits are what a parser takes: positions, boxes, conditions, sizes.
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    place = data.draw(st.sampled_from(digits or [0]) | st.integers(0, len(content) - 1))
    other = data.draw(st.sampled_from(b'0123456789abcdef," ') | st.integers(0, 255))
    kind = data.draw(st.sampled_from(["changed", "inserted", "dropped"]))
    content[place : place + (kind != "inserted")] = b"" if kind == "dropped" else bytes([other])
    same = bytes(content) == path.read_bytes()
    path.write_bytes(content)
    assert (kernel_cache.find(ID, "sm_90a") is not None) == same
    keep(RICH)
    found = kernel_cache.find(ID, "sm_90a")
    assert found is not None and found.binaries == RICH.binaries


def test_every_changed_digit_of_a_manifest_is_noticed(cache: Path) -> None:
    path = keep(RICH) / "manifest.json"
    text = path.read_text()
    for place, character in enumerate(text):
        if character.isdigit():
            path.write_text(text[:place] + str((int(character) + 1) % 10) + text[place + 1 :])
            assert kernel_cache.find(ID, "sm_90a") is None, text[max(0, place - 40) : place + 1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["manifest.json", "copy.cubin.gz", "digest", "."])
def test_another_users_files_are_passed_over(cache: Path, name: str) -> None:
    os.chown(keep() / name, 12345, 12345)
    assert kernel_cache.find(ID, "sm_90a") is None
