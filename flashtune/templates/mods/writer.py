"""Expressions of traced functions in Triton, one line for each value."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from flashtune.templates.mods.graph import FLOATS, INDICES, INTEGERS, MOST_FACTOR, TYPES, Node, ordered
from flashtune.templates.mods.operations import ARITHMETIC, COMPARISONS, LOGICAL
from flashtune.templates.mods.reader import Unsupported

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


class Writer:
    """Lines of a function's body: each value once, in the order of the graph. `known` ones have these names already."""

    def __init__(self, known: Mapping[Node, str] | None = None) -> None:
        self.lines: list[str] = []
        self._names = dict(known or {})

    def function(self, name: str, parameters: Iterable[str], result: str = "") -> str:
        """Definition of a function of these lines."""
        lines = [*self.lines, *([f"    return {result}"] if result else [])]
        return "\n".join(["@triton.jit", f"def {name}({', '.join(parameters)}):", *(lines or ["    pass"])])

    def value(self, node: Node) -> str:
        """The expression of a node, whose operands are written before it."""
        for one in ordered([node], self._names):
            self._names[one] = self._written(one)
        return self._names[node]

    def line(self, text: str) -> str:
        """Name of a value that a new line computes."""
        name = f"t{len(self.lines)}"
        self.lines.append(f"    {name} = {text}")
        return name

    def _written(self, node: Node) -> str:
        if node.kind == "input":
            return node.name
        if node.kind == "number":
            return self.line(f"tl.full([], {_literal(node.arguments[0], node.dtype)}, {TYPES[node.dtype]})")
        if node.kind == "load":
            place, inside = self.place(node, "c")
            other = 'float("nan")' if node.dtype in FLOATS else "0"
            if not inside:
                return self.line(f"tl.load({place})")
            return self.line(f"tl.load({place}, mask={inside}, other={other})")
        return self.line(self._expression(node))

    def place(self, load: Node, letter: str) -> tuple[str, str]:
        """An element's address, and the condition that it is in its tensor."""
        offset, inside = self.offset(load, letter)
        return " + ".join([f"{letter}{load.captured}_ptr", *([offset] if offset else [])]), inside

    def offset(self, load: Node, letter: str) -> tuple[str, str]:
        """An element's offset in its tensor, and the condition that it is in there; "" for a tensor without dimensions. Negative indices
        count from the end, as in PyTorch."""
        captured, terms, conditions = load.captured, list[str](), list[str]()
        for axis, index in enumerate(load.arguments):
            name, size = self.value(index), f"c{captured}_n{axis}"
            if not nonnegative(index):
                name = self.line(f"tl.where({name} < 0, {name} + {size}, {name})")
                conditions.append(f"({name} >= 0)")
            conditions.append(f"({name} < {size})")
            terms.append(f"{name}.to(tl.int64) * {letter}{captured}_s{axis}")
        return " + ".join(terms), as_mask(conditions)

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
        if packet is aten.signbit:
            x = node.arguments[0]
            return f"mod_signbit({self._operand(x, torch.float32)})" if x.dtype in FLOATS else f"({self.value(x)} < 0)"
        if packet is aten.detach:
            return self._operand(node.arguments[0], node.dtype)
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
        if node.dtype in INTEGERS and packet in (aten.floor, aten.ceil, aten.trunc):
            return given[0]
        if "mod_" in ARITHMETIC[packet]:
            # Functions take tensors.
            given = [self._tensor(x, text, wide) for x, text in zip(node.arguments, given, strict=True)]
        alpha = node.keywords.get("alpha", 1)
        if alpha != 1:
            if packet is aten.rsub:
                raise Unsupported(f"kernels have no rsub with alpha ({node.line})")
            given[1] = f"({given[1]} * {_literal(alpha, wide)})"
        if node.dtype is torch.bool and packet in (aten.add, aten.mul):
            return f"({given[0]} {'|' if packet is aten.add else '&'} {given[1]})"
        return ARITHMETIC[packet].format(*given)

    def _tensor(self, x: Any, text: str, dtype: torch.dtype) -> str:
        """An operand's expression as a tensor."""
        return text if isinstance(x, Node) else f"tl.full([], {text}, {TYPES[dtype]})"

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
        if packet is aten.hardtanh:
            low, high = (self._operand(x, wide) for x in (*rest, *(-1.0, 1.0)[len(rest) :]))
            x = self._operand(a, wide)
            return f"tl.where({x} < {low}, {low}, tl.where({x} > {high}, {high}, {x}))"
        if packet is aten.pow:
            return self._power(a, rest[0], wide)
        if packet is aten.round:
            if node.dtype in INTEGERS:
                return self._operand(a, wide)
            scale = 10.0 ** node.keywords.get("decimals", rest[0] if rest else 0)
            text = self._operand(a, wide)
            return f"mod_round({text})" if scale == 1.0 else f"(mod_round({text} * {scale!r}) / {scale!r})"
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
                # Triton's own is off by whole periods on GPUs: it rounds the quotient first.
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
            if exponent == 0:
                return f"tl.full([], {_literal(1, wide)}, {TYPES[wide]})"
            if exponent == 0.5 and wide is torch.float32:
                return f"tl.sqrt_rn({x})"
            if exponent == -0.5 and wide is torch.float32:
                return f"(1.0 / tl.sqrt_rn({x}))"
            if float(exponent).is_integer() and 0 < exponent <= 8:
                x = self.line(f"{x} * 1" if wide is not torch.float32 else f"{x} * 1.0")
                return "(" + " * ".join([x] * int(exponent)) + ")"
            if float(exponent).is_integer() and -8 <= exponent < 0 and wide is torch.float32:
                x = self.line(f"{x} * 1.0")
                return "(1.0 / (" + " * ".join([x] * int(-exponent)) + "))"
        if not isinstance(base, Node) and 0 < base < math.inf and base != 1 and wide is torch.float32:
            return f"tl.exp2({self._operand(exponent, wide)} * {math.log2(base)!r})"
        if wide is not torch.float32:
            raise Unsupported("kernels have powers of integers with a small whole exponent alone")
        return (
            f"mod_pow({self._tensor(base, self._operand(base, wide), wide)}, {self._tensor(exponent, self._operand(exponent, wide), wide)})"
        )


def as_mask(conditions: Iterable[str]) -> str:
    """All of some conditions as a mask; "" for none.

    The comparison changes nothing but its type in Triton's interpreter, where a scalar condition beside one of a tile makes integers,
    which newer versions take for no mask.
    """
    found = [*conditions]
    return f"(({' & '.join(found)}) != 0)" if len(found) > 1 else "".join(found)


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
    if packet is aten.mul and x.dtype is not torch.int64 and not any(isinstance(y, int) and y <= MOST_FACTOR for y in x.arguments):
        return False
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
    if packet is aten._to_copy:
        source = x.arguments[0]
        wide = x.dtype is torch.int64 or (x.dtype is torch.int32 and source.dtype is not torch.int64)
        return x.dtype is torch.uint8 or (wide and nonnegative(source))
    return packet is aten.abs


def _least(x: Any) -> float:
    """Lower bound of an integer: a number itself, the lower end of a clamp, 0 of what is never negative, else -inf."""
    if not isinstance(x, Node):
        return x if isinstance(x, (int, float)) else -math.inf
    if x.kind == "operation" and x.target.overloadpacket in (aten.clamp, aten.clamp_min):
        low = x.keywords.get("min", x.arguments[1] if len(x.arguments) > 1 else None)
        if isinstance(low, int):
            return low
    return 0 if nonnegative(x) else -math.inf
