"""Triton source of traced functions, and the parts of a kernel's signature that they need."""

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from flashtune.core.config import KernelSpec
from flashtune.templates.mods.graph import FLOATS, INDICES, INTEGERS, TYPES, Node, ordered
from flashtune.templates.mods.operations import ARITHMETIC, COMPARISONS, LOGICAL
from flashtune.templates.mods.trace import Unsupported, gradients

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured tensor of a kernel: its element type and dimensions, which are compiled in, and `trained`, True if it gets a gradient."""

    dtype: torch.dtype
    rank: int
    trained: bool = False


@dataclass(frozen=True)
class Mods:
    """A kernel's functions as Triton source; `score`, `mask` and `gradient` are empty where it has none.

    The source is made from checked graphs alone (flashtune.templates.mods.trace), and its hash names it in a KernelSpec.
    """

    captured: tuple[Captured, ...]
    score: str = ""
    mask: str = ""
    gradient: str = ""
    by_batch: bool = False
    by_head: bool = False

    @cached_property
    def hash(self) -> str:
        """16 hex digits over the functions and the captured tensors' types."""
        tensors = [(str(x.dtype), x.rank, x.trained) for x in self.captured]
        return hashlib.sha256(repr((self.score, self.mask, self.gradient, tensors)).encode()).hexdigest()[:16]

    @property
    def functions(self) -> list[str]:
        """Definitions for a module of kernels, in order."""
        parts = [_HELPERS, self.score, self.mask, self.gradient]
        return [part for part in parts if part]

    @property
    def gluon(self) -> list[str]:
        """The same for a module of Gluon kernels, whose names begin with `gluon_`."""
        parts = [_HELPERS, self.score, self.mask, self.gradient.partition("\n\n\n")[0]]
        return [_in_gluon(part) for part in parts if part]

    @property
    def trained(self) -> list[int]:
        """Places of the captured tensors that get a gradient."""
        return [place for place, x in enumerate(self.captured) if x.trained]

    @property
    def parameters(self) -> list[str]:
        """Names of a kernel's parameters for captured tensors: a pointer, strides and sizes for each."""
        return [name for place, x in enumerate(self.captured) for name in _names(place, x.rank)]

    @property
    def gradient_parameters(self) -> list[str]:
        """Names of parameters for the gradients of captured tensors."""
        return [
            name
            for place in self.trained
            for name in (f"g{place}_ptr", *(f"g{place}_s{axis}" for axis in range(self.captured[place].rank)))
        ]

    @property
    def sizes(self) -> list[str]:
        """Names of the parameters that change from call to call."""
        return [name for name in (*self.parameters, *self.gradient_parameters) if not name.endswith("_ptr")]

    def listed(self, spec: KernelSpec) -> bool:
        """True if kernels walk lists of blocks: those of packed sequences evaluate a mask as code for every block instead."""
        return bool(self.mask) and not spec.packed

    @property
    def arguments(self) -> str:
        """The captured tensors' parameters as further arguments of a call."""
        return "".join(f", {name}" for name in self.parameters)

    def arguments_of(self, holder: str) -> str:
        """The same as fields of a tuple."""
        return "".join(f", {holder}.{name}" for name in self.parameters)

    @property
    def gradient_arguments(self) -> str:
        """Those of their gradients."""
        return "".join(f", {name}" for name in self.gradient_parameters)


def _in_gluon(text: str) -> str:
    text = re.sub(r"tl\.full\(\[\], (.+?), (tl\.\w+)\)", r"gl.to_tensor(\1).to(\2)", text)
    text = re.sub(r"\b(score_mod|mask_mod|score_gradient|mod_\w+)\(", r"gluon_\1(", text.replace("@triton.jit", "@gluon.jit"))
    # Gluon has no name of its own for how NaN is treated.
    return re.sub(r"\btl\.(?!PropagateNan)", "gl.", text)


def _names(place: int, rank: int) -> list[str]:
    return [f"c{place}_ptr", *(f"c{place}_s{axis}" for axis in range(rank)), *(f"c{place}_n{axis}" for axis in range(rank))]


