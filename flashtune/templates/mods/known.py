"""The functions of this process by the hash that stands for them in a KernelSpec: text comes from a user's function alone."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashtune.templates.mods.emit import Mods

_KNOWN: "dict[str, Mods]" = {}


def keep(mods: "Mods") -> str:
    """The hash of functions, by which `functions_of` finds them in this process."""
    _KNOWN.setdefault(mods.hash, mods)
    return mods.hash


def functions_of(name: str) -> "Mods | None":
    """The functions of a hash, None for an empty one; raises KeyError for functions that no call of this process had: text comes from
    a user's function alone."""
    return _KNOWN[name] if name else None


def known() -> Iterable[str]:
    """The hashes of this process."""
    return _KNOWN.keys()
