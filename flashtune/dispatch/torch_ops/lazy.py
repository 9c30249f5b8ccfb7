"""Lazy definition of PyTorch operators: only tracers need them, and every new process would wait for them.

Lookups that bypass Python, as from an AOTInductor package, find them after any access to their namespace of torch.ops.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch


def define_lazily(define: Callable[[], None], name: str = "flashtune") -> None:
    """Call `define` at the first lookup in a namespace of torch.ops, in any thread; once more where it was interrupted."""
    namespace: Any = getattr(torch.ops, name)
    lock, state = threading.RLock(), {"defined": False, "defining": False}

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with lock:
            # Defining an operator looks it up, too.
            if not (state["defined"] or state["defining"]):
                state["defining"] = True
                try:
                    define()
                    state["defined"] = True
                finally:
                    state["defining"] = False
            return type(namespace).__getattr__(namespace, name)

    # PyTorch's namespaces are modules, for which __getattr__ serves missing names (PEP 562).
    namespace.__getattr__ = lookup
