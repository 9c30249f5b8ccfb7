"""Loader of rendered kernels' source text as modules, for the tuner and for dispatch."""

import hashlib
import importlib.util
import os
import sys
import threading
from importlib.abc import InspectLoader
from types import CodeType, ModuleType

_NOWHERE = "/dev/null/flashtune"
"""A folder where no file can exist, so that Triton, tracebacks and debuggers get a module's text from its loader."""

_LOCK = threading.RLock()
"""Lock of the thread that runs a text. `sys.modules` has a module before it ran, since Triton looks its text up there."""

_running: list[str] = []
"""Names of the modules that run."""


def _begin_anew() -> None:
    """Replace the lock in a forked child, where nobody would release it, and drop what another thread of the parent left half done."""
    global _LOCK
    _LOCK = threading.RLock()
    while _running:
        sys.modules.pop(_running.pop(), None)


os.register_at_fork(after_in_child=_begin_anew)


class _TextLoader(InspectLoader):
    """Importer of one module from its text: no file is read or written, and no cached bytecode is trusted."""

    def __init__(self, source: str, path: str) -> None:
        self._source, self._path = source, path

    def get_source(self, fullname: str) -> str:
        """The text, for Python's `inspect` and `linecache`."""
        return self._source

    def get_code(self, fullname: str) -> CodeType:
        """The compiled text."""
        return self.source_to_code(self._source, self._path)


def load_source(source: str, stem: str) -> ModuleType:
    """Import `source` as a module; equal text gives the same module object within a process, in all threads once it ran."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    name = f"flashtune_rendered_{stem}_{digest}"
    with _LOCK:
        if (loaded := sys.modules.get(name)) is not None:
            return loaded
        path = f"{_NOWHERE}/{name}.py"
        loader = _TextLoader(source, path)
        spec = importlib.util.spec_from_loader(name, loader, origin=path)
        assert spec is not None
        # Without an origin on disk `__file__` would be missing, by which `inspect` distinguishes modules.
        spec.has_location = True
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        _running.append(name)
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        finally:
            _running.remove(name)
        return module
