"""Source text in, imported module out: how rendered kernels are loaded by the tuner and by dispatch alike."""

import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import platformdirs


def cache_dir() -> Path:
    """Where rendered kernels are kept: `FLASHTUNE_CACHE`, or the user's cache directory; a temporary one where neither is writable."""
    wanted = os.environ.get("FLASHTUNE_CACHE") or platformdirs.user_cache_dir("flashtune")
    path = Path(wanted) / "kernels"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="flashtune-kernels-"))


def load_source(source: str, stem: str, directory: Path | None = None) -> ModuleType:
    """Import `source` as a module; equal text gives the same module object within a process.

    Triton reads a kernel's text from its file, so the text is written to `directory` (default: `cache_dir()`) first; a file that is
    there already is used only when its bytes are these.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    name = f"flashtune_rendered_{stem}_{digest}"
    if (loaded := sys.modules.get(name)) is not None:
        return loaded
    path = (directory or cache_dir()) / f"{name}.py"
    if not path.is_file() or path.read_text() != source:
        # Written aside and renamed, so that another process never imports half a file.
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=name, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(source)
        os.replace(aside, path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
