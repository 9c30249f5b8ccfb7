"""A block of a diffusion transformer, as others wrote it, run by tuned kernels: `torchs_place()` leaves the model's code as it is."""

import torch
import torch.nn.functional as F
from torch import nn

from flashtune import dispatch
from flashtune.integrations import torchs_place


class Block(nn.Module):
    """Self-attention and a feed-forward, both scaled and shifted by the noise level (Peebles and Xie, "Scalable Diffusion Models with
    Transformers", 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """x (B, N, width), noise (B, width)."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(F.silu(noise))[:, None].chunk(6, -1)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.feed(F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
block = Block(width=128, heads=2).to(device)
patches, noise = torch.randn(2, 256, 128, device=device), torch.randn(2, 128, device=device)

with torch.no_grad():
    wanted = block(patches, noise)
    with torchs_place():
        found = block(patches, noise)
torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)

q = torch.randn(2, 2, 256, 64, device=device)
print(dispatch.explain(q, q, q).reason)
