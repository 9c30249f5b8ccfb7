"""Table of the package's numeric constants with their docstrings, for docs/constants.md.

`make docs` puts it in place of the page's marker (a hook of MkDocs); `python tools/constants.py` prints it. Modules are read, not imported.
"""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "flashtune"
PAGE, MARKER = "constants.md", "<!-- constants -->"
PARTS = ("dispatch", "templates", "tuner", "core")
"""Folders of the package whose constants decide something."""


class Constant(NamedTuple):
    """A module's constant: its value as it is written, and its docstring in one line."""

    name: str
    value: str
    meaning: str


def is_numeric(node: ast.expr) -> bool:
    """True for numbers and for containers and arithmetic of them alone."""
    plain = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
    nodes = list(ast.walk(node))
    numbers = [part for part in nodes if isinstance(part, ast.Constant) and isinstance(part.value, int | float)]
    return bool(numbers) and all(isinstance(part, plain) for part in nodes) and not isinstance(numbers[0].value, bool)


def constants_of(text: str) -> Iterator[Constant]:
    """Documented numeric constants of a module's text, in order; a docstring after `A, B = 1, 2` is of both."""
    body = ast.parse(text).body
    for node, after in pairwise(body):
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        if not documented or target is None or node.value is None or not is_numeric(node.value):  # type: ignore[attr-defined]
            continue
        name, value = ast.unparse(target), ast.unparse(node.value)  # type: ignore[attr-defined]
        if name.upper() == name and not name.startswith("_"):
            meaning = " ".join(after.value.value.split()).replace("|", "&#124;")  # type: ignore[attr-defined]
            yield Constant(name.strip("()"), value.strip("()"), meaning)


def table() -> str:
    """Markdown of all constants: a heading for each part, a row for each constant."""
    lines = []
    for part in PARTS:
        rows = []
        for path in sorted((PACKAGE / part).rglob("*.py")):
            module = path.relative_to(PACKAGE).with_suffix("").as_posix()
            rows += [f"| `{module}` | `{one.name}` | {one.value} | {one.meaning} |" for one in constants_of(path.read_text())]
        lines += [f"## {part.capitalize()}", "", "| module | constant | value | meaning and evidence |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The hook of MkDocs."""
    return markdown.replace(MARKER, table()) if page.file.src_uri == PAGE else markdown


if __name__ == "__main__":
    print(table())