@lru_cache(maxsize=4096)
def emitted(score: Node | None, mask: Node | None, captured: tuple[Captured, ...], *, backward: bool) -> Mods:
    """The source of a kernel's functions; raises Unsupported for what Triton lacks."""
    bare = Mods(tuple(Captured(x.dtype, x.rank, x.trained and backward) for x in captured))
    texts = {}
    if score is not None:
        texts["score"] = _function("score_mod", ["score", *INDICES], bare.parameters, score)
        if backward:
            texts["gradient"] = _gradient_functions(score, bare)
    if mask is not None:
        texts["mask"] = _function("mask_mod", list(INDICES), bare.parameters, mask)
    reads = frozenset[str]() if mask is None else mask.reads
    return Mods(bare.captured, **texts, by_batch="b" in reads, by_head="h" in reads)


def _function(name: str, inputs: Iterable[str], parameters: Iterable[str], output: Node) -> str:
    writer = Writer()
    result = writer.value(output)
    if output.dtype is not torch.bool:
        result = f"{result}.to(tl.float32)"
    head = f"@triton.jit\ndef {name}({', '.join((*inputs, *parameters))}):\n"
    return "\n".join([head.rstrip("\n"), *writer.lines, f"    return {result}"])


def _gradient_functions(score: Node, mods: Mods) -> str:
    """`score_gradient`, and `add_gradients` where captured tensors get theirs."""
    of_score, of_loads = gradients(score)
    inputs = ["score", *INDICES, "grad"]
    text = _function("score_gradient", inputs, mods.parameters, of_score)
    if not mods.trained:
        return text
    writer = Writer()
    for load, gradient in of_loads:
        if mods.captured[load.captured].trained:
            writer.add(load, gradient)
    if not writer.lines:
        writer.lines.append("    pass")
    head = f"@triton.jit\ndef add_gradients({', '.join((*inputs, 'keep', *mods.parameters, *mods.gradient_parameters))}):"
    return "\n".join([text, "", "", head, *writer.lines])


