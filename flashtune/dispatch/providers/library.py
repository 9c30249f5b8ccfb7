"""Providers that are a function of a package: whether it is installed and has the parameters that are passed."""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtune.core.pytorch.private import C
from flashtune.core.system.errors import InputError
from flashtune.dispatch.call.call import Call, PerHead
from flashtune.dispatch.providers.provider import Function, Provider, Tensors


def found_in(package: str, module: str, name: str, wanted: Sequence[str]) -> tuple[Callable[..., Any] | None, str | None]:
    """A library's function with the `wanted` parameters, or None and the reason, with the remedy."""
    try:
        # Packages share a namespace, so that an import alone doesn't tell which one is installed.
        version = importlib.metadata.version(package)
        function = getattr(importlib.import_module(module), name)
        known = inspect.signature(function).parameters
    except Exception as error:
        # The import compiles and loads libraries, whose errors are of any type.
        absent = isinstance(error, ModuleNotFoundError)
        why = "it isn't installed" if absent else f"its import fails ({type(error).__name__}: {str(error).strip()[:100]})"
        return None, f"{why}: pip install {package}"
    lacking = [one for one in wanted if one not in known]
    return (function, None) if not lacking else (None, f"its version {version} has no {lacking[0]}: pip install -U {package}")


class Library(Provider):
    """A package's function of 16-bit tensors, with its own gradients, for head sizes in multiples of some number."""

    wanted: tuple[str, ...] = ()
    """Parameters of its function that are passed: a version without them doesn't fit."""
    multiple = 8

    def __init__(self, name: str, title: str, package: str, module: str, function: str) -> None:
        super().__init__(name, title)
        self.package, self._module, self._function = package, module, function

    @functools.cached_property
    def _found(self) -> tuple[Callable[..., Any] | None, str | None]:
        """Its function, or None and the reason."""
        return found_in(self.package, self._module, self._function, self.wanted)

    def missing(self) -> str | None:
        """As the base class."""
        return self._found[1]

    def refusal(self, call: Call, tensors: Tensors, per_head: PerHead | None) -> str | None:
        """As the base class; head sizes that it lacks on this GPU show when it is called."""
        why = super().refusal(call, tensors, per_head)
        odd = why is None and (call.d % self.multiple or call.d_v % self.multiple)
        return f"it takes head sizes in multiples of {self.multiple}, not {call.d} and {call.d_v}" if odd else why

    def computes(self) -> Callable[..., Any]:
        """Its function; raises InputError where there is none."""
        compute, why = self._found
        if compute is None:
            raise InputError(f"{self.title} can't be used: {why}")
        return compute


def causal_alone(call: Call) -> str | None:
    """Reason why a function with a causal diagonal, and no other band, can't serve a call; None where it can."""
    ends = 0, call.n_kv - call.n_q
    causal = call.band.left is None and call.band.right == 0 and call.band.diagonal in ends and call.band.diagonal >= 0
    return None if causal or not call.band.bounded else "it takes no band but the causal one, from the first key or to the last"


def on_its_device(call: Call, run: Function) -> Function:
    """The function, run with the tensors' GPU as the current one."""
    index = call.device.index

    def there(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        if index is not None and C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return run(query, key, value, sinks)
        return run(query, key, value, sinks)

    return there
