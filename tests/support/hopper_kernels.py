"""Hopper kernels for tests on a machine without a GPU: problems and configs, machine code, and what of a rendered text torch can run."""

import ast
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton import knobs
from triton.language import constexpr

from flashtune.core.code.launching import compiler_options, provided
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates.hopper.flash_fwd_hopper import FAMILY
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiling_for
from flashtune.tuner.verify.inputs import Inputs, make_inputs

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""Kernel, grid, arguments and options."""

H200 = find_target("h200")
PLAIN: dict[str, int | str | bool] = {
    "BLOCK_M": 128,
    "BLOCK_N": 64,
    "num_stages": 2,
    "intra_wg_overlap": 1,
    "pingpong": False,
    "tiles": "one",
    "section": 1,
    "order": "fixed",
    "ctas_per_sm": 1,
    "maximum": "running",
    "rescale": "always",
    "v_columns": "padded",
    "packed_heads": 1,
}
"""The config that tests change, written out so that no better default changes what they look at."""


def problem(d: int = 128, features: Features | None = None, *, d_v: int = 0, dtype: DType = "bf16") -> Problem:
    """A small problem with ragged lengths and shared key heads."""
    chosen = features or Features()
    return Problem(batch=2, heads=4, kv_heads=2, n_q=1000, n_kv=1100, d=d, d_v=d_v or d, dtype=dtype, features=chosen)


def config(spec: KernelSpec, **changes: int | str | bool) -> Config:
    """PLAIN with changes; it keeps every constraint, with thresholded rescale where maxima settle."""
    settles = {"rescale": "grown"} if changes.get("maximum") == "first" else {}
    chosen = Config.of({**PLAIN, **settles}, **changes)
    violated = FAMILY.violated(chosen, spec, H200)
    assert violated is None, f"{chosen.label()} breaks {violated}"
    return chosen


def source(spec: KernelSpec, **changes: int | str | bool) -> str:
    """The rendered text of `config(spec, **changes)`."""
    return render(FAMILY, variant_of(FAMILY, spec, config(spec, **changes)))


def rendered(spec: KernelSpec, **changes: int | str | bool) -> ModuleType:
    """The imported module of `config(spec, **changes)`."""
    return load_kernel(source(spec, **changes), "hopper")


def launches(module: ModuleType, inputs: Inputs, **keywords: Any) -> list[Launch]:
    """The launches of a rendered module that serve these inputs, with some of their keywords changed."""
    found: list[Launch] = module.launches(*inputs.arguments, **inputs.keywords | provided(module, inputs.q, inputs.k) | keywords)
    return found


def launches_of(wanted: Problem, **changes: int | str | bool) -> dict[str, Launch]:
    """The launches that serve `wanted`, by their kernels' names, with tensors on the meta device.

    Masks are packed and e4m3 values transposed before the attention kernel, and what comes after looks for rows to compute again.
    """
    found = launches(rendered(wanted.spec(), **changes), make_inputs(wanted, device="meta", seed=0))
    return {launch[0].__name__: launch for launch in found}


def launch_of(wanted: Problem, **changes: int | str | bool) -> Launch:
    """The launch of the attention kernel itself among `launches_of`."""
    return launches_of(wanted, **changes)[FAMILY.name]


def compiled(wanted: Problem, **changes: int | str | bool) -> Any:
    """The kernel of `launch_of`, compiled for an H200; skips the test where the installed Triton can't."""
    if why := FAMILY.uncompilable(wanted.spec(), config(wanted.spec(), **changes)):
        pytest.skip(why)
    kernel, grid, arguments, options = launch_of(wanted, **changes)
    with compiling_for(H200):
        return kernel.warmup(*arguments, grid=grid, **compiler_options(options))