class Writer:
    """Lines of a function's body: each value once, in the order of the graph."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[Node, str] = {}

    def value(self, node: Node) -> str:
        """The expression of a node, whose operands are written before it."""
        for one in ordered([node]):
            if one not in self._names:
                self._names[one] = self._written(one)
        return self._names[node]

    def _line(self, text: str) -> str:
        name = f"t{len(self.lines)}"
        self.lines.append(f"    {name} = {text}")
        return name

    def _written(self, node: Node) -> str:
        if node.kind == "input":
            return node.name
        if node.kind == "number":
            return self._line(f"tl.full([], {_literal(node.arguments[0], node.dtype)}, {TYPES[node.dtype]})")
        if node.kind == "load":
            place, inside = self._place(node, "c")
            other = 'float("nan")' if node.dtype in FLOATS else "0"
            if not inside:
                return self._line(f"tl.load({place})")
            return self._line(f"tl.load({place}, mask={inside}, other={other})")
        return self._line(self._expression(node))

    def _place(self, load: Node, letter: str) -> tuple[str, str]:
        """An element's address, and the condition that it is in its tensor. Negative indices count from the end, as in PyTorch."""
        captured, terms, conditions = load.captured, [f"{letter}{load.captured}_ptr"], []
        for axis, index in enumerate(load.arguments):
            name, size = self.value(index), f"c{captured}_n{axis}"
            if not nonnegative(index):
                name = self._line(f"tl.where({name} < 0, {name} + {size}, {name})")
                conditions.append(f"({name} >= 0)")
            conditions.append(f"({name} < {size})")
            terms.append(f"{name}.to(tl.int64) * {letter}{captured}_s{axis}")
        return " + ".join(terms), " & ".join(conditions)

    def add(self, load: Node, gradient: Node) -> None:
        """Add a tile's gradient to that of a captured tensor, summed first over what the index doesn't depend on."""
        value = self.value(gradient)
        value = self._line(f"tl.where(keep, {value}.to(tl.float32) + tl.zeros_like(grad), 0.0)")
        place, inside = self._place(load, "g")
        rows, columns = ("q_idx" in load.reads), ("kv_idx" in load.reads)
        if not rows and not columns:
            value = self._line(f"tl.sum(tl.sum({value}, 1), 0)")
        elif not columns:
            value = self._line(f"tl.sum({value}, 1, keep_dims=True)")
        elif not rows:
            value = self._line(f"tl.sum({value}, 0, keep_dims=True)")
        conditions = [part for part in (inside, "keep" if rows and columns else "") if part]
        mask = f", mask={' & '.join(conditions)}" if conditions else ""
        self.lines.append(f'    tl.atomic_add({place}, {value}{mask}, sem="relaxed")')

    def _operand(self, x: Any, dtype: torch.dtype) -> str:
        """An operand as a value of a type."""
        if not isinstance(x, Node):
            return _literal(x, dtype)
        return self.value(x) if x.dtype is dtype else f"{self.value(x)}.to({TYPES[dtype]})"

    def _expression(self, node: Node) -> str:
        packet = node.target.overloadpacket
        wide = torch.float32 if node.dtype in _HALVES else node.dtype
        if packet in COMPARISONS:
            common = _common(node.arguments)
            return COMPARISONS[packet].format(*(self._operand(x, common) for x in node.arguments))
        if packet in LOGICAL:
            return LOGICAL[packet].format(*(self._truth(x) for x in node.arguments))
        if packet in (aten.isnan, aten.isinf):
            x = self._operand(node.arguments[0], torch.float32)
            return f"({x} != {x})" if packet is aten.isnan else f'(tl.abs({x}) == float("inf"))'
        if packet is aten._to_copy:
            source = node.arguments[0]
            return self._truth(source) if node.dtype is torch.bool else self._operand(source, node.dtype)
        text = self._arithmetic(packet, node, wide) if packet in ARITHMETIC else self._ruled(packet, node, wide)
        return f"({text}).to({TYPES[node.dtype]})" if node.dtype in _HALVES else text

    def _truth(self, x: Any) -> str:
        if not isinstance(x, Node):
            return str(bool(x))
        return self.value(x) if x.dtype is torch.bool else f"({self.value(x)} != 0)"

    def _arithmetic(self, packet: Any, node: Node, wide: torch.dtype) -> str:
        given = [self._operand(x, wide) for x in node.arguments]
        alpha = node.keywords.get("alpha", 1)
        if alpha != 1:
            if packet is aten.rsub:
                raise Unsupported(f"kernels have no rsub with alpha ({node.line})")
            given[1] = f"({given[1]} * {_literal(alpha, wide)})"
        if node.dtype is torch.bool and packet in (aten.add, aten.mul):
            return f"({given[0]} {'|' if packet is aten.add else '&'} {given[1]})"
        return ARITHMETIC[packet].format(*given)

    def _ruled(self, packet: Any, node: Node, wide: torch.dtype) -> str:
        a, *rest = node.arguments
        if packet is aten.where:
            return f"tl.where({self._truth(a)}, {self._operand(rest[0], wide)}, {self._operand(rest[1], wide)})"
        if packet is aten.masked_fill:
            return f"tl.where({self._truth(rest[0])}, {self._operand(rest[1], wide)}, {self._operand(a, wide)})"
        if packet in (aten.clamp, aten.clamp_min, aten.clamp_max):
            low, high = node.keywords.get("min"), node.keywords.get("max")
            if packet is aten.clamp_max:
                high = rest[0] if rest else high
            else:
                low, high = (rest[0] if rest else low), (rest[1] if len(rest) > 1 else high)
            text = self._operand(a, wide)
            text = text if low is None else f"tl.maximum({text}, {self._operand(low, wide)}, propagate_nan=tl.PropagateNan.ALL)"
            return text if high is None else f"tl.minimum({text}, {self._operand(high, wide)}, propagate_nan=tl.PropagateNan.ALL)"
        if packet is aten.pow:
            return self._power(a, rest[0], wide)
        rounding = node.keywords.get("rounding_mode")
        x, y = self._operand(a, wide), self._operand(rest[0], wide)
        if packet is aten.div and rounding is None and not isinstance(rest[0], Node) and rest[0] and math.isfinite(1 / rest[0]):
            # As PyTorch divides by a number on a GPU.
            return f"({x} * {1 / rest[0]!r})"
        if packet is aten.div and rounding is None:
            # Triton's quotient of floating-point numbers is rounded approximately.
            return (
                f"tl.div_rn({x} + 0.0, {y} + 0.0)" if not isinstance(rest[0], Node) or not isinstance(a, Node) else f"tl.div_rn({x}, {y})"
            )
        if node.dtype in FLOATS:
            if packet is aten.remainder or packet is aten.fmod:
                raise Unsupported(f"kernels have no {packet} of floating-point numbers ({node.line})")
            quotient = f"tl.div_rn({x} + 0.0, {y} + 0.0)"
            return (
                f"tl.floor({quotient})" if rounding != "trunc" else f"tl.where({quotient} < 0, tl.ceil({quotient}), tl.floor({quotient}))"
            )
        plain = isinstance(a, Node) and nonnegative(a) and nonnegative(rest[0])
        if packet is aten.fmod or rounding == "trunc" or plain:
            return f"({x} {'//' if packet not in (aten.fmod, aten.remainder) else '%'} {y})"
        x = x if isinstance(a, Node) else f"tl.full([], {x}, {TYPES[wide]})"
        return f"{'mod_remainder' if packet is aten.remainder else 'mod_floor_divide'}({x}, {y})"

    def _power(self, base: Any, exponent: Any, wide: torch.dtype) -> str:
        if isinstance(base, Node) and not isinstance(exponent, Node):
            x = self._operand(base, wide)
            if exponent == 0.5 and wide is torch.float32:
                return f"tl.sqrt_rn({x})"
            if exponent == -0.5 and wide is torch.float32:
                return f"(1.0 / tl.sqrt_rn({x}))"
            if float(exponent).is_integer() and 0 < exponent <= 8:
                x = self._line(f"{x} * 1" if wide is not torch.float32 else f"{x} * 1.0")
                return "(" + " * ".join([x] * int(exponent)) + ")"
            if float(exponent).is_integer() and -8 <= exponent < 0 and wide is torch.float32:
                x = self._line(f"{x} * 1.0")
                return "(1.0 / (" + " * ".join([x] * int(-exponent)) + "))"
        if not isinstance(base, Node) and base > 0 and wide is torch.float32:
            return f"tl.exp2({self._operand(exponent, wide)} * {math.log2(base)!r})"
        raise Unsupported("kernels have powers with a small whole exponent, 0.5 or a positive base that is a number alone")


