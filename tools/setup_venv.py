"""Make a virtual environment that has flashtune (editable) with everything for search and tests, once; later calls return at once.

    python tools/setup_venv.py .venv [--torch torch==2.11.0]

Which torch: the one asked for (remembered until another is); else the base interpreter's own where that one sees a GPU and comes with
Triton 3.6 or newer, so that nothing large is downloaded; else, without an NVIDIA driver, the CPU build where pip finds it (about
200 MB); else the build that brings its own CUDA and pins the very Triton that constraints.txt names.
Only the standard library is used here: this runs before anything is installed.
"""

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_TORCH = "torch==2.13.0+cpu"
GPU_TORCH = "torch==2.11.0"
USABLE = """
import sys, torch, triton
sys.exit(not (torch.cuda.is_available() and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)))
"""
EXIT_ENVIRONMENT = 4


def main() -> int:
    """Set up and return the exit code; what pip has to say is shown only when it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the environment goes")
    parser.add_argument("--torch", default="", help="the requirement to install in place of the choice above")
    given = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs under whatever Python the user has
        print(f"flashtune needs Python 3.11 or newer, not {sys.version.split()[0]}: make PYTHON=/path/to/python3.11", file=sys.stderr)
        return EXIT_ENVIRONMENT
    if importlib.util.find_spec("ensurepip") is None:
        print(f"{sys.executable} can't make virtual environments: install its venv package (Debian: python3-venv)", file=sys.stderr)
        return EXIT_ENVIRONMENT
    folder: Path = given.folder.resolve()
    stamp = folder / "flashtune-ready"
    state, torch = [*stamp.read_text().splitlines(), "", ""][:2] if stamp.is_file() else ("", "")
    if state == fingerprint() and given.torch in ("", torch):
        return 0
    if folder.exists() and not stamp.is_file() and any(folder.iterdir()):
        print(f"{folder} is not an environment of flashtune's own: remove it, or name another with make VENV=...", file=sys.stderr)
        return EXIT_ENVIRONMENT
    print(f"setting up {given.folder}: once, a few minutes, most of them for torch", flush=True)
    try:
        # Anew, because a half-made or outdated environment is not worth repairing: pip's cache makes a new one cheap.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        stamp.write_text(f"\n{given.torch or torch}\n")
        torch = install(folder, given.torch or torch)
        stamp.write_text(f"{fingerprint()}\n{torch}\n")
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"setting up {given.folder} failed: {error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    return 0


def fingerprint() -> str:
    """Changes whenever an environment that was made before no longer fits."""
    import tomllib  # only here: an older Python shall get as far as the message about its version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = [ROOT / "constraints.txt", Path(__file__)]
    parts = [sys.version, sys.base_prefix, str(ROOT), repr(project), *(file.read_text() for file in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install(folder: Path, torch: str) -> str:
    """Fill the empty folder; returns the torch requirement that was installed, `base` for the base interpreter's own.

    Raises CalledProcessError after pip has said why.
    """
    if torch in ("", "base"):
        torch = "base" if base_torch_is_usable() else ""
    venv.EnvBuilder(with_pip=True, symlinks=True, system_site_packages=torch == "base").create(folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    torch = torch or default_torch(pip)
    # The base interpreter's torch came with its own Triton, which is not to be replaced.
    wanted = [] if torch == "base" else ["-c", "constraints.txt", torch]
    subprocess.run([*pip, "install", "-qq", *wanted, "-e", ".[dev]"], cwd=ROOT, check=True)
    return torch


def base_torch_is_usable() -> bool:
    """Whether the interpreter outside any virtual environment has a torch with a working GPU, and a Triton that the package allows."""
    base = getattr(sys, "_base_executable", sys.executable)
    return subprocess.run([base, "-c", USABLE], capture_output=True).returncode == 0


def default_torch(pip: list[str]) -> str:
    """The torch to install where the user named none and the base interpreter's own can't be used."""
    if shutil.which("nvidia-smi"):
        return GPU_TORCH
    found = subprocess.run([*pip, "install", "-qq", "--dry-run", "--no-deps", CPU_TORCH], capture_output=True)
    return CPU_TORCH if found.returncode == 0 else GPU_TORCH


if __name__ == "__main__":
    sys.exit(main())