def machine_code(kernel: Any) -> list[str]:
    """The instructions of a compiled kernel, and its labels with a colon at their end."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        text = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return ["".join(found) for found in re.findall(r"^\s*(?:(\.L_x_\d+:)|/\*[0-9a-f]+\*/\s+(.*?);)", text, re.MULTILINE)]


def accesses(kernels: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """How often the machine code of each kernel loads and stores, by how much at once."""
    access = re.compile(r"\b(?:LDGSTS|LDG|STG)\.E\S*")
    return {name: Counter(access.findall("\n".join(machine_code(kernel)))) for name, kernel in kernels.items()}


def are_sixteen_bytes(found: Mapping[str, Counter[str]]) -> None:
    """Accesses of none but what adds up the parts of few queries, which stores a row a program, are of single numbers, and some are wide.

    Products that the copy engine serves have no accesses of their own."""
    assert not [name for name, widths in found.items() if any("U16" in width for width in widths) and name != "combine_splits"]
    assert any("128" in width for widths in found.values() for width in widths)


def count(code: list[str]) -> Counter[str]:
    """Instructions by name, without predicates and modifiers: `@!P0 SHFL.BFLY PT, R4, ...` counts as SHFL."""
    return Counter(re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].split(".")[0] for line in code if not line.endswith(":"))


def key_loops(code: list[str]) -> list[Counter[str]]:
    """Result of `count` in each innermost loop with matrix products: one loop for every warpgroup."""
    labels = {line[:-1]: place for place, line in enumerate(code) if line.endswith(":")}
    jumps = ((place, re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)) for place, line in enumerate(code))
    loops = [range(labels[jump[1]], place + 1) for place, jump in jumps if jump and labels[jump[1]] <= place]
    # A loop that only sleeps holds a place.
    loops = [loop for loop in loops if not (any("NANOSLEEP" in code[at] for at in loop) and not any("GMMA" in code[at] for at in loop))]
    inner = (loop for loop in loops if not any(other != loop and other[0] in loop and other[-1] in loop for other in loops))
    counts = (count(code[loop.start : loop.stop]) for loop in inner)
    return [found for found in counts if found["HGMMA"] + found["QGMMA"]]


def names_of(module: Any) -> dict[str, Any]:
    """Names that a rendered module defines."""
    return vars(getattr(module, "module", module))


def words_of(allowed: torch.Tensor) -> torch.Tensor:
    """The bits of a block's columns, bool (..., BLOCK_N), as the four words of a row, int64 (..., 4).

    Bit 2 i + j of word t stands for column 8 i + 2 t + j: a word has what one of a row's four threads holds.
    """
    words = torch.zeros(*allowed.shape[:-1], 4, dtype=torch.int64)
    for column in range(allowed.shape[-1]):
        words[..., column % 8 // 2] |= allowed[..., column].long() << (column // 8 * 2 + column % 2)
    return words


class Truncate(ast.NodeTransformer):
    """Integer division as Triton does it, towards zero."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = {ast.FloorDiv: "quotient", ast.Mod: "remainder"}.get(type(node.op))
        return ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], []) if name else node


class Fuse(ast.NodeTransformer):
    """A product and a sum with one rounding, as the compiler makes one instruction of them."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        product, sign = node.left, {ast.Add: 1, ast.Sub: -1}.get(type(node.op))
        if sign is None or not (isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult)):
            return node
        return ast.Call(ast.Name("fused", ast.Load()), [product.left, product.right, node.right, ast.Constant(sign)], [])


def fused(a: Any, b: Any, c: Any, sign: int) -> Any:
    """a * b + sign * c: of float32 by way of float64, which holds the product; of whole numbers as they wrap around."""
    if np.asarray(a).dtype == np.float32:
        return (np.float64(1) * a * b + np.float64(sign) * c).astype(np.float32).view(Array)
    return a * b + c if sign > 0 else a * b - c


@cache
def _changed(text: str, name: str, change: type[ast.NodeTransformer]) -> CodeType:
    """Code that defines a function of this text. Most configs have most functions in common, and a kernel is launched many times."""
    tree = ast.parse(text)
    [function] = tree.body
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    return compile(ast.fix_missing_locations(change().visit(tree)), name, "exec")


def functions_of(module: ModuleType, names: tuple[str, ...], scope: dict[str, Any], change: type[ast.NodeTransformer]) -> dict[str, Any]:
    """The named device functions of a rendered module as ordinary ones; they see each other, the module's constants and `scope`."""
    shared = {name: value for name, value in names_of(module).items() if hasattr(value, "_fields")}
    scope = {name: value.value for name, value in names_of(module).items() if isinstance(value, constexpr)} | shared | scope
    for name in names:
        exec(_changed("".join(getattr(module, name).raw_src), name, change), scope)
    return {name: scope[name] for name in names}


