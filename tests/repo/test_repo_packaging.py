"""Packages built from this tree: the sdist, the wheel made from that sdist, and the package installed from that wheel."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("tuner", "templates", "kernels_generated", "db")
DATA_SUFFIXES = {".jinja", ".toml", ".sqlite", ".mako", ".ini", ".json", ".npz", ".md"}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    ran = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert ran.returncode == 0, f"{' '.join(map(str, command))}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this tree and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    # From a copy, because setuptools writes build/ and *.egg-info beside what it builds; without site/, which may be being written.
    tree = folder / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site", "benchmarks")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree, cwd=folder)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder / "kernels", tree / "kernels" / "sm90", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """A folder that holds the wheel's contents as pip installs them."""
    target = built / "site"
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "-qq", "--no-compile", "--no-deps", "--no-index", "--target", target, wheel, cwd=built)
    return target


def sources() -> set[str]:
    """Every file that the package needs at run time, relative to the root."""
    files = [path for path in (ROOT / "flashtune").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(ROOT).as_posix() for path in files if path.suffix in {".py", *DATA_SUFFIXES} or path.name == "py.typed"}


def test_wheel_holds_the_whole_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    package = {name for name in names if PurePosixPath(name).parts[0] == "flashtune"}
    assert package == sources()
    assert {"flashtune/py.typed", "flashtune/core/records/models.toml"} < package
    assert {PurePosixPath(name).suffix for name in package} <= {".py", ".typed", "", *DATA_SUFFIXES}
    others = {PurePosixPath(name).parts[0] for name in names - package}
    assert len(others) == 1, f"beside the package there may be only its metadata, not {sorted(others)}"
    assert others.pop().endswith(".dist-info")
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_holds_the_package_the_tests_and_the_documents(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {"/".join(PurePosixPath(member.name).parts[1:]) for member in archive.getmembers() if member.isfile()}
    assert sources() <= names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "Makefile", "constraints.txt", "tests/conftest.py"} <= names
    assert "docs/architecture.md" in names
    assert not [name for name in names if name.split("/")[0] in LINKS], "no file may travel twice"


def test_installed_wheel_renders_a_kernel_far_from_the_source_tree(installed: Path, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import flashtune
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.gpu.target import find_target
from flashtune.templates import families
from flashtune.templates.rendering import render, variant_of
assert Path(flashtune.__file__).is_relative_to(sys.argv[1]), flashtune.__file__
problem = Problem(batch=1, heads=2, kv_heads=2, n_q=64, n_kv=64, d=64, d_v=64, dtype="fp16", features=Features(causal=True))
spec, target = problem.spec(), find_target("h200")
for family in families().values():
    if family.supports(spec, target) is None:
        source = render(family, variant_of(family, spec, family.default(spec, target)))
        compile(source, family.name, "exec")
        print(family.name)
"""
    rendered = run(sys.executable, "-c", code, installed, cwd=tmp_path).split()
    assert "flash_fwd" in rendered


def test_installed_wheel_has_the_command(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin" / "flashtune"
    assert "flashtune.cli.main" in script.read_text()
    printed = run(sys.executable, script, "--version", cwd=tmp_path, PYTHONPATH=str(installed))
    import flashtune

    assert flashtune.__version__ in printed


def test_wheels_are_small(built: Path) -> None:
    (wheel,), (kernels,) = built.glob("*.whl"), built.glob("kernels/*.whl")
    assert wheel.stat().st_size < 3_000_000
    assert kernels.stat().st_size < 14_000_000
    assert [PurePosixPath(name).suffix for name in zipfile.ZipFile(kernels).namelist() if ".dist-info/" not in name] == [".py", ".kernels"]


def test_machine_code_serves_once_the_package_of_kernels_is_installed(built: Path, installed: Path, tmp_path: Path) -> None:
    code = """
import sys
sys.path[:0] = sys.argv[1:]
from flashtune.core.code.shipped import PACKAGE, shipped_archive, shipped_index, shipped_manifest
print(shipped_archive(PACKAGE, "90") and shipped_archive(PACKAGE, "90").path)
manifest = shipped_manifest(PACKAGE, shipped_index(PACKAGE).kernels[0].variant_id, "90")
print(manifest and all(manifest.code(binary) for binary in manifest.binaries))
"""
    # Without site: an environment of developers has them already.
    command = [sys.executable, "-S", "-c", code, installed]
    assert run(*command, cwd=tmp_path, PYTHONPATH="").split() == ["None", "None"]
    target = tmp_path / "kernels"
    (wheel,) = built.glob("kernels/*.whl")
    run(sys.executable, "-m", "pip", "install", "-qq", "--no-compile", "--no-deps", "--no-index", "--target", target, wheel, cwd=tmp_path)
    assert run(*command, target, cwd=tmp_path, PYTHONPATH="").split() == [str(target / "flashtune_kernels_sm90" / "sm90.kernels"), "True"]


def test_the_package_of_kernels_has_flashtunes_version() -> None:
    import flashtune

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kernels = tomllib.loads((ROOT / "kernels" / "sm90" / "pyproject.toml").read_text())["project"]
    assert kernels["version"] == flashtune.__version__
    assert project["optional-dependencies"]["kernels"] == [f"{kernels['name']}=={kernels['version']}"]


def test_editable_install_runs_these_very_sources() -> None:
    import flashtune

    assert Path(flashtune.__file__).resolve() == ROOT / "flashtune" / "__init__.py"
