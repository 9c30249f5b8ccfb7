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


def offer() -> None:
    """Offer `FLASHTUNE` to torch.nn.attention.activate_flash_attention_impl, which PyTorch has from 2.13 on.

    PyTorch calls it when it is imported itself (the entry point `torch.backends`), and `flashtune.dispatch` where the package isn't
    installed; nothing else is imported or changed before somebody activates it.
    """
    from torch.nn import attention

    register = getattr(attention, "register_flash_attention_impl", None)
    if register is not None:
        register("FLASHTUNE", register_fn=_activated)


def _activated() -> object:
    """Attention of this process, which flashtune runs from now on until `remove` is called."""
    import pkgutil

    # By its name: everybody imports this module, and nobody above it shall come along.
    found: object = pkgutil.resolve_name("flashtune.integrations.implementation:Activated")()
    return found
