"""flashtune: find the fastest attention kernel for your GPU and your shapes, and ship that knowledge.

`flashtune.dispatch` and `flashtune.attention`, which is `flashtune.dispatch.attention`, are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashtune import dispatch
    from flashtune.dispatch import attention

__version__ = "0.1.0"

__all__ = ["attention", "dispatch"]


def __getattr__(name: str) -> Any:
    """The part of this name, imported now, since torch takes seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module 'flashtune' has no attribute {name!r}")
    module = importlib.import_module("flashtune.dispatch")
    return module if name == "dispatch" else module.attention


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
