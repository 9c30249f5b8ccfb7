"""Element types by their short names, as databases and the command line use them."""

from collections.abc import Mapping
from typing import Literal, get_args

from flashtune.core.system.errors import InputError

DType = Literal["fp16", "bf16", "fp32", "fp8"]
DTYPES: tuple[DType, ...] = get_args(DType)

ITEMSIZE: dict[DType, int] = {"fp16": 2, "bf16": 2, "fp32": 4, "fp8": 1}
"""Bytes per element. fp8 is e4m3: four bits of exponent, three of mantissa, no infinities (torch.float8_e4m3fn)."""

OTHER_16_BITS: Mapping[str, DType] = {"bf16": "fp16", "fp16": "bf16"}
"""The other of the two types of 16 bits."""

_OTHER_NAMES: dict[DType, tuple[str, ...]] = {
    "fp16": ("float16", "half", "f16"),
    "bf16": ("bfloat16",),
    "fp32": ("float32", "float", "f32"),
    "fp8": ("e4m3", "float8_e4m3fn"),
}
_ALIASES: dict[str, DType] = {alias: name for name, others in _OTHER_NAMES.items() for alias in (name, *others)}


def parse_dtype(name: str) -> DType:
    """The short name for `name` (`"float16"`, `"torch.bfloat16"`, `"half"`, ...); raises InputError for others."""
    dtype = _ALIASES.get(name.strip().lower().removeprefix("torch."))
    if dtype is None:
        raise InputError(f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}")
    return dtype


def output_dtype(dtype: DType) -> DType:
    """The element type of the output for inputs of `dtype`: bf16 for fp8, else `dtype` itself."""
    return "bf16" if dtype == "fp8" else dtype
