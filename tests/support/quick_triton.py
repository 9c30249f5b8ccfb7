"""Triton 3.6's interpreter, spared what it finds out anew at each operation: the same numbers in a third of the time."""

import functools
import inspect
import math
from types import ModuleType
from typing import Any


def quicken() -> None:
    """Have this process' interpreter keep what doesn't change: names of the language, types, shapes."""
    from triton.runtime import interpreter

    _keep_numpys_types(interpreter)
    _patch_once_per_launch(interpreter)
    _keep_shapes()
    _compare_quickly()
    _broadcast_quickly()
    # Checks of overflow are computed, and dropped since nothing is debugged (`TritonSemantic.device_assert`).
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _keep_numpys_types(interpreter: Any) -> None:
    import triton.language as tl

    dtype_of = interpreter._get_np_dtype
    scalar_of = functools.cache(dtype_of)
    interpreter._get_np_dtype = lambda t: dtype_of(t) if isinstance(t.scalar, tl.pointer_type) else scalar_of(t.scalar)


def _patch_once_per_launch(interpreter: Any) -> None:
    """Functions that a kernel calls see the language that the launch has replaced, or one that they replace for the rest of it."""
    import triton.language as tl

    builtins, patch_lang = functools.cache(_builtins), interpreter._patch_lang
    patched: set[ModuleType] = set()

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    @functools.cache
    def languages(function: Any) -> frozenset[ModuleType]:
        return frozenset(value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core))

    class Launch:
        def __init__(self, scope: Any) -> None:
            self._scope = scope

        def restore(self) -> None:
            patched.clear()
            self._scope.restore()

    def patch_languages(function: Any) -> Any:
        missing = languages(function) - patched
        if not missing and patched:
            return interpreter._LangPatchScope()
        scope = Launch(patch_lang(function))
        patched.update(missing)
        return scope

    interpreter._patch_builtin, interpreter._patch_lang = patch, patch_languages


def _builtins(package: Any) -> list[str]:
    """The names of a package's functions that the interpreter replaces, asked for while they are Triton's own."""
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def _keep_shapes() -> None:
    """One tuple for each shape, of a type's numbers and of a tensor's constants, neither of which is ever changed."""
    from triton.language import core

    shapes: dict[Any, Any] = {}
    names: dict[Any, str] = {}
    make_type, unwrapped = core.block_type.__init__, core._unwrap_if_constexpr

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = tuple([unwrapped(size) for size in shape])
        if (known := shapes.get(numbers)) is None:
            make_type(self, element_ty, shape)
            constants = core.tuple([core.constexpr(size) for size in numbers])
            shapes[numbers] = self.shape, self.numel, core.constexpr(math.prod(numbers)), constants
            return
        self.element_ty = element_ty
        self.shape, self.numel = known[:2]
        self.kept = known
        if (name := names.get((numbers, element_ty.name))) is None:
            name = names[numbers, element_ty.name] = f"<{self.shape}, {element_ty}>"
        self.name = name

    one, none = core.constexpr(1), core.tuple([])

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.numel, self.shape = one, none
        elif (known := getattr(type, "kept", None)) is not None:
            self.numel, self.shape = known[2:]
        else:
            self.numel = core.constexpr(math.prod(type.shape))
            self.shape = core.tuple([core.constexpr(size) for size in type.shape])

    core.block_type.__init__, core.tensor.__init__ = new_type, new_tensor


def _compare_quickly() -> None:
    """Types compare by name without looking for constants among them."""
    from triton.language import core

    equal = core.dtype.__eq__

    def same(self: Any, other: Any) -> bool:
        return self.name == other.name if other.__class__ is core.dtype else equal(self, other)

    def unwrapped(o: Any) -> Any:
        if isinstance(o, core.constexpr):
            return o.value
        if isinstance(o, list):
            return [unwrapped(x) for x in o]
        if isinstance(o, tuple):
            return tuple([unwrapped(x) for x in o])
        return core.tuple([unwrapped(x) for x in o]) if isinstance(o, core.tuple) else o

    core.dtype.__eq__, core._unwrap_if_constexpr = same, unwrapped


def _broadcast_quickly() -> None:
    """Operands of one shape are as they are."""
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def operands(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        same = a.shape.values == b.shape.values if a.is_block() and b.is_block() else a.is_block() == b.is_block()
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = operands
