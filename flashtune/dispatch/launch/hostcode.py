"""A rendered module's host code without Triton: where its kernels are at hand as machine code, importing a compiler would be all that
a first call waits for, and there may be none."""

import builtins
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, NamedTuple


class Kernel:
    """In a kernel's place: its name, by which its machine code is found."""

    __slots__ = ("__name__",)

    def __init__(self, name: str) -> None:
        self.__name__ = name


class TensorDescriptor(NamedTuple):
    """In the place of Triton's and Gluon's descriptors: what they hold."""

    base: Any
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: Any = None


class _Triton:
    """In the place of Triton and all its modules: what host code uses of them, and for kernels' own text something that takes any use."""

    JITFunction = Kernel
    TensorDescriptor = TensorDescriptor

    @staticmethod
    def cdiv(number: int, divisor: int) -> int:
        return -(-number // divisor)

    @staticmethod
    def jit(function: Callable[..., Any] | None = None, **_: object) -> Any:
        """The decorator, with or without options."""
        return _Triton.jit if function is None else Kernel(function.__name__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        return self


_TRITON = _Triton()


def load_host_code(text: str | CodeType, stem: str) -> ModuleType:
    """The module of a rendered text, which may be compiled to bytecode, with its host functions (accepts, records, counts_needed,
    launches); its kernels are only named."""

    def imported(name: str, given: Mapping[str, Any] | None = None, local: Any = None, names: Sequence[str] = (), level: int = 0) -> Any:
        return _TRITON if name.split(".")[0] == "triton" else builtins.__import__(name, given, local, names, level)

    module = ModuleType(f"flashtune_host_{stem}", "Host code of a kernel.")
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": imported}
    exec(compile(text, f"<host code of {stem}>", "exec") if isinstance(text, str) else text, module.__dict__)
    return module
