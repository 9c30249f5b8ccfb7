"""The environment that `make` sets up: made once, never in someone else's folder, with the torch that was asked for."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_venv() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "tools" / "setup_venv.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Calls:
    """Calls of the script by `make`, with what they installed: an environment made (`new`) and packages; the torch named `broken` fails."""

    def __init__(self, module: ModuleType, patch: pytest.MonkeyPatch) -> None:
        self.installed: list[str] = []
        self._module, self._patch = module, patch
        patch.setattr(module, "create", self._create)
        patch.setattr(module, "install", self._install)

    def _create(self, folder: Path, torch: str) -> str:
        self.installed.append("new")
        return torch or "torch==chosen"

    def _install(self, folder: Path, torch: str) -> None:
        self.installed.append(torch)
        if torch == "broken":
            raise subprocess.CalledProcessError(1, ["pip", "install", torch])

    def __call__(self, folder: Path, torch: str = "") -> int:
        self._patch.setattr(sys, "argv", ["setup_venv.py", str(folder), "--torch", torch])
        code: int = self._module.main()
        return code


@pytest.fixture
def call(setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(setup_venv, monkeypatch)


def test_it_is_made_once_for_each_torch_that_is_named(call: Calls, tmp_path: Path) -> None:
    for torch in ("", "", "torch==2.11.0", "", "torch==2.11.0"):
        assert call(tmp_path / "venv", torch) == 0
    assert call.installed == ["new", "torch==chosen", "new", "torch==2.11.0"]


@pytest.mark.parametrize(("changed", "made"), [("requirements", []), ("interpreter", ["new"])])
def test_changed_requirements_are_installed_into_it_and_another_interpreter_makes_it_anew(
    changed: str, made: list[str], call: Calls, setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "venv"
    call(folder, "torch==2.11.0")
    (folder / "kept").touch()
    monkeypatch.setattr(setup_venv, changed, lambda: "others")
    assert [call(folder) for _ in range(2)] == [0, 0]
    assert call.installed == ["new", "torch==2.11.0", *made, "torch==2.11.0"]
    assert (folder / "kept").exists() == (not made)


def test_failed_installation_is_tried_again(call: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path / "venv", "broken") == 4
    assert "pip" in capsys.readouterr().err
    assert [call(tmp_path / "venv", torch) for torch in ("torch==2.11.0", "")] == [0, 0]
    assert call.installed == ["new", "broken", "new", "torch==2.11.0"]


def test_foreign_folder_is_left_as_it_is(call: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("the only copy")
    assert call(tmp_path) == 4
    assert (tmp_path / "thesis.tex").read_text() == "the only copy"
    assert capsys.readouterr().err.count("\n") == 1 and call.installed == []


def test_torch_follows_the_machine(setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_finds = {"returncode": 0}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, pip_finds["returncode"])

    monkeypatch.setattr(setup_venv.subprocess, "run", run)
    monkeypatch.setattr(setup_venv.shutil, "which", lambda _: None)
    assert setup_venv.default_torch(["pip"]) == "torch==2.13.0+cpu"
    pip_finds["returncode"] = 1
    assert setup_venv.default_torch(["pip"]) == "torch==2.11.0"
    monkeypatch.setattr(setup_venv.shutil, "which", lambda name: f"/usr/bin/{name}")
    pip_finds["returncode"] = 0
    assert setup_venv.default_torch(["pip"]) == "torch==2.11.0"


def test_pinned_triton_is_one_that_the_package_allows() -> None:
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    allowed = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    }
    assert [pin.name for pin in pins] == ["triton"]
    assert all(allowed[pin.name].contains(str(pin.specifier).removeprefix("==")) for pin in pins)


def test_bytecode_is_kept_whatever_the_environment_says() -> None:
    """Packages are installed without: else every process of a test would compile all of torch that it imports."""
    command = ["make", "--no-print-directory", "--eval", "asked: ; @echo [$$PYTHONDONTWRITEBYTECODE]", "asked"]
    said = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True)
    assert said.stdout == "[]\n", said.stderr


def test_the_newest_is_looked_for_at_every_call(call: Calls, tmp_path: Path) -> None:
    assert [call(tmp_path / "venv", torch) for torch in ("newest", "newest", "")] == [0, 0, 0]
    assert call.installed == ["new", "newest", "newest", "newest"]


def test_the_newest_is_of_torch_with_its_own_packages_and_of_triton(setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(setup_venv.subprocess, "run", lambda command, **_: ran.append(command))
    setup_venv.install(Path("venv"), "newest")
    first, second = ran
    assert {"--upgrade", "torch"} <= set(first) and "constraints.txt" not in first
    assert second[-3:] == ["--upgrade", "--no-deps", "triton"]


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("newest", ROOT / "tools" / "newest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("every", "broken"), [(False, "calls"), (True, "kernels"), (False, None)])
def test_all_parts_of_the_newest_run_and_those_that_fail_are_named(
    every: bool, broken: str | None, newest: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        ran.append(command[1:])
        fails = broken is not None and command[1:][: len(newest.PARTS[broken])] == list(newest.PARTS[broken])
        return subprocess.CompletedProcess(command, int(fails))

    monkeypatch.setattr(newest.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["newest.py", *["--all"] * every])
    assert newest.main() == int(broken is not None)
    assert len(ran) == len(newest.PARTS) and ("--sample" in ran[-1]) is not every
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"{len(ran) - (broken is not None)} parts passed" in last and last.endswith("failed" if broken is None else f"failed: {broken}")


def test_parts_of_the_newest_are_files_that_there_are(newest: ModuleType) -> None:
    paths = [word for words in newest.PARTS.values() for word in words if "/" in word]
    assert paths and all((ROOT / path).exists() for path in paths)
