"""Torch's own attention, whatever stands in its place in torch.nn.functional by now."""

import torch

sdpa = torch._C._nn.scaled_dot_product_attention
"""What torch.nn.functional binds at its import. `F.scaled_dot_product_attention = dispatch.attention` leaves this one alone, even before
flashtune is imported; looked up there at each call, or at import, attention would call itself."""
