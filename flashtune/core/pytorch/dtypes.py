"""PyTorch's element types, apart from `flashtune.core.problems.dtypes` so that its users needn't import PyTorch."""

import torch

from flashtune.core.problems.dtypes import DType, output_dtype

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
"""PyTorch's types of kernels' element types."""

KERNEL_DTYPES: dict[torch.dtype, DType] = {kind: name for name, kind in TORCH_DTYPES.items()}
"""The inverse; float64 is in neither, since PyTorch serves it."""


def output_torch_dtype(dtype: torch.dtype) -> torch.dtype:
    """`flashtune.core.problems.dtypes.output_dtype` for PyTorch's types; the type itself where no kernel takes it."""
    name = KERNEL_DTYPES.get(dtype)
    return dtype if name is None else TORCH_DTYPES[output_dtype(name)]
