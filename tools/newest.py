"""`make newest`: what has to work with the newest PyTorch and Triton, part by part, and which parts failed.

    python tools/newest.py [--all]

Runs in the environment whose Python this is.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "-q", "--newest", "-p", "no:cacheprovider")
PARTS: dict[str, tuple[str, ...]] = {
    "import and flashtune doctor": ("-m", "flashtune", "doctor"),
    "the README's snippet": (*PYTEST, "tests/repo/test_repo_docs.py", "-k", "snippet"),
    "calls": (*PYTEST, "tests/dispatch/test_dispatch_numbers.py", "tests/dispatch/test_varlen.py", "tests/dispatch/test_dispatch_torch.py"),
    "gradients": (*PYTEST, "tests/dispatch/test_dispatch_gradients.py", "tests/dispatch/test_dispatch_training.py"),
    "torch.compile": (*PYTEST, "tests/dispatch/test_dispatch_tracers.py", "tests/dispatch/test_dispatch_graphs.py"),
    "functions": (
        *PYTEST,
        "tests/templates/test_mods.py",
        "tests/templates/test_mods_trace.py",
        "tests/dispatch/test_flex_matrices.py",
        "tests/dispatch/test_varlen_functions.py",
    ),
    "integrations": (*PYTEST, "tests/integrations"),
    "a predicted search": ("-m", "flashtune", "search", "--predict", "--gpu-name", "a100", "--d", "64", "--n", "1024", "--trials", "4"),
    "kernels": ("benchmarks/run.py", "check_compiles"),
}
"""Arguments of Python for each part."""


def main() -> int:
    """Run all parts, whatever fails; returns 1 where one did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="compile every kernel, in place of one of each family and target")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        failed = [name for name in PARTS if not passes(name, given.all, Path(scratch))]
    here = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "transformers"))
    said = f"{len(PARTS) - len(failed)} parts passed, {len(failed)} failed"
    print(f"Python {sys.version.split()[0]}, {here}: {': '.join([said, *[', '.join(failed)] * bool(failed)])}")
    return int(bool(failed))


def passes(name: str, every: bool, scratch: Path) -> bool:
    """Run one part, with results and caches in the folder `scratch`; True where it passes."""
    words = list(PARTS[name])
    if name == "kernels" and not every:
        words.append("--sample")
    if "pytest" in words:
        words += ["-n", str(min(8, os.cpu_count() or 1))]
    places = {"FLASHTUNE_CACHE": str(scratch), "FLASHTUNE_OWN_DB": str(scratch / "own.sqlite")}
    print(f"== {name}", flush=True)
    begun = time.monotonic()
    code = subprocess.run([sys.executable, *words], cwd=ROOT, env={**os.environ, **places}).returncode
    print(f"== {name}: {'passed' if code == 0 else f'failed with exit code {code}'} after {time.monotonic() - begun:.0f} s", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
