"""The top level's links into the package: there, relative, and followed by no tool twice."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("tuner", "templates", "kernels_generated", "db")


@pytest.mark.parametrize("name", LINKS)
def test_link_is_relative_and_resolves_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert os.readlink(link) == f"flashtune/{name}"
    assert link.resolve() == ROOT / "flashtune" / name
    assert link.is_dir()


def test_links_are_tracked_as_links() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing is tracked")
    listed = subprocess.run(["git", "ls-files", "--stage", *LINKS], cwd=ROOT, capture_output=True, text=True, check=True)
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert modes == dict.fromkeys(LINKS, "120000")


def test_setuptools_finds_no_package_through_a_link() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    found = find_namespace_packages(str(ROOT), **settings)
    assert "flashtune.core" in found
    assert {package.split(".")[0] for package in found} == {"flashtune"}


def test_ruff_reads_no_file_through_a_link() -> None:
    ruff = pytest.importorskip("ruff", reason="linters are in the dev extra")
    command = [ruff.find_ruff_bin(), "check", "--show-files", ".", *LINKS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [Path(line).relative_to(ROOT) for line in listed.stdout.splitlines()]
    assert Path("flashtune/templates/rendering.py") in files
    assert not [file for file in files if file.parts[0] in LINKS]


@pytest.mark.parametrize("name", LINKS)
def test_importing_through_a_link_is_a_lint_error(name: str) -> None:
    ruff = pytest.importorskip("ruff", reason="linters are in the dev extra")
    command = [ruff.find_ruff_bin(), "check", "--output-format", "concise", "--stdin-filename", "flashtune/cli/planted.py", "-"]
    checked = subprocess.run(command, cwd=ROOT, input=f"import {name}.store\n", capture_output=True, text=True, check=False)
    assert "TID251" in checked.stdout
