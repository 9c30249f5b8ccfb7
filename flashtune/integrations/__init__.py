"""Entry points to `flashtune.dispatch.attention` for code that calls PyTorch's attention.

`torchs_place` swaps PyTorch's function for a while, in one thread; `transformers`, `diffusers` and `torch_registry` are for those
libraries. None of them is imported before it is used, and nothing is swapped or registered by an import.
"""

from flashtune.integrations.swap import torchs_place

__all__ = ["torchs_place"]
