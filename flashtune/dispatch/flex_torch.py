"""PyTorch's own flex_attention, which serves what kernels can't."""

from typing import Any

import torch
from torch import Tensor

from flashtune.core.torch_attention import compiled_flex
from flashtune.dispatch import inspection
from flashtune.dispatch.context import current


def torchs(query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, *others: Any) -> Any:
    """PyTorch's own function, compiled on a GPU, there with tuned kernel options unless the caller gives some."""
    from torch.nn.attention import flex_attention as module

    block_mask = block_mask_of(block_mask, query, key)
    scale, enable_gqa, return_lse, kernel_options, return_aux = others
    # Versions of torch before 2.9 don't have it.
    more = {} if return_aux is None else {"return_aux": return_aux}
    words = (scale, enable_gqa, return_lse)
    # A compiler that traces this call can't look the context up.
    options = None if torch.compiler.is_compiling() or not isinstance(query, Tensor) else current().flex
    if options is None or query.device.type not in options.devices:
        return module.flex_attention(query, key, value, score_mod, block_mask, *words, kernel_options, **more)
    function: Any = compiled_flex(dynamic=None)
    if kernel_options is not None or not _plain(query, key, value):
        return function(query, key, value, score_mod, block_mask, *words, kernel_options, **more)
    run = lambda options, q, k, v: function(q, k, v, score_mod, block_mask, *words, options, **more)  # noqa: E731
    return options.run(run, query, key, value, block_mask, score_mod)


def _plain(*tensors: Any) -> bool:
    """True for tensors of no subclass, outside of transforms and modes: others are left to PyTorch as they are."""
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors) and not (
        torch._C._len_torch_dispatch_stack() or inspection.transformed()
    )


def block_mask_of(block_mask: Any, query: Any, key: Any) -> Any:
    """The BlockMask of a caller's BlockMask or mask_mod; None for None."""
    from torch.nn.attention import flex_attention as module

    if block_mask is None or isinstance(block_mask, module.BlockMask):
        return block_mask
    return module.create_block_mask(block_mask, query.shape[0], query.shape[1], query.shape[2], key.shape[2], device=query.device)


def options_note(query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, kernel_options: Any) -> str:
    """The origin of the kernel options of such a call, for explanations; empty where PyTorch's defaults serve."""
    options = current().flex
    if not isinstance(query, Tensor) or query.device.type not in options.devices or not _plain(query, key, value):
        return ""
    if kernel_options is not None:
        return "the caller's kernel options"
    return options.note(query, key, value, block_mask_of(block_mask, query, key), score_mod)