def _common(operands: Iterable[Any]) -> torch.dtype:
    """The type in which PyTorch compares operands: scalars of tensors of no dimensions are promoted like tensors."""
    found = [torch.empty((), dtype=x.dtype, device="meta") if isinstance(x, Node) else x for x in operands]
    dtype = torch.result_type(*found)
    if dtype is torch.float64:
        raise Unsupported("kernels have no float64")
    return torch.float32 if dtype in _HALVES else dtype


def _literal(x: Any, dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return str(bool(x))
    if dtype in FLOATS:
        x = float(x)
        return repr(x) if math.isfinite(x) else f'float("{x}")'
    return str(int(x))


def nonnegative(x: Any) -> bool:
    """True if an integer is known to be at least 0: places of queries and keys are, and what keeps that."""
    if not isinstance(x, Node):
        return isinstance(x, (int, float)) and x >= 0
    if x.kind == "input":
        return x.name in INDICES
    if x.kind == "number":
        return bool(x.arguments[0] >= 0)
    if x.kind != "operation" or x.dtype not in INTEGERS:
        return False
    packet = x.target.overloadpacket
    if packet is aten.add and x.keywords.get("alpha", 1) == 1 and sum(map(_least, x.arguments)) >= 0:
        return True
    if packet in (aten.add, aten.mul, aten.minimum, aten.floor_divide, aten.div, aten.bitwise_or, aten.bitwise_right_shift):
        return not x.keywords.get("alpha", 1) < 0 and all(map(nonnegative, x.arguments))
    if packet is aten.remainder:
        return nonnegative(x.arguments[1])
    if packet in (aten.maximum, aten.bitwise_and):
        return any(map(nonnegative, x.arguments))
    if packet in (aten.clamp, aten.clamp_min):
        low = x.keywords.get("min", x.arguments[1] if len(x.arguments) > 1 else None)
        return low is not None and nonnegative(low)
    if packet is aten.where:
        return all(map(nonnegative, x.arguments[1:]))
    return (packet is aten._to_copy and nonnegative(x.arguments[0])) or packet is aten.abs


def _least(x: Any) -> float:
    """Lower bound of an integer: a number itself, the lower end of a clamp, 0 of what is never negative, else -inf."""
    if not isinstance(x, Node):
        return x if isinstance(x, (int, float)) else -math.inf
    if x.kind == "operation" and x.target.overloadpacket in (aten.clamp, aten.clamp_min):
        low = x.keywords.get("min", x.arguments[1] if len(x.arguments) > 1 else None)
        if isinstance(low, int):
            return low
    return 0 if nonnegative(x) else -math.inf


_HELPERS = """@triton.jit
def mod_tanh(x):
    square = x * x
    series = x * (1.0 + square * (-0.33333334 + square * (0.13333334 - square * 0.05396825)))
    rational = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.25, series, rational)


@triton.jit
def mod_floor_divide(x, y):
    whole = x // y
    return tl.where((whole * y != x) & ((x < 0) != (y < 0)), whole - 1, whole)


@triton.jit
def mod_remainder(x, y):
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)"""
