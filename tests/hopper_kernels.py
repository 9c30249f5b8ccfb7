"""Hopper kernels for tests on a machine without a GPU: problems and configs, machine code, and what of a rendered text torch can run."""

import ast
import inspect
import re
import subprocess
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.language import constexpr

from flashtune.core.config import Config, KernelSpec
from flashtune.core.dtypes import DType
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.core.target import find_target
from flashtune.templates.flash_fwd_hopper import FAMILY
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.compile import compiling_for
from flashtune.tuner.inputs import make_inputs

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""Kernel, grid, arguments and options."""

H200 = find_target("h200")
PLAIN: dict[str, int | str | bool] = {
    "BLOCK_M": 128,
    "BLOCK_N": 64,
    "stages": 2,
    "lookahead": 1,
    "pingpong": False,
    "tiles": "one",
    "section": 1,
    "order": "fixed",
    "residents": 1,
}
"""The config that tests change, written out so that no better default changes what they look at."""


def problem(d: int = 128, features: Features | None = None, *, d_v: int = 0, dtype: DType = "bf16") -> Problem:
    """A small problem with ragged lengths and shared key heads."""
    chosen = features or Features()
    return Problem(batch=2, heads=4, kv_heads=2, n_q=1000, n_kv=1100, d=d, d_v=d_v or d, dtype=dtype, features=chosen)


def config(spec: KernelSpec, **changes: int | str | bool) -> Config:
    """PLAIN with changes; it keeps every constraint."""
    chosen = Config.of(PLAIN, **changes)
    violated = FAMILY.violated(chosen, spec, H200)
    assert violated is None, f"{chosen.label()} breaks {violated}"
    return chosen


def source(spec: KernelSpec, **changes: int | str | bool) -> str:
    """The rendered text of `config(spec, **changes)`."""
    return render(FAMILY, variant_of(FAMILY, spec, config(spec, **changes)))


def rendered(spec: KernelSpec, **changes: int | str | bool) -> ModuleType:
    """The imported module of `config(spec, **changes)`."""
    return load_source(source(spec, **changes), "hopper")


def launch_of(wanted: Problem, **changes: int | str | bool) -> Launch:
    """The launch of the attention kernel that serves `wanted`, with tensors on the meta device."""
    inputs = make_inputs(wanted, device="meta", seed=0)
    # e4m3 values are turned by a launch before.
    [*_, attention] = rendered(wanted.spec(), **changes).launches(*inputs.arguments, **inputs.keywords)
    return attention


def compiled(wanted: Problem, **changes: int | str | bool) -> Any:
    """The kernel of `launch_of`, compiled for an H200."""
    kernel, grid, arguments, options = launch_of(wanted, **changes)
    with compiling_for(H200):
        return kernel.warmup(*arguments, grid=grid, **options)


def machine_code(kernel: Any) -> list[str]:
    """The instructions of a compiled kernel, and its labels with a colon at their end."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        text = subprocess.run([knobs.nvidia.nvdisasm.path, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return ["".join(found) for found in re.findall(r"^\s*(?:(\.L_x_\d+:)|/\*[0-9a-f]+\*/\s+(.*?);)", text, re.MULTILINE)]


def count(code: list[str]) -> Counter[str]:
    """Instructions by name, without predicates and modifiers: `@!P0 SHFL.BFLY PT, R4, ...` counts as SHFL."""
    return Counter(re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].split(".")[0] for line in code if not line.endswith(":"))


def key_loops(code: list[str]) -> list[Counter[str]]:
    """What `count` finds in each innermost loop with matrix products: one loop for every warpgroup."""
    labels = {line[:-1]: place for place, line in enumerate(code) if line.endswith(":")}
    jumps = ((place, re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)) for place, line in enumerate(code))
    loops = [range(labels[jump[1]], place + 1) for place, jump in jumps if jump and labels[jump[1]] <= place]
    inner = (loop for loop in loops if not any(other != loop and other[0] in loop and other[-1] in loop for other in loops))
    counts = (count(code[loop.start : loop.stop]) for loop in inner)
    return [found for found in counts if found["HGMMA"] + found["QGMMA"]]


