"""Entry point of the benchmarks: `python benchmarks/run.py CASE [options]` runs a case, `--list` names all of them with a line each.

`python benchmarks/run.py CASE --help` describes a case and its options. Results go to the folder that the variable OUT names, else to the
current one.
"""

import ast
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cases() -> dict[str, str]:
    """Every case's name, in order, and the module that holds its `main`."""
    folder = ROOT / "benchmarks"
    found = {path.stem: f"benchmarks.cases.{path.stem}" for path in folder.glob("cases/[a-z]*.py")}
    found |= {f"fit_{path.stem}": f"benchmarks.fit.{path.stem}" for path in folder.glob("fit/[a-z]*.py")}
    return dict(sorted(found.items()))


def summary(module: str) -> str:
    """First line of a module's docstring, read without importing it: peers and GPUs may be missing here."""
    text = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    return (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]


def main(words: list[str]) -> None:
    """Run one case with the options that follow its name."""
    known = cases()
    name, *options = words or ["--help"]
    if name in ("--help", "-h", "--list"):
        print("" if name == "--list" else f"{__doc__}\n", end="")
        print("\n".join(f"{case:20s} {summary(module)}" for case, module in known.items()))
        return
    if name not in known:
        raise SystemExit(f"unknown case {name!r}: use {', '.join(known)}")
    sys.argv = [f"benchmarks/run.py {name}", *options]
    importlib.import_module(known[name]).main()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
