"""Operators of torch that are made when somebody first asks for one: only tracers do, and every new process would wait for them.

What looks one up without Python, as a package of AOTInductor's, finds it once torch.ops.flashtune was asked for any.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch


def make_when_asked(*makers: Callable[[], None]) -> None:
    """Call these, which make operators, at the first look-up of a name in torch.ops.flashtune, in whatever thread that is."""
    namespace: Any = torch.ops.flashtune
    lock, waiting, making = threading.RLock(), list(makers), False

    def asked(name: str) -> Any:
        nonlocal making
        if name.startswith("__"):
            raise AttributeError(name)
        with lock:
            # Whoever makes an operator looks it up, too; who was interrupted is called again.
            while waiting and not making:
                making = True
                try:
                    waiting[0]()
                finally:
                    making = False
                del waiting[0]
            return type(namespace).__getattr__(namespace, name)

    # Namespaces of torch are modules, which may have a function for names that they don't hold (PEP 562).
    namespace.__getattr__ = asked
