"""Modules of flashtune copied into a package of another name, their imports of one another made relative."""

import ast
import importlib.util
from collections.abc import Iterable

from flashtune import __version__

ROOT = "flashtune."
HEADING = "# A copy of {name} from flashtune {version} (Apache-2.0), its imports made relative; `flashtune export --hub` writes it.\n"


def copies(modules: Iterable[str]) -> dict[str, str]:
    """The texts of these modules of flashtune and of all that they import while they are loaded, by paths in the new package.

    Imports inside functions aren't followed: what they name isn't in the new package unless something else imports it. Packages are copied
    as empty folders. Raises ImportError where a module imports a name of a package's own code.
    """
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = f"{name.removeprefix(ROOT).replace('.', '/')}.py"
        if path in found:
            continue
        tree = ast.parse(text := _source(name))
        found[path] = HEADING.format(name=name, version=__version__) + _relative(text, tree, depth=name.count("."))
        # Imports that run while the module is loaded.
        loading = (node.module for node in tree.body if isinstance(node, ast.ImportFrom))
        waiting += (module for module in loading if module is not None and module.startswith(ROOT))
    for folder in {"/".join(path.split("/")[:end]) for path in found for end in range(1, path.count("/") + 1)}:
        found[f"{folder}/__init__.py"] = f'"""Copies of modules of flashtune.{folder.replace("/", ".")}."""\n'
    return found


def _source(name: str) -> str:
    """The text of a module; raises ImportError for a package, whose code isn't copied."""
    spec = importlib.util.find_spec(name)
    text = None if spec is None or spec.submodule_search_locations else spec.loader.get_source(name)  # type: ignore[union-attr]
    if text is None:
        raise ImportError(f"{name} is no module with a text, so it can't be copied: import its parts by their own names")
    return str(text)


def _relative(text: str, tree: ast.Module, depth: int) -> str:
    """The text with imports from flashtune, also those inside functions, relative to the new package; `depth` folders lead to it."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith(ROOT):
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"from {ROOT}", f"from {'.' * depth}", 1)
        elif isinstance(node, ast.Import) and any(alias.name.split(".")[0] == ROOT[:-1] for alias in node.names):
            raise ImportError(f"`import {node.names[0].name}` can't be made relative: write `from ... import`")
        elif isinstance(node, ast.ImportFrom) and node.module == ROOT[:-1]:
            raise ImportError("`from flashtune import` can't be copied: import the module by its own name")
    return "".join(lines)