def on_torch(module: ModuleType, *names: str) -> Any:
    """The named device functions of a rendered module as ordinary ones, over tensors of torch; they see each other and its constants.

    They call the `gl` of what is returned, where a test can put a stand-in for what only a GPU has.
    """

    def both(operation: Any) -> Any:
        return lambda a, b: operation(torch.as_tensor(a), torch.as_tensor(b))

    gl = SimpleNamespace(
        int32=torch.int32,
        int64=torch.int64,
        minimum=both(torch.minimum),
        maximum=both(torch.maximum),
        where=torch.where,
        split=lambda tensor: tensor.unbind(-1),
        constexpr=constexpr,
    )
    scope = {"gl": gl, "quotient": both(partial(torch.div, rounding_mode="trunc")), "remainder": both(torch.fmod)}
    return SimpleNamespace(gl=gl, **functions_of(module, names, scope, Truncate))


class Array(np.ndarray):
    """An array that has what device functions ask of a tensor; layouts mean nothing where no thread holds a part of it."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> "Array":
        return self.view(dtype) if bitcast else self.astype(dtype)

    def expand_dims(self, axis: int) -> "Array":
        return np.expand_dims(self, axis).view(Array)

    def permute(self, order: tuple[int, ...]) -> "Array":
        return self.transpose(order)


def _set_geu(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Half a register of ones where a half word is at least the other one's, or either is NaN."""
    a, b = (np.stack((x & 0xFFFF, x >> 16)).astype(np.uint16).view(np.float16) for x in (a, b))
    low, high = np.where(a < b, 0, 0xFFFF).astype(np.uint64)
    return low | high << 16


def _setp_geu(a: np.ndarray, b: np.ndarray, other: np.ndarray) -> np.ndarray:
    """For each half word whether it is at least the other one's, or either is NaN, unless `other` is true: bit 0 and bit 1."""
    halves = _set_geu(a, b) & 0x10001
    return (halves & 1 | halves >> 15) ^ np.where(other != 0, 3, 0).astype(np.uint64)


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both, found = (a & 0xFFFFFFFF) | b << 32, np.zeros_like(a)
    for byte in range(4):
        found |= (both >> (selector >> 4 * byte & 7) * 8 & 0xFF) << 8 * byte
    return found


def _shifted(bits: int) -> Callable[..., np.ndarray]:
    # Unlike numpy's, PTX's shifts take any distance.
    return lambda x, distance: np.where(distance < bits, x << np.minimum(distance, bits - 1), 0)


def _of_floats(operation: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def operate(*registers: np.ndarray) -> np.ndarray:
        floats = (register.astype(np.uint32).view(np.float32) for register in registers)
        return operation(*floats).astype(np.float32).view(np.uint32).astype(np.uint64)

    return operate


def _signed(register: np.ndarray) -> np.ndarray:
    return register.astype(np.uint32).view(np.int32)


INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    **{f"mov.b{bits}": lambda x: x for bits in (32, 64)},
    **{f"add.s{bits}": lambda x, y: x + y for bits in (32, 64)},
    **{f"shl.b{bits}": _shifted(bits) for bits in (32, 64)},
    "and.b32": lambda x, y: x & y,
    "xor.b32": lambda x, y: x ^ y,
    "shf.l.wrap.b32": lambda low, high, distance: high << distance | low >> (32 - distance),
    "setp.ne.u32": lambda x, y: (x != y).astype(np.uint64),
    "setp.ge.s32": lambda x, y: (_signed(x) >= _signed(y)).astype(np.uint64),
    "setp.le.s32": lambda x, y: (_signed(x) <= _signed(y)).astype(np.uint64),
    "selp.f32": lambda x, y, chosen: np.where(chosen != 0, x, y),
    "prmt.b32": _permuted,
    "setp.geu.xor.f16x2": _setp_geu,
    "abs.f16x2": lambda x: x & 0x7FFF7FFF,
    "set.geu.u32.f16x2": _set_geu,
    "abs.ftz.f32": _of_floats(np.abs),
    "mul.ftz.f32": _of_floats(np.multiply),
    "max.f32": _of_floats(np.maximum),
    "max.s32": lambda x, y: np.maximum(_signed(x), _signed(y)).view(np.uint32).astype(np.uint64),
    "add.rn.f32": _of_floats(np.add),
    "sub.rn.f32": _of_floats(np.subtract),
    "fma.rn.f32": _of_floats(lambda x, y, z: x.astype(np.float64) * y + z),
    "ex2.approx.ftz.f32": _of_floats(np.exp2),
    "copysign.f32": _of_floats(lambda sign, number: np.copysign(number, sign)),
}
"""What of PTX the kernels' assembly needs, over registers as 64 bits of which those past an instruction's width are dropped."""


