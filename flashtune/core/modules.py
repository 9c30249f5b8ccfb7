"""Source text in, imported module out: how rendered kernels are loaded by the tuner and by dispatch alike."""

import hashlib
import importlib.util
import sys
from importlib.abc import InspectLoader
from types import CodeType, ModuleType

_NOWHERE = "/dev/null/flashtune"
"""Below this no file can exist, so that whoever looks for a module's text (Triton, tracebacks, debuggers) gets it from its loader."""


class _TextLoader(InspectLoader):
    """Imports one module from its text: no file is read or written, and no bytecode that lies about is trusted."""

    def __init__(self, source: str, path: str) -> None:
        self._source, self._path = source, path

    def get_source(self, fullname: str) -> str:
        """The text; Python's `inspect` and `linecache` ask for it."""
        return self._source

    def get_code(self, fullname: str) -> CodeType:
        """The compiled text."""
        return self.source_to_code(self._source, self._path)


def load_source(source: str, stem: str) -> ModuleType:
    """Import `source` as a module; equal text gives the same module object within a process."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    name = f"flashtune_rendered_{stem}_{digest}"
    if (loaded := sys.modules.get(name)) is not None:
        return loaded
    path = f"{_NOWHERE}/{name}.py"
    loader = _TextLoader(source, path)
    spec = importlib.util.spec_from_loader(name, loader, origin=path)
    assert spec is not None
    # Without an origin on disk `__file__` would be missing, by which `inspect` tells one module from another.
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
