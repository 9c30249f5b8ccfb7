"""Lazy definition of PyTorch operators: only tracers need them, and every new process would wait for them.

Lookups that bypass Python, as from an AOTInductor package, find them after any access to torch.ops.flashtune.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch


def define_lazily(*makers: Callable[[], None]) -> None:
    """Call `makers`, which define operators, at the first lookup of a name in torch.ops.flashtune, in any thread."""
    namespace: Any = torch.ops.flashtune
    lock, waiting, making = threading.RLock(), list(makers), False

    def lookup(name: str) -> Any:
        nonlocal making
        if name.startswith("__"):
            raise AttributeError(name)
        with lock:
            # Defining an operator looks it up, too; an interrupted maker is called again.
            while waiting and not making:
                making = True
                try:
                    waiting[0]()
                finally:
                    making = False
                del waiting[0]
            return type(namespace).__getattr__(namespace, name)

    # PyTorch's namespaces are modules, for which __getattr__ serves missing names (PEP 562).
    namespace.__getattr__ = lookup