def assembly(text: str, _constraints: str, arguments: list[np.ndarray], *, dtype: Any, is_pure: bool, pack: int) -> Any:
    """Result of `gl.inline_asm_elementwise`, an element at a time, or `pack` that follow one another in a row."""
    if pack > 1:
        groups = [rows[..., place::pack] for rows in arguments for place in range(pack)]
        found = assembly(text, _constraints, groups, dtype=(dtype,) * pack, is_pure=is_pure, pack=1)
        return np.stack(found, -1).reshape(arguments[0].shape).view(Array)
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    arguments = [np.ascontiguousarray(argument) for argument in np.broadcast_arrays(*arguments)]
    held = {f"${place}": argument.view(f"u{argument.itemsize}").astype(np.uint64) for place, argument in enumerate(arguments, len(kinds))}
    for line in re.sub(r"[{}]|\.reg[^;]*;", "", text).split(";"):
        if line.strip():
            name, target, *places = line.replace(",", " ").split()
            mask = np.uint64(2**64 - 1 if name.endswith("64") else 2**32 - 1)
            numbers = (
                np.uint64(int(place[2:], 16) if place.startswith("0f") else int(place) % 2**64) for place in places if place not in held
            )
            sources = [held[place] if place in held else next(numbers) for place in places]
            found = INSTRUCTIONS[name](*sources) & mask
            # Two predicates are a bit each.
            held |= {one: found >> bit & 1 for bit, one in enumerate(target.split("|"))} if "|" in target else {target: found}
    # A constant is the same for all elements.
    registers = [np.broadcast_to(held[f"${place}"], arguments[0].shape) for place in range(len(kinds))]
    results = [
        register.astype(f"u{np.dtype(kind).itemsize}").view(kind).view(Array) for register, kind in zip(registers, kinds, strict=True)
    ]
    return results if isinstance(dtype, tuple) else results[0]


def _scalar(number: float) -> Array:
    """A number as a kernel is given it: 32 bits wide where these hold it."""
    kind = np.int32 if isinstance(number, int) and -(2**31) <= number < 2**31 else None
    return np.array([[number]], kind).view(Array)


def _scalars(numbers: Any) -> Any:
    return numbers._make(_scalars(number) if isinstance(number, tuple) else _scalar(number) for number in numbers)


def on_numpy(module: ModuleType, *names: str) -> Any:
    """The named device functions of a rendered module as ordinary ones, over numpy's integers, which wrap around like the GPU's.

    They are for numbers that aren't negative, where numpy divides as the GPU does. `scalar` makes an argument of a number, and `scalars`
    of all that are in a named tuple.
    """
    gl = SimpleNamespace(
        **{name: getattr(np, name) for name in ("int32", "int64", "uint32", "uint64", "float32")},
        arange=lambda first, end, layout: np.arange(first, end, dtype=np.int32).view(Array),
        zeros=lambda shape, dtype, layout: np.zeros(shape, dtype).view(Array),
        full=lambda shape, value, dtype, layout: np.full(shape, value, dtype).view(Array),
        abs=np.abs,
        minimum=np.minimum,
        maximum=np.maximum,
        convert_layout=lambda array, layout: array,
        where=lambda *arguments: np.where(*arguments).view(Array),
        split=lambda array: (array[..., 0], array[..., 1]),
        join=lambda one, other: np.stack((one, other), -1).view(Array),
        to_tensor=_scalar,
        static_range=range,
        SliceLayout=lambda axis, parent: None,
        inline_asm_elementwise=assembly,
        constexpr=constexpr,
    )
    return SimpleNamespace(gl=gl, scalar=_scalar, scalars=_scalars, **functions_of(module, names, {"gl": gl, "fused": fused}, Fuse))


def sizes_of(launch: Launch, **changes: int) -> Any:
    """The `Sizes` that the device functions of a launch pass around, with some of its numbers changed."""
    kernel, _, arguments, _ = launch
    given = dict(zip(kernel.arg_names, arguments, strict=True)) | changes
    kinds = kernel.fn.__globals__
    fields = kinds["Sizes"]._fields
    divisors = {name: name.removesuffix("_divisor") for name in fields if name.endswith("_divisor")}
    found = {name: given[name] for name in fields if name not in divisors}
    found |= {name: kinds["Divisor"](given[f"{short}_magic"], given[f"{short}_shift"]) for name, short in divisors.items()}
    return kinds["Sizes"](**found)
