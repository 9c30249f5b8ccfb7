"""Make a virtual environment that has flashtune (editable) with everything for search and tests, once; later calls return at once.

    python tools/setup_venv.py .venv [--torch torch==2.11.0]

Which torch: the one asked for (remembered until another is; `newest` is looked for at every call, with the newest Triton); else the base
interpreter's own where that one sees a GPU and comes with Triton 3.6 or newer, so that nothing large is downloaded; else, without an NVIDIA
driver, the CPU build where pip finds it (about 200 MB); else the build that brings its own CUDA and pins the very Triton that
constraints.txt names.
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
NEWEST = "newest"
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
    installed, torch, base = (stamp.read_text().split("\n") + [""] * 3)[:3] if stamp.is_file() else ("", "", "")
    usable = installed != "" and base == interpreter() and given.torch in ("", torch)
    if usable and installed == requirements() and NEWEST not in (given.torch, torch):
        return 0
    if folder.exists() and not stamp.is_file() and any(folder.iterdir()):
        print(f"{folder} is not an environment of flashtune's own: remove it, or name another with make VENV=...", file=sys.stderr)
        return EXIT_ENVIRONMENT
    torch = given.torch or torch
    try:
        if usable:
            print(f"bringing {given.folder} up to date", flush=True)
        else:
            print(f"setting up {given.folder}: once, a few minutes, most of them for torch", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            # Without the first line it counts as half-made, and the next call starts anew.
            stamp.write_text(f"\n{torch}\n{interpreter()}\n")
            torch = create(folder, torch)
        install(folder, torch)
        stamp.write_text(f"{requirements()}\n{torch}\n{interpreter()}\n")
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"setting up {given.folder} failed: {error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    return 0


def requirements() -> str:
    """Changes whenever something else has to be installed."""
    import tomllib  # only here: an older Python shall get as far as the message about its version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return digest(repr(project), (ROOT / "constraints.txt").read_text())


def interpreter() -> str:
    """Changes whenever an environment that was made before can't be used any more."""
    return digest(sys.version, sys.base_prefix, str(ROOT))


def digest(*parts: str) -> str:
    """One word for all of `parts`."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def create(folder: Path, torch: str) -> str:
    """Make an empty environment; returns the torch requirement to install, `base` for the base interpreter's own."""
    if torch in ("", "base"):
        torch = "base" if base_torch_is_usable() else ""
    venv.EnvBuilder(with_pip=True, symlinks=True, system_site_packages=torch == "base").create(folder)
    # The pip that comes with Python 3.11 takes twice as long to find out what to install.
    subprocess.run([*pip(folder), "install", "-qq", "--no-compile", "--upgrade", "pip"], check=True)
    return torch or default_torch(pip(folder))


def install(folder: Path, torch: str) -> None:
    """Install flashtune, its kernels and all it needs, with this torch; raises CalledProcessError after pip has said why."""
    # The base interpreter's torch came with its own Triton, which is not to be replaced.
    wanted = {"base": [], NEWEST: ["--upgrade", "torch"]}.get(torch, ["-c", "constraints.txt", torch])
    # Python compiles what is imported when it is; pip would take a minute to compile the 15 000 files that came with torch and the rest.
    command = [*pip(folder), "install", "-qq", "--no-compile"]
    subprocess.run([*command, *wanted, "-e", ".[dev]", "-e", "kernels/sm90"], cwd=ROOT, check=True)
    if torch == NEWEST:
        # Releases of torch pin their own exactly.
        subprocess.run([*command, "--upgrade", "--no-deps", "triton"], cwd=ROOT, check=True)


def pip(folder: Path) -> list[str]:
    """The command that is this environment's pip."""
    return [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def base_torch_is_usable() -> bool:
    """Whether the interpreter outside any virtual environment has a torch with a working GPU, and a Triton that the package allows."""
    base = getattr(sys, "_base_executable", sys.executable)
    return subprocess.run([base, "-c", USABLE], capture_output=True).returncode == 0


def default_torch(command: list[str]) -> str:
    """The torch to install where the user named none and the base interpreter's own can't be used; `command` is pip."""
    if shutil.which("nvidia-smi"):
        return GPU_TORCH
    found = subprocess.run([*command, "install", "-qq", "--dry-run", "--no-deps", CPU_TORCH], capture_output=True)
    return CPU_TORCH if found.returncode == 0 else GPU_TORCH


if __name__ == "__main__":
    sys.exit(main())
