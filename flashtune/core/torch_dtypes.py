"""Element types as torch knows them; apart from `flashtune.core.dtypes`, so that those who need no torch don't import it."""

import torch

from flashtune.core.dtypes import DType, output_dtype

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
"""Torch's types of the element types that kernels take."""

KERNEL_DTYPES: dict[torch.dtype, DType] = {kind: name for name, kind in TORCH_DTYPES.items()}
"""The inverse; float64 is in neither, since it goes to the framework."""


def output_torch_dtype(dtype: torch.dtype) -> torch.dtype:
    """`flashtune.core.dtypes.output_dtype` for torch's types; the type itself where kernels don't take it."""
    name = KERNEL_DTYPES.get(dtype)
    return dtype if name is None else TORCH_DTYPES[output_dtype(name)]
