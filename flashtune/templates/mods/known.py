"""The functions of this process by the hash that stands for them in a KernelSpec: text comes from a user's function alone."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from flashtune.core.system.errors import InputError

if TYPE_CHECKING:
    from flashtune.core.problems.config import Config, KernelSpec
    from flashtune.core.problems.problem import Problem
    from flashtune.templates.mods.emit import Mods

_KNOWN: "dict[str, Mods]" = {}


class Named(NamedTuple):
    """A score_mod and a mask_mod of the user's own files as `FILE.py:NAME`, empty where there is none."""

    score: str = ""
    mask: str = ""


class PackedInstead(InputError):
    """Functions that a search has no use for, since calls run them as packed sequences: the `problem` is one of these."""

    def __init__(self, message: str, problem: "Problem") -> None:
        super().__init__(message)
        self.problem = problem


NAMED: dict[str, Named] = {}
"""Functions of a search by each pass's hash (flashtune.tuner.functions), for its child processes."""


def keep(mods: "Mods") -> str:
    """The hash of functions, by which `functions_of` finds them in this process."""
    _KNOWN.setdefault(mods.hash, mods)
    return mods.hash


def functions_of(name: str) -> "Mods | None":
    """The functions of a hash, None for an empty one; raises KeyError for functions that no call of this process had: text comes from
    a user's function alone."""
    return _KNOWN[name] if name else None


def trains(spec: "KernelSpec") -> bool:
    """True if a spec's functions give gradients to captured tensors."""
    functions = functions_of(spec.mods)
    return functions is not None and bool(functions.trained)


def whole_tiles(config: "Config", name: str) -> bool:
    """True if the blocks of a mask by lists are made of whole tiles of a config, and for all other functions."""
    functions = functions_of(name)
    if functions is None or functions.blocks is None:
        return True
    sizes = dict(zip(("BLOCK_M", "BLOCK_N"), functions.blocks, strict=True))
    return all(size % config.number(axis) == 0 for end, size in sizes.items() for axis in config.as_dict() if axis.endswith(end))


def unknown(name: str) -> str:
    """The reason why this process has no kernels of the functions with this hash, and the remedy."""
    return f"the functions {name} aren't those of this process: name them by --score-mod and --mask-mod"


def alike(problem: "Problem") -> "Problem":
    """The problem with the built-in feature that is most like its functions: a bias for a score, a boolean mask for a mask alone."""
    functions = functions_of(problem.features.mods)
    mask: Any = "bias" if functions is not None and functions.score else "bool"
    return replace(problem, features=replace(problem.features, mods="", mask=mask))


def known() -> Iterable[str]:
    """The hashes of this process."""
    return _KNOWN.keys()
