"""Triton 3.6's interpreter without its repeated work: otherwise it replaces its language at every call of a device function, and
makes new tuples, names and constants of a shape for every tensor. Numbers stay the same.
"""

import functools
import importlib
import inspect
import math
from types import ModuleType
from typing import Any


@functools.cache
def quicken() -> None:
    """Caches of names, types and shapes for this process's interpreter; other versions of Triton stay as they are."""
    triton: Any = importlib.import_module("triton")
    if not (triton.knobs.runtime.interpret and triton.__version__.startswith("3.6.")):
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    _keep_numpys_types(interpreter)
    _replace_the_language_once(interpreter)
    _keep_shapes()
    _compare_quickly()
    _take_operands_quickly()
    _convert_quickly(interpreter)
    if not interpreter.interpreter_builder.options.debug:
        # Checks of overflow are computed, and then dropped (TritonSemantic.device_assert).
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _keep_numpys_types(interpreter: Any) -> None:
    """Cache numpy's types of Triton's."""
    tl: Any = importlib.import_module("triton.language")
    dtype_of = interpreter._get_np_dtype
    scalar_of = functools.cache(dtype_of)
    interpreter._get_np_dtype = lambda t: dtype_of(t) if isinstance(t.scalar, tl.pointer_type) else scalar_of(t.scalar)


def _replace_the_language_once(interpreter: Any) -> None:
    """One replacement of the language for a launch, which the functions that its kernel calls see, too."""
    tl: Any = importlib.import_module("triton.language")
    builtins, patch_lang = functools.cache(_builtins), interpreter._patch_lang
    patched: set[ModuleType] = set()
    marked = tl.core.builtin(lambda: None).__code__

    @functools.cache
    def interpreted(member: Any, builder: Any) -> Any:
        semantic = interpreter.TritonSemantic(builder)
        # What marks a function as Triton's own only asks for the argument that is given here.
        function = member.__wrapped__ if getattr(member, "__code__", None) is marked else member

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*arguments, **named)

        return call

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                scope.set_attr(package, name, interpreted(member, builder))

    @functools.cache
    def languages(function: Any) -> frozenset[ModuleType]:
        return frozenset(value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core))

    class Launch:
        """Scope of the functions that a launch replaces."""

        def __init__(self, scope: Any) -> None:
            self._scope = scope

        def restore(self) -> None:
            """Put back the functions of the language."""
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
    """Names of a package's functions that the interpreter replaces, read while they are Triton's own."""
    core: Any = importlib.import_module("triton.language.core")
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _keep_shapes() -> None:
    """Cache the tuples of each shape, of a type's numbers and of a tensor's constants, none of which is ever changed."""
    core: Any = importlib.import_module("triton.language.core")
    shapes: dict[Any, Any] = {}
    # Kept shapes are never freed, so that nothing else has their place.
    places: dict[int, Any] = {}
    names: dict[Any, str] = {}
    make_type, unwrapped = core.block_type.__init__, core._unwrap_if_constexpr

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        if (known := places.get(id(shape))) is None:
            numbers = tuple([unwrapped(size) for size in shape])
            if (known := shapes.get(numbers)) is None:
                make_type(self, element_ty, shape)
                constants = core.tuple([core.constexpr(size) for size in numbers])
                known = self.shape, self.numel, core.constexpr(math.prod(numbers)), constants
                self.kept = shapes[numbers] = places[id(self.shape)] = known
                return
        self.element_ty, self.kept = element_ty, known
        self.shape, self.numel = known[:2]
        if (name := names.get((id(self.shape), element_ty.name))) is None:
            name = names[id(self.shape), element_ty.name] = f"<{self.shape}, {element_ty}>"
        self.name = name

    one, none = core.constexpr(1), core.tuple([])

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.numel, self.shape = one, none
        else:
            self.numel, self.shape = type.kept[2:]

    core.block_type.__init__, core.tensor.__init__ = new_type, new_tensor


def _compare_quickly() -> None:
    """Compare types by name without looking for constants among them."""
    core: Any = importlib.import_module("triton.language.core")
    equal = core.dtype.__eq__

    def same(self: Any, other: Any) -> bool:
        return bool(self.name == other.name if other.__class__ is core.dtype else equal(self, other))

    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type}

    def unwrapped(o: Any) -> Any:
        if o.__class__ in plain:
            return o
        if isinstance(o, core.constexpr):
            return o.value
        if isinstance(o, list):
            return [unwrapped(x) for x in o]
        if isinstance(o, tuple):
            return tuple([unwrapped(x) for x in o])
        return core.tuple([unwrapped(x) for x in o]) if isinstance(o, core.tuple) else o

    core.dtype.__eq__, core._unwrap_if_constexpr = same, unwrapped


_MOST_CONSTANTS = 4096
"""Most constants that are kept: few kernels have a hundred."""


def _take_operands_quickly() -> None:
    """Leave operands of one type or shape as they are, and keep the constants that numbers beside a tensor become."""
    core: Any = importlib.import_module("triton.language.core")
    semantic: Any = importlib.import_module("triton.language.semantic").TritonSemantic
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    constants: dict[Any, Any] = {}

    def checked(self: Any, lhs: Any, rhs: Any, *rules: Any, **named: Any) -> Any:
        left, right = lhs.__class__ is core.tensor, rhs.__class__ is core.tensor
        if left and right and lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in ("fp32", "int32", "int64", "int1"):
            return operands(self, lhs, rhs)
        if left and right and rules[:1] == (True,) and lhs.dtype.is_ptr() and rhs.dtype.is_int():
            return operands(self, lhs, rhs)
        beside, number = (lhs, rhs) if left else (rhs, lhs)
        if left == right or named or number.__class__ not in (int, float):
            return check(self, lhs, rhs, *rules, **named)
        # 0.0 and -0.0 are equal, but not their texts.
        key = beside.type.name, repr(number), left, rules
        if (constant := constants.get(key)) is None:
            found = check(self, lhs, rhs, *rules)
            same, constant = found if left else found[::-1]
            if same is not beside:
                return found
            if len(constants) == _MOST_CONSTANTS:
                constants.clear()
            constants[key] = constant
        return (beside, constant) if left else (constant, beside)

    def operands(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() != b.is_block():
            return (lhs, splat(self, rhs, a)) if a.is_block() else (splat(self, lhs, b), rhs)
        same = not a.is_block() or a.shape.values == b.shape.values
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    def splat(self: Any, x: Any, like: Any) -> Any:
        kind = like.with_element_ty(x.type.scalar)
        return core.tensor(self.builder.create_splat(kind, x.handle), kind)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = checked, operands


def _convert_quickly(interpreter: Any) -> None:
    """Leave tensors as they are that have the type already, and types of the interpreter, which are Triton's own."""
    core: Any = importlib.import_module("triton.language.core")
    semantic: Any = importlib.import_module("triton.language.semantic").TritonSemantic
    to_tensor, cast, empty, dtype_of = semantic.to_tensor, semantic.cast, interpreter.np.empty, interpreter._get_np_dtype

    def tensor_of(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if x.__class__ is core.tensor else to_tensor(self, x, check_type)

    def converted(self: Any, input: Any, dst_ty: Any, rounding: Any = None) -> Any:
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, rounding)

    def splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        data = empty(ret_ty.shape.values, dtype_of(arg.dtype))
        data[...] = arg.data
        return interpreter.TensorHandle(data, arg.dtype.scalar)

    semantic.to_tensor, semantic.cast = tensor_of, converted
    interpreter.InterpreterBuilder.create_splat = splat
    core.block_type.to_ir = lambda self, builder: self
