"""The cache folder is the user's alone, or it isn't used."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flashtune.core.system.folders import cache_dir, refused, unwritable, wanted_cache_dir

ASK = "from flashtune.core.system.folders import cache_dir; print(cache_dir()); print(cache_dir())"


def asked(cache: Path, scratch: Path) -> list[Path]:
    """The folder that a process of its own is given, twice."""
    environment = {**os.environ, "FLASHTUNE_CACHE": str(cache), "TMPDIR": str(scratch)}
    told = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=600, check=True).stdout
    return [Path(line) for line in told.split()]


def test_a_folder_that_others_could_write_to_is_closed_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("FLASHTUNE_CACHE", str(tmp_path / "cache"))
    assert cache_dir() == tmp_path / "cache"
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o755


def test_a_new_folder_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_CACHE", str(tmp_path / "a" / "b"))
    assert stat.S_IMODE(cache_dir().stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 12345, 12345)
    (tmp_path / "scratch").mkdir()
    first, second = asked(tmp_path / "cache", tmp_path / "scratch")
    assert first == second and first.parent == tmp_path / "scratch"


def test_where_it_cannot_be_used_there_is_one_private_folder_with_a_name_that_nobody_can_guess(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = [asked(tmp_path / "cache", scratch) for _ in range(2)]
    assert all(first == second and first.parent == scratch for first, second in found)
    assert found[0] != found[1]
    assert list(scratch.iterdir()) == [], "it goes when the process ends"


def test_studies_are_never_in_a_predictable_file_of_the_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    words = [sys.executable, "-c", "from flashtune.cli.storage import study_storage\nwith study_storage(None) as s: print(s.url)"]
    environment = {**os.environ, "FLASHTUNE_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    url = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=True).stdout.strip()
    path = Path(url.removeprefix("sqlite:///"))
    assert path.name == "studies.sqlite" and path.parent.parent == tmp_path
    assert not (Path(tempfile.gettempdir()) / "studies.sqlite").exists()


def test_a_folder_that_all_users_share_is_refused_and_stays_shared(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    assert "shared by all users" in (refused(shared) or "")
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777


def test_the_home_folder_is_meant_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHTUNE_CACHE", "~/cache")
    assert wanted_cache_dir() == tmp_path / "cache"


def full_disk(folder: Path) -> Path:
    """A file system with hardly any room, where one may be mounted; the folder that stands for it in the kernel elsewhere."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    return folder


def test_a_full_disk_is_found_by_writing(tmp_path: Path) -> None:
    full = full_disk(tmp_path / "full")
    try:
        assert unwritable(full) == f"{full} can't be written (No space left on device)"
        assert list(full.iterdir()) == []
    finally:
        subprocess.run(["umount", str(full)], check=True)


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert unwritable(tmp_path / "file") == f"{tmp_path / 'file'} can't be written (Not a directory)"
    assert "can't be written" in (unwritable(tmp_path / "file" / "below") or "")
    assert "can't be written" in (unwritable(Path("/proc/flashtune")) or "")
    assert unwritable(tmp_path / "new") is None and list((tmp_path / "new").iterdir()) == []


COMPILE = """
import os, stat, sys, warnings
from flashtune.core.system.folders import let_triton_write
from flashtune.core.code.modules import load_source
from flashtune.core.gpu.target import find_target
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        let_triton_write()
        let_triton_write()
    except OSError as error:
        sys.exit(f"refused: {error.strerror}")
from flashtune.tuner.children.compile import compiling_for
import torch
text = "import triton\\nimport triton.language as tl\\n@triton.jit\\ndef kernel(x):\\n    tl.store(x, 1.0)\\n"
kernel = load_source(text, "probe").kernel
with compiling_for(find_target("h200")):
    kernel.warmup(torch.float32, grid=(1,))
where = os.environ["TRITON_CACHE_DIR"]
print(len(caught), caught[0].message, where, oct(stat.S_IMODE(os.stat(where).st_mode)), bool(os.listdir(where)), sep="\\n")
"""


@pytest.mark.parametrize("scratch", ["folder", "file"])
def test_triton_compiles_where_its_own_cache_cannot_be_written(tmp_path: Path, scratch: str) -> None:
    """A home that is a file, which stops root, too; with scratch space Triton writes there, without it there is one error and no kernel."""
    (tmp_path / "home").write_text("a file, not a folder")
    (tmp_path / "folder").mkdir()
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "folder")}
    environment.pop("TRITON_CACHE_DIR", None)
    code = COMPILE if scratch == "folder" else COMPILE.replace("import os,", "import tempfile; tempfile.tempdir = '/proc'\nimport os,", 1)
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=False)
    if scratch == "file":
        assert told.returncode == 1 and told.stderr.startswith("refused: ") and "can't be written" in told.stderr
        return
    assert told.returncode == 0, told.stderr
    count, message, where, mode, filled = told.stdout.splitlines()
    cache = tmp_path / "home" / ".triton" / "cache"
    assert count == "1" and message.startswith(f"flashtune: {cache} can't be written (Not a directory), so")
    assert Path(where).parent.parent == tmp_path / "folder" and mode == "0o700" and filled == "True"
    assert list((tmp_path / "folder").iterdir()) == [], "it goes when the process ends"