class _Truncate(ast.NodeTransformer):
    """Integer division as Triton does it, towards zero."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = {ast.FloorDiv: "quotient", ast.Mod: "remainder"}.get(type(node.op))
        return ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], []) if name else node


def _functions(module: ModuleType, names: tuple[str, ...], scope: dict[str, Any], change: ast.NodeTransformer) -> dict[str, Any]:
    """The named device functions of a rendered module as ordinary ones; they see each other, the module's constants and `scope`."""
    scope = {name: value.value for name, value in vars(module).items() if isinstance(value, constexpr)} | scope
    for name in names:
        tree = ast.parse(inspect.getsource(getattr(module, name).fn))
        [function] = tree.body
        assert isinstance(function, ast.FunctionDef)
        function.decorator_list = []
        exec(compile(ast.fix_missing_locations(change.visit(tree)), name, "exec"), scope)
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
    return SimpleNamespace(gl=gl, **_functions(module, names, scope, _Truncate()))


class _Words(np.ndarray):
    """An array that has what device functions ask of a tensor."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> "_Words":
        return self.astype(dtype)


def _assembly(text: str, _constraints: str, arguments: list[_Words], **_words: object) -> _Words:
    """What the two pieces of assembly of dropout compute."""
    if text == "shf.l.wrap.b32 $0, $1, $1, 8;":
        return arguments[0] << 8 | arguments[0] >> 24
    assert text == "{ .reg .b32 draw; abs.f16x2 draw, $1; set.geu.u32.f16x2 draw, draw, $2; xor.b32 $0, draw, $3; }"
    draws, bounds, sides = (np.broadcast_to(argument, arguments[0].shape).copy().view(np.uint16) for argument in arguments)
    # `geu` is also true where an operand is NaN.
    above = ~(np.abs(draws.view(np.float16)) < bounds.view(np.float16))
    return (np.where(above, 0xFFFF, 0).astype(np.uint16) ^ sides).view(np.int32).view(_Words)


def _scalar(number: float) -> _Words:
    """A number as a kernel is given it: 32 bits wide where these hold it."""
    kind = np.int32 if isinstance(number, int) and -(2**31) <= number < 2**31 else None
    return np.array([[number]], kind).view(_Words)


def on_numpy(module: ModuleType, *names: str) -> Any:
    """The named device functions of a rendered module as ordinary ones, over numpy's integers, which wrap around like the GPU's.

    They are for numbers that aren't negative, where numpy divides as the GPU does. `scalar` makes an argument of a number.
    """
    gl = SimpleNamespace(
        **{name: getattr(np, name) for name in ("int32", "int64", "uint32", "uint64")},
        arange=lambda first, end, layout: np.arange(first, end, dtype=np.int32).view(_Words),
        zeros=lambda shape, dtype, layout: np.zeros(shape, dtype).view(_Words),
        where=lambda *arguments: np.where(*arguments).view(_Words),
        split=lambda array: (array[..., 0], array[..., 1]),
        to_tensor=_scalar,
        static_range=range,
        SliceLayout=lambda axis, parent: None,
        inline_asm_elementwise=_assembly,
        constexpr=constexpr,
    )
    return SimpleNamespace(scalar=_scalar, **_functions(module, names, {"gl": gl}, ast.NodeTransformer()))


def sizes_of(launch: Launch, **changes: int) -> tuple[Any, ...]:
    """The tuple `sizes` that the device functions of a launch pass around, with some of its numbers changed."""
    kernel, _, arguments, _ = launch
    given = dict(zip(kernel.arg_names, arguments, strict=True)) | changes
    names = list(given)
    numbers = names[names.index("n_q") : names.index("scale")]
    divisions = [name for name in numbers if name.endswith(("_magic", "_shift"))]
    return (*(given[name] for name in numbers if name not in divisions), tuple(given[name] for name in divisions))
