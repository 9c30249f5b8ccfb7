"""Entry points to `flashtune.dispatch.attention` for code that calls PyTorch's attention.

`torchs_place` swaps PyTorch's function for a while, in one thread; `transformers` and `diffusers` are for those libraries, and
`implementation` runs the calls of a whole process by torch.nn.attention.activate_flash_attention_impl("FLASHTUNE"). None of them is
imported before it is used, and an import swaps nothing.
"""

from flashtune.integrations.swap import torchs_place

__all__ = ["torchs_place"]
