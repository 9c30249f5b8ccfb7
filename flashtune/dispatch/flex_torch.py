"""PyTorch's own flex_attention, which serves what kernels can't."""

from typing import Any

import torch
from torch import Tensor

from flashtune.core.torch_attention import compiled_flex


def torchs(query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, *others: Any) -> Any:
    """PyTorch's own function, compiled on a GPU."""
    from torch.nn.attention import flex_attention as module

    if block_mask is not None and not isinstance(block_mask, module.BlockMask):
        block_mask = module.create_block_mask(block_mask, query.shape[0], query.shape[1], query.shape[2], key.shape[2], device=query.device)
    scale, enable_gqa, return_lse, kernel_options, return_aux = others
    compiles = not torch.compiler.is_compiling() and isinstance(query, Tensor) and query.is_cuda
    function: Any = compiled_flex(dynamic=None) if compiles else module.flex_attention
    # Versions of torch before 2.9 don't have it.
    more = {} if return_aux is None else {"return_aux": return_aux}
    return function(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **more)
