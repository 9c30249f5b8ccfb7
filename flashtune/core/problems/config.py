"""One point of the search space (`Config`), the compiled-in part of a problem (`KernelSpec`), and both together (`Variant`)."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal

from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.parameters import FACTORS, PER_HEAD, PER_HEAD_FLAGS, launch_name
from flashtune.core.system.words import canonical

Direction = Literal["fwd", "bwd"]
"""The pass of attention (flashtune.core.problems.passes)."""

Value = int | str | bool
"""The types of an axis's values."""


@dataclass(frozen=True, slots=True, eq=True)
class Config:
    """Axis values of one candidate, sorted by name, independent of the problem.

    >>> Config.of(BLOCK_M=128, num_warps=4)["BLOCK_M"]
    128
    """

    items: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, values: Mapping[str, Value] | None = None, **more: Value) -> "Config":
        """The config with these axis values."""
        return cls(tuple(sorted({**(values or {}), **more}.items())))

    def __getitem__(self, axis: str) -> Value:
        for name, value in self.items:
            if name == axis:
                return value
        raise KeyError(axis)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.items)

    def number(self, axis: str) -> int:
        """The value of an axis that holds numbers; raises KeyError where the axis is absent."""
        return int(self[axis])

    def get(self, axis: str, default: Value) -> Value:
        """The value of `axis`, or `default` where this config lacks it."""
        for name, value in self.items:
            if name == axis:
                return value
        return default

    def replace(self, **changes: Value) -> "Config":
        """A copy with some axes changed."""
        return Config.of(self.as_dict(), **changes)

    def as_dict(self) -> dict[str, Value]:
        """Axis to value, in order of names."""
        return dict(self.items)

    def as_json(self) -> str:
        """Canonical JSON: equal configs have equal text."""
        return canonical(self.as_dict())

    def label(self) -> str:
        """The short form for tables: `BLOCK_M=128 BLOCK_N=64 num_stages=3`."""
        return " ".join(f"{name}={value}" for name, value in self.items)


RUNNING = Config.of(maximum="running")
"""The axis value of a fallback kernel, in place of a frozen row maximum."""


def settles(config: Config) -> bool:
    """True if row maxima are frozen after a tile's first blocks, so that a kernel's time depends on its scores (decision 0008)."""
    return config.get("maximum", "running") == "first"


def rescales_grown(config: Config) -> bool:
    """True if blocks rescale the accumulator only where a running row maximum grew far (decision 0008)."""
    return config.get("rescale", "always") != "always"


def asks_first(config: Config) -> bool:
    """True if such blocks look for maxima only where a score exceeds all before it."""
    return config.get("rescale", "always") == "outgrown"


GROWN_LOSES = 0.02
OUTGROWN_LOSES = {64: 0.1, 128: 0.07, 256: 0.03}
"""Extra time of fallback kernels, a share, on scores that frozen row maxima mispredict: with rescale=grown, and with rescale=outgrown by
head size up to the key (benchmarks/results/2026-11-23-h200-scores)."""


def lost_where_misled(config: Config, d: int) -> float:
    """Extra time, a share, of a kernel with running maxima and head size `d` on mispredicted scores over random ones."""
    if asks_first(config):
        return next((loses for columns, loses in OUTGROWN_LOSES.items() if d <= columns), OUTGROWN_LOSES[256])
    return GROWN_LOSES if rescales_grown(config) else 0.0


