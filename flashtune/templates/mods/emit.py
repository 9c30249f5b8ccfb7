"""Triton source of traced functions, and the parts of a kernel's signature that they need."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from flashtune.core.problems.config import KernelSpec
from flashtune.templates.mods.additions import Additions, additions
from flashtune.templates.mods.graph import INDICES, Node, loads
from flashtune.templates.mods.helpers import helpers_of
from flashtune.templates.mods.trace import gradients
from flashtune.templates.mods.writer import Writer


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
    sums: int = 0
    """Number of gradients that a kernel adds up over tiles (flashtune.templates.mods.additions)."""
    values: int = 0
    """Number of values that it reads once for all its tiles."""
    blocks: tuple[int, int] | None = None
    """Rows and columns of a mask's blocks, which tiles had better divide; None where it has none."""

    @cached_property
    def hash(self) -> str:
        """16 hex digits over the functions and the captured tensors' types."""
        tensors = [(str(x.dtype), x.rank, x.trained) for x in self.captured]
        parts = (self.score, self.mask, self.gradient, tensors, *([] if self.blocks is None else [self.blocks]))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def functions(self) -> list[str]:
        """Definitions for a module of kernels, in order."""
        functions = self.score, self.mask, self.gradient
        parts = [helpers_of(functions), *functions]
        return [part for part in parts if part]

    @property
    def gluon(self) -> list[str]:
        """The same for a module of Gluon kernels, whose names begin with `gluon_`."""
        functions = self.score, self.mask, self.untrained.gradient
        parts = [helpers_of(functions), *functions]
        return [_in_gluon(part) for part in parts if part]

    @property
    def trained(self) -> list[int]:
        """Places of the captured tensors that get a gradient."""
        return [place for place, x in enumerate(self.captured) if x.trained]

    @cached_property
    def untrained(self) -> "Mods":
        """The same functions without gradients of captured tensors."""
        captured = tuple(replace(x, trained=False) for x in self.captured)
        return replace(self, captured=captured, gradient=self.gradient.partition("\n\n\n")[0], sums=0, values=0) if self.trained else self

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

    @property
    def value_names(self) -> str:
        """Names of the values that a kernel reads once for all its tiles, as a list of arguments."""
        return ", ".join(f"value_{number}" for number in range(self.values))

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
def emitted(
    score: Node | None, mask: Node | None, captured: tuple[Captured, ...], blocks: tuple[int, int] | None = None, *, backward: bool
) -> Mods:
    """The source of a kernel's functions, of a mask of `blocks` or another one; raises Unsupported for what Triton lacks."""
    # The derivative of a mask is 0.
    read = {load.captured for load in loads([score])} if score is not None and backward else set[int]()
    bare = Mods(tuple(Captured(x.dtype, x.rank, x.trained and place in read) for place, x in enumerate(captured)))
    texts, added = dict[str, str](), Additions()
    if score is not None:
        texts["score"] = _function("score_mod", ["score", *INDICES], bare.parameters, score)
        if backward:
            texts["gradient"], added = _gradient_functions(score, bare)
    if mask is not None:
        texts["mask"] = _function("mask_mod", list(INDICES), bare.parameters, mask)
    reads = frozenset[str]() if mask is None else mask.reads
    words: dict[str, Any] = {**texts, "by_batch": "b" in reads, "by_head": "h" in reads, "sums": added.sums, "values": added.values}
    return Mods(bare.captured, **words, blocks=blocks)


def _function(name: str, inputs: Iterable[str], parameters: Iterable[str], output: Node) -> str:
    writer = Writer()
    result = writer.value(output)
    if output.dtype is not torch.bool:
        result = f"{result}.to(tl.float32)"
    return writer.function(name, (*inputs, *parameters), result)


def _gradient_functions(score: Node, mods: Mods) -> tuple[str, Additions]:
    """`score_gradient`, followed by the functions for gradients of captured tensors, and these with the numbers of what they keep."""
    of_score, of_loads = gradients(score)
    text = _function("score_gradient", ["score", *INDICES, "grad"], mods.parameters, of_score)
    if not mods.trained:
        return text, Additions()
    of_trained = [(load, gradient) for load, gradient in of_loads if mods.captured[load.captured].trained]
    added = additions(score, of_trained, mods.parameters, mods.gradient_parameters)
    return "\n\n\n".join([text, *added.texts]), added
