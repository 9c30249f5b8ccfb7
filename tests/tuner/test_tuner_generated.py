"""The folder of generated kernels: laid out by what they serve, written and removed by its index alone."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import Result
from commands import flashtune
from shipped_rows import with_kernels

from flashtune.cli.generate import in_a_checkout
from flashtune.core.code.index import INDEX, read_index
from flashtune.core.problems.config import settles
from flashtune.core.records.results import TuningRecord
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.db.library import shipped_path
from flashtune.templates import BITS, family
from flashtune.tuner.publish.generated import arrange, differing, index_text, selected, text_files, write
from flashtune.tuner.publish.winners import variant_for

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "flashtune" / "kernels_generated"


# Not before a test needs them, since every worker collects this file.
@cache
def shipped() -> list[TuningRecord]:
    return with_kernels(bits=BITS)


@cache
def decodes() -> list[TuningRecord]:
    return [record for record in shipped() if record.outcome.template == "flash_decode"]


def generated(records: list[TuningRecord]) -> dict[str, bytes]:
    arranged = arrange(records)
    files = text_files(arranged)
    return {**files, INDEX: index_text(arranged, files, {}).encode()}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_paths_say_architecture_pass_spec_and_tile() -> None:
    for one in arrange(shipped()):
        arch, kind, spec, name = one.kernel.path.split("/")
        config = one.variant.config
        assert arch == "sm90"
        assert kind == ("decode" if one.variant.template == "flash_decode" else "backward" if "_bwd" in one.variant.template else "forward")
        d, dtype, *flags = spec.split("_")
        sizes = dict.fromkeys((one.variant.spec.d, one.variant.spec.d_v))
        assert ("d" + "x".join(map(str, sizes)), one.variant.spec.dtype) == (d, dtype)
        assert ("causal" in flags) == one.variant.spec.causal
        assert f"_{config['BLOCK_M']}x{config['BLOCK_N']}" in name


def test_every_distinct_winner_has_one_path_of_its_own_and_all_its_rows() -> None:
    arranged = arrange(shipped())
    assert len({one.kernel.path for one in arranged}) == len({one.kernel.variant_id for one in arranged}) == len(arranged)
    assert sum(len(one.records) for one in arranged) == len(shipped())


def test_each_shipped_row_that_settles_maxima_has_its_fallback_shipped() -> None:
    kernels = {kernel.variant_id: kernel for kernel in read_index(PACKAGE).kernels}
    settling = [record for record in shipped() if settles(record.outcome.config)]
    fallbacks = [fallback for record in settling if (fallback := record.as_fallback()) is not None]
    assert len(fallbacks) > len(settling) // 2
    for fallback in fallbacks:
        assert not settles(fallback.outcome.config)
        assert kernels[variant_for(fallback).id].manifest is not None
    of_fallbacks = {(one.variant.id, fallback.key) for one in arrange(shipped()) for fallback in one.fallbacks}
    assert of_fallbacks == {(variant_for(fallback).id, fallback.key) for fallback in fallbacks}


def test_a_kernel_that_is_only_a_fallback_is_listed_as_one(tmp_path: Path) -> None:
    record = next(record for record in shipped() if record.fallback is not None)
    arranged = arrange([record])
    assert sorted((len(one.records), len(one.fallbacks)) for one in arranged) == [(0, 1), (1, 0)]
    assert [one.fallbacks[0].outcome for one in arranged if one.fallbacks] == [record.fallback]
    write(generated([record]), tmp_path)
    assert "measured, fallback |" in (tmp_path / "README.md").read_text()


def test_names_do_not_depend_on_the_order_of_the_rows() -> None:
    some = shipped()[::3]
    assert generated(some) == generated(some[::-1])


def test_a_kernel_that_wins_on_two_architectures_stands_under_both(tmp_path: Path) -> None:
    [row, *_] = decodes()
    elsewhere = replace(row, key=replace(row.key, gpu="a100-80gb"))
    one, other = arrange([row, elsewhere])
    assert (one.kernel.arch, other.kernel.arch) == ("80", "90")
    write(generated([row, elsewhere]), tmp_path)
    assert read_index(tmp_path).kernels == (one.kernel, other.kernel)


def test_the_package_shows_a_kernel_of_each_family() -> None:
    shown = selected(arrange(shipped()))
    files = read_index(PACKAGE).files
    assert {one.kernel.path for one in shown} == {path for path in files if path.endswith(".py") and "__init__" not in path}
    assert {one.variant.template for one in shown} == {record.outcome.template for record in shipped()}
    assert len(shown) == len({one.variant.template for one in shown})
    listed = (PACKAGE / "README.md").read_text()
    assert not [one.kernel.path for one in shown if f"]({one.kernel.path})" not in listed]


def test_nothing_else_lies_in_the_shipped_folder() -> None:
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=PACKAGE, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("no git checkout")
    found = {name for name in tracked.stdout.splitlines() if (PACKAGE / name).exists()}
    assert found == {"__init__.py", INDEX, *read_index(PACKAGE).files}


def test_writing_twice_changes_nothing_and_removes_nothing(tmp_path: Path) -> None:
    files = generated(decodes())
    assert sorted(write(files, tmp_path).written) == sorted(files)
    assert snapshot(tmp_path) == files
    changes = write(files, tmp_path)
    assert (changes.written, changes.removed, changes.left) == ((), (), ())
    assert differing(files, tmp_path) == []


def test_what_no_longer_wins_goes_and_with_it_its_folders(tmp_path: Path) -> None:
    write(generated(decodes()), tmp_path)
    fewer = generated(decodes()[:1])
    assert differing(fewer, tmp_path) != []
    changes = write(fewer, tmp_path)
    assert changes.removed
    assert snapshot(tmp_path) == fewer
    assert not [path for path in tmp_path.rglob("*") if path.is_dir() and not any(path.iterdir())]


def test_a_strangers_files_stay_whatever_their_names(tmp_path: Path) -> None:
    write(generated(decodes()), tmp_path)
    left_out = next(one.variant.id for one in arrange(decodes()) if len(one.records) == 1 and not one.fallbacks)
    others = [record for record in decodes() if record.outcome.variant_id != left_out]
    # Another kernel's name may be shorter without it.
    stale, *_ = sorted({one.kernel.path for one in arrange(decodes())} - {one.kernel.path for one in arrange(others)})
    mine = {
        f"flash_decode_{'0' * 16}.py": "mine",
        "sm90/decode/notes.txt": "mine",
        str(Path(stale).with_name("other.py")): "mine",
        "__init__.py": "mine",
    }
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    changes = write(generated(others), tmp_path)
    assert stale in changes.removed
    assert {name: (tmp_path / name).read_text() for name in mine} == mine


def test_a_stale_file_that_someone_changed_is_left_and_named(tmp_path: Path) -> None:
    write(generated(decodes()), tmp_path)
    changed = arrange(decodes())[0].kernel.path
    (tmp_path / changed).write_text("mine")
    changes = write(generated([]), tmp_path)
    assert changes.left == (changed,)
    assert (tmp_path / changed).read_text() == "mine"


def test_an_index_of_someone_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"mine": true}')
    with pytest.raises(EnvironmentProblem, match="is no index of generated kernels"):
        write(generated(decodes()), tmp_path)
    assert snapshot(tmp_path) == {INDEX: b'{"mine": true}'}


@pytest.mark.parametrize("name", ["../precious.txt", "/precious.txt", "sm90/../../precious.txt"])
def test_an_index_that_names_files_elsewhere_removes_nothing(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (tmp_path / "precious.txt").write_text("precious")
    (folder / INDEX).write_text(json.dumps({"format": 2, "archives": {}, "kernels": [], "files": {name: "0" * 64}}))
    with pytest.raises(EnvironmentProblem):
        write(generated([]), folder)
    assert (tmp_path / "precious.txt").read_text() == "precious"


def run_generate(*words: str) -> Result:
    return flashtune("generate", *words)


def test_an_installed_package_is_never_written_without_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pip install` lays it out: site-packages/flashtune/kernels_generated, with no pyproject.toml of ours above it."""
    package = tmp_path / "site-packages" / "flashtune" / "kernels_generated"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    files = generated(decodes())
    write(files, package)
    before = snapshot(tmp_path)
    monkeypatch.setattr("flashtune.cli.generate.shipped_folder", lambda: package)
    for words in ((), ("--db", str(shipped_path())), ("--gpu-name", "h100")):
        refused = run_generate(*words)
        assert refused.exit_code == 2, refused.output
        assert "--out" in refused.stderr and len(refused.stderr.strip().splitlines()) == 1
        assert snapshot(tmp_path) == before
    # No row is of a GPU that Triton doesn't compile for.
    assert run_generate("--gpu-name", "v100", "--check").exit_code == 5
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("place", ["file/kernels", "/proc/kernels", "strangers"])
def test_a_folder_that_cant_be_written_is_refused_before_anything_is_compiled(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / INDEX).write_text('{"mine": true}')
    before, compiled = snapshot(tmp_path), list[object]()
    monkeypatch.setattr("flashtune.tuner.publish.machine_code.build_all", lambda orders, jobs: compiled.append(orders) or ())
    refused = run_generate("--out", str(tmp_path / place), "--rebuild", "--gpu-name", "h200")
    assert refused.exit_code == EnvironmentProblem.exit_code, refused.output
    assert str(tmp_path / place) in refused.stderr and len(refused.stderr.strip().splitlines()) == 1
    assert not compiled and snapshot(tmp_path) == before


def test_a_checkout_is_told_by_its_own_project_file(tmp_path: Path) -> None:
    assert in_a_checkout(PACKAGE)
    package = tmp_path / "flashtune" / "kernels_generated"
    package.mkdir(parents=True)
    assert not in_a_checkout(package)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "flashtune-models"\n')
    assert not in_a_checkout(package)


def test_modules_are_the_templates_text_to_the_byte() -> None:
    from flashtune.templates.rendering import render

    for one in selected(arrange(shipped())):
        assert (PACKAGE / one.kernel.path).read_bytes() == render(family(one.variant.template), one.variant).encode()


def test_the_top_levels_link_still_leads_here() -> None:
    assert (ROOT / "kernels_generated" / INDEX).samefile(PACKAGE / INDEX)
    assert sys.modules.get("kernels_generated") is None