def _switch(words: str) -> bool:
    """Flag that a switch of the command line with this help turns on."""
    found: bool = field(default=False, metadata={"help": words})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Features that a kernel has or lacks, of a problem (`Features`) as of what is compiled for it (`KernelSpec`).

    `alibi` lowers each score by a slope per head times the distance from the diagonal (Press et al., "Train Short, Test Long", ICLR 2022).
    `tf32` allows TF32 products for fp32 inputs (IEEE otherwise). `sinks` adds a logit per head to each softmax's denominator, with no
    value of its own (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024; learned in GPT-OSS).
    `packed`: sequences of different lengths lie one after the other, and kernels read where each begins on the device.
    `latent`: values are the first columns of keys, in the same memory, as multi-head latent attention decodes (DeepSeek-V2, 2024).
    `dbias` and `dslopes` request the gradient of the bias and of ALiBi's slopes from a backward.
    """

    causal: bool = False
    dropout: bool = False
    softcap: bool = False
    tf32: bool = _switch("Allow TF32 products for fp32 inputs (IEEE otherwise).")
    alibi: bool = _switch("ALiBi: a bias by distance with a slope for each head; one record is used for all slopes.")
    sinks: bool = _switch("Attention sinks: a logit of each head in the softmax's denominator; one record is used for all logits.")
    latent: bool = _switch("Latent attention: values are the first columns of keys, which kernels read once for both.")
    packed: bool = False
    dbias: bool = _switch("A backward whose bias (mask 'bias') gets its gradient, too.")
    dslopes: bool = _switch("A backward whose ALiBi slopes get their gradient, too.")

    def flags(self) -> dict[str, bool]:
        """Every flag by its name."""
        return {field.name: getattr(self, field.name) for field in fields(Flags)}


NAMED_ALWAYS = ("direction", "dtype", "d", "d_v", "causal", "window", "mask", "dropout", "softcap", "tf32")
"""Fields of the first databases' specs, in the order of kernels' texts; later flags follow where they are on, so that older variants
keep their ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec(Flags):
    """The part of a problem that is compiled into its kernel. Sizes N, batch and heads, the scale, the width of a window, the
    soft cap, the dropout rate, the diagonal and tensors per head are run-time arguments, so one kernel serves all of them.

    `d` and `d_v` are the real head sizes; templates pad them to powers of two. `mods` is the hash of a mask and a score as code
    (flashtune.templates.mods), empty without.
    """

    direction: Direction
    dtype: DType
    d: int
    d_v: int
    window: bool
    mask: str
    mods: str = ""

    @property
    def stride_unit(self) -> int:
        """The 2, 4 or 8 that divides strides of tensors of these head sizes, or 0. Triton specialises arguments only by divisibility by
        16, and loads elements one by one without a divisor."""
        unit = math.gcd(self.d, self.d_v, 16)
        return unit if 1 < unit < 16 else 0

    @property
    def banded(self) -> bool:
        """True if a causal or window band limits the keys of a query."""
        return self.causal or self.window

    @property
    def band_sizes(self) -> list[str]:
        """Names of the kernel's size parameters that place the band and ALiBi's diagonal, in order."""
        return (
            ["diagonal"] * (self.banded or self.alibi)
            + ["window_left"] * self.window
            + ["window_right"] * (self.window and not self.causal)
        )

    @property
    def per_head(self) -> list[str]:
        """Names of the kernel's tensors with a number per head, in the order of its parameters."""
        flags = self.flags() | dict.fromkeys(FACTORS, self.dtype == "fp8")
        return [launch_name(name) for name in PER_HEAD if flags[PER_HEAD_FLAGS.get(name, name)]]

    def as_dict(self) -> dict[str, Any]:
        """Field to value: those of NAMED_ALWAYS, and other flags that are on."""
        named = {name: getattr(self, name) for name in NAMED_ALWAYS}
        named |= {name: True for name, on in self.flags().items() if on and name not in named}
        return named | ({"mods": self.mods} if self.mods else {})

    def label(self) -> str:
        """The short form for file names and test ids: `fwd-bf16-d128-causal`."""
        d = f"d{self.d}" if self.d == self.d_v else f"d{self.d}x{self.d_v}"
        flags = [name for name in ("causal", "window") if getattr(self, name)]
        flags += sorted(name for name, on in self.flags().items() if on and name != "causal")
        flags += [self.mask] if self.mask != "none" else []
        flags += [f"mods-{self.mods}"] if self.mods else []
        return "-".join([self.direction, self.dtype, d, *flags])


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A kernel in full: the template, the spec that is compiled in, and the config."""

    template: str
    spec: KernelSpec
    config: Config

    @property
    def id(self) -> str:
        """16 hex digits, equal on every machine."""
        return _id_of(self)


@lru_cache(maxsize=4096)
def _id_of(variant: Variant) -> str:
    parts = [variant.template, variant.spec.as_dict(), variant.config.as_dict()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
